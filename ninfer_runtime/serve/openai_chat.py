"""``POST /v1/chat/completions``: an OpenAI chat request to a ``Question``, pieces of the answer to its words."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ninfer_format.errors import MemberError
from ninfer_runtime.engine.asking import ToolChoice
from ninfer_runtime.serve.answering import Answers, Piece
from ninfer_runtime.serve.errors import ApiError, Dialect, Problem
from ninfer_runtime.serve.fields import Values
from ninfer_runtime.serve.kinds import shown
from ninfer_runtime.serve.openai_words import (
    fingerprint,
    finish_reason,
    grammar_of,
    logprob_entries,
    new_id,
    stop_text,
    usage_of,
)
from ninfer_runtime.serve.question import Question, log_fields_of, sampling_of, thinking_of
from ninfer_runtime.serve.reader import Drawn
from ninfer_runtime.serve.sse import DONE, KEEP_ALIVE, compact_json, data_frame
from ninfer_runtime.text.events import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallStart
from ninfer_runtime.text.messages import parse_conversation
from ninfer_runtime.text.stream import Reply, join

if TYPE_CHECKING:
    from ninfer_runtime.serve.service import Service

_REFUSED_MEMBERS: Mapping[str, str] = {
    "function_call": "use tool_calls",
    "audio": "this server writes text only",
    "refusal": "put the text into content",
}
_OTHER_PARTS = ("input_audio", "file", "audio_url")


def question_of(service: "Service", values: Values) -> Question:
    """What the request asks; ApiError or RequestError for what it must not ask."""
    service.check_model(values["model"])
    check_stream_options(values)
    if "top_logprobs" in values and not values.get("logprobs"):
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    tools = values.get("tools", [])
    asked = thinking_of(values, values.get("reasoning_effort"))
    budget = values.get("thinking_budget")
    return Question(
        api="chat",
        conversation=parse_conversation(chat_messages(values["messages"]), tools),
        thinking=False if budget == 0 else asked.thinking,
        reasoning_effort=asked.reasoning_effort,
        preserve_thinking=asked.preserve_thinking,
        thinking_budget=budget or None,
        sampling=sampling_of(values),
        max_new=values.get("max_completion_tokens", values.get("max_tokens")),
        min_new=values.get("min_tokens", 0),
        stops=values.get("stop", ()),
        include_stop=values.get("include_stop_str_in_output", False),
        stop_token_ids=stop_token_ids_of(values),
        ignore_eos=values.get("ignore_eos", False),
        n=values.get("n", 1),
        n_top_logprobs=values.get("top_logprobs", 0) if values.get("logprobs") else None,
        tool_choice=tool_choice_of(values.get("tool_choice"), tools),
        one_call=values.get("parallel_tool_calls") is False,
        grammar=grammar_of(values),
        cache_salt=values.get("cache_salt", ""),
        stream=values.get("stream", False),
        log_fields=log_fields_of(values),
    )


def check_stream_options(values: Values) -> None:
    """ApiError for stream_options without a stream."""
    if "stream_options" in values and not values.get("stream"):
        raise ApiError("stream_options needs stream: true", param="stream_options")


def stop_token_ids_of(values: Values) -> tuple[int, ...]:
    """``stop_token_ids``, a list of whole numbers."""
    ids = values.get("stop_token_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ApiError(f"stop_token_ids is {shown(ids)}, expected an array of token ids", param="stop_token_ids")
    return tuple(ids)


def chat_messages(messages: Sequence[Any]) -> list[Any]:
    """Chat messages as ``parse_conversation`` takes them: null members are not there, aliases have one name."""
    return [_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _chat_message(message: Any, place: str) -> Any:
    if not isinstance(message, dict):
        return message
    members = {name: value for name, value in message.items() if value is not None}
    for name, why in _REFUSED_MEMBERS.items():
        if name in members:
            raise MemberError(f"{place}.{name}", f"is not supported: {why}")
    role = members.get("role")
    if members.get("annotations") == []:
        del members["annotations"]
    if "name" in members:
        # A tool result repeats the name of its call; the template takes no names of people.
        if role != "tool":
            raise MemberError(f"{place}.name", "is not supported: say in the text who speaks")
        del members["name"]
    if role == "tool" and not members.get("tool_call_id"):
        raise MemberError(f"{place}.tool_call_id", "is missing, expected the id of the call this is the result of")
    if "reasoning" in members:
        members.setdefault("reasoning_content", members.pop("reasoning"))
    if "content" not in members and (role == "assistant" or "content" in message):
        members["content"] = None
    if role == "assistant" and members["content"] in (None, "", []) and not members.get("tool_calls"):
        raise MemberError(f"{place}.content", "is empty, expected text: there are no tool_calls either")
    for i, part in enumerate(members["content"] if isinstance(members.get("content"), list) else ()):
        if isinstance(part, dict) and part.get("type") in _OTHER_PARTS:
            raise ApiError(
                f"{place}.content[{i}] is {part['type']}, expected text",
                code="modality_not_supported",
                param=f"{place}.content[{i}]",
            )
    return members


def tool_choice_of(choice: Any, tools: Sequence[Any]) -> ToolChoice:
    """``none``, ``auto``, ``required``, or one function; ApiError where the tools do not allow it."""
    match choice:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            if choice == "required" and not tools:
                raise ApiError("tool_choice is 'required', but there are no tools", param="tool_choice")
            return ToolChoice(choice)
        case {"type": "function", "function": {"name": str(name), **more}, **rest} if not more and not rest:
            pass
        case {"type": "function", "name": str(name), **rest} if not rest:
            pass
        case _:
            raise ApiError(
                f"tool_choice is {shown(choice)}, expected 'none', 'auto', 'required' or "
                '{"type": "function", "function": {"name": …}}',
                code="tool_choice_not_supported",
                param="tool_choice",
            )
    offered = [tool.get("function", tool).get("name") for tool in tools if isinstance(tool, dict)]
    if name not in offered:
        raise ApiError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return ToolChoice("named", name)


class ChatWriter:
    """A chat completion's chunks, or the whole of it."""

    dialect: Dialect = "openai"
    keep_alive = KEEP_ALIVE
    is_pure = True

    def __init__(self, service: "Service", values: Values, answers: Answers) -> None:
        self._service = service
        self._answers = answers
        self._id = new_id("chatcmpl-")
        self._created = int(time.time())
        options = values.get("stream_options", {})
        self._with_usage = options.get("include_usage", False)
        self._always_usage = options.get("continuous_usage_stats", False)
        self._n = answers.prepared.question.n
        self._with_logprobs = answers.prepared.question.n_top_logprobs is not None
        self._undelivered: list[list[Drawn]] = [[] for _ in range(self._n)]
        head = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": service.facts.model_id,
            "system_fingerprint": fingerprint(service),
        }
        self._head = compact_json(head)[:-1] + ',"choices":['
        self._tail = '],"usage":null}' if self._with_usage and not self._always_usage else "]}"

    # ---- a stream ----------------------------------------------------------------------------
    def begin(self) -> bytes:
        """The role of every answer."""
        return b"".join(self._chunk(i, '{"role":"assistant","content":""}') for i in range(self._n))

    def feed(self, pieces: list[Piece]) -> bytes:
        """A chunk per event."""
        frames = []
        for piece in pieces:
            if piece.drawn:
                self._undelivered[piece.index] += piece.drawn
            for event in piece.events:
                if (delta := _delta(event)) is not None:
                    frames.append(self._chunk(piece.index, delta))
            if piece.ending is not None:
                more = f',"stop_reason":{compact_json(stop_text(piece.ending))}'
                frames.append(self._chunk(piece.index, "{}", finish_reason(piece.ending), more))
        return b"".join(frames)

    def end(self) -> bytes:
        """Usage if asked for, and the mark of the end."""
        if not self._with_usage:
            return DONE
        return data_frame(f'{self._head}],"usage":{compact_json(usage_of(self._answers))}}}') + DONE

    def failed(self, problem: Problem) -> bytes:
        """An error event ends the stream."""
        return data_frame(compact_json(problem.body("openai"))) + DONE

    def _chunk(self, index: int, delta: str, finish: str | None = None, more: str = "") -> bytes:
        reason = f'"{finish}"' if finish is not None else "null"
        if self._with_logprobs:
            more = f',"logprobs":{self._logprobs(index)}{more}'
        tail = self._tail
        if self._always_usage:
            tail = f'],"usage":{compact_json(usage_of(self._answers))}}}'
        return (
            f'data: {self._head}{{"index":{index},"delta":{delta},"finish_reason":{reason}{more}}}{tail}\n\n'
        ).encode()

    def _logprobs(self, index: int) -> str:
        drawn, self._undelivered[index] = self._undelivered[index], []
        entries = logprob_entries(self._service.frontend.tokenizer, drawn)
        return compact_json({"content": entries, "refusal": None}) if entries else "null"

    # ---- a whole answer ----------------------------------------------------------------------
    def document(self, pieces: list[Piece]) -> dict[str, Any]:
        """The chat completion."""
        by_index = sorted(pieces, key=lambda piece: piece.index)
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._service.facts.model_id,
            "system_fingerprint": fingerprint(self._service),
            "choices": [self._choice(piece) for piece in by_index],
            "usage": usage_of(self._answers),
        }

    def _choice(self, piece: Piece) -> dict[str, Any]:
        assert piece.ending is not None, "a whole answer has ended"
        logprobs = None
        if self._with_logprobs:
            entries = logprob_entries(self._service.frontend.tokenizer, piece.drawn)
            logprobs = {"content": entries, "refusal": None}
        return {
            "index": piece.index,
            "message": message_document(join(piece.events)),
            "logprobs": logprobs,
            "finish_reason": finish_reason(piece.ending),
            "stop_reason": stop_text(piece.ending),
        }


def message_document(reply: Reply) -> dict[str, Any]:
    """An assistant message; ``content`` is null when there are only calls."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


def _delta(event: Event) -> str | None:
    match event:
        case ContentText(text):
            return f'{{"content":{compact_json(text)}}}'
        case ReasoningText(text):
            return f'{{"reasoning_content":{compact_json(text)}}}'
        case ToolCallArguments(index, text):
            return f'{{"tool_calls":[{{"index":{index},"function":{{"arguments":{compact_json(text)}}}}}]}}'
        case ToolCallStart(index, call_id, name):
            function = compact_json({"name": name, "arguments": ""})
            return (
                f'{{"tool_calls":[{{"index":{index},"id":{compact_json(call_id)},"type":"function",'
                f'"function":{function}}}]}}'
            )
    return None
