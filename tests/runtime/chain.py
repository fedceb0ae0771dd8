"""Run one model output through the text chain, whole and cut into pieces of every small size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ninfer_runtime.text.events import Event
from ninfer_runtime.text.stream import Reply, StreamOptions, TextChain, join
from ninfer_runtime.text.tool_calls import Tool, tools_from

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS: tuple[Tool, ...] = tools_from((WEATHER, NOW))


def tool(**properties: Any) -> Tool:
    """A function ``f`` with these parameter schemas."""
    return Tool("f", {"type": "object", "properties": properties})


def call(name: str, *parameters: tuple[str, str]) -> str:
    """A call in the model's words."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def events_of(pieces: Sequence[str], options: StreamOptions, end_markers: Sequence[str] = ()) -> list[Event]:
    """Events of a message that arrives in these pieces; call ids are call_0, call_1 …"""
    numbers = iter(range(1000))
    chain = TextChain(options, end_markers, lambda: f"call_{next(numbers)}")
    return [event for piece in pieces for event in chain.feed(piece.encode())] + chain.flush()


def reply(text: str, *, end_markers: Sequence[str] = (), **options: Any) -> Reply:
    """What ``text`` joins to, the same in one piece and in pieces of 1, 2, 3 and 7 characters."""
    chosen = StreamOptions(**options)
    whole = join(events_of([text], chosen, end_markers))
    for size in (1, 2, 3, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert join(events_of(pieces, chosen, end_markers)) == whole, f"pieces of {size} characters differ"
    return whole


def halves(text: str) -> list[list[str]]:
    """``text`` cut in two at every position."""
    return [[text[:i], text[i:]] for i in range(len(text) + 1)]
