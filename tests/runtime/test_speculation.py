"""Speculation: whatever is drafted and accepted, the text and the state are those of one token at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ninfer_runtime.backends.base import ContractError, PrefillChunk, RowStatus, following
from ninfer_runtime.backends.reference.program import ReferenceProgram
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.models.binder import BoundModel
from tests.runtime.programs import (
    GREEDY,
    Row,
    cuts,
    emitted,
    int32,
    pages_of,
    random_ids,
    round_of,
    same,
    state_of,
)
from tests.runtime.speaking import (
    MAX_DRAFTS,
    SAMPLED,
    SPREAD,
    hold,
    opened,
    proposing,
    questions,
    round_with_drafts,
    speak,
    stop_ids_of,
)

N_NEW = 12
PENALISED = replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.4)
BIASED = replace(SAMPLED, logit_bias=((5, 3.0), (9, -100.0)), min_p=0.02)
DENSE = pytest.mark.parametrize("model", ["dense"], indirect=True)
"""For rules that do not depend on the architecture."""
KINDS = {"greedy": GREEDY, "penalised": PENALISED, "sampled": SAMPLED, "spread": SPREAD, "biased": BIASED}


def draft_state(program: ReferenceProgram, slot: int = 0) -> tuple[np.ndarray, ...]:
    """What drafting starts from: the last folded token's row and position, and the draft layer's keys and values."""
    recurrent, length = program._slots.recurrent[slot], program.length(slot)
    layer = len(program.model.spec.attention_layers)
    keys, values = program._pool.gather(layer, program._tensor(pages_of(slot)), length)
    tensors = (recurrent.hidden.float(), recurrent.position, keys[:, 1:], values[:, 1:])
    return tuple(tensor.numpy().copy() for tensor in tensors)


def full_state(program: ReferenceProgram, slot: int = 0) -> tuple[np.ndarray, ...]:
    return (*state_of(program, slot), *draft_state(program, slot))


@pytest.mark.parametrize("name", KINDS)
def test_any_number_of_drafts_gives_the_tokens_and_the_state_of_stepping(
    model: BoundModel, name: str, fresh_seed: int
) -> None:
    plain, program = proposing(model, max_drafts=0), proposing(model)
    sampling = replace(KINDS[name], seed=None if KINDS[name].is_greedy else fresh_seed)
    every = range(1, MAX_DRAFTS + 1)  # many prompts with every number: test_speculation_many.py
    for prompt, windows in (
        (questions(model, fresh_seed, 1)[0], every if name == "greedy" else (1 + fresh_seed % 5, MAX_DRAFTS)),
        (random_ids(model, fresh_seed, 63), (3,)),
    ):
        expected, state = speak(plain, prompt, N_NEW, sampling=sampling), state_of(plain)
        assert speak(program, prompt, N_NEW, sampling=sampling).tokens == expected.tokens
        stepped = full_state(program)
        assert same(stepped[:4], state)
        for n_drafts in windows:
            spoken = speak(program, prompt, N_NEW, n_drafts=n_drafts, sampling=sampling)
            assert spoken.tokens == expected.tokens
            assert same(full_state(program), stepped)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"draft_head": True}], ids=["bfloat16", "int8", "head"]
)
def test_rounding_and_formats_change_nothing_about_that(
    model: BoundModel, options: dict[str, Any], fresh_seed: int
) -> None:
    program, prompt = proposing(model, **options), questions(model, fresh_seed, 1)[0]
    sampling = replace(SPREAD, seed=fresh_seed)
    expected, state = speak(program, prompt, N_NEW, sampling=sampling).tokens, full_state(program)
    assert speak(program, prompt, N_NEW, n_drafts=3, sampling=sampling).tokens == expected
    assert same(full_state(program), state)


def test_e7_stops_budgets_and_logprobs_are_those_of_stepping(model: BoundModel, fresh_seed: int) -> None:
    plain, program = proposing(model, max_drafts=0), proposing(model)
    stop_ids = stop_ids_of(model)
    for prompt in questions(model, fresh_seed, 3):
        for n in (2, 3, 40):
            asked: dict[str, Any] = {"stop_ids": stop_ids, "n_top_logprobs": 3, "sampling": PENALISED}
            expected = speak(plain, prompt, n, **asked)
            spoken = speak(program, prompt, n, n_drafts=4, **asked)
            assert spoken.tokens == expected.tokens
            assert spoken.logprobs == expected.logprobs
            assert spoken.status == expected.status
            assert same(state_of(program), state_of(plain))


def test_trained_models_accept_most_drafts(model: BoundModel, fresh_seed: int) -> None:
    program, stop_ids, n_drafts = proposing(model), stop_ids_of(model), 3
    drafted, right = np.zeros(n_drafts, int), np.zeros(n_drafts, int)
    for prompt in questions(model, fresh_seed, 6):
        found = speak(
            program, prompt, 40, n_drafts=n_drafts, sampling=replace(SAMPLED, seed=fresh_seed), stop_ids=stop_ids
        )
        for total, part in zip((drafted, right), found.acceptance(n_drafts), strict=True):
            total += part
    print(f"accepted {right.tolist()} of {drafted.tolist()}")
    assert right.sum() > 0.6 * drafted.sum()


@DENSE
def test_chunks_of_a_prompt_do_not_change_what_is_drafted(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(model), random_ids(model, fresh_seed, 131)
    whole = opened(program, prompt, n_drafts=MAX_DRAFTS)
    state = full_state(program)
    for seed in range(3):
        pieces = opened(program, prompt, n_drafts=MAX_DRAFTS, chunks=cuts(fresh_seed + seed, len(prompt)))
        assert pieces.token_id == whole.token_id
        assert pieces.drafts is not None
        assert whole.drafts is not None
        assert pieces.drafts.tolist() == whole.drafts.tolist()
        assert same(full_state(program), state)


@DENSE
def test_positions_of_media_are_those_of_the_token_before(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(model), random_ids(model, fresh_seed, 70)
    axes = np.sort(np.random.default_rng(fresh_seed).integers(0, 50, (3, 70)), 1).astype(np.int32)
    for slot, lengths in ((0, [70]), (1, [1, 30, 39])):
        program.reset(slot)
        at = 0
        for n in lengths:
            span = slice(at, at + n)
            at += n
            positions = np.ascontiguousarray(axes[:, span])
            program.prefill(PrefillChunk(slot, prompt[span], span.start, pages_of(slot), positions))
    assert same(draft_state(program, 0), draft_state(program, 1))
    shifted = axes.copy()
    shifted[:, 35] += 9
    program.prefill(PrefillChunk(2, prompt, 0, pages_of(2), shifted))
    keys, moved = draft_state(program, 0)[2], draft_state(program, 2)[2]
    changed = np.flatnonzero((keys != moved).any((0, 2))) + 1
    assert changed.min() == 36


@DENSE
def test_a_restored_slot_drafts_what_a_cold_one_drafts(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(model), random_ids(model, fresh_seed, 100)
    cold = opened(program, prompt, n_drafts=MAX_DRAFTS)
    state = full_state(program)
    opened(program, prompt[:64])
    snapshot = program.snapshot(0)
    program.copy_pages(pages_of(0)[:1], pages_of(3)[:1])
    for place in ("host", "device", "host"):
        snapshot = program.relocate(snapshot, place)
        opened(program, random_ids(model, fresh_seed + 1, 90), slot=0, n_drafts=MAX_DRAFTS)
        program.restore(3, snapshot)
        warm = opened(program, prompt[64:], slot=3, n_drafts=MAX_DRAFTS, fresh=False)
        assert warm.token_id == cold.token_id
        assert warm.drafts is not None
        assert cold.drafts is not None
        assert warm.drafts.tolist() == cold.drafts.tolist()
        assert same(full_state(program, 3), state)


@DENSE
def test_relocation_keeps_within_the_plan_and_ends_the_old_name(model: BoundModel, fresh_seed: int) -> None:
    program = proposing(model)
    opened(program, random_ids(model, fresh_seed, 10))
    first, second = program.snapshot(0), program.snapshot(0)
    with pytest.raises(ContractError, match="in device memory already"):
        program.relocate(first, "device")
    moved = program.relocate(first, "host")
    assert (moved.n_tokens, moved.place) == (10, "host")
    with pytest.raises(ContractError, match="1 host snapshots are alive, the program was planned for 1"):
        program.relocate(second, "host")
    with pytest.raises(ContractError, match="was released"):
        program.restore(1, first)
    program.restore(1, second)
    program.release(second)
    program.restore(2, moved)
    assert same(state_of(program, 1), state_of(program, 2))


@DENSE
@pytest.mark.parametrize("sampling", [GREEDY, SPREAD], ids=["greedy", "spread"])
def test_one_ahead_equals_one_at_a_time(model: BoundModel, sampling: SamplingParams, fresh_seed: int) -> None:
    program, prompt = proposing(model), questions(model, fresh_seed, 1)[0]
    for n_drafts in (0, 2, MAX_DRAFTS):
        expected = speak(program, prompt, N_NEW, n_drafts=n_drafts, sampling=sampling)
        state = full_state(program)
        ahead = speak(program, prompt, N_NEW, n_drafts=n_drafts, sampling=sampling, one_ahead=True)
        assert ahead.tokens == expected.tokens
        assert ahead.rounds == expected.rounds
        assert same(full_state(program), state)


def test_a_row_speaks_the_same_alone_and_among_others(model: BoundModel, fresh_seed: int) -> None:
    program = proposing(model)
    slots, params = (3, 0, 4), (SPREAD, GREEDY, PENALISED)
    prompts = [*questions(model, fresh_seed, 2), random_ids(model, fresh_seed, 64)]

    def start(b: int) -> int:
        token_id = opened(program, prompts[b], slot=slots[b], n_drafts=MAX_DRAFTS, sampling=params[b]).token_id
        assert token_id is not None
        return token_id

    alone = []
    for b in range(3):
        tokens = [start(b)]
        for n in (1, 5, 2):
            round_ = round_with_drafts(program, tokens[-1], n_drafts=n, slot=slots[b], sampling=params[b])
            result = program.read(ticket := program.launch(round_))
            program.commit(ticket)
            tokens += emitted(result)
        alone.append((tokens, full_state(program, slots[b])))
    together = [[start(b)] for b in range(3)]
    for n in (1, 5, 2):
        rows = (Row(slots[b], [together[b][-1], *[0] * n], params[b]) for b in range(3))
        round_ = replace(round_of(program, *rows), own_drafts=True, n_drafts=int32(n, n, n))
        result = program.read(ticket := program.launch(round_))
        program.commit(ticket)
        for b in range(3):
            together[b] += emitted(result, b)
    for b in range(3):
        assert together[b] == alone[b][0]
        assert same(full_state(program, slots[b]), alone[b][1])


@DENSE
def test_a_shorter_commit_and_a_rollback_keep_the_last_hidden_row_right(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(model), questions(model, fresh_seed, 3)[1]
    tokens = speak(program, prompt, 10, sampling=PENALISED).tokens
    states = []
    for n in range(1, 7):
        opened(program, np.concatenate([prompt, np.array(tokens[:n], np.int32)]), sampling=PENALISED)
        states.append(draft_state(program))
    for columns in range(6):
        opened(program, prompt, n_drafts=MAX_DRAFTS, sampling=PENALISED)
        before = draft_state(program)
        hold(program, len(prompt), tokens[0], tokens[1:6])
        round_ = round_with_drafts(program, tokens[0], n_drafts=MAX_DRAFTS, sampling=PENALISED)
        result = program.read(ticket := program.launch(round_))
        assert emitted(result) == tokens[1:7]
        program.commit(ticket, int32(columns))
        assert same(draft_state(program), states[columns - 1] if columns else before)
        # The drafts belonged behind the last of the emitted tokens.
        again = round_with_drafts(program, tokens[columns], n_drafts=MAX_DRAFTS, sampling=PENALISED)
        result = program.read(ticket := program.launch(again))
        assert result.drafted is not None
        assert result.drafted.tolist() == [0]
        assert emitted(result) == tokens[columns + 1 : columns + 2]
        program.rollback(ticket)
        assert same(draft_state(program), states[columns - 1] if columns else before)


@DENSE
def test_e4_rejected_drafts_leave_counts_and_text_alone(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(model), questions(model, fresh_seed, 1)[0]
    sampling = replace(PENALISED, presence_penalty=2.0)
    tokens = speak(program, prompt, 5, sampling=sampling).tokens
    opened(program, prompt, sampling=sampling)
    for i in range(4):
        wrong = [(token + 1) % model.spec.n_addressable for token in (*tokens[i + 1 :], *tokens)[:3]]
        hold(program, len(prompt) + i, tokens[i], wrong)
        counts = program._slots.counts[0].copy()
        round_ = round_with_drafts(program, tokens[i], n_drafts=3, sampling=sampling)
        result = program.read(ticket := program.launch(round_))
        assert (result.accepted.tolist(), emitted(result)) == ([0], [tokens[i + 1]])
        assert np.array_equal(program._slots.counts[0], counts)
        program.commit(ticket)
        counts[tokens[i + 1]] += 1
        assert np.array_equal(program._slots.counts[0], counts)


@DENSE
def test_own_drafts_obey_the_masks_of_their_columns(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(model), questions(model, fresh_seed, 2)[1]
    words = -(-model.spec.text.vocab_rows // 32)
    free = speak(program, prompt, 4).tokens
    opened(program, prompt)
    for forbidden in range(3):
        hold(program, len(prompt), free[0], free[1:4])
        mask = np.full((1, 4, words), 0xFFFFFFFF, np.uint32)
        draft = free[1 + forbidden]
        mask[0, forbidden, draft // 32] &= ~np.uint32(1 << draft % 32)
        round_ = round_with_drafts(program, free[0], n_drafts=3, logits_mask=mask)
        result = program.read(ticket := program.launch(round_))
        program.rollback(ticket)
        assert result.accepted.tolist() == [forbidden]
        assert emitted(result)[:-1] == free[1 : 1 + forbidden]
        assert emitted(result)[-1] != draft


@DENSE
def test_a_token_that_nobody_drew_drops_the_drafts(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(model), questions(model, fresh_seed, 1)[0]
    first = opened(program, prompt, n_drafts=3)
    assert first.token_id is not None
    other = (first.token_id + 1) % model.spec.n_addressable
    result = program.read(ticket := program.launch(round_with_drafts(program, other, n_drafts=3)))
    program.commit(ticket)
    assert result.drafted is not None
    assert result.drafted.tolist() == [0]
    state, tokens = full_state(program), emitted(result)
    assert result.drafts is not None
    longer = np.concatenate([prompt, int32(other)])
    cold = opened(program, longer, n_drafts=3)
    assert [cold.token_id] == tokens
    assert cold.drafts is not None
    assert cold.drafts.tolist() == result.drafts[0, :3].tolist()
    assert same(full_state(program)[4:], state[4:])


@DENSE
def test_known_columns_are_read_by_the_draft_layer_too(model: BoundModel, fresh_seed: int) -> None:
    program, ids = proposing(model), random_ids(model, fresh_seed, 40)
    cold = opened(program, ids, n_drafts=3)
    state = draft_state(program)
    opened(program, ids[:36])
    round_ = replace(round_of(program, Row(0, ids[36:].tolist()), verify=False), n_drafts=int32(3))
    result = program.read(ticket := program.launch(round_))
    program.commit(ticket)
    assert emitted(result) == [cold.token_id]
    assert result.drafts is not None
    assert cold.drafts is not None
    assert result.drafts[0, :3].tolist() == cold.drafts.tolist()
    assert same(draft_state(program), state)


@DENSE
def test_rows_that_end_hold_no_drafts_and_budgets_bound_them(model: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(model), questions(model, fresh_seed, 1)[0]
    first = opened(program, prompt)
    assert first.token_id is not None
    for budget, held in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (50, 3)):
        round_ = round_with_drafts(program, first.token_id, n_drafts=3, columns=1, budget=budget)
        ticket = program.launch(round_)
        ahead = program.launch(following(round_, ticket, int32(4), int32(3)))
        result, second = program.read(ticket), program.read(ahead)
        assert result.n_drafts is not None
        assert result.n_drafts.tolist() == [held]
        assert second.drafted is not None
        assert second.drafted.tolist() == [held]
        assert second.status[0] is (RowStatus.FROZEN if budget == 1 else second.status[0])
        program.rollback(ahead)
        opened(program, prompt)


@DENSE
def test_drafts_of_the_small_head_are_among_its_ids(model: BoundModel, fresh_seed: int) -> None:
    assert model.draft_head is not None
    ids = set(model.artifact.tensor(model.draft_head.token_ids.name).tolist())
    program = proposing(model, draft_head=True)
    seen: set[int] = set()
    for seed in range(4):
        result = opened(
            program, random_ids(model, fresh_seed + seed, 20), n_drafts=5, sampling=replace(SPREAD, seed=seed)
        )
        assert result.drafts is not None
        seen |= set(result.drafts.tolist())
    assert seen
    assert seen <= ids


@DENSE
@pytest.mark.parametrize("accepted", ["equal", "ratio"])
def test_a_program_without_a_proposer_and_one_that_drafts_nothing_say_the_same(
    model: BoundModel, accepted: str, fresh_seed: int
) -> None:
    prompt, sampling = questions(model, fresh_seed, 1)[0], replace(SPREAD, seed=fresh_seed)
    plain, program = proposing(model, max_drafts=0), proposing(model, acceptance=accepted)
    expected = speak(plain, prompt, 12, sampling=sampling)
    assert speak(program, prompt, 12, sampling=sampling).tokens == expected.tokens
