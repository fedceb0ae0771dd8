"""``POST /v1/messages``: an Anthropic request to a ``Question``, pieces of the answer to blocks and events."""

import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ninfer_runtime.engine.sequence import FinishReason
from ninfer_runtime.serve import fields
from ninfer_runtime.serve.answering import Answers, Ending, Piece
from ninfer_runtime.serve.anthropic_blocks import conversation_of, read_tools, tool_choice_of
from ninfer_runtime.serve.errors import ApiError, Dialect, Problem
from ninfer_runtime.serve.exchange import AnswerResponse
from ninfer_runtime.serve.fields import Api, Values
from ninfer_runtime.serve.limits import read_json
from ninfer_runtime.serve.openai_words import schema_of
from ninfer_runtime.serve.question import Question, render, sampling_of, thinking_of
from ninfer_runtime.serve.sse import compact_json, named_frame
from ninfer_runtime.text.events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallFailed,
    ToolCallStart,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ninfer_runtime.serve.service import Service
    from ninfer_runtime.text.grammar import GrammarSpec

PING = named_frame("ping", '{"type":"ping"}')
_BY_LENGTH = (FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_CAPACITY)


def question_of(values: Values, api: Api = "messages") -> Question:
    """What the request asks; ApiError or RequestError for what it must not ask."""
    tools = read_tools(values.get("tools", []))
    choice, one_call = tool_choice_of(values.get("tool_choice"), tools)
    thinking, budget = _thinking(values.get("thinking"))
    output = values.get("output_config", {})
    asked = thinking_of({**values, "enable_thinking": thinking}, output.get("effort"))
    return Question(
        api=api,
        conversation=conversation_of(values.get("system"), values["messages"], tools),
        prompt_param="messages",
        thinking=asked.thinking,
        reasoning_effort=asked.reasoning_effort,
        effort_param="output_config.effort",
        preserve_thinking=asked.preserve_thinking,
        thinking_budget=budget,
        sampling=sampling_of(values),
        max_new=values.get("max_tokens"),
        stops=values.get("stop_sequences", ()),
        tool_choice=choice,
        one_call=one_call,
        grammar=_form(output),
        stream=values.get("stream", False),
        log_fields=values.get("metadata", {}),
    )


