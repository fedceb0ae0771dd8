"""Conversations: message files, strictly read, and the form of them that chat templates take.

Normalised before any template sees them: developer is system, leading system turns are one, parts are one text, tool
arguments are mappings, thinking that stands in an assistant's content is its reasoning.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ninfer_format.errors import MemberError, RequestError, VisionDisabledError
from ninfer_runtime.text.json_input import parse_json
from ninfer_runtime.text.reasoning import THINK_CLOSE, THINK_OPEN

Role = Literal["system", "user", "assistant", "tool"]

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MESSAGE_KEYS = frozenset({"role", "content", "reasoning_content", "tool_calls", "tool_call_id"})
MEDIA_KEYS: Mapping[str, str] = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
TEXT_PART_KEYS = frozenset({"type", "text"})
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MAX_FILE_BYTES = 64 << 20

_LONE_CLOSE = re.compile(rf"(?:\A|\n){re.escape(THINK_CLOSE)}[ \t]*(?:\n|\Z)")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call an assistant made; ``arguments`` is the decoded JSON object."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, normalised: all text parts joined with newlines, absent content is ""."""

    role: Role
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The mapping a chat template works on; members that are not set are left out."""
        members: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            members["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            members["tool_calls"] = [
                {
                    **({"id": call.call_id} if call.call_id is not None else {}),
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            members["tool_call_id"] = self.tool_call_id
        return members


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, at least one, and the tools on offer as JSON function definitions."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of_prompt(cls, text: str) -> "Conversation":
        """One user message."""
        return cls((Message("user", text),))


def parse_message_file(document: bytes, place: str) -> Conversation:
    """A conversation from the bytes of a message file; RequestError names the member that is wrong."""
    if len(document) > MAX_FILE_BYTES:
        raise RequestError(f"{place} has {len(document)} bytes, expected at most {MAX_FILE_BYTES}")
    root = parse_json(document, place, RequestError)
    if isinstance(root, list):
        root = {"messages": root}
    if not isinstance(root, dict) or "messages" not in root:
        raise RequestError(f"{place} holds {_kind(root)}, expected an array of messages or an object with messages")
    _only(root, {"messages", "tools"}, place)
    return parse_conversation(root["messages"], root.get("tools", []))


def parse_conversation(messages: Any, tools: Any = ()) -> Conversation:
    """A normalised conversation from decoded JSON."""
    if not isinstance(messages, list) or not messages:
        raise MemberError("messages", f"is {_kind(messages)}, expected an array with at least one message")
    if not isinstance(tools, list | tuple):
        raise MemberError("tools", f"is {_kind(tools)}, expected an array of functions")
    for i, tool in enumerate(tools):
        _check_tool(tool, f"tools[{i}]")
    parsed = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return Conversation(tuple(normalise(parsed)), tuple(tools))


def normalise(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring system turns become one; an assistant's thinking moves out of its content; results of several calls
    follow in the order of the calls, which is all that a template shows of whose they are."""
    merged: list[Message] = []
    for message in messages:
        if message.role == "system" and merged and merged[-1].role == "system":
            texts = filter(None, (merged[-1].content, message.content))
            merged[-1] = replace(message, content="\n\n".join(texts))
            continue
        merged.append(_with_reasoning_apart(message) if message.role == "assistant" else message)
    return _with_results_in_order(merged)


def _with_results_in_order(messages: Sequence[Message]) -> list[Message]:
    ordered: list[Message] = []
    place_of: dict[str, int] = {}
    begin = 0  # of the results that stand last in ``ordered``
    for message in messages:
        if message.role != "tool":
            place_of = {call.call_id: i for i, call in enumerate(message.tool_calls) if call.call_id is not None}
            begin = len(ordered) + 1
        ordered.append(message)
        results = ordered[begin:]
        if len(results) > 1 and all(result.tool_call_id in place_of for result in results):
            ordered[begin:] = sorted(results, key=lambda result: place_of[result.tool_call_id or ""])
    return ordered


