"""``ninfer-run bench`` on the tiny model with the reference backend."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ninfer_format.errors import StorageError
from ninfer_runtime.bench import decode, suite
from ninfer_runtime.bench.decode import RoundTimes, Shape
from ninfer_runtime.bench.limits import host_limits
from ninfer_runtime.bench.running import BenchOptions, Room, Running, running
from tests.runtime.artifacts import TRAINED
from tests.runtime.conftest import ArtifactOf
from tests.runtime.run_command import Ninfer, in_this_process

CPU = ("--backend", "reference", "--json")


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ninfer:
    monkeypatch.setattr(suite, "host_limits", lambda: host_limits(1 << 22))
    return in_this_process(capsys, monkeypatch)


@pytest.fixture
def artifact(artifact_of: ArtifactOf) -> Path:
    return artifact_of("dense", "groupwise-int")


def measured(document: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows behind the check of the logits, which stands first."""
    check, *rows = document["results"]
    assert check["id"].startswith("check/")
    assert "problem" not in check
    return rows


def ids(document: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [row["id"] for row in measured(document)]


def test_synth_writes_an_artifact_that_the_other_commands_take(ninfer: Ninfer, tmp_path: Path) -> None:
    path = tmp_path / "tiny.ninfer"
    config = TRAINED / "dense" / "config.json"
    run = ninfer("bench", "synth", "tiny/groupwise-int", path, "--config", config, "--json")
    assert run.code == 0, run.err
    assert run.document["schema"] == "ninfer.synth/1"
    assert run.document["file_bytes"] == path.stat().st_size
    run = ninfer("bench", "decode", path, "--context", 70, "--rounds", 8, *CPU)
    assert run.code == 0, run.err
    assert measured(run.document)[0]["id"] == "decode/tiny/groupwise-int/c1/ctx70"
    assert ninfer("bench", "synth", "tiny/groupwise-int", path, "--config", config).code == 2


def test_decode_reports_rate_share_and_check(ninfer: Ninfer, artifact: Path) -> None:
    run = ninfer("bench", "decode", artifact, "--context", 64, "--context", 130, "--rounds", 9, *CPU)
    assert run.code == 0, run.err
    document = run.document
    assert document["schema"] == "ninfer.bench/1"
    first, second = measured(document)
    assert first["id"].endswith("/c1/ctx64")
    assert second["id"].endswith("/c1/ctx130")
    assert first["limit"] == "read_gbps"
    assert first["share"] > 0
    assert first["details"]["mean_ms"] > 0
    assert "repeated equal" in first["check"]
    assert "problem" not in first


def test_rows_and_columns_have_their_own_ids(ninfer: Ninfer, artifact: Path) -> None:
    run = ninfer("bench", "decode", artifact, "--context", 64, "--rows", 2, "--columns", 3, "--rounds", 8, *CPU)
    assert run.code == 0, run.err
    assert ids(run.document)[0].endswith("/c2x3/ctx64")


def test_prefill_reports_rate_and_share(ninfer: Ninfer, artifact: Path, tmp_path: Path) -> None:
    plot = tmp_path / "roof.png"
    arguments = ("--tokens", 200, "--prefill-chunk", 128, "--plot", plot)
    run = ninfer("bench", "prefill", artifact, *arguments, *CPU)
    assert run.code == 0, run.err
    (row,) = measured(run.document)
    assert row["id"].startswith("prefill/")
    assert row["limit"] == "mma_tflops"
    assert plot.stat().st_size > 1000


def test_load_ops_and_all_run_without_a_card(ninfer: Ninfer, artifact: Path, tmp_path: Path) -> None:
    assert ids(ninfer("bench", "load", artifact, *CPU).document)[0].startswith("load/")
    run = ninfer("bench", "ops", artifact, "--context", 64, "--rounds", 8, *CPU)
    assert [name.rpartition("/")[2] for name in ids(run.document)] == ["c4", "c8", "c16", "c32"]
    run = ninfer("bench", "all", artifact, "--context", 64, "--rounds", 8, "--record", tmp_path, *CPU)
    assert run.code == 0, run.err
    assert {name.partition("/")[0] for name in ids(run.document)} == {"decode", "rows", "columns", "prefill", "load"}
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text()) == run.document


