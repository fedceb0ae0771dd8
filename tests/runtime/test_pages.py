"""Page accounting: nothing is handed out twice, nothing is lost, shared pages are copied before a write."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ninfer_runtime.backends.base import ContractError
from ninfer_runtime.cache.pages import OutOfPagesError, PagePool, pages_for, shared_prefix


@pytest.mark.parametrize("n_tokens, n_pages", [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (4096, 64), (4097, 65)])
def test_pages_for_tokens(n_tokens: int, n_pages: int) -> None:
    assert pages_for(n_tokens) == n_pages


def test_shared_prefix_includes_the_partly_filled_page() -> None:
    assert shared_prefix([5, 6, 7, 8], 65) == (5, 6)
    assert shared_prefix([5, 6, 7, 8], 64) == (5,)


def test_allocation_beyond_the_pool_takes_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(OutOfPagesError, match=r"2 KV pages are needed, 1 of 4 are free; raise --kv-capacity"):
        pool.allocate(2)
    assert pool.n_free == 1


def test_page_with_one_owner_is_written_in_place_and_a_shared_one_is_copied() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    assert pool.copy_on_write(page) == page
    pool.share([page])
    fresh = pool.copy_on_write(page)
    assert fresh != page
    assert (pool.owners(page), pool.owners(fresh)) == (1, 1)
    with pytest.raises(ContractError, match="free already"):
        pool.release([page, page])
    with pytest.raises(ContractError, match="cannot be shared"):
        pool.share([page])


class PageAccounting(RuleBasedStateMachine):
    """Rows that allocate, share, copy and release, against a plain count of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.rows: list[list[int]] = []

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        free = self.pool.n_free
        if n > free:
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(n)
            assert self.pool.n_free == free
            return
        used = {page for row in self.rows for page in row}
        row = list(self.pool.allocate(n))
        assert not used & set(row)
        self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(choice=st.randoms())
    def share(self, choice: object) -> None:
        row = choice.choice(self.rows)  # type: ignore[attr-defined]
        self.pool.share(row)
        self.rows.append(list(row))

    @precondition(lambda self: self.rows)
    @rule(choice=st.randoms())
    def release(self, choice: object) -> None:
        self.pool.release(self.rows.pop(choice.randrange(len(self.rows))))  # type: ignore[attr-defined]

    @precondition(lambda self: any(self.rows) and self.pool.n_free)
    @rule(choice=st.randoms())
    def write(self, choice: object) -> None:
        row = choice.choice([row for row in self.rows if row])  # type: ignore[attr-defined]
        row[-1] = self.pool.copy_on_write(row[-1])
        assert self.pool.owners(row[-1]) == 1

    @invariant()
    def owners_add_up(self) -> None:
        held = [page for row in self.rows for page in row]
        assert all(self.pool.owners(page) == held.count(page) for page in range(12))
        assert self.pool.n_free == 12 - len(set(held))


TestPageAccounting = PageAccounting.TestCase
