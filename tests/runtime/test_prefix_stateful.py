"""Random lives of a prefix cache: every page and state accounted for, every restored history the prompt's own.

The fake program fails where a page holds another text than the history it is read for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ninfer_runtime.backends.base import Int32s
from ninfer_runtime.cache.prefix import MIN_SAVED, PrefixCache
from ninfer_runtime.cache.retained import Kept
from ninfer_runtime.config import PAGE_TOKENS
from ninfer_runtime.engine.sequence import Anchors, MissReason, Reuse
from tests.runtime.history import Lanes, Running, lanes

N_PAGES, N_SLOTS, MAX_CONTEXT = 14, 3, 640
LENGTHS = (1, 2, MIN_SAVED - 1, MIN_SAVED, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 100)
KEYS = (b"", b"", b"", b"thinking")


@dataclass(frozen=True)
class Wish:
    """A prompt: ``cut`` eighths of the text ``base`` before the last, ``blocks`` of (length, token), anchors."""

    base: int
    cut: int
    blocks: tuple[tuple[int, int], ...]
    at: tuple[int, ...]
    key: int


WISHES = st.builds(
    Wish,
    base=st.integers(0, 7),
    cut=st.sampled_from((8, 8, 8, 7, 4, 0)),
    blocks=st.lists(st.tuples(st.sampled_from(LENGTHS), st.integers(0, 3)), min_size=1, max_size=4).map(tuple),
    at=st.lists(st.integers(0, MAX_CONTEXT), max_size=3).map(tuple),
    key=st.integers(0, len(KEYS) - 1),
)


def text_of(kept: Kept) -> list[int]:
    """The token ids of a kept or remembered text, from the edges that lead to it."""
    path = [kept.node, *kept.node.ancestors()]
    return [token for node in reversed(path) for token in node.edge.tolist()]


def agreement(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class PrefixLife(RuleBasedStateMachine):
    """Sequences that begin, go on, end or are cancelled, on a pool that is too small for them."""

    places = (2, 2)

    def __init__(self) -> None:
        super().__init__()
        self.lanes: Lanes = lanes(N_PAGES, *self.places, N_SLOTS, MAX_CONTEXT)
        self.running: dict[int, Running] = {}
        self.texts: list[list[int]] = [[]]
        self.reports: list[Reuse] = []

    # ---- rules -------------------------------------------------------------------------------
    @precondition(lambda self: len(self.running) < N_SLOTS)
    @rule(wish=WISHES, look_up=st.sampled_from((True, True, True, False)))
    def begin(self, wish: Wish, look_up: bool) -> None:
        prompt = self.prompt(wish)
        slot = min(set(range(N_SLOTS)) - self.running.keys())
        anchors = Anchors(KEYS[wish.key], tuple(sorted({1 + at % len(prompt) for at in wish.at})))
        expected = self.expected(anchors.key, prompt) if look_up else Reuse()
        n_pages = -(-(len(prompt) + PAGE_TOKENS) // PAGE_TOKENS)
        could_fit = self.lanes.cache.could_fit(n_pages)
        before = self.footprint()
        running = self.lanes.begin(slot, anchors, prompt, PAGE_TOKENS, look_up=look_up)
        if running is None:
            assert not could_fit
            assert self.footprint() == before
            return
        n_reused = running.reuse.n_tokens
        assert running.reuse == expected
        assert self.lanes.fake.history(slot) == prompt[:n_reused]
        assert len(running.pages) == len(set(running.pages)) == n_pages
        assert all(self.lanes.pool.owners(page) == 1 for page in running.pages[n_reused // PAGE_TOKENS :])
        self.running[slot] = running
        self.texts.append(prompt)
        self.reports.append(running.reuse)

    @precondition(lambda self: len(self.running) < N_SLOTS)
    @rule(wish=WISHES, n_answer=st.integers(0, 40))
    def serve(self, wish: Wish, n_answer: int) -> None:
        before = set(self.running)
        self.begin(wish, True)
        for slot in self.running.keys() - before:
            while self.lanes.prefill(self.running[slot]):
                pass
            self.go_on(slot, n_answer, 3)
            self.end(slot, True)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, N_SLOTS - 1), n=st.integers(0, 40), token=st.integers(0, 3))
    def go_on(self, which: int, n: int, token: int) -> None:
        running = self.one(which)
        n_free = len(running.pages) * PAGE_TOKENS - self.lanes.fake.length(running.slot)
        if not self.lanes.prefill(running) and 0 < n <= n_free:
            self.lanes.fold(running, [token] * n)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, N_SLOTS - 1), keeps=st.booleans())
    def end(self, which: int, keeps: bool) -> None:
        running = self.one(which)
        del self.running[running.slot]
        self.texts.append(self.lanes.fake.history(running.slot))
        self.lanes.end(running, keeps=keeps)

    @rule(really=st.integers(0, 29))
    def clear(self, really: int) -> None:
        if really == 7:
            self.cache.clear()

    # ---- what must hold ----------------------------------------------------------------------
    @invariant()
    def every_page_has_its_owners(self) -> None:
        pool, cache = self.lanes.pool, self.cache
        held = Counter(page for running in self.running.values() for page in running.pages)
        kept = Counter(page for one in self.kept() for page in one.pages)
        assert [pool.owners(page) for page in range(N_PAGES)] == [held[page] + kept[page] for page in range(N_PAGES)]
        assert cache.pages_cached == len(kept.keys() - held.keys())
        assert pool.n_free + cache.pages_cached + len(held) == N_PAGES

    @invariant()
    def every_state_is_kept_once_within_the_places(self) -> None:
        kept = [one.snapshot for one in self.kept() if one.snapshot is not None]
        assert sorted(one.serial for one in kept) == sorted(self.lanes.fake.snapshots)
        assert self.cache.snapshots_used == len(kept)
        per_place = Counter(one.place for one in kept)
        assert per_place["device"] <= self.places[0]
        assert per_place["host"] <= self.places[1]

    @invariant()
    def every_kept_text_is_in_its_state_and_its_pages(self) -> None:
        for one in self.kept():
            assert one.snapshot is not None
            text = np.array(text_of(one), np.int32)
            assert np.array_equal(self.lanes.fake.snapshots[one.snapshot.serial][1], text)
            assert np.array_equal(self.tokens_in(one.pages, len(text)), text)

    @invariant()
    def the_tree_holds_the_kept_and_the_remembered_and_no_more(self) -> None:
        tree = self.cache._retained._tree
        nodes = list(tree.nodes())
        values = [node.value for node in nodes if node.value is not None]
        assert {id(one) for one in values} == {id(one) for one in (*self.kept(), *self.evicted())}
        assert tree.n_tokens == sum(len(node.edge) for node in nodes) <= 2 * N_PAGES * PAGE_TOKENS
        assert all(node.value is not None or len(node.children) > 1 for node in nodes if node.parent is not None)

    # ---- the plain way to say it ---------------------------------------------------------------
    def expected(self, key: bytes, prompt: list[int]) -> Reuse:
        """The report on a prompt, found by looking at every text there is."""
        kept = [text_of(one) for one in self.kept() if one.key == key]
        gone = [text_of(one) for one in self.evicted() if one.key == key]
        whole = [len(text) for text in kept if text == prompt[: len(text)] and len(text) < len(prompt)]
        n_tokens = max(whole, default=0)
        n_known = max((agreement(text, prompt) for text in kept + gone), default=0)
        behind = [text for text in kept + gone if agreement(text, prompt) == n_known and len(text) > n_known]
        difference = n_known if behind and n_known < len(prompt) else None
        if n_tokens == len(prompt) - 1:
            return Reuse(n_tokens, n_known, MissReason.NONE)
        if any(n_tokens < len(text) < len(prompt) and text == prompt[: len(text)] for text in gone):
            return Reuse(n_tokens, n_known, MissReason.EVICTED, difference)
        if not kept:
            return Reuse(0, 0, MissReason.EMPTY)
        if difference is not None:
            return Reuse(n_tokens, n_known, MissReason.DIFFERS, difference)
        return Reuse(n_tokens, n_known, MissReason.NO_STATE if n_known > n_tokens else MissReason.NONE)

    def prompt(self, wish: Wish) -> list[int]:
        """A beginning of an earlier text, or none, and new blocks of equal tokens behind it."""
        base = self.texts[-1 - wish.base % len(self.texts)]
        kept = base[: len(base) * wish.cut // 8]
        return (kept + [token for n, token in wish.blocks for _ in range(n)])[: MAX_CONTEXT - PAGE_TOKENS]

    def one(self, which: int) -> Running:
        """A running sequence: that of the slot, or another one."""
        return self.running.get(which) or self.running[min(self.running)]

    @property
    def cache(self) -> PrefixCache:
        assert isinstance(self.lanes.cache, PrefixCache)
        return self.lanes.cache

    def kept(self) -> list[Kept]:
        return self.cache._retained.all()

    def evicted(self) -> list[Kept]:
        return self.cache._retained.evicted()

    def footprint(self) -> tuple[int, int, list[int]]:
        """What a refused request must leave alone."""
        return self.lanes.pool.n_free, self.cache.pages_cached, sorted(self.lanes.fake.snapshots)

    def tokens_in(self, pages: tuple[int, ...], n_tokens: int) -> Int32s:
        return self.lanes.fake._tokens[list(pages)].ravel()[:n_tokens]


class DeviceOnly(PrefixLife):
    places = (3, 0)


class HostOnly(PrefixLife):
    places = (0, 3)


class OneState(PrefixLife):
    places = (1, 0)


LIVES = [PrefixLife, DeviceOnly, HostOnly, OneState]


@pytest.mark.parametrize("life", LIVES)
def test_random_lives(life: type[PrefixLife]) -> None:
    run_state_machine_as_test(life, settings=settings(max_examples=20, stateful_step_count=40, deadline=None))


def walk(life: type[PrefixLife], n_steps: int, seed: int) -> PrefixLife:
    """Steps of even chances, every invariant checked after each."""
    rng, machine = np.random.default_rng(seed), life()
    checks = [value for name, value in vars(PrefixLife).items() if name.startswith(("every_", "the_"))]
    for _ in range(n_steps):
        blocks = [(LENGTHS[rng.integers(len(LENGTHS))], int(rng.integers(4))) for _ in range(rng.integers(1, 5))]
        at = tuple(rng.integers(0, MAX_CONTEXT, rng.integers(0, 4)).tolist())
        cut = (8, 8, 8, 7, 4, 0)[rng.integers(6)]
        wish = Wish(int(rng.integers(8)), cut, tuple(blocks), at, int(rng.integers(len(KEYS))))
        which, n, choice = int(rng.integers(N_SLOTS)), int(rng.integers(41)), rng.random()
        if choice < 0.55 and len(machine.running) < N_SLOTS:
            if choice < 0.35:
                machine.serve(wish, n)
            else:
                machine.begin(wish, bool(rng.random() < 0.9))
        elif machine.running and choice < 0.95:
            machine.go_on(which, n, int(rng.integers(4))) if choice < 0.8 else machine.end(
                which, bool(rng.random() < 0.8)
            )
        elif choice > 0.995:
            machine.clear(7)
        for check in checks:
            check(machine)
    return machine


@pytest.mark.parametrize("life", LIVES)
def test_a_long_life(life: type[PrefixLife]) -> None:
    machine = walk(life, 3000, seed=1)
    reasons = Counter(reuse.reason for reuse in machine.reports)
    assert reasons.keys() == set(MissReason), "the walk must meet every reason"
    assert sum(reuse.n_tokens > 0 for reuse in machine.reports) > len(machine.reports) / 20
    assert (machine.lanes.fake.n_moved > 20) == (min(life.places) > 0)


@pytest.mark.slow
@pytest.mark.parametrize("life", LIVES)
def test_forty_thousand_steps(life: type[PrefixLife]) -> None:
    walk(life, 40_000, seed=2)
