"""Accepting by ratio, what a program with a proposer plans, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ninfer_format.errors import UsageError
from ninfer_runtime.backends.base import ContractError, PrefillChunk, page_table
from ninfer_runtime.models.binder import BoundModel
from tests.runtime.programs import GREEDY, LIMITS, PAGES_PER_SLOT, cuts, emitted, int32, pages_of, random_ids
from tests.runtime.speaking import SPREAD, opened, proposing, questions, round_with_drafts, speak

N_NEW = 12
PENALISED = replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.4)


def test_ratio_keeps_the_prefix_rule_for_greedy_rows(dense: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(dense, acceptance="ratio"), questions(dense, fresh_seed, 1)[0]
    expected = speak(program, prompt, N_NEW, sampling=PENALISED)
    assert speak(program, prompt, N_NEW, n_drafts=3, sampling=PENALISED).tokens == expected.tokens


def test_ratio_repeats_itself_and_does_not_depend_on_where_a_round_is_cut(dense: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(dense, acceptance="ratio"), questions(dense, fresh_seed, 2)[1]
    for seed in range(2):
        sampling = replace(SPREAD, temperature=1.8, seed=fresh_seed + seed)
        whole = speak(program, prompt, N_NEW, n_drafts=3, sampling=sampling)
        assert speak(program, prompt, N_NEW, n_drafts=3, sampling=sampling, chunks=cuts(seed, len(prompt))) == whole
        assert speak(program, prompt, N_NEW, n_drafts=3, sampling=sampling, one_ahead=True) == whole
        first = opened(program, prompt, n_drafts=3, sampling=sampling)
        assert first.token_id is not None
        outcomes = []
        for columns in (1, 2, 3, 4):
            round_ = round_with_drafts(program, first.token_id, n_drafts=3, columns=columns, sampling=sampling)
            outcomes.append(emitted(program.read(ticket := program.launch(round_))))
            program.rollback(ticket)
            opened(program, prompt, n_drafts=3, sampling=sampling)
        for columns, found in zip((1, 2, 3, 4), outcomes, strict=True):
            assert found == outcomes[-1][:columns]


def test_ratio_gives_the_raw_logprobs_of_what_it_emits(dense: BoundModel, fresh_seed: int) -> None:
    program, prompt = proposing(dense, acceptance="ratio"), questions(dense, fresh_seed, 2)[1]
    first = opened(program, prompt, n_drafts=3, sampling=SPREAD)
    assert first.token_id is not None
    round_ = round_with_drafts(program, first.token_id, n_drafts=3, sampling=SPREAD, want_logits=True, n_top_logprobs=2)
    result = program.read(ticket := program.launch(round_))
    program.commit(ticket)
    assert result.logits is not None
    assert result.logprobs is not None
    raw = result.logits[0, :, : dense.spec.n_addressable].astype(np.float64)
    raw -= raw.max(-1, keepdims=True)
    expected = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    for i, token in enumerate(emitted(result)):
        assert float(result.logprobs.chosen[0, i]) == pytest.approx(expected[i, token], abs=1e-5)
        assert result.logprobs.top_ids[0, i].tolist() == np.argsort(-expected[i], kind="stable")[:2].tolist()


def test_plan_counts_the_draft_layer_the_last_row_and_the_small_head(model: BoundModel) -> None:
    plain, program = proposing(model, max_drafts=0), proposing(model)
    with_head = proposing(model, draft_head=True)
    spec, n_layers = model.spec, len(model.spec.attention_layers)
    assert program.plan.kv_bytes * n_layers == plain.plan.kv_bytes * (n_layers + 1)
    last = spec.text.hidden * 4 + 3 * 8
    assert program.plan.state_bytes == plain.plan.state_bytes + LIMITS.n_slots * last
    assert program.plan.device_snapshot_bytes == plain.plan.device_snapshot_bytes + LIMITS.device_snapshots * last
    assert sum(r.n_bytes for r in program._slots.recurrent) + program._slots.counts.nbytes == program.plan.state_bytes
    assert program.plan.weight_bytes > plain.plan.weight_bytes
    rows = model.config.geometry.draft_head_rows
    assert with_head.plan.weight_bytes == program.plan.weight_bytes + rows * spec.text.hidden * 4


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_drafts": 3, "proposer": "none"}, "there is no proposer"),
        ({"max_drafts": 0, "draft_head": True}, "there is no proposer"),
        ({"max_drafts": 0, "proposer": "mtp"}, "max_drafts is 0, expected at least 1"),
    ],
)
def test_plans_that_cannot_be_are_refused(dense: BoundModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        proposing(dense, **options)


def test_artifacts_without_the_parts_are_refused(dense: BoundModel) -> None:
    with pytest.raises(UsageError, match="has no MTP layer; convert"):
        proposing(replace(dense, mtp=None))
    with pytest.raises(UsageError, match="has no draft head"):
        proposing(replace(dense, draft_head=None), draft_head=True)
    proposing(replace(dense, draft_head=None)).close()


def test_drafts_that_were_not_planned_are_a_breach(dense: BoundModel) -> None:
    program, plain = proposing(dense, max_drafts=2), proposing(dense, max_drafts=0)
    ids = int32(1, 2, 3)
    chunk = PrefillChunk(0, ids, 0, pages_of(0), sampling=GREEDY, n_drafts=3)
    with pytest.raises(ContractError, match="n_drafts is 3, expected 0 to 2"):
        program.prefill(chunk)
    with pytest.raises(ContractError, match="n_drafts without sampling"):
        program.prefill(replace(chunk, n_drafts=1, sampling=None))
    first = opened(program, ids, n_drafts=2)
    assert first.token_id is not None
    good = round_with_drafts(program, first.token_id, n_drafts=2)
    for change, message in (
        ({"verify": False}, "own_drafts without verify"),
        ({"n_drafts": int32(3)}, "n_drafts is 3, expected 0 to 2"),
        ({"n_drafts": int32(1, 1)}, r"n_drafts is int32\[2\], expected int32\[1\]"),
        ({"pages": page_table([[0]], PAGES_PER_SLOT), "starts": int32(63)}, "starts at 63"),
    ):
        with pytest.raises(ContractError, match=message):
            program.launch(replace(good, **change))
    # A refused round used nothing up.
    result = program.read(ticket := program.launch(good))
    program.commit(ticket)
    assert result.drafted is not None
    assert result.drafted.tolist() == [2]
    opened(plain, ids)
    with pytest.raises(ContractError, match="own_drafts, but the program has no proposer"):
        plain.launch(replace(good, n_drafts=None))


def test_pages_must_reach_as_far_as_drafting_may(dense: BoundModel, fresh_seed: int) -> None:
    program, ids = proposing(dense), random_ids(dense, fresh_seed, 60)
    with pytest.raises(ContractError, match="pages has 1 pages, 65 tokens need 2"):
        program.prefill(PrefillChunk(0, ids, 0, pages_of(0)[:1], sampling=GREEDY, n_drafts=5))
    first = opened(program, ids)
    assert first.token_id is not None
    round_ = replace(
        round_with_drafts(program, first.token_id, n_drafts=4, columns=1),
        pages=page_table([pages_of(0)[:1].tolist()], 1),
    )
    with pytest.raises(ContractError, match="65 tokens need 2"):
        program.launch(round_)
    # The budget ends the row before drafts could reach the next page.
    program.rollback(program.launch(replace(round_, budget=int32(4))))
