"""The text of ``sha256sum``: writing its lines, and finding a file's digest in a SHA256SUMS file."""

import os
import re
from pathlib import Path

from ninfer_format.errors import UsageError
from ninfer_format.reader import open_regular

_MAX_SUMS_BYTES = 16 << 20
_LINE = re.compile(rb"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
_TAGGED = re.compile(rb"(\\?)SHA256 \((.+)\) = ([0-9a-fA-F]{64})", re.DOTALL)
_ESCAPES = {b"\\": b"\\\\", b"\n": b"\\n", b"\r": b"\\r"}
_MEANINGS = {escape: plain for plain, escape in _ESCAPES.items()}


def sums_line(sha256: str, path: str | os.PathLike[str]) -> bytes:
    """One line as ``sha256sum`` prints it: names with a backslash or a line break are escaped and marked with one."""
    name = os.fsencode(path)
    escaped = re.sub(rb"[\\\n\r]", lambda found: _ESCAPES[found[0]], name)
    return (b"\\" if escaped != name else b"") + sha256.encode() + b"  " + escaped + b"\n"


def _unescape(name: bytes) -> bytes | None:
    if re.fullmatch(rb"(?:[^\\]|\\[\\nr])*", name, re.DOTALL) is None:
        return None
    return re.sub(rb"\\[\\nr]", lambda found: _MEANINGS[found[0]], name)


def parse_sums(content: bytes) -> list[tuple[bytes, str]]:
    """(file name, SHA-256 in lower-case hex) of every line, in text, binary or tagged spelling.

    Empty lines and lines starting with ``#`` are skipped. UsageError names the first line that is none of these.
    """
    entries: list[tuple[bytes, str]] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip() or line.startswith(b"#"):
            continue
        if plain := _LINE.fullmatch(line.removesuffix(b"\r")):
            mark, digest, name = plain.groups()
        elif tagged := _TAGGED.fullmatch(line.removesuffix(b"\r")):
            mark, name, digest = tagged.groups()
        else:
            raise UsageError(f"line {number} is not a line of sha256sum: {line[:80]!r}")
        decoded = _unescape(name) if mark else name
        if decoded is None:
            raise UsageError(f"line {number} has a wrong escape in its file name: {line[:80]!r}")
        entries.append((decoded, digest.decode().lower()))
    return entries


def read_sums(path: str | os.PathLike[str]) -> list[tuple[bytes, str]]:
    """The entries of a SHA256SUMS file; UsageError when it is not one."""
    with open_regular(path) as stream:
        content = stream.read(_MAX_SUMS_BYTES + 1)
    if len(content) > _MAX_SUMS_BYTES:
        raise UsageError(f"{path}: is larger than {_MAX_SUMS_BYTES} bytes; not a file of digests")
    try:
        return parse_sums(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def digest_for(path: Path, entries: list[tuple[bytes, str]], sums: str | os.PathLike[str]) -> str:
    """The digest of the entry with ``path``'s base name; UsageError when there is none or several disagree."""
    wanted = os.fsencode(path.name)
    found = {digest for name, digest in entries if name.rpartition(b"/")[2] == wanted}
    if not found:
        raise UsageError(f"{path}: {sums} has no entry for {path.name!r} (it has {len(entries)})")
    if len(found) > 1:
        raise UsageError(f"{path}: {sums} has {len(found)} different digests for {path.name!r}")
    return found.pop()
