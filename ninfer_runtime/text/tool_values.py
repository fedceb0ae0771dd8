"""Parameter text to JSON by the function's schema: strings stay verbatim, other types are read leniently.

The model writes strings as they are and everything else as JSON, sometimes in Python's spelling. Which of the two a
text is, only the schema can say.
"""

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_SCHEMA_DEPTH = 16
MAX_LITERAL_CHARS = 100_000

ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "array", "object", "string"})
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_INTEGER = re.compile(r"[+-]?[0-9]+")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORDS: Mapping[str, tuple[str, ...]] = {"null": ("null",), "boolean": ("true", "false")}
_LENIENT_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}
_PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}


def allowed_types(schema: Any, definitions: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types a schema allows; empty when it says nothing about types.

    Follows ``type`` (one or several), ``enum``, ``const``, ``anyOf``, ``oneOf``, ``allOf``, ``nullable`` and local
    ``$ref`` into ``definitions`` (the ``parameters`` object of the function).
    """
    return _types(schema, definitions, MAX_SCHEMA_DEPTH)


def _types(schema: Any, definitions: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    found: frozenset[str] | None = None
    for names in _constraints(schema, definitions, depth - 1):
        found = names if found is None else found & names or names
    if found and schema.get("nullable") is True:
        found |= {"null"}
    return found or frozenset()


def _constraints(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> Iterable[frozenset[str]]:
    """The non-empty type sets that the parts of one schema name; the value must satisfy each of them."""
    if (reference := schema.get("$ref")) is not None:
        yield from _some(_types(resolve(reference, definitions), definitions, depth))
    declared = schema.get("type")
    if isinstance(declared, str | list):
        names = {declared} if isinstance(declared, str) else {name for name in declared if isinstance(name, str)}
        yield from _some(frozenset(names & ALL_TYPES))
    elif isinstance(schema.get("enum"), list):
        yield from _some(frozenset(_type_of(value) for value in schema["enum"]))
    elif "const" in schema:
        yield frozenset({_type_of(schema["const"])})
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options:
            each = [_types(option, definitions, depth) for option in options]
            if all(each):  # an option without types allows everything
                yield frozenset().union(*each)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        yield from _some(_types(part, definitions, depth))


def _some(names: frozenset[str]) -> Iterable[frozenset[str]]:
    return (names,) if names else ()


def resolve(reference: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema a local reference (``#/$defs/…``) names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    node: Any = definitions
    for step in reference[2:].split("/"):
        if not isinstance(node, Mapping):
            return None
        node = node.get(step.replace("~1", "/").replace("~0", "~"))
    return node


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def value_json(text: str, types: frozenset[str]) -> str:
    """JSON text of a complete parameter value (framing newlines already gone).

    One type: read as that type, Python's spelling included. With ``string`` among several, or without any: JSON
    spelling of an allowed type, otherwise the text verbatim. What fits nothing stays a string: the call survives, and
    the tool can say what is wrong with it.
    """
    if types == {"string"}:
        return json_string(text)
    may_be_string = not types or "string" in types
    bare = text.strip()
    readers = [read for name, read in _LADDER.items() if not types or name in types]
    for strict in (True,) if may_be_string else (True, False):
        for read in readers:
            if (value := read(bare, strict)) is not None:
                return value
    if not may_be_string:
        other = _PYTHON_WORDS.get(bare) or _document(bare)
        if other is not None:
            return other
    return json_string(text)


def json_string(text: str) -> str:
    """A JSON string literal; joining the bodies of pieces gives the body of the whole."""
    return json.dumps(text, ensure_ascii=False)


def is_settled_string(prefix: str, types: frozenset[str]) -> bool:
    """Can a value of these types that begins with ``prefix`` only be a string? Then it may be streamed."""
    if types == {"string"}:
        return True
    if "string" not in types or types - {"string", *_WORDS}:
        return False
    start = prefix.lstrip()
    words = [word for name in types & set(_WORDS) for word in _WORDS[name]]
    return not any(word.startswith(start.rstrip()) for word in words)


def _null(text: str, strict: bool) -> str | None:
    return "null" if text == "null" or (not strict and text in ("None", "")) else None


def _boolean(text: str, strict: bool) -> str | None:
    if strict:
        return text if text in ("true", "false") else None
    return _LENIENT_BOOLEANS.get(text.lower())


def _integer(text: str, strict: bool) -> str | None:
    if _NUMBER.fullmatch(text) and not set(text) & set(".eE"):
        return text
    if strict:
        return None
    if _LOOSE_INTEGER.fullmatch(text):  # 007, +5
        digits = text.lstrip("+-").lstrip("0")
        return ("-" if text[0] == "-" else "") + digits if digits else "0"
    if _LOOSE_NUMBER.fullmatch(text) and float(text).is_integer() and abs(float(text)) < 2**53:  # 3.0, 1e3
        return str(int(float(text)))
    return None


def _number(text: str, strict: bool) -> str | None:
    if _NUMBER.fullmatch(text):
        return text if math.isfinite(float(text)) else None
    if strict or not _LOOSE_NUMBER.fullmatch(text):
        return None
    return _integer(text, False) or (repr(float(text)) if math.isfinite(float(text)) else None)


def _array(text: str, strict: bool) -> str | None:
    return _container(text, "[", strict)


def _object(text: str, strict: bool) -> str | None:
    return _container(text, "{", strict)


_LADDER = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "array": _array,
    "object": _object,
}
"""JSON type → reader of a stripped text: JSON text, or None when it is not of that type."""


def _container(text: str, opening: str, strict: bool) -> str | None:
    if not text.startswith(opening):
        return None
    document = _document(text)
    return document if document is not None or strict else _python_literal(text)


def _document(text: str) -> str | None:
    """``text`` itself when it is one standard JSON document: numbers keep the digits the model wrote."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def finite(digits: str) -> float:
        number = float(digits)
        return number if math.isfinite(number) else refuse(digits)

    try:
        json.loads(text, parse_constant=refuse, parse_float=finite, parse_int=str)
    except (ValueError, RecursionError):
        return None
    return text


def _python_literal(text: str) -> str | None:
    """A list or dict in Python's spelling (``[True, None]``, ``{'a': 1}``) as JSON, or None."""
    if len(text) > MAX_LITERAL_CHARS:
        return None
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if _is_json(value) else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)
