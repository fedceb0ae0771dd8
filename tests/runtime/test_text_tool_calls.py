"""Tool calls: typed by schema, streamed as written, good ones kept, everything else left as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ninfer_runtime.text.events import ContentText, ToolCallArguments, ToolCallEnd, ToolCallFailed, ToolCallStart
from ninfer_runtime.text.stream import Reply, StreamOptions, join
from ninfer_runtime.text.tool_calls import Tool, ToolCallStage, new_call_id, tools_from
from tests.runtime.chain import TOOLS, call, events_of, reply, tool

PARIS = call("get_weather", ("city", "Paris"))


def calls(found: Reply) -> list[tuple[str, Any]]:
    return [(made.name, json.loads(made.arguments)) for made in found.tool_calls]


def value(text: str, schema: Any, *, framed: bool = True) -> Any:
    """The argument a parameter text becomes under a schema."""
    body = f"\n{text}\n" if framed else text
    block = f"<tool_call>\n<function=f>\n<parameter=x>{body}</parameter>\n</function>\n</tool_call>"
    (made,) = reply(block, tools=(tool(x=schema) if schema is not None else tool(),)).tool_calls
    return json.loads(made.arguments)["x"]


def test_one_call_and_nothing_else() -> None:
    found = reply(PARIS, tools=TOOLS)
    assert calls(found) == [("get_weather", {"city": "Paris"})]
    assert found.content == ""


def test_without_tools_on_offer_a_call_is_text() -> None:
    assert reply(PARIS).content == PARIS


def test_text_around_calls_is_kept_and_their_framing_is_not() -> None:
    found = reply(f"Let me look.\n\n{PARIS}\nDone.\n", tools=TOOLS)
    assert found.content == "Let me look.\n\nDone.\n"
    assert len(found.tool_calls) == 1
    assert reply(f"Hi{PARIS} and bye", tools=TOOLS).content == "Hi and bye"
    assert reply(f"\n\n{PARIS}\n\n{PARIS}\n", tools=TOOLS).content == ""
    assert reply(f"Hi.\n\n{PARIS}\n{PARIS} Done.", tools=TOOLS).content == "Hi.\n\nDone."
    assert reply(f"{PARIS}\n\nDone.", tools=TOOLS).content == "Done."


def test_parameters_of_one_call_become_one_object_in_order() -> None:
    text = call("f", ("b", "x\ny"), ("a", "1"), ("c", "[true]"))
    found = reply(text, tools=(tool(a={"type": "integer"}, b={"type": "string"}, c={"type": "array"}),))
    (made,) = found.tool_calls
    assert made.arguments == '{"b": "x\\ny", "a": 1, "c": [true]}'


def test_several_calls_keep_their_order_and_count_up() -> None:
    text = f"{PARIS}\n{call('now')}\n{call('get_weather', ('city', 'Rome'))}"
    found = reply(text, tools=TOOLS)
    assert calls(found) == [("get_weather", {"city": "Paris"}), ("now", {}), ("get_weather", {"city": "Rome"})]
    assert [made.call_id for made in found.tool_calls] == ["call_0", "call_1", "call_2"]
    starts = [event for event in events_of([text], StreamOptions(tools=TOOLS)) if isinstance(event, ToolCallStart)]
    assert [event.index for event in starts] == [0, 1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=now></function></tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call> <function=now> \n\n </function> </tool_call>",
    ],
)
def test_a_call_without_parameters_has_an_empty_object(text: str) -> None:
    (made,) = reply(text, tools=TOOLS).tool_calls
    assert made.arguments == "{}"


def test_arguments_stream_while_the_value_is_written() -> None:
    pieces = [
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n",
        "Par",
        "is",
        "\n</parameter>\n</function>\n",
        "</tool_call>",
    ]
    events = events_of(pieces, StreamOptions(tools=TOOLS))
    assert events == [
        ToolCallStart(0, "call_0", "get_weather"),
        ToolCallArguments(0, '{"city": '),
        ToolCallArguments(0, '"'),
        ToolCallArguments(0, "Par"),
        ToolCallArguments(0, "is"),
        ToolCallArguments(0, '"'),
        ToolCallArguments(0, "}"),
        ToolCallEnd(0),
    ]


def test_a_nullable_string_streams_once_it_cannot_be_null() -> None:
    nullable = tool(x={"type": ["string", "null"]})
    head = "<tool_call><function=f><parameter=x>\n"
    events = events_of([head + "nu", "mber"], StreamOptions(tools=(nullable,)))
    assert ToolCallArguments(0, '"number') in events


def test_d9_string_values_are_byte_exact_except_one_newline_each_side() -> None:
    code = "    def f():\n\treturn '\\n'  # \"x\" </b> 🙂\n\n"
    assert value(code, {"type": "string"}) == code
    assert value("", {"type": "string"}) == ""
    assert value("\n", {"type": "string"}) == "\n"
    assert value("Paris", {"type": "string"}, framed=False) == "Paris"
    assert value("  x  ", {"type": "string"}, framed=False) == "  x  "


MENTIONS = (
    "</parameter>", "a </parameter> b", "</function>", "<tool_call>", "<tool_call>\n<function=other>", "</tool_call>",
    "<parameter=y>", "</par",
)  # fmt: skip


@pytest.mark.parametrize("text", MENTIONS)
def test_values_may_mention_the_tags(text: str) -> None:
    assert value(text, {"type": "string"}) == text


STRING, BOOLEAN, INTEGER, NUMBER = ({"type": name} for name in ("string", "boolean", "integer", "number"))
NULL, ARRAY, OBJECT = ({"type": name} for name in ("null", "array", "object"))
TEXTS = ("True", "true", "1", "30", "3.0", "null", "None", "[1]", "{}", "007", "2026-01-15")
LADDER: list[tuple[Any, list[Any]]] = [
    (STRING, list(TEXTS)),
    (BOOLEAN, [True, True, True, 30, 3.0, None, None, [1], {}, "007", "2026-01-15"]),
    (INTEGER, [True, True, 1, 30, 3, None, None, [1], {}, 7, "2026-01-15"]),
    (NUMBER, [True, True, 1, 30, 3.0, None, None, [1], {}, 7, "2026-01-15"]),
    (NULL, [True, True, 1, 30, 3.0, None, None, [1], {}, "007", "2026-01-15"]),
    (ARRAY, [True, True, 1, 30, 3.0, None, None, [1], {}, "007", "2026-01-15"]),
    (OBJECT, [True, True, 1, 30, 3.0, None, None, [1], {}, "007", "2026-01-15"]),
    ({"type": ["integer", "null"]}, [True, True, 1, 30, 3, None, None, [1], {}, 7, "2026-01-15"]),
    ({"type": ["string", "null"]}, ["True", "true", "1", "30", "3.0", None, "None", "[1]", "{}", "007", "2026-01-15"]),
    ({"anyOf": [STRING, INTEGER]}, ["True", "true", 1, 30, "3.0", "null", "None", "[1]", "{}", "007", "2026-01-15"]),
    ({"anyOf": [BOOLEAN, INTEGER]}, [True, True, 1, 30, 3, None, None, [1], {}, 7, "2026-01-15"]),
    (None, ["True", True, 1, 30, 3.0, None, "None", [1], {}, "007", "2026-01-15"]),
    ({}, ["True", True, 1, 30, 3.0, None, "None", [1], {}, "007", "2026-01-15"]),
]


@pytest.mark.parametrize(("schema", "expected"), LADDER, ids=[json.dumps(row[0]) for row in LADDER])
def test_d6_d8_values_take_the_type_their_schema_names(schema: Any, expected: list[Any]) -> None:
    found = [value(text, schema) for text in TEXTS]
    assert found == expected
    assert [type(item) for item in found] == [type(item) for item in expected]


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "True", True),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"$ref": "#/$defs/Size"}, "3", 3),
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, '{"a": [null]}', {"a": [None]}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "3", 3),
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "object"}, "{'a': {'b': 1.5}}", {"a": {"b": 1.5}}),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "-.5", -0.5),
        ({"type": "integer"}, "-007", -7),
        ({"type": "integer"}, "12345678901234567890123", 12345678901234567890123),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"$ref": "#/$defs/Loop"}, "x", "x"),
    ],
)
def test_schema_details(schema: Any, text: str, expected: Any) -> None:
    definitions = {"Size": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}
    function = Tool("f", {"properties": {"x": schema}, "$defs": definitions})
    block = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    events = events_of([block], StreamOptions(tools=(function,)))
    arguments = "".join(event.fragment for event in events if isinstance(event, ToolCallArguments))
    assert json.loads(arguments) == {"x": expected}


def test_an_unknown_function_is_never_a_call() -> None:
    block = call("delete_everything", ("city", "Paris"))
    found = reply(f"{block}\n{PARIS}", tools=TOOLS)
    assert found.content == block
    assert calls(found) == [("get_weather", {"city": "Paris"})]


def test_talking_about_the_tag_is_text() -> None:
    text = "Write `<tool_call>` and then <function=get_weather> in it."
    assert reply(text, tools=TOOLS).content == text
    first_piece = ToolCallStage(TOOLS).feed(ContentText("`<tool_call>` it "))
    assert join(first_piece).content == "`<tool_call>` it", "released at once, but for trailing space"


BROKEN = {
    "no function": "<tool_call>\n{}\n</tool_call>",
    "parameter not closed": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>",
    "text between tags": "<tool_call>\n<function=get_weather>\nplease\n</function>\n</tool_call>",
    "parameter twice": call("now", ("a", "1"), ("a", "2")),
    "outer tag not closed": "<tool_call>\n<function=now>\n</function>\n",
    "two functions": "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
    "empty name": "<tool_call>\n<function=now>\n<parameter=>\n1\n</parameter>\n</function>\n</tool_call>",
}  # fmt: skip


@pytest.mark.parametrize("block", BROKEN.values(), ids=BROKEN)
def test_a_malformed_block_is_text_and_the_good_calls_around_it_survive(block: str) -> None:
    found = reply(f"{PARIS}\n{block}{PARIS}", tools=TOOLS)
    assert found.content.strip() == block.strip()
    assert calls(found) == [("get_weather", {"city": "Paris"})] * 2


def test_a_failed_block_keeps_the_whitespace_around_it() -> None:
    text = f"Hi.\n\n{BROKEN['text between tags']}\n\n{BROKEN['two functions']}\n"
    assert reply(text, tools=TOOLS).content == text
    after_call = f"{PARIS}\n\n{BROKEN['text between tags']} end"
    assert reply("Hi.\n" + after_call, tools=TOOLS).content == f"Hi.\n{BROKEN['text between tags']} end"


def test_a_parameter_that_swallows_the_next_one_breaks_the_block() -> None:
    both = tool(x={"type": "string"}, y={"type": "string"})
    block = "<tool_call><function=f><parameter=x>\n1\n<parameter=y>\n2\n</parameter></function></tool_call>"
    found = reply(block, tools=(both,))
    assert (found.content, found.tool_calls) == (block, ())


@pytest.mark.parametrize("n_missing", range(1, len(PARIS) - len("<tool_call>\n<function=get_weather>") + 1))
def test_a_call_cut_anywhere_is_not_reported_as_complete(n_missing: int) -> None:
    found = reply(PARIS[:-n_missing], tools=TOOLS)
    assert found.tool_calls == ()
    assert found.content == PARIS[:-n_missing]


def test_a_failed_call_is_announced_and_its_text_follows() -> None:
    text = "<tool_call>\n<function=now>\nnonsense"
    events = events_of([text], StreamOptions(tools=TOOLS))
    assert events[:2] == [ToolCallStart(0, "call_0", "now"), ToolCallFailed(0)]
    assert join(events).content == text


def test_tolerance_is_opt_in_and_needs_a_complete_function() -> None:
    open_ended = PARIS.removesuffix("\n</tool_call>")
    assert reply(open_ended, tools=TOOLS).tool_calls == ()
    assert calls(reply(open_ended, tools=TOOLS, tolerant_tool_calls=True)) == [("get_weather", {"city": "Paris"})]
    found = reply(open_ended + " ok", tools=TOOLS, tolerant_tool_calls=True)
    assert (len(found.tool_calls), found.content) == (1, "ok")
    assert reply(open_ended[:-3], tools=TOOLS, tolerant_tool_calls=True).tool_calls == ()


def test_call_ids_are_sixteen_hex_digits_and_differ() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(call_id) == 21 and int(call_id.removeprefix("call_"), 16) >= 0 for call_id in ids)


def test_tools_are_read_nested_and_flat() -> None:
    nested, flat = tools_from(({"type": "function", "function": {"name": "a"}}, {"name": "b", "parameters": {"x": 1}}))
    assert (nested.name, nested.parameters, flat.name, flat.parameters) == ("a", {}, "b", {"x": 1})
    assert flat.types_of("x") == frozenset()
    assert Tool("c", {"additionalProperties": {"type": "integer"}}).types_of("any") == {"integer"}
