"""Message files: strictly read, every error with its place; normalised before any template sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ninfer_format.errors import ArtifactError, MemberError, RequestError, VisionDisabledError
from ninfer_runtime.text.generation_config import GenerationDefaults
from ninfer_runtime.text.messages import Conversation, Message, ToolCall, parse_conversation, parse_message_file

USER = {"role": "user", "content": "hi"}


def parsed(*messages: Any) -> tuple[Message, ...]:
    return parse_conversation(list(messages)).messages


def test_an_array_and_an_object_are_both_message_files() -> None:
    assert parse_message_file(b'[{"role": "user", "content": "hi"}]', "m.json").messages == (Message("user", "hi"),)
    tools = [{"type": "function", "function": {"name": "f"}}]
    document = json.dumps({"messages": [USER], "tools": tools}).encode()
    assert parse_message_file(document, "m.json") == Conversation((Message("user", "hi"),), tuple(tools))


def test_developer_renders_as_system_and_leading_system_turns_merge_in_order() -> None:
    first, second = {"role": "system", "content": "one"}, {"role": "developer", "content": "two"}
    assert parsed(first, second, USER) == (Message("system", "one\n\ntwo"), Message("user", "hi"))


def test_a_later_system_turn_stays_where_it_is() -> None:
    later = {"role": "system", "content": "s"}
    assert [message.role for message in parsed(USER, later, USER)] == ["user", "system", "user"]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_for_every_role(role: str) -> None:
    content = [{"type": "text", "text": "a"}, {"text": "b"}]
    assert parsed({"role": role, "content": content}, USER)[0].content == "a\nb"


def test_absent_content_is_empty_text() -> None:
    assert parsed({"role": "assistant", "content": None})[0].content == ""


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("arguments", [{"a": [1]}, '{"a": [1]}'])
def test_calls_are_read_nested_and_flat_with_arguments_as_object_or_text(nested: bool, arguments: Any) -> None:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function} if nested else {"id": "c1", **function}
    (message,) = parsed({"role": "assistant", "content": "", "tool_calls": [call]})
    assert message.tool_calls == (ToolCall("f", {"a": [1]}, "c1"),)
    assert message.for_template()["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    ]


@pytest.mark.parametrize(
    ("content", "reasoning", "answer"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", "why", "because"),
        ("\n<think></think>x", "", "x"),
        ("why\nwhy\n</think>\n\nbecause", "why\nwhy", "because"),
        ("</think>\n\nbecause", "", "because"),
        ("The tag </think> ends it.", None, "The tag </think> ends it."),
        ("<think> without an end", None, "<think> without an end"),
        ("See <think>:\n</think>\nok", None, "See <think>:\n</think>\nok"),
    ],
)
def test_thinking_in_an_assistants_content_becomes_its_reasoning(
    content: str, reasoning: str | None, answer: str
) -> None:
    (message,) = parsed({"role": "assistant", "content": content})
    assert (message.reasoning_content, message.content) == (reasoning, answer)


def test_given_reasoning_leaves_the_content_alone() -> None:
    (message,) = parsed({"role": "assistant", "content": "<think>x</think>y", "reasoning_content": "z"})
    assert (message.reasoning_content, message.content) == ("z", "<think>x</think>y")


def test_results_follow_in_the_order_of_their_calls() -> None:
    calls = [{"id": name, "function": {"name": "f", "arguments": {}}} for name in ("c1", "c2", "c3")]

    def result(call_id: str) -> dict[str, Any]:
        return {"role": "tool", "content": call_id, "tool_call_id": call_id}

    made = parsed(USER, assistant(*calls), result("c3"), result("c1"), result("c2"), USER, result("c2"), result("c1"))
    assert [message.content for message in made] == ["hi", "", "c1", "c2", "c3", "hi", "c2", "c1"]
    foreign = parsed(assistant(*calls), result("c2"), result("other"), result("c1"))
    assert [message.content for message in foreign] == ["", "c2", "other", "c1"]


def test_members_that_are_not_set_are_not_given_to_the_template() -> None:
    assert parsed(USER)[0].for_template() == USER
    tool = {"role": "tool", "content": "r", "tool_call_id": "c1"}
    assert parsed(tool)[0].for_template() == tool


def assistant(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def with_arguments(arguments: Any) -> list[Any]:
    return [USER, assistant({"name": "f", "arguments": {}}, {"function": {"name": "f", "arguments": arguments}})]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages is an empty array"),
        (None, "messages is null"),
        ("hi", "messages is a string"),
        (["hi"], r"messages\[0\] is a string, expected an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{**USER, "name": "x"}], r"messages\[0\] has the member 'name'"),
        ([{**USER, "role": "function"}], r"messages\[0\].role is 'function', expected one of system"),
        ([{**USER, "role": 7}], r"messages\[0\].role is 7"),
        ([{**USER, "content": []}], r"messages\[0\].content is an empty array"),
        ([{**USER, "content": 7}], r"messages\[0\].content is 7"),
        ([{**USER, "content": ["x"]}], r"messages\[0\].content\[0\] is a string"),
        ([{**USER, "content": [{"type": "audio", "audio": "x"}]}], r"content\[0\] has type 'audio'"),
        ([{**USER, "content": [{"type": "text", "text": None}]}], r"content\[0\].text is null"),
        ([{**USER, "content": [{"text": "a", "extra": 1}]}], r"content\[0\] has the member 'extra'"),
        ([{**USER, "content": [{"type": "image", "image": "a.png"}]}], "is an image, but this build runs text only"),
        ([{**USER, "content": [{"text": "a"}, {"video_url": {"url": "b"}}]}], r"content\[1\] is a video, but"),
        ([{**USER, "reasoning_content": "x"}], "reasoning_content, which belongs on assistant"),
        ([{**USER, "tool_calls": []}], "tool_calls, which belongs on assistant"),
        ([{**USER, "tool_call_id": "1"}], "tool_call_id, which belongs on tool"),
        ([{"role": "assistant", "content": "", "reasoning_content": 1}], "reasoning_content is 1"),
        ([assistant()], r"messages\[0\].tool_calls is an empty array"),
        ([assistant("x")], r"tool_calls\[0\] is a string"),
        ([assistant({"name": "f"})], r"tool_calls\[0\] has no arguments"),
        ([assistant({"function": {"arguments": {}}})], r"tool_calls\[0\].function has no name"),
        ([assistant({"name": "a b", "arguments": {}})], r"tool_calls\[0\].name is 'a b'"),
        ([assistant({"name": "f", "arguments": {}, "type": "x"})], r"tool_calls\[0\].type is 'x'"),
        ([assistant({"name": "f", "arguments": {}, "id": 3})], r"tool_calls\[0\].id is 3"),
        (with_arguments('{"a": '), r"messages\[1\].tool_calls\[1\].function.arguments is not JSON"),
        (with_arguments(""), r"tool_calls\[1\].function.arguments is not JSON"),
        (with_arguments("[1]"), r"tool_calls\[1\].function.arguments is an array"),
        (with_arguments([1]), r"tool_calls\[1\].function.arguments is an array"),
        (with_arguments('{"a": 1, "a": 2}'), r"arguments is not JSON: the name 'a' stands twice"),
        (with_arguments('{"a": NaN}'), "NaN is not JSON"),
    ],
)
def test_every_wrong_member_is_named_with_its_place(messages: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        parse_conversation(messages)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_an_empty_user_turn_is_refused_where_it_stands(content: Any) -> None:
    """C9"""
    with pytest.raises(MemberError) as caught:
        parse_conversation([USER, {"role": "user", "content": content}])
    assert caught.value.place == "messages[1].content"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_media_is_refused_for_every_role_by_a_type_of_its_own(role: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(VisionDisabledError, match="send its text") as caught:
        parse_conversation([{"role": role, "content": [{"type": "text", "text": "see"}, picture]}])
    assert caught.value.place == "messages[0].content[1]"


@pytest.mark.parametrize("arguments", ['{"a": ', "", "[1]", "7", '{"a": 1} x'])
def test_wrong_arguments_are_named_with_the_index_of_their_call(arguments: str) -> None:
    """D3"""
    with pytest.raises(MemberError) as caught:
        parse_conversation(with_arguments(arguments))
    assert caught.value.place == "messages[1].tool_calls[1].function.arguments"


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ({}, "tools is an object"),
        (["f"], r"tools\[0\] is a string"),
        ([{"type": "web_search"}], r"tools\[0\].type is 'web_search'"),
        ([{"type": "function"}], r"tools\[0\].name is None"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "parameters is an empty array"),
    ],
)
def test_every_wrong_tool_is_named_with_its_place(tools: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        parse_conversation([USER], tools)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (b"", "m.json is not JSON"),
        (b"\xff\xfe", "m.json is not UTF-8"),
        (b"7", "m.json holds 7"),
        (b'{"tools": []}', "m.json holds an object, expected"),
        (b'{"messages": [], "model": "x"}', "has the member 'model'"),
        (b"[" * 200_000, "nested too deeply"),
        (b'[{"role": "user", "role": "system", "content": ""}]', "'role' stands twice"),
        (b'[{"role": "user", "content": 1e999}]', "out of range"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(document: bytes, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        parse_message_file(document, "m.json")


# ---- generation_config.json ----------------------------------------------------------------------
def test_stop_ids_and_sampling_come_from_the_generation_config() -> None:
    document = {"eos_token_id": [592, 590], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    defaults = GenerationDefaults.from_file(json.dumps(document).encode(), 623)
    assert defaults.stop_ids == {592, 590}
    assert defaults.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults.unsupported == ()


def test_a_config_without_sampling_is_greedy_and_unoffered_settings_are_named() -> None:
    document = {"eos_token_id": 3, "do_sample": False, "repetition_penalty": 1.1, "num_beams": 1}
    defaults = GenerationDefaults.from_file(json.dumps(document).encode(), 623)
    assert defaults.stop_ids == {3}
    assert defaults.sampling == {"temperature": 0}
    assert defaults.unsupported == ("repetition_penalty",)


@pytest.mark.parametrize("eos", [None, [], [623], -1, True, "592", [1, None]])
def test_stop_ids_outside_the_vocabulary_are_refused(eos: Any) -> None:
    with pytest.raises(ArtifactError, match="eos_token_id"):
        GenerationDefaults.from_file(json.dumps({"eos_token_id": eos}).encode(), 623)


@pytest.mark.parametrize("document", [b"[]", b"{", b'{"eos_token_id": 1, "temperature": "hot"}'])
def test_a_broken_generation_config_is_refused(document: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"generation_config\.json"):
        GenerationDefaults.from_file(document, 623)
