"""Attention on the card at the size of the 27B models, against the float32 reference over what the pool holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops.kv_cache import KvFormat
from tests.runtime.cuda.attention_rig import Rig, Row, check_written, largest_error, model, run_decode, run_prefill

pytestmark = pytest.mark.gpu

FORMATS = get_args(KvFormat)
SPEC = model(24, 4)
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    card = CudaDevice()
    yield card
    card.close()


def decode(device: CudaDevice, format: KvFormat, rows: list[Row], q: int, seed: int) -> None:
    n_pages = sum((row.start + q) // 64 + 1 for row in rows) + 1
    rig = Rig(device, SPEC, format, n_pages, seed)
    outcome = run_decode(rig, rows, q)
    device.free(rig.pool)
    check_written(outcome)
    assert largest_error(outcome) < TOLERANCE


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 4095, 4096, 100_000])
@pytest.mark.parametrize("q", [1, 4])
def test_rounds_at_boundary_contexts(device: CudaDevice, format: KvFormat, start: int, q: int, fresh_seed: int) -> None:
    decode(device, format, [Row(start, q)], q, fresh_seed)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("q", [1, 2, 3, 4, 5, 6])
def test_eight_rows_of_different_length(device: CudaDevice, format: KvFormat, q: int, fresh_seed: int) -> None:
    starts = [0, 63, 64, 777, 1500, 4095, 9000, 20_000]
    rows = [Row(start, (q, 0, 1, q)[b % 4], rope_delta=13 * b) for b, start in enumerate(starts)]
    decode(device, format, rows, q, fresh_seed)


def prefill(device: CudaDevice, format: KvFormat, start: int, n_tokens: int, seed: int) -> None:
    rig = Rig(device, SPEC, format, (start + n_tokens) // 64 + 2, seed)
    positions = torch.arange(start, start + n_tokens).expand(3, -1)
    outcome = run_prefill(rig, start, n_tokens, positions, sorted({0, *range(0, n_tokens, 37), n_tokens - 1}))
    device.free(rig.pool)
    check_written(outcome)
    assert largest_error(outcome) < TOLERANCE


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n_tokens", [1, 2, 48, 64, 65, 127, 128, 255, 1000, 1024])
def test_chunks_of_boundary_sizes(device: CudaDevice, format: KvFormat, n_tokens: int, fresh_seed: int) -> None:
    prefill(device, format, 300, n_tokens, fresh_seed)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 4095, 4096, 100_000])
def test_chunks_at_boundary_contexts(device: CudaDevice, format: KvFormat, start: int, fresh_seed: int) -> None:
    prefill(device, format, start, 200, fresh_seed)


@pytest.mark.parametrize("format", FORMATS)
def test_two_runs_give_the_same_bits(device: CudaDevice, format: KvFormat, fresh_seed: int) -> None:
    rows = [Row(5000, 4), Row(100, 4)]
    first, second = (run_decode(Rig(device, SPEC, format, 100, fresh_seed), rows, 4).out for _ in range(2))
    assert torch.equal(first, second)
