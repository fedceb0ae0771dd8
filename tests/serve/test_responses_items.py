"""Items of the Responses API: strictly read, kept with ids, and one conversation with the other APIs."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_format.errors import MemberError, VisionDisabledError
from ninfer_runtime.serve.errors import ApiError, problem_of
from ninfer_runtime.serve.responses_items import conversation_of, read_input, read_tools
from ninfer_runtime.text.messages import Message, ToolCall

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
THINKING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
ANSWER = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
}


def messages(*items: Any, instructions: str | None = None) -> tuple[Message, ...]:
    return conversation_of(instructions, read_input(list(items)), ()).messages


def test_a_text_is_one_user_message() -> None:
    (item,) = read_input("hi")
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    assert item["id"].startswith("msg_")
    assert conversation_of(None, [item], ()).messages == (Message("user", "hi"),)


def test_d2_instructions_and_a_developer_message_are_one_system_turn_in_order() -> None:
    made = messages({"role": "developer", "content": "Be kind."}, USER, instructions="Be brief.")
    assert made == (Message("system", "Be brief.\n\nBe kind."), Message("user", "hi"))


def test_d1_a_later_system_message_keeps_its_place() -> None:
    made = messages(USER, {"role": "system", "content": "s"}, USER)
    assert [message.role for message in made] == ["user", "system", "user"]


def test_thinking_text_and_calls_of_one_turn_are_one_message() -> None:
    more = {"role": "assistant", "content": " and bye"}
    made = messages(USER, THINKING, ANSWER, CALL, {**CALL, "call_id": "c2"}, more, OUTPUT, USER)
    calls = (ToolCall("f", {"a": 1}, "c1"), ToolCall("f", {"a": 1}, "c2"))
    assert made[1] == Message("assistant", "Hello and bye", "why", calls)
    assert made[2] == Message("tool", "7", tool_call_id="c1")
    assert len(made) == 4


def test_two_answers_without_anything_between_them_stay_two_turns() -> None:
    assert [message.content for message in messages(USER, ANSWER, ANSWER)] == ["hi", "Hello", "Hello"]


def test_a_call_that_was_never_complete_is_not_said_again() -> None:
    broken = {**CALL, "arguments": '{"a": ', "status": "incomplete"}
    assert messages(USER, ANSWER, broken, USER) == (
        Message("user", "hi"),
        Message("assistant", "Hello"),
        Message("user", "hi"),
    )


def test_d4_results_in_parts_are_joined() -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert messages(USER, CALL, {**OUTPUT, "output": parts})[2].content == "one\ntwo"


def test_given_ids_are_kept_and_no_two_items_share_one() -> None:
    items = read_input([{**USER, "id": "mine"}, USER, CALL])
    assert items[0]["id"] == "mine"
    assert len({item["id"] for item in items}) == 3
    for known, given in (((), [{**USER, "id": "x"}, {**USER, "id": "x"}]), (("x",), [USER, {**USER, "id": "x"}])):
        with pytest.raises(ApiError) as caught:
            read_input(given, known)
        assert (caught.value.problem.code, caught.value.problem.param) == ("duplicate_item_id", "input[1].id")


@pytest.mark.parametrize("arguments", ['{"a": ', "", "[1]"])
def test_d3_wrong_arguments_are_named_with_their_item(arguments: str) -> None:
    with pytest.raises(MemberError) as caught:
        read_input([USER, {**CALL, "arguments": arguments}])
    assert caught.value.place == "input[1].arguments"


@pytest.mark.parametrize("kind", ["input_image", "input_video", "image_url"])
@pytest.mark.parametrize("where", ["message", "result"])
def test_media_is_refused_wherever_it_stands(kind: str, where: str) -> None:
    part = {"type": kind, "image_url": "data:image/png;base64,AAAA"}
    item = {"role": "user", "content": [part]} if where == "message" else {**OUTPUT, "output": [part]}
    with pytest.raises(VisionDisabledError) as caught:
        read_input([USER, item])
    assert caught.value.place.startswith("input[1].")


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        ("", "input"),
        (7, "input"),
        (["hi"], "input[0]"),
        ([{"type": "web_search_call"}], "input[0].type"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"content": "x"}], "input[0].role"),
        ([{**USER, "phase": "commentary"}], "input[0].phase"),
        ([{**USER, "name": "x"}], "input[0].name"),
        ([{"role": "user", "content": None}], "input[0].content"),
        ([{"role": "user", "content": ""}], "input[0].content"),
        ([{"role": "user", "content": []}], "input[0].content"),
        ([{"role": "user", "content": 7}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "output_text", "text": "x"}]}], "input[0].content[0].type"),
        ([{**THINKING, "summary": [{"type": "summary_text", "text": "x"}]}], "input[0].summary"),
        ([{**THINKING, "encrypted_content": "x"}], "input[0].encrypted_content"),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
        ([{"type": "function_call_output", "call_id": "c1"}], "input[0].output"),
        ([{**CALL, "namespace": "x"}], "input[0].namespace"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(items: Any, param: str) -> None:
    with pytest.raises((ApiError, MemberError)) as caught:
        read_input(items)
    problem = problem_of(caught.value)
    assert (problem.status, problem.param) == (400, param)


def test_tools_become_functions_as_the_templates_take_them() -> None:
    flat = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    tools = read_tools([flat, {"type": "function", "name": "g", "parameters": None, "strict": None}])
    assert tools[0] == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
    }
    assert tools[1]["function"] == {"name": "g", "parameters": {"type": "object", "properties": {}}}
    assert [tool["function"].get("strict") for tool in tools] == [True, None]


@pytest.mark.parametrize(
    ("tool", "code", "param"),
    [
        ({"type": "web_search"}, "tool_type_not_supported", "tools[0].type"),
        ({"name": "f"}, "tool_type_not_supported", "tools[0].type"),
        ({"type": "function"}, "missing_parameter", "tools[0].name"),
        ({"type": "function", "name": ""}, "invalid_value", "tools[0].name"),
        ({"type": "function", "name": "f", "parameters": []}, "invalid_value", "tools[0].parameters"),
        ({"type": "function", "name": "f", "function": {}}, "unknown_parameter", "tools[0].function"),
        ({"type": "function", "name": "f", "defer_loading": True}, "unsupported_parameter", "tools[0].defer_loading"),
        ("f", "invalid_value", "tools[0]"),
    ],
)
def test_a_wrong_tool_is_named(tool: Any, code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_tools([tool])
    assert (caught.value.problem.code, caught.value.problem.param) == (code, param)


def test_two_tools_of_one_name_are_refused() -> None:
    tool = {"type": "function", "name": "f"}
    with pytest.raises(ApiError, match="stands twice"):
        read_tools([tool, tool])
