"""The engine: what a request emits, why it ends, and that nothing of it stays behind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ninfer_format.errors import GenerationError, NonFiniteError, RequestError, UsageError
from ninfer_runtime import Engine, EngineConfig, FinishReason, Request, SamplingParams
from ninfer_runtime.backends.reference.program import ReferenceProgram
from tests.runtime.conftest import ArtifactOf

GREEDY = SamplingParams.greedy()
PROMPT = tuple(range(20, 50))


@pytest.fixture(scope="module")
def engine(artifact_of: ArtifactOf) -> Iterator[Engine]:
    with Engine.open(artifact_of("dense", "bf16"), EngineConfig(max_context=256, prefill_chunk=128)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _every_page_comes_back(engine: Engine) -> Iterator[None]:
    yield
    assert engine.core.pages.n_free == engine.core.pages.n_pages
    assert engine.core.is_idle


def tokens(engine: Engine, request: Request) -> list[int]:
    return [event.token_id for event in engine.generate(request)]


def test_greedy_tokens_are_the_argmax_of_teacher_forced_logits(engine: Engine) -> None:
    found = tokens(engine, Request(PROMPT, GREEDY, max_new=20))
    logits = engine.teacher_forced_logits([*PROMPT, *found])[:, : engine.model.spec.n_addressable]
    assert found == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()


def test_events_are_numbered_and_the_finish_adds_up(engine: Engine) -> None:
    generation = engine.generate(Request(PROMPT, GREEDY, max_new=5))
    unfinished = generation.finish
    events = list(generation)
    assert [event.index for event in events] == list(range(30, 35))
    finish = generation.finish
    assert unfinished is None
    assert finish is not None
    assert (finish.reason, finish.n_prompt, finish.n_generated) == (FinishReason.OUTPUT_LIMIT, 30, 5)
    assert finish.n_rounds == 4
    assert min(finish.prefill_rate, finish.decode_rate) > 0
    assert list(generation) == []


def test_prompt_longer_than_a_chunk_is_fed_in_chunks(engine: Engine, fresh_seed: int) -> None:
    prompt = np.random.default_rng(fresh_seed).integers(0, 600, 200).tolist()
    generation = engine.generate(Request(prompt, GREEDY, max_new=1))
    (event,) = generation
    assert generation.n_prefilled == 200
    logits = engine.teacher_forced_logits(prompt)[-1, : engine.model.spec.n_addressable]
    assert event.token_id == int(logits.argmax())


@pytest.mark.parametrize("at", [0, 3])
def test_stop_id_is_the_last_event_and_is_marked(engine: Engine, at: int) -> None:
    free = tokens(engine, Request(PROMPT, SamplingParams(temperature=0, frequency_penalty=2.0), max_new=6))
    stop = free[at]
    assert stop not in free[:at]
    request = Request(PROMPT, SamplingParams(temperature=0, frequency_penalty=2.0), 6, frozenset([stop]))
    generation = engine.generate(request)
    events = list(generation)
    assert [event.token_id for event in events] == free[: at + 1]
    assert [event.is_stop for event in events] == [False] * at + [True]
    assert generation.finish is not None
    assert generation.finish.reason is FinishReason.STOP_TOKEN
    ignoring = Request(PROMPT, request.sampling, 6, frozenset([stop]), ignore_eos=True)
    assert tokens(engine, ignoring) == free


def test_context_ends_a_generation_that_wanted_more(engine: Engine) -> None:
    prompt = list(PROMPT) * 8 + [1] * 10
    generation = engine.generate(Request(prompt, GREEDY, max_new=100))
    assert len(list(generation)) == 256 - 250
    assert generation.finish is not None
    assert generation.finish.reason is FinishReason.CONTEXT_CAPACITY


@pytest.mark.parametrize("n_taken", [1, 3])
@pytest.mark.parametrize("reason", [FinishReason.STOP_STRING, FinishReason.CANCELLED])
def test_consumer_ends_the_generation_after_the_event_it_took(
    engine: Engine, n_taken: int, reason: FinishReason
) -> None:
    generation = engine.generate(Request(PROMPT, GREEDY, max_new=50))
    for _ in range(n_taken):
        next(generation)
    generation.stop(reason)
    assert list(generation) == []
    assert generation.finish is not None
    assert (generation.finish.reason, generation.finish.n_generated) == (reason, n_taken)


def test_cancel_before_the_first_token_skips_the_prompt(engine: Engine) -> None:
    generation = engine.generate(Request(PROMPT, GREEDY))
    generation.cancel()
    assert list(generation) == []
    assert generation.n_prefilled == 0
    assert generation.finish is not None
    assert generation.finish.reason is FinishReason.CANCELLED


@pytest.mark.parametrize("n_taken", [0, 1, 2])
def test_closed_generation_gives_everything_back(engine: Engine, n_taken: int) -> None:
    generation = engine.generate(Request(PROMPT, GREEDY, max_new=50))
    for _ in range(n_taken):
        next(generation)
    with pytest.raises(GenerationError, match="requests are running"):
        engine.score([1, 2, 3])
    generation.close()
    generation.close()
    assert engine.core.pages.n_free == engine.core.pages.n_pages
    assert generation.finish is not None
    assert generation.finish.reason is FinishReason.CANCELLED


@pytest.mark.parametrize("seed", [0, 12345, 2**64 - 1])
def test_seed_repeats_a_sampled_generation(engine: Engine, seed: int) -> None:
    request = Request(PROMPT, SamplingParams(temperature=2.0, top_p=1.0, top_k=0, seed=seed), max_new=12)
    generation = engine.generate(request)
    first = [event.token_id for event in generation]
    assert generation.finish is not None
    assert generation.finish.seed == seed
    assert tokens(engine, request) == first


def test_e11_without_a_seed_every_generation_draws_one_and_names_it(engine: Engine) -> None:
    hot = SamplingParams(temperature=2.0, top_p=1.0, top_k=0)
    seeds = set()
    for _ in range(3):
        generation = engine.generate(Request(PROMPT, hot, max_new=12))
        drawn = [event.token_id for event in generation]
        assert generation.finish is not None
        seeds.add(generation.finish.seed)
        assert tokens(engine, Request(PROMPT, hot.merged(seed=generation.finish.seed), max_new=12)) == drawn
    assert len(seeds) == 3


def test_e6_greedy_needs_no_clock_and_no_seed(engine: Engine) -> None:
    request = Request(PROMPT, SamplingParams(temperature=0.0, presence_penalty=1.0), max_new=12)
    assert tokens(engine, request) == tokens(engine, request)


@pytest.mark.parametrize("n_top", [0, 1, 20])
def test_logprobs_come_with_every_event(engine: Engine, n_top: int) -> None:
    events = list(engine.generate(Request(PROMPT, GREEDY, max_new=4, n_top_logprobs=n_top)))
    ids = [*PROMPT, *(event.token_id for event in events)]
    raw = engine.teacher_forced_logits(ids)[len(PROMPT) - 1 : -1, : engine.model.spec.n_addressable].astype(np.float64)
    expected = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    for event, row in zip(events, expected, strict=True):
        assert event.logprob == pytest.approx(row[event.token_id], abs=1e-4)
        assert [i for i, _ in event.top_logprobs] == np.argsort(-row, kind="stable")[:n_top].tolist()


@pytest.mark.parametrize("after", [None, 2])
def test_launching_ahead_changes_nothing(
    engine: Engine, after: int | None, monkeypatch: pytest.MonkeyPatch, fresh_seed: int
) -> None:
    sampling = SamplingParams(temperature=1.5, frequency_penalty=0.5, seed=fresh_seed)
    stop = frozenset([2])

    def run() -> tuple[list[int], Any]:
        generation = engine.generate(Request(PROMPT, sampling, 15, stop, n_top_logprobs=1))
        events = []
        for event in generation:
            events.append((event.token_id, event.logprob, event.top_logprobs))
            if after is not None and len(events) == after:
                generation.stop()
        assert generation.finish is not None
        return [len(events), *map(hash, events)], generation.finish.reason

    plain = run()
    monkeypatch.setattr(ReferenceProgram, "runs_ahead", True)
    assert run() == plain


@pytest.mark.parametrize("where", ["prompt", "round"])
def test_nan_ends_the_request_with_a_typed_error_and_the_engine_lives(
    engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(PROMPT, GREEDY, max_new=8)
    expected = tokens(engine, request)
    generation = engine.generate(request)
    assert isinstance(engine.program, ReferenceProgram)
    if where == "round":
        next(generation)
    norm = engine.program._weights.vector(engine.model.final_norm)
    clean = norm.clone()
    with torch.inference_mode():
        norm.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"the logits for token 3\d hold NaN or infinity"):
        list(generation)
    with torch.inference_mode():
        norm.copy_(clean)
    assert tokens(engine, request) == expected


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request(()), "the prompt has no tokens"),
        (Request((1, -1)), "prompt token 1 has id -1"),
        (Request((1, 640)), "prompt token 1 has id 640, expected 0 to 639"),
        (Request((1,) * 256), "the prompt has 256 tokens, the context holds 256"),
        (Request((1.5,)), "the prompt is float64"),  # type: ignore[arg-type]
        (Request((1,), max_new=0), "max_new is 0"),
        (Request((1,), n_top_logprobs=21), "n_top_logprobs is 21"),
        (Request((1,), SamplingParams(logit_bias=((630, 1.0),))), "logit_bias names token 630"),
    ],
)
def test_request_that_cannot_run_is_refused(engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(request_)


def test_teacher_forced_chunks_are_one_matrix_of_all_head_rows(engine: Engine, fresh_seed: int) -> None:
    ids = np.random.default_rng(fresh_seed).integers(0, 640, 256).tolist()
    chunks = list(engine.teacher_forced_chunks(ids))
    assert len(chunks) == 2
    whole = engine.teacher_forced_logits(ids)
    assert whole.shape == (256, 640)
    assert whole.dtype == np.float32
    assert np.array_equal(np.concatenate(chunks), whole)
    with pytest.raises(RequestError, match="257 tokens were given, the context holds 256"):
        engine.teacher_forced_logits([1] * 257)


def test_score_is_the_mean_log_likelihood_of_every_token_after_the_first(engine: Engine, fresh_seed: int) -> None:
    ids = np.random.default_rng(fresh_seed).integers(0, 600, 100)
    raw = engine.teacher_forced_logits(ids.tolist())[:, : engine.model.spec.n_addressable].astype(np.float64)
    logs = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    expected = float(logs[np.arange(99), ids[1:]].sum())
    found = engine.score(ids.tolist())
    assert (found.n_tokens, found.n_scored) == (100, 99)
    assert found.total_log_probability == pytest.approx(expected, abs=1e-2)
    assert found.perplexity == pytest.approx(math.exp(-expected / 99), rel=1e-4)


@pytest.mark.parametrize("overlap", [1, 56, None, 255])
def test_long_text_is_scored_in_windows_each_token_once(engine: Engine, overlap: int | None, fresh_seed: int) -> None:
    n, window = 300, 256
    step = window - (128 if overlap is None else overlap)
    ids = np.random.default_rng(fresh_seed).integers(0, 600, n)
    expected, done = 0.0, 1
    while done < n:
        begin = 0 if done == 1 else done - (window - step)
        end = min(begin + window, n)
        raw = engine.teacher_forced_logits(ids[begin:end].tolist())[:, : engine.model.spec.n_addressable]
        logs = raw.astype(np.float64) - np.log(np.exp(raw.astype(np.float64)).sum(-1, keepdims=True))
        expected += sum(float(logs[row - 1 - begin, ids[row]]) for row in range(done, end))
        done = end
        if overlap == 255 and done > 260:
            ids, n = ids[:done], done
    assert engine.score(ids.tolist(), overlap=overlap).total_log_probability == pytest.approx(expected, abs=0.05)


def test_text_that_cannot_be_scored_is_refused(engine: Engine) -> None:
    for ids, overlap in (([5], None), ([5, 6], 0), ([5, 6], 256), ([5, 630], None)):
        with pytest.raises(RequestError):
            engine.score(ids, overlap=overlap)


def test_engine_that_does_not_fit_says_by_how_much(artifact_of: ArtifactOf, monkeypatch: pytest.MonkeyPatch) -> None:
    path = artifact_of("dense", "bf16")
    for free, says in ((172, "172 MiB .*; --kv-dtype int8 would fit"), (1, "1 MiB .*; no flags make it fit")):
        monkeypatch.setattr("ninfer_runtime.backends.reference.free_memory", lambda device, free=free: free << 20)
        with pytest.raises(UsageError, match=r"the plan needs \d+ MiB on cpu, " + says):
            Engine.open(path)


def test_context_beyond_the_model_is_refused(artifact_of: ArtifactOf) -> None:
    with pytest.raises(UsageError, match="max_context is 8192, the model was made for 4096"):
        Engine.open(artifact_of("dense", "bf16"), EngineConfig(max_context=8192))
