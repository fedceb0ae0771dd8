"""What ``round_begin`` decides about states: which columns of the log they lack, and when they are written back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from ninfer_runtime.backends.base import Round, Ticket, following
from ninfer_runtime.backends.cuda.book import NO_BUFFER
from ninfer_runtime.backends.cuda.ops.gdn_state import CARRIED, MOST_CARRIED, Carrying, GdnGeometry, GdnStateLayout
from ninfer_runtime.backends.cuda.ops.round_begin import RoundBegin
from ninfer_runtime.backends.cuda.ops.round_state import LOG_COLUMNS
from ninfer_runtime.config import SamplingParams
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.sampling_rig import N_SLOTS, TINY, Bench, make_round

LAYOUT = GdnStateLayout(GdnGeometry(1, 3, 2))
GREEDY = SamplingParams.greedy()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with EmulatedDevice() as device:
        yield Bench(device, TINY)


@dataclass(slots=True)
class Slots:
    """Slots whose rounds hand each other columns; ``carrying`` of the program that they belong to."""

    bench: Bench
    max_columns: int
    n_sms: int
    begin: RoundBegin = field(init=False)
    carrying: Carrying = field(init=False)

    def __post_init__(self) -> None:
        memory, device = self.bench.memory, self.bench.device
        records = device.allocate(N_SLOTS * LAYOUT.record_bytes_per_slot)
        self.carrying = Carrying.of(LAYOUT, records, self.n_sms, self.max_columns)
        self.begin = RoundBegin(device, memory, self.bench.counts.memory, 0, self.carrying)

    def resolve(self, round_: Round, fold: list[int], buffers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """RowState of the rows as the round finds them."""
        b = round_.n_rows
        before = np.array(buffers, np.int32)
        self.bench.buffers.pack(round_, np.array(fold, np.int32), before, 1 - np.maximum(0, before))
        self.bench.device.upload(self.bench.memory.input, self.bench.buffers.packed, self.bench.stream)
        self.begin.launch(self.bench.stream, b, round_.token_ids.shape[1])
        return self.bench.rows()[:b]

    def carried(self, slot: int) -> tuple[int, int]:
        """First column and number of what the slot's state lacks."""
        found = np.zeros(1, CARRIED)
        self.bench.device.synchronize()
        at = self.carrying.pointer + slot * self.carrying.stride
        self.bench.device.download(at, found)
        return int(found["first"][0]), int(found["n"][0])


@pytest.mark.parametrize("max_columns", [1, 2, 4, 6])
def test_no_column_is_lost_or_overwritten_before_it_is_folded(bench: Bench, max_columns: int, fresh_seed: int) -> None:
    """A model of the log: which committed columns each place holds, beside what a round says it folds and writes."""
    rng = np.random.default_rng(fresh_seed)
    slots, n_rows = Slots(bench, max_columns, n_sms=1), 3
    log = [dict[int, int]() for _ in range(n_rows)]
    lacking: list[list[int]] = [[] for _ in range(n_rows)]
    newest: list[list[int]] = [[] for _ in range(n_rows)]
    fold, buffers, serial, kept = [0] * n_rows, [NO_BUFFER] * n_rows, 0, 0
    for _ in range(60):
        n_columns = rng.integers(1, max_columns + 1, n_rows)
        q = int(n_columns.max())
        round_ = make_round(
            np.zeros((n_rows, q), np.int32), (GREEDY,) * n_rows, slots=np.arange(n_rows, dtype=np.int32),
            n_columns=n_columns.astype(np.int32),
        )  # fmt: skip
        for b, row in enumerate(slots.resolve(round_, fold, buffers)):
            pending = lacking[b] + newest[b][: fold[b]]
            assert row["carried"] == len(lacking[b])
            assert row["fold_columns"] == fold[b]
            assert [log[b][(row["log_first"] + i) % LOG_COLUMNS] for i in range(len(pending))] == pending
            assert row["keeps_state"] == (len(pending) <= slots.carrying.limit(n_rows, q))
            kept += int(row["keeps_state"] and len(pending) > 0)
            written = [(int(row["log_record"]) + i) % LOG_COLUMNS for i in range(int(n_columns[b]))]
            held = {(int(row["log_first"]) + i) % LOG_COLUMNS for i in range(len(pending))}
            assert not held & set(written)
            newest[b] = list(range(serial, serial + len(written)))
            serial += len(written)
            log[b].update(zip(written, newest[b], strict=True))
            lacking[b] = pending if row["keeps_state"] else []
            fold[b], buffers[b] = int(rng.integers(0, n_columns[b] + 1)), int(row["record_buffer"])
            if rng.random() < 0.1:  # flushed, restored or reset
                fold[b], buffers[b], lacking[b], newest[b] = 0, NO_BUFFER, [], []
    assert kept > 0


def test_states_are_written_back_where_few_heads_run(bench: Bench) -> None:
    slots = Slots(bench, 1, n_sms=6)
    assert [slots.carrying.limit(rows, 1) for rows in (1, 2, 3, 8)] == [0, 0, MOST_CARRIED, MOST_CARRIED]
    assert [slots.carrying.writes_per_round(rows, 1, 1) for rows in (1, 8)] == [1, 1 / (1 + MOST_CARRIED)]
    assert [Carrying(0, 0, 3, 1, 4).writes_per_round(8, 4, committed) for committed in (1.5, 3, 4)] == [1 / 3, 0.5, 0.5]
    round_ = make_round(np.zeros((2, 1), np.int32), (GREEDY,) * 2)
    slots.resolve(round_, [0, 0], [NO_BUFFER, NO_BUFFER])
    assert slots.resolve(round_, [1, 1], [1, 1])["keeps_state"].tolist() == [0, 0]


def test_a_row_that_has_ended_is_written_back(bench: Bench) -> None:
    logits = np.zeros((2, 1, TINY.n_rows), np.float32)
    logits[..., 9] = 1.0
    slots = Slots(bench, 1, n_sms=1)
    round_ = make_round(np.zeros((2, 1), np.int32), (GREEDY,) * 2, budget=np.array([1, 5], np.int32))
    slots.resolve(round_, [0, 0], [NO_BUFFER, NO_BUFFER])
    assert [slots.carried(slot) for slot in (0, 1)] == [(0, 0), (0, 0)]
    for step, expected in enumerate([([0, 1], [(1, 0), (0, 1)]), ([0, 1], [(1, 0), (0, 2)])]):
        bench.finish(round_, logits)
        round_ = following(round_, Ticket(1 + step))
        rows = slots.resolve(round_, [0, 0], [step % 2] * 2)
        assert (rows["keeps_state"].tolist(), [slots.carried(slot) for slot in (0, 1)]) == expected
        assert rows["fold_columns"].tolist() == [1 - step, 1]
