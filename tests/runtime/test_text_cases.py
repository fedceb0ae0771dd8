"""What has gone wrong in software like this, case by case, from real token ids to events and back to prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from ninfer_runtime.engine.reading import reader_for
from ninfer_runtime.engine.sequence import FinishReason
from ninfer_runtime.text.events import ContentText, Event, ReasoningText, StopHit, ToolCallStart
from ninfer_runtime.text.frontend import Frontend, Prompt
from ninfer_runtime.text.messages import Conversation, parse_conversation
from ninfer_runtime.text.stream import Reply, join
from tests.runtime.chain import NOW, WEATHER, call
from tests.runtime.test_text_frontend import artifact, renamed_end_of_turn

ASK = {"role": "user", "content": "What is the weather?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12:00"}
PARIS = call("get_weather", ("city", "Paris"))


@cache
def frontend() -> Frontend:
    return Frontend.open(artifact())


def rendered(*messages: Any, **options: Any) -> str:
    return frontend().prompt(parse_conversation(list(messages)), **options).text


def answer_pieces(text: str, front: Frontend, thinking: bool, **options: Any) -> Iterator[tuple[int, list[Event]]]:
    """Events after each token of an answer that says ``text``; the last ones, after its end, under -1."""
    conversation = parse_conversation([ASK], [WEATHER, NOW])
    prompt = front.prompt(conversation, thinking=thinking)
    reader = reader_for(front, prompt, conversation, **options)
    for token_id in front.tokenizer.encode_segments(front.tokenizer.split(text)):
        verdict = reader.feed(token_id)
        yield token_id, reader.take()
        if isinstance(verdict, FinishReason):
            break
    yield -1, reader.flush()


def answer(text: str, *, thinking: bool = False, front: Frontend | None = None, **options: Any) -> list[Event]:
    found = answer_pieces(text, front or frontend(), thinking, **options)
    return [event for _, events in found for event in events]


def reply(text: str, **options: Any) -> Reply:
    return join(answer(text, **options))


def test_c1_a_character_of_several_tokens_appears_whole() -> None:
    ids = frontend().tokenizer.encode_text("🙂")
    assert len(ids) > 1, "the vocabulary must split it for this test to say anything"
    seen = [join(events).content for _, events in answer_pieces("🙂日", frontend(), False)]
    assert seen[: len(ids)] == [""] * (len(ids) - 1) + ["🙂"]
    assert "".join(seen) == "🙂日"


def test_c1_a_broken_tail_is_one_replacement_character_at_the_end() -> None:
    conversation = Conversation.of_prompt("x")
    reader = reader_for(frontend(), frontend().prompt(conversation, thinking=False), conversation)
    for token_id in frontend().tokenizer.encode_text("ok 🙂")[:-1]:
        reader.feed(token_id)
    assert join(reader.take()).content == "ok "
    assert join(reader.flush()).content == "\ufffd"


def test_c3_ids_that_end_inside_a_character_are_harmless() -> None:
    ids = frontend().tokenizer.encode_text("ok 🙂")[:-1]
    assert frontend().tokenizer.decode(ids).startswith("ok ")
    assert not frontend().ends_inside(ids)


@pytest.mark.parametrize("stop", ["DEFGHIJ", "\nUser:"])
def test_c4_nothing_of_a_stop_string_is_shown_and_it_ends_the_answer(stop: str) -> None:
    events = answer(f"abc{stop}rest", stops=(stop,))
    assert events[-1] == StopHit(stop, "content")
    assert join(events).content == "abc"
    assert reply(f"abc{stop[:-1]}", stops=(stop,)).content == f"abc{stop[:-1]}"


def test_c6_withheld_text_does_not_cut_the_closing_tag() -> None:
    found = reply("think b</think>c, b,c", thinking=True, stops=("b,c",))
    assert (found.reasoning, found.content) == ("think b", "c, ")


def test_c7_stop_strings_apply_to_the_answer_only() -> None:
    text = "why STOP\n</think>\n\nHi.\n" + call("get_weather", ("city", "STOP")) + " then STOP more"
    found = reply(text, thinking=True, stops=("STOP",))
    assert (found.reasoning, found.content) == ("why STOP", "Hi.\nthen ")
    assert [json.loads(made.arguments) for made in found.tool_calls] == [{"city": "STOP"}]


def test_c8_an_end_of_turn_of_several_tokens_is_never_shown() -> None:
    events = answer("Hello.<|im_end|>more", front=Frontend.open(artifact(renamed_end_of_turn())))
    assert (join(events).content, join(events).stop) == ("Hello.", StopHit(None, "content"))


def test_c14_reasoning_of_closed_turns_is_not_said_again() -> None:
    turns: list[dict[str, Any]] = []
    for i in range(50):
        turns += [ASK, {"role": "assistant", "content": f"{i}", "reasoning_content": "on and on " * 50}]
    assert "on and on" not in rendered(*turns, ASK)
    inline = [{**turn, "content": f"<think>on and on</think>{turn['content']}"} for turn in turns[1::2]]
    for turn in inline:
        del turn["reasoning_content"]
    assert "on and on" not in rendered(*[turn for pair in zip(turns[::2], inline, strict=True) for turn in pair], ASK)
    assert "on and on" in rendered(*turns, ASK, preserve_thinking=True)


@pytest.mark.parametrize("roles", [("user", "system", "user"), ("system", "user", "system"), ("user", "developer")])
def test_d1_a_system_turn_may_stand_anywhere_and_leaves_what_precedes_it_alone(roles: Sequence[str]) -> None:
    messages = [{"role": role, "content": f"says {i}"} for i, role in enumerate(roles)]
    text = rendered(*messages, thinking=False)
    assert [text.count(f"says {i}") for i in range(len(roles))] == [1] * len(roles)
    at = len(roles) - 1 - [*reversed(roles)].index("system" if "system" in roles else "developer")
    before = rendered(*messages[:at], thinking=False).rpartition("<|im_start|>assistant")[0] if at else ""
    assert text.startswith(before)
    assert f"<|im_start|>system\nsays {at}<|im_end|>" in text


def test_d2_two_leading_system_turns_are_one_in_order() -> None:
    text = rendered(SYSTEM, {"role": "developer", "content": "Be kind."}, ASK)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>")
    assert text.count("<|im_start|>system") == 1


def test_d3_arguments_as_text_render_like_an_object() -> None:
    as_object = json.loads(json.dumps(CALLED).replace('"{}"', '{"n": [1, "a"], "s": "x\\ny"}'))
    as_text = json.loads(json.dumps(as_object))
    function = as_text["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert rendered(ASK, as_text, RESULT) == rendered(ASK, as_object, RESULT)


@pytest.mark.parametrize("role", ["system", "tool", "user", "assistant"])
def test_d4_parts_are_joined_as_text(role: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message: dict[str, Any] = {"role": role, "content": parts}
    whole = {**message, "content": "one\ntwo"}
    around = [message, ASK] if role == "system" else [ASK, message, ASK]
    expected = [whole, ASK] if role == "system" else [ASK, whole, ASK]
    assert rendered(*around) == rendered(*expected)
    assert "[{" not in rendered(*around)


def test_d5_a_system_turn_after_a_tool_result_keeps_its_place() -> None:
    text = rendered(ASK, CALLED, RESULT, SYSTEM)
    assert text.index("12:00") < text.index("<|im_start|>system\nBe brief.<|im_end|>") < text.rindex("assistant")


def test_d11_talking_about_the_tag_is_shown_at_the_latest_at_the_end() -> None:
    text = "Write `<tool_call>` first, or `<tool_call>\n<function=get_weather>"
    found = reply(text)
    assert (found.content, found.tool_calls) == (text, ())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_d12_calls_and_prose_in_one_burst_are_all_there(size: int) -> None:
    text = f"Let me see.\n{PARIS}\n{call('now')} That is all.{PARIS}"
    expected = reply(text)
    assert [made.name for made in expected.tool_calls] == ["get_weather", "now", "get_weather"]
    assert expected.content == "Let me see.\nThat is all."
    conversation = parse_conversation([ASK], [WEATHER, NOW])
    prompt = frontend().prompt(conversation, thinking=False)
    numbers = iter(range(9))
    stream = frontend().stream(frontend().stream_options(prompt, conversation), lambda: f"c{next(numbers)}")
    ids = frontend().tokenizer.encode_segments(frontend().tokenizer.split(text))
    bursts = [ids[i : i + size] for i in range(0, len(ids), size)]
    found = join([event for burst in bursts for event in stream.feed(burst)] + stream.flush())
    assert (found.content, found.reasoning) == (expected.content, "")
    assert [made.arguments for made in found.tool_calls] == [made.arguments for made in expected.tool_calls]


def test_d13_every_call_is_there_with_its_own_index_and_id() -> None:
    nested = call("get_weather", ("city", '{"a": {"b": [1, {}]}}'))
    events = answer(f"{call('now')}\n{PARIS}\n{nested}")
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [start.index for start in starts] == [0, 1, 2]
    found = join(events).tool_calls
    assert [made.call_id for made in found] == [start.call_id for start in starts]
    assert len({made.call_id for made in found}) == 3
    assert [made.arguments for made in found][:2] == ["{}", '{"city": "Paris"}']


def test_d15_a_function_that_was_not_offered_is_text() -> None:
    text = call("delete_everything", ("city", "Paris"))
    assert reply(text) == Reply(content=text)


@pytest.mark.parametrize("n_tokens_missing", [1, 3, 10, 20])
def test_d16_a_call_that_is_cut_off_is_no_call(n_tokens_missing: int) -> None:
    ids = frontend().tokenizer.encode_segments(frontend().tokenizer.split(PARIS))[:-n_tokens_missing]
    cut = frontend().tokenizer.decode(ids)
    assert reply(cut) == Reply(content=cut)


def test_d17_the_closing_tag_never_leaks_whatever_tokens_it_comes_in() -> None:
    stream_options = frontend().stream_options(
        frontend().prompt(parse_conversation([ASK])), parse_conversation([ASK]), stops=()
    )
    plain = frontend().tokenizer
    for head in range(len("</think>") + 1):
        stream = frontend().stream(stream_options)
        ids = [*plain.encode_text("why\n" + "</think>"[:head]), *plain.encode_text("</think>"[head:] + "\n\nso")]
        found = join(stream.feed(ids) + stream.flush())
        assert (found.reasoning, found.content) == ("why", "so")


def test_d19_an_answer_to_an_open_block_begins_as_reasoning() -> None:
    events = answer("First I think\n</think>\n\nThen I speak", thinking=True)
    assert isinstance(events[0], ReasoningText)
    assert (join(events).reasoning, join(events).content) == ("First I think", "Then I speak")


def test_d20_thinking_that_was_switched_off_does_not_leak() -> None:
    found = reply("<think>\nhm\n</think>\n\nHello", thinking=False)
    assert (found.reasoning, found.content) == ("hm", "Hello")


def test_d21_a_burst_across_the_boundary_is_two_events() -> None:
    conversation = parse_conversation([ASK])
    prompt = frontend().prompt(conversation)
    stream = frontend().stream(frontend().stream_options(prompt, conversation))
    ids = frontend().tokenizer.encode_segments(frontend().tokenizer.split("why\n</think>\n\nso"))
    kinds = [type(event) for event in stream.feed(ids) + stream.flush()]
    assert kinds == sorted(kinds, key=[ReasoningText, ContentText].index)
    assert set(kinds) == {ReasoningText, ContentText}


@pytest.mark.parametrize("literal", ["<|im_start|>system", "<|im_end|>", "<|image_pad|>", "<|vision_start|>"])
def test_d22_a_control_token_in_anybodys_text_stays_text(literal: str) -> None:
    def controls(prompt: Prompt) -> int:
        return sum(map(frontend().tokenizer.is_control, prompt.token_ids))

    def prompt(word: str) -> Prompt:
        texts = [{**message, "content": word} for message in (SYSTEM, ASK, RESULT)]
        return frontend().prompt(parse_conversation([texts[0], texts[1], CALLED, texts[2]], [WEATHER]))

    assert controls(prompt(literal)) == controls(prompt("word"))
    assert prompt(literal).text.count(literal) >= 3


def test_d23_thinking_that_never_ends_is_returned_as_thinking() -> None:
    found = reply("so " * 50, thinking=True)
    assert (found.reasoning, found.content) == ("so " * 50, "")
