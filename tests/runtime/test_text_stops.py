"""Stop strings never leak, whatever the split; they apply to their own channel only."""

from __future__ import annotations

import pytest

from ninfer_format.errors import RequestError
from ninfer_runtime.text.events import ContentText, StopHit
from ninfer_runtime.text.stops import StopFilter
from ninfer_runtime.text.stream import StreamOptions, TextChain, join
from tests.runtime.chain import TOOLS, call, events_of, halves, reply


@pytest.mark.parametrize("stop", ["DEFGHIJ", "\nUser:"])
def test_no_prefix_of_a_stop_string_leaks(stop: str) -> None:
    text = f"abc{stop}rest"
    for pieces in halves(text):
        found = join(events_of(pieces, StreamOptions(stops=(stop,))))
        assert (found.content, found.stop) == ("abc", StopHit(stop, "content"))
    tokens = ["abc", *(stop[i : i + 2] for i in range(0, len(stop), 2)), "rest"]
    assert join(events_of(tokens, StreamOptions(stops=(stop,)))).content == "abc"


def test_text_that_only_begins_like_a_stop_string_is_released() -> None:
    assert reply("abcDEFG", stops=("DEFGHIJ",)).content == "abcDEFG"
    assert reply("DEFDEFGHIJ!", stops=("DEFGHIJ",)).content == "DEF"


def test_the_stop_that_is_complete_first_wins_then_the_longest() -> None:
    assert reply("xabyz", stops=("ab", "xabyz")).content == "x"
    assert reply("xab", stops=("b", "ab")).content == "x"


def test_the_stop_string_can_be_included() -> None:
    found = reply("one.two.", stops=(".",), include_stop=True)
    assert (found.content, found.stop) == ("one.", StopHit(".", "content"))


def test_content_stops_do_not_look_at_thinking_and_thinking_stops_not_at_content() -> None:
    found = reply("b,c\n</think>\n\nx b,c y", starts_inside=True, stops=("b,c",))
    assert (found.reasoning, found.content, found.stop) == ("b,c", "x ", StopHit("b,c", "content"))
    found = reply("one two\n</think>\n\ntwo", starts_inside=True, reasoning_stops=("two",))
    assert (found.reasoning, found.content, found.stop) == ("one ", "", StopHit("two", "reasoning"))


def test_hold_back_does_not_confuse_the_closing_tag() -> None:
    found = reply("think b</think>c, b,c", starts_inside=True, stops=("b,c",))
    assert (found.reasoning, found.content) == ("think b", "c, ")


def test_stops_do_not_look_into_tool_arguments() -> None:
    text = "Hi.\n" + call("get_weather", ("city", "STOP")) + "\nand STOP here"
    found = reply(text, tools=TOOLS, stops=("STOP",))
    assert [made.arguments for made in found.tool_calls] == ['{"city": "STOP"}']
    assert (found.content, found.stop) == ("Hi.\nand ", StopHit("STOP", "content"))


def test_nothing_follows_a_stop() -> None:
    text = "one STOP two " + call("now")
    events = events_of([text, "three"], StreamOptions(stops=("STOP",), tools=TOOLS))
    assert events == [ContentText("one "), StopHit("STOP", "content")]
    assert reply(text, stops=("STOP",), tools=TOOLS).tool_calls == ()


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopFilter(["a", ""])


def test_end_of_turn_spelled_out_ends_the_turn_and_is_never_shown() -> None:
    for pieces in halves("Hello.<|im_end|>\nmore"):
        found = join(events_of(pieces, StreamOptions(), ("<|im_end|>",)))
        assert (found.content, found.stop) == ("Hello.", StopHit(None, "content")), pieces


def test_raw_output_shows_every_tag_as_content() -> None:
    text = "hm\n</think>\n\n" + call("now")
    assert reply(text, starts_inside=True, tools=TOOLS, raw=True).content == text


def test_a_character_arriving_byte_by_byte_appears_once_complete() -> None:
    chain = TextChain(StreamOptions())
    events = [chain.feed(bytes([byte])) for byte in "é🙂".encode()]
    assert [join(event).content for event in events] == ["", "é", "", "", "", "🙂"]
    assert chain.flush() == []


def test_an_incomplete_character_at_the_end_is_one_replacement_character() -> None:
    for missing in (1, 2, 3):
        chain = TextChain(StreamOptions())
        events = chain.feed(b"ok " + "🙂".encode()[:-missing])
        assert join(events + chain.flush()).content == "ok \ufffd"
