"""Pieces that have piled up for a client: joined to few events, in time that grows with their number alone."""

from __future__ import annotations

import time

from ninfer_runtime.serve.answering import Piece, joined, joined_events
from ninfer_runtime.text.events import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallEnd, ToolCallStart
from ninfer_runtime.text.stream import join


def test_runs_of_one_kind_become_one_event() -> None:
    events: list[Event] = [
        ReasoningText("a"), ReasoningText("b"), ContentText("c"), ContentText("d"),
        ToolCallStart(0, "id", "f"), ToolCallArguments(0, "{"), ToolCallArguments(0, "}"), ToolCallEnd(0),
        ToolCallStart(1, "id1", "f"), ToolCallArguments(1, "{}"), ToolCallEnd(1), ContentText("e"), ReasoningText("f"),
    ]  # fmt: skip
    found = joined_events(events)
    assert found == [
        ReasoningText("ab"), ContentText("cd"), ToolCallStart(0, "id", "f"), ToolCallArguments(0, "{}"), ToolCallEnd(0),
        ToolCallStart(1, "id1", "f"), ToolCallArguments(1, "{}"), ToolCallEnd(1), ContentText("e"), ReasoningText("f"),
    ]  # fmt: skip
    assert join(found) == join(events)
    assert joined_events([]) == []


def test_arguments_of_two_calls_stay_apart() -> None:
    events: list[Event] = [ToolCallArguments(0, "a"), ToolCallArguments(1, "b"), ToolCallArguments(1, "c")]
    assert joined_events(events) == [ToolCallArguments(0, "a"), ToolCallArguments(1, "bc")]


def test_pieces_are_joined_by_answer_in_the_order_of_their_first_news() -> None:
    pieces = [Piece(1, [ContentText("x")]), Piece(0, [ContentText("a")]), Piece(1, [ContentText("y")]), Piece(0, [])]
    assert joined(pieces) == [Piece(1, [ContentText("xy")]), Piece(0, [ContentText("a")])]
    assert joined([]) == []


def test_a_long_answer_is_joined_in_linear_time() -> None:
    def seconds(n: int) -> float:
        pieces = [Piece(0, [ContentText("word and ")]) for _ in range(n)]
        begin = time.process_time()
        (one,) = joined(pieces)
        assert len(one.events) == 1
        return time.process_time() - begin

    seconds(1000)
    # Joining one by one takes half a minute.
    assert seconds(100_000) < 5
