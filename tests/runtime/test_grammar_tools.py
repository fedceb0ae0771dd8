"""Forced tool calls: whatever is drawn, the project's own reader finds calls whose arguments their schemas accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ninfer_format.errors import RequestError
from ninfer_runtime.text.grammar import ToolCalls, grammar_for
from ninfer_runtime.text.stream import Reply, StreamOptions, TextChain, join
from ninfer_runtime.text.tokenizer import Tokenizer
from ninfer_runtime.text.tool_calls import Tool
from tests.runtime.chain import call
from tests.runtime.following import accepts, write

ROOT = Path(__file__).resolve().parents[2]
DEFS = {
    "Unit": {"enum": ["C", "F"], "type": "string"},
    "Point": {"type": "object", "properties": {"x": {"type": "number"}}},
}
TOOLS = (
    Tool("now", {}),
    Tool("weather", {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"$ref": "#/$defs/Unit"},
            "detail": {"anyOf": [{"enum": ["low", "high"]}, {"type": "null"}], "default": None},
        },
        "required": ["city", "days"],
        "$defs": DEFS,
    }),
    Tool("write.file", {
        "type": "object",
        "properties": {
            "path": {"type": "string", "minLength": 2, "maxLength": 6},
            "text": {"type": ["string", "null"]},
            "modes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            "at": {"$ref": "#/$defs/Point"},
            "flag": {"type": "boolean"},
            "mixed": {"enum": ["a", 1, None, True, "a b"]},
        },
        "required": ["path", "flag", "mixed"],
        "$defs": DEFS,
    }),
)  # fmt: skip
BY_NAME = {tool.name: tool for tool in TOOLS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = ROOT / "examples" / "tiny" / "dense"
    names = ("tokenizer.json", "tokenizer_config.json")
    return Tokenizer.from_files(*((folder / name).read_bytes() for name in names))


@pytest.fixture(scope="module")
def stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset({tokenizer.added["<|im_end|>"].token_id})


def read(text: str) -> Reply:
    """What the stream makes of an answer."""
    chain = TextChain(StreamOptions(tools=TOOLS))
    return join(chain.feed(text.encode()) + chain.flush())


CLOSING = b"\n</parameter>\n"


def eager(before: bytes, piece: bytes) -> float:
    """Likes tags, and likes even more to go on with a closing tag that has begun."""
    n = next(n for n in range(len(CLOSING) - 1, -1, -1) if before.endswith(CLOSING[:n]))
    rest = CLOSING[n:]
    if n and (rest.startswith(piece) or piece.startswith(rest)):
        return 3000.0
    return 60.0 if piece.startswith(b"\n") or piece == b'"' else 10.0 if piece.startswith(b"<") else 1.0


def is_of(arguments: Any, tool: Tool) -> None:
    schema = {**tool.parameters, "additionalProperties": False}
    jsonschema.validate(arguments, schema)


def check(spec: ToolCalls, tokenizer: Tokenizer, stop_ids: frozenset[int], seeds: range) -> list[Reply]:
    """Replies of the texts that ended, each made of nothing but calls that fit their schemas."""
    replies = []
    for seed in seeds:
        written = write(spec, tokenizer, stop_ids, seed, n_max=400, lean=eager)
        if not written.ended:
            continue
        reply = read(written.text)
        assert reply.tool_calls, written.text
        if spec.required:
            assert reply.content == "", written.text
        for found in reply.tool_calls:
            is_of(json.loads(found.arguments), BY_NAME[found.name])
        replies.append(reply)
    assert len(replies) > len(seeds) // 3
    return replies


def test_required_calls_are_read_and_fit_their_schemas(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    replies = check(ToolCalls(TOOLS), tokenizer, stop_ids, range(24))
    calls = [found for reply in replies for found in reply.tool_calls]
    assert {found.name for found in calls} == set(BY_NAME)
    assert max(len(reply.tool_calls) for reply in replies) > 1


@pytest.mark.parametrize("name", BY_NAME)
def test_a_named_call_is_the_only_one(name: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    replies = check(ToolCalls(TOOLS, name=name), tokenizer, stop_ids, range(100, 112))
    assert all([found.name for found in reply.tool_calls] == [name] for reply in replies)


def test_one_call_at_a_time_if_asked_for(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    replies = check(ToolCalls(TOOLS, parallel=False), tokenizer, stop_ids, range(200, 212))
    assert all(len(reply.tool_calls) == 1 for reply in replies)


@pytest.mark.slow
def test_a_thousand_forced_calls_fit_their_schemas(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    replies = check(ToolCalls(TOOLS), tokenizer, stop_ids, range(1000, 2500))
    assert sum(len(reply.tool_calls) for reply in replies) > 1000


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_segments(tokenizer.split(text))


WEATHER = call("weather", ("city", "Paris"), ("days", "3"))


@pytest.mark.parametrize(
    "text",
    [
        WEATHER,
        call("now"),
        f"{WEATHER}\n{call('now')}\n{WEATHER}",
        call("weather", ("city", ""), ("days", "1"), ("unit", "F"), ("detail", "null")),
        call("weather", ("city", " <b>x</b>\n</parameter>, </function> <tool_c\n"), ("days", "1")),
        call("write.file", ("path", "a.b"), ("at", '{"x": 1.5}'), ("flag", "true"), ("mixed", "a b")),
    ],
)
def test_calls_as_the_template_writes_them_are_let_through(
    text: str, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> None:
    assert accepts(ToolCalls(TOOLS), tokenizer, stop_ids, encode(tokenizer, text))
    assert read(text).tool_calls


@pytest.mark.parametrize(
    "text",
    [
        "It is raining.",
        "<tool_call>",
        call("weather", ("city", "Paris")),
        call("weather", ("city", "Paris"), ("days", "15")),
        call("weather", ("city", "Paris"), ("days", "3"), ("unit", "K")),
        call("weather", ("city", "Paris"), ("days", "3"), ("days", "3")),
        call("weather", ("city", "<parameter=days>"), ("days", "3")),
        call("weather", ("city", "</function></tool_call>"), ("days", "3")),
        call("tomorrow"),
        WEATHER + "\nThat is all.",
        call("write.file", ("path", "a"), ("flag", "true"), ("mixed", "1")),
        call("write.file", ("path", "abcdefg"), ("flag", "true"), ("mixed", "1")),
        call("write.file", ("path", "abc"), ("flag", "True"), ("mixed", "1")),
    ],
)
def test_anything_else_is_not(text: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    assert not accepts(ToolCalls(TOOLS), tokenizer, stop_ids, encode(tokenizer, text))


def test_calls_that_are_not_required_may_be_left_out(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    spec = ToolCalls(TOOLS, required=False)
    for text in ("", "Nothing to do.", WEATHER, f"Let me see.\n\n{WEATHER}\n{call('now')}"):
        assert accepts(spec, tokenizer, stop_ids, encode(tokenizer, text)), text
    for text in (call("weather"), "Let me see.\n\n" + call("tomorrow"), WEATHER + "\nDone."):
        assert not accepts(spec, tokenizer, stop_ids, encode(tokenizer, text)), text


def test_keywords_that_no_grammar_follows_do_not_refuse_a_call(tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
    odd = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "x-own": 1}
    spelled = {"type": "string", "format": "uri", "pattern": "^h"}
    tool = Tool("odd", {"properties": {"a": odd, "b": spelled, "c": True, "d": {}}, "required": ["a"]})
    text = call("odd", ("a", "[1, 1]"), ("b", "ftp"), ("c", "x"), ("d", "{"))
    assert accepts(ToolCalls((tool,)), tokenizer, stop_ids, encode(tokenizer, text))


NEVER = {"type": "integer", "minimum": 3, "maximum": 2}


@pytest.mark.parametrize(
    "spec, words",
    [
        (ToolCalls(()), "needs tools"),
        (ToolCalls(TOOLS, name="tomorrow"), "'tomorrow' is not among"),
        (ToolCalls((Tool("f", {"required": ["a"]}),)), "requires 'a'"),
        (ToolCalls((Tool("f", {"properties": {"a>": {}}, "required": ["a>"]}),)), "requires 'a>'"),
        (ToolCalls((Tool("f", {"properties": {"a": NEVER}, "required": ["a"]}),)), "minimum"),
    ],
)  # fmt: skip
def test_calls_that_could_never_be_made_are_refused(
    spec: ToolCalls, words: str, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> None:
    with pytest.raises(RequestError, match=words):
        grammar_for(spec, tokenizer, stop_ids)
