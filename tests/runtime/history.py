"""A program whose state is the history of its tokens, so that a wrong state or page shows at the next prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

import numpy as np

from ninfer_runtime.backends.base import (
    Int32s,
    MemoryPlan,
    Place,
    PrefillChunk,
    Program,
    ProgramLimits,
    ProgramOptions,
    StateSnapshot,
)
from ninfer_runtime.backends.checks import require
from ninfer_runtime.cache.pages import PagePool, pages_for
from ninfer_runtime.cache.prefix import NoCache, PrefixCache
from ninfer_runtime.config import PAGE_TOKENS
from ninfer_runtime.engine.sequence import Anchors, Reuse

NOTHING = -1


class HistoryProgram:
    """What prefix reuse asks of a program, with every rule of the seam checked.

    A page holds the ids of its tokens. ``n_prefilled`` counts computed tokens, ``n_moved`` relocated snapshots.
    """

    def __init__(self, limits: ProgramLimits) -> None:
        self.plan = MemoryPlan(limits, ProgramOptions(), 0, 0, 0, 0, 0, 0)
        self.n_prefilled = 0
        self.n_moved = 0
        self.snapshots: dict[int, tuple[Place, Int32s]] = {}
        self._histories = [np.zeros(0, np.int32) for _ in range(limits.n_slots)]
        self._tokens = np.full((limits.n_pages, PAGE_TOKENS), NOTHING, np.int32)
        self._serials = count(1)

    def history(self, slot: int) -> list[int]:
        """Tokens folded into the slot."""
        return self._histories[slot].tolist()

    def length(self, slot: int) -> int:
        return len(self._histories[slot])

    def reset(self, slot: int) -> None:
        self._histories[slot] = np.zeros(0, np.int32)

    def snapshot(self, slot: int, place: Place = "device") -> StateSnapshot:
        return self._save(self._histories[slot], place)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        self._histories[slot] = self._saved(snapshot)

    def release(self, snapshot: StateSnapshot) -> None:
        self._saved(snapshot)
        del self.snapshots[snapshot.serial]

    def relocate(self, snapshot: StateSnapshot, place: Place) -> StateSnapshot:
        require(snapshot.place != place, "it is there already")
        moved = self._save(self._saved(snapshot), place)
        self.release(snapshot)
        self.n_moved += 1
        return moved

    def copy_pages(self, sources: Int32s, targets: Int32s) -> None:
        self._tokens[targets] = self._tokens[sources]

    def prefill(self, chunk: PrefillChunk) -> None:
        """Read everything before the chunk from the pages, then write the chunk into them."""
        history = self._histories[chunk.slot]
        require(chunk.start == len(history), f"the chunk starts at {chunk.start}, the slot holds {len(history)}")
        before = np.arange(len(history))
        places = chunk.pages[before // PAGE_TOKENS], before % PAGE_TOKENS
        assert np.array_equal(self._tokens[places], history), "the pages hold another text"
        self._write(chunk)

    def _write(self, chunk: PrefillChunk) -> None:
        """Put the chunk into the pages and into the state."""
        history = self._histories[chunk.slot]
        text = np.concatenate((history, chunk.token_ids))
        written = np.arange(len(history), len(text))
        self._tokens[chunk.pages[written // PAGE_TOKENS], written % PAGE_TOKENS] = chunk.token_ids
        self._histories[chunk.slot] = text
        self.n_prefilled += len(chunk.token_ids)

    def _save(self, history: Int32s, place: Place) -> StateSnapshot:
        limits = self.plan.limits
        planned = limits.device_snapshots if place == "device" else limits.host_snapshots
        require(sum(other == place for other, _ in self.snapshots.values()) < planned, f"no {place} snapshot is free")
        snapshot = StateSnapshot(next(self._serials), len(history), place)
        self.snapshots[snapshot.serial] = (place, history)
        return snapshot

    def _saved(self, snapshot: StateSnapshot) -> Int32s:
        require(snapshot.serial in self.snapshots, f"snapshot {snapshot.serial} was released")
        return self.snapshots[snapshot.serial][1]


def as_program(fake: HistoryProgram) -> Program:
    """For code that takes a whole program; of this one it must not use more than there is."""
    return cast(Program, fake)


def int32s(token_ids: Sequence[int]) -> Int32s:
    return np.array(token_ids, np.int32)


@dataclass
class Running:
    """A sequence between its begin and its end."""

    slot: int
    anchors: Anchors
    prompt: Int32s
    pages: tuple[int, ...]
    reuse: Reuse


class Lanes:
    """Sequences on a fake program, driven as an engine drives them."""

    def __init__(self, fake: HistoryProgram, cache: PrefixCache | NoCache, pool: PagePool) -> None:
        self.fake, self.cache, self.pool = fake, cache, pool

    def begin(
        self, slot: int, anchors: Anchors, prompt: Sequence[int], n_new: int, *, look_up: bool = True
    ) -> Running | None:
        """Admit a prompt with room for ``n_new`` tokens."""
        ids = int32s(prompt)
        begun = self.cache.begin(slot, anchors, ids, pages_for(len(ids) + n_new), look_up=look_up)
        return None if begun is None else Running(slot, anchors, ids, begun.pages, begun.reuse)

    def prefill(self, running: Running) -> bool:
        """The next chunk, up to an anchor or the prompt's end, and keep what an anchor names; False behind the last."""
        start = self.fake.length(running.slot)
        end = min((at for at in running.anchors.at if start < at), default=len(running.prompt))
        if start >= len(running.prompt):
            return False
        self.fold(running, running.prompt[start:end].tolist())
        if end in running.anchors.at:
            self._keep(running, running.prompt[:end], is_frontier=False)
        return True

    def fold(self, running: Running, token_ids: Sequence[int]) -> None:
        """Further tokens into the state, as prefill or accepted rounds do."""
        start = self.fake.length(running.slot)
        self.fake.prefill(PrefillChunk(running.slot, int32s(token_ids), start, int32s(running.pages)))

    def end(self, running: Running, *, keeps: bool = True) -> None:
        """Keep the frontier and give the pages back."""
        if keeps:
            self._keep(running, int32s(self.fake.history(running.slot)), is_frontier=True)
        self.pool.release(running.pages)

    def serve(
        self, prompt: Sequence[int], answer: Sequence[int] = (), at: Sequence[int] = (), key: bytes = b""
    ) -> Reuse:
        """A whole request in slot 0. The answer's last token enters no state."""
        running = self.begin(0, Anchors(key, tuple(at)), prompt, len(answer))
        assert running is not None, "not enough pages"
        while self.prefill(running):
            pass
        if len(answer) > 1:
            self.fold(running, answer[:-1])
        self.end(running)
        return running.reuse

    def _keep(self, running: Running, token_ids: Int32s, *, is_frontier: bool) -> None:
        self.cache.keep(running.slot, running.anchors, token_ids, running.pages, is_frontier=is_frontier)


def lanes(n_pages: int = 64, device: int = 8, host: int = 0, n_slots: int = 4, context: int = 4096) -> Lanes:
    """A fresh fake program with a prefix cache of all its snapshots."""
    limits = ProgramLimits(
        max_rows=n_slots, max_context=context, n_pages=n_pages, n_slots=n_slots,
        device_snapshots=device, host_snapshots=host,
    )  # fmt: skip
    fake, pool = HistoryProgram(limits), PagePool(n_pages)
    cache = PrefixCache(as_program(fake), pool, device_snapshots=device, host_snapshots=host)
    return Lanes(fake, cache, pool)
