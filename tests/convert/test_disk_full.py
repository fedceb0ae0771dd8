"""A full disk, an exhausted quota or a file size limit: exit 3, one clear line, and nothing left behind."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ninfer_convert.journal import journal_of
from ninfer_convert.output import temporary_of
from ninfer_convert.pipeline import build
from ninfer_convert.plan import ConversionPlan
from ninfer_convert.report import report_of
from ninfer_format import DiskFullError
from tests.convert.tiny import TinyCheckpoint

ROOT = Path(__file__).resolve().parents[2]
MAIN = "import sys; from ninfer_convert.cli import main; sys.argv[0] = 'ninfer-convert'; main()"
PlanOf = Callable[..., ConversionPlan]


def side_files(out: Path) -> list[str]:
    """Names of everything that belongs to ``out``."""
    return sorted(path.name for path in out.parent.iterdir() if out.name in path.name)


@pytest.mark.parametrize("fraction", [0.01, 0.999])
def test_file_size_limit_ends_with_exit_3_and_leaves_nothing(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, fraction: float
) -> None:
    out = tmp_path / "x.ninfer"
    limit = int(plan_of(dense, out=out).output_bytes * fraction)
    run = subprocess.run(
        [sys.executable, "-c", MAIN, "build", str(dense.folder), str(out)],
        cwd=ROOT,
        # Python itself would leave its byte code cut off at the limit, for every later process to trip over.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert run.returncode == 3, run.stderr
    assert "file size limit" in run.stderr
    assert "Traceback" not in run.stderr
    assert side_files(out) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "fsync", "ftruncate"])
@pytest.mark.parametrize("at", [1, 2, 9])
def test_full_disk_at_any_system_call_leaves_nothing(
    dense: TinyCheckpoint,
    plan_of: PlanOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    call: str,
    at: int,
) -> None:
    out, plain, calls = tmp_path / "x.ninfer", getattr(os, call), [0]
    plan = plan_of(dense, out=out)

    def full(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] >= at:
            raise OSError(code, os.strerror(code))
        return plain(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        refused = False
        try:
            build(plan, sync_seconds=0.0)
        except DiskFullError:
            refused = True
    assert refused == (calls[0] >= at)
    assert side_files(out) == ([] if refused else [out.name, report_of(out).name])


def test_space_is_checked_before_anything_is_written(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    plan = plan_of(dense, out=tmp_path / "x.ninfer")
    assert [problem.code for problem in plan.problems] == ["disk-space"]


def test_disk_full_during_a_resume_removes_the_old_leftovers_too(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.ninfer"

    def interrupted(n_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(plan_of(dense, out=out), progress=interrupted)
    assert temporary_of(out).exists()
    assert journal_of(out).exists()

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plan = plan_of(dense, out=out, resume=True)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError):
        build(plan)
    assert side_files(out) == []


# A small tmpfs in a mount namespace of its own; something else fills it after the plan has seen enough free space.
SMALL_DISK = """\
import sys
from pathlib import Path
from ninfer_convert import pipeline
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_format import DiskFullError
source, disk = Path(sys.argv[1]), Path(sys.argv[2])
plan = make_plan(BuildOptions(source, out=disk / "x.ninfer"))
plan.require()
with open(disk / "filler", "wb") as stream:
    try:
        stream.write(bytes(63 << 20))
        stream.flush()
        stream.write(bytes(1 << 20))
    except OSError:
        pass
with open(disk / "filler", "r+b") as stream:
    stream.truncate((64 << 20) - int(sys.argv[3]))
try:
    pipeline.build(plan)
except DiskFullError as error:
    left = sorted(p.name for p in disk.iterdir() if "x.ninfer" in p.name)
    print("full:", error, left)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("free", [4096, 300_000])
def test_really_full_file_system_ends_with_exit_3_and_leaves_nothing(
    dense: TinyCheckpoint, tmp_path: Path, free: int
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    inner = 'mount -t tmpfs -o size=64m tmpfs "$1" && exec "$2" -c "$3" "$4" "$1" "$5"'
    wrap = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    shell = [*wrap, "sh", "-c", inner, "sh"]
    allowed = subprocess.run([*shell, str(disk), "true", "", "", ""], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip("this machine does not allow a private tmpfs; the other tests inject the same errors")
    arguments = [*shell, str(disk), sys.executable, SMALL_DISK, str(dense.folder), str(free)]
    run = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 3, run.stderr
    assert "no space left" in run.stdout
    assert run.stdout.rstrip().endswith("[]")
