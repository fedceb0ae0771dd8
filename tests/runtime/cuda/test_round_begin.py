"""Rows as the host packs them, rows that continue from a round nobody has read yet, and the counts of both."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_runtime.backends.base import Round, RowStatus, Ticket, following, page_table
from ninfer_runtime.backends.cuda.ops import draft, round_state
from ninfer_runtime.config import SamplingParams
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.sampling_cases import decided_logits, some_params
from tests.runtime.cuda.sampling_rig import N_SLOTS, PAGES, TINY, Bench, Mirror, assert_same, make_round

INCLUDE = Path(round_state.__file__).parents[1] / "include"
STRUCTS = {
    "RowState": round_state.ROW_STATE,
    "RoundHeader": round_state.HEADER,
    "RowInput": round_state.ROW_INPUT,
    "BiasEntry": round_state.BIAS_ENTRY,
    "RowOutput": round_state.ROW_OUTPUT,
    "DraftState": draft.DRAFT_STATE,
    "HeldDrafts": draft.HELD_DRAFTS,
}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with EmulatedDevice() as device:
        yield Bench(device, TINY)


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_structs_mirror_the_header_member_by_member(name: str) -> None:
    headers = "".join((INCLUDE / file).read_text(encoding="utf-8") for file in ("round.cuh", "draft.cuh"))
    body = re.search(rf"struct {name} {{(.*?)}};", headers, re.DOTALL)
    assert body is not None
    members = re.findall(r"(\w+) (\w+)(?:\[[^]]+\])?;", re.sub("//.*", "", body[1]))
    types = {"int": np.int32, "float": np.float32, "double": np.float64, "uint64_t": np.uint64, "uint8_t": np.uint8}
    dtype = STRUCTS[name]
    assert [member for _, member in members] == list(dtype.names or ())
    assert all(dtype[member].base == types[kind] for kind, member in members)


def test_a_round_arrives_as_it_was_packed(bench: Bench) -> None:
    round_ = make_round(
        np.arange(12, dtype=np.int32).reshape(3, 4) + 100,
        (SamplingParams.greedy(),) * 3,
        slots=np.array([5, 0, 8], np.int32),
        n_columns=np.array([4, 1, 2], np.int32),
        starts=np.array([9, 1000, 0], np.int32),
        rope_deltas=np.array([-3, 0, 7], np.int32),
        budget=np.array([1, 2, 3], np.int32),
        pages=page_table([[3, 1], [2], []], 2),
        verify=False,
    )
    bench.start(round_, record_buffer=1)
    rows = bench.rows()[:3]
    assert bench.tokens(3, 4).tolist() == [[100, 101, 102, 103], [104, 0, 0, 0], [108, 109, 0, 0]]
    expected: dict[str, Any] = {
        "slot": [5, 0, 8], "start": [9, 1000, 0], "n_columns": [4, 1, 2], "rope_delta": [-3, 0, 7],
        "fold_columns": [0, 1, 2], "fold_buffer": [0] * 3, "record_buffer": [1] * 3, "budget": [1, 2, 3],
        "verify": [0] * 3, "status": [0] * 3, "emitted": [0] * 3, "accepted": [0] * 3, "columns": [0] * 3,
    }  # fmt: skip
    assert {name: rows[name].tolist() for name in expected} == expected
    pages = np.zeros((3, PAGES), np.int32)
    bench.device.download(bench.memory.pages, pages)
    assert pages.tolist() == [[3, 1, -1, -1, -1], [2, -1, -1, -1, -1], [-1] * 5]


def test_rounds_that_follow_unread_rounds_equal_the_reference(bench: Bench, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    for _ in range(15):
        b, q = int(rng.integers(1, 9)), int(rng.integers(1, 7))
        mirror = Mirror(TINY)
        mirror.counts[:] = rng.choice([0, 0, 1], mirror.counts.shape)
        bench.set_counts(mirror.counts)
        few = rng.choice(TINY.n_addressable, 3)
        token_ids = rng.choice(few, (b, q)).astype(np.int32)
        round_ = make_round(
            token_ids,
            tuple(some_params(rng, TINY.n_addressable) for _ in range(b)),
            slots=rng.permutation(N_SLOTS)[:b].astype(np.int32),
            n_columns=rng.integers(1, q + 1, b).astype(np.int32),
            stop_ids=tuple(frozenset(rng.choice(few, int(rng.integers(0, 2))).tolist()) for _ in range(b)),
            budget=rng.integers(1, 9, b).astype(np.int32),
            verify=bool(rng.random() < 0.7),
        )
        previous = None
        for step in range(4):
            logits = decided_logits(rng, mirror, round_, previous)
            expected = mirror.launch(round_, logits, previous)
            result = bench.play(round_, logits)
            assert_same(result, expected.result)
            rows = bench.rows()[:b]
            assert rows["status"].tolist() == list(result.status)
            assert rows["columns"].tolist() == result.columns.tolist()
            if previous is not None:
                is_alive = np.array([status is not RowStatus.FROZEN for status in result.status])
                assert np.array_equal(rows["fold_columns"], previous.result.columns)
                assert np.array_equal(rows["n_columns"], np.where(is_alive, round_.n_columns, 0))
            assert np.array_equal(bench.get_counts(), mirror.counts)
            previous, round_ = expected, self_following(rng, round_, step, few)


def self_following(rng: np.random.Generator, round_: Round, step: int, few: np.ndarray[Any, Any]) -> Round:
    """The plain one-column continuation, or one with fresh drafts behind the unknown first token."""
    plain = following(round_, Ticket(step + 1))
    if rng.random() < 0.5:
        return plain
    b, q = round_.n_rows, int(rng.integers(1, 7))
    token_ids = rng.choice(few, (b, q)).astype(np.int32)
    return dataclasses.replace(plain, token_ids=token_ids, n_columns=rng.integers(1, q + 1, b).astype(np.int32))


def test_a_frozen_row_stays_frozen_and_writes_nothing(bench: Bench) -> None:
    logits = np.zeros((2, 1, TINY.n_rows), np.float32)
    logits[..., 9] = 1.0
    greedy = (SamplingParams.greedy(),) * 2
    round_ = make_round(np.zeros((2, 1), np.int32), greedy, budget=np.array([1, 5], np.int32))
    bench.set_counts(np.zeros((N_SLOTS, TINY.n_rows), np.int32))
    statuses = []
    for _ in range(3):
        result = bench.play(round_, logits)
        statuses.append(result.status)
        round_ = following(round_, Ticket(1))
    assert statuses[0] == (RowStatus.BUDGET, RowStatus.RUNNING)
    assert statuses[1:] == [(RowStatus.FROZEN, RowStatus.RUNNING)] * 2
    assert (result.emitted.tolist(), result.starts.tolist()) == ([0, 1], [0, 9])
    assert bench.get_counts()[:2, 9].tolist() == [1, 2]


def test_counts_of_commits_lists_and_resets(bench: Bench, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    expected = rng.integers(0, 3, (N_SLOTS, TINY.n_rows)).astype(np.int32)
    bench.set_counts(expected)
    rows = [[5, 5, 5], [], [639, 0, 5, 5, 0, 1]]
    bench.counts.add_rows(bench.stream, [4, 2, 8], rows)
    for slot, tokens in zip((4, 2, 8), rows, strict=True):
        np.add.at(expected[slot], tokens, 1)
    assert np.array_equal(bench.get_counts(), expected)
    bench.counts.reset(bench.stream, 4)
    ids = rng.integers(0, TINY.n_rows, 1000).astype(np.int32)
    pointer = bench.device.allocate(ids.nbytes)
    bench.device.upload(pointer, ids)
    bench.counts.add_list(bench.stream, 4, pointer, ids.size)
    bench.counts.add_list(bench.stream, 4, pointer, 0)
    expected[4] = np.bincount(ids, minlength=TINY.n_rows)
    assert np.array_equal(bench.get_counts(), expected)
