"""A request's body, checked before it is parsed: media type, encoding, size, nesting. Then strict JSON."""

import re
from collections.abc import Iterable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ninfer_runtime.serve.answering import ClientGoneError
from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.text.json_input import parse_json

JSON_TYPES = ("application/json", "text/json")
LARGE_BYTES = 1 << 16
"""Bodies from here on are parsed beside the event loop."""

_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[\]{}]', re.DOTALL)
"""A string (one without an end reaches to the end, so that no byte is looked at twice) or a bracket."""


def check_headers(headers: Iterable[tuple[bytes, bytes]], most_bytes: int) -> None:
    """ApiError 413 or 415 for a body that will not be read; ``headers`` are those of an ASGI scope."""
    found = dict(headers)
    encoding = found.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b""):
        raise ApiError(f"the content encoding is {encoding.decode('latin-1')!r}, expected a body as it is", status=415)
    media_type = found.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if media_type not in JSON_TYPES:
        raise ApiError(f"the content type is {media_type!r}, expected 'application/json'", status=415)
    length = found.get(b"content-length", b"")
    if length.isdigit() and int(length) > most_bytes:
        raise too_large(int(length), most_bytes)


def too_large(n_bytes: int, most_bytes: int) -> ApiError:
    """The error for a body over the limit."""
    return ApiError(f"the body has {n_bytes} bytes or more, expected at most {most_bytes}", status=413)


def check_depth(body: bytes, most: int) -> None:
    """ApiError for arrays and objects nested deeper than ``most``; brackets in strings do not count."""
    depth = 0
    for match in _BRACKETS.finditer(body):
        bracket = match.group()
        if bracket in (b"[", b"{"):
            depth += 1
            if depth > most:
                raise ApiError(f"the body is nested more than {most} levels deep", code="nesting_too_deep")
        elif bracket in (b"]", b"}"):
            depth -= 1


def parse_body(body: bytes, most_depth: int) -> Any:
    """The value of a JSON body; ApiError for what is not strict JSON."""
    check_depth(body, most_depth)
    return parse_json(body, "the body", _BodyError)


class _BodyError(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_json")


async def read_json(request: Request, service: Any) -> Any:
    """The decoded body of a request within the limits; ClientGoneError when the client leaves while sending it."""
    settings = service.settings
    check_headers(request.scope["headers"], settings.max_request_bytes)
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > settings.max_request_bytes:
                raise too_large(len(body), settings.max_request_bytes)
    except ClientDisconnect:
        raise ClientGoneError("the client left while it sent its request") from None
    if len(body) < LARGE_BYTES:
        return parse_body(bytes(body), settings.max_depth)
    return await service.in_thread(parse_body, bytes(body), settings.max_depth)
