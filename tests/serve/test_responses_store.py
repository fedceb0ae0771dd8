"""The store of responses: bounded in number and size, the least recently used go first, pages as asked."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.responses_store import ResponseStore, Stored, n_bytes_of, page_of


def stored(name: str, size: int = 10) -> Stored:
    document = {"id": name, "output": [{"id": f"{name}-out", "text": "x" * size}]}
    return Stored.of(document, ({"id": f"{name}-in"},))


def size_of(record: Stored) -> int:
    return n_bytes_of(record.document) + n_bytes_of(record.given)


def test_what_was_put_is_there_until_it_is_deleted() -> None:
    store = ResponseStore(10, 10_000)
    store.put(stored("a"))
    assert store.get("a").document["id"] == "a"
    assert [item["id"] for item in store.get("a").history] == ["a-in", "a-out"]
    assert store.n_bytes == size_of(stored("a"))
    store.delete("a")
    assert (len(store), store.n_bytes) == (0, 0)
    for ask in (store.get, store.delete):
        with pytest.raises(ApiError, match="not stored here") as caught:
            ask("a")
        assert (caught.value.problem.status, caught.value.problem.code) == (404, "response_not_found")


def test_a_record_that_continues_another_counts_all_it_holds() -> None:
    first = stored("a", 100)
    later = Stored.of({"id": "b", "output": [{"id": "b-out"}]}, ({"id": "b-in"},), first, True)
    assert [item["id"] for item in later.history] == ["a-in", "a-out", "b-in", "b-out"]
    assert later.n_history == first.n_history + n_bytes_of(later.given) + n_bytes_of(later.document["output"])
    assert later.n_bytes == first.n_history + n_bytes_of(later.given) + n_bytes_of(later.document)
    assert later.n_bytes >= n_bytes_of([later.document, later.before, later.given]) - 10


def test_the_least_recently_used_gives_way_to_number_and_to_size() -> None:
    store = ResponseStore(2, 10_000)
    for name in "ab":
        store.put(stored(name))
    store.get("a")
    store.put(stored("c"))
    assert [name for name in "abc" if name in store._records] == ["a", "c"]
    small = ResponseStore(100, 3 * size_of(stored("a")))
    for name in "abcde":
        small.put(stored(name))
        assert small.n_bytes <= 3 * size_of(stored("a"))
    assert list(small._records) == ["c", "d", "e"]


def test_a_response_that_could_never_be_kept_is_refused() -> None:
    store = ResponseStore(10, 200)
    store.put(stored("a"))
    with pytest.raises(ApiError) as caught:
        store.put(stored("big", 1000))
    assert caught.value.problem.code == "response_store_capacity_exceeded"
    assert store.get("a") == stored("a")
    with pytest.raises(ApiError, match="store: false"):
        ResponseStore(0, 10_000).check_room(1)


ITEMS = [{"id": f"i{n}"} for n in range(5)]


@pytest.mark.parametrize(
    ("after", "limit", "order", "ids", "has_more"),
    [
        (None, 2, "desc", ["i4", "i3"], True),
        ("i3", 2, "desc", ["i2", "i1"], True),
        ("i1", 2, "desc", ["i0"], False),
        ("i0", 2, "desc", [], False),
        (None, 5, "asc", ["i0", "i1", "i2", "i3", "i4"], False),
        ("i2", 1, "asc", ["i3"], True),
    ],
)
def test_pages(after: str | None, limit: int, order: str, ids: list[str], has_more: bool) -> None:
    page: dict[str, Any] = page_of(ITEMS, after, limit, order)
    assert [item["id"] for item in page["data"]] == ids
    assert page["has_more"] is has_more
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


def test_a_page_after_an_unknown_item_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        page_of(ITEMS, "other", 20, "desc")
    assert (caught.value.problem.code, caught.value.problem.param) == ("invalid_pagination", "after")
