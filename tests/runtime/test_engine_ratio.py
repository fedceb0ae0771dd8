"""Accepting by ratio in the engine: texts are distributed as without drafts, and repeat themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_runtime import Engine, EngineConfig, Request, SamplingParams
from ninfer_runtime.backends.base import Round, Ticket, Uint32s
from ninfer_runtime.backends.reference import rounds
from ninfer_runtime.backends.reference.drafts import shares
from ninfer_runtime.backends.reference.sampling import Candidates, adjust, candidates
from tests.runtime.chance import chance_at_most
from tests.runtime.conftest import ArtifactOf
from tests.runtime.programs import random_ids
from tests.runtime.test_drafts import CHANCE

WILD = SamplingParams(temperature=1.6, top_k=3, top_p=1.0, presence_penalty=0.5)
N_DRAFTS, N_COUNTED = 2, 3
CONFIG = EngineConfig(
    max_context=64,
    max_concurrency=8,
    prefill_chunk=128,
    spec="mtp",
    draft_tokens=N_DRAFTS,
    draft_backoff=False,
    acceptance="ratio",
)
N_IDS = 640


@dataclass
class Alternating:
    """A form that allows even and odd ids in turn, so that many drafts are not allowed where they stand."""

    is_odd: bool = False

    def masks(self, drafts: Sequence[int], out: Uint32s) -> int:
        for i in range(1 + len(drafts)):
            out[i] = 0xAAAAAAAA if self.is_odd ^ bool(i & 1) else 0x55555555
            if i < len(drafts) and bool(drafts[i] & 1) is not self.is_odd ^ bool(i & 1):
                return i + 1
        return 1 + len(drafts)

    def advance(self, token_id: int) -> None:
        self.is_odd = not self.is_odd


@pytest.fixture(scope="module")
def path(artifact_of: ArtifactOf) -> Path:
    return artifact_of("dense", "bf16")


def texts(engine: Engine, prompt: list[int], seeds: Sequence[int], *, has_form: bool) -> list[tuple[int, ...]]:
    """The first tokens of one answer per seed; eight at a time run together."""
    out = []
    for begin in range(0, len(seeds), 8):
        asked = (replace(WILD, seed=seed) for seed in seeds[begin : begin + 8])
        handles = [
            engine.generate(Request(prompt, own, N_COUNTED + 1, grammar=Alternating() if has_form else None))
            for own in asked
        ]
        out += [tuple(event.token_id for event in handle)[:N_COUNTED] for handle in handles]
    return out


def prompt_of(engine: Engine, seed: int) -> list[int]:
    """The first of the random prompts of a seed behind which the model is in doubt for two tokens."""
    while True:
        prompt: list[int] = random_ids(engine.model, seed, 6).tolist()
        first = law(engine, prompt, (), has_form=False)
        second = law(engine, prompt, (int(first.ids[0]),), has_form=False)
        if max(first.probabilities.max(), second.probabilities.max()) < 0.8:
            return prompt
        seed += 1


def law(engine: Engine, prompt: list[int], said: tuple[int, ...], *, has_form: bool) -> Candidates:
    """The distribution of the token behind a text, from its logits alone."""
    n_ids = engine.model.spec.n_addressable
    logits = engine.teacher_forced_logits([*prompt, *said])[-1, :n_ids]
    counts = np.zeros(n_ids, np.int32)
    np.add.at(counts, list(said), 1)
    mask = np.full(N_IDS // 32, 0xAAAAAAAA if len(said) & 1 else 0x55555555, np.uint32) if has_form else None
    return candidates(adjust(logits, WILD, counts, mask), WILD)


def expected_shares(engine: Engine, prompt: list[int], *, has_form: bool) -> dict[tuple[int, ...], float]:
    """Of every text of ``N_COUNTED`` tokens that can be said."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(N_COUNTED):
        longer = {}
        for said, share in found.items():
            own = law(engine, prompt, said, has_form=has_form)
            for token, part in zip(own.ids.tolist(), shares(own, own.ids).tolist(), strict=True):
                longer[(*said, token)] = share * part
        found = longer
    return found


