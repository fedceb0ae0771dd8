"""``bench ops`` on the emulator: launches of every kind on the tiny model's own weights, checked and timed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ninfer_format import Artifact
from ninfer_format.codec import unpack_tensor
from ninfer_format.directory import TensorEntry
from ninfer_runtime.backends.cuda.arena import Arena, ArenaPlan
from ninfer_runtime.backends.cuda.packing import pack_matrix
from ninfer_runtime.backends.cuda.weights import DeviceWeights, plan_weights
from ninfer_runtime.bench import ops
from ninfer_runtime.bench.limits import h2d_gbps
from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import Running
from ninfer_runtime.bench.synthetic import plan_synthetic, write_synthetic
from ninfer_runtime.models.binder import BoundModel, bind
from tests.emulator.device import EmulatedDevice
from tests.runtime.artifacts import TRAINED

KINDS = ["gdn/input", "gdn/output", "mlp/gate_up", "mlp/down", "attention/input", "attention/output", "head"]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[BoundModel]:
    path = tmp_path / "tiny.ninfer"
    write_synthetic(plan_synthetic("tiny/groupwise-int", config=TRAINED / "dense" / "config.json"), path)
    with Artifact.open(path) as artifact:
        yield bind(artifact)


def loaded(model: BoundModel, device: EmulatedDevice) -> DeviceWeights:
    plan = ArenaPlan()
    plan_weights(model, plan)
    weights = plan_weights(model, Arena(device, plan.n_bytes))
    for matrix in weights.matrices:
        entry = model.artifact.objects[matrix.name]
        assert isinstance(entry, TensorEntry)
        words = unpack_tensor(model.artifact.payload(matrix.name), entry.format, entry.layout, entry.shape)
        device.upload(matrix.pointer, pack_matrix(matrix, words.codes, words.scales))
    return weights


def measured(model: BoundModel, monkeypatch: pytest.MonkeyPatch, *, damage: bool = False) -> dict[str, Result]:
    for name, value in {"CHAIN_L2_SIZES": 0, "REPEATS": 1, "WARM_UPS": 0, "CHECKED_ROWS": 16}.items():
        monkeypatch.setattr(ops, name, value)
    with EmulatedDevice() as device:
        weights = loaded(model, device)
        if damage:
            down = weights.layers[-1].ffn.matrices[-1]
            device.fill(down.pointer, 0, down.n_bytes, device.stream())
        program = SimpleNamespace(device=device, weights=weights)
        run = SimpleNamespace(program=program, artifact=model.artifact, identity="tiny/w")
        return {result.id.removeprefix("matrix/tiny/w/"): result for result in ops.ops(cast(Running, run))}


def test_every_kind_is_timed_and_agrees_with_the_artifact(model: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(model, monkeypatch)
    assert sorted(results) == sorted(KINDS)
    assert not [result.problem for result in results.values() if result.problem]
    assert all(result.value > 0 and result.limit == "read_gbps" for result in results.values())
    assert results["gdn/input"].details["launches"] == 3


def test_wrong_weights_are_a_problem(model: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(model, monkeypatch, damage=True)
    assert "mlp/down is off by" in results["mlp/down"].problem
    assert not results["mlp/gate_up"].problem


def test_the_host_link_is_measured_in_copies_of_pinned_memory() -> None:
    with EmulatedDevice() as device:
        assert h2d_gbps(cast(Any, device), 1 << 20) > 0
