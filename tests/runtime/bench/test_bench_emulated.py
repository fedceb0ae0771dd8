"""The benchmarks drive the CUDA program on the emulator: pretended lengths, device times, late chunks, loading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ninfer_format.errors import UsageError
from ninfer_runtime.backends.base import Backend
from ninfer_runtime.backends.cuda import residency
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.residency import Rates
from ninfer_runtime.bench import decode, drafts, load, offload, prefill, running, suite
from ninfer_runtime.bench.decode import Shape
from ninfer_runtime.bench.running import BenchOptions, Room
from ninfer_runtime.bench.synthetic import plan_synthetic, write_synthetic
from tests.emulator.device import EmulatedDevice
from tests.runtime.artifacts import TRAINED


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchOptions]:
    """A synthetic tiny model, and a cuda backend without a card."""
    path = tmp_path / "tiny.ninfer"
    write_synthetic(plan_synthetic("tiny/groupwise-int", config=TRAINED / "dense" / "config.json"), path)
    with EmulatedDevice() as device:

        def emulated(name: str) -> Backend:
            return CudaBackend(device, rates=Rates(400e9, 54e9))

        monkeypatch.setattr(running, "backend", emulated)
        monkeypatch.setattr(running, "SEED_TOKENS", 64)
        for module in (load, prefill):
            monkeypatch.setattr(module, "REPEATS", 1)
        yield BenchOptions(path, prefill_chunk=64)


def test_rounds_prompts_and_late_chunks_pass_their_checks(options: BenchOptions) -> None:
    shape, wide = Shape(200, rounds=8), Shape(130, 2, 2, rounds=8)
    with running.running(options, shape.room.including(wide.room)) as run:
        assert decode.finite_logits(run, 64, 0) == ""
        rounds, host = decode.decode(run, shape, 0)
        assert rounds.id == "decode/tiny/groupwise-int/c1/ctx200"
        assert rounds.problem == host.problem == ""
        assert 0 <= host.value < 1
        assert decode.problem_of(run, wide, decode.time_rounds(run, wide, 1), 1) == ""
        prompt = prefill.prefill(run, prefill.Prompt(70), 0)
        late = prefill.attention(run, prefill.LateChunk(128, 8), 0)
        assert prompt.problem == ""
        assert late is not None
        assert late.problem == ""


@pytest.mark.parametrize(
    "recipe, endings", [("groupwise-int", ["int8"]), ("nvfp4", ["a4", "a16", "int8"]), ("bf16", [])]
)
def test_prompts_are_also_measured_over_other_activations(
    options: BenchOptions, tmp_path: Path, recipe: str, endings: list[str]
) -> None:
    path = tmp_path / "other.ninfer"
    write_synthetic(plan_synthetic(f"tiny/{recipe}", config=TRAINED / "dense" / "config.json"), path)
    found = []
    for chosen, room, parts in suite.prompt_variants(replace(options, path=path), prefill.Prompt(70)):
        with running.running(chosen, room) as run:
            found += [result for part in parts for result in part(run)]
    assert [result.id.rpartition("/")[2] for result in found] == endings
    assert not [result.problem for result in found if result.problem]


def test_loading_counts_the_bytes_that_the_program_moved(options: BenchOptions) -> None:
    weights, start = load.load(options)
    with running.running(options, Room()) as run:
        assert weights.details["bytes"] < run.artifact.file_bytes
    assert weights.limit == "load_gbps"
    assert weights.problem == start.problem == ""


def test_rounds_that_draft_pass_their_checks(options: BenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "ROWS", (1,))
    monkeypatch.setattr(drafts, "WARM_UP_ROUNDS", 2)
    options = replace(options, kv_dtype="bf16", max_drafts=drafts.N_DRAFTS)
    with running.running(options, Shape(70, 1, 1 + drafts.N_DRAFTS, 4).room) as run:
        (state,) = drafts.recurrence(run)
        assert (state.id, state.details["layers"]) == ("state/tiny/groupwise-int/c1", 3)
        timed, cost = drafts.drafts(run, 70, 4, 0, {1: 1.0})
        assert (timed.id, timed.problem) == ("drafts/tiny/groupwise-int/c1/k3/ctx70", "")
        assert cost.id == "drafts/tiny/groupwise-int/c1/k3/round"
        assert 1 < float(timed.details["tokens_per_round"]) <= 4


def test_streamed_rounds_are_held_against_both_bounds_and_carried_to_the_card_that_is_meant(
    options: BenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (drafts, offload):
        monkeypatch.setattr(module, "WARM_UP_ROUNDS", 2)
    case = offload.OffloadCase(70, 4, n_layers=1)
    results = list(offload.offload(replace(options, kv_dtype="bf16"), [case]))
    name = "offload/tiny/groupwise-int/n1/ctx70"
    assert [result.id for result in results] == [
        f"{name}/plain", f"{name}/plain/rtx5060ti", f"{name}/k3", f"{name}/k3/rtx5060ti", f"{name}/prefill"
    ]  # fmt: skip
    assert {result.problem for result in results} == {""}
    for measured, carried in (results[:2], results[2:4]):
        d = measured.details
        assert d["streamed"] == sorted(d["streamed"])
        assert len(d["streamed"]) == 3
        assert d["copies_ms"] > 0
        assert measured.value == pytest.approx(d["ms"] / max(d["copies_ms"], d["products_ms"]), rel=0.01)
        tokens = 1.0 if carried.id.endswith("plain/rtx5060ti") else 1 + 3 * offload.ACCEPTED
        assert carried.value == pytest.approx(
            tokens / (carried.details["forecast_ms"] / 1e3 * measured.value), rel=0.01
        )
    assert results[2].details["tokens"] > 1
    assert results[4].details["copies_ms"] == pytest.approx(2 * results[0].details["copies_ms"], rel=0.01)


def test_networks_on_the_cpu_are_measured_apart(options: BenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (drafts, offload):
        monkeypatch.setattr(module, "WARM_UP_ROUNDS", 2)
    monkeypatch.setattr(residency, "MAX_SLOTS", 1)
    case = offload.OffloadCase(70, 4, n_layers=0, n_cpu=1)
    results = list(offload.offload(replace(options, kv_dtype="bf16"), [case]))
    name = "offload/tiny/groupwise-int/n0/ctx70/cpu1"
    assert [r.id for r in results if "rtx" not in r.id] == [f"{name}/plain", f"{name}/k3", f"{name}/prefill"]
    assert {result.problem for result in results} == {""}
    plain, drafting, prompt = (result for result in results if "rtx" not in result.id)
    for result in (plain, drafting):
        d = result.details
        assert d["on_cpu"]
        assert d["cpu_ms"] > 0
        assert result.value == pytest.approx(d["ms"] / max(d["copies_ms"], d["products_ms"] + d["cpu_ms"]), rel=0.01)
        assert re.match(r"the first \d+ of \d+ tokens as of the resident program", result.check)
    # Four layers through one slot: in prompts, of two chunks, the one on the CPU passes too.
    assert prompt.details["copies_ms"] == pytest.approx(2 * 4 / 3 * plain.details["copies_ms"], rel=0.02)


def test_layers_that_do_not_fit_are_left_out_only_where_the_case_says_so(
    options: BenchOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drafts, "WARM_UP_ROUNDS", 2)
    monkeypatch.setattr(offload, "WARM_UP_ROUNDS", 2)
    case = offload.OffloadCase(70, 4, n_layers=2, memory_limit=1 << 20)
    with pytest.raises(UsageError, match=r"MiB more than are free"):
        list(offload.offload(replace(options, kv_dtype="bf16"), [case]))
    assert list(offload.offload(replace(options, kv_dtype="bf16"), [replace(case, left_out_without_room=True)])) == []
    assert "2 resident networks are left out: the benchmark needs" in capsys.readouterr().err


def test_nothing_is_streamed_of_a_mixture_of_experts(options: BenchOptions, tmp_path: Path) -> None:
    path = tmp_path / "moe.ninfer"
    write_synthetic(plan_synthetic("tiny/groupwise-int", config=TRAINED / "moe" / "config.json"), path)
    assert list(offload.offload(replace(options, path=path), offload.offload_cases(70, 8))) == []


def test_acceptance_of_each_draft_adds_up() -> None:
    p = drafts.acceptance_per_draft(0.68, 3)
    assert abs(p + p**2 + p**3 - 3 * 0.68) < 1e-9
