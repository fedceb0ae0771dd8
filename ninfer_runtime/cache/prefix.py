"""Prefix reuse: a prompt goes on from the longest kept state that it begins with, never from less than all of it.

Recurrent states cannot be cut, so keys and values alone are no hit: reuse needs a state saved at exactly that token.
States are kept at the anchors of a prompt and at the end of a sequence, with the pages that cover them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_runtime.backends.base import ContractError, Int32s, Place, Program
from ninfer_runtime.cache.pages import PagePool, pages_for
from ninfer_runtime.cache.retained import Kept, Retained
from ninfer_runtime.cache.tree import Match
from ninfer_runtime.config import PAGE_TOKENS
from ninfer_runtime.engine.sequence import Anchors, MissReason, Reuse

MIN_SAVED = 32
"""Fewest prefill tokens that are worth a state: a chunk this short takes about as long as one of a single token."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A sequence that may begin: ``pages`` are its own to write from ``reuse.n_tokens`` on and to release."""

    pages: tuple[int, ...]
    reuse: Reuse


class NoCache:
    """``PrefixCache`` without a memory."""

    pages_cached = 0
    snapshots_used = 0

    def __init__(self, program: Program, pool: PagePool) -> None:
        self._program = program
        self._pool = pool

    def begin(self, slot: int, anchors: Anchors, prompt: Int32s, n_pages: int, *, look_up: bool = True) -> Begun | None:
        """Fresh pages and an empty state."""
        if self._pool.n_free < n_pages:
            return None
        self._program.reset(slot)
        return Begun(self._pool.allocate(n_pages), Reuse())

    def keep(self, slot: int, anchors: Anchors, token_ids: Int32s, pages: Sequence[int], *, is_frontier: bool) -> None:
        """Keep nothing."""

    def could_fit(self, n_pages: int) -> bool:
        """Whether that many pages are free."""
        return self._pool.n_free >= n_pages

    def clear(self) -> None:
        """Nothing to clear."""


