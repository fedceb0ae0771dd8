"""The page at ``/``: static files of ``web/``, held in memory, each with strict headers and an entity tag."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType

WEB = Path(__file__).parent / "web"

MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        # The page never turns text into markup or code; a browser that knows trusted types holds it to that.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    # Asked again each time, answered with 304: a newer server never meets an older script.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. ``path`` is that of its URL: ``/`` for ``index.html``, else ``/page/NAME``."""

    path: str
    media_type: str
    body: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class PageResponse:
    """What a ``GET`` of a page file gets; ``HEAD`` gets the same without the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@cache
def page_files() -> Mapping[str, PageFile]:
    """URL path → file, for every file of ``web/``, read once."""
    files = {}
    for source in sorted(WEB.iterdir()):
        if (media_type := MEDIA_TYPES.get(source.suffix)) is None:
            continue
        body = source.read_bytes()
        path = "/" if source.name == "index.html" else f"/page/{source.name}"
        files[path] = PageFile(path, media_type, body, f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return MappingProxyType(files)


def page_headers(file: PageFile) -> dict[str, str]:
    """The headers of a file, its length left out."""
    return {"Content-Type": file.media_type, "ETag": file.etag, **PAGE_HEADERS}


def page_response(path: str, if_none_match: str | None = None) -> PageResponse | None:
    """The answer to a ``GET`` of ``path``: 304 when the client has it already, None when there is no such file."""
    if (file := page_files().get(path)) is None:
        return None
    known = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
    if file.etag in known:
        return PageResponse(HTTPStatus.NOT_MODIFIED, page_headers(file), b"")
    return PageResponse(HTTPStatus.OK, page_headers(file), file.body)
