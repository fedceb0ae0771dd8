"""Media over http and https: each hop is looked up, checked, connected to what was checked, and read within limits."""

import http.client
import ipaddress
import socket
import ssl
import string
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from ninfer_runtime.media.errors import MediaError, MediaFetchError, MediaTimeoutError
from ninfer_runtime.media.policy import Address, MediaBudget, MediaPolicy

REDIRECTS = frozenset({301, 302, 303, 307, 308})
READ_BYTES = 1 << 18
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"Accept": "image/*, video/*", "Accept-Encoding": "identity", "User-Agent": "ninfer", "Connection": "close"}


class Deadline:
    """A moment after which nothing is waited for."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def left(self, most: float = float("inf")) -> float:
        """Seconds left, at most ``most``; MediaTimeoutError when there are none."""
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise MediaTimeoutError("a medium took too long to fetch")
        return min(seconds, most)


def fetch_remote(url: str, policy: MediaPolicy, most_bytes: int, budget: MediaBudget) -> tuple[bytes, str]:
    """Bytes and claimed media type of ``url``, redirects followed; errors as of ``fetch``."""
    deadline = Deadline(policy.total_seconds)
    was_safe = False
    for _ in range(policy.max_redirects + 1):
        parts = _checked(url)
        if was_safe and parts.scheme == "http":
            raise MediaError("a redirect leads from https to http")
        was_safe = parts.scheme == "https"
        with _asked(parts, policy, deadline) as response:
            if response.status not in REDIRECTS:
                return _read(response, parts, deadline, most_bytes, budget)
            location = response.headers.get("Location")
        if not location:
            raise MediaFetchError(f"{parts.hostname} redirects to nowhere")
        url = urljoin(url, location)
    raise MediaFetchError(f"a medium is redirected more than {policy.max_redirects} times")


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaError(f"a media URL cannot be read: {error}") from None
    if parts.scheme not in _PORTS:
        raise MediaError(f"the scheme is {parts.scheme!r}, expected http or https")
    if parts.username is not None or parts.password is not None:
        raise MediaError("a media URL holds credentials")
    if not parts.hostname or port == 0:
        raise MediaError("a media URL names no host")
    if any(ord(c) <= 32 or ord(c) == 127 for c in url):
        raise MediaError("a media URL has blanks")
    return parts


# ---- where to --------------------------------------------------------------------------------------
def resolve(host: str, port: int, policy: MediaPolicy, deadline: Deadline) -> list[Address]:
    """The addresses of a host, all of them allowed; MediaError when one is not, whichever way it is spelled."""
    found: list[Any] = []
    thread = threading.Thread(target=_look_up, args=(host, port, found), daemon=True, name="ninfer-lookup")
    thread.start()
    thread.join(deadline.left())
    if not found:
        raise MediaTimeoutError(f"the name {host!r} took too long to look up")
    if isinstance(found[0], OSError | UnicodeError):
        raise MediaFetchError(f"the host {host!r} is not known")
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in found[0]]
    for address in addresses:
        if not policy.may_reach(address):
            raise MediaError(f"the host {host!r} has an address that is not public; the server refuses to go there")
    return addresses


def _look_up(host: str, port: int, found: list[Any]) -> None:
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found.append(list(dict.fromkeys(str(entry[4][0]) for entry in entries)))
    except (OSError, UnicodeError) as error:
        found.append(error)


def _connect(parts: SplitResult, policy: MediaPolicy, deadline: Deadline) -> socket.socket:
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    last: OSError | None = None
    for address in resolve(host, port, policy, deadline):
        try:
            connected = socket.create_connection((str(address), port), deadline.left(policy.connect_seconds))
        except OSError as error:
            last = error
            continue
        try:
            if parts.scheme == "https":
                connected = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
        except OSError as error:
            connected.close()
            raise MediaFetchError(f"{host}: TLS fails: {error}") from None
        return connected
    if isinstance(last, TimeoutError):
        raise MediaTimeoutError(f"{host} does not answer")
    raise MediaFetchError(f"{host} cannot be reached: {last}")


# ---- one hop ---------------------------------------------------------------------------------------
@contextmanager
def _asked(parts: SplitResult, policy: MediaPolicy, deadline: Deadline) -> Iterator[http.client.HTTPResponse]:
    """The response to a GET. A watchdog ends the connection at the deadline, however slowly its bytes drip."""
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or _PORTS[parts.scheme])
    connection.sock = connected = _connect(parts, policy, deadline)
    connected.settimeout(deadline.left())
    watchdog = threading.Timer(deadline.left(), _shut, (connected,))
    watchdog.daemon = True
    watchdog.start()
    target = quote(parts.path or "/", safe=string.punctuation)
    query = quote(parts.query, safe=string.punctuation)
    try:
        connection.putrequest("GET", f"{target}?{query}" if query else target, skip_accept_encoding=True)
        for name, value in _HEADERS.items():
            connection.putheader(name, value)
        connection.endheaders()
        yield connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        deadline.left()
        if isinstance(error, TimeoutError):
            raise MediaTimeoutError(f"{parts.hostname} does not answer") from None
        raise MediaFetchError(f"{parts.hostname} breaks off: {type(error).__name__}") from None
    finally:
        watchdog.cancel()
        connection.close()


def _shut(connected: socket.socket) -> None:
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _read(
    response: http.client.HTTPResponse, parts: SplitResult, deadline: Deadline, most_bytes: int, budget: MediaBudget
) -> tuple[bytes, str]:
    host = parts.hostname
    if response.status != 200:
        raise MediaFetchError(f"{host} answers with status {response.status}")
    encoding = (response.headers.get("Content-Encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise MediaFetchError(f"{host} sends a content encoding nobody asked for: {encoding!r}")
    length = response.headers.get("Content-Length", "")
    if length.isdigit() and int(length) > most_bytes:
        raise budget.too_large(f"the medium of {host}")
    content = bytearray()
    while piece := response.read1(READ_BYTES):
        content += piece
        if len(content) > most_bytes:
            raise budget.too_large(f"the medium of {host}")
        deadline.left()
    # The watchdog's end of a connection looks like the other side's.
    deadline.left()
    if length.isdigit() and len(content) != int(length):
        raise MediaFetchError(f"{host} breaks off after {len(content)} of {length} bytes")
    if not content:
        raise MediaFetchError(f"{host} sends an empty medium")
    media_type = (response.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    return bytes(content), media_type
