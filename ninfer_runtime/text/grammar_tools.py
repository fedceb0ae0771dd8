"""The tool calls of the family as a Lark grammar: what ``tool_calls.py`` reads, and nothing else.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Declared parameters stand in the order of their schema, required ones always, others or none. A value that may only be
a string is free text up to the closing tag; one that may be no string is JSON of its schema. Keywords that a grammar
cannot follow are let go: a call is worth more than its refusal.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ninfer_format.errors import RequestError
from ninfer_runtime.text.tool_calls import (
    CALL_CLOSE,
    CALL_OPEN,
    FUNCTION_CLOSE,
    FUNCTION_OPEN,
    MAX_KEY_CHARS,
    PARAMETER_CLOSE,
    PARAMETER_OPEN,
    Tool,
)
from ninfer_runtime.text.tool_values import resolve, value_json

MAX_ALTERNATIVES = 64
MAX_DEPTH = 6
_DEFINITIONS = ("$defs", "definitions")


def tool_call_lark(
    tools: Sequence[Tool],
    tag: Callable[[str], str],
    whitespace: str,
    *,
    name: str | None = None,
    required: bool = True,
    parallel: bool = True,
) -> str:
    """The grammar; ``tag`` says a tag in a rule, ``whitespace`` is the pattern between JSON tokens.

    RequestError without tools, for a ``name`` that is not offered, and for a required parameter that no call can name.
    """
    offered = [tool for tool in tools if name is None or tool.name == name]
    if not offered:
        raise RequestError(f"the function {name!r} is not among the tools" if tools else "a call needs tools")
    names = [tool.name for tool in tools]
    calls = 'call ("\\n" call)*' if parallel and name is None else "call"
    start = calls if required else f"TEXT? ({calls})?"
    lines = [
        "%llguidance {}",
        f"start: {start}",
        f'call: {tag(CALL_OPEN)} "\\n{FUNCTION_OPEN}" function "{FUNCTION_CLOSE}\\n" {tag(CALL_CLOSE)}',
        "function: " + " | ".join(f"f{i}" for i in range(len(offered))),
    ]
    if not required:
        lines.append(f"TEXT: /(?s:.+)/ & ~/(?s:.*){_pattern(CALL_OPEN)}(?s:.*)/")
    for i, tool in enumerate(offered):
        lines += _function(f"f{i}", tool, names, whitespace)
    return "\n".join(lines) + "\n"


def _function(rule: str, tool: Tool, names: Sequence[str], whitespace: str) -> Iterator[str]:
    properties = tool.parameters.get("properties")
    declared = properties if isinstance(properties, Mapping) else {}
    listed = tool.parameters.get("required")
    required = {key for key in listed if isinstance(key, str)} if isinstance(listed, list) else set()
    if missing := sorted(required - declared.keys()):
        raise RequestError(f"the function {tool.name!r} requires {missing[0]!r}, which its parameters do not declare")
    parts = [_literal(f"{tool.name}>\n")]
    rules: list[str] = []
    for i, (key, schema) in enumerate(declared.items()):
        if not key or ">" in key or "\n" in key or len(key) > MAX_KEY_CHARS:
            if key in required:
                raise RequestError(f"the function {tool.name!r} requires {key!r}, which no call can name")
            continue
        inner = f"{rule}p{i}"
        begin = _literal(f"{PARAMETER_OPEN}{key}>\n")
        parts.append(f"{begin} {inner}" if key in required else f"({begin} {inner})?")
        rules += _value(inner, tool, key, schema, names, whitespace)
    yield f"{rule}: {' '.join(parts)}"
    yield from rules


def _value(rule: str, tool: Tool, key: str, schema: Any, names: Sequence[str], whitespace: str) -> Iterator[str]:
    """The rules of one value with its closing tag and the newline behind it."""
    types, close = tool.types_of(key), _literal(f"\n{PARAMETER_CLOSE}\n")
    options = list(_options(schema, tool.parameters, 0))
    texts = [text for option in options if (text := _listed(option, types)) is not None]
    if texts and len(texts) == len(options):
        readable = [text for group in texts for text in group]
        if readable:
            yield f"{rule}: ({' | '.join(map(_literal, dict.fromkeys(readable)))}) {close}"
            return
    if not types or "string" in types:
        low, high = _lengths(options) if types == {"string"} else (0, None)
        yield f"{rule}[lazy]: {rule.upper()}"
        yield from _free_text(rule.upper(), tool, names, low, high)
        return
    document = {**schema, "x-guidance": {"whitespace_pattern": whitespace, "lenient": True}}
    for name in _DEFINITIONS:
        if isinstance(kept := tool.parameters.get(name), Mapping):
            document[name] = {**kept, **document.get(name, {})}
    yield f"{rule}: %json {json.dumps(document, ensure_ascii=False)} {close}"


def _free_text(name: str, tool: Tool, names: Sequence[str], low: int, high: int | None) -> Iterator[str]:
    """A terminal up to and with the first closing tag, without anything that would break the call around it."""
    declared = "|".join(map(_pattern, sorted(tool.declared)))
    functions = "|".join(map(_pattern, names))
    breaking = [
        rf"{_pattern(PARAMETER_CLOSE)}\s*({_pattern(PARAMETER_OPEN)}|{_pattern(FUNCTION_CLOSE)})",
        rf"{_pattern(FUNCTION_CLOSE)}\s*{_pattern(CALL_CLOSE)}",
        rf"{_pattern(CALL_OPEN)}\s*{_pattern(FUNCTION_OPEN)}({functions})>",
        rf"{_pattern(PARAMETER_OPEN)}({declared})>",
    ]
    text = "(?s:.*)" if high is None and low == 0 else f"(?s:.{{{low},{'' if high is None else high}}})"
    yield f"{name}: /{text}\\n{_pattern(PARAMETER_CLOSE)}\\n/ & ~/(?s:.*)({'|'.join(breaking)})(?s:.*)/"


def _options(schema: Any, definitions: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """The alternatives of a schema: references followed, ``anyOf`` and ``oneOf`` opened up."""
    if not isinstance(schema, Mapping):
        yield {}
        return
    inner: Any = None
    if depth < MAX_DEPTH and "enum" not in schema and "const" not in schema:
        named = [resolve(schema["$ref"], definitions)] if "$ref" in schema else schema.get("allOf")
        inner = named if isinstance(named, list) and len(named) == 1 else schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(inner, list) or not inner:
        yield schema
    for branch in inner if isinstance(inner, list) else ():
        yield from _options(branch, definitions, depth + 1)


def _listed(schema: Mapping[str, Any], types: frozenset[str]) -> list[str] | None:
    """The texts of an ``enum``, a ``const`` or of null; None for a schema that lists no values.

    A value whose text would be read as something else, or breaks the call, is left out.
    """
    if isinstance(schema.get("enum"), list):
        values = schema["enum"]
    elif "const" in schema:
        values = [schema["const"]]
    elif schema.get("type") == "null":
        values = [None]
    else:
        return None
    if len(values) > MAX_ALTERNATIVES:
        return None
    texts = [value if isinstance(value, str) else _json(value) for value in values]
    pairs = zip(values, texts, strict=True)
    return [text for value, text in pairs if "<" not in text and value_json(text, types) == _json(value)]


def _lengths(options: Sequence[Mapping[str, Any]]) -> tuple[int, int | None]:
    """Bounds of a string's length that hold for one plain string schema."""
    if len(options) != 1:
        return 0, None
    low, high = options[0].get("minLength"), options[0].get("maxLength")
    least = low if isinstance(low, int) and low > 0 else 0
    return least, high if isinstance(high, int) and high >= least else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _literal(text: str) -> str:
    return _json(text)


def _pattern(text: str) -> str:
    """A regular expression of exactly ``text`` between two slashes."""
    return re.escape(text).replace("/", r"\/")
