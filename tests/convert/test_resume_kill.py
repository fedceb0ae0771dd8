"""A build that dies at any moment leaves no wrong file, and what it leaves resumes to the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ninfer_convert import pipeline
from ninfer_convert.checkpoint import Checkpoint
from ninfer_convert.journal import journal_of
from ninfer_convert.output import temporary_of
from ninfer_convert.pipeline import build, finish_published
from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan
from ninfer_convert.report import report_of
from ninfer_format import ArtifactWriter, StorageError, UsageError
from tests.convert.tiny import TinyCheckpoint

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20
PlanOf = Callable[..., ConversionPlan]

forkserver = multiprocessing.get_context("forkserver")
# Killed builds are forks of one process that has torch already: a moment at random is then a moment of the build.
forkserver.set_forkserver_preload(["ninfer_convert.pipeline", "ninfer_convert.quantize.groupwise"])


def build_slowly(folder: Path, out: Path, resume: bool) -> None:
    """A build in small pieces that syncs after every object, so that it has many moments to die at."""
    build(make_plan(BuildOptions(folder, out=out, resume=resume)), step_lanes=256, sync_seconds=0.0)


def build_and_die(folder: Path, out: Path, name: str, after: bool) -> None:
    """A build that kills itself before or after the writer's or the pipeline's function ``name`` does its work."""
    owner = ArtifactWriter if hasattr(ArtifactWriter, name) else pipeline
    original = getattr(owner, name)

    def fatal(*arguments: object, **named: object) -> object:
        result = original(*arguments, **named) if after else None
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, fatal)
    build_slowly(folder, out, resume=False)


def killed_after(seconds: float, folder: Path, out: Path, resume: bool) -> None:
    """Run ``build_slowly`` and kill it."""
    process = forkserver.Process(target=build_slowly, args=(folder, out, resume))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()


def side_files(out: Path) -> list[str]:
    """Names of everything that belongs to ``out``."""
    return sorted(path.name for path in out.parent.iterdir() if out.name in path.name)


@pytest.fixture
def reference(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> bytes:
    """What an undisturbed build gives."""
    out = build(plan_of(dense, out=tmp_path / "reference.ninfer")).path
    return out.read_bytes()


@pytest.fixture
def unfinished(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output path of a build that stopped half-way with its temporary and journal in place."""
    out, calls, plain = tmp_path / "x.ninfer", iter(range(10**6)), Checkpoint.read_into

    def failing(self: Checkpoint, name: str, byte_begin: int, buffer: memoryview) -> None:
        if next(calls) > 60:
            raise StorageError("injected")
        plain(self, name, byte_begin, buffer)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "read_into", failing)
        with pytest.raises(StorageError):
            build(plan_of(dense, out=out), sync_seconds=0.0)
    assert temporary_of(out).exists()
    assert journal_of(out).exists()
    return out


def check_complete(out: Path, reference: bytes) -> None:
    assert out.read_bytes() == reference
    assert side_files(out) == [out.name, report_of(out).name]
    objects = json.loads(report_of(out).read_text())["objects"]
    assert all(record["sha256"] for record in objects)


def test_a26_kill_at_random_moments_loses_nothing_and_resumes_byte_identically(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, reference: bytes, fresh_seed: int
) -> None:
    rng, hits = random.Random(fresh_seed), 0
    whole = 0.0
    for name in ("warm.ninfer", "timed.ninfer"):  # the first one also starts the fork server
        process = forkserver.Process(target=build_slowly, args=(dense.folder, tmp_path / name, False))
        whole = time.monotonic()
        process.start()
        process.join()
        whole = time.monotonic() - whole
        assert process.exitcode == 0
    number = 0
    while number < KILLS or hits < KILLS // 4:
        assert number < 10 * KILLS, "kills find no build half-way"
        out = tmp_path / f"k{number}.ninfer"
        number += 1
        for attempt in range(rng.choice((1, 1, 2))):
            killed_after(rng.uniform(0, 1.05 * whole), dense.folder, out, resume=attempt > 0)
            if out.exists():
                assert out.read_bytes() == reference
                whole *= 0.85  # the machine has become faster than it was when it was timed
                break
        if temporary_of(out).exists():
            hits += 1
        elif not out.exists():
            whole *= 1.05  # or slower: nothing had been written
        if out.exists():
            finish_published(out)
        else:
            build(plan_of(dense, out=out, resume=True))
        check_complete(out, reference)
    print(f"{hits} of {number} kills left a temporary file; one build takes {whole:.2f} s")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["_open_writer", "_make", "sync", "conversion_report", "commit", "sync_folder"])
