"""Warm equals cold: on trained models, whatever was kept, moved, evicted or shared, every answer is that of an engine
that keeps nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from ninfer_runtime import Engine, EngineConfig, Request, SamplingParams
from ninfer_runtime.config import KvDtype
from ninfer_runtime.engine.sequence import Anchors, Finish, MissReason, Reuse
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import Conversation, Message
from tests.runtime.conftest import ArtifactOf

GREEDY = SamplingParams.greedy()
SAMPLED = SamplingParams(temperature=1.3, top_p=0.98, top_k=0, seed=5)
PENALISED = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=0.5)
KINDS = (GREEDY, SAMPLED, PENALISED)
COLD = EngineConfig(max_context=256, prefill_chunk=128, max_concurrency=2, kv_capacity=1024)
N_IDS = 600


@pytest.fixture(scope="module")
def cold(artifact_of: ArtifactOf) -> Iterator[Engine]:
    with Engine.open(artifact_of("dense", "bf16"), COLD) as engine:
        yield engine


@pytest.fixture(scope="module")
def warm(artifact_of: ArtifactOf) -> Iterator[Engine]:
    """States in both places."""
    with Engine.open(
        artifact_of("dense", "bf16"), replace(COLD, prefix_reuse=True, snapshots=2, host_snapshots=4)
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _nothing_is_kept_from_before(warm: Engine) -> None:
    warm.core.cache.clear()


def ask(engine: Engine, request: Request) -> tuple[list[int], Finish]:
    """The tokens and the end of one request."""
    handle = engine.generate(request)
    tokens = [event.token_id for event in handle]
    assert handle.finish is not None
    return tokens, handle.finish


def ids(seed: int, n_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, N_IDS, n_tokens)]


def same(warm: Engine, cold: Engine, *requests: Request) -> list[Reuse]:
    """Ask both for the same, assert the same answers, and return what the warm one reused."""
    found = []
    for request in requests:
        tokens, finish = ask(warm, request)
        assert tokens == ask(cold, request)[0]
        found.append(finish.reuse)
    return found


def histories(rng: np.random.Generator, n: int) -> Iterator[tuple[list[int], Anchors]]:
    """Prompts that mostly go on from one of the last three or from inside it, with anchors, one of them at the end."""
    texts: list[list[int]] = [[]]
    for _ in range(n):
        base = texts[int(rng.integers(max(0, len(texts) - 3), len(texts)))]
        begin = base[: len(base) * int(rng.choice([1, 3, 4, 4, 4, 4])) // 4] if len(base) < 180 else []
        text = begin + rng.integers(0, N_IDS, int(rng.integers(35, 70))).tolist()
        at = {int(rng.integers(1, len(text))), len(text)}
        texts.append(text)
        yield text, Anchors(b"other" if rng.random() < 0.1 else b"", tuple(sorted(at)))


STORAGE = [("auto", True, 3, 0), ("int8", True, 0, 4), ("int8", False, 1, 2), ("fp6", True, 2, 2), ("bf16", True, 1, 3)]
IN_SUITE = {("dense", "auto"), ("dense", "fp6"), ("moe", "int8")}


@pytest.mark.parametrize(
    "kind, kv_dtype, rotation, device, host, n",
    [
        *((kind, *one, 10) for kind in ("dense", "moe") for one in STORAGE if (kind, one[0]) in IN_SUITE and one[1]),
        *(pytest.param(kind, *one, 60, marks=pytest.mark.slow) for kind in ("dense", "moe") for one in STORAGE),
    ],
)
def test_any_history_of_prompts_is_answered_as_if_it_were_the_first(
    artifact_of: ArtifactOf,
    kind: str,
    kv_dtype: KvDtype,
    rotation: bool,
    device: int,
    host: int,
    n: int,
    fresh_seed: int,
) -> None:
    """Every storage of keys and values, states in either place or both, a pool that is too small for all of it."""
    plain = replace(COLD, kv_dtype=kv_dtype, kv_rotation=rotation, kv_capacity=448)
    keeping = replace(plain, prefix_reuse=True, snapshots=device, host_snapshots=host)
    path = artifact_of(kind, "bf16")
    reasons: Counter[MissReason] = Counter()
    with Engine.open(path, plain) as cold, Engine.open(path, keeping) as warm:
        asked = list(histories(np.random.default_rng(fresh_seed), n))
        prompt, anchors = asked[-1]
        asked.append(([*prompt, 1], anchors))  # whatever was drawn, the last one goes on from what was just kept
        for i, (prompt, anchors) in enumerate(asked):
            request = Request(prompt, KINDS[i % 3], 3, anchors=anchors, n_top_logprobs=1)
            handles = warm.generate(request), cold.generate(request)
            first, second = list(handles[0]), list(handles[1])
            assert first == second
            assert handles[0].finish is not None
            reasons[handles[0].finish.reuse.reason] += 1
        stats = warm.stats()
        assert stats.reused_tokens > 0
        assert stats.reused_tokens + stats.computed_prefill_tokens == stats.prompt_tokens
        assert stats.snapshots_used <= device + host
        assert stats.pages_used == stats.pages_cached
        assert reasons[MissReason.EVICTED] > 0 or n < 60


# ---- F, the prefix cache ------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", KINDS, ids=["greedy", "sampled", "penalised"])
def test_f1_a_conversation_that_was_left_for_another_branch_is_taken_up_as_it_was(
    warm: Engine, cold: Engine, sampling: SamplingParams, fresh_seed: int
) -> None:
    def request(prompt: Sequence[int], *at: int) -> Request:
        return Request(prompt, sampling, 6, anchors=Anchors(at=at))

    a, more, b = ids(fresh_seed, 72), ids(fresh_seed + 1, 40), ids(fresh_seed + 2, 60)
    said, _ = ask(warm, request(a, 40, 72))
    longer = [*a, *said, *more]
    branches = [request(longer, 40, 72), request([*a, *b], 40, 72), request([*a[:40], *b], 40), request(a, 40, 72)]
    found = same(warm, cold, *branches)
    assert [reuse.n_tokens for reuse in found] == [72, 72, 40, 40]
    again, _ = ask(cold, request(longer))
    (reuse,) = same(warm, cold, request([*longer, *again, *b], 40, 72))
    assert reuse.n_tokens == len(longer) + 5


@pytest.mark.parametrize("at", [63, 64, 65, 100])
@pytest.mark.parametrize("where", [-1, 0, 1])
def test_f6_texts_that_part_before_at_or_behind_a_state_reuse_what_is_whole(
    warm: Engine, cold: Engine, at: int, where: int, fresh_seed: int
) -> None:
    """A linear-attention state cannot be cut: less than all of it is nothing."""
    text = ids(fresh_seed, 140)
    ask(warm, Request(text, GREEDY, 2, anchors=Anchors(at=(at,))))
    parted = text[: at + where]
    parted += [(text[at + where] + 1) % N_IDS, *ids(fresh_seed + 1, 20)]
    (reuse,) = same(warm, cold, Request(parted, SAMPLED, 5))
    n_reused = at if where >= 0 else 0
    assert reuse == Reuse(n_reused, at + where, MissReason.DIFFERS, at + where)


def test_f9_a_miss_says_why_and_where(warm: Engine, cold: Engine, fresh_seed: int) -> None:
    def reuse_of(prompt: Sequence[int], *at: int, key: bytes = b"", reuse: bool = True) -> Reuse:
        (found,) = same(warm, cold, Request(prompt, GREEDY, 2, anchors=Anchors(key, at), reuse=reuse))
        return found

    text = ids(fresh_seed, 90)
    assert reuse_of(text, 40) == Reuse(0, 0, MissReason.EMPTY)
    assert reuse_of(text[:60]) == Reuse(40, 60, MissReason.NO_STATE)
    assert reuse_of([*text[:60], N_IDS, *text[61:80]]) == Reuse(40, 60, MissReason.DIFFERS, 60)
    assert reuse_of(text, key=b"no thinking") == Reuse(0, 0, MissReason.EMPTY)
    assert reuse_of(text, reuse=False) == Reuse(0, 0, MissReason.OFF)
    assert reuse_of(text[:41]) == Reuse(40, 41, MissReason.NONE)
    for i in range(6):
        reuse_of(ids(fresh_seed + 1 + i, 100), 50)
    assert reuse_of(text) == Reuse(0, 90, MissReason.EVICTED)


def test_a_conversation_rendered_by_the_template_goes_on_from_its_anchors(warm: Engine, cold: Engine) -> None:
    """A question, its answer, the next question, which drops the thinking of the first: the last question's end."""
    frontend = Frontend.open(warm.artifact)
    asked = "Count from 3 to 9, then spell the word window and tell me the capital of Japan."
    first = frontend.prompt(Conversation.of_prompt(asked))
    said = Message("assistant", "3, 4, 5, 6, 7, 8, 9.", "Start at 3 and stop at 9.")
    second = frontend.prompt(Conversation((Message("user", asked), said, Message("user", "And backwards?"))))
    asks = ((first, 34), (second, 2), (first, 2), (second, 2))
    requests = [Request(prompt.token_ids, GREEDY, n_new, anchors=prompt.anchors) for prompt, n_new in asks]
    found = same(warm, cold, *requests)
    turn_end = first.anchors.at[-1]
    assert [reuse.n_tokens for reuse in found] == [0, turn_end, turn_end, second.anchors.at[-1]]
    assert found[1].reason is MissReason.DIFFERS
    assert found[1].first_difference == len(first.token_ids) - 2


