"""Checks on the output path and its file system, before anything is written there."""

import os
import shutil
from pathlib import Path

from ninfer_convert.problems import Problem

SIDE_FILES_BYTES = 16 << 20
"""Allowance for the journal and the report beside the artifact."""


def temporary_of(out: Path) -> Path:
    """The name that ``ArtifactWriter`` gives its temporary file."""
    return out.with_name(f".{out.name}.partial")


def check_output(out: Path, source_folders: list[Path], *, force: bool, problems: list[Problem]) -> None:
    """Refuse outputs that would overwrite or litter a source, follow a link, or replace a file unasked."""
    where, parent = str(out), out.parent
    if out.is_symlink():
        message = f"the output is a link to {os.readlink(out)}; a link is never written through"
        problems.append(Problem("output-is-link", message, where, "choose another name, or remove the link"))
    elif out.is_dir():
        problems.append(Problem("output-is-folder", "the output is a folder", where, "name a file in it"))
    elif out.exists() and not out.is_file():
        problems.append(Problem("output-not-a-file", "the output is not a regular file", where, "choose another name"))
    elif out.exists() and not force:
        problems.append(Problem("output-exists", "the output exists", where, "choose another name, or pass --force"))
    if not parent.is_dir():
        problems.append(Problem("no-output-folder", "the folder of the output does not exist", where, "create it"))
        return
    if not os.access(parent, os.W_OK | os.X_OK):
        problems.append(Problem("read-only-output", "its folder cannot be written", where, "choose another folder"))
    real = parent.resolve()
    for folder in source_folders:
        if real.is_relative_to(_root(folder)):
            message = f"the output lies inside the source {folder}, which is never written to"
            problems.append(Problem("output-in-source", message, where, "choose a folder outside the checkpoint"))
            break


def _root(folder: Path) -> Path:
    """What must stay untouched: the checkpoint folder, or the whole repository of a Hub cache that it is part of."""
    real = folder.resolve()
    repository = real.parent.parent
    return repository if real.parent.name == "snapshots" and repository.name.startswith("models--") else real


def check_space(out: Path, disk_bytes: int, problems: list[Problem]) -> None:
    """Compare ``disk_bytes`` with the free space of the output's file system; what an unfinished build has counts."""
    try:
        free = shutil.disk_usage(out.parent).free
    except OSError:
        return
    try:
        written = os.stat(temporary_of(out), follow_symlinks=False).st_blocks * 512
    except OSError:
        written = 0
    if disk_bytes > free + written:
        message = f"the build needs {disk_bytes:,} bytes, the file system has {free:,} free"
        message += f" and an unfinished build holds {written:,}" if written else ""
        advice = "free some space, or choose another folder"
        problems.append(Problem("disk-space", message, str(out.parent), advice))