def chance_of(engine: Engine, seed: int, n: int, *, has_form: bool) -> float:
    """At most that is the chance of ``n`` texts with random seeds behind one prompt, if the target draws them."""
    prompt = prompt_of(engine, seed)
    expected = expected_shares(engine, prompt, has_form=has_form)
    seeds = np.random.default_rng(seed).integers(0, 2**63, n).tolist()
    counts = Counter(texts(engine, prompt, seeds, has_form=has_form))
    cells = list({**expected, **dict.fromkeys(counts, 0.0)} if set(counts) - set(expected) else expected)
    observed: NDArray[np.int64] = np.array([counts[cell] for cell in cells])
    return chance_at_most(observed, np.array([n * expected.get(cell, 0.0) for cell in cells]))


@pytest.mark.parametrize(
    "n",
    [160, pytest.param(20_000, marks=(pytest.mark.slow, pytest.mark.timeout(3600)))],
    ids=["160", "20000"],
)
@pytest.mark.parametrize("has_form", [False, True], ids=["free", "form"])
def test_texts_are_distributed_as_without_drafts(path: Path, n: int, has_form: bool, fresh_seed: int) -> None:
    with Engine.open(path, CONFIG) as engine:
        chance = chance_of(engine, fresh_seed, n, has_form=has_form)
        stats = engine.stats()
        print(f"{n} texts: {chance:.3g}, accepted {stats.accepted} of {stats.drafted} drafts")
        assert stats.drafted > n / 4
        assert has_form or 0 < stats.accepted < stats.drafted
        assert chance > CHANCE


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_test_finds_a_rule_that_accepts_too_much(
    path: Path, monkeypatch: pytest.MonkeyPatch, fresh_seed: int
) -> None:
    monkeypatch.setattr(rounds, "draw_by_ratio", lambda _target, draft_id, *_: draft_id)
    with Engine.open(path, CONFIG) as engine:
        chances = (chance_of(engine, fresh_seed + 1000 * i, 4000, has_form=False) for i in range(4))
        assert any(chance < CHANCE for chance in chances)


def test_drafts_that_a_form_forbids_still_take_part(
    path: Path, monkeypatch: pytest.MonkeyPatch, fresh_seed: int
) -> None:
    """A row that is cut before its first draft draws from what the draft left, as if it had been evaluated."""
    with Engine.open(path, CONFIG) as engine:
        launch = engine.program.launch
        launched: list[Round] = []

        def launching(round_: Round) -> Ticket:
            launched.append(round_)
            return launch(round_)

        monkeypatch.setattr(engine.program, "launch", launching)
        # Six of seven prompts have a first draft that its form forbids; that none of twenty has is one in 10^16.
        for seed in range(20):
            texts(engine, prompt_of(engine, fresh_seed + 1000 * seed), [seed], has_form=True)
            if 1 in {round_.token_ids.shape[1] for round_ in launched}:
                break
    assert 1 in {round_.token_ids.shape[1] for round_ in launched}
    assert all(round_.own_drafts for round_ in launched)


def test_seeds_repeat_their_texts_in_any_company(path: Path, fresh_seed: int) -> None:
    with Engine.open(path, CONFIG) as engine:
        prompt = prompt_of(engine, fresh_seed)
        # Eight texts that are all the same would show nothing; behind this prompt no text has a share above 0.8.
        for begin in range(fresh_seed, fresh_seed + 160, 8):
            seeds = list(range(begin, begin + 8))
            together = texts(engine, prompt, seeds, has_form=False)
            if len(set(together)) > 1:
                break
        assert len(set(together)) > 1
        assert [texts(engine, prompt, [seed], has_form=False)[0] for seed in seeds] == together
