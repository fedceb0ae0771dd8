"""The engine under any order of submitting, stepping, cancelling and finishing: every answer that of a quiet engine,
every page and slot accounted for at every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ninfer_runtime import Engine, EngineConfig, FinishReason, Request, SamplingParams
from ninfer_runtime.engine.handle import Handle
from ninfer_runtime.engine.sequence import Anchors, Forced, Verdict
from tests.runtime.history_program import VOCAB, HistoryProgram, continuation, limits_of, next_token

CONFIG = EngineConfig(max_context=256, prefill_chunk=128, max_concurrency=4)
FORCED = (7, 8)


class Bending:
    """Forces two tokens behind the n-th, or ends there."""

    def __init__(self, at: int, verdict: Verdict) -> None:
        self._left, self._verdict = at, verdict

    @property
    def may_force(self) -> bool:
        return self._left > 0 and isinstance(self._verdict, Forced)

    def feed(self, token_id: int) -> Verdict:
        self._left -= 1
        return self._verdict if self._left == 0 else None


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.alive: list[tuple[Handle, list[int], list[int]]] = []

    @initialize(
        ahead=st.booleans(),
        drafts=st.integers(0, 3),
        reuse=st.booleans(),
        pages=st.integers(4, 24),
        backoff=st.booleans(),
    )
    def start(self, ahead: bool, drafts: int, reuse: bool, pages: int, backoff: bool) -> None:
        limits = limits_of(max_drafts=drafts, n_pages=pages, max_columns=1 + drafts)
        self.program = HistoryProgram(limits, ahead=ahead)
        self.engine = Engine.of_program(self.program, replace(CONFIG, prefix_reuse=reuse, draft_backoff=backoff))
        self.texts = [list(range(i, i + 300)) for i in (0, 300)]

    @rule(
        text=st.integers(0, 1),
        begin=st.integers(1, 240),
        twist=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        n_new=st.integers(1, 70),
        seed=st.none() | st.integers(0, 5),
        anchors=st.lists(st.integers(1, 250), max_size=3),
        stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=30),
        bend=st.none() | st.tuples(st.integers(1, 6), st.booleans()),
        flags=st.tuples(st.booleans(), st.booleans()),
    )
    def submit(
        self,
        text: int,
        begin: int,
        twist: list[int],
        n_new: int,
        seed: int | None,
        anchors: list[int],
        stops: frozenset[int],
        bend: tuple[int, bool] | None,
        flags: tuple[bool, bool],
    ) -> None:
        prompt = [*self.texts[text][:begin], *twist]
        sampling = SamplingParams.greedy() if seed is None else SamplingParams(seed=seed)
        n_out = min(n_new, 256 - len(prompt))
        expected = continuation(prompt, sampling, n_out, stops)
        reader = None
        if bend is not None:
            at, forces = bend
            reader = Bending(at, Forced(FORCED) if forces else FinishReason.STOP_STRING)
            is_reached = len(expected) > at or (len(expected) == at and expected[-1] not in stops)
            if is_reached and not forces:
                expected = expected[:at]
            elif is_reached:
                expected = [*expected[:at], *FORCED][:n_out]
                while len(expected) < n_out and not (len(expected) > at + 2 and expected[-1] in stops):
                    expected.append(next_token([*prompt, *expected], sampling))
        at_tokens = tuple(sorted({a for a in anchors if a <= len(prompt)}))
        request = Request(
            prompt,
            sampling,
            n_new,
            stops,
            reader=reader,
            anchors=Anchors(at=at_tokens),
            reuse=flags[0],
            speculate=flags[1],
        )
        self.alive.append((self.engine.generate(request), expected, []))

    @rule(n=st.integers(1, 8))
    def work(self, n: int) -> None:
        for _ in range(n):
            self.engine.core.step()

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 100), n=st.integers(1, 20))
    def take(self, which: int, n: int) -> None:
        handle, expected, taken = self.alive[which % len(self.alive)]
        for _ in range(n):
            event = next(handle, None)
            if event is None:
                assert taken == expected
                self.alive = [one for one in self.alive if one[0] is not handle]
                return
            taken.append(event.token_id)
            assert taken == expected[: len(taken)]

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 100), at_once=st.booleans())
    def cancel(self, which: int, at_once: bool) -> None:
        handle, _, _ = self.alive.pop(which % len(self.alive))
        if at_once:
            handle.close()
            assert handle.done
        else:
            handle.cancel()

    @precondition(lambda self: self.alive)
    @rule()
    def finish_all(self) -> None:
        for handle, expected, taken in self.alive:
            taken += [event.token_id for event in handle]
            assert taken == expected
        self.alive = []

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "engine"):
            return
        core = self.engine.core
        lanes = core.scheduler.lanes
        held = {page for lane in lanes for page in lane.pages}
        assert core.pages.n_free + len(held) + core.cache.pages_cached == core.pages.n_pages
        slots = [lane.slot for lane in lanes]
        assert len(set(slots)) == len(slots)
        assert core.cache.snapshots_used == len(self.program.snapshots)
        for lane in lanes:
            assert self.program.length(lane.slot) >= lane.n_folded

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.finish_all()
            while self.engine.core.step():
                pass
            stats = self.engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert stats.pages_used == stats.pages_cached
            self.engine.core.cache.clear()
            assert self.engine.core.pages.n_free == self.engine.core.pages.n_pages
            assert not self.program.snapshots


_COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(_COMMON, max_examples=25, stateful_step_count=40)


class LongMachine(EngineMachine):
    """The same for 10,000 steps."""


TestLongMachine = pytest.mark.slow(LongMachine.TestCase)
TestLongMachine.settings = settings(_COMMON, max_examples=100, stateful_step_count=100)
