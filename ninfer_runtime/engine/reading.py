"""Reading an answer while it is generated: events for whoever shows it, verdicts for the engine.

The command line, the Python API and the server read through the same reader; what they differ in is who takes the
events and when.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ninfer_format.errors import RequestError
from ninfer_runtime.engine.sequence import FinishReason, Forced, Verdict
from ninfer_runtime.text.events import Event, StopHit, ToolCallEnd
from ninfer_runtime.text.reasoning import THINK_CLOSE
from ninfer_runtime.text.stream import TextStream
from ninfer_runtime.text.tokenizer import Tokenizer
from ninfer_runtime.text.tool_calls import new_call_id

if TYPE_CHECKING:
    from ninfer_runtime.text.frontend import Frontend, Prompt
    from ninfer_runtime.text.messages import Conversation

CLOSING_TEXT = f"\n{THINK_CLOSE}\n\n"
"""How the templates of the family end a thinking block."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How long an answer may think.

    limit        thinking tokens before the block is closed, at least 1 (``RequestError``)
    closing_ids  what is said then; it must close the block
    """

    limit: int
    closing_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise RequestError(
                f"the thinking budget is {self.limit!r}, expected at least 1 token; to have no thinking, switch it off"
            )

    @classmethod
    def of(cls, tokenizer: Tokenizer, limit: int, phrase: str = "") -> "ThinkingBudget":
        """A budget whose closing text is ``phrase``, a newline, the closing tag and a blank line."""
        if THINK_CLOSE in phrase:
            raise RequestError(f"the closing phrase {phrase!r} holds {THINK_CLOSE}, which is added after it")
        segments = tokenizer.split(CLOSING_TEXT)
        ids = tokenizer.encode_text(phrase) + tokenizer.encode_segments(segments)
        return cls(limit, tuple(ids))


class AnswerReader:
    """The engine's ``Reader`` around one answer's text stream.

    ``feed`` runs in the engine's worker; ``take`` in any one thread, also while the worker feeds. A thinking block that
    uses up its budget is closed once, at the end of a character; its closing tokens are thinking tokens like others.
    A block that ends by itself is left alone. With ``one_call`` the first complete tool call is the end.
    """

    def __init__(self, stream: TextStream, *, thinking: ThinkingBudget | None = None, one_call: bool = False) -> None:
        self._stream = stream
        self._thinking = thinking
        self._one_call = one_call
        self._events: deque[Event] = deque()

    @property
    def n_reasoning_tokens(self) -> int:
        """Tokens fed so far that belong to thinking, its closing tag included."""
        return self._stream.n_reasoning_tokens

    @property
    def stop(self) -> StopHit | None:
        """What ended the text, once something did."""
        return self._stream.stop

    @property
    def may_force(self) -> bool:
        """A budget is not spent, and the thinking goes on or may be taken up again beyond it."""
        budget, stream = self._thinking, self._stream
        return budget is not None and (stream.inside_reasoning or stream.n_reasoning_tokens >= budget.limit)

    def feed(self, token_id: int) -> Verdict:
        """Read one token: its events wait to be taken."""
        events = self._stream.feed([token_id])
        self._events.extend(events)
        if self._stream.stop is not None:
            return self.reason(FinishReason.STOP_TOKEN)
        if self._one_call and any(type(event) is ToolCallEnd for event in events):
            return FinishReason.STOP_TOKEN
        budget = self._thinking
        if budget is None or not self._stream.inside_reasoning or self._stream.inside_character:
            return None
        if self._stream.n_reasoning_tokens < budget.limit:
            return None
        self._thinking = None
        return Forced(budget.closing_ids)

    def take(self) -> list[Event]:
        """Events since the last take."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def flush(self) -> list[Event]:
        """The rest, once, after the last token: events not taken yet and what the stream still held."""
        return self.take() + self._stream.flush()

    def reason(self, reason: FinishReason) -> FinishReason:
        """Why the answer ended, given why the engine's sequence did: a stop that only the text shows comes first."""
        if self.stop is None or reason is FinishReason.CANCELLED:
            return reason
        return FinishReason.STOP_TOKEN if self.stop.stop is None else FinishReason.STOP_STRING


def choice_seeds(seed: int, n: int) -> list[int]:
    """Seeds of the ``n`` answers to one request: the first has the request's own, answer ``i`` the first 8 bytes of
    SHA-256 over the seed and ``i``, each as 8 bytes, all little-endian."""

    def derived(i: int) -> int:
        digest = hashlib.sha256(seed.to_bytes(8, "little") + i.to_bytes(8, "little")).digest()
        return int.from_bytes(digest[:8], "little")

    return [seed, *(derived(i) for i in range(1, n))][:n]


def reader_for(
    frontend: "Frontend",
    prompt: "Prompt",
    conversation: "Conversation",
    *,
    stops: Sequence[str] = (),
    reasoning_stops: Sequence[str] = (),
    include_stop: bool = False,
    raw: bool = False,
    tolerant_tool_calls: bool = False,
    one_call: bool = False,
    max_thinking: int | None = None,
    closing_phrase: str = "",
    call_id: Callable[[], str] = new_call_id,
) -> AnswerReader:
    """The reader of one answer to ``prompt``; RequestError for an empty stop string or a budget below 1.

    one_call        the first complete tool call ends the answer
    max_thinking    thinking tokens before the block is closed, None: no limit
    closing_phrase  said before the closing tag when that happens
    """
    if raw and max_thinking is not None:
        raise RequestError("raw output does not tell thinking apart; leave out the thinking budget")
    options = frontend.stream_options(prompt, conversation, stops=stops, reasoning_stops=reasoning_stops, raw=raw)
    options = replace(options, include_stop=include_stop, tolerant_tool_calls=tolerant_tool_calls)
    thinking = None
    if max_thinking is not None:
        thinking = ThinkingBudget.of(frontend.tokenizer, max_thinking, closing_phrase)
    return AnswerReader(frontend.stream(options, call_id), thinking=thinking, one_call=one_call)
