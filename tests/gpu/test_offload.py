"""Networks that pass through the card's memory: the tokens of a resident program, from graphs with copies in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ninfer_format import Artifact
from ninfer_runtime.backends.cuda.cpu_networks import CpuNetwork
from ninfer_runtime.backends.cuda.device import DeviceError, DeviceMemoryError
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.rates import link_bytes_per_second, measured_rates
from ninfer_runtime.models.binder import BoundModel, bind
from tests.runtime.artifacts import TRAINED, convert
from tests.runtime.cuda.offload_rig import DRAFTS, N_LAYERS, drafting_story, hidden_rows, offloaded, story

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

REPEATS = 3
"""A race does not show every time."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundModel]:
    path = tmp_path_factory.mktemp("gpu") / "dense.ninfer"
    convert(TRAINED / "dense", path, "groupwise-int")
    with Artifact.open(path) as artifact:
        yield bind(artifact)


@pytest.fixture(scope="module")
def expected(model: BoundModel) -> list[Any]:
    return story(offloaded(model, None, N_LAYERS, 0), model)


@pytest.mark.parametrize("host_embedding", [False, True])
@pytest.mark.parametrize(("n_resident", "n_slots"), [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1), (3, 1)])
def test_streamed_and_resident_networks_give_the_same_bits(
    model: BoundModel, expected: list[Any], n_resident: int, n_slots: int, host_embedding: bool
) -> None:
    for slow in (None, 1e9)[: 1 + (n_slots == 1)]:
        program = offloaded(model, None, n_resident, n_slots, host_embedding=host_embedding, link_limit=slow)
        assert story(program, model) == expected


def test_rounds_with_drafts_give_the_same_bits(model: BoundModel) -> None:
    wanted = drafting_story(offloaded(model, None, N_LAYERS, 0, DRAFTS), model)
    for n_resident, n_slots in ((0, 1), (1, 1), (1, 2)):
        for _ in range(REPEATS):
            assert drafting_story(offloaded(model, None, n_resident, n_slots, DRAFTS), model) == wanted


def test_pinned_memory_that_cannot_be_had_leaves_a_device_that_works() -> None:
    device = CudaDevice()
    free, stream = device.free_bytes(), device.stream()
    with pytest.raises(DeviceMemoryError, match=r"MiB of host memory could not be pinned"):
        device.allocate_host(1 << 46)
    pinned, pointer = device.allocate_host(1 << 20), device.allocate(1 << 20)
    pinned[:] = np.arange(1 << 20, dtype=np.uint8)
    device.upload(pointer, pinned, stream)
    back = np.zeros(1 << 20, np.uint8)
    device.download(pointer, back, stream)
    assert np.array_equal(back, pinned)
    device.free(pointer)
    device.free_host(pinned)
    assert abs(device.free_bytes() - free) <= 4 << 20


def test_networks_on_the_cpu_are_part_of_recorded_rounds(model: BoundModel) -> None:
    on_cpu: dict[str, Any] = {"n_cpu_layers": 2, "on_cpu": (1, 3)}
    said = [story(offloaded(model, CudaDevice(), 0, 1, **on_cpu), model) for _ in range(REPEATS)]
    assert said[1:] == said[:-1]
    expected = hidden_rows(offloaded(model, CudaDevice(), N_LAYERS, 0), model)
    found = hidden_rows(offloaded(model, CudaDevice(), 0, 2, **on_cpu), model)
    assert 0 < np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


def test_drafts_are_verified_by_rounds_with_networks_on_the_cpu(model: BoundModel) -> None:
    said = drafting_story(offloaded(model, CudaDevice(), 0, 1, DRAFTS, n_cpu_layers=1, on_cpu=(2,)), model)
    assert len({tuple(tokens) for tokens, _ in said}) == 1


def test_an_error_on_the_cpu_leaves_the_card_usable(model: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(network: CpuNetwork, x: Any) -> None:
        raise MemoryError("no page left")

    with monkeypatch.context() as patch:
        patch.setattr(CpuNetwork, "__call__", broken)
        with pytest.raises(DeviceError, match="no page left"):
            hidden_rows(offloaded(model, CudaDevice(), 0, 1, n_cpu_layers=1, on_cpu=(2,)), model)
    assert story(offloaded(model, CudaDevice(), 0, 1), model)


def test_copies_that_are_paced_take_their_time(model: BoundModel) -> None:
    device = CudaDevice()
    rates = measured_rates(device)
    assert 1e9 < rates.link < rates.read
    assert link_bytes_per_second(device) == pytest.approx(rates.link, rel=0.1)
    n_bytes, seconds = 0, []
    for limit in (None, 0.05 * rates.link):
        program = offloaded(model, device, 0, 1, rates=(rates.read, rates.link), link_limit=limit)
        assert program.ring is not None
        n_bytes = program.ring.layout.copied_bytes
        seconds.append(min(program.bench_copies() for _ in range(10)))
        program.close()
    assert seconds[1] >= 0.9 * n_bytes / (0.05 * rates.link)
    assert replace(program.plan.options.residency, link_limit=None).slowdown == 1.0
