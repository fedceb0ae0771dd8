"""Version 1 → version 2: which files may be migrated, and to what; in place or as a copy (specs/migration.md).

In place only the header changes (``header_rewrite``): bytes [0, payload offset). Payload and file length stay.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from ninfer_format.directory import (
    Directory,
    DirectoryV1,
    Identity,
    TensorEntry,
    canonical_json,
    check_objects,
    parse_directory_v1,
)
from ninfer_format.errors import (
    ArtifactError,
    DirectoryError,
    MigrationError,
    NinferError,
    StorageError,
    UnsupportedError,
    UsageError,
    VersionError,
)
from ninfer_format.hashing import Advance, Progress, hash_range, pieces, silent
from ninfer_format.header_rewrite import Disk, HeaderRewrite
from ninfer_format.inventory import compare_inventory, plan_inventory, resource_sizes
from ninfer_format.prefix import MAX_JSON_BYTES, PREFIX_BYTES, payload_offset_for, prefix_bytes, read_prefix
from ninfer_format.published import PUBLISHED
from ninfer_format.reader import Artifact, open_regular
from ninfer_format.writer import ArtifactWriter, storage_error

_MAX_HEADER_BYTES = payload_offset_for(MAX_JSON_BYTES)

Action = Literal["migrated", "copied", "already version 2", "would migrate", "would copy"]
_BackupUse = Literal["none", "restore", "drop"]


@dataclass(frozen=True, slots=True)
class KnownV1:
    """A published version-1 file: the identity it becomes, and the digests (hex) it must have."""

    identity: Identity
    directory_sha256: str
    file_sha256: str


@dataclass(frozen=True, slots=True)
class Migration:
    """What ``migrate`` did, or in a dry run would do.

    ``payload_offset`` and ``file_bytes`` are those of ``output``; ``sha256_v1`` (hex) is set only where the whole
    version-1 file was hashed; ``notes`` are sentences about backups found and used.
    """

    path: Path
    output: Path
    action: Action
    identity: Identity
    payload_offset: int
    file_bytes: int
    sha256_v1: str | None
    notes: tuple[str, ...]


def known_v1() -> Mapping[str, KnownV1]:
    """Version-1 model id → the published file that has it."""
    return {
        row.identity.model_id: KnownV1(row.identity, row.v1.directory_sha256, row.v1.file_sha256)
        for row in PUBLISHED.values()
        if row.v1 is not None
    }


@dataclass(frozen=True, slots=True)
class _HeaderV1:
    """Bytes [0, payload offset) of a valid version-1 file, and its directory."""

    content: bytes
    directory: DirectoryV1

    @property
    def text(self) -> bytes:
        return _directory_text(self.content)


def _directory_text(header: bytes) -> bytes:
    return header[PREFIX_BYTES : PREFIX_BYTES + int.from_bytes(header[8:PREFIX_BYTES], "little")]


def _parse_v1(start: bytes, file_bytes: int) -> _HeaderV1:
    """The header at the start of a version-1 file of ``file_bytes`` bytes, validated like any artifact's."""
    prefix = read_prefix(start[:PREFIX_BYTES], file_bytes)
    if prefix.version != 1:
        raise VersionError(f"container version {prefix.version}, expected version 1")
    directory = parse_directory_v1(_directory_text(start))
    check_objects(directory.objects, file_bytes - prefix.payload_offset)
    if late := [e.name for e in directory.objects if isinstance(e, TensorEntry) and e.format == "NVFP4"]:
        raise DirectoryError(f"object {late[0]!r} is NVFP4, which version 1 does not have")
    return _HeaderV1(start[: prefix.payload_offset], directory)


def _read_start(descriptor: int, n_bytes: int) -> bytes:
    return b"".join(bytes(piece) for piece in pieces(descriptor, 0, n_bytes))


