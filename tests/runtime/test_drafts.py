"""Accepting drafts by ratio: what comes out is distributed as the target, whatever was proposed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_runtime.backends.base import Float32s, RowStatus, Uint32s
from ninfer_runtime.backends.reference import drafts, rounds
from ninfer_runtime.backends.reference.drafts import Draft, propose, residual, shares
from ninfer_runtime.backends.reference.rounds import RowTask, verify_row
from ninfer_runtime.backends.reference.sampling import Candidates, Purpose, adjust, candidates, draw, uniform
from ninfer_runtime.config import SamplingParams
from tests.runtime.chance import chance_at_most

N_IDS = 6
START = 17
ANCHOR = 2
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=0)
CUT = replace(PLAIN, temperature=0.8, top_k=4, top_p=0.9)
PENALISED = replace(PLAIN, presence_penalty=0.7, frequency_penalty=0.4, logit_bias=((1, 0.5),))


def logits_of(seed: int, n_columns: int) -> tuple[Float32s, Float32s]:
    """Target and proposer: logits of every column for every token before it, float32 [columns, ids before, ids].

    The proposer is the target with some noise, and knows nothing of the last id, as a small head would.
    """
    rng = np.random.default_rng(seed)
    target = rng.normal(0.0, 1.3, (n_columns, N_IDS, N_IDS)).astype(np.float32)
    proposer = (target + rng.normal(0.0, 0.9, target.shape)).astype(np.float32)
    proposer[..., -1] = -np.inf
    return target, proposer


def pairs_of(seed: int, params: SamplingParams, n_draws: int, masks: Uint32s | None = None) -> NDArray[np.int64]:
    """How often each pair of tokens came first and second, [ids, ids], over ``n_draws`` random seeds.

    A round with two drafts; where it emits one token only, a second round with one draft goes on from there.
    """
    target, proposer = logits_of(seed, 2)
    seeds = np.random.default_rng(seed + 1).integers(0, 2**63, n_draws)
    found = np.zeros((N_IDS, N_IDS), np.int64)
    for own_seed in seeds.tolist():
        own = replace(params, seed=own_seed)
        counts = np.zeros(N_IDS, np.int32)
        counts[ANCHOR] = 1
        tokens = [ANCHOR]
        while len(tokens) < 3:
            done = len(tokens) - 1
            made: list[Draft] = []
            seen = counts.copy()
            for i in range(done, 2):
                before = made[-1].token_id if made else tokens[-1]
                draft = propose(proposer[i, before], own, seen, START + 1 + i, "ratio")
                assert draft is not None
                made.append(draft)
                seen[draft.token_id] += 1
            inputs = np.array([tokens[-1], *(draft.token_id for draft in made)], np.int32)
            rows = [target[i, inputs[i - done]] for i in range(done, 2)]
            rows.append(np.zeros(N_IDS, np.float32))
            own_masks = None if masks is None else np.concatenate([masks[done:], masks[:1]])
            task = RowTask(inputs, START + done, own, counts, frozenset(), 100, own_masks, tuple(made))
            outcome = verify_row(task, np.stack(rows))
            assert outcome.status is RowStatus.RUNNING
            for token in outcome.tokens:
                counts[token] += 1
            tokens += outcome.tokens
        found[tokens[1], tokens[2]] += 1
    return found


def expected_pairs(seed: int, params: SamplingParams, masks: Uint32s | None = None) -> NDArray[np.float64]:
    """The share of every pair when the target draws one token after the other."""
    target, _ = logits_of(seed, 2)
    out = np.zeros((N_IDS, N_IDS))
    counts = np.zeros(N_IDS, np.int32)
    counts[ANCHOR] = 1

    def law(column: int, before: int) -> NDArray[np.float64]:
        mask = None if masks is None else masks[column]
        return shares(candidates(adjust(target[column, before], params, counts, mask), params), np.arange(N_IDS))

    for first, share in enumerate(law(0, ANCHOR).tolist()):
        counts[first] += 1
        out[first] = share * law(1, first)
        counts[first] -= 1
    return out


DRAWS = pytest.mark.parametrize("n_draws", [3_000, pytest.param(20_000, marks=pytest.mark.slow)], ids=["3000", "20000"])
CHANCE = 1e-9
"""A rule counts as wrong when so little is the chance of what it drew."""


def chance_of(seed: int, n_draws: int, params: SamplingParams = PLAIN, masks: Uint32s | None = None) -> float:
    """At most that is the chance of the pairs drawn with ``seed``, if the target draws them."""
    return chance_at_most(pairs_of(seed, params, n_draws, masks), n_draws * expected_pairs(seed, params, masks))


@DRAWS
@pytest.mark.parametrize("name", ["plain", "cut", "penalised", "masked"])
def test_tokens_accepted_by_ratio_are_distributed_as_the_target(name: str, n_draws: int, fresh_seed: int) -> None:
    params = {"plain": PLAIN, "cut": CUT}.get(name, PENALISED)
    masks = np.array([[0b101110], [0b110101]], np.uint32) if name == "masked" else None
    chance = chance_of(fresh_seed, n_draws, params, masks)
    print(f"{name}: {chance:.3g} over {n_draws} draws")
    assert chance > CHANCE


def accept_always(_target: Candidates, draft_id: int, _proposal: Candidates, _seed: int, _position: int) -> int:
    return draft_id


def without_subtraction(target: Candidates, _proposal: Candidates) -> Candidates:
    return target


def one_number_for_both(target: Candidates, draft_id: int, proposal: Candidates, seed: int, position: int) -> int:
    """Accepts with the number that the draft was drawn with."""
    p, q = (float(shares(of, np.array([draft_id]))[0]) for of in (target, proposal))
    if uniform(seed, position, Purpose.DRAFT) < p / q:
        return draft_id
    return draw(residual(target, proposal), uniform(seed, position, Purpose.CORRECTION))


@DRAWS
@pytest.mark.parametrize(
    "module, name, wrong",
    [
        (rounds, "draw_by_ratio", accept_always),
        (drafts, "residual", without_subtraction),
        (rounds, "draw_by_ratio", one_number_for_both),
    ],
    ids=["accept-always", "no-subtraction", "one-number"],
)
def test_the_same_test_finds_wrong_rules(
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    name: str,
    wrong: Callable[..., object],
    n_draws: int,
    fresh_seed: int,
) -> None:
    """With logits of some seed: in one of a few thousand the proposer is so close to the target that little differs."""
    monkeypatch.setattr(module, name, wrong)
    chances = (chance_of(fresh_seed + i, n_draws) for i in range(4))
    assert any(chance < CHANCE for chance in chances)


def test_residual_is_what_the_proposal_left(fresh_seed: int) -> None:
    p = Candidates(np.array([3, 0, 1]), np.array([0.5, 0.3, 0.2]))
    q = Candidates(np.array([0, 3, 5]), np.array([0.6, 0.2, 0.2]))
    found = residual(p, q)
    assert found.ids.tolist() == [3, 0, 1]
    assert found.probabilities.tolist() == pytest.approx([0.6, 0.0, 0.4])
    # A proposal equal to the target leaves nothing, and is always accepted.
    assert residual(p, p) is p
    for position in range(100):
        assert drafts.draw_by_ratio(p, 1, p, fresh_seed, position) == 1


@pytest.mark.parametrize("acceptance", ["equal", "ratio"])
def test_proposer_that_agrees_with_the_target_is_always_right(acceptance: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    for params in (PLAIN, CUT, PENALISED, replace(PENALISED, temperature=0.0)):
        for i in range(50):
            logits = rng.normal(0.0, 2.0, (3, 40)).astype(np.float32)
            counts = rng.integers(0, 2, 40).astype(np.int32)
            own, seen, made = replace(params, seed=fresh_seed + i), counts.copy(), []
            for column in range(2):
                draft = propose(logits[column], own, seen, START + 1 + column, acceptance)  # type: ignore[arg-type]
                assert draft is not None
                seen[draft.token_id] += 1
                made.append(draft)
            inputs = np.array([0, *(draft.token_id for draft in made)], np.int32)
            task = RowTask(inputs, START, own, counts, frozenset(), 100, None, tuple(made))
            outcome = verify_row(task, logits)
            assert outcome.accepted == 2
            assert outcome.tokens[:2] == inputs[1:].tolist()


def test_equal_drafts_are_what_the_target_would_draw_among_the_proposed_ids(fresh_seed: int) -> None:
    logits = np.random.default_rng(fresh_seed).normal(0.0, 2.0, 40).astype(np.float32)
    logits[20:] = -np.inf
    counts = np.zeros(40, np.int32)
    draws = [propose(logits, replace(PLAIN, seed=seed), counts, 5, "equal") for seed in range(200)]
    assert all(draft is not None and draft.token_id < 20 and draft.distribution is None for draft in draws)
    greedy = propose(logits, SamplingParams.greedy(), counts, 5, "ratio")
    assert greedy == Draft(int(logits.argmax()))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_is_proposed_from_logits_that_are_not_finite(bad: float) -> None:
    logits, counts = np.zeros(4, np.float32), np.zeros(4, np.int32)
    logits[1] = bad
    assert propose(logits, PLAIN, counts, 5, "equal") is None
    assert propose(np.full(4, -np.inf, np.float32), PLAIN, counts, 5, "equal") is None


@pytest.mark.parametrize("cut", [{"top_p": 0.0}, {"top_p": 1e-9, "min_p": 1.0}, {"top_k": N_IDS + 1}, {"min_p": 1.0}])
@pytest.mark.parametrize("temperature", [1e-7, 2.0])
def test_e13_something_can_always_be_drafted_and_drawn(
    temperature: float, cut: dict[str, Any], fresh_seed: int
) -> None:
    target, proposer = logits_of(fresh_seed, 1)
    for seed in range(20):
        own, counts = replace(PLAIN, temperature=temperature, seed=seed, **cut), np.zeros(N_IDS, np.int32)
        draft = propose(proposer[0, ANCHOR], own, counts, START + 1, "ratio")
        assert draft is not None
        inputs = np.array([ANCHOR, draft.token_id], np.int32)
        task = RowTask(inputs, START, own, counts, frozenset(), 100, None, (draft,))
        outcome = verify_row(task, np.stack([target[0, ANCHOR], target[0, draft.token_id]]))
        assert outcome.status is RowStatus.RUNNING
        assert len(outcome.tokens) == 1 + outcome.accepted
        assert all(0 <= token < N_IDS for token in outcome.tokens)


def test_drafts_beyond_the_columns_take_part_in_the_last_draw(fresh_seed: int) -> None:
    target, proposer = logits_of(fresh_seed, 3)
    for seed, n_columns in itertools.product(range(60), (1, 2, 3)):
        own, counts = replace(PLAIN, seed=seed), np.zeros(N_IDS, np.int32)
        first = propose(proposer[0, ANCHOR], own, counts, START + 1, "ratio")
        assert first is not None
        second = propose(proposer[1, first.token_id], own, counts, START + 2, "ratio")
        assert second is not None
        inputs = np.array([ANCHOR, first.token_id, second.token_id], np.int32)
        logits = np.stack([target[i, token] for i, token in enumerate(inputs)])
        whole, cut = (
            verify_row(
                RowTask(inputs[:n], START, own, counts, frozenset(), 100, None, (first, second)), logits[:n]
            ).tokens
            for n in (3, n_columns)
        )
        assert cut == whole[:n_columns]
