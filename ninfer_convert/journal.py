"""The journal of a build: what an unfinished temporary file already holds, and for which sources and options.

JSON lines beside the temporary: a header, then one line per finished object, written only after the object's bytes
are durable. A torn last line is ignored. The open file is locked, so two builds cannot share an output.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ninfer_format import UsageError
from ninfer_format.writer import storage_error, sync_folder

SCHEMA = "ninfer.journal/1"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Finished:
    """An object that is completely in the temporary file; ``error`` as in the report, None for exact copies."""

    name: str
    sha256: str
    error: Mapping[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """The journal line."""
        return {"object": self.name, "sha256": self.sha256, "error": None if self.error is None else dict(self.error)}


def journal_of(out: Path) -> Path:
    """Where the journal of a build of ``out`` lies."""
    return out.with_name(f".{out.name}.journal")


class Journal:
    """An open, locked journal. ``fingerprint`` and ``finished`` are what the file held when it was opened."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.fingerprint: Mapping[str, Any] | None = None
        """None for an empty journal or one whose header cannot be read."""
        self.finished: dict[str, Finished] = {}
        self.published: tuple[int, int, int] | None = None
        """Device, inode and size of the complete temporary just before it got its final name."""
        self._good_bytes = 0
        self._read()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create, and lock. UsageError if a running build holds it, StorageError if the system refuses."""
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except OSError as error:
                raise storage_error(error, path, "opening the journal") from None
            try:
                _lock(descriptor, path)
                # Between open and lock, the build that held it may have ended and removed it.
                if _same_file(descriptor, path):
                    return cls(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def start(self, fingerprint: Mapping[str, Any]) -> None:
        """Make it the journal of a new build."""
        self.finished, self.published, self._good_bytes = {}, None, 0
        self.fingerprint = fingerprint
        self._append([{"schema": SCHEMA, "fingerprint": fingerprint}])
        sync_folder(self.path.parent)

    def drop(self, names: Sequence[str]) -> None:
        """Forget finished objects whose bytes turned out to be other than recorded."""
        self._append([{"dropped": list(names)}])
        for name in names:
            del self.finished[name]

    def add(self, finished: Sequence[Finished]) -> None:
        """Record objects whose bytes are durable."""
        self._append([f.to_json() for f in finished])

    def add_published(self, facts: tuple[int, int, int]) -> None:
        """Record that the temporary (device, inode, size) is complete, synced, and about to be renamed."""
        self._append([{"published": facts}])

    def close(self) -> None:
        """Unlock and keep the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Delete the file, then unlock."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        try:
            os.ftruncate(self._descriptor, self._good_bytes)
            done = 0
            while done < len(text):
                done += os.pwrite(self._descriptor, text[done:], self._good_bytes + done)
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise storage_error(error, self.path, "writing the journal") from None
        self._good_bytes += len(text)

    def _read(self) -> None:
        for line, end in _lines(self._descriptor):
            try:
                self._take(line)
            except (KeyError, TypeError, ValueError):
                return
            self._good_bytes = end

    def _take(self, line: Mapping[str, Any]) -> None:
        if self.fingerprint is None:
            if line["schema"] != SCHEMA:
                raise ValueError(line["schema"])
            self.fingerprint = dict(line["fingerprint"])
        elif "object" in line:
            self.finished[line["object"]] = Finished(line["object"], line["sha256"], line["error"])
        elif "dropped" in line:
            for name in line["dropped"]:
                self.finished.pop(name, None)
        else:
            device, inode, size = line["published"]
            self.published = device, inode, size


def _lines(descriptor: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Complete JSON lines from the start and where each ends; stops at the first that is torn or damaged."""
    size = os.fstat(descriptor).st_size
    text, end = os.pread(descriptor, size, 0), 0
    while (newline := text.find(b"\n", end)) >= 0:
        try:
            line = json.loads(text[end:newline])
        except ValueError:
            return
        if not isinstance(line, dict):
            return
        end = newline + 1
        yield line, end


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{path}: another build is writing this output; wait for it or choose another name") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise storage_error(error, path, "locking the journal") from None


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