def _read_backup(backup: Path, file_bytes: int) -> _HeaderV1 | None:
    """The original header if the backup is complete and fits a file of this size, else None."""
    try:
        with open_regular(backup) as stream:
            content = stream.read(_MAX_HEADER_BYTES + 1)
        header = _parse_v1(content, file_bytes)
    except NinferError:
        return None
    return header if len(content) == payload_offset_for(len(header.text)) else None


def _valid_v2(path: Path, descriptor: int, file_bytes: int, has_backup: bool) -> Directory | None:
    """Directory of a valid version-2 file; None for version 1, and for a wreck that has a backup."""
    start = _read_start(descriptor, min(file_bytes, PREFIX_BYTES))
    try:
        if read_prefix(start, file_bytes).version == 1:
            return None
        with Artifact.open(path) as artifact:
            return artifact.directory
    except VersionError as error:
        raise VersionError(f"{path}: {error}") from None
    except (ArtifactError, UnsupportedError) as error:
        if has_backup:
            return None
        raise type(error)(f"{path}: neither a valid version-1 nor a valid version-2 file: {error}") from None


def _find_v1(path: Path, descriptor: int, file_bytes: int, backup: Path) -> tuple[_HeaderV1, _BackupUse]:
    """The version-1 header of the file, on disk or in its backup, and what to do with the backup. Changes nothing."""
    own: _HeaderV1 | None = None
    problem = ""
    try:
        own = _parse_v1(_read_start(descriptor, min(file_bytes, _MAX_HEADER_BYTES)), file_bytes)
    except (ArtifactError, UnsupportedError) as error:
        if not os.path.lexists(backup):
            raise type(error)(f"{path}: {error}") from None
        problem = str(error)
    if not os.path.lexists(backup):
        assert own is not None
        return own, "none"
    saved = _read_backup(backup, file_bytes)
    if own is None and saved is None:
        raise MigrationError(
            f"{path}: its header is not valid ({problem}), and {backup.name} is no usable backup of it; both files "
            "were left alone. Get the artifact again"
        )
    if own is None:
        assert saved is not None
        return saved, "restore"
    if saved is None or saved.content == own.content:
        return own, "drop"
    raise MigrationError(
        f"{path}: is a valid version-1 file, but {backup.name} holds the header of another one; both were left alone. "
        "Remove the backup if it is a leftover"
    )


def _check(
    path: Path, descriptor: int, file_bytes: int, header: _HeaderV1, wanted: Identity | None, progress: Progress
) -> tuple[Directory, str | None]:
    """The version-2 directory, and the file's SHA-256 where that decides; MigrationError to refuse."""
    model_id = header.directory.model_id
    known = known_v1().get(model_id)
    if known is not None and hashlib.sha256(header.text).hexdigest() != known.directory_sha256:
        known = None
    if wanted is None and known is None:
        raise MigrationError(
            f"{path}: not one of the published version-1 files (model id {model_id!r}, directory SHA-256 "
            f"{hashlib.sha256(header.text).hexdigest()}); if you trust it, say what it becomes with "
            f"--identity {model_id}/WEIGHTS"
        )
    identity = wanted or (known.identity if known else None)
    assert identity is not None
    if identity.model_id != model_id:
        raise MigrationError(
            f"{path}: its model id is {model_id!r}, but --identity names {identity.model_id!r}; migrating adds a "
            "weights id and changes nothing else"
        )
    if known is not None and identity != known.identity:
        raise MigrationError(
            f"{path}: has the directory of the published {known.identity}; it cannot become {identity}"
        )
    target = Directory(identity, header.directory.objects)
    if identity in PUBLISHED:
        expected = plan_inventory(identity, resources=resource_sizes(target.objects))
        if problems := compare_inventory(expected, target, packed=True, limit=3):
            raise MigrationError(f"{path}: does not hold the objects of {identity}: " + "; ".join(problems))
    if known is None:
        return target, None
    with progress(file_bytes, "sha256 of version 1") as advance:
        begin = len(header.content)
        advance(begin)
        digest = hash_range(descriptor, begin, file_bytes, head=header.content, advance=advance).hex()
    if digest != known.file_sha256:
        raise MigrationError(
            f"{path}: has SHA-256 {digest}, but the published version-1 file has {known.file_sha256}; it is damaged, "
            "get it again"
        )
    return target, digest


