"""Gated DeltaNet on the card at the sizes of the models, against the reference on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops.gdn_state import GdnGeometry
from ninfer_runtime.backends.reference.gdn import replay
from ninfer_runtime.backends.reference.state import RowRecord
from tests.runtime.cuda.gdn_rig import (
    Layer,
    Rig,
    Row,
    bits,
    device_state,
    empty_state,
    floats,
    joined,
    random_layer,
    random_projections,
    random_state,
    relative_error,
)

pytestmark = pytest.mark.gpu

GEOMETRY, SMALLER = GdnGeometry(16, 48, 1), GdnGeometry(16, 32, 1)
"""Of the dense model and of the mixture of experts."""
PREFILL_BOUND = 0.01
ROUND_BOUND = 3e-3
STATE_BOUND = 1e-3
LEFT, WRITTEN = True, False
CUTS = [
    [(1, 1, WRITTEN)] * 12,
    [*[(1, 1, LEFT)] * 6, (1, 1, WRITTEN), *[(1, 1, LEFT)] * 5],
    [(6, 6, WRITTEN), (6, 6, WRITTEN)],
    [(4, 2, WRITTEN), (6, 3, LEFT), (2, 0, LEFT), (5, 5, WRITTEN), (3, 2, WRITTEN)],
]
"""Columns evaluated and committed per round, and whether the state goes on lacking those before."""


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    card = CudaDevice()
    yield card
    card.close()


@pytest.fixture
def generator(fresh_seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(fresh_seed)


@pytest.fixture
def layer(generator: torch.Generator) -> Layer:
    return random_layer(GEOMETRY, generator)


SHAPES = [
    *((GEOMETRY, *shape, False) for shape in [(1, 1), (1, 4), (3, 2), (8, 1), (8, 6)]),
    (GEOMETRY, 8, 2, True),
    (SMALLER, 8, 4, False),
    (SMALLER, 5, 1, True),
]


@pytest.mark.parametrize(("geometry", "n_rows", "n_columns", "leaves"), SHAPES)
def test_rounds_follow_the_reference(
    device: CudaDevice, generator: torch.Generator, geometry: GdnGeometry, n_rows: int, n_columns: int, leaves: bool
) -> None:
    """``leaves``: states go on lacking what is folded."""
    layer = random_layer(geometry, generator)
    rig = Rig(device, layer, n_rows)
    states = [random_state(layer, generator) for _ in range(n_rows)]
    for slot, state in enumerate(states):
        rig.write_state(slot, 0, *device_state(state))
    records, fold, buffer = [RowRecord(slot, 0) for slot in range(n_rows)], [0] * n_rows, 0
    for serial in range(3):
        lines, expected = [], []
        for slot, state in enumerate(states):
            replay(state, records[slot], fold[slot])
            records[slot] = RowRecord(slot, n_columns)
            lines.append(random_projections(geometry, n_columns, generator))
            expected.append(layer.run(state, lines[slot], records[slot], torch.bfloat16))
        rows = [Row(slot, n_columns, fold[slot], buffer, leaves) for slot in range(n_rows)]
        out = floats(rig.round(rows, n_columns, joined(lines)))
        for slot in range(n_rows):
            assert relative_error(out[slot], expected[slot]) < ROUND_BOUND
        fold = [(slot + serial) % (n_columns + 1) for slot in range(n_rows)]
        buffer = 1 - buffer
    rig.flush(*((slot, fold[slot], buffer) for slot in range(n_rows)))
    for slot, state in enumerate(states):
        replay(state, records[slot], fold[slot])
        assert relative_error(rig.read_state(slot)[0], device_state(state)[0]) < STATE_BOUND
        assert np.array_equal(rig.read_state(slot)[1], device_state(state)[1])


def test_cuts_into_rounds_change_no_bit(device: CudaDevice, layer: Layer, generator: torch.Generator) -> None:
    x, wrong = (random_projections(GEOMETRY, 12, generator) for _ in range(2))
    start = device_state(random_state(layer, generator))
    results = []
    for cut in CUTS:
        rig = Rig(device, layer, 1)
        rig.write_state(0, 0, *start)
        out, done, fold, buffer = [], 0, 0, 0
        for evaluated, committed, leaves in cut:
            lines = joined([x[done : done + committed], wrong[: evaluated - committed]])
            out.append(rig.round([Row(0, evaluated, fold, buffer, leaves)], evaluated, lines)[0, :committed])
            done, fold, buffer = done + committed, committed, 1 - buffer
        rig.flush((0, fold, buffer))
        results.append(bits([np.concatenate(out), *rig.read_state(0)]))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 63, 64, 65, 127, 128, 1000, 1024])
def test_prefill_follows_the_recurrence(
    device: CudaDevice, layer: Layer, generator: torch.Generator, n_tokens: int
) -> None:
    rig = Rig(device, layer, 2)
    state = random_state(layer, generator)
    x = random_projections(GEOMETRY, n_tokens, generator)
    start = device_state(state)
    results = []
    for slot in range(2):
        rig.write_state(slot, 0, *start)
        results.append((rig.prefill(slot, x), *rig.read_state(slot)))
    assert bits(results[0]) == bits(results[1])
    out, matrix, history = results[0]
    error = relative_error(floats(out), layer.run(state, x, None, torch.bfloat16))
    error_of_state = relative_error(matrix, device_state(state)[0])
    print(n_tokens, error, error_of_state)
    assert error < PREFILL_BOUND
    assert error_of_state < PREFILL_BOUND
    assert np.array_equal(history, device_state(state)[1])


def test_chunks_of_1024_agree_with_chunks_of_64(device: CudaDevice, layer: Layer, generator: torch.Generator) -> None:
    x = random_projections(GEOMETRY, 4096, generator)
    results = []
    for size in (1024, 64):
        rig = Rig(device, layer, 1)
        rig.write_state(0, 0, *device_state(empty_state(layer)))
        out = np.concatenate([rig.prefill(0, x[i : i + size]) for i in range(0, 4096, size)])
        results.append((floats(out), rig.read_state(0)[0]))
    assert relative_error(results[1][0], results[0][0]) < PREFILL_BOUND
    assert relative_error(results[1][1], results[0][1]) < PREFILL_BOUND
