"""Rounds: drafts, stops, budgets, commits and rollbacks leave exactly what one token at a time would have left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ninfer_runtime.backends.base import ContractError, PrefillChunk, RowStatus, Ticket, following
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.models.binder import BoundModel
from tests.runtime.programs import (
    GREEDY,
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

DRAFTS = 5
PENALISED = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, presence_penalty=1.5, frequency_penalty=0.7)
SAMPLED = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, frequency_penalty=0.5, seed=11)


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED, SAMPLED], ids=["greedy", "penalised", "sampled"])
def test_right_drafts_emit_what_stepping_emits_and_leave_its_state(
    model: BoundModel, sampling: SamplingParams, fresh_seed: int
) -> None:
    program, prompt = program_of(model), random_ids(model, fresh_seed, 61)
    prefill(program, prompt)
    row = Row(0, [7], sampling)
    tokens = step(program, 7, DRAFTS + 1, row)
    stepped = state_of(program)
    prefill(program, prompt)
    result = play(program, replace(row, inputs=[7, *tokens[:DRAFTS]]))
    assert emitted(result) == tokens
    assert result.accepted.tolist() == [DRAFTS]
    assert result.columns.tolist() == result.emitted.tolist() == [DRAFTS + 1]
    assert same(state_of(program), stepped)


@pytest.mark.parametrize("n_right", range(DRAFTS))
def test_wrong_draft_ends_the_row_with_the_targets_own_token(model: BoundModel, n_right: int, fresh_seed: int) -> None:
    program, prompt = program_of(model), random_ids(model, fresh_seed, 40)
    row = Row(0, [7], PENALISED)
    prefill(program, prompt)
    tokens = step(program, 7, n_right + 4, row)
    stepped_on = state_of(program)
    drafts = tokens[:DRAFTS] + [0] * DRAFTS
    drafts[n_right] = (tokens[n_right] + 1) % model.spec.n_addressable
    prefill(program, prompt)
    result = play(program, replace(row, inputs=[7, *drafts[:DRAFTS]]))
    assert emitted(result) == tokens[: n_right + 1]
    assert result.accepted.tolist() == [n_right]
    # Going on by single steps shows that rejected columns left nothing in state, keys, values or counts.
    assert step(program, tokens[n_right], 3, row) == tokens[n_right + 1 :]
    assert same(state_of(program), stepped_on)


def test_rollback_and_a_commit_of_nothing_leave_a_row_untouched(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = program_of(model), random_ids(model, fresh_seed, 33)
    prefill(program, prompt)
    before, row = state_of(program), Row(0, [3, 4, 5], PENALISED)
    program.rollback(program.launch(round_of(program, row)))
    assert same(state_of(program), before)
    ticket = program.launch(round_of(program, row))
    program.commit(ticket, int32(0))
    program.read(ticket)
    assert same(state_of(program), before)


@pytest.mark.parametrize("columns", range(1, 5))
def test_shorter_commit_folds_exactly_that_many_inputs(model: BoundModel, columns: int, fresh_seed: int) -> None:
    program, prompt = program_of(model), random_ids(model, fresh_seed, 20)
    row = Row(0, [9], PENALISED)
    prefill(program, prompt)
    states = []
    tokens = [9]
    for _ in range(5):
        tokens += step(program, tokens[-1], 1, row)
        states.append(state_of(program))
    prefill(program, prompt)
    ticket = program.launch(round_of(program, replace(row, inputs=tokens[:5])))
    program.read(ticket)
    program.commit(ticket, int32(columns))
    assert same(state_of(program), states[columns - 1])


def test_known_columns_equal_a_prefill_and_draw_once(model: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(model), random_ids(model, fresh_seed, 30)
    logits = prefill(program, ids)
    expected = state_of(program)
    prefill(program, ids[:25])
    result = play(program, Row(0, ids[25:].tolist()), verify=False, want_logits=True)
    assert emitted(result) == [int(logits[-1, : model.spec.n_addressable].argmax())]
    assert result.columns.tolist() == [5]
    assert result.logits is not None
    assert np.array_equal(result.logits[0], logits[25:])
    conv, matrices, counts, length = state_of(program)
    assert same((conv, matrices, length), (expected[0], expected[1], expected[3]))
    assert counts.sum() == 1


@pytest.mark.parametrize("verify", [True, False])
def test_token_does_not_depend_on_whether_a_prompt_or_a_round_reached_it(
    model: BoundModel, verify: bool, fresh_seed: int
) -> None:
    program, ids = program_of(model), random_ids(model, fresh_seed, 30)
    hot = replace(SAMPLED, temperature=2.0, seed=fresh_seed)
    prefill(program, ids[:29])
    drawn = emitted(play(program, Row(0, [int(ids[29])], hot), verify=verify))
    program.reset(0)
    result = program.prefill(PrefillChunk(0, ids, 0, pages_of(0), sampling=hot))
    assert drawn == [result.token_id]


def test_a_row_is_the_same_alone_and_among_others(model: BoundModel, fresh_seed: int) -> None:
    program = program_of(model)
    rows = [
        Row(3, [1, 2, 3], PENALISED),
        Row(0, [5], SAMPLED),
        Row(4, [8, 8, 8, 8, 8, 8]),
        Row(2, [6, 1], replace(SAMPLED, seed=12)),
    ]
    prompts = {row.slot: random_ids(model, fresh_seed + row.slot, 3 + 29 * i) for i, row in enumerate(rows)}

    def start() -> None:
        for slot, ids in prompts.items():
            prefill(program, ids, slot=slot)

    start()
    together = play(program, *rows, want_logits=True)
    states = [state_of(program, row.slot) for row in rows]
    start()
    for b, row in enumerate(rows):
        alone = play(program, row, want_logits=True)
        n = len(row.inputs)
        assert emitted(alone) == emitted(together, b)
        assert alone.logits is not None
        assert together.logits is not None
        assert np.array_equal(alone.logits[0, :n], together.logits[b, :n])
        assert not together.logits[b, n:].any()
        assert same(states[b], state_of(program, row.slot))


def test_stop_id_and_budget_cut_the_row_and_its_commit(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = program_of(model), random_ids(model, fresh_seed, 30)
    # Penalties spread the tokens, so that the stop id below can be one that comes late.
    row = Row(0, [2], replace(PENALISED, presence_penalty=2.0, frequency_penalty=2.0, logit_bias=((2, -100.0),)))
    prefill(program, prompt)
    tokens = step(program, 2, 5, row)
    cut = max(i for i in range(5) if tokens[i] not in tokens[:i])
    for change, status in (
        ({"stop_ids": frozenset([tokens[cut], 10**6])}, RowStatus.STOP_ID),
        ({"budget": cut + 1}, RowStatus.BUDGET),
        ({"budget": cut + 1, "stop_ids": frozenset([tokens[cut]])}, RowStatus.STOP_ID),
    ):
        prefill(program, prompt)
        result = play(program, replace(row, inputs=[2, *tokens[:5]], **change))
        assert emitted(result) == tokens[: cut + 1]
        assert result.status == (status,)
        assert result.columns.tolist() == [cut + 1]
        assert program.length(0) == 30 + cut + 1


def test_one_ahead_equals_one_at_a_time(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = program_of(model), random_ids(model, fresh_seed, 30)
    row = Row(0, [4], SAMPLED)
    prefill(program, prompt)
    expected = step(program, 4, 8, row)
    state = state_of(program)
    prefill(program, prompt)
    round_ = round_of(program, row)
    ticket = program.launch(round_)
    tokens: list[int] = []
    for _ in range(7):
        round_ = following(round_, ticket)
        ahead = program.launch(round_)
        tokens += emitted(program.read(ticket))
        ticket = ahead
    tokens += emitted(program.read(ticket))
    program.commit(ticket)
    assert tokens == expected
    assert same(state_of(program), state)


def test_extra_round_is_discarded_without_trace(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = program_of(model), random_ids(model, fresh_seed, 30)
    row = Row(0, [4], PENALISED)
    prefill(program, prompt)
    expected = step(program, 4, 1, row)
    state = state_of(program)
    prefill(program, prompt)
    first = round_of(program, row)
    ticket = program.launch(first)
    ahead = program.launch(following(first, ticket))
    assert emitted(program.read(ticket)) == expected
    program.rollback(ahead)
    assert same(state_of(program), state)


def test_rows_that_ended_freeze_in_the_round_ahead(dense: BoundModel, fresh_seed: int) -> None:
    program = program_of(dense)
    for slot in range(3):
        prefill(program, random_ids(dense, fresh_seed + slot, 20), slot=slot)
    token = emitted(program.read(first := program.launch(round_of(program, Row(0, [4])))))[0]
    program.commit(first, int32(0))
    rows = (Row(0, [4], stop_ids=frozenset([token])), Row(1, [4], budget=1), Row(2, [4]))
    round_ = round_of(program, *rows)
    ticket = program.launch(round_)
    ahead = program.launch(following(round_, ticket))
    assert program.read(ticket).status == (RowStatus.STOP_ID, RowStatus.BUDGET, RowStatus.RUNNING)
    result = program.read(ahead)
    assert result.status == (RowStatus.FROZEN, RowStatus.FROZEN, RowStatus.RUNNING)
    assert result.emitted.tolist() == result.columns.tolist() == [0, 0, 1]
    program.commit(ahead)
    assert [program.length(slot) for slot in range(3)] == [21, 21, 22]


def test_budget_runs_on_through_rounds_launched_ahead(dense: BoundModel, fresh_seed: int) -> None:
    program = program_of(dense)
    prefill(program, random_ids(dense, fresh_seed, 20))
    round_ = round_of(program, Row(0, [4], budget=2))
    ticket, statuses = program.launch(round_), []
    for _ in range(2):
        round_ = following(round_, ticket)
        ahead = program.launch(round_)
        statuses.append(program.read(ticket).status[0])
        ticket = ahead
    statuses.append(program.read(ticket).status[0])
    program.commit(ticket)
    assert statuses == [RowStatus.RUNNING, RowStatus.BUDGET, RowStatus.FROZEN]
    assert program.length(0) == 22


def test_masks_restrict_each_column_and_padding_rows_stay_out(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = program_of(model), random_ids(model, fresh_seed, 25)
    spec, words = model.spec, -(-model.spec.text.vocab_rows // 32)
    rng = np.random.default_rng(fresh_seed)
    allowed = [sorted(rng.choice(spec.n_addressable, 3, replace=False).tolist()) for _ in range(2)]
    mask = np.zeros((1, 2, words), np.uint32)
    for column, ids in enumerate(allowed):
        for token in [*ids, *range(spec.n_addressable, spec.text.vocab_rows)]:
            mask[0, column, token // 32] |= np.uint32(1 << token % 32)
    prefill(program, prompt)
    logits = play(program, Row(0, [3, 4]), verify=False, want_logits=True).logits
    assert logits is not None
    best = max(allowed[0], key=lambda token: (logits[0, 0, token], -token))
    prefill(program, prompt)
    result = play(program, Row(0, [3, best]), logits_mask=mask)
    assert emitted(result)[0] == best
    assert emitted(result)[1] in allowed[1]


def test_mask_without_a_way_out_is_refused(dense: BoundModel) -> None:
    program, words = program_of(dense), -(-dense.spec.text.vocab_rows // 32)
    prefill(program, int32(1, 2))
    with pytest.raises(ContractError, match="allows no addressable id"):
        program.launch(round_of(program, Row(0, [3]), logits_mask=np.zeros((1, 1, words), np.uint32)))


def test_logprobs_of_drafted_tokens_are_true_values(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = program_of(model), random_ids(model, fresh_seed, 25)
    row = Row(0, [7], PENALISED)
    prefill(program, prompt)
    tokens = step(program, 7, 4, row)
    prefill(program, prompt)
    result = play(program, replace(row, inputs=[7, *tokens[:3]]), want_logits=True, n_top_logprobs=2)
    assert result.logits is not None
    assert result.logprobs is not None
    raw = result.logits[0, :, : model.spec.n_addressable].astype(np.float64)
    raw -= raw.max(-1, keepdims=True)
    expected = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    for i, token in enumerate(tokens):
        assert float(result.logprobs.chosen[0, i]) == pytest.approx(expected[i, token], abs=1e-5)
        assert result.logprobs.top_ids[0, i].tolist() == np.argsort(-expected[i], kind="stable")[:2].tolist()


def test_row_with_nan_is_flagged_and_its_neighbour_is_not_touched(model: BoundModel, fresh_seed: int) -> None:
    program = program_of(model)
    for slot in (0, 1):
        prefill(program, random_ids(model, fresh_seed + slot, 20), slot=slot)
    rows = (Row(0, [4, 4]), Row(1, [4, 4]))
    clean = program.launch(round_of(program, *rows))
    expected = emitted(program.read(clean), 1)
    program.commit(clean, int32(0, 0))
    program._slots.recurrent[0].matrices[0] = float("nan")
    result = play(program, *rows)
    assert result.status == (RowStatus.NOT_FINITE, RowStatus.RUNNING)
    assert result.emitted[0] == result.columns[0] == 0
    assert emitted(result, 1) == expected


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slots": int32(9)}, "slot 9 does not exist"),
        ({"n_columns": int32(0)}, "n_columns holds"),
        ({"n_columns": int32(3)}, "n_columns holds"),
        ({"starts": int32(1)}, "starts at 1, its slot holds 2"),
        ({"pages": int32(-1, -1, -1, -1)[None]}, "pages of row 0 holds"),
        ({"budget": int32(0)}, "budget of 0"),
        ({"sampling": ()}, "0 sampling sets for 1 rows"),
        ({"stop_ids": ()}, "0 stop sets for 1 rows"),
        ({"token_ids": np.zeros((1, 7), np.int32)}, "7 columns"),
        ({"token_ids": np.zeros((1, 2), np.int64)}, "token_ids is int64"),
        ({"token_ids": int32(1, -1)[None]}, "token_ids of row 0 holds"),
        ({"logits_mask": np.zeros((1, 1, 1), np.uint32)}, "logits_mask is uint32"),
        ({"previous": Ticket(99)}, "round 99 is over"),
    ],
)
def test_round_that_breaks_the_contract_is_refused(dense: BoundModel, change: dict[str, Any], message: str) -> None:
    program = program_of(dense)
    prefill(program, int32(1, 2))
    good = round_of(program, Row(0, [3, 4]))
    with pytest.raises(ContractError, match=message):
        program.launch(replace(good, **change))
    program.commit(program.launch(good))


def test_tickets_are_used_in_order_and_once(dense: BoundModel) -> None:
    program = program_of(dense)
    prefill(program, int32(1, 2))
    round_ = round_of(program, Row(0, [3]))
    first = program.launch(round_)
    misuses: tuple[Callable[[], object], ...] = (
        lambda: program.launch(round_),
        lambda: program.reset(0),
        lambda: program.snapshot(0),
        lambda: program.commit(first, int32(2)),
        lambda: program.commit(first, int32(1, 1)),
    )
    for misuse in misuses:
        with pytest.raises(ContractError):
            misuse()
    second = program.launch(following(round_, first))
    with pytest.raises(ContractError, match="unread or uncommitted"):
        program.launch(following(round_, second))
    with pytest.raises(ContractError, match="committed already"):
        program.commit(first)
    program.read(first)
    with pytest.raises(ContractError, match="is over"):
        program.read(first)
    with pytest.raises(ContractError, match="is over"):
        program.rollback(first)
    program.rollback(second)
    with pytest.raises(ContractError, match="is over"):
        program.read(second)
    program.reset(0)


def test_round_may_only_follow_one_with_the_same_slots(dense: BoundModel) -> None:
    program = program_of(dense)
    for slot in (0, 1):
        prefill(program, int32(1, 2), slot=slot)
    round_ = round_of(program, Row(0, [3]), Row(1, [3]))
    ticket = program.launch(round_)
    swapped = replace(following(round_, ticket), slots=int32(1, 0))
    with pytest.raises(ContractError, match="expected the same"):
        program.launch(swapped)
    program.rollback(ticket)
