"""Anthropic turns and blocks: strictly read, one conversation with the other APIs; blocks and events of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ninfer_format.errors import MemberError, VisionDisabledError
from ninfer_runtime.engine.asking import ToolChoice
from ninfer_runtime.serve.anthropic import Blocks
from ninfer_runtime.serve.anthropic_blocks import conversation_of, read_tools, tool_choice_of
from ninfer_runtime.serve.errors import ApiError, problem_of
from ninfer_runtime.text.messages import Message, ToolCall
from ninfer_runtime.text.stream import StreamOptions
from tests.property.model_outputs import TOOLS, model_outputs
from tests.runtime.chain import call, events_of

USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
THINKING = {"type": "thinking", "thinking": "why", "signature": "any"}
TEXT = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def result(content: Any = "7", **members: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **members}


def messages(*turns: Any, system: Any = None) -> tuple[Message, ...]:
    return conversation_of(system, turns, ()).messages


def test_the_system_text_comes_first_and_merges_with_leading_system_turns() -> None:
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]
    assert messages(USER, system=blocks)[0] == Message("system", "one\ntwo")
    assert messages({"role": "system", "content": "late"}, USER, system="first")[0] == Message(
        "system", "first\n\nlate"
    )
    assert messages(USER, system="") == (Message("user", "hi"),)


def test_d1_a_later_system_turn_keeps_its_place() -> None:
    assert [message.role for message in messages(USER, turn("system", TEXT), USER)] == ["user", "system", "user"]


def test_c26_thinking_is_taken_back_with_any_signature_or_none() -> None:
    unsigned = {"type": "thinking", "thinking": "how"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    assert messages(USER, turn("assistant", THINKING, hidden, TEXT, USE), USER)[1] == Message(
        "assistant", "Hello", "why", (ToolCall("f", {"a": 1}, "t1"),)
    )
    assert messages(USER, turn("assistant", THINKING, unsigned, TEXT), USER)[1].reasoning_content == "why\n\nhow"


def test_results_come_in_front_of_what_the_user_says() -> None:
    made = messages(USER, turn("assistant", USE), turn("user", TEXT, result("7"), TEXT))
    assert made[2:] == (Message("tool", "7", tool_call_id="t1"), Message("user", "Hello\nHello"))
    assert messages(USER, turn("assistant", USE), turn("user", result(None)))[2:] == (
        Message("tool", "", tool_call_id="t1"),
    )


def test_d4_a_result_in_blocks_is_joined_and_an_error_is_called_one() -> None:
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for content, is_error, expected in (
        (blocks, False, "one\ntwo"),
        ("no", True, "Error: no"),
        ("error 5", True, "error 5"),
    ):
        made = messages(USER, turn("assistant", USE), turn("user", result(content, is_error=is_error)))
        assert made[2].content == expected


@pytest.mark.parametrize("kind", ["image", "video"])
def test_media_is_refused_also_inside_results(kind: str) -> None:
    picture = {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for content in ([picture], [result([picture])]):
        with pytest.raises(VisionDisabledError) as caught:
            messages(USER, turn("user", *content))
        assert caught.value.place.startswith("messages[1].content[0]")


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        (["hi"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": ""}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{**USER, "name": "x"}], "messages[0].name"),
        ([USER, {"role": "assistant", "content": "Well,"}], "messages[1]"),
        ([turn("user", {"type": "document"})], "messages[0].content[0].type"),
        ([turn("user", THINKING)], "messages[0].content[0].type"),
        ([turn("system", USE)], "messages[0].content[0].type"),
        ([turn("user", {"type": "text"})], "messages[0].content[0].text"),
        ([turn("user", {**TEXT, "cache_control": {"type": "x"}})], "messages[0].content[0].cache_control.type"),
        ([turn("user", {**TEXT, "citations": [{}]})], "messages[0].content[0].citations"),
        ([turn("user", {"type": "tool_result"})], "messages[0].content[0].tool_use_id"),
        ([turn("user", result(7))], "messages[0].content[0].content"),
        ([turn("assistant", {**USE, "input": "x"}), USER], "messages[0].content[0].input"),
        ([turn("assistant", {**USE, "caller": {"type": "x"}}), USER], "messages[0].content[0].caller"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(turns: Any, param: str) -> None:
    with pytest.raises((ApiError, MemberError)) as caught:
        conversation_of(None, turns, ())
    problem = problem_of(caught.value)
    assert (problem.status, problem.param) == (400, param)


def test_tools_become_functions() -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True, "cache_control": None}
    tools = read_tools([tool, {"type": "custom", "name": "g", "input_schema": {}}])
    assert tools[0] == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
    }
    assert [tool["function"].get("strict") for tool in tools] == [True, None]
    for wrong, code in (
        ({"type": "web_search_20250305", "name": "web_search"}, "tool_type_not_supported"),
        ({"name": "f"}, "missing_parameter"),
        ({**tool, "input_examples": [{}]}, "unsupported_parameter"),
        ({**tool, "input_schema": 7}, "invalid_value"),
    ):
        with pytest.raises(ApiError) as caught:
            read_tools([wrong])
        assert caught.value.problem.code == code


def test_tool_choices() -> None:
    tools = read_tools([{"name": "f", "input_schema": {}}])
    assert tool_choice_of(None, tools) == (ToolChoice(), False)
    assert tool_choice_of({"type": "auto", "disable_parallel_tool_use": True}, tools) == (ToolChoice("auto"), True)
    assert tool_choice_of({"type": "any"}, tools) == (ToolChoice("required"), False)
    assert tool_choice_of({"type": "none"}, tools) == (ToolChoice("none"), False)
    assert tool_choice_of({"type": "tool", "name": "f"}, tools) == (ToolChoice("named", "f"), False)
    for choice, offered in (
        ({"type": "any"}, ()),
        ({"type": "tool", "name": "g"}, tools),
        ({"type": "tool"}, tools),
        ({"type": "auto", "name": "f"}, tools),
    ):
        with pytest.raises((ApiError, MemberError)):
            tool_choice_of(choice, offered)


# ---- answers -------------------------------------------------------------------------------------
def frames_of(frames: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for frame in frames.decode().split("\n\n")[:-1]:
        name, _, rest = frame.removeprefix("event: ").partition("\ndata: ")
        members = json.loads(rest)
        assert members.pop("type") == name
        found.append((name, members))
    return found


def run(*pieces: str, **options: Any) -> tuple[Blocks, list[tuple[str, dict[str, Any]]]]:
    kept = {name: options.pop(name) for name in ("hides_thinking", "keeps_failed") if name in options}
    blocks = Blocks(**kept)
    frames = blocks.feed(events_of(pieces, StreamOptions(tools=TOOLS, **options)))
    return blocks, frames_of(frames + blocks.end())


def joined(frames: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """Blocks as a client puts them together, one after the other."""
    found: list[tuple[str, str]] = []
    is_open = False
    for name, members in frames:
        if name == "content_block_start":
            assert not is_open
            assert members["index"] == len(found)
            found.append((members["content_block"]["type"], ""))
            is_open = True
        elif name == "content_block_stop":
            is_open = False
        else:
            assert is_open
            assert members["index"] == len(found) - 1
            delta = {**members["delta"]}
            kind = delta.pop("type")
            (text,) = delta.values()
            assert (found[-1][0], kind) in {
                ("thinking", "thinking_delta"), ("thinking", "signature_delta"), ("text", "text_delta"),
                ("tool_use", "input_json_delta"),
            }  # fmt: skip
            found[-1] = (found[-1][0], found[-1][1] + text)
    assert not is_open
    return found


def test_thinking_text_and_uses_are_blocks_in_their_order() -> None:
    blocks, frames = run(f"why\n</think>\n\nI look.\n{call('search', ('query', 'x'))} Done.", starts_inside=True)
    documents = [block.document() for block in blocks.blocks]
    assert [document["type"] for document in documents] == ["thinking", "text", "tool_use", "text"]
    assert documents[0] == {"type": "thinking", "thinking": "why", "signature": ""}
    assert documents[2] == {"type": "tool_use", "id": "toolu_0", "name": "search", "input": {"query": "x"}}
    assert joined(frames) == [
        ("thinking", "why"), ("text", "I look."), ("tool_use", '{"query": "x"}'), ("text", "\nDone."),
    ]  # fmt: skip


def test_an_empty_answer_is_one_empty_text_block() -> None:
    assert joined(run("")[1]) == [("text", "")]
    assert joined(run("why", starts_inside=True)[1]) == [("thinking", "why"), ("text", "")]


def test_thinking_can_be_left_out() -> None:
    blocks, frames = run("why\n</think>\n\nSo.", starts_inside=True, hides_thinking=True)
    assert joined(frames) == [("thinking", ""), ("text", "So.")]
    assert blocks.blocks[0].document()["thinking"] == ""


def test_d16_a_call_that_fails_ends_and_its_text_follows() -> None:
    cut = call("search", ("query", "x"))[:-20]
    _, frames = run(cut)
    assert [kind for kind, _ in joined(frames)] == ["tool_use", "text"]
    assert joined(frames)[1] == ("text", cut)
    dropped, _ = run(cut, keeps_failed=False)
    assert [block.document() for block in dropped.blocks] == [{"type": "text", "text": cut, "citations": None}]


def test_whatever_was_answered_the_deltas_join_to_the_blocks(fresh_seed: int) -> None:
    for drawn in model_outputs(fresh_seed, 300):
        streamed, whole = Blocks(), Blocks(keeps_failed=False)
        events = events_of([drawn.text[i : i + 3] for i in range(0, len(drawn.text), 3)], drawn.options)
        frames = frames_of(streamed.feed(events) + streamed.end())
        assert joined(frames) == [(block.kind, "".join(block.texts)) for block in streamed.blocks]
        whole.feed(events)
        whole.end()
        assert whole.blocks, drawn
        for block in whole.blocks:
            assert json.loads(json.dumps(block.document())) == block.document()
