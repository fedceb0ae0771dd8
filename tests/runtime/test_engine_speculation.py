"""The engine with drafts of a trained model's own layer: every answer is that without them, whatever else happens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_runtime import Engine, EngineConfig, FinishReason, Request, SamplingParams
from ninfer_runtime.backends.reference import mtp
from ninfer_runtime.backends.reference.drafts import Draft
from ninfer_runtime.backends.reference.program import ReferenceProgram
from ninfer_runtime.engine.handle import Handle
from ninfer_runtime.engine.sequence import Anchors, Forced, Verdict
from tests.runtime.conftest import ArtifactOf
from tests.runtime.programs import GREEDY, random_ids
from tests.runtime.speaking import MAX_DRAFTS, SAMPLED, SPREAD, questions, stop_ids_of

PENALISED = replace(GREEDY, presence_penalty=2.0, frequency_penalty=-0.4)
HOT = replace(SPREAD, temperature=1.9, presence_penalty=-2.0)
CUT = replace(SAMPLED, temperature=1.4, min_p=0.05, logit_bias=((5, 2.0), (9, -100.0)))
KINDS = (GREEDY, HOT, PENALISED, SAMPLED, CUT)
PLAIN = EngineConfig(max_context=256, max_concurrency=8, prefill_chunk=128)
TOP = (None, 2, 0)
OpenEngine = Callable[..., Engine]


@dataclass(frozen=True)
class Answer:
    """Everything a request was told: ids, log probabilities, the most likely ids beside them, and why it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    reason: FinishReason


@pytest.fixture(scope="module", params=["dense", "moe"])
def path(request: pytest.FixtureRequest, artifact_of: ArtifactOf) -> Path:
    return artifact_of(request.param, "bf16")


@pytest.fixture(scope="module")
def engine_of(path: Path) -> Iterator[OpenEngine]:
    """``engine_of(n_drafts, **changes)``: an engine that is opened once and found idle again by every test."""

    @cache
    def opened(n_drafts: int = 0, backoff: bool = False, **changes: Any) -> Engine:
        changed: dict[str, Any] = {}
        if n_drafts:
            changed = {"spec": "mtp", "draft_tokens": n_drafts, "draft_backoff": backoff}
        return Engine.open(path, replace(PLAIN, **changed, **changes))

    engines: list[Engine] = []

    def of(n_drafts: int = 0, **changes: Any) -> Engine:
        engine = opened(n_drafts, **changes)
        assert engine.core.is_idle
        engines.append(engine)
        return engine

    yield of
    for engine in engines:
        stats = engine.stats()
        assert stats.pages_used == stats.pages_cached
        engine.close()


def answer(handle: Handle) -> Answer:
    events = list(handle)
    assert handle.finish is not None
    return Answer(
        tuple(event.token_id for event in events),
        tuple(event.logprob for event in events),
        tuple(event.top_logprobs for event in events),
        handle.finish.reason,
    )


