"""Who may ask: API keys compared in constant time, the ``Host`` header of a server without keys, and where to listen.

A server on loopback needs no key, but a web page that a browser on the same machine shows could reach it under a name
of its own that resolves to 127.0.0.1. So without keys a loopback server answers only to names that are loopback.
"""

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ninfer_format.errors import StorageError, UsageError
from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.settings import ServeSettings

OPEN_PATHS = frozenset({"/health", "/ready", "/"})
OPEN_FOLDERS = ("/page/",)
KEY_VARIABLE = "NINFER_API_KEY"
MIN_KEY_CHARS = 8


class Gate:
    """Lets a request in, or raises."""

    def __init__(self, settings: ServeSettings) -> None:
        self._digests = tuple(_digest(key) for key in settings.api_keys)
        self._hosts = frozenset(host.lower() for host in (*settings.allowed_hosts, settings.host))
        self._check_host = not settings.api_keys and is_loopback(settings.host)

    def check(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """ApiError 401 without a valid key, 403 for a foreign ``Host``. Preflights and open paths need no key."""
        found = dict(headers)
        if self._check_host and not self._is_ours(found.get(b"host", b"")):
            host = found[b"host"].decode("latin-1")
            raise ApiError(
                f"the host {host!r} is not this server's; name it with --allowed-host, or set an API key", status=403
            )
        if not self._digests or method == "OPTIONS" or path in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            return
        if not self._has_key(found):
            raise ApiError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                status=401,
            )

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = [headers.get(b"x-api-key", b""), token.strip() if scheme.lower() == b"bearer" else b""]
        # Every key is compared with every offer, in constant time, so that nothing shows which one was close.
        matches = [hmac.compare_digest(_digest(offer), digest) for offer in given for digest in self._digests]
        return any(matches)

    def _is_ours(self, host: bytes) -> bool:
        if not host:
            return True
        name = host.decode("latin-1").lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
        return name in self._hosts or is_loopback(name)


def _digest(key: str | bytes) -> bytes:
    """Digests have one length, so comparing them tells nothing about the key's."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key).digest()


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and loopback addresses."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def check_bind(settings: ServeSettings) -> None:
    """UsageError for a server that the network could use without a key, unless ``insecure`` says so."""
    if is_loopback(settings.host) or settings.api_keys or settings.insecure:
        return
    raise UsageError(
        f"--host {settings.host} can be reached from the network; give a key (--api-key-file FILE or {KEY_VARIABLE}), "
        "or --insecure to let anybody in"
    )


def read_keys(file: Path | None, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """API keys of a file, one a line, and of the environment variable ``NINFER_API_KEY``, separated by commas.

    UsageError for keys that are too short or not printable ASCII, StorageError for a file that cannot be read.
    """
    keys: list[str] = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        except OSError as error:
            raise StorageError(f"{file}: {error.strerror}") from None
        keys += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise UsageError(f"{file} holds no API key, expected one a line")
    given = (environment if environment is not None else os.environ).get(KEY_VARIABLE, "")
    keys += [key.strip() for key in given.split(",") if key.strip()]
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"API key {number} is not usable, expected {MIN_KEY_CHARS} or more printable characters")
    return tuple(dict.fromkeys(keys))
