"""Replacing the first bytes of a file in place so that a kill at any moment leaves the old or the new file reachable.

Order: a durable backup of the old header beside the file; everything behind the 16-byte prefix; the prefix, which
decides which version the file is; a check of the result; removal of the backup. Specification: ``specs/migration.md``.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ninfer_format.errors import StorageError
from ninfer_format.prefix import PREFIX_BYTES
from ninfer_format.writer import storage_error, sync_folder

BACKUP_SUFFIX = ".v1-metadata-backup"
_UNFINISHED_SUFFIX = ".partial"


class Disk:
    """The calls by which a rewrite changes a file system; tests replace it to fail or stop at any one of them."""

    def open(self, path: Path) -> int:
        """Open the artifact for writing, never through a link."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def create(self, path: Path) -> int:
        """Create ``path`` exclusively and return a descriptor for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write_at(self, descriptor: int, content: bytes, position: int) -> None:
        """Write all of ``content`` at file offset ``position``."""
        while content:
            done = os.pwrite(descriptor, content, position)
            content, position = content[done:], position + done

    def sync(self, descriptor: int) -> None:
        """Make the file's content durable."""
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a complete backup its final name."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a backup or an unfinished one."""
        os.unlink(path)

    def sync_folder(self, folder: Path) -> None:
        """Make names in ``folder`` durable."""
        sync_folder(folder)


def backup_path(path: Path) -> Path:
    """Where the original header is kept while a rewrite runs."""
    return path.with_name(path.name + BACKUP_SUFFIX)


class HeaderRewrite:
    """One artifact, its backup file, and the steps between old and new header. Every method may raise OSError."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self.backup, self.disk = path, backup_path(path), disk
        self.unfinished = self.backup.with_name(self.backup.name + _UNFINISHED_SUFFIX)

    def sweep(self) -> bool:
        """Remove the part of a backup that a killed run has left; whether there was one."""
        if not os.path.lexists(self.unfinished):
            return False
        self.disk.remove(self.unfinished)
        self.disk.sync_folder(self.path.parent)
        return True

    def drop_backup(self) -> None:
        """Remove the backup durably."""
        self.disk.remove(self.backup)
        self.disk.sync_folder(self.path.parent)

    def restore(self, old: bytes) -> None:
        """Write the original header ``old`` back, then remove its backup."""
        descriptor = self.disk.open(self.path)
        try:
            self.disk.write_at(descriptor, old, 0)
            self.disk.sync(descriptor)
        finally:
            os.close(descriptor)
        self.drop_backup()

    def replace(self, old: bytes, new: bytes, check: Callable[[], None]) -> None:
        """Turn header ``old`` into ``new`` (same length), which ``check`` must accept by not raising.

        Any failure up to and including ``check`` puts ``old`` back and is raised again, OSErrors as StorageError.
        """
        descriptor = self.disk.open(self.path)
        try:
            self._save(old)
            try:
                self.disk.write_at(descriptor, new[PREFIX_BYTES:], PREFIX_BYTES)
                self.disk.sync(descriptor)
                self.disk.write_at(descriptor, new[:PREFIX_BYTES], 0)
                self.disk.sync(descriptor)
                check()
            except BaseException as error:
                self._roll_back(descriptor, old, error)
                raise
        finally:
            os.close(descriptor)
        try:
            self.drop_backup()
        except OSError as error:
            raise StorageError(
                f"{self.path}: is version 2 now, but {self.backup.name} could not be removed: {error.strerror}; run "
                "the migration again to remove it"
            ) from None

    def _save(self, old: bytes) -> None:
        try:
            descriptor = self.disk.create(self.unfinished)
            try:
                self.disk.write_at(descriptor, old, 0)
                self.disk.sync(descriptor)
            finally:
                os.close(descriptor)
            self.disk.rename(self.unfinished, self.backup)
            self.disk.sync_folder(self.path.parent)
        except BaseException as error:
            for leftover in (self.unfinished, self.backup):
                with contextlib.suppress(OSError):
                    self.disk.remove(leftover)
            if isinstance(error, OSError):
                raise storage_error(error, self.backup, "saving the original header") from None
            raise

    def _roll_back(self, descriptor: int, old: bytes, error: BaseException) -> None:
        try:
            self.disk.write_at(descriptor, old, 0)
            self.disk.sync(descriptor)
            self.drop_backup()
        except OSError as failure:
            raise StorageError(
                f"{self.path}: migrating failed ({error}), and so did putting the original header back "
                f"({failure.strerror}); {self.backup.name} still holds it: run the migration again"
            ) from error
        if isinstance(error, OSError):
            raise storage_error(error, self.path, "migrating (the original was put back)") from None
