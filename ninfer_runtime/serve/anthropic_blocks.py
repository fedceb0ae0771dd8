"""Anthropic turns and blocks, read from a request, as the conversation they are."""

from collections.abc import Sequence
from typing import Any

from ninfer_format.errors import MemberError, VisionDisabledError
from ninfer_runtime.engine.asking import ToolChoice
from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.fields import Values, read_rows
from ninfer_runtime.serve.item_fields import BLOCKS, BLOCKS_OF_ROLE, MEDIA_BLOCKS, TEXT_BLOCK, TOOL, TURN, read_typed
from ninfer_runtime.serve.kinds import wrong
from ninfer_runtime.serve.responses_items import add_tool
from ninfer_runtime.text.messages import Conversation, Message, ToolCall, normalise

ERROR_MARK = "Error: "
"""In front of a tool result that its client calls an error."""


def conversation_of(system: Any, turns: Sequence[Any], tools: Sequence[dict[str, Any]]) -> Conversation:
    """``system`` first, then the turns; ApiError or RequestError naming what is wrong."""
    messages: list[Message] = []
    if system is not None and (text := _system_text(system)):
        messages.append(Message("system", text))
    for i, turn in enumerate(turns):
        place = f"messages[{i}]"
        values = read_rows(TURN, turn, place) if isinstance(turn, dict) else _refuse(turn, place)
        messages += _messages(values["role"], values["content"], f"{place}.content")
    if messages[-1].role == "assistant":
        place = f"messages[{len(turns) - 1}]"
        raise MemberError(
            place, "is the assistant's; the conversation must end with another turn, answers have no prefill"
        )
    return Conversation(tuple(normalise(messages)), tuple(tools))


def _refuse(turn: Any, place: str) -> Values:
    raise wrong(place, turn, "an object")


def _system_text(system: Any) -> str:
    if isinstance(system, str):
        return system
    if not isinstance(system, list):
        raise wrong("system", system, "a string or an array of text blocks")
    blocks = (read_typed({"text": TEXT_BLOCK}, block, f"system[{i}]") for i, block in enumerate(system))
    return "\n".join(block["text"] for block in blocks)


def _messages(role: str, content: Any, place: str) -> list[Message]:
    """One turn as messages: results of tools in front of what the user says."""
    blocks = _read_blocks(role, content, place)
    if role == "assistant":
        return [_assistant(blocks)]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    text = "\n".join(texts)
    if role == "system":
        return [Message("system", text)] if text else []
    results = [_result(block) for block in blocks if block["type"] == "tool_result"]
    if not text and (texts or not results):
        raise MemberError(place, "is empty, expected text: a user's turn says something")
    return [*results, *([Message("user", text)] if text else [])]


def _read_blocks(role: str, content: Any, place: str) -> list[Values]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(place, content, "a string or an array of blocks")
    allowed = {name: rows for name, rows in BLOCKS.items() if name in BLOCKS_OF_ROLE[role]}
    blocks = []
    for i, block in enumerate(content):
        inner = f"{place}[{i}]"
        _refuse_media(block, inner)
        values = read_typed(allowed, block, inner)
        if values["type"] == "tool_result":
            values = {**values, "content": _result_text(values.get("content"), f"{inner}.content")}
        if values["type"] == "tool_use" and not isinstance(values["input"], dict):
            raise wrong(f"{inner}.input", values["input"], "an object")
        blocks.append(values)
    return blocks


def _refuse_media(block: Any, place: str) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in MEDIA_BLOCKS:
        raise VisionDisabledError(place, f"is of type {kind!r}, but this server runs text only; send its text")


def _result_text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(place, content, "a string or an array of text blocks")
    texts = []
    for i, block in enumerate(content):
        _refuse_media(block, f"{place}[{i}]")
        texts.append(read_typed({"text": TEXT_BLOCK}, block, f"{place}[{i}]")["text"])
    return "\n".join(texts)


def _result(block: Values) -> Message:
    text: str = block["content"]
    if block.get("is_error") and not text.lower().startswith("error"):
        text = ERROR_MARK + text
    return Message("tool", text, tool_call_id=block["tool_use_id"])


def _assistant(blocks: Sequence[Values]) -> Message:
    """Texts as they follow each other, thinking apart, calls behind."""
    thinking = "\n\n".join(block["thinking"] for block in blocks if block["type"] == "thinking" and block["thinking"])
    calls = (ToolCall(block["name"], block["input"], block["id"]) for block in blocks if block["type"] == "tool_use")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return Message("assistant", text, thinking or None, tuple(calls))


def read_tools(definitions: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Tools as chat templates take them."""
    tools: list[dict[str, Any]] = []
    names: set[str] = set()
    for i, given in enumerate(definitions):
        place = f"tools[{i}]"
        if not isinstance(given, dict):
            raise wrong(place, given, "an object")
        if (kind := given.get("type")) not in (None, "custom"):
            raise ApiError(
                f"{place}.type is {kind!r}; this server runs no tools of its own",
                code="tool_type_not_supported",
                param=f"{place}.type",
            )
        values = read_rows(TOOL, given, place)
        add_tool(tools, names, place, values, values["input_schema"])
    return tuple(tools)


def tool_choice_of(choice: Values | None, tools: Sequence[dict[str, Any]]) -> tuple[ToolChoice, bool]:
    """The choice, and whether the answer ends after its first call."""
    if choice is None:
        return ToolChoice(), False
    kind, one_call = choice["type"], bool(choice.get("disable_parallel_tool_use"))
    if kind == "tool":
        if "name" not in choice:
            raise ApiError("tool_choice.name is missing", code="missing_parameter", param="tool_choice.name")
        if choice["name"] not in {tool["function"]["name"] for tool in tools}:
            raise MemberError("tool_choice.name", f"is {choice['name']!r}, which is not among the tools")
        return ToolChoice("named", choice["name"]), one_call
    if "name" in choice:
        raise MemberError("tool_choice.name", f"needs the type 'tool', not {kind!r}")
    if kind == "any":
        if not tools:
            raise MemberError("tool_choice.type", "is 'any', but there are no tools")
        return ToolChoice("required"), one_call
    return ToolChoice("none" if kind == "none" else "auto"), one_call