def _with_reasoning_apart(message: Message) -> Message:
    """An assistant turn whose content still has its thinking block, opened there or by the prompt before it."""
    if message.reasoning_content is not None:
        return message
    begin = message.content.lstrip()
    if begin.startswith(THINK_OPEN) and THINK_CLOSE in begin:
        thinking, _, answer = begin[len(THINK_OPEN) :].partition(THINK_CLOSE)
    elif (close := _LONE_CLOSE.search(message.content)) and THINK_OPEN not in message.content[: close.start()]:
        thinking, answer = message.content[: close.start()], message.content[close.end() :]
    else:
        return message
    return replace(message, content=answer.lstrip("\n"), reasoning_content=thinking.strip("\n"))


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise MemberError(place, f"is {_kind(message)}, expected an object")
    _only(message, MESSAGE_KEYS, place)
    for key in ("role", "content"):
        if key not in message:
            raise MemberError(place, f"has no {key}")
    role = ROLES.get(message["role"]) if isinstance(message["role"], str) else None
    if role is None:
        raise MemberError(f"{place}.role", f"is {message['role']!r}, expected one of {', '.join(ROLES)}")
    for key, owner in (("reasoning_content", "assistant"), ("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if key in message and role != owner:
            raise MemberError(place, f"has {key}, which belongs on {owner} messages only, not on {role}")
    content = _content(message["content"], f"{place}.content")
    if role == "user" and not content:
        raise MemberError(f"{place}.content", "is empty, expected text: a user's turn says something")
    return Message(
        role,
        content,
        _optional_string(message, "reasoning_content", place),
        _tool_calls(message["tool_calls"], f"{place}.tool_calls") if "tool_calls" in message else (),
        _optional_string(message, "tool_call_id", place),
    )


def _content(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise MemberError(place, f"is {_kind(content)}, expected a string, null or a non-empty array of parts")
    return "\n".join(_text_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _text_part(part: Any, place: str) -> str:
    if not isinstance(part, dict):
        raise MemberError(place, f"is {_kind(part)}, expected an object")
    declared = part.get("type")
    media = MEDIA_KEYS.get(declared) if isinstance(declared, str) else None
    media = media or next((kind for key, kind in MEDIA_KEYS.items() if key in part), None)
    if media is not None:
        raise VisionDisabledError(
            place, f"is {'an' if media == 'image' else 'a'} {media}, but this build runs text only; send its text"
        )
    if declared not in (None, "text") or "text" not in part:
        raise MemberError(place, f"has type {declared!r}, expected a text part with a text")
    _only(part, TEXT_PART_KEYS, place)
    if not isinstance(part["text"], str):
        raise MemberError(f"{place}.text", f"is {_kind(part['text'])}, expected a string")
    text: str = part["text"]
    return text


def _tool_calls(calls: Any, place: str) -> tuple[ToolCall, ...]:
    if not isinstance(calls, list) or not calls:
        raise MemberError(place, f"is {_kind(calls)}, expected a non-empty array of calls")
    return tuple(_tool_call(call, f"{place}[{i}]") for i, call in enumerate(calls))


def _tool_call(call: Any, place: str) -> ToolCall:
    """One call, nested ``{id?, type?, function: {name, arguments}}`` or flat ``{id?, type?, name, arguments}``."""
    if not isinstance(call, dict):
        raise MemberError(place, f"is {_kind(call)}, expected an object")
    if "function" in call:
        _only(call, {"id", "type", "function"}, place)
        function, inner = call["function"], f"{place}.function"
        if not isinstance(function, dict):
            raise MemberError(inner, f"is {_kind(function)}, expected an object")
        _only(function, {"name", "arguments"}, inner)
    else:
        _only(call, {"id", "type", "name", "arguments"}, place)
        function, inner = call, place
    if call.get("type", "function") != "function":
        raise MemberError(f"{place}.type", f"is {call['type']!r}, expected 'function'")
    for key in ("name", "arguments"):
        if key not in function:
            raise MemberError(inner, f"has no {key}")
    return ToolCall(
        _tool_name(function["name"], f"{inner}.name"),
        parse_arguments(function["arguments"], f"{inner}.arguments"),
        _optional_string(call, "id", place),
    )


def parse_arguments(arguments: Any, place: str) -> Mapping[str, Any]:
    """A call's arguments: an object, or text that holds one; MemberError naming ``place`` for anything else."""
    if isinstance(arguments, str):
        arguments = _json_of(arguments, place)
    if not isinstance(arguments, dict):
        raise MemberError(place, f"is {_kind(arguments)}, expected an object or a string that holds one")
    return arguments


def _json_of(text: str, place: str) -> Any:
    try:
        return parse_json(text, "", RequestError)
    except RequestError as error:
        raise MemberError(place, str(error).strip()) from None


def _check_tool(tool: Any, place: str) -> None:
    if not isinstance(tool, dict):
        raise MemberError(place, f"is {_kind(tool)}, expected an object")
    if tool.get("type", "function") != "function":
        raise MemberError(f"{place}.type", f"is {tool['type']!r}, expected 'function'")
    function = tool.get("function", tool)
    inner = f"{place}.function" if "function" in tool else place
    if not isinstance(function, dict):
        raise MemberError(inner, f"is {_kind(function)}, expected an object")
    _tool_name(function.get("name"), f"{inner}.name")
    if not isinstance(function.get("parameters", {}), dict):
        raise MemberError(f"{inner}.parameters", f"is {_kind(function['parameters'])}, expected an object")


def _tool_name(name: Any, place: str) -> str:
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise MemberError(place, f"is {name!r}, expected 1 to 128 letters, digits, '_', '-' or '.'")
    return name


def _optional_string(members: Mapping[str, Any], key: str, place: str) -> str | None:
    value = members.get(key)
    if value is not None and not isinstance(value, str):
        raise MemberError(f"{place}.{key}", f"is {_kind(value)}, expected a string")
    return value


def _only(members: Mapping[str, Any], allowed: frozenset[str] | set[str], place: str) -> None:
    if unknown := sorted(members.keys() - allowed):
        raise MemberError(place, f"has the member {unknown[0]!r}, expected only {', '.join(sorted(allowed))}")


def _kind(value: Any) -> str:
    """A JSON value in words."""
    match value:
        case None:
            return "null"
        case bool() | int() | float():
            return repr(value)
        case str():
            return "a string"
        case list():
            return "an array" if value else "an empty array"
    return "an object"
