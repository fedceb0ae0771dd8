"""Planned, atomic writing: objects in any order at their planned offsets, published by one rename.

The bytes go to a temporary file in the target folder. ``commit`` syncs it, renames it to the final name and syncs the
folder, so the final name only ever holds a complete file.
"""

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ninfer_format.directory import Directory, Entry, canonical_json, check_entry, check_name, check_objects
from ninfer_format.errors import ArtifactError, DiskFullError, NinferError, StorageError, UsageError
from ninfer_format.prefix import MAX_JSON_BYTES, payload_offset_for, prefix_bytes

Buffer = bytes | bytearray | memoryview

_FULL = {errno.ENOSPC: "no space left", errno.EDQUOT: "disk quota exceeded", errno.EFBIG: "file size limit reached"}
_WRITE_BYTES = 64 << 20


def storage_error(error: OSError, path: str | os.PathLike[str], doing: str) -> StorageError:
    """The StorageError (DiskFullError for ENOSPC, EDQUOT, EFBIG) that tells what failed while ``doing`` ``path``."""
    if error.errno in _FULL:
        return DiskFullError(f"{path}: {_FULL[error.errno]} while {doing}; free some space and run it again")
    return StorageError(f"{path}: {error.strerror or error} while {doing}")


def sync_folder(folder: Path) -> None:
    """Make a rename or removal inside ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: Buffer) -> None:
    """Write a whole small file under ``path``: temporary name, fsync, rename, folder fsync.

    Raises StorageError or DiskFullError and leaves no temporary behind.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise storage_error(error, path, "writing") from None


