"""Server-sent events: framing, and a response that sends them while it watches for the client to leave.

Texts inside are JSON on one line, so a frame never needs to be split.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
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


async def send_stream(send: Send, frames: AsyncIterator[bytes], headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """Send a whole event stream. The status line goes out with the first frame."""
    started = False
    async for frame in frames:
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})
            started = True
        await send({"type": "http.response.body", "body": frame, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
