"""A copy of an artifact with another identity or other resources: new offsets, the same payloads, atomically."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ninfer_format import Artifact, ArtifactWriter, Directory, DirectoryError, Identity, ResourceEntry, UsageError
from ninfer_format.directory import Entry
from ninfer_format.errors import DiskFullError, StorageError
from ninfer_format.formats import RAW_BYTES
from ninfer_format.geometry import up
from ninfer_format.hashing import read_exactly
from ninfer_format.published import RESOURCE_ORDER

_COPY_BYTES = 8 << 20
Changes = Mapping[str, bytes | None]
"""Resource name → new content, or None to leave it out. A name that the artifact lacks is added in its place."""


def changed_directory(artifact: Artifact, identity: Identity, changes: Changes) -> Directory:
    """The directory of the copy: objects in the same order, packed as a writer packs them."""
    objects, end = [], 0
    for entry in _with_changes(artifact, changes):
        offset = up(end, entry.alignment)
        objects.append(replace(entry, offset=offset))
        end = offset + entry.n_bytes
    return Directory(identity, tuple(objects))


def _with_changes(artifact: Artifact, changes: Changes) -> Iterator[Entry]:
    """The copy's objects; offsets are still the old ones. An added resource follows those that precede it in order."""
    held = artifact.objects.names()
    added = [name for name in RESOURCE_ORDER if changes.get(name) is not None and name not in held]
    for entry in artifact.objects:
        while added and not (entry.name in RESOURCE_ORDER and _rank(entry.name) < _rank(added[0])):
            yield _resource(added[0], changes)
            del added[0]
        if entry.name not in changes:
            yield entry
        elif changes[entry.name] is not None:
            yield _resource(entry.name, changes)
    yield from (_resource(name, changes) for name in added)


def _rank(name: str) -> int:
    return RESOURCE_ORDER.index(name)


def _resource(name: str, changes: Changes) -> ResourceEntry:
    content = changes[name]
    if not content:
        raise DirectoryError(f"resource {name!r} would be empty; a resource has at least one byte")
    return ResourceEntry(name, RAW_BYTES, 0, len(content))


def rewrite(
    artifact: Artifact,
    out: Path,
    directory: Directory,
    changes: Changes,
    *,
    force: bool,
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> int:
    """Write ``out`` with ``directory`` (of ``changed_directory``) and return its size in bytes.

    ``progress`` is called with payload bytes. ``out`` may be the artifact's own path if ``force`` is set: the file is
    replaced by a rename. UsageError, DiskFullError or StorageError; ``out`` is then as it was.
    """
    temporary = out.with_name(f".{out.name}.edit")
    if not out.name or not out.parent.is_dir():
        raise UsageError(f"{out}: no such folder for the output")
    _sweep(temporary)
    needed = sum(entry.n_bytes for entry in directory.objects)
    if (free := shutil.disk_usage(out.parent).free) < needed:
        raise DiskFullError(f"{out}: needs {needed:,} bytes, the file system has {free:,} free; free some space")
    source = os.open(artifact.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(source).st_size != artifact.file_bytes:
            raise StorageError(f"{artifact.path}: the file has changed since it was opened; start again")
        with ArtifactWriter(out, directory, overwrite=force, temporary=temporary) as writer:
            fcntl.flock(writer.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in directory.objects:
                content = changes.get(entry.name)
                if content is not None:
                    writer.write(entry.name, content)
                    progress(len(content))
                else:
                    _copy(artifact, source, writer, entry, progress)
            writer.commit()
            return writer.file_bytes
    finally:
        os.close(source)


def _copy(
    artifact: Artifact, source: int, writer: ArtifactWriter, entry: Entry, progress: Callable[[int], None]
) -> None:
    begin, _ = artifact.span(entry.name)
    buffer = memoryview(bytearray(min(_COPY_BYTES, entry.n_bytes)))
    for offset in range(0, entry.n_bytes, _COPY_BYTES):
        piece = buffer[: min(_COPY_BYTES, entry.n_bytes - offset)]
        try:
            read_exactly(source, piece, begin + offset)
        except StorageError as error:
            raise StorageError(f"{artifact.path}: {error}") from None
        writer.write_at(entry.name, offset, piece)
        progress(len(piece))


def _sweep(temporary: Path) -> None:
    """Remove what a killed edit has left; UsageError if another one is running."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{temporary}: cannot be opened: {error.strerror}; remove it") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(temporary)
    except BlockingIOError:
        raise UsageError(f"{temporary}: another run is writing this output; wait for it") from None
    finally:
        os.close(descriptor)
