"""Rounds and flushes of Gated DeltaNet under the emulator, against the reference and against themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ninfer_runtime.backends.cuda.ops.gdn_state import GdnGeometry
from ninfer_runtime.backends.cuda.ops.round_state import MOST_PENDING
from ninfer_runtime.backends.reference.gdn import replay
from ninfer_runtime.backends.reference.state import RowRecord
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.gdn_rig import (
    Rig,
    Row,
    bits,
    device_state,
    floats,
    joined,
    random_layer,
    random_projections,
    random_state,
    relative_error,
)

GEOMETRIES = [(1, 3), (2, 6), (2, 4)]
BF16 = torch.bfloat16


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as emulated:
        yield emulated


@pytest.mark.parametrize(("key_heads", "value_heads"), GEOMETRIES)
@pytest.mark.parametrize("n_columns", [1, 2, 3, 4, 5, 6])
def test_rounds_follow_the_reference(
    device: EmulatedDevice, key_heads: int, value_heads: int, n_columns: int, fresh_seed: int
) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    random = np.random.default_rng(fresh_seed)
    layer = random_layer(GdnGeometry(key_heads, value_heads, 1), generator)
    n_rows = int(random.integers(1, 4))
    slots = random.permutation(n_rows + 1)[:n_rows]
    rig = Rig(device, layer, n_rows + 1)
    states = [random_state(layer, generator) for _ in range(n_rows)]
    for slot, state in zip(slots, states, strict=True):
        rig.write_state(int(slot), 0, *device_state(state))
    lacking = [0] * n_rows
    pending, fold, buffer = [RowRecord(0, 0)] * n_rows, [0] * n_rows, [0] * n_rows
    for _ in range(4):
        rows, lines, expected = [], [], []
        for b in range(n_rows):
            replay(states[b], pending[b], fold[b])
            used = int(random.integers(0, n_columns + 1))  # 0: frozen, its pending columns are folded all the same
            # A state may go on lacking columns while this round's and the following one's have room beside them.
            keeps = used > 0 and lacking[b] + fold[b] + used <= MOST_PENDING and bool(random.integers(0, 2))
            lacking[b] = lacking[b] + fold[b] if keeps else 0
            rows.append(Row(int(slots[b]), used, fold[b], buffer[b], keeps))
            lines.append(random_projections(layer.geometry, n_columns, generator))
            if used:
                pending[b] = RowRecord(b, used)
                expected.append(layer.run(states[b], lines[b][:used], pending[b], BF16))
                buffer[b] = 1 - buffer[b]
            else:
                expected.append(np.zeros((0, layer.geometry.value_width), np.float32))
        out = floats(rig.round(rows, n_columns, joined(lines)))
        for b, row in enumerate(rows):
            fold[b] = int(random.integers(0, row.n_columns + 1))
            assert relative_error(out[b, : row.n_columns], expected[b]) < 3e-3
            assert not out[b, row.n_columns :].any()
            if lacking[b]:
                continue
            matrix, history = rig.read_state(row.slot)
            wanted, wanted_history = device_state(states[b])
            assert relative_error(matrix, wanted) < 1e-3
            assert np.array_equal(history, wanted_history)
    rig.flush(*((int(slots[b]), fold[b], buffer[b]) for b in range(n_rows)))
    for b in range(n_rows):
        replay(states[b], pending[b], fold[b])
        matrix, history = rig.read_state(int(slots[b]))
        wanted, wanted_history = device_state(states[b])
        assert relative_error(matrix, wanted) < 1e-3
        assert np.array_equal(history, wanted_history)


LEFT, WRITTEN = True, False
CUTS = [
    [(1, 1, WRITTEN)] * 8,
    [*[(1, 1, LEFT)] * 7, (1, 1, WRITTEN)],
    [(6, 6, WRITTEN), (2, 2, WRITTEN)],
    [(2, 2, WRITTEN), (6, 6, LEFT)],
    [(5, 2, WRITTEN), (4, 1, WRITTEN), (6, 0, WRITTEN), (3, 3, WRITTEN), (2, 1, WRITTEN), (1, 1, WRITTEN)],
    [(3, 2, LEFT), (2, 2, LEFT), (4, 0, LEFT), (1, 1, WRITTEN), (2, 2, LEFT), (3, 1, LEFT)],
    [(6, 3, WRITTEN), (5, 5, LEFT)],
]


def test_cuts_into_rounds_change_no_bit(device: EmulatedDevice, fresh_seed: int) -> None:
    """Columns evaluated and committed per round, and whether the state goes on lacking those before; the rest of a
    round's inputs were drafts that did not hold. On the second device states are fetched ahead of their blocks."""
    generator = torch.Generator().manual_seed(fresh_seed)
    layer = random_layer(GdnGeometry(1, 3, 1), generator)
    x, wrong = (random_projections(layer.geometry, 8, generator) for _ in range(2))
    start = device_state(random_state(layer, generator))
    results = []
    with EmulatedDevice(n_sms=1) as small:
        for each, cut in ((each, cut) for each in (device, small) for cut in CUTS):
            rig = Rig(each, layer, 1)
            rig.write_state(0, 0, *start)
            out, done, fold, buffer = [], 0, 0, 0
            for evaluated, committed, keeps in cut:
                lines = joined([x[done : done + committed], wrong[: evaluated - committed]])
                out.append(rig.round([Row(0, evaluated, fold, buffer, keeps)], evaluated, lines)[0, :committed])
                done, fold, buffer = done + committed, committed, 1 - buffer
            rig.flush((0, fold, buffer))
            results.append(bits([np.concatenate(out), *rig.read_state(0)]))
    assert all(result == results[0] for result in results)


def test_a_flush_in_between_changes_no_bit(device: EmulatedDevice, fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    layer = random_layer(GdnGeometry(1, 2, 1), generator)
    x = random_projections(layer.geometry, 5, generator)
    start = device_state(random_state(layer, generator))
    results = []
    for flushes in (False, True):
        rig = Rig(device, layer, 1)
        rig.write_state(0, 0, *start)
        rig.round([Row(0, 3, 0, 0)], 3, x[:3])
        if flushes:
            rig.flush((0, 2, 1))
        out = rig.round([Row(0, 3, 0 if flushes else 2, 1)], 3, x[2:5])
        rig.flush((0, 3, 0))
        results.append((out, *rig.read_state(0)))
    assert bits(results[0]) == bits(results[1])


def test_flush_touches_the_named_slots_in_every_layer(device: EmulatedDevice, fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    layer = random_layer(GdnGeometry(1, 2, 2), generator)
    rig = Rig(device, layer, 3)
    states = [[device_state(random_state(layer, generator)) for _ in range(2)] for _ in range(3)]
    for slot in range(3):
        for i in range(2):
            rig.write_state(slot, i, *states[slot][i])
    record = np.zeros((3, rig.layout.record_bytes_per_slot), np.uint8)
    rig.device.upload(rig.records, record)
    rig.flush((2, 1, 0), (0, 0, 0))
    for i in range(2):
        for slot in (0, 1):
            assert bits(rig.read_state(slot, i)) == bits(states[slot][i])
        matrix, history = rig.read_state(2, i)  # alpha = 0, v = 0: everything is forgotten
        assert not matrix.any()
        assert not history.any()
