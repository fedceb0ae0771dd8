"""Snapshots, shared pages and counts: a continued prefix is the prefix, in any slot, on any page."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ninfer_runtime.backends.base import ContractError, Place, PrefillChunk, page_table
from ninfer_runtime.backends.reference.program import ReferenceProgram
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.models.binder import BoundModel
from tests.runtime.programs import (
    Row,
    emitted,
    int32,
    pages_of,
    play,
    prefill,
    program_of,
    random_ids,
    round_of,
    same,
    state_of,
    step,
)

PENALISED = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, frequency_penalty=2.0)


@pytest.mark.parametrize("place", ["device", "host"])
def test_restored_prefix_in_another_slot_equals_a_cold_run(model: BoundModel, place: Place, fresh_seed: int) -> None:
    program, ids = program_of(model), random_ids(model, fresh_seed, 100)
    cold = prefill(program, ids)
    state = state_of(program)
    prefill(program, ids[:70])
    snapshot = program.snapshot(0, place)
    assert (snapshot.n_tokens, snapshot.place) == (70, place)
    # The first 64 tokens fill a page that both rows read; the partly filled one is copied before it is written.
    shared, own = int(pages_of(0)[0]), pages_of(3)
    program.copy_pages(pages_of(0)[1:2], own[1:2])
    step(program, 5, 3)
    program.restore(3, snapshot)
    assert program.length(3) == 70
    pages = np.concatenate([int32(shared), own[1:]])
    warm = program.prefill(PrefillChunk(3, ids[70:], 70, pages, logits="all")).logits
    assert np.array_equal(warm, cold[70:])
    assert same(state_of(program, 3), state)


def test_snapshot_survives_its_slot_and_repeats(model: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(model), random_ids(model, fresh_seed, 40)
    prefill(program, ids)
    snapshot = program.snapshot(0)
    futures = []
    for _ in range(2):
        program.restore(0, snapshot)
        futures.append(step(program, 5, 6, Row(0, [5], PENALISED)))
    assert futures[0] == futures[1], "restoring must empty the counts"


def test_restore_empties_counts_and_resuming_sets_them(dense: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(dense), random_ids(dense, fresh_seed, 30)
    row = Row(0, [5], PENALISED)
    prefill(program, ids)
    tokens = step(program, 5, 8, row)
    prefill(program, ids)
    first = step(program, 5, 4, row)
    middle = program.snapshot(0)
    program.restore(0, middle)
    assert not state_of(program)[2].any()
    program.set_output_counts(0, np.array(first, np.int32))
    assert first + step(program, first[-1], 4, row) == tokens


def test_e1_penalties_count_generated_tokens_only(model: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(model), random_ids(model, fresh_seed, 12)
    plain = prefill(program, ids)[-1, : model.spec.n_addressable]
    top = int(plain.argmax())
    heavy = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    prompt = np.concatenate([np.full(40, top, np.int32), ids])
    raw = prefill(program, prompt)[-1, : model.spec.n_addressable]
    program.reset(0)
    drawn = program.prefill(PrefillChunk(0, prompt, 0, pages_of(0), sampling=heavy))
    assert drawn.token_id == int(raw.argmax()), "the 40 occurrences in the prompt must not count"
    assert state_of(program)[2].sum() == 1
    assert state_of(program)[2][drawn.token_id] == 1


def test_e4_every_rejected_draft_leaves_the_counts_alone(dense: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(dense), random_ids(dense, fresh_seed, 30)
    prefill(program, ids)
    (first,) = step(program, 5, 1, Row(0, [5], PENALISED))
    prefill(program, ids)
    wrong = (first + 1) % dense.spec.n_addressable
    result = play(program, Row(0, [5, wrong, wrong, wrong], PENALISED))
    assert emitted(result) == [first]
    counts = state_of(program)[2]
    assert counts.sum() == counts[first] == 1


def test_snapshots_beyond_the_plan_and_after_release_are_refused(dense: BoundModel) -> None:
    program = program_of(dense)
    prefill(program, int32(1, 2, 3))
    first, second = program.snapshot(0), program.snapshot(0)
    program.snapshot(0, "host")
    with pytest.raises(ContractError, match="2 device snapshots are alive, the program was planned for 2"):
        program.snapshot(0)
    with pytest.raises(ContractError, match="planned for 1"):
        program.snapshot(0, "host")
    program.release(first)
    third = program.snapshot(0)
    for misuse in (lambda: program.restore(0, first), lambda: program.release(first)):
        with pytest.raises(ContractError, match="was released"):
            misuse()
    program.release(second)
    program.release(third)


def _unequal(program: ReferenceProgram) -> None:
    program.copy_pages(int32(0, 1), int32(2))


def _outside(program: ReferenceProgram) -> None:
    program.copy_pages(int32(0), int32(10**6))


@pytest.mark.parametrize("misuse", [_unequal, _outside])
def test_page_copies_outside_the_pool_are_refused(
    dense: BoundModel, misuse: Callable[[ReferenceProgram], None]
) -> None:
    with pytest.raises(ContractError):
        misuse(program_of(dense))


def test_page_table_pads_short_rows_and_refuses_long_ones() -> None:
    assert page_table([[4, 2], [7]], 3).tolist() == [[4, 2, -1], [7, -1, -1]]
    with pytest.raises(ContractError, match="row 0 has 2 pages"):
        page_table([[4, 2]], 1)


def test_rope_delta_shifts_every_axis_of_a_round(dense: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(dense), random_ids(dense, fresh_seed, 21)
    positions = np.tile(np.arange(21, dtype=np.int32), (3, 1))
    positions[:, 20] += 7
    chunk = PrefillChunk(0, ids, 0, pages_of(0), positions=positions, logits="last")
    program.reset(0)
    expected = program.prefill(chunk).logits[0]
    prefill(program, ids[:20])
    round_ = round_of(program, Row(0, [int(ids[20])]), want_logits=True)
    round_.rope_deltas[0] = 7
    ticket = program.launch(round_)
    logits = program.read(ticket).logits
    assert logits is not None
    assert np.array_equal(logits[0, 0], expected)
    program.commit(ticket)
