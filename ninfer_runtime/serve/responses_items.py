"""Items of the Responses API: read from a request, kept with ids, and as the conversation they are."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ninfer_format.errors import MemberError, VisionDisabledError
from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.fields import Values, read_rows
from ninfer_runtime.serve.item_fields import FLAT_TOOL, ITEMS, MEDIA_PARTS, PARTS, read_typed
from ninfer_runtime.serve.kinds import wrong
from ninfer_runtime.text.messages import Conversation, Message, ToolCall, normalise, parse_arguments

Item = dict[str, Any]
"""A stored item: JSON members, an id among them."""

PREFIX: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
PARTS_OF_ROLE: Mapping[str, frozenset[str]] = {
    "user": frozenset({"input_text"}),
    "system": frozenset({"input_text"}),
    "developer": frozenset({"input_text"}),
    "assistant": frozenset({"output_text", "input_text"}),
}


def new_id(prefix: str) -> str:
    """The prefix and 32 hex digits."""
    return f"{prefix}_{secrets.token_hex(16)}"


# ---- reading ------------------------------------------------------------------------------------
def read_input(value: Any, known_ids: Iterable[str] = ()) -> list[Item]:
    """Items of the ``input`` field, a text being one user message; every one has an id that ``known_ids`` lacks."""
    if isinstance(value, str):
        if not value:
            raise wrong("input", value, "text that is not empty, or items")
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", value, "a text or an array with at least one item")
    seen = set(known_ids)
    items = []
    for i, given in enumerate(value):
        item = _read_item(given, f"input[{i}]")
        if item["id"] in seen:
            raise ApiError(
                f"input[{i}].id {item['id']!r} stands twice", code="duplicate_item_id", param=f"input[{i}].id"
            )
        seen.add(item["id"])
        items.append(item)
    return items


def _read_item(given: Any, place: str) -> Item:
    values = read_typed(ITEMS, given, place, "message")
    kind = values["type"]
    item: Item = {
        "id": values.get("id") or new_id(PREFIX[kind]),
        "type": kind,
        "status": values.get("status", "completed"),
    }
    match kind:
        case "message":
            role = values["role"]
            content = _parts(values.get("content"), f"{place}.content", PARTS_OF_ROLE[role], role == "assistant")
            if role == "user" and not text_of(content):
                raise MemberError(f"{place}.content", "is empty, expected text: a user's turn says something")
            return {**item, "role": role, "content": content}
        case "reasoning":
            content = _parts(values.get("content", []), f"{place}.content", frozenset({"reasoning_text"}), False)
            return {**item, "summary": [], "content": content}
        case "function_call":
            if item["status"] == "completed":
                parse_arguments(values["arguments"], f"{place}.arguments")
            return {**item, **{name: values[name] for name in ("call_id", "name", "arguments")}}
    output = values["output"]
    if not isinstance(output, str):
        output = text_of(_parts(output, f"{place}.output", frozenset({"input_text", "output_text"}), False))
    return {**item, "call_id": values["call_id"], "output": output}


def _parts(content: Any, place: str, kinds: frozenset[str], is_output: bool) -> list[dict[str, Any]]:
    """Text parts of a message, of thinking or of a result; text alone is one part."""
    if content is None:
        return []
    if isinstance(content, str):
        return [_text_part(content, is_output)]
    if not isinstance(content, list):
        raise wrong(place, content, "a string or an array of parts")
    parts = []
    for i, part in enumerate(content):
        inner = f"{place}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA_PARTS:
            raise VisionDisabledError(inner, f"is of type {kind!r}, but this server runs text only; send its text")
        values = read_typed({name: PARTS[name] for name in PARTS if name in kinds}, part, inner)
        is_thinking = values["type"] == "reasoning_text"
        parts.append(
            {"type": "reasoning_text", "text": values["text"]} if is_thinking else _text_part(values["text"], is_output)
        )
    return parts


def _text_part(text: str, is_output: bool) -> dict[str, Any]:
    if is_output:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """The parts' texts, one under the other."""
    return "\n".join(part["text"] for part in parts)


def read_tools(definitions: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Flat function tools as chat templates take them."""
    tools: list[dict[str, Any]] = []
    names: set[str] = set()
    for i, given in enumerate(definitions):
        place = f"tools[{i}]"
        if isinstance(given, dict) and given.get("type") != "function":
            raise ApiError(
                f"{place}.type is {given.get('type')!r}; this server offers tools of the type 'function' only",
                code="tool_type_not_supported",
                param=f"{place}.type",
            )
        if not isinstance(given, dict):
            raise wrong(place, given, "an object")
        values = read_rows(FLAT_TOOL, given, place)
        add_tool(tools, names, place, values, values.get("parameters"))
    return tuple(tools)


def add_tool(tools: list[dict[str, Any]], names: set[str], place: str, values: Values, parameters: Any) -> None:
    """One more function, in the nested form; ApiError for a name that stands twice or a schema that is no object."""
    name = values["name"]
    if name in names:
        raise ApiError(f"{place}.name {name!r} stands twice", code="duplicate_tool", param=f"{place}.name")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{place}.parameters", parameters, "an object")
    names.add(name)
    function: dict[str, Any] = {"name": name}
    if "description" in values:
        function["description"] = values["description"]
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    if values.get("strict"):
        function["strict"] = True
    tools.append({"type": "function", "function": function})


# ---- as a conversation --------------------------------------------------------------------------
def conversation_of(
    instructions: str | None, items: Sequence[Item], tools: Sequence[Mapping[str, Any]]
) -> Conversation:
    """Instructions first, then the items: neighbouring thinking, text and calls of the assistant are one turn."""
    messages = [Message("system", instructions)] if instructions else []
    turn = _AssistantTurn(messages.append)
    for item in items:
        match item["type"]:
            case "reasoning":
                turn.think(text_of(item["content"]))
            case "function_call":
                if item["status"] == "completed":
                    turn.call(ToolCall(item["name"], parse_arguments(item["arguments"], "arguments"), item["call_id"]))
            case "message" if item["role"] == "assistant":
                turn.say(text_of(item["content"]))
            case "message":
                turn.end()
                role = "user" if item["role"] == "user" else "system"
                messages.append(Message(role, text_of(item["content"])))  # type: ignore[arg-type]
            case "function_call_output":
                turn.end()
                messages.append(Message("tool", item["output"], tool_call_id=item["call_id"]))
    turn.end()
    return Conversation(tuple(normalise(messages)), tuple(tools))


class _AssistantTurn:
    """Items of one assistant turn as they come. Text after calls belongs to the same turn, text after text does not."""

    def __init__(self, done: Callable[[Message], None]) -> None:
        self._done = done
        self._reset()

    def _reset(self) -> None:
        self._thinking: list[str] = []
        self._text: str | None = None
        self._calls: list[ToolCall] = []
        self._may_say_more = True

    def think(self, text: str) -> None:
        if self._text is not None or self._calls:
            self.end()
        self._thinking.append(text)

    def say(self, text: str) -> None:
        if not self._may_say_more:
            self.end()
        self._text = (self._text or "") + text
        self._may_say_more = False

    def call(self, call: ToolCall) -> None:
        self._calls.append(call)
        self._may_say_more = True

    def end(self) -> None:
        thinking = "\n\n".join(filter(None, self._thinking)) or None
        if thinking is not None or self._text is not None or self._calls:
            self._done(Message("assistant", self._text or "", thinking, tuple(self._calls)))
        self._reset()