class PrefixCache:
    """Kept states and pages of one program. Not thread-safe; the two counts may be read from any thread."""

    def __init__(self, program: Program, pool: PagePool, *, device_snapshots: int, host_snapshots: int) -> None:
        limits = program.plan.limits
        planned: dict[Place, int] = {"device": limits.device_snapshots, "host": limits.host_snapshots}
        wanted: dict[Place, int] = {"device": device_snapshots, "host": host_snapshots}
        for place, n_places in wanted.items():
            if not 0 <= n_places <= planned[place]:
                raise ContractError(f"{n_places} {place} snapshots were asked for, {planned[place]} are planned")
        self._program = program
        self._pool = pool
        self._retained = Retained(program, pool, wanted)

    @property
    def pages_cached(self) -> int:
        """Pages that kept texts hold and no sequence does: they go when admission needs them."""
        return self._pool.n_idle

    @property
    def snapshots_used(self) -> int:
        """Kept states, wherever they are."""
        return self._retained.n_states

    def could_fit(self, n_pages: int) -> bool:
        """Whether ``begin`` would find that many pages without sharing any."""
        return self._pool.n_free + self._pool.n_idle >= n_pages

    def begin(self, slot: int, anchors: Anchors, prompt: Int32s, n_pages: int, *, look_up: bool = True) -> Begun | None:
        """Put the longest kept state below the prompt's last token into ``slot``, or an empty one, and find pages.

        slot      a slot without an open round
        prompt    int32 [n], n >= 1
        n_pages   pages of the whole sequence, at least those of the prompt
        look_up   False: begin with an empty state whatever is kept

        Returns exactly ``n_pages`` pages that belong to the caller: those it shares with the kept text, a copy of the
        page with the kept text's last token, fresh ones. Other texts are given up for them as needed. None: there are
        not enough pages now, and nothing has changed.
        """
        if n_pages < pages_for(len(prompt)) or len(prompt) == 0:
            raise ContractError(f"{n_pages} pages for a prompt of {len(prompt)} tokens")
        if not look_up:
            pages = self._fresh(n_pages)
            if pages is not None:
                self._program.reset(slot)
            return None if pages is None else Begun(pages, Reuse())
        match = self._retained.match(anchors.key, prompt)
        alive = [kept for kept in match.values if kept.snapshot is not None]
        hit = next((kept for kept in reversed(alive) if kept.n_tokens < len(prompt)), None)
        reuse = self._report(anchors.key, match, 0 if hit is None else hit.n_tokens, len(prompt))
        pages = self._fresh(n_pages) if hit is None else self._continued(slot, hit, n_pages)
        if pages is None:
            return None
        if hit is None:
            self._program.reset(slot)
        for kept in alive:
            if kept is hit or kept.n_tokens in anchors.at:
                self._retained.use(kept)
        if match.differs:
            # What went on otherwise behind more than the system block is this conversation before it was rewritten.
            shared = min(anchors.at, default=0)
            self._retained.leave_branches([kept for kept in alive if kept.snapshot and kept.n_tokens > shared])
        return Begun(pages, reuse)

    def keep(self, slot: int, anchors: Anchors, token_ids: Int32s, pages: Sequence[int], *, is_frontier: bool) -> None:
        """Keep the state of ``slot``, which is that of exactly ``token_ids`` int32 [n], and a share of its pages.

        Declined where it would save fewer than MIN_SAVED tokens, or without a place for the state. ``is_frontier``: the
        sequence ends here, and what it had begun from counts as left behind unless its anchors name it.
        """
        if self._program.length(slot) != len(token_ids):
            raise ContractError(f"slot {slot} holds {self._program.length(slot)} tokens, not {len(token_ids)}")
        alive = [kept for kept in self._retained.match(anchors.key, token_ids).values if kept.snapshot is not None]
        if is_frontier:
            for kept in alive:
                if kept.n_tokens not in anchors.at:
                    self._retained.leave(kept)
        n_kept = alive[-1].n_tokens if alive else 0
        if n_kept == len(token_ids) > 0:
            self._retained.use(alive[-1])
        elif len(token_ids) - n_kept >= MIN_SAVED:
            self._retained.add(slot, anchors.key, token_ids, tuple(pages))

    def clear(self) -> None:
        """Forget everything."""
        self._retained.clear()

    # ---- pages -------------------------------------------------------------------------------
    def _fresh(self, n_pages: int) -> tuple[int, ...] | None:
        if not self.could_fit(n_pages):
            return None
        self._retained.free_pages(n_pages, None)
        return self._pool.allocate(n_pages)

    def _continued(self, slot: int, hit: Kept, n_pages: int) -> tuple[int, ...] | None:
        """The pages of a sequence that goes on from ``hit``, whose state is then in the slot.

        The page that the kept text ends in is written behind it, so it is copied, or taken over when the pool has no
        room for both.
        """
        snapshot = hit.snapshot
        assert snapshot is not None
        n_shared = hit.n_tokens // PAGE_TOKENS
        shared, last = hit.pages[:n_shared], hit.pages[n_shared:]
        n_fresh = n_pages - n_shared
        n_available = self._pool.n_free + self._pool.n_idle - sum(map(self._pool.is_idle, hit.pages))
        takes_over = n_available < n_fresh and any(map(self._pool.is_idle, last))
        if n_available + takes_over < n_fresh:
            return None
        self._retained.free_pages(n_fresh - takes_over, hit)
        fresh = self._pool.allocate(n_fresh - takes_over)
        self._pool.share(shared)
        self._program.restore(slot, snapshot)
        if takes_over:
            self._pool.share(last)
            for kept in self._retained.holders(last[0], n_shared):
                self._retained.evict(kept)
            return (*shared, *last, *fresh)
        if last:
            self._program.copy_pages(np.array(last, np.int32), np.array(fresh[:1], np.int32))
        return shared + fresh

    # ---- reports -----------------------------------------------------------------------------
    def _report(self, key: bytes, match: Match[Kept], n_tokens: int, n_prompt: int) -> Reuse:
        """Why ``n_tokens`` of the prompt were reused and no more."""
        if n_tokens == n_prompt - 1:
            return Reuse(n_tokens, match.n_tokens, MissReason.NONE)
        first_difference = match.n_tokens if match.differs else None
        if any(n_tokens < kept.n_tokens < n_prompt for kept in match.values):
            reason = MissReason.EVICTED
        elif not any(kept.key == key for kept in self._retained.all()):
            return Reuse(0, 0, MissReason.EMPTY)
        elif match.differs:
            reason = MissReason.DIFFERS
        else:
            reason = MissReason.NO_STATE if match.n_tokens > n_tokens else MissReason.NONE
        return Reuse(n_tokens, match.n_tokens, reason, first_difference)