# ---- E, sampling: what reuse must leave alone -----------------------------------------------------


def test_e1_penalties_count_nothing_of_a_prompt_reused_or_not(warm: Engine, cold: Engine, fresh_seed: int) -> None:
    """The prompt is full of one token, some of it said by the model in an earlier request."""
    loved = ids(fresh_seed, 1)[0]
    forced = SamplingParams(temperature=0, logit_bias=((loved, 100.0),))
    said, _ = ask(warm, Request([loved] * 40, forced, 20))
    assert said == [loved] * 20
    prompt = [*[loved] * 40, *said, loved]
    held_back = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0, logit_bias=((loved, 3.0),))
    (reuse,) = same(warm, cold, Request(prompt, held_back, 8, n_top_logprobs=2))
    assert reuse.n_tokens == 59


def test_e6_greedy_twice_is_the_same_and_takes_no_seed(warm: Engine, fresh_seed: int) -> None:
    request = Request(ids(fresh_seed, 50), GREEDY, 6, anchors=Anchors(at=(40,)))
    answers = [ask(warm, request)[0] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


def test_e11_without_a_seed_answers_differ_and_with_one_they_repeat(warm: Engine, fresh_seed: int) -> None:
    """One after the other and side by side, all from the same kept prompt."""
    hot = SamplingParams(temperature=2.0, top_p=1.0, top_k=0)
    # The model has no preference behind this text: two draws of one token agree in 2 % of cases.
    request = Request(ids(21, 60), hot, 6, anchors=Anchors(at=(50,)))
    answers = [ask(warm, request) for _ in range(4)]
    handles = [warm.generate(request) for _ in range(4)]
    together = [tuple(event.token_id for event in handle) for handle in handles]
    finishes = [finish for _, finish in answers] + [handle.finish for handle in handles if handle.finish is not None]
    assert len({finish.seed for finish in finishes}) == 8
    assert len({*(tuple(tokens) for tokens, _ in answers), *together}) >= 6
    seeded = replace(request, sampling=replace(hot, seed=fresh_seed))
    alone = ask(warm, seeded)[0]
    assert [[event.token_id for event in handle] for handle in [warm.generate(seeded) for _ in range(4)]] == [alone] * 4