def test_kill_around_every_step_of_a_build_resumes(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, reference: bytes, name: str, after: bool
) -> None:
    out = tmp_path / "x.ninfer"
    process = forkserver.Process(target=build_and_die, args=(dense.folder, out, name, after))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    if out.exists():
        assert out.read_bytes() == reference
        finish_published(out)
    else:
        build(plan_of(dense, out=out, resume=True))
    check_complete(out, reference)


@pytest.mark.parametrize("reported", [False, True], ids=["before-the-report", "after-the-report"])
def test_build_killed_after_its_artifact_is_published_is_completed_by_resume(
    dense: TinyCheckpoint, tmp_path: Path, reference: bytes, reported: bool
) -> None:
    out = tmp_path / "x.ninfer"
    step = ("sync_folder", False) if reported else ("commit", True)
    process = forkserver.Process(target=build_and_die, args=(dense.folder, out, *step))
    process.start()
    process.join()
    assert out.read_bytes() == reference
    assert journal_of(out).exists()
    assert report_of(out).exists() == reported
    assert finish_published(out)
    check_complete(out, reference)
    assert not finish_published(out)


def test_journal_of_another_file_never_completes_an_output(
    dense: TinyCheckpoint, tmp_path: Path, unfinished: Path
) -> None:
    temporary_of(unfinished).unlink()
    unfinished.write_bytes(b"somebody else's file")
    assert not finish_published(unfinished)
    assert unfinished.read_bytes() == b"somebody else's file"


def test_resume_takes_over_finished_objects(
    dense: TinyCheckpoint, plan_of: PlanOf, unfinished: Path, reference: bytes
) -> None:
    result = build(plan_of(dense, out=unfinished, resume=True))
    assert 0 < result.n_resumed < len(result.finished)
    assert any("taken over" in note for note in result.notes)
    check_complete(unfinished, reference)


def test_resumed_report_has_every_error_figure(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, unfinished: Path
) -> None:
    whole = build(plan_of(dense, out=tmp_path / "whole.ninfer"))
    resumed = build(plan_of(dense, out=unfinished, resume=True))
    assert {n: f.error for n, f in resumed.finished.items()} == {n: f.error for n, f in whole.finished.items()}


def test_journal_torn_at_any_byte_resumes(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, unfinished: Path, reference: bytes, fresh_seed: int
) -> None:
    journal, temporary = journal_of(unfinished).read_bytes(), temporary_of(unfinished).read_bytes()
    rng = random.Random(fresh_seed)
    for cut in (0, 1, len(journal) - 1, *(rng.randrange(len(journal)) for _ in range(8))):
        for tail in (b"", b'{"object": "text/'):
            journal_of(unfinished).write_bytes(journal[:cut] + tail)
            temporary_of(unfinished).write_bytes(temporary)
            build(plan_of(dense, out=unfinished, resume=True))
            check_complete(unfinished, reference)
            unfinished.unlink()


def test_finished_object_that_was_damaged_is_made_again(
    dense: TinyCheckpoint, plan_of: PlanOf, unfinished: Path, reference: bytes
) -> None:
    lines = [json.loads(line) for line in journal_of(unfinished).read_text().splitlines()]
    name = next(line["object"] for line in lines if line.get("error"))
    inventory = plan_of(dense, out=unfinished, resume=True).require().inventory
    entry = next(e for e in inventory.objects if e.name == name)
    with open(temporary_of(unfinished), "r+b") as stream:
        stream.seek(inventory.payload_offset + entry.offset + 5)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x10]))
    result = build(plan_of(dense, out=unfinished, resume=True))
    assert any("1 finished objects were damaged" in note for note in result.notes)
    check_complete(unfinished, reference)


@pytest.mark.parametrize("damage", ["gone", "cut", "header", "journal"])
def test_resume_starts_over_when_nothing_can_be_kept(
    dense: TinyCheckpoint, plan_of: PlanOf, unfinished: Path, reference: bytes, damage: str
) -> None:
    temporary = temporary_of(unfinished)
    if damage == "gone":
        temporary.unlink()
    elif damage == "cut":
        os.truncate(temporary, 5000)
    elif damage == "header":
        content = bytearray(temporary.read_bytes())
        content[100] ^= 1
        temporary.write_bytes(content)
    else:
        journal_of(unfinished).write_bytes(b"\0" * 100)
    result = build(plan_of(dense, out=unfinished, resume=True))
    assert result.n_resumed == 0
    assert any("started from the beginning" in note for note in result.notes)
    check_complete(unfinished, reference)