def _header_v2(path: Path, header: _HeaderV1, target: Directory) -> bytes:
    """[0, payload offset) of the version-2 file; MigrationError when the payload would have to move."""
    text, room = canonical_json(target), len(header.content)
    if (needed := payload_offset_for(len(text))) != room:
        raise MigrationError(
            f"{path}: the version-2 directory takes {len(text)} bytes, so the payload would move from {room} to "
            f"{needed}; that cannot be done in place. Use --copy OUT"
        )
    return (prefix_bytes(2, len(text)) + text).ljust(room, b"\0")


def _copy(descriptor: int, begin: int, target: Directory, output: Path, progress: Progress) -> None:
    """Write the same objects at the same payload offsets as a new version-2 file."""
    temporary = output.with_name(f".{output.name}.migrating")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # a killed run's: the lock on the source says that no other run writes it now
    with ArtifactWriter(output, target, temporary=temporary) as writer:
        with progress(sum(e.n_bytes for e in target.objects), "copying") as advance:
            for entry in target.objects:
                _copy_object(descriptor, begin + entry.offset, entry.n_bytes, entry.name, writer, advance)
        writer.commit()


def _copy_object(
    descriptor: int, begin: int, n_bytes: int, name: str, writer: ArtifactWriter, advance: Advance
) -> None:
    done = 0
    for piece in pieces(descriptor, begin, begin + n_bytes):
        writer.write_at(name, done, piece)
        done += len(piece)
        advance(len(piece))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file, open for reading and locked against a second migration."""
    with open_regular(path) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"{path}: another migration of this file is running; wait for it to end") from None
        except OSError:
            pass  # a file system without locks
        yield stream


def _refuse_in_place(path: Path, stream: BinaryIO) -> None:
    """Links and read-only files: rewriting them in place would surprise their owner."""
    if path.is_symlink():
        raise UsageError(
            f"{path}: is a symbolic link to {os.path.realpath(path)}; migrate that file, or use --copy OUT"
        )
    facts = os.fstat(stream.fileno())
    if facts.st_nlink > 1:
        raise UsageError(f"{path}: has {facts.st_nlink} names (hard links), all of which would change; use --copy OUT")
    if not facts.st_mode & 0o222 or not os.access(path, os.W_OK):
        raise StorageError(f"{path}: is read-only; make it writable (chmod u+w), or use --copy OUT")


def _refuse_output(path: Path, output: Path) -> None:
    if output.exists() and os.path.samefile(path, output):
        raise UsageError(f"{output}: is the file itself; leave --copy out to migrate in place")
    if os.path.lexists(output):
        raise UsageError(f"{output}: already exists; remove it or choose another name")
    if not output.parent.is_dir():
        raise UsageError(f"{output.parent}: no such folder for the output")


def migrate(
    path: str | os.PathLike[str],
    *,
    identity: Identity | str | None = None,
    dry_run: bool = False,
    copy: str | os.PathLike[str] | None = None,
    progress: Progress = silent,
    disk: Disk | None = None,
) -> Migration:
    """Turn a version-1 file into version 2, in place or as a new file ``copy``; a valid version-2 file is left alone.

    The two published version-1 files are recognised by their digests. Any other valid one needs ``identity``
    (``"model/weights"``), whose model id must be the file's own. ``dry_run`` makes every check and changes nothing.
    ``disk`` replaces the file system calls (for tests).

    Raises MigrationError when the file must not be migrated or had to be rolled back, VersionError for version 3 and
    later, other ArtifactErrors for a file that is no valid version 1, UsageError for links and impossible outputs,
    StorageError when the file system refuses. In every case the file is whole, or a rerun makes it so.
    """
    path = Path(path)
    wanted = Identity.parse(identity) if isinstance(identity, str) else identity
    rewrite = HeaderRewrite(path, disk or Disk())
    with _locked(path) as stream:
        descriptor, file_bytes = stream.fileno(), os.fstat(stream.fileno()).st_size
        if (found := _valid_v2(path, descriptor, file_bytes, os.path.lexists(rewrite.backup))) is not None:
            return _already_v2(rewrite, found, file_bytes, dry_run)
        if copy is None:
            _refuse_in_place(path, stream)
        else:
            _refuse_output(path, Path(copy))
        header, use = _find_v1(path, descriptor, file_bytes, rewrite.backup)
        notes: list[str] = []
        if copy is None and not dry_run:
            notes += _repair(rewrite, header, use)
        elif use == "restore":
            notes.append(f"read the original header from {rewrite.backup.name}: an earlier migration was interrupted")
        target, digest = _check(path, descriptor, file_bytes, header, wanted, progress)
        if copy is not None:
            if not dry_run:
                _copy(descriptor, len(header.content), target, Path(copy), progress)
            offset, last = payload_offset_for(len(canonical_json(target))), target.objects[-1]
            copied: Action = "would copy" if dry_run else "copied"
            size = offset + last.offset + last.n_bytes
            return Migration(path, Path(copy), copied, target.identity, offset, size, digest, tuple(notes))
        new = _header_v2(path, header, target)
        if not dry_run:
            notes += _replace(rewrite, header, new, target, file_bytes, use)
        done: Action = "would migrate" if dry_run else "migrated"
        return Migration(path, path, done, target.identity, len(new), file_bytes, digest, tuple(notes))


def _repair(rewrite: HeaderRewrite, header: _HeaderV1, use: _BackupUse) -> list[str]:
    """Undo what an interrupted run has left, before anything is decided about the file."""
    try:
        notes = ["removed an unfinished backup"] if rewrite.sweep() else []
        if use == "restore":
            rewrite.restore(header.content)
            notes.append("restored the original header after an interrupted migration")
    except OSError as error:
        raise storage_error(error, rewrite.path, "restoring the original header") from None
    return notes


def _replace(
    rewrite: HeaderRewrite, header: _HeaderV1, new: bytes, target: Directory, file_bytes: int, use: _BackupUse
) -> list[str]:
    def check() -> None:
        with Artifact.open(rewrite.path) as result:
            facts = (result.directory, result.payload_offset, result.file_bytes)
        if facts != (target, len(new), file_bytes):
            raise MigrationError(f"{rewrite.path}: reads back different from what was written")

    notes = []
    try:
        if use == "drop":
            rewrite.drop_backup()
            notes.append(f"removed a {rewrite.backup.name} that was not needed")
        rewrite.replace(header.content, new, check)
    except OSError as error:
        raise storage_error(error, rewrite.path, "migrating") from None
    return notes


def _already_v2(rewrite: HeaderRewrite, found: Directory, file_bytes: int, dry_run: bool) -> Migration:
    """A valid version-2 file: nothing to do but to remove what an interrupted run left."""
    notes = []
    try:
        if not dry_run and rewrite.sweep():
            notes.append("removed an unfinished backup")
        if os.path.lexists(rewrite.backup):
            saved = _read_backup(rewrite.backup, file_bytes)
            if saved is None or saved.directory.objects != found.objects:
                notes.append(f"left {rewrite.backup.name} alone: it is no backup of this file")
            elif not dry_run:
                rewrite.drop_backup()
                notes.append("removed the backup of an interrupted migration")
    except OSError as error:
        raise storage_error(error, rewrite.backup, "removing a backup") from None
    with Artifact.open(rewrite.path) as artifact:
        offset = artifact.payload_offset
    path = rewrite.path
    return Migration(path, path, "already version 2", found.identity, offset, file_bytes, None, tuple(notes))
