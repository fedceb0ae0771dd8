"""build --json: every line an event, in an order that pipelines can rely on, ended by the result or by the failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_convert.events import SCHEMA, EventLines
from ninfer_convert.journal import Finished, Journal, journal_of
from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan
from ninfer_format import Artifact, StorageError
from ninfer_format.directory import ResourceEntry
from tests.convert.test_convert_cli import MAIN, ROOT, run
from tests.convert.tiny import TinyCheckpoint

PlanOf = Callable[..., ConversionPlan]


def events_of(text: str) -> list[dict[str, Any]]:
    """The lines of a run; all but the result have the schema of events."""
    assert text.endswith("\n")
    events = [json.loads(line) for line in text.splitlines()]
    assert all(event["schema"] == SCHEMA for event in events if event["event"] != "done")
    assert all(event["event"] not in ("done", "failed") for event in events[:-1])
    seconds = [event["seconds"] for event in events if "seconds" in event]
    assert seconds == sorted(seconds)
    return events


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def built(plan: ConversionPlan, **options: Any) -> list[dict[str, Any]]:
    lines: list[str] = []
    build(plan, observer=EventLines(lines.append), **options)
    return events_of("".join(lines))


def test_events_of_the_command_tell_the_whole_build(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    result = run("build", tiny.folder, out, "--json", "--jobs", 3)
    assert (result.returncode, result.stderr) == (0, "")
    events = events_of(result.stdout)
    start, done = events[0], events[-1]
    report = json.loads((tmp_path / "x.ninfer.conversion.json").read_text())
    objects = {record["name"]: record for record in report["objects"]}
    assert start["event"] == "start"
    assert (start["objects"], start["resumed_objects"], start["resumed_bytes"]) == (len(objects), 0, 0)
    assert (start["path"], start["identity"]) == (str(out), report["identity"])
    assert start["file_bytes"] == out.stat().st_size
    for kind in ("begin", "finish"):
        found = of_kind(events, kind)
        assert sorted(event["object"] for event in found) == sorted(objects)
        assert sum(event["bytes"] for event in found) == start["bytes"]
    order = [(event["object"], event["event"]) for event in events if "object" in event]
    assert all(order.index((name, "begin")) < order.index((name, "finish")) for name in objects)
    for event in of_kind(events, "finish"):
        record = objects[event["object"]]
        assert event["sha256"] == record["sha256"]
        assert event["error"] == record.get("error")
        assert event["format"] == record.get("format")
    progress = of_kind(events, "progress")
    assert [event["bytes"] for event in progress] == sorted(event["bytes"] for event in progress)
    assert progress[-1]["bytes"] == progress[-1]["total"] == start["bytes"]
    assert progress[-1]["seconds_left"] == 0
    assert (done["schema"], done["event"], done["bytes"]) == ("ninfer.build/1", "done", start["file_bytes"])


def test_quiet_leaves_the_result_alone_on_one_line(dense: TinyCheckpoint, tmp_path: Path) -> None:
    result = run("build", dense.folder, tmp_path / "x.ninfer", "--json", "--quiet")
    (done,) = events_of(result.stdout)
    assert (result.returncode, done["event"]) == (0, "done")


def test_problems_end_the_events_with_code_and_advice(dense: TinyCheckpoint, tmp_path: Path) -> None:
    (dense.folder / dense.shards()[1]).unlink()
    result = run("build", dense.folder, tmp_path / "x.ninfer", "--json")
    (failed,) = events_of(result.stdout)
    assert result.returncode == failed["exit_code"] == 1
    assert failed["event"] == "failed"
    assert failed["resumable"] is False
    assert {"code", "where", "message", "advice"} == set(failed["problems"][0])
    assert dense.shards()[1] in failed["problems"][0]["message"] + failed["problems"][0]["where"]


def test_a_value_that_cannot_be_stored_ends_the_events(dense: TinyCheckpoint, tmp_path: Path) -> None:
    dense.tensors["lm_head.weight"][5, 7] = np.uint16(0x7FC0)
    dense.save()
    result = run("build", dense.folder, tmp_path / "x.ninfer", "--json")
    events = events_of(result.stdout)
    assert events[0]["event"] == "start"
    assert result.returncode == events[-1]["exit_code"] == 1
    assert "lm_head.weight" in events[-1]["error"]
    assert f"error: {events[-1]['error']}" in result.stderr


def test_usage_errors_end_the_events_too(dense: TinyCheckpoint, tmp_path: Path) -> None:
    result = run("build", tmp_path / "absent", tmp_path / "x.ninfer", "--json")
    (failed,) = events_of(result.stdout)
    assert result.returncode == failed["exit_code"] == 2
    assert failed["problems"] == []


def test_what_a_finish_line_told_is_kept_by_a_resume(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.ninfer"
    add, told = Journal.add, list[str]()

    def fail_after_ten(journal: Journal, finished: list[Finished]) -> None:
        if len(told) >= 10:
            raise StorageError("the disk is gone")
        add(journal, finished)

    class Told(EventLines):
        def finished(self, entry: Any, record: Finished) -> None:
            told.append(entry.name)
            super().finished(entry, record)

    monkeypatch.setattr(Journal, "add", fail_after_ten)
    lines: list[str] = []
    with pytest.raises(StorageError):
        build(plan_of(dense, out=out), observer=Told(lines.append), step_lanes=256, sync_seconds=0.0)
    monkeypatch.undo()
    kept = {event["object"] for event in of_kind(events_of("".join(lines)), "finish")}
    assert len(kept) >= 10
    events = built(plan_of(dense, out=out, resume=True))
    start = events[0]
    assert start["resumed_objects"] == len(kept)
    begun = {event["object"] for event in of_kind(events, "begin")}
    assert begun.isdisjoint(kept)
    assert len(begun) + len(kept) == start["objects"]
    assert sum(event["bytes"] for event in of_kind(events, "finish")) + start["resumed_bytes"] == start["bytes"]
    assert of_kind(events, "progress")[-1]["bytes"] == start["bytes"]


def test_interrupted_build_says_that_it_can_be_resumed(dense: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    stop = (
        "import os, signal; from ninfer_convert.journal import Journal; add = Journal.add\n"
        "def stopping(self, finished):\n    add(self, finished); os.kill(os.getpid(), signal.SIGINT)\n"
        "Journal.add = stopping\n" + MAIN
    )
    result = run("build", dense.folder, out, "--json", program=stop)
    failed = events_of(result.stdout)[-1]
    assert result.returncode == failed["exit_code"] == 130 == 128 + signal.SIGINT
    assert failed["resumable"] is True
    assert "--resume" in result.stderr
    assert events_of(run("build", dense.folder, out, "--json", "--resume").stdout)[-1]["already_complete"] is False


def test_reader_that_goes_away_leaves_something_to_resume(dense: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", MAIN, "build", str(dense.folder), str(out), "--json"]
    process = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in process.stderr
    assert not out.exists()
    assert journal_of(out).exists()
    assert run("build", dense.folder, out, "--resume").returncode == 0
    with Artifact.open(out) as artifact:
        assert len(artifact.objects) > 50


# --- EventLines alone -------------------------------------------------------------------------------------------------


def test_progress_is_limited_in_rate_and_ends_at_the_total() -> None:
    now, lines = [0.0], list[str]()
    events = EventLines(lines.append, clock=lambda: now[0], progress_seconds=1.0)
    now[0] = 10.0
    events.started(100, 3, [ResourceEntry("r", "raw-bytes-v1", 0, 20)])
    events.advanced(20)
    for _ in range(80):
        now[0] += 0.25
        events.advanced(1)
    progress = [json.loads(line) for line in lines if '"progress"' in line]
    assert len(progress) == 20
    first, last = progress[0], progress[-1]
    assert (first["bytes"], first["seconds"], first["bytes_per_second"], first["seconds_left"]) == (24, 11.0, 4, 19.0)
    assert (last["bytes"], last["total"], last["seconds_left"]) == (100, 100, 0.0)


def test_lines_of_many_threads_stay_whole() -> None:
    written: list[str] = []
    events = EventLines(written.append)
    events.started(4000, 1, [])
    entry = ResourceEntry("frontend/ключ\n", "raw-bytes-v1", 0, 5)

    def tell() -> None:
        for _ in range(500):
            events.begun(entry)
            events.advanced(2)
            events.finished(entry, Finished(entry.name, "00", None))

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(line.count("\n") == 1 and line.isascii() for line in written)
    assert {json.loads(line).get("object", entry.name) for line in written} == {entry.name}
    assert json.loads([line for line in written if '"progress"' in line][-1])["bytes"] == 4000


def test_failed_names_the_problems_of_a_plan(tmp_path: Path, dense: TinyCheckpoint) -> None:
    (dense.folder / "tokenizer.json").unlink()
    plan = make_plan(BuildOptions(dense.folder))
    lines: list[str] = []
    EventLines(lines.append).failed("no", 1, resumable=False, problems=plan.problems)
    (failed,) = events_of(lines[0])
    assert [p["where"] for p in failed["problems"]] == [p.where for p in plan.problems]


def test_nothing_follows_the_last_line_of_a_build_that_failed() -> None:
    lines: list[str] = []
    events = EventLines(lines.append)
    events.failed("interrupted", 130, resumable=True)
    events.advanced(1)
    events.begun(ResourceEntry("frontend/tokenizer.json", "raw-bytes-v1", 0, 1))
    assert [json.loads(line)["event"] for line in lines] == ["failed"]
