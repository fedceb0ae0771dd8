"""Rows of what stands inside the arrays of a request: Responses items, parts and tools, Anthropic messages and blocks.

Read as the fields of ``fields.py`` are: a member has a row and does something, or is refused by its name.
"""

from collections.abc import Mapping

from ninfer_runtime.serve.fields import Field, Members, Values, offered, read_rows, refused
from ninfer_runtime.serve.kinds import ANYTHING, Array, Boolean, Free, OneOf, String, wrong

MAX_ID_CHARS = 256
MAX_NAME_CHARS = 128

_TEXT = Free({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]})
_OBJECT = Free({"type": "object"})
_ID = String(1, MAX_ID_CHARS)
_NAME = String(1, MAX_NAME_CHARS)
_STATUS = offered("status", OneOf(("in_progress", "completed", "incomplete")))
_NO_PROGRAMS = "the server runs no programs"

# ---- Responses ----------------------------------------------------------------------------------
MESSAGE_ITEM = (
    offered("type", OneOf(("message",))),
    offered("id", _ID),
    offered("role", OneOf(("user", "assistant", "system", "developer")), required=True),
    offered("content", _TEXT),
    _STATUS,
    refused("phase", "answers have no phases"),
)
REASONING_ITEM = (
    offered("type", OneOf(("reasoning",)), required=True),
    offered("id", _ID),
    refused("summary", "thinking is replayed whole, in content", [], code="reasoning_option_not_supported"),
    offered("content", Array(items="parts")),
    refused("encrypted_content", "thinking is replayed whole, in content", code="reasoning_option_not_supported"),
    _STATUS,
)
CALL_ITEM = (
    offered("type", OneOf(("function_call",)), required=True),
    offered("id", _ID),
    offered("call_id", _ID, required=True),
    offered("name", _NAME, required=True),
    offered("arguments", String(), required=True),
    _STATUS,
    refused("namespace", "functions have no namespaces"),
    refused("caller", _NO_PROGRAMS, {"type": "direct"}),
    refused("async", "calls are answered in their turn", False),
)
RESULT_ITEM = (
    offered("type", OneOf(("function_call_output",)), required=True),
    offered("id", _ID),
    offered("call_id", _ID, required=True),
    offered("output", _TEXT, required=True),
    _STATUS,
    offered("name", _NAME),
    refused("namespace", "functions have no namespaces"),
    refused("caller", _NO_PROGRAMS, {"type": "direct"}),
)
ITEMS: Mapping[str, tuple[Field, ...]] = {
    "message": MESSAGE_ITEM,
    "reasoning": REASONING_ITEM,
    "function_call": CALL_ITEM,
    "function_call_output": RESULT_ITEM,
}

INPUT_TEXT = (
    offered("type", OneOf(("input_text",)), required=True),
    offered("text", String(), required=True),
    offered("prompt_cache_breakpoint", _OBJECT, "Prefixes are always cached."),
)
OUTPUT_TEXT = (
    offered("type", OneOf(("output_text",)), required=True),
    offered("text", String(), required=True),
    refused("annotations", "texts have none", []),
    offered("logprobs", Array(items="tokens"), "Those of an earlier answer; they say nothing to the model."),
)
REASONING_TEXT = (
    offered("type", OneOf(("reasoning_text",)), required=True),
    offered("text", String(), required=True),
)
PARTS: Mapping[str, tuple[Field, ...]] = {
    "input_text": INPUT_TEXT,
    "output_text": OUTPUT_TEXT,
    "reasoning_text": REASONING_TEXT,
}
MEDIA_PARTS = ("input_image", "input_video", "image", "image_url", "video", "video_url")

FLAT_TOOL = (
    offered("type", OneOf(("function",)), required=True),
    offered("name", String(1, 64), required=True),
    offered("description", String()),
    offered("parameters", _OBJECT),
    offered("strict", Boolean(), "true: arguments follow the schema."),
    refused("defer_loading", "all functions are in the prompt", False),
    refused("allowed_callers", _NO_PROGRAMS, ["direct"]),
    refused("output_schema", "results are read as text"),
    refused("async", "calls are answered in their turn", False),
)

# ---- Anthropic ----------------------------------------------------------------------------------
_CACHE_CONTROL = offered(
    "cache_control",
    Members((offered("type", OneOf(("ephemeral",)), required=True), offered("ttl", OneOf(("5m", "1h"))))),
    "Prefixes are always cached.",
)
_TOOLSET = refused("toolset_name", "there are no toolsets")

TURN = (
    offered("role", OneOf(("user", "assistant", "system")), required=True),
    offered("content", ANYTHING, required=True),
)
TEXT_BLOCK = (
    offered("type", OneOf(("text",)), required=True),
    offered("text", String(), required=True),
    _CACHE_CONTROL,
    refused("citations", "texts have none", []),
)
THINKING_BLOCK = (
    offered("type", OneOf(("thinking",)), required=True),
    offered("thinking", String(), required=True),
    offered("signature", String(), "Any: thinking is not signed here."),
)
REDACTED_BLOCK = (
    offered("type", OneOf(("redacted_thinking",)), required=True),
    offered("data", String(), "Left out of the prompt: only its author can read it."),
)
USE_BLOCK = (
    offered("type", OneOf(("tool_use",)), required=True),
    offered("id", _ID, required=True),
    offered("name", _NAME, required=True),
    offered("input", _OBJECT, required=True),
    _CACHE_CONTROL,
    refused("caller", _NO_PROGRAMS, {"type": "direct"}),
    _TOOLSET,
)
RESULT_BLOCK = (
    offered("type", OneOf(("tool_result",)), required=True),
    offered("tool_use_id", _ID, required=True),
    offered("content", _TEXT),
    offered("is_error", Boolean(), "The result is shown to the model as an error."),
    _CACHE_CONTROL,
    _TOOLSET,
)
BLOCKS: Mapping[str, tuple[Field, ...]] = {
    "text": TEXT_BLOCK,
    "thinking": THINKING_BLOCK,
    "redacted_thinking": REDACTED_BLOCK,
    "tool_use": USE_BLOCK,
    "tool_result": RESULT_BLOCK,
}
BLOCKS_OF_ROLE: Mapping[str, frozenset[str]] = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
    "system": frozenset({"text"}),
}
MEDIA_BLOCKS = ("image", "video")

TOOL = (
    offered("type", OneOf(("custom",))),
    offered("name", _NAME, required=True),
    offered("description", String()),
    offered("input_schema", _OBJECT, required=True),
    offered("strict", Boolean(), "true: arguments follow the schema."),
    offered("eager_input_streaming", Boolean(), "Arguments always stream as they are written."),
    _CACHE_CONTROL,
    refused("defer_loading", "all functions are in the prompt", False),
    refused("allowed_callers", _NO_PROGRAMS, ["direct"]),
    refused("input_examples", "put them into the description", []),
)


def read_typed(kinds: Mapping[str, tuple[Field, ...]], value: object, place: str, default: str | None = None) -> Values:
    """An object whose ``type`` names its rows; ``default`` is the type of one that names none."""
    if not isinstance(value, dict):
        raise wrong(place, value, "an object")
    kind = value.get("type", default)
    if not isinstance(kind, str) or kind not in kinds:
        words = ", ".join(map(repr, kinds))
        raise wrong(f"{place}.type", kind, f"one of {words}")
    return {**read_rows(kinds[kind], value, place), "type": kind}
