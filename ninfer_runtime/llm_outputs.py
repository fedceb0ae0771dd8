"""What comes out of ``LLM``: whole answers, and pieces of answers that are still growing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ninfer_runtime.engine.asking import Asked
from ninfer_runtime.engine.sequence import Finish, FinishReason, TokenEvent
from ninfer_runtime.text.events import ContentText, Event, ReasoningText
from ninfer_runtime.text.stream import CompletedCall, join
from ninfer_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ninfer_runtime.engine.handle import Handle
    from ninfer_runtime.text.frontend import Prompt

FinishWord = Literal["stop", "length", "tool_calls", "abort"]

_WORDS: Mapping[FinishReason, FinishWord] = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.OUTPUT_LIMIT: "length",
    FinishReason.CONTEXT_CAPACITY: "length",
    FinishReason.CANCELLED: "abort",
}


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log probability, before bias, penalties, temperature and masks. ``rank`` counts from 1, the
    most likely; None: not among the most likely ones that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


Logprobs = tuple[Mapping[int, Logprob], ...]
"""Per token: the token itself and the most likely ones by id; empty for a token that was not drawn."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    text              without thinking, calls and the stop that ended it;  ``reasoning``: the thinking
    token_ids         all of them, the id that ended the answer included;  ``n_reasoning_tokens``: of thinking
    tool_calls        complete calls;  ``arguments`` is the text of one JSON object
    finish_reason     ``stop``, ``length``, ``tool_calls`` (a stop behind calls), ``abort``
    stop_reason       the stop text, or the one of ``stop_token_ids``, that ended it
    logprobs          per token id, if asked for;  ``cumulative_logprob``: of the drawn tokens
    finish            the engine's report: reason, seed, times, prefix reuse, drafting
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishWord
    stop_reason: str | int | None
    reasoning: str
    tool_calls: tuple[CompletedCall, ...]
    n_reasoning_tokens: int
    logprobs: Logprobs | None
    cumulative_logprob: float | None
    finish: Finish

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's turn, for the conversation that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt, ``n`` of them. ``prompt`` is None where ids were given."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first answer did not compute."""
        return self.outputs[0].finish.reuse.n_tokens


@dataclass(frozen=True, slots=True)
class StreamedOutput:
    """What one answer has said since its last piece.

    request_index, index   which prompt, which of its answers
    text, reasoning        more of either;  ``events`` are both and the calls, in order
    token_ids, logprobs    of the tokens that are new
    output                 the whole answer, in its last piece
    """

    request_index: int
    index: int
    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    logprobs: Logprobs | None
    events: tuple[Event, ...]
    output: CompletionOutput | None = None


class GrowingAnswer:
    """One answer on its way through the engine."""

    def __init__(
        self, request_index: int, index: int, prompt: "Prompt", asked: Asked, own_stops: frozenset[int]
    ) -> None:
        self.request_index = request_index
        self.index = index
        self.prompt = prompt
        self.asked = asked
        self.handle: Handle | None = None
        self.output: CompletionOutput | None = None
        self._own_stops = own_stops
        self._tokens: list[TokenEvent] = []
        self._events: list[Event] = []
        self._n_said = (0, 0)
        """Tokens and events of the pieces so far."""

    def take(self, tokenizer: Tokenizer) -> None:
        """Everything that is there already; ``output`` is set at the end. Raises what ended the request."""
        handle, reader = self.handle, self.asked.reader
        assert handle is not None, "the engine has it"
        while handle.has_news:
            token = next(handle, None)
            if token is None:
                self._events += reader.flush()
                assert handle.finish is not None, "an exhausted generation has finished"
                self.output = self._whole(tokenizer, handle.finish)
                return
            self._tokens.append(token)
        self._events += reader.take()

    def piece(self, tokenizer: Tokenizer) -> StreamedOutput:
        """What is new since the last piece."""
        n_tokens, n_events = self._n_said
        self._n_said = (len(self._tokens), len(self._events))
        tokens, events = self._tokens[n_tokens:], self._events[n_events:]
        return StreamedOutput(
            self.request_index,
            self.index,
            "".join(event.text for event in events if isinstance(event, ContentText)),
            "".join(event.text for event in events if isinstance(event, ReasoningText)),
            tuple(token.token_id for token in tokens),
            self._logprobs(tokenizer, tokens),
            tuple(events),
            self.output,
        )

    def _whole(self, tokenizer: Tokenizer, finish: Finish) -> CompletionOutput:
        reader, tokens = self.asked.reader, self._tokens
        reply, reason = join(self._events), reader.reason(finish.reason)
        word = _WORDS[reason]
        stop_reason: str | int | None = reply.stop.stop if reply.stop is not None else None
        if stop_reason is None and tokens and tokens[-1].token_id in self._own_stops and tokens[-1].is_stop:
            stop_reason = tokens[-1].token_id
        drawn = [token.logprob for token in tokens if token.logprob is not None]
        logprobs = self._logprobs(tokenizer, tokens)
        return CompletionOutput(
            index=self.index,
            text=reply.content,
            token_ids=tuple(token.token_id for token in tokens),
            finish_reason="tool_calls" if word == "stop" and reply.tool_calls else word,
            stop_reason=stop_reason,
            reasoning=reply.reasoning,
            tool_calls=reply.tool_calls,
            n_reasoning_tokens=reader.n_reasoning_tokens,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(drawn),
            finish=finish,
        )

    def _logprobs(self, tokenizer: Tokenizer, tokens: Sequence[TokenEvent]) -> Logprobs | None:
        if self.asked.request.n_top_logprobs is None:
            return None
        return tuple(logprobs_of(tokenizer, token) for token in tokens)


def logprobs_of(tokenizer: Tokenizer, token: TokenEvent) -> Mapping[int, Logprob]:
    """The token's own and the most likely ones', its own first."""
    if token.logprob is None:
        return {}
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top_logprobs, 1)}
    pairs = ((token.token_id, token.logprob), *token.top_logprobs)
    return {
        token_id: Logprob(value, ranks.get(token_id), tokenizer.token_bytes(token_id).decode("utf-8", "replace"))
        for token_id, value in dict(pairs).items()
    }
