"""Page ids of the KV pool, with reference counts so that several sequences can share a prefix.

Only bookkeeping: the bytes live in the program. A page with more than one owner must not be written below what the
others read of it; the writer takes a copy first (``copy_on_write``).
"""

from collections.abc import Iterable, Sequence

from ninfer_format.errors import GenerationError
from ninfer_runtime.backends.base import ContractError
from ninfer_runtime.config import PAGE_TOKENS


class OutOfPagesError(GenerationError):
    """The pool has fewer free pages than were asked for."""


class PagePool:
    """Free list and owner counts of ``n_pages`` pages. Freed pages are handed out again, oldest first.

    Owners are sequences (``allocate``, ``share``, ``release``) and texts kept for reuse (``keep``, ``drop``); pages
    that have only the latter are *idle*.
    """

    def __init__(self, n_pages: int) -> None:
        self._owners = [0] * n_pages
        self._keepers = [0] * n_pages
        self._free = dict.fromkeys(range(n_pages))
        self._n_idle = 0

    @property
    def n_pages(self) -> int:
        """All pages."""
        return len(self._owners)

    @property
    def n_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def n_idle(self) -> int:
        """Pages that no sequence holds, but a kept text does."""
        return self._n_idle

    def owners(self, page: int) -> int:
        """How many times the page is held."""
        return self._owners[page]

    def is_idle(self, page: int) -> bool:
        """Whether only kept texts hold the page."""
        return 0 < self._owners[page] == self._keepers[page]

    def allocate(self, n_pages: int) -> tuple[int, ...]:
        """Take free pages with one owner each, or OutOfPagesError and none at all."""
        if n_pages > len(self._free):
            raise OutOfPagesError(
                f"{n_pages} KV pages are needed, {len(self._free)} of {self.n_pages} are free; raise --kv-capacity"
            )
        pages = tuple(page for page, _ in zip(self._free, range(n_pages), strict=False))
        for page in pages:
            del self._free[page]
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one owner to each page that is in use."""
        for page in self._in_use(pages):
            self._change(page, owners=1)

    def release(self, pages: Iterable[int]) -> None:
        """Remove one owner from each; pages without owners become free."""
        for page in pages:
            if not self._owners[page]:
                raise ContractError(f"page {page} is free already")
            if self._owners[page] == self._keepers[page]:
                raise ContractError(f"page {page} is held by kept texts only")
            self._change(page, owners=-1)

    def keep(self, pages: Iterable[int]) -> None:
        """``share`` for a kept text."""
        for page in self._in_use(pages):
            self._change(page, owners=1, keepers=1)

    def drop(self, pages: Iterable[int]) -> None:
        """``release`` for a kept text."""
        for page in pages:
            if not self._keepers[page]:
                raise ContractError(f"page {page} is held by no kept text")
            self._change(page, owners=-1, keepers=-1)

    def copy_on_write(self, page: int) -> int:
        """A page the caller may write in place of ``page``: itself when it has one owner, otherwise a fresh one.

        When the id differs, the caller copies the bytes (``Program.copy_pages``) and has given up its share of
        ``page``.
        """
        if self._owners[page] == 1:
            return page
        (fresh,) = self.allocate(1)
        self.release((page,))
        return fresh

    def _in_use(self, pages: Iterable[int]) -> tuple[int, ...]:
        pages = tuple(pages)
        for page in pages:
            if not self._owners[page]:
                raise ContractError(f"page {page} is free and cannot be shared")
        return pages

    def _change(self, page: int, *, owners: int, keepers: int = 0) -> None:
        self._n_idle -= self.is_idle(page)
        self._owners[page] += owners
        self._keepers[page] += keepers
        self._n_idle += self.is_idle(page)
        if not self._owners[page]:
            self._free[page] = None


def pages_for(n_tokens: int) -> int:
    """Pages that hold ``n_tokens`` tokens."""
    return -(-n_tokens // PAGE_TOKENS)


def shared_prefix(pages: Sequence[int], n_tokens: int) -> tuple[int, ...]:
    """The pages of a row that hold its first ``n_tokens``; the last may be partly filled."""
    return tuple(pages[: pages_for(n_tokens)])
