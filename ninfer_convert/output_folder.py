"""A folder that appears under its name only when it is complete: written beside it, synced, renamed."""

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from ninfer_format import UsageError
from ninfer_format.writer import storage_error, sync_folder


class OutputFolder:
    """Use as a context manager; leaving it without ``commit`` removes what was written.

    What a killed run has left (``.NAME.partial``) is swept by the next one. ``replaceable`` names a file by which an
    existing folder of the same kind is recognised; only such a folder, or an empty one, is ever replaced.
    """

    def __init__(self, path: Path, *, force: bool, replaceable: str) -> None:
        """UsageError if something is in the way, StorageError if the file system refuses."""
        if not path.name or path.name == "..":
            raise UsageError(f"{path}: give the name of a new folder")
        self.path = path
        self.partial = path.with_name(f".{path.name}.partial")
        self._aside = path.with_name(f".{path.name}.replaced")
        self._put_back()
        self._check(force, replaceable)
        self._descriptor = self._claim()

    def _put_back(self) -> None:
        """Undo the first half of a replacement that was killed between its two renames."""
        if self._aside.is_dir() and not self.path.exists():
            try:
                os.rename(self._aside, self.path)
            except OSError as error:
                raise storage_error(error, self._aside, "putting back") from None

    def _check(self, force: bool, replaceable: str) -> None:
        path = self.path
        if path.is_symlink():
            raise UsageError(f"{path}: is a link, which is never written through; choose another name")
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path}: is a file; choose another name for the folder")
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent}: no such folder for the output; create it")
        if not path.exists() or not any(path.iterdir()):
            return
        if not (path / replaceable).is_file():
            raise UsageError(f"{path}: is a folder with other content and no {replaceable}; choose another name")
        if not force:
            raise UsageError(f"{path}: exists; choose another name, or pass --force to replace it")

    def _claim(self) -> int:
        """Descriptor of the empty, locked partial folder."""
        try:
            self.partial.mkdir(exist_ok=True)
            descriptor = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(error, self.partial, "creating") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise UsageError(f"{self.partial}: another run is writing this folder; wait for it") from None
        _remove_tree(self._aside)
        _empty(self.partial)
        return descriptor

    def commit(self) -> None:
        """Sync every folder, give the partial one its name, and remove what it replaces."""
        try:
            for folder, _, _ in os.walk(self.partial):
                sync_folder(Path(folder))
            if self.path.exists() and any(self.path.iterdir()):
                os.rename(self.path, self._aside)
            os.rename(self.partial, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise storage_error(error, self.path, "publishing") from None
        self._close()
        _remove_tree(self._aside)

    def abort(self) -> None:
        """Remove what was written; nothing happens after ``commit``."""
        if self._descriptor >= 0:
            _remove_tree(self.partial)
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


def _remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