def test_several_artifacts_make_one_record(ninfer: Ninfer, artifact: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.ninfer"
    config = TRAINED / "dense" / "config.json"
    assert ninfer("bench", "synth", "other/groupwise-int", other, "--config", config).code == 0
    run = ninfer("bench", "all", artifact, other, "--context", 64, "--rounds", 8, *CPU)
    assert run.code == 0, run.err
    of_each = [name.split("/")[1] for name in ids(run.document) if name.startswith("prefill/")]
    assert len(of_each) == 2
    assert of_each[0] != of_each[1] == "other"


def test_an_error_on_the_way_keeps_what_was_measured(
    ninfer: Ninfer, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise StorageError("the card fell off")

    monkeypatch.setattr(suite, "prefill", broken)
    run = ninfer("bench", "all", artifact, "--context", 64, "--rounds", 8, "--record", tmp_path, *CPU)
    assert run.code == 1
    (written,) = tmp_path.glob("*.json")
    rows = measured(json.loads(written.read_text()))
    assert rows[0]["id"].startswith("decode/")
    assert [row["problem"] for row in rows if "problem" in row] == ["the card fell off"]
    assert rows[-1]["id"].startswith("load/")


def test_a_context_beyond_the_model_is_refused_in_one_line(ninfer: Ninfer, artifact: Path) -> None:
    run = ninfer("bench", "decode", artifact, "--context", 1_000_000, *CPU)
    assert run.code == 2
    assert run.err.count("\n") == 1
    assert "the model was made for" in run.err


def test_an_unknown_backend_is_refused(ninfer: Ninfer, artifact: Path) -> None:
    assert ninfer("bench", "decode", artifact, "--backend", "abacus").code == 2


def test_a_second_run_that_differs_is_a_problem(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BenchOptions(artifact, "reference", "cpu", kv_dtype="auto")
    shape = Shape(64, rounds=8)
    with running(options, shape.room) as run:
        times = decode.time_rounds(run, shape, 1)
        assert decode.problem_of(run, shape, times, 1) == ""
        assert decode.problem_of(run, shape, times, 2).startswith("round ")
        first = times.results[0]
        wild = replace(first, token_ids=first.token_ids + 10_000)
        assert "10" in decode.problem_of(run, shape, RoundTimes(times.seconds, (wild,), ()), 1)


def test_idle_share_is_the_time_between_the_graphs() -> None:
    times = RoundTimes((1.0,), (), ((0.0, 0.9), (1.0, 1.9), (2.0, 3.0)))
    assert times.idle_share == pytest.approx(1 - 2.8 / 3)
    assert RoundTimes((1.0,), (), ()).idle_share is None


def test_contexts_are_copied_where_the_program_can_pretend_a_length(artifact: Path) -> None:
    options = BenchOptions(artifact, "reference", "cpu", kv_dtype="auto")
    with running(options, Room(context=3000, tokens=3000)) as run:
        calls: list[tuple[int, int]] = []
        program = run.program

        def pretend(slot: int, n_tokens: int) -> None:
            calls.append((slot, n_tokens))

        program.bench_set_length = pretend  # type: ignore[attr-defined]
        (pages,) = run.fill([0], 2900, 5)
        assert calls == [(0, 2900)]
        assert program.length(0) == 1024
        assert_equal_pages(run, int(pages[0]), int(pages[16]))


def assert_equal_pages(run: Running, first: int, second: int) -> None:
    pool = run.program._pool  # type: ignore[attr-defined]
    for name in ("keys", "values"):
        for plane in getattr(pool, name):
            assert bool((plane[:, first] == plane[:, second]).all())
