"""Server-sent events: framing, headers, the types of ASGI.

Texts inside are JSON on one line, so a frame never needs to be split.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still working\n\n"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

compact_json: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode
"""JSON on one line in ASCII: no character of it can be cut or misread, lone surrogates included."""


def data_frame(text: str) -> bytes:
    """One event without a name; ``text`` is JSON on one line."""
    return f"data: {text}\n\n".encode()


def named_frame(name: str, text: str) -> bytes:
    """One event with a name."""
    return f"event: {name}\ndata: {text}\n\n".encode()