def test_resume_without_anything_to_resume_builds_and_says_so(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, reference: bytes
) -> None:
    result = build(plan_of(dense, out=tmp_path / "x.ninfer", resume=True))
    assert any("nothing to resume" in note for note in result.notes)
    check_complete(tmp_path / "x.ninfer", reference)


def test_leftover_is_refused_without_resume_and_kept(
    dense: TinyCheckpoint, plan_of: PlanOf, unfinished: Path, reference: bytes
) -> None:
    before = side_files(unfinished)
    with pytest.raises(UsageError, match=r"unfinished build.*--resume.*--force"):
        build(plan_of(dense, out=unfinished))
    assert side_files(unfinished) == before
    build(plan_of(dense, out=unfinished, resume=True))
    check_complete(unfinished, reference)


def test_force_starts_a_leftover_again(
    dense: TinyCheckpoint, plan_of: PlanOf, unfinished: Path, reference: bytes
) -> None:
    assert build(plan_of(dense, out=unfinished, force=True)).n_resumed == 0
    check_complete(unfinished, reference)


def test_temporary_without_a_journal_is_refused_and_leaves_no_journal(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    out = tmp_path / "x.ninfer"
    temporary_of(out).write_bytes(b"who knows")
    with pytest.raises(UsageError, match="unfinished build"):
        build(plan_of(dense, out=out))
    assert side_files(out) == [temporary_of(out).name]


def test_changed_source_refuses_to_resume_and_says_what_changed(
    dense: TinyCheckpoint, plan_of: PlanOf, unfinished: Path, reference: bytes
) -> None:
    shard = dense.folder / dense.shards()[1]
    status = shard.stat()
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(UsageError) as caught:
        build(plan_of(dense, out=unfinished, resume=True))
    assert f"source file {shard.name} has another modification time" in str(caught.value)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    build(plan_of(dense, out=unfinished, resume=True))
    check_complete(unfinished, reference)


def test_changed_header_size_and_resource_are_named(dense: TinyCheckpoint, plan_of: PlanOf, unfinished: Path) -> None:
    dense.tensors["extra.weight"] = dense.tensors["lm_head.weight"]
    dense.frontend["chat_template.jinja"] += b" "
    dense.save()
    with pytest.raises(UsageError) as caught:
        build(plan_of(dense, out=unfinished, resume=True))
    for part in ("size", "header", "resource frontend/chat_template.jinja", "the planned objects are others"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "options, named",
    [({"recipe": "bf16"}, "recipe was groupwise-int, is now bf16"), ({"no_vision": True}, "no_vision was False"),
     ({"model_id": "other"}, "identity was tiny-dense/groupwise-int")],
)  # fmt: skip
def test_changed_option_refuses_to_resume_and_is_named(
    dense: TinyCheckpoint, plan_of: PlanOf, unfinished: Path, options: dict[str, object], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        build(plan_of(dense, out=unfinished, resume=True, **options))
    assert temporary_of(unfinished).exists()


def test_workers_device_and_folder_name_may_change_between_runs(
    dense: TinyCheckpoint, plan_of: PlanOf, unfinished: Path, reference: bytes
) -> None:
    moved = dense.folder.with_name("moved")
    shutil.move(dense.folder, moved)
    build(plan_of(moved, out=unfinished, resume=True, jobs=3, model_id="tiny-dense"), step_lanes=512)
    assert unfinished.read_bytes() == reference


PROGRAM = """\
import sys, time
from ninfer_convert import stored_object
plain = stored_object.StoredObject.work
def slowly(self, number, space):
    time.sleep(0.2)
    return plain(self, number, space)
stored_object.StoredObject.work = slowly
from ninfer_convert.cli import main
sys.argv = ["ninfer-convert", "build", *sys.argv[1:]]
main()
"""


def test_interrupt_exits_130_and_the_same_command_with_resume_completes(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, reference: bytes
) -> None:
    out = tmp_path / "x.ninfer"
    command = [sys.executable, "-c", PROGRAM, str(dense.folder), str(out)]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (journal_of(out).exists() and b'"object"' in journal_of(out).read_bytes()):
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert stdout == ""
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    assert not out.exists()
    assert temporary_of(out).exists()
    result = build(plan_of(dense, out=out, resume=True))
    assert result.n_resumed > 0
    check_complete(out, reference)
