"""A medium by its URL: ``data:``, a local file under an allowed root, or http(s) by the policy.

A remote name is resolved once per hop, every address it has must be allowed, and the connection goes to one of them:
what is checked is what is used. Redirects start from the beginning. No proxy, no cookies, no credentials.
"""

import base64
import binascii
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from ninfer_runtime.media.errors import MediaError
from ninfer_runtime.media.policy import MediaBudget, MediaPolicy
from ninfer_runtime.media.remote import fetch_remote

MAX_URL_CHARS = 8192
"""Of URLs that are no data: URL."""
MAX_SHOWN_CHARS = 80

_DATA = re.compile(r"\s*data:([^,]{0,400}),", re.IGNORECASE)
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/]")


@dataclass(frozen=True, slots=True)
class Medium:
    """The bytes of a picture or video, and the media type its source claims ("" when it claims none)."""

    content: bytes
    media_type: str
    source: str


def fetch(url: str, policy: MediaPolicy, budget: MediaBudget) -> Medium:
    """The medium at ``url``. Blocks, at most ``policy.total_seconds``.

    MediaError for a source that is not allowed or has a wrong form, MediaBudgetError for too much of it,
    MediaFetchError and MediaTimeoutError for a remote host that fails.
    """
    most_bytes = budget.begin_item()
    if (head := _DATA.match(url)) is not None:
        medium = _from_data(url, head, most_bytes, budget)
    else:
        medium = _from_elsewhere(url.strip(), policy, most_bytes, budget)
    budget.end_item(len(medium.content))
    return medium


def shown_url(url: str) -> str:
    """A URL for messages: short, on one line, without a query or credentials, which may hold secrets."""
    parts = urlsplit(url)
    text = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return repr(text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…")


def _from_elsewhere(url: str, policy: MediaPolicy, most_bytes: int, budget: MediaBudget) -> Medium:
    if len(url) > MAX_URL_CHARS or any(ord(c) <= 32 or ord(c) == 127 for c in url):
        raise MediaError(f"a media URL has blanks or more than {MAX_URL_CHARS} characters")
    try:
        scheme = urlsplit(url).scheme.lower()
    except ValueError as error:
        raise MediaError(f"a media URL cannot be read: {error}") from None
    match scheme:
        case "http" | "https" if policy.remote:
            content, media_type = fetch_remote(url, policy, most_bytes, budget)
            return Medium(content, media_type, shown_url(url))
        case "http" | "https":
            raise MediaError(f"{shown_url(url)}: remote media are not allowed here")
        case "file" | "":
            return _from_file(url, policy, most_bytes, budget)
    raise MediaError(f"{shown_url(url)}: the scheme is {scheme!r}, expected data, http, https or file")


# ---- data: -----------------------------------------------------------------------------------------
def _from_data(url: str, head: re.Match[str], most_bytes: int, budget: MediaBudget) -> Medium:
    media_type, *options = [part.strip().lower() for part in head.group(1).split(";")]
    body = url[head.end() :]
    if "base64" not in options:
        if len(body) > 3 * most_bytes:
            raise budget.too_large("the data: URL")
        content = unquote_to_bytes(body)
    else:
        if len(body) > most_bytes * 4 // 3 + most_bytes // 16 + 16:
            raise budget.too_large("the data: URL")
        content = _base64(body)
    if len(content) > most_bytes:
        raise budget.too_large("the data: URL")
    if not content:
        raise MediaError("a data: URL is empty")
    return Medium(content, media_type, "data:")


def _base64(text: str) -> bytes:
    """Base64 in either alphabet, with or without padding, broken into lines or not."""
    if "%" in text:
        text = unquote(text)
    plain = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    if (wrong := _NOT_BASE64.search(plain)) is not None:
        raise MediaError(f"the base64 of a data: URL has {wrong.group()!r} at character {wrong.start()}")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except binascii.Error as error:
        raise MediaError(f"the base64 of a data: URL cannot be decoded: {error}") from None


# ---- files -----------------------------------------------------------------------------------------
def _from_file(url: str, policy: MediaPolicy, most_bytes: int, budget: MediaBudget) -> Medium:
    parts = urlsplit(url)
    if parts.scheme and parts.netloc not in ("", "localhost"):
        raise MediaError(f"{shown_url(url)}: a file: URL names a host")
    path = unquote(parts.path) if parts.scheme else url
    if not policy.roots:
        raise MediaError("local files are not allowed here; the server allows folders with --media-root")
    if "\0" in path:
        raise MediaError("a media path holds a zero byte")
    for root in policy.roots:
        if (inside := _inside(path, root)) is not None:
            return Medium(_read_inside(root, inside, most_bytes, budget), "", path)
    raise MediaError(f"{path!r} is not under a folder of --media-root")


def _inside(path: str, root: Path) -> tuple[str, ...] | None:
    """The path's parts below ``root``, None when it leads elsewhere. A relative path is one below the root."""
    full = os.path.normpath(os.path.join(root.absolute(), path))
    try:
        relative = Path(full).relative_to(os.path.normpath(root.absolute()))
    except ValueError:
        return None
    return relative.parts or None


def _read_inside(root: Path, parts: tuple[str, ...], most_bytes: int, budget: MediaBudget) -> bytes:
    """Opened from the root down without following a link, so that nothing can be exchanged in between."""
    name = "/".join(parts)
    folder = -1
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = below
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(parts[-1], flags, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MediaError(f"{name!r} is not a regular file")
            if status.st_size > most_bytes:
                raise budget.too_large(repr(name))
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise MediaError(f"{name!r} cannot be read: {error.strerror}") from None
    finally:
        if folder >= 0:
            os.close(folder)
    if len(content) > most_bytes:
        raise budget.too_large(repr(name))
    return content
