"""Attention of a round under the emulator, against the float32 reference over what the pool holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ninfer_runtime.backends.cuda.ops.attention import rope_table
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.attention_rig import (
    PLAIN,
    ROTATED,
    Rig,
    Row,
    Storage,
    check_written,
    fp6_codes,
    fp6_numbers,
    largest_error,
    model,
    run_decode,
)

TOLERANCE = 0.01


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as emulated:
        yield emulated


def check(device: EmulatedDevice, heads: tuple[int, int], storage: Storage, rows: list[Row], q: int, seed: int) -> None:
    n_pages = sum((row.start + q) // 64 + 1 for row in rows) + 1
    outcome = run_decode(Rig(device, model(*heads), storage.format, n_pages, seed, rotation=storage.rotation), rows, q)
    check_written(outcome)
    assert largest_error(outcome) < TOLERANCE


@pytest.mark.parametrize("storage", [*PLAIN, *ROTATED], ids=str)
@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 130, 300])
def test_one_column_at_boundary_contexts(device: EmulatedDevice, storage: Storage, start: int, fresh_seed: int) -> None:
    check(device, (6, 1), storage, [Row(start, 1)], 1, fresh_seed)


@pytest.mark.parametrize(
    "storage, q", [(storage, q) for storage in PLAIN for q in range(2, 7) if storage.format != "fp6" or q in (3, 6)]
)
def test_new_columns_see_each_other_causally(device: EmulatedDevice, storage: Storage, q: int, fresh_seed: int) -> None:
    check(device, (4, 2), storage, [Row(61, q), Row(0, q)], q, fresh_seed)


@pytest.mark.parametrize("storage", PLAIN, ids=str)
def test_eight_heads_to_a_group_with_six_columns(device: EmulatedDevice, storage: Storage, fresh_seed: int) -> None:
    check(device, (8, 1), storage, [Row(130, 6)], 6, fresh_seed)


@pytest.mark.parametrize("storage", PLAIN, ids=str)
def test_more_query_rows_than_fit_are_taken_in_two_passes(
    device: EmulatedDevice, storage: Storage, fresh_seed: int
) -> None:
    check(device, (8, 1), storage, [Row(61, 7), Row(130, 3), Row(0, 0), Row(62, 5)], 7, fresh_seed)


@pytest.mark.parametrize("storage", [*PLAIN, *ROTATED], ids=str)
@pytest.mark.parametrize("q", [1, 4])
def test_rows_of_very_different_length_and_frozen_ones(
    device: EmulatedDevice, storage: Storage, q: int, fresh_seed: int
) -> None:
    rows = [Row(64, q, rope_delta=-17), Row(200, 0), Row(300, max(1, q - 1), rope_delta=1000), Row(0, 1)]
    check(device, (6, 1), storage, rows, q, fresh_seed)


@pytest.mark.parametrize("storage", PLAIN, ids=str)
def test_a_round_of_frozen_rows_writes_zeros(device: EmulatedDevice, storage: Storage, fresh_seed: int) -> None:
    check(device, (4, 2), storage, [Row(64, 0), Row(3, 0)], 2, fresh_seed)


@pytest.mark.parametrize("storage", [*PLAIN, *ROTATED], ids=str)
def test_keys_below_the_lowest_are_not_seen(device: EmulatedDevice, storage: Storage, fresh_seed: int) -> None:
    rig = Rig(device, model(6, 1), storage.format, 6, fresh_seed, rotation=storage.rotation)
    outcome = run_decode(rig, [Row(1, 1), Row(130, 1)], 1, lowest=1)
    assert largest_error(outcome) < TOLERANCE


def test_bits_of_every_fp6_code_come_back() -> None:
    codes = np.random.default_rng(7).integers(0, 64, (40, 256), np.uint8)
    numbers = fp6_numbers(codes)
    assert np.array_equal(fp6_codes(numbers), np.where(codes == 0x20, 0, codes))


def test_frequencies_are_the_references() -> None:
    spec = model(6, 1)
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    ours = rope_table(spec).view(np.float32)[: spec.rotary_dim // 2]
    np.testing.assert_allclose(ours, (1.0 / spec.rope_theta**exponents).numpy(), rtol=3e-7)


@pytest.mark.parametrize("rotary_dim", [2, 20, 256])
def test_any_even_rotary_dim(device: EmulatedDevice, rotary_dim: int, fresh_seed: int) -> None:
    outcome = run_decode(Rig(device, model(2, 2, rotary_dim), "int8", 4, fresh_seed), [Row(70, 2)], 2)
    check_written(outcome)
    assert largest_error(outcome) < TOLERANCE


@pytest.mark.parametrize("storage", PLAIN, ids=str)
def test_positions_up_to_the_context_limit(device: EmulatedDevice, storage: Storage, fresh_seed: int) -> None:
    check(device, (6, 1), storage, [Row(10, 2, rope_delta=262_100)], 2, fresh_seed)
