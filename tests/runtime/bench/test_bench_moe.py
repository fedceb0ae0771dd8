"""``moe/…`` on the emulator: launches of the tiny mixture of experts, checked against its artifact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ninfer_format import Artifact
from ninfer_runtime.bench import moe, ops
from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import Running
from ninfer_runtime.bench.synthetic import plan_synthetic, write_synthetic
from ninfer_runtime.models.binder import BoundModel, bind
from tests.emulator.device import EmulatedDevice
from tests.runtime.artifacts import TRAINED
from tests.runtime.bench.test_bench_ops import loaded

LAUNCHES = ("", "/route", "/gate_up", "/down")


@pytest.fixture
def model(tmp_path: Path) -> Iterator[BoundModel]:
    path = tmp_path / "tiny.ninfer"
    write_synthetic(plan_synthetic("tiny/groupwise-int", config=TRAINED / "moe" / "config.json"), path)
    with Artifact.open(path) as artifact:
        yield bind(artifact)


def measured(model: BoundModel, monkeypatch: pytest.MonkeyPatch, *, damage: bool = False) -> dict[str, Result]:
    for name, value in {"REPEATS": 1, "WARM_UPS": 0}.items():
        monkeypatch.setattr(ops, name, value)
    monkeypatch.setattr(moe, "CHAIN_L2_SIZES", 0)
    monkeypatch.setattr(moe, "COLUMNS", (1, 4))
    with EmulatedDevice() as device:
        weights = loaded(model, device)
        if damage:
            down = weights.layers[-1].ffn.matrices[-1]
            device.fill(down.pointer, 0, down.n_bytes, device.stream())
        program = SimpleNamespace(device=device, weights=weights)
        run = SimpleNamespace(program=program, artifact=model.artifact, identity="tiny/w")
        return {result.id.removeprefix("moe/tiny/w/"): result for result in moe.moe(cast(Running, run))}


def test_every_launch_is_timed_against_the_experts_that_were_read(
    model: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = measured(model, monkeypatch)
    assert list(results) == [f"c{n}{kind}" for n in (1, 4) for kind in LAUNCHES]
    assert not [result.problem for result in results.values() if result.problem]
    text = model.spec.text
    assert results["c1"].details["distinct_experts"] == text.experts_per_token
    assert text.experts_per_token < results["c4"].details["distinct_experts"] <= text.n_experts


def test_a_wrong_expert_is_a_problem(model: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(model, monkeypatch, damage=True)
    assert "routed_down is off by" in results["c1"].problem
