"""Several sequences in one engine: each as if it were alone, whatever the others do and however the work is cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from ninfer_format.errors import (
    EngineStoppedError,
    GenerationError,
    NonFiniteError,
    OverloadedError,
    QueueTimeoutError,
)
from ninfer_runtime import Engine, EngineConfig, FinishReason, Request, SamplingParams
from ninfer_runtime.backends.base import PrefillChunk, PrefillResult, Round, Ticket
from ninfer_runtime.engine.handle import Handle
from ninfer_runtime.engine.scheduler import MAX_PASSES
from ninfer_runtime.engine.sequence import Anchors, Forced, MissReason, TokenEvent, Verdict
from tests.runtime.history_program import VOCAB, HistoryProgram, continuation, limits_of, next_token

GREEDY = SamplingParams.greedy()
PLAIN = EngineConfig(max_context=256, prefill_chunk=128, max_concurrency=4)


def engine_of(*, ahead: bool = False, config: EngineConfig = PLAIN, **limits: Any) -> tuple[Engine, HistoryProgram]:
    program = HistoryProgram(limits_of(**limits), ahead=ahead)
    return Engine.of_program(program, config), program


def prompts(seed: int, n: int, longest: int = 150) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, VOCAB, int(rng.integers(1, longest))).tolist()) for _ in range(n)]


def ids(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


@dataclass
class Collected:
    """A listener that keeps everything."""

    events: list[TokenEvent] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, handle: Handle, events: tuple[TokenEvent, ...]) -> None:
        self.events += events
        if handle.done:
            self.done.set()


@dataclass
class Counting:
    """A reader that ends, or bends, the sequence at its n-th token."""

    at: int
    verdict: Verdict = FinishReason.STOP_STRING
    seen: list[int] = field(default_factory=list)

    @property
    def may_force(self) -> bool:
        return isinstance(self.verdict, Forced) and len(self.seen) < self.at

    def feed(self, token_id: int) -> Verdict:
        self.seen.append(token_id)
        return self.verdict if len(self.seen) == self.at else None


VARIANTS = [(ahead, drafts, reuse) for ahead in (False, True) for drafts in (0, 3) for reuse in (False, True)]


@pytest.mark.parametrize("ahead, drafts, reuse", VARIANTS)
def test_together_is_alone(ahead: bool, drafts: int, reuse: bool, fresh_seed: int) -> None:
    config = replace(PLAIN, prefix_reuse=reuse)
    engine, program = engine_of(ahead=ahead, config=config, max_drafts=drafts, n_pages=64, device_snapshots=48)
    rng, asked = np.random.default_rng(fresh_seed), prompts(fresh_seed, 12)
    requests = []
    for i, prompt in enumerate(asked):
        sampling = GREEDY if i % 2 else SamplingParams(seed=i)
        stops = frozenset(rng.integers(0, VOCAB, 60).tolist())
        at = tuple(sorted(set(rng.integers(1, len(prompt) + 1, 2).tolist())))
        requests.append(Request(prompt, sampling, int(rng.integers(1, 60)), stops, anchors=Anchors(at=at)))
    for _ in range(2):  # the second time with whatever was kept
        handles = [engine.generate(request) for request in requests]
        for request, handle in zip(requests, handles, strict=True):
            expected = continuation(request.token_ids, request.sampling, request.max_new, request.stop_ids)
            events = list(handle)
            assert ids(events) == expected
            assert [event.index for event in events] == list(
                range(len(request.token_ids), len(request.token_ids) + len(expected))
            )
            finish = handle.finish
            assert finish is not None
            by_stop = expected[-1] in request.stop_ids
            assert finish.reason is (FinishReason.STOP_TOKEN if by_stop else FinishReason.OUTPUT_LIMIT)
            assert finish.n_generated == len(expected)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.pages_used == stats.pages_cached
    assert stats.requests_finished.get("output-limit", 0) + stats.requests_finished.get("stop-token", 0) == 24
    assert stats.computed_prefill_tokens == program.n_prefilled
    assert (stats.reused_tokens > 0) == reuse
    assert stats.row_rounds > stats.rounds
    assert (stats.accepted > 0) == (drafts > 0)
    engine.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("drafts", [0, 3])
def test_reader_ends_one_row_exactly_and_the_others_go_on(ahead: bool, at: int, drafts: int, fresh_seed: int) -> None:
    engine, _ = engine_of(ahead=ahead, max_drafts=drafts)
    asked = prompts(fresh_seed, 4)
    reader = Counting(at)
    handles = [engine.generate(Request(p, GREEDY, 20, reader=reader if i == 1 else None)) for i, p in enumerate(asked)]
    found = [ids(list(handle)) for handle in handles]
    expected = [continuation(p, GREEDY, 20) for p in asked]
    expected[1] = expected[1][:at]
    assert found == expected
    assert reader.seen == expected[1]
    finish = handles[1].finish
    assert finish is not None
    assert (finish.reason, finish.n_generated) == (FinishReason.STOP_STRING, at)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("at, n_new", [(1, 20), (4, 20), (4, 6), (4, 5)])
def test_forced_text_is_emitted_and_continued(ahead: bool, drafts: int, at: int, n_new: int, fresh_seed: int) -> None:
    engine, _ = engine_of(ahead=ahead, max_drafts=drafts)
    forced = (901, 902, 903)
    asked = prompts(fresh_seed, 3)
    readers = [Counting(at, Forced(forced)) if i == 0 else None for i in range(3)]
    handles = [engine.generate(Request(p, GREEDY, n_new, reader=r)) for p, r in zip(asked, readers, strict=True)]
    events = [list(handle) for handle in handles]
    text = continuation(asked[0], GREEDY, at) + list(forced)
    while len(text) < n_new:
        text.append(next_token([*asked[0], *text], GREEDY))
    assert ids(events[0]) == text[:n_new]
    assert [event.is_forced for event in events[0]] == [at <= i < at + 3 for i in range(n_new)]
    assert [ids(e) for e in events[1:]] == [continuation(p, GREEDY, n_new) for p in asked[1:]]


def test_no_decoding_row_waits_longer_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, program = engine_of(max_context=4096, n_pages=256)
    order: list[str] = []
    launch, prefill = program.launch, program.prefill

    def launching(round_: Round) -> Ticket:
        order.append("round")
        return launch(round_)

    def prefilling(chunk: PrefillChunk) -> PrefillResult:
        order.append("chunk")
        return prefill(chunk)

    monkeypatch.setattr(program, "launch", launching)
    monkeypatch.setattr(program, "prefill", prefilling)
    first = engine.generate(Request((1, 2, 3), GREEDY, 50))
    next(first)
    long = engine.generate(Request(tuple(range(1000)), GREEDY, 2))
    rest = list(first)
    assert len(rest) == 49
    assert "chunkchunk" not in "".join(order[1:])
    assert order.count("chunk") == 1 + 8
    assert ids(list(long)) == continuation(range(1000), GREEDY, 2)


def test_small_requests_pass_a_large_one_a_bounded_number_of_times() -> None:
    engine, _ = engine_of(n_pages=16, n_slots=4, max_context=1024)
    running = engine.generate(Request((1,) * 300, GREEDY, 340))  # 10 of 16 pages
    next(running)
    large = engine.generate(Request((2,) * 500, GREEDY, 20))  # 9 pages
    small = [engine.generate(Request((3, i), GREEDY, 3)) for i in range(MAX_PASSES + 3)]
    for handle in small[:MAX_PASSES]:
        assert len(list(handle)) == 3
    assert not large.done
    running.cancel()
    order: list[int] = []
    assert list(running) == []
    assert len(list(large)) == 20
    order = [i for i, handle in enumerate(small) if handle.done]
    assert order[:MAX_PASSES] == list(range(MAX_PASSES))
    assert all(len(list(handle)) == 3 for handle in small[MAX_PASSES:])


@pytest.mark.parametrize("ahead", [False, True])
def test_cancelling_a_row_changes_nothing_for_the_others(ahead: bool, fresh_seed: int) -> None:
    engine, _ = engine_of(ahead=ahead)
    asked = prompts(fresh_seed, 8)
    handles = [engine.generate(Request(p, GREEDY, 30)) for p in asked]
    first = [next(handles[0]) for _ in range(3)]
    for i in (1, 3, 6):  # running, prefilling or waiting
        handles[i].cancel()
    handles[2].close()
    assert ids([*first, *handles[0]]) == continuation(asked[0], GREEDY, 30)
    for i in (4, 5, 7):
        assert ids(list(handles[i])) == continuation(asked[i], GREEDY, 30)
    for i in (1, 2, 3, 6):
        assert list(handles[i]) == []
        finish = handles[i].finish
        assert finish is not None
        assert finish.reason is FinishReason.CANCELLED
    assert engine.stats().pages_used == 0
    assert engine.stats().requests_finished == {"cancelled": 4, "output-limit": 4}


def test_answer_that_had_ended_before_it_was_given_up_is_cancelled_unless_all_of_it_was_taken() -> None:
    engine, _ = engine_of()
    said = continuation((1, 2), GREEDY, 3)
    ended = Request((1, 2), GREEDY, 30, frozenset(said[-1:]))
    given_up, taken, other = engine.generate(ended), engine.generate(ended), engine.generate(Request((3,), GREEDY, 30))
    list(other)
    assert engine.stats().requests_finished["stop-token"] == 2
    given_up.cancel()
    assert list(given_up) == []
    assert given_up.finish is not None
    assert (given_up.finish.reason, given_up.finish.n_generated) == (FinishReason.CANCELLED, 0)
    assert ids([next(taken) for _ in said]) == said
    taken.cancel()
    assert list(taken) == []
    assert taken.finish is not None
    assert (taken.finish.reason, taken.finish.n_generated) == (FinishReason.STOP_TOKEN, 3)


def test_row_that_is_not_finite_ends_alone(fresh_seed: int) -> None:
    engine, program = engine_of()
    asked = [(5,) * 40, (6,) * 50, (7,) * 60]
    program.not_finite_at = 55
    handles = [engine.generate(Request(p, GREEDY, 4 if i else 30)) for i, p in enumerate(asked)]
    with pytest.raises(NonFiniteError, match="the logits for token 55"):
        list(handles[0])
    assert ids(list(handles[1])) == continuation(asked[1], GREEDY, 4)
    assert ids(list(handles[2])) == continuation(asked[2], GREEDY, 4)
    assert engine.stats().requests_finished == {"error": 1, "output-limit": 2}


def test_what_a_request_brings_along_ends_only_that_request(fresh_seed: int) -> None:
    class Broken(Counting):
        def feed(self, token_id: int) -> Verdict:
            raise ZeroDivisionError("the reader is broken")

    engine, _ = engine_of()
    bad = engine.generate(Request((1, 2), GREEDY, 9, reader=Broken(1)))
    good = engine.generate(Request((3, 4), GREEDY, 9))
    with pytest.raises(GenerationError, match=r"reading token 2 failed: ZeroDivisionError"):
        list(bad)
    assert ids(list(good)) == continuation((3, 4), GREEDY, 9)


# ---- with a worker ---------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_listeners_get_every_event_and_one_end(ahead: bool, fresh_seed: int) -> None:
    engine, _ = engine_of(ahead=ahead, max_drafts=3)
    asked = prompts(fresh_seed, 10)
    with engine:
        heard = [Collected() for _ in asked]
        handles = [engine.submit(Request(p, GREEDY, 25), h) for p, h in zip(asked, heard, strict=True)]
        for prompt, handle, collected in zip(asked, handles, heard, strict=True):
            assert collected.done.wait(30)
            assert ids(collected.events) == continuation(prompt, GREEDY, 25)
            assert handle.finish is not None
            assert handle.finish.n_generated == handle.n_generated == 25
        blocking = engine.submit(Request(asked[0], GREEDY, 5))
        assert ids(list(blocking)) == continuation(asked[0], GREEDY, 5)


def test_queue_is_bounded_and_patience_ends() -> None:
    engine, program = engine_of(config=replace(PLAIN, max_concurrency=1, max_pending=2, pending_seconds=1.0), n_slots=4)
    gate = threading.Event()
    prefill = program.prefill
    program.prefill = lambda chunk: (gate.wait(20), prefill(chunk))[1]  # type: ignore[method-assign]
    with engine:
        running = engine.submit(Request((1,), GREEDY, 3))
        waiting = [engine.submit(Request((2, i), GREEDY, 3)) for i in range(2)]
        with pytest.raises(OverloadedError, match="3 requests run or wait"):
            engine.submit(Request((3,), GREEDY, 3))
        time.sleep(1.1)
        gate.set()
        assert len(list(running)) == 3
        # There are four slots, so the others started at once unless they had waited too long.
        for handle in waiting:
            with pytest.raises(QueueTimeoutError, match=r"waited [1-9]"):
                list(handle)


@pytest.mark.parametrize("ahead", [False, True])
def test_fault_of_the_device_ends_everything_with_an_error(ahead: bool) -> None:
    engine, program = engine_of(ahead=ahead)
    program.fails_at = 5
    with engine:
        heard = [Collected() for _ in range(6)]
        handles = [engine.submit(Request((1, i), GREEDY, 50), h) for i, h in enumerate(heard)]
        for handle, collected in zip(handles, heard, strict=True):
            assert collected.done.wait(20)
            assert isinstance(handle.error, EngineStoppedError)
            assert handle.finish is None
        stats = engine.stats()
        assert not stats.is_healthy
        assert "the device is gone" in str(stats.fault)
        with pytest.raises(EngineStoppedError, match="the device is gone"):
            engine.submit(Request((1,), GREEDY))


def test_drained_engine_finishes_what_runs_and_takes_nothing_new() -> None:
    engine, _ = engine_of()
    with engine:
        handles = [engine.submit(Request((1, i), GREEDY, 40)) for i in range(6)]
        assert engine.drain(20)
        with pytest.raises(EngineStoppedError, match="it is closing"):
            engine.submit(Request((1,), GREEDY))
        assert [len(list(handle)) for handle in handles] == [40] * 6


def test_closed_engine_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, program = engine_of()
    launch = program.launch

    def slowly(round_: Round) -> Ticket:
        time.sleep(0.02)
        return launch(round_)

    monkeypatch.setattr(program, "launch", slowly)
    heard = Collected()
    handle = engine.submit(Request((1,), GREEDY, 200), heard)
    while not heard.events:
        time.sleep(0.01)
    engine.close()
    engine.close()
    assert heard.done.is_set()
    assert isinstance(handle.error, EngineStoppedError)
    assert "it was closed" in str(handle.error)


def test_reuse_is_reported(fresh_seed: int) -> None:
    engine, _ = engine_of(config=replace(PLAIN, prefix_reuse=True))
    prompt = prompts(fresh_seed, 1, 100)[0] + tuple(range(100, 140))
    first = engine.generate(Request(prompt, GREEDY, 40, anchors=Anchors(at=(len(prompt) - 5,))))
    text = [*prompt, *ids(list(first))]
    assert first.finish is not None
    assert first.finish.reuse.reason is MissReason.EMPTY
    again = engine.generate(Request(prompt, GREEDY, 40))
    assert ids(list(again)) == text[len(prompt) :]
    assert again.finish is not None
    assert again.finish.reuse.n_tokens == len(prompt) - 5
    longer = engine.generate(Request([*text, 7, 8], GREEDY, 3))
    assert ids(list(longer)) == continuation([*text, 7, 8], GREEDY, 3)
    assert longer.finish is not None
    assert longer.finish.reuse.n_tokens == len(text) - 1