def add_routes(app: "FastAPI", service: "Service") -> None:
    """Answer, and count."""
    from fastapi import Request
    from fastapi.responses import JSONResponse, Response

    @app.post("/v1/messages", tags=["Anthropic"])
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        values = fields.read("messages", await read_json(request, service))
        question = question_of(values)
        return AnswerResponse(service, question, lambda answers: MessageWriter(values, answers), "anthropic")

    @app.post("/v1/messages/count_tokens", tags=["Anthropic"])
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of a request has."""
        values = fields.read("count_tokens", await read_json(request, service))
        (prompt,) = await service.in_thread(render, service, question_of(values, "count_tokens"))
        return JSONResponse({"input_tokens": len(prompt.token_ids)})


def _thinking(config: Values | None) -> tuple[bool | None, int | None]:
    """Whether to think, and for how many tokens; (None, None): as the server does."""
    if config is None:
        return None, None
    kind = config["type"]
    if kind != "enabled":
        if "budget_tokens" in config:
            raise ApiError(
                f"thinking.budget_tokens needs the type 'enabled', not {kind!r}", param="thinking.budget_tokens"
            )
        return kind != "disabled", None
    return True, config.get("budget_tokens")


def _form(output: Values) -> "GrammarSpec | None":
    if "format" not in output:
        return None
    from ninfer_runtime.text.grammar import JsonSchema

    return JsonSchema(schema_of(output["format"]["schema"], "output_config.format.schema"))


# ---- blocks --------------------------------------------------------------------------------------
def new_message_id() -> str:
    """``msg_`` and 24 hex digits."""
    return f"msg_{secrets.token_hex(12)}"


@dataclass(slots=True)
class _Block:
    """One block as it grows."""

    kind: str
    texts: list[str]
    call_id: str = ""
    name: str = ""

    def document(self) -> dict[str, Any]:
        """The block with all of its text."""
        text = "".join(self.texts)
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": ""}
            case "text":
                return {"type": "text", "text": text, "citations": None}
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": json.loads(text)}

    def start(self) -> dict[str, Any]:
        """The block as it is announced."""
        if self.kind == "tool_use":
            return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": {}}
        return _Block(self.kind, []).document()


class Blocks:
    """Blocks from events, and the stream events that say so.

    hides_thinking   thinking is announced, but its text is left out
    keeps_failed     a call that turned out not to be one has been announced; its block ends, and its text follows
    """

    def __init__(self, *, hides_thinking: bool = False, keeps_failed: bool = True) -> None:
        self.blocks: list[_Block] = []
        self._hides_thinking = hides_thinking
        self._keeps_failed = keeps_failed
        self._open: _Block | None = None
        self._named: _Block | None = None
        """A call whose input has not begun. It is announced with its input: without any, clients take it for {}."""

    def feed(self, events: Iterable[Event]) -> bytes:
        """Frames of these events."""
        frames: list[bytes] = []
        for event in events:
            match event:
                case ReasoningText(text):
                    self._ensure("thinking", frames)
                    if not self._hides_thinking:
                        self._delta(frames, text, {"type": "thinking_delta", "thinking": text})
                case ContentText(text):
                    self._ensure("text", frames)
                    self._delta(frames, text, {"type": "text_delta", "text": text})
                case ToolCallStart(_, call_id, name):
                    self._named = _Block("tool_use", [], "toolu_" + call_id.removeprefix("call_"), name)
                case ToolCallArguments(_, fragment):
                    if self._named is not None:
                        self._close(frames)
                        self._begin(self._named, frames)
                        self._named = None
                    self._delta(frames, fragment, {"type": "input_json_delta", "partial_json": fragment})
                case ToolCallEnd():
                    self._close(frames)
                case ToolCallFailed() if self._named is not None:
                    self._named = None
                case ToolCallFailed():
                    self._close(frames)
                    if not self._keeps_failed:
                        self.blocks.pop()
        return b"".join(frames)

    def end(self) -> bytes:
        """The end: an answer that says nothing still has one empty text block."""
        frames: list[bytes] = []
        if not any(block.kind != "thinking" for block in self.blocks):
            self._ensure("text", frames)
        self._close(frames)
        return b"".join(frames)

    def _ensure(self, kind: str, frames: list[bytes]) -> None:
        if self._open is None or self._open.kind != kind:
            self._close(frames)
            self._begin(_Block(kind, []), frames)

    def _begin(self, block: _Block, frames: list[bytes]) -> None:
        self.blocks.append(block)
        self._open = block
        frames.append(_frame("content_block_start", index=self._index, content_block=block.start()))

    def _delta(self, frames: list[bytes], text: str, delta: dict[str, Any]) -> None:
        assert self._open is not None
        self._open.texts.append(text)
        frames.append(_frame("content_block_delta", index=self._index, delta=delta))

    def _close(self, frames: list[bytes]) -> None:
        if self._open is None:
            return
        if self._open.kind == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            frames.append(_frame("content_block_delta", index=self._index, delta=signature))
        frames.append(_frame("content_block_stop", index=self._index))
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1


class MessageWriter:
    """A message's events, or the whole of it."""

    dialect: Dialect = "anthropic"
    keep_alive = PING
    is_pure = True

    def __init__(self, values: Values, answers: Answers, new_id: Callable[[], str] = new_message_id) -> None:
        self._model = values["model"]
        self._answers = answers
        self._id = new_id()
        self._ending: Ending | None = None
        hides = values.get("thinking", {}).get("display") == "omitted"
        self._blocks = Blocks(hides_thinking=hides, keeps_failed=answers.prepared.question.stream)

    def begin(self) -> bytes:
        """The message before there is any of it."""
        usage = {**self._usage(), "input_tokens": self._answers.prepared.n_prompt, "output_tokens": 0}
        return _frame("message_start", message=self._message([], None, None, usage)) + PING

    def feed(self, pieces: list[Piece]) -> bytes:
        """Events of these pieces."""
        return b"".join(map(self._grow, pieces))

    def end(self) -> bytes:
        """The end of the last block, why the message ended, and what it took."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        last = _frame("message_delta", delta=delta, usage=self._usage())
        return self._blocks.end() + last + _frame("message_stop")

    def failed(self, problem: Problem) -> bytes:
        """An error event ends the stream."""
        body = problem.body("anthropic", self._answers.request_id)
        return named_frame("error", compact_json(body))

    def document(self, pieces: list[Piece]) -> dict[str, Any]:
        """The message."""
        self.feed(pieces)
        self._blocks.end()
        content = [block.document() for block in self._blocks.blocks]
        return self._message(content, self._stop_reason, self._stop_sequence, self._usage())

    def _grow(self, piece: Piece) -> bytes:
        if piece.ending is not None:
            self._ending = piece.ending
        return self._blocks.feed(piece.events)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    @property
    def _stop_sequence(self) -> str | None:
        stop = self._ending.stop if self._ending is not None else None
        return stop.stop if stop is not None else None

    @property
    def _stop_reason(self) -> str:
        ending = self._ending
        if ending is None:
            return "end_turn"
        if ending.reason in _BY_LENGTH:
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if ending.has_calls else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Token counts: what was read from the cache is not among the input tokens."""
        usage = self._answers.usage
        return {
            "input_tokens": usage.n_prompt - usage.n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.n_cached,
            "output_tokens": usage.n_generated,
            "output_tokens_details": {"thinking_tokens": usage.n_reasoning},
            "service_tier": "standard",
        }


def _frame(name: str, **members: Any) -> bytes:
    return named_frame(name, compact_json({"type": name, **members}))
