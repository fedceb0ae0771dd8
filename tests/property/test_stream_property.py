"""However the model's output is cut into pieces, the chain says the same; streaming equals one piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count, cycle, pairwise
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ninfer_runtime.text.events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallFailed,
    ToolCallStart,
)
from ninfer_runtime.text.stops import StopFilter
from ninfer_runtime.text.stream import Reply, StreamOptions, TextChain, TextStream, join
from ninfer_runtime.text.tokenizer import Tokenizer
from ninfer_runtime.text.tool_calls import Tool

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "dense"

TOOLS = (
    Tool("f", {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": ["string", "null"]}}}),
    Tool("write_file", {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}}),
)

FRAGMENTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=write_file>", "<function=other>",
    "</function>", "<parameter=s>", "<parameter=n>", "<parameter=o>", "<parameter=text>", "</parameter>",
    "\n", "\n\n", " ", "null", "7", "STOP", "ST", "<", "</", "<tool", "</para", "<|im_end|>", "`<tool_call>`",
    "Paris", "größe", "日本語", "🙂", "👩\u200d👧", "\u0301", '"', "\\", "{}", "[1, 2]",
)  # fmt: skip

PARAMETERS = "<parameter=s>\na\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
GOOD_CALL = f"<tool_call>\n<function=f>\n{PARAMETERS}</function>\n</tool_call>"
WHOLE = "thinking…\n</think>\n\nFirst 🙂.\n\n" + GOOD_CALL + "\n" + GOOD_CALL + "\nDone."

outputs = st.lists(st.sampled_from((*FRAGMENTS, GOOD_CALL)) | st.text(max_size=6), max_size=24).map("".join)
options = st.builds(
    StreamOptions,
    starts_inside=st.booleans(),
    tools=st.sampled_from(((), TOOLS)),
    stops=st.sampled_from(((), ("STOP",), ("\n\n", "b,c"), ("STOP", "ST", "TOPaz"))),
    reasoning_stops=st.sampled_from(((), ("STOP",), ("\n",))),
    include_stop=st.booleans(),
    raw=st.booleans(),
    tolerant_tool_calls=st.booleans(),
)


def counted() -> Callable[[], str]:
    """A fresh source of call ids 0, 1, 2 …"""
    numbers = count()
    return lambda: str(next(numbers))


def run(pieces: Sequence[bytes], chosen: StreamOptions) -> tuple[list[Event], Reply]:
    chain = TextChain(chosen, ("<|im_end|>",), counted())
    events = [event for piece in pieces for event in chain.feed(piece)] + chain.flush()
    assert chain.flush() == []
    return merged(events), join(events)


def merged(events: Sequence[Event]) -> list[Event]:
    """Neighbouring deltas of one kind joined: what is left must not depend on the split."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
            out[-1] = ToolCallArguments(event.index, last.fragment + event.fragment)
        elif isinstance(event, ContentText) and isinstance(last, ContentText):
            out[-1] = ContentText(last.text + event.text)
        elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
            out[-1] = ReasoningText(last.text + event.text)
        else:
            out.append(event)
    return out


def cut(whole: bytes, at: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(whole), *(position % (len(whole) + 1) for position in at)})
    return [whole[begin:end] for begin, end in pairwise(edges)]


@settings(max_examples=400, deadline=None)
@given(outputs, options, st.lists(st.integers(0, 10_000), max_size=12))
@example(WHOLE, StreamOptions(starts_inside=True, tools=TOOLS), [])
def test_any_split_of_the_bytes_gives_the_events_of_one_piece(text: str, chosen: StreamOptions, at: list[int]) -> None:
    whole = text.encode()
    expected = run([whole], chosen)
    assert run(cut(whole, at), chosen) == expected
    assert run([bytes([byte]) for byte in whole], chosen) == expected


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), options, st.lists(st.integers(0, 100), max_size=6))
def test_bytes_that_are_no_utf8_split_alike_too(whole: bytes, chosen: StreamOptions, at: list[int]) -> None:
    assert run(cut(whole, at), chosen) == run([whole], chosen)


@settings(max_examples=300, deadline=None)
@given(outputs, options)
def test_events_of_a_call_are_well_formed_and_plain_text_is_unchanged(text: str, chosen: StreamOptions) -> None:
    events, reply = run([text.encode()], chosen)
    open_index: int | None = None
    for event in events:
        if isinstance(event, ToolCallStart):
            assert open_index is None
            open_index = event.index
        elif isinstance(event, ToolCallArguments | ToolCallEnd | ToolCallFailed):
            assert event.index == open_index
            if not isinstance(event, ToolCallArguments):
                open_index = None
    assert open_index is None or reply.stop is not None
    for made in reply.tool_calls:
        assert isinstance(json.loads(made.arguments), dict)
    if chosen.raw and not chosen.stops:
        assert reply.content == text
    elif not chosen.raw and not chosen.tools and not chosen.stops and "think>" not in text and not chosen.starts_inside:
        assert reply.content == text.partition("<|im_end|>")[0]


@settings(max_examples=300, deadline=None)
@given(st.text("ab,\nST", max_size=30), st.lists(st.text("ab,\nST", min_size=1, max_size=4), max_size=3), st.booleans())
def test_stop_filter_emits_exactly_what_precedes_the_first_complete_stop(
    text: str, stops: list[str], include: bool
) -> None:
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    whole = text
    if ends:
        end, _, stop = min(ends)
        whole = text[: end if include else end - len(stop)]
    found = StopFilter(stops, include=include)
    out = "".join(found.feed(letter) for letter in text) + found.flush()
    assert (out, found.hit) == (whole, min(ends)[2] if ends else None)


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_files((TINY / "tokenizer.json").read_bytes(), (TINY / "tokenizer_config.json").read_bytes())


@settings(max_examples=150, deadline=None)
@given(outputs, options, st.lists(st.integers(1, 4), min_size=1))
def test_any_grouping_of_tokens_gives_the_same_reply(text: str, chosen: StreamOptions, sizes: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode_segments(tokenizer.split(text))
    one = TextStream(tokenizer, chosen, call_id=counted())
    expected = join(one.feed(ids) + one.flush())
    stream = TextStream(tokenizer, chosen, call_id=counted())
    events: list[Event] = []
    rest, groups = list(ids), cycle(sizes)
    while rest:
        size = next(groups)
        events += stream.feed(rest[:size])
        rest = rest[size:]
    assert join(events + stream.flush()) == expected
    assert stream.n_reasoning_tokens == one.n_reasoning_tokens <= len(ids)
