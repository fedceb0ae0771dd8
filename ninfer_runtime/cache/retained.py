"""What is kept of past texts: states in planned places, pages in the pool, and which of them goes first.

A kept text is worth the prefill tokens that would be computed again without it: those behind the nearest shorter text
that is kept as well. What is given up raises the level that newly used texts start from, so that a large text nobody
asks for ages as small ones come and go (the rule of GreedyDual: credit at the last use + cost).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ninfer_runtime.backends.base import Int32s, Place, Program, StateSnapshot
from ninfer_runtime.cache.pages import PagePool, shared_prefix
from ninfer_runtime.cache.tree import Match, Node, TokenTree
from ninfer_runtime.config import PAGE_TOKENS

MAX_EVICTED = 1024
"""Texts that are remembered after they were given up, to say so; their token ids take no more than the pool's do."""


@dataclass(slots=True, eq=False)
class Kept:
    """One text of ``n_tokens``: its state, the pages that cover it, and ``level`` at its last use.

    ``snapshot`` is None once it was given up; the text is then remembered without a state or pages.
    """

    key: bytes
    n_tokens: int
    snapshot: StateSnapshot | None
    pages: tuple[int, ...]
    level: int
    node: Node["Kept"] = field(init=False)

    @property
    def n_saved(self) -> int:
        """Prefill tokens that it saves beside the nearest shorter kept text."""
        return self.n_tokens - next((above.n_tokens for above in self.shorter()), 0)

    @property
    def worth(self) -> int:
        """The lowest goes first."""
        return self.level + self.n_saved

    def shorter(self) -> "Iterator[Kept]":
        """Kept texts that this one begins with, the longest first."""
        values = (node.value for node in self.node.ancestors())
        return (value for value in values if value is not None and value.snapshot is not None)


class Retained:
    """All kept texts of a program, within ``n_places`` states per place."""

    def __init__(self, program: Program, pool: PagePool, n_places: dict[Place, int]) -> None:
        self._program = program
        self._pool = pool
        self._n_places = n_places
        self._tree: TokenTree[Kept] = TokenTree()
        self._by_place: dict[Place, dict[Kept, None]] = {place: {} for place in n_places}
        self._evicted: dict[Node[Kept], Kept] = {}
        self._level = 0

    @property
    def n_states(self) -> int:
        """States that are kept."""
        return sum(len(kept) for kept in self._by_place.values())

    def all(self) -> list[Kept]:
        """Every kept text, those with a state on the device first."""
        return [kept for place in self._by_place.values() for kept in place]

    def evicted(self) -> list[Kept]:
        """Texts that were given up and are remembered, the oldest first."""
        return list(self._evicted.values())

    def match(self, key: bytes, token_ids: Int32s) -> Match[Kept]:
        """Kept and remembered texts that ``token_ids`` begins with, and how far any text agrees."""
        return self._tree.match(key, token_ids)

    def use(self, kept: Kept) -> None:
        """It was of use now."""
        kept.level = self._level
        if kept.snapshot is not None:  # The first of equals goes first.
            place = self._by_place[kept.snapshot.place]
            del place[kept]
            place[kept] = None

    def leave(self, kept: Kept) -> None:
        """Its conversation has gone on: nothing but its cost speaks for it."""
        kept.level = 0

    def leave_branches(self, path: Sequence[Kept]) -> None:
        """``leave`` every text that begins with one of ``path`` and is none of them."""
        for kept in self.all():
            if kept not in path and any(above in path for above in kept.shorter()):
                self.leave(kept)

    def add(self, slot: int, key: bytes, token_ids: Int32s, pages: tuple[int, ...]) -> bool:
        """Keep the state of ``slot`` and a share of ``pages`` for a text that is not kept; False without a place."""
        place = self._free_place()
        if place is None:
            return False
        snapshot = self._program.snapshot(slot, place)
        covering = shared_prefix(pages, len(token_ids))
        self._pool.keep(covering)
        kept = Kept(key, len(token_ids), snapshot, covering, self._level)
        kept.node = self._tree.place(key, token_ids, kept)
        self._evicted.pop(kept.node, None)
        self._by_place[place][kept] = None
        self._forget()
        return True

    def evict(self, kept: Kept) -> None:
        """Give a text up: its state's place and its share of the pages. It is remembered for a while."""
        self._level = max(self._level, kept.worth)
        self._drop(kept)
        self._evicted[kept.node] = kept
        self._forget()

    def free_pages(self, n_pages: int, spared: Kept | None) -> None:
        """Give up texts other than ``spared`` until ``n_pages`` are free, or none is left.

        Those that free a page go first, among them the ends of what is known of a conversation: what others begin
        with stays longer.
        """
        while self._pool.n_free < n_pages:
            kept = [one for one in self.all() if one is not spared]
            if not kept:
                return
            inner = {next(one.shorter(), None) for one in self.all()}
            self.evict(min(kept, key=lambda one: (not self._frees(one), one in inner, one.worth)))

    def holders(self, page: int, index: int) -> list[Kept]:
        """Kept texts whose page number ``index`` is ``page``."""
        return [kept for kept in self.all() if index < len(kept.pages) and kept.pages[index] == page]

    def clear(self) -> None:
        """Give everything up and remember nothing."""
        for kept in self.all():
            self._drop(kept)
        self._evicted.clear()
        self._tree = TokenTree()

    def _frees(self, kept: Kept) -> bool:
        return any(self._pool.owners(page) == 1 for page in reversed(kept.pages))

    def _drop(self, kept: Kept) -> None:
        if kept.snapshot is None:
            return
        del self._by_place[kept.snapshot.place][kept]
        self._program.release(kept.snapshot)
        self._pool.drop(kept.pages)
        kept.snapshot, kept.pages = None, ()

    def _forget(self) -> None:
        """Bound what is remembered of texts that were given up."""
        n_tokens = 2 * self._pool.n_pages * PAGE_TOKENS
        while self._evicted and (len(self._evicted) > MAX_EVICTED or self._tree.n_tokens > n_tokens):
            oldest = next(iter(self._evicted))
            del self._evicted[oldest]
            self._tree.remove(oldest)

    # ---- places ------------------------------------------------------------------------------
    def _free_place(self) -> Place | None:
        """A place for one more state: on the device, from where the least worth one moves to the host."""
        if self._n_places["device"]:
            if self._is_full("device"):
                self._demote(self._least("device"))
            return "device"
        if self._n_places["host"]:
            if self._is_full("host"):
                self.evict(self._least("host"))
            return "host"
        return None

    def _demote(self, kept: Kept) -> None:
        if not self._n_places["host"]:
            self.evict(kept)
            return
        if self._is_full("host"):
            least = min(self._least("host"), kept, key=lambda one: one.worth)
            self.evict(least)
            if least is kept:
                return
        assert kept.snapshot is not None
        del self._by_place["device"][kept]
        kept.snapshot = self._program.relocate(kept.snapshot, "host")
        self._by_place["host"][kept] = None

    def _is_full(self, place: Place) -> bool:
        return len(self._by_place[place]) >= self._n_places[place]

    def _least(self, place: Place) -> Kept:
        return min(self._by_place[place], key=lambda kept: kept.worth)
