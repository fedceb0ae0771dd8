"""Thinking and answer are told apart, wherever the tags stand and however they arrive."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_runtime.text.events import ContentText, ReasoningText
from ninfer_runtime.text.stream import StreamOptions, join
from tests.runtime.chain import TOOLS, call, events_of, halves, reply

CALL = call("get_weather", ("city", "Paris"))


def parts(text: str, **options: Any) -> tuple[str, str]:
    found = reply(text, **options)
    return found.reasoning, found.content


def test_a_block_the_template_opened_starts_as_reasoning() -> None:
    assert parts("I add.\n</think>\n\n4", starts_inside=True) == ("I add.", "4")


def test_closing_tag_split_at_every_position_gives_the_same_reply() -> None:
    text = "One.\n\nTwo.\n</think>\n\nAnswer </think> stays."
    expected = ("One.\n\nTwo.", "Answer </think> stays.")
    for pieces in halves(text):
        found = join(events_of(pieces, StreamOptions(starts_inside=True)))
        assert (found.reasoning, found.content) == expected, pieces


def test_a_block_written_with_thinking_off_does_not_leak_into_the_content() -> None:
    assert parts("<think>\nhm\n</think>\n\nHello") == ("hm", "Hello")
    assert parts("\n <think>hm</think>Hello") == ("hm", "Hello")


def test_a_block_the_model_opens_again_is_one_block() -> None:
    assert parts("<think>\nhm\n</think>\n\nHello", starts_inside=True) == ("hm", "Hello")


def test_a_second_block_before_any_answer_is_reasoning_too() -> None:
    assert parts("a\n</think>\n\n<think>\nb\n</think>\n\nHello", starts_inside=True) == ("ab", "Hello")


def test_tags_after_the_answer_began_are_text() -> None:
    text = "The tag <think> opens a block, </think> closes it."
    assert parts(text) == ("", text)


def test_a_stray_closing_tag_before_the_answer_is_dropped() -> None:
    assert parts("</think>\n\nHello") == ("", "Hello")


def test_reasoning_that_never_closes_is_all_reasoning() -> None:
    assert parts("so so so </thi", starts_inside=True) == ("so so so </thi", "")


@pytest.mark.parametrize("text", ["", "\n", "   ", "<", "<thin", "</think"])
def test_nothing_is_held_back_for_ever(text: str) -> None:
    assert parts(text) == ("", text)


def test_only_framing_newlines_are_removed() -> None:
    assert parts("\n  a\n\n b \n\n</think>\n\n    code\n", starts_inside=True) == ("  a\n\n b ", "    code\n")


def test_reasoning_and_content_of_one_burst_are_two_events() -> None:
    events = events_of(["why</think>\n\nbecause"], StreamOptions(starts_inside=True))
    assert events == [ReasoningText("why"), ContentText("because")]


def test_reasoning_streams_before_it_is_closed() -> None:
    events = events_of(["one ", "two "], StreamOptions(starts_inside=True))
    assert events[0] == ReasoningText("one ")


def test_a_call_drafted_in_closed_thinking_stays_reasoning() -> None:
    found = reply(f"Maybe {CALL}\nor not.</think>\n\nNo.", starts_inside=True, tools=TOOLS)
    assert (found.reasoning, found.content, found.tool_calls) == (f"Maybe {CALL}\nor not.", "No.", ())


def test_a_complete_call_in_thinking_that_never_closes_is_made() -> None:
    found = reply(f"I ask.\n{CALL}", starts_inside=True, tools=TOOLS)
    assert (found.reasoning, found.content) == ("I ask.", "")
    assert [(made.name, made.arguments) for made in found.tool_calls] == [("get_weather", '{"city": "Paris"}')]


def test_an_unfinished_call_in_thinking_stays_reasoning() -> None:
    text = f"I ask.\n{CALL[:-20]}"
    assert parts(text, starts_inside=True, tools=TOOLS) == (text, "")


def test_talking_about_the_tag_in_thinking_is_released_at_once() -> None:
    events = events_of(["use `<tool_call>` here ", "now"], StreamOptions(starts_inside=True, tools=TOOLS))
    assert join(events[:-1]).reasoning == "use `<tool_call>` here "