def answers(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    return [answer(handle) for handle in [engine.generate(request) for request in requests]]


def mixed(engine: Engine, seed: int, n: int, kinds: Sequence[SamplingParams] = KINDS) -> list[Request]:
    """Requests of every kind in turn; every fourth prompt is noise, every seventh row drafts nothing."""
    rng, stop_ids, asked = np.random.default_rng(seed), stop_ids_of(engine.model), questions(engine.model, seed, n)
    out = []
    for i, prompt in enumerate(asked):
        sampling = kinds[i % len(kinds)]
        ids = random_ids(engine.model, seed + i, int(rng.integers(1, 140))) if i % 4 == 3 else prompt
        own = replace(sampling, seed=None if sampling.is_greedy else seed + i)
        max_new = (40, 40, 3, 40, 40, 1, 40, 5, 40, 2)[i % 10]
        top = TOP[i % 3]
        out.append(Request(tuple(ids.tolist()), own, max_new, stop_ids, n_top_logprobs=top, speculate=i % 7 != 6))
    return out


DENSE = pytest.mark.parametrize("path", ["dense"], indirect=True)
LONG = (pytest.mark.slow, pytest.mark.timeout(1800))
SIZES = pytest.mark.parametrize(
    "n, windows",
    [(8, (3,)), pytest.param(200, range(1, MAX_DRAFTS + 1), marks=LONG)],
    ids=["8", "200"],
)


@SIZES
def test_e2_e5_e7_rows_of_every_kind_say_the_same_with_any_number_of_drafts(
    engine_of: OpenEngine, n: int, windows: Sequence[int], fresh_seed: int
) -> None:
    """Greedy and sampled in one round; penalties, bias, min_p, log probabilities and stops."""
    plain = engine_of()
    requests = mixed(plain, fresh_seed, n)
    before = plain.stats()
    expected = answers(plain, requests)
    n_row_rounds = plain.stats().row_rounds - before.row_rounds
    assert {found.reason for found in expected} >= {FinishReason.STOP_TOKEN, FinishReason.OUTPUT_LIMIT}
    for n_drafts in windows:
        engine = engine_of(n_drafts)
        before = engine.stats()
        assert answers(engine, requests) == expected
        after = engine.stats()
        assert after.accepted > before.accepted
        assert after.row_rounds - before.row_rounds < n_row_rounds


@SIZES
def test_e5_greedy_answers_are_those_without_drafts_and_most_drafts_are_right(
    engine_of: OpenEngine, n: int, windows: Sequence[int], fresh_seed: int
) -> None:
    plain = engine_of()
    stop_ids = stop_ids_of(plain.model)
    requests = [Request(ids.tolist(), GREEDY, 40, stop_ids) for ids in questions(plain.model, fresh_seed, n)]
    expected = answers(plain, requests)
    n_tokens = sum(len(found.tokens) for found in expected)
    for n_drafts in windows:
        engine = engine_of(n_drafts)
        before = engine.stats()
        assert answers(engine, requests) == expected
        after = engine.stats()
        drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
        at = [
            total - earlier
            for total, earlier in itertools.zip_longest(after.accepted_at, before.accepted_at, fillvalue=0)
        ]
        print(
            f"{n} prompts, {n_drafts} drafts: {n_tokens} tokens identical, accepted {accepted} of {drafted} "
            f"({accepted / drafted:.1%}), by position {at}, {accepted / n_tokens:.1%} of the tokens"
        )
        assert accepted > 0.6 * drafted
        assert sum(at) == accepted


@DENSE
def test_e2_penalties_and_cuts_have_their_effect_with_drafts(engine_of: OpenEngine, fresh_seed: int) -> None:
    engine = engine_of(MAX_DRAFTS)
    prompts = [random_ids(engine.model, fresh_seed + i, 30).tolist() for i in range(8)]

    def said(sampling: SamplingParams) -> list[int]:
        return list(answer(engine.generate(Request(prompts[0], sampling, 16))).tokens)

    def n_different(penalty: float) -> int:
        sampling = replace(GREEDY, presence_penalty=penalty, frequency_penalty=penalty)
        found = answers(engine, [Request(prompt, sampling, 48) for prompt in prompts])
        return sum(len(set(one.tokens)) for one in found)

    # Three quarters as many, with a deviation of 0.03 from seed to seed.
    assert n_different(-2.0) < n_different(2.0)
    wild = SamplingParams(temperature=2.0, top_p=1.0, top_k=0, seed=fresh_seed)
    assert any(said(replace(wild, seed=fresh_seed + i)) != said(GREEDY) for i in range(40))
    for cut in ({"min_p": 1.0}, {"top_k": 1}, {"top_p": 0.0}):
        assert said(replace(wild, **cut)) == said(GREEDY)
    assert 7 not in said(replace(wild, logit_bias=((7, -100.0),)))
    assert set(said(replace(wild, logit_bias=((7, 100.0),)))) == {7}


@DENSE
def test_e7_log_probabilities_with_drafts_are_those_of_the_text(engine_of: OpenEngine, fresh_seed: int) -> None:
    engine = engine_of(MAX_DRAFTS)
    (prompt,) = questions(engine.model, fresh_seed, 1)
    for sampling in (GREEDY, replace(HOT, seed=fresh_seed)):
        found = answer(engine.generate(Request(prompt.tolist(), sampling, 24, n_top_logprobs=1)))
        ids = [*prompt.tolist(), *found.tokens]
        raw = engine_of().teacher_forced_logits(ids)[len(prompt) - 1 : -1, : engine.model.spec.n_addressable]
        logs = raw - np.log(np.exp(raw.astype(np.float64)).sum(-1, keepdims=True))
        assert found.logprobs == pytest.approx(logs[np.arange(len(found.tokens)), found.tokens], abs=1e-4)
        assert [top[0][0] for top in found.top] == logs.argmax(-1).tolist()


@DENSE
def test_counts_of_requests_add_up_to_those_of_the_engine(engine_of: OpenEngine, fresh_seed: int) -> None:
    engine = engine_of(3, max_concurrency=4)
    handles = [engine.generate(request) for request in mixed(engine, fresh_seed, 8)]
    for handle in handles:
        list(handle)
    stats, counts = engine.stats(), [handle.finish.drafting for handle in handles if handle.finish is not None]
    assert counts[6].n_drafted == 0
    assert stats.drafted == sum(found.n_drafted for found in counts) > 0
    assert stats.accepted == sum(found.n_accepted for found in counts)
    assert stats.row_rounds == sum(found.n_rounds for found in counts)
    by_position = [sum(at) for at in itertools.zip_longest(*(found.accepted_at for found in counts), fillvalue=0)]
    assert list(stats.accepted_at) == by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == stats.accepted


@DENSE
def test_one_ahead_says_the_same(engine_of: OpenEngine, fresh_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = engine_of(3), mixed(engine_of(3), fresh_seed, 6)
    expected = answers(engine, requests)
    monkeypatch.setattr(ReferenceProgram, "runs_ahead", True)
    assert answers(engine, requests) == expected


# ---- company, cancelling, prefixes, chunks -----------------------------------------------------


@pytest.mark.parametrize("path, one_ahead", [("dense", False), ("dense", True), ("moe", False)], indirect=["path"])
def test_e10_alone_is_among_seven_others_is_after_any_of_them_was_cancelled(
    engine_of: OpenEngine, one_ahead: bool, fresh_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceProgram, "runs_ahead", one_ahead)
    engine = engine_of(3)
    requests = [replace(request, max_new=16) for request in mixed(engine, fresh_seed, 8)]
    alone = [answer(engine.generate(request)) for request in requests]
    assert answers(engine, requests) == alone
    rng = np.random.default_rng(fresh_seed)
    gone = rng.choice(8, 3, replace=False).tolist()
    handles = [engine.generate(request) for request in requests]
    watched = next(i for i in range(8) if i not in gone)
    first = [next(handles[watched]).token_id]
    for i in gone:  # one after the other, wherever they are by then: waiting, in their prompt, between two rounds
        handles[i].cancel()
        if len(first) < len(alone[watched].tokens):
            first.append(next(handles[watched]).token_id)
    for i in range(8):
        found = answer(handles[i])
        if i in gone:
            assert found.reason is FinishReason.CANCELLED
        elif i == watched:
            assert (*first, *found.tokens) == alone[i].tokens
        else:
            assert found == alone[i]


def test_any_chunks_and_any_kept_prefix_give_the_cold_answer(engine_of: OpenEngine, fresh_seed: int) -> None:
    plain = engine_of()
    rng = np.random.default_rng(fresh_seed)
    requests = []
    for i, request in enumerate(mixed(plain, fresh_seed, 5)):
        prompt = (
            *random_ids(plain.model, fresh_seed + 50 + i, int(rng.integers(40, 150))).tolist(),
            *request.token_ids,
        )
        requests.append(replace(request, token_ids=prompt[:200], max_new=24))
    cold = answers(plain, requests)
    # A prompt is cut at its anchors, so these are chunks of any length; nothing is kept.
    cut = [replace(request, anchors=anchors(rng, request)) for request in requests]
    assert answers(engine_of(3), cut) == cold
    warm = engine_of(3, prefix_reuse=True, snapshots=20)
    for _ in range(2):
        cut = [replace(request, anchors=anchors(rng, request)) for request in requests]
        assert answers(warm, cut) == cold
    assert warm.stats().reused_tokens > 0


@DENSE
@pytest.mark.parametrize("kv_dtype", ["int8", "fp6"])
def test_quantized_keys_and_values_are_read_alike_with_drafts_and_kept_prefixes(
    engine_of: OpenEngine, kv_dtype: str, fresh_seed: int
) -> None:
    plain = engine_of(kv_dtype=kv_dtype)
    requests = [replace(request, max_new=12) for request in mixed(plain, fresh_seed, 4)]
    cold = answers(plain, requests)
    warm, rng = engine_of(3, kv_dtype=kv_dtype, prefix_reuse=True, snapshots=20), np.random.default_rng(fresh_seed)
    for _ in range(2):
        cut = [replace(r, anchors=anchors(rng, r)) if len(r.token_ids) > 3 else r for r in requests]
        assert answers(warm, cut) == cold


def anchors(rng: np.random.Generator, request: Request) -> Anchors:
    return Anchors(at=tuple(sorted({int(at) for at in rng.integers(1, len(request.token_ids), 3)})))


@dataclass
class At:
    """A reader with a verdict for the n-th token."""

    n: int
    verdict: Verdict
    seen: int = 0

    @property
    def may_force(self) -> bool:
        return isinstance(self.verdict, Forced) and self.seen < self.n

    def feed(self, token_id: int) -> Verdict:
        self.seen += 1
        return self.verdict if self.seen == self.n else None


@DENSE
def test_conversation_goes_on_from_wherever_an_answer_was_cut(engine_of: OpenEngine, fresh_seed: int) -> None:
    """A stop inside a round keeps what was emitted: the next turn begins there and says what a cold one says."""
    plain, warm = engine_of(), engine_of(MAX_DRAFTS, prefix_reuse=True, snapshots=20)
    prompt = random_ids(plain.model, fresh_seed, 40).tolist()
    for at in (2, 3, 4, 7):
        said = answer(warm.generate(Request(prompt, PENALISED, 30, reader=At(at, FinishReason.STOP_STRING))))
        assert len(said.tokens) == at
        prompt = [*prompt, *said.tokens, *random_ids(plain.model, fresh_seed + at, 36).tolist()]
        request = Request(prompt, GREEDY, 12, n_top_logprobs=1)
        handle = warm.generate(request)
        assert answer(handle) == answer(plain.generate(request))
        assert handle.finish is not None
        assert handle.finish.reuse.n_tokens == len(prompt) - 37


@DENSE
def test_forced_text_is_read_by_the_draft_layer(engine_of: OpenEngine, fresh_seed: int) -> None:
    plain, engine = engine_of(), engine_of(3)
    (prompt,), forced = questions(plain.model, fresh_seed, 1), Forced((11, 12, 13))
    for at, sampling in itertools.product((1, 3, 4), (PENALISED, HOT)):
        asked = [Request(prompt.tolist(), sampling, 20, reader=At(at, forced)) for _ in range(2)]
        expected = answer(plain.generate(asked[0]))
        assert expected.tokens[at : at + 3] == forced.token_ids
        assert answer(engine.generate(asked[1])) == expected


# ---- backing off -------------------------------------------------------------------------------


@DENSE
def test_backing_off_spares_drafts_that_are_wrong_and_changes_nothing_else(
    engine_of: OpenEngine, fresh_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {backoff: engine_of(MAX_DRAFTS, backoff=backoff) for backoff in (False, True)}
    model = engines[True].model
    requests = [Request(ids.tolist(), GREEDY, 40) for ids in questions(model, fresh_seed, 2)]
    per_round: dict[tuple[bool, str], float] = {}
    found = []
    for name in ("right", "wrong"):
        if name == "wrong":
            monkeypatch.setattr(mtp, "propose", lambda *_: Draft(model.spec.n_addressable - 1))
        for backoff, engine in engines.items():
            handles = [engine.generate(request) for request in requests]
            found.append([answer(handle).tokens for handle in handles])
            counts = [handle.finish.drafting for handle in handles if handle.finish is not None]
            per_round[backoff, name] = sum(c.n_drafted for c in counts) / sum(c.n_rounds for c in counts)
    print("drafts per round:", {f"{name}, backoff {backoff}": round(x, 2) for (backoff, name), x in per_round.items()})
    assert all(tokens == found[0] for tokens in found)
    assert per_round[True, "wrong"] < 1.0
    assert per_round[False, "wrong"] > 4.5
    assert per_round[True, "right"] > 0.7 * per_round[False, "right"]
