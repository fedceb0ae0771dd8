"""Drawn model outputs, cut at every position: the events are always those of one piece, streamed or not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from itertools import count

import pytest

from ninfer_runtime.engine.reading import AnswerReader
from ninfer_runtime.engine.sequence import FinishReason
from ninfer_runtime.text.events import Event, StopHit, ToolCallFailed
from ninfer_runtime.text.stream import Reply, StreamOptions, TextChain, TextStream, join
from tests.property.model_outputs import KINDS, Output, model_outputs
from tests.property.test_stream_property import cut, merged, tiny_tokenizer

END_MARKERS = ("<|im_end|>",)
N_RANDOM_CUTS = 4
LEAST = {**dict.fromkeys(KINDS, 0.2), "call": 0.2, "failed call": 0.02, "reasoning": 0.3, "stop": 0.1}
"""How many outputs, as a share of those asked for, must show each of these for the property to say something."""


def counted() -> Callable[[], str]:
    numbers = count()
    return lambda: str(next(numbers))


def events_of(pieces: Iterable[bytes], options: StreamOptions) -> list[Event]:
    """What streaming sends for an output that arrives in these pieces."""
    chain = TextChain(options, END_MARKERS, counted())
    return [event for piece in pieces for event in chain.feed(piece)] + chain.flush()


def stream_of(options: StreamOptions) -> TextStream:
    return TextStream(tiny_tokenizer(), options, end_markers=END_MARKERS, call_id=counted())


def tokenizations(text: str) -> list[list[int]]:
    """Token ids that spell the text: one a byte, as the vocabulary would write it, and that with the tags in letters.

    The vocabulary composes characters; a text in which it would is spelled in bytes alone.
    """
    tokenizer = tiny_tokenizer()
    tagged = tokenizer.encode_segments(tokenizer.split(text))
    found = [[byte_ids()[byte] for byte in text.encode()], tokenizer.encode_text(text)]
    if not any(map(tokenizer.is_control, tagged)):
        found.append(tagged)
    return [ids for ids in found if b"".join(map(tokenizer.token_bytes, ids)) == text.encode()]


@cache
def byte_ids() -> dict[int, int]:
    tokenizer = tiny_tokenizer()
    spelled = ((tokenizer.token_bytes(token_id), token_id) for token_id in range(tokenizer.n_addressable))
    return {piece[0]: token_id for piece, token_id in spelled if len(piece) == 1}


def read(ids: list[int], options: StreamOptions, *, take_each: bool) -> Reply:
    """Through the reader of the engine: events taken after every token, or all at the end."""
    reader = AnswerReader(stream_of(options))
    events: list[Event] = []
    for token_id in ids:
        verdict = reader.feed(token_id)
        if take_each:
            events += reader.take()
        if isinstance(verdict, FinishReason):
            break
    return join(events + reader.flush())


def check(output: Output, draw: random.Random) -> list[Event]:
    """Every way of cutting one output; its events."""
    whole, options = output.text.encode(), output.options
    expected = merged(events_of([whole], options))
    reply = join(expected)
    for at in range(1, len(whole)):
        assert merged(events_of([whole[:at], whole[at:]], options)) == expected, f"cut at byte {at}"
    singles = [bytes([byte]) for byte in whole]
    assert merged(events_of(singles, options)) == expected, "single bytes"
    for _ in range(N_RANDOM_CUTS):
        pieces = cut(whole, [draw.randint(0, len(whole)) for _ in range(draw.randint(2, 12))])
        assert merged(events_of(pieces, options)) == expected, pieces
    for ids in tokenizations(output.text):
        at_once = stream_of(options)
        assert merged(at_once.feed(ids) + at_once.flush()) == expected, ids
        assert read(ids, options, take_each=True) == reply, "streaming"
        assert read(ids, options, take_each=False) == reply, "not streaming"
    return expected


def check_many(seed: int, n: int) -> None:
    """``n`` outputs, or more until they were such as make a difference."""
    draw = random.Random(seed ^ 1)
    seen: Counter[str] = Counter()
    for i, output in enumerate(model_outputs(seed, 10 * n)):
        if i >= n and all(seen[what] >= share * n for what, share in LEAST.items()):
            break
        try:
            events = check(output, draw)
        except AssertionError as error:
            raise AssertionError(f"output {i}, {output.kind}: {output.text!r} with {output.options}") from error
        reply = join(events)
        seen[output.kind] += 1
        seen["call"] += bool(reply.tool_calls)
        seen["failed call"] += any(isinstance(event, ToolCallFailed) for event in events)
        seen["reasoning"] += bool(reply.reasoning)
        seen["content"] += bool(reply.content)
        seen["stop"] += any(isinstance(event, StopHit) for event in events)
    print(dict(seen))
    for what, share in LEAST.items():
        assert seen[what] >= share * n, f"too few outputs with {what}: {seen}"


def test_every_split_of_drawn_outputs_gives_the_events_of_one_piece(fresh_seed: int) -> None:
    check_many(fresh_seed, 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_split_of_two_thousand_outputs_gives_the_events_of_one_piece(fresh_seed: int) -> None:
    check_many(fresh_seed, 2_000)