class ArtifactWriter:
    """Writes one container according to a planned Directory.

    Use as a context manager; leaving it without ``commit`` removes the temporary file. ``write`` and ``write_at`` may
    be called from several threads for different ranges.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        directory: Directory,
        *,
        overwrite: bool = False,
        temporary: Path | None = None,
        resume: bool = False,
    ) -> None:
        """Create the temporary file, size it, and write the header.

        ``resume`` reopens a temporary left by an earlier run of exactly the planned size instead of creating one.
        Raises UsageError if the target exists (unless ``overwrite``) or nothing can be resumed, DiskFullError or
        StorageError if the file system refuses.
        """
        self.path = Path(path)
        self.directory = directory
        self.temporary = temporary or self.path.with_name(f".{self.path.name}.partial")
        text = canonical_json(directory)
        if len(text) > MAX_JSON_BYTES:
            raise UsageError(f"the directory would take {len(text)} bytes; the limit is {MAX_JSON_BYTES}")
        self._overwrite = overwrite
        self.payload_offset = payload_offset_for(len(text))
        payload_bytes = max((e.offset + e.n_bytes for e in directory.objects), default=0)
        self.file_bytes = self.payload_offset + payload_bytes
        names = [e.name for e in directory.objects]
        if len(set(names)) != len(names) or not names:
            raise UsageError("the planned directory is empty or names an object twice")
        for entry in directory.objects:
            check_name(entry.name, "object name")
            check_entry(entry)
        check_objects(directory.objects, payload_bytes)
        self._entries: dict[str, Entry] = {e.name: e for e in directory.objects}
        self._written: dict[str, int] = dict.fromkeys(self._entries, 0)
        self._lock = threading.Lock()
        self._refuse_existing()
        self._descriptor: int | None = self._open(resume)
        if not resume:
            try:
                header = prefix_bytes(2, len(text)) + text
                self._pwrite(header, 0)
                os.ftruncate(self._descriptor, self.file_bytes)
            except (OSError, NinferError) as error:
                self.abort()
                raise error if isinstance(error, NinferError) else storage_error(error, self.path, "creating") from None

    def _refuse_existing(self) -> None:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise UsageError(f"{self.path}: is a link or not a regular file; choose another output name")
        if self.path.exists() and not self._overwrite:
            raise UsageError(f"{self.path}: already exists; remove it, choose another name, or ask to overwrite it")

    def _open(self, resume: bool) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | (0 if resume else os.O_CREAT | os.O_EXCL)
        try:
            descriptor = os.open(self.temporary, flags, 0o666)
        except FileNotFoundError:
            if resume:
                raise UsageError(f"{self.temporary}: nothing to resume; start without resuming") from None
            raise UsageError(f"{self.path.parent}: no such folder for the output") from None
        except FileExistsError:
            raise UsageError(
                f"{self.temporary}: left by an unfinished run or used by a running one; resume it or remove it"
            ) from None
        except OSError as error:
            raise storage_error(error, self.temporary, "opening") from None
        if resume and (size := os.fstat(descriptor).st_size) != self.file_bytes:
            os.close(descriptor)
            raise UsageError(f"{self.temporary}: has {size} bytes, the plan needs {self.file_bytes}; start again")
        return descriptor

    @property
    def descriptor(self) -> int:
        """File descriptor of the temporary; ArtifactError when the writer is finished."""
        if self._descriptor is None:
            raise ArtifactError(f"{self.path}: the writer is already committed or aborted")
        return self._descriptor

    def _pwrite(self, content: Buffer, position: int) -> None:
        view = memoryview(content).cast("B")
        try:
            while view:
                done = os.pwrite(self.descriptor, view[:_WRITE_BYTES], position)
                view, position = view[done:], position + done
        except OSError as error:
            raise storage_error(error, self.path, "writing") from None

    def write(self, name: str, payload: Buffer) -> None:
        """Write one whole object; UsageError if the length is not the planned one."""
        size = memoryview(payload).nbytes
        if size != self._entry(name).n_bytes:
            raise UsageError(f"object {name!r}: {size} bytes given, {self._entry(name).n_bytes} planned")
        self.write_at(name, 0, payload)

    def write_at(self, name: str, offset: int, content: Buffer) -> None:
        """Write part of an object, ``offset`` bytes from its start; ranges of one object must not overlap."""
        entry, size = self._entry(name), memoryview(content).nbytes
        if offset < 0 or offset + size > entry.n_bytes:
            raise UsageError(f"object {name!r}: range {offset}..{offset + size} is outside its {entry.n_bytes} bytes")
        self._pwrite(content, self.payload_offset + entry.offset + offset)
        with self._lock:
            self._written[name] += size

    def mark_written(self, name: str) -> None:
        """Record that a resumed temporary already holds this object."""
        self._written[name] = self._entry(name).n_bytes

    def read(self, name: str) -> bytes:
        """The object's bytes as they are in the temporary file (to verify a resumed one)."""
        entry = self._entry(name)
        begin, parts, left = self.payload_offset + entry.offset, [], entry.n_bytes
        while left:
            part = os.pread(self.descriptor, min(left, _WRITE_BYTES), begin)
            if not part:
                break
            parts.append(part)
            begin, left = begin + len(part), left - len(part)
        return b"".join(parts)

    def sync(self) -> None:
        """Make everything written so far durable."""
        try:
            os.fdatasync(self.descriptor)
        except OSError as error:
            raise storage_error(error, self.path, "syncing") from None

    def commit(self) -> None:
        """Sync, rename to the final name, sync the folder. UsageError if an object is missing or incomplete."""
        short = [n for n, done in self._written.items() if done != self._entries[n].n_bytes]
        if short:
            total = len(self._written)
            raise UsageError(f"{len(short)} of {total} objects are not completely written, first {short[0]!r}")
        try:
            os.fsync(self.descriptor)
            self._refuse_existing()
            os.replace(self.temporary, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise storage_error(error, self.path, "publishing") from None
        self._close()

    def abort(self, *, keep: bool = False) -> None:
        """Stop without publishing; ``keep`` leaves the temporary for a later resume."""
        if self._descriptor is None:
            return
        self._close()
        if not keep:
            with suppress(FileNotFoundError):
                self.temporary.unlink()

    def __enter__(self) -> "ArtifactWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise UsageError(f"object {name!r} is not part of the planned directory") from None

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
