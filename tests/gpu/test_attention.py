"""Attention on the card at the size of the 27B models, against the float32 reference over what the pool holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ninfer_runtime.backends.cuda.launch import CudaDevice
from tests.runtime.cuda.attention_rig import (
    PLAIN,
    ROTATED,
    Rig,
    Row,
    Storage,
    check_written,
    largest_error,
    model,
    run_decode,
    run_prefill,
)

pytestmark = pytest.mark.gpu

STORAGES = (*PLAIN, *ROTATED)
SPEC = model(24, 4)
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    card = CudaDevice()
    yield card
    card.close()


def decode(
    device: CudaDevice, storage: Storage, rows: list[Row], q: int, seed: int, heads: tuple[int, int] = (24, 4)
) -> None:
    n_pages = sum((row.start + q) // 64 + 1 for row in rows) + 1
    rig = Rig(device, model(*heads), storage.format, n_pages, seed, rotation=storage.rotation)
    outcome = run_decode(rig, rows, q)
    device.free(rig.pool)
    check_written(outcome)
    assert largest_error(outcome) < TOLERANCE


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 4095, 4096, 100_000])
@pytest.mark.parametrize("q", [1, 4])
def test_rounds_at_boundary_contexts(device: CudaDevice, storage: Storage, start: int, q: int, fresh_seed: int) -> None:
    decode(device, storage, [Row(start, q)], q, fresh_seed)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("q", [1, 2, 3, 4, 5, 6])
def test_eight_rows_of_different_length(device: CudaDevice, storage: Storage, q: int, fresh_seed: int) -> None:
    starts = [0, 63, 64, 777, 1500, 4095, 9000, 20_000]
    rows = [Row(start, (q, 0, 1, q)[b % 4], rope_delta=13 * b) for b, start in enumerate(starts)]
    decode(device, storage, rows, q, fresh_seed)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("q", [1, 2, 4, 5, 6, 7])
def test_eight_heads_to_a_group(device: CudaDevice, storage: Storage, q: int, fresh_seed: int) -> None:
    decode(device, storage, [Row(4090, q), Row(20_000, q - 1), Row(0, q)], q, fresh_seed, heads=(16, 2))


def prefill(device: CudaDevice, storage: Storage, start: int, n_tokens: int, seed: int) -> None:
    rig = Rig(device, SPEC, storage.format, (start + n_tokens) // 64 + 2, seed, rotation=storage.rotation)
    positions = torch.arange(start, start + n_tokens).expand(3, -1)
    outcome = run_prefill(rig, start, n_tokens, positions, sorted({0, *range(0, n_tokens, 37), n_tokens - 1}))
    device.free(rig.pool)
    check_written(outcome)
    assert largest_error(outcome) < TOLERANCE


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("n_tokens", [1, 2, 48, 64, 65, 127, 128, 255, 1000, 1024])
def test_chunks_of_boundary_sizes(device: CudaDevice, storage: Storage, n_tokens: int, fresh_seed: int) -> None:
    prefill(device, storage, 300, n_tokens, fresh_seed)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 4095, 4096, 100_000])
def test_chunks_at_boundary_contexts(device: CudaDevice, storage: Storage, start: int, fresh_seed: int) -> None:
    prefill(device, storage, start, 200, fresh_seed)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_two_runs_give_the_same_bits(device: CudaDevice, storage: Storage, fresh_seed: int) -> None:
    rows = [Row(5000, 4), Row(100, 4)]
    rigs = (Rig(device, SPEC, storage.format, 100, fresh_seed, rotation=storage.rotation) for _ in range(2))
    first, second = (run_decode(rig, rows, 4).out for rig in rigs)
    assert torch.equal(first, second)
