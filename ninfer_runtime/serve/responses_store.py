"""Responses that can be fetched and continued: in this process, the least recently used ones give way."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.responses_items import Item


def n_bytes_of(value: Any) -> int:
    """Size of a JSON value, as text."""
    return len(json.dumps(value, separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class Stored:
    """One response, made by ``of``. A record holds all it needs, so deleting another one leaves it usable.

    before, given   items of the chain it continues, and of its own request; its output is in the document
    n_history       bytes of the history, as JSON text;  ``n_bytes``: of the whole record
    """

    document: dict[str, Any]
    before: tuple[Item, ...]
    given: tuple[Item, ...]
    preserve_thinking: bool | None
    n_history: int
    n_bytes: int

    @classmethod
    def of(
        cls,
        document: dict[str, Any],
        given: tuple[Item, ...],
        earlier: "Stored | None" = None,
        preserve_thinking: bool | None = None,
    ) -> "Stored":
        """The record of a response that answers ``given`` behind ``earlier``; only what is new is measured."""
        before, n_before = (earlier.history, earlier.n_history) if earlier is not None else ((), 0)
        n_asked = n_before + n_bytes_of(given)
        return cls(
            document,
            before,
            given,
            preserve_thinking,
            n_asked + n_bytes_of(document["output"]),
            n_asked + n_bytes_of(document),
        )

    @property
    def history(self) -> tuple[Item, ...]:
        """Everything said up to and with this response."""
        return (*self.before, *self.given, *self.document["output"])


class ResponseStore:
    """Up to ``max_records`` responses of together ``max_bytes``, counted as the JSON text they are."""

    def __init__(self, max_records: int, max_bytes: int) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records: OrderedDict[str, Stored] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, response_id: str, param: str = "response_id") -> Stored:
        """The response, used now; ApiError 404 when there is none."""
        if response_id not in self._records:
            raise not_found(response_id, param)
        self._records.move_to_end(response_id)
        return self._records[response_id]

    def check_room(self, n_bytes: int) -> None:
        """ApiError when a response of this size could never be kept."""
        if n_bytes > self._max_bytes or self._max_records == 0:
            raise ApiError(
                f"the response and what it answers take {n_bytes} bytes, the store holds {self._max_bytes} bytes in "
                f"{self._max_records} responses; ask with store: false",
                code="response_store_capacity_exceeded",
                param="store",
            )

    def put(self, stored: Stored) -> None:
        """Keep a response; older ones go until there is room. ApiError when there never is."""
        self.check_room(stored.n_bytes)
        while self._records and self._is_full(stored.n_bytes):
            _, dropped = self._records.popitem(last=False)
            self.n_bytes -= dropped.n_bytes
        self._records[stored.document["id"]] = stored
        self.n_bytes += stored.n_bytes

    def _is_full(self, n_bytes: int) -> bool:
        return len(self._records) >= self._max_records or self.n_bytes + n_bytes > self._max_bytes

    def delete(self, response_id: str) -> None:
        """Forget a response; ApiError 404 when there is none."""
        if response_id not in self._records:
            raise not_found(response_id, "response_id")
        self.n_bytes -= self._records.pop(response_id).n_bytes


def not_found(response_id: str, param: str) -> ApiError:
    """A response that is not stored (any more)."""
    return ApiError(
        f"the response {response_id!r} is not stored here; it was never kept, was deleted, or gave way to newer ones",
        status=404,
        code="response_not_found",
        param=param,
    )


def page_of(items: Sequence[Item], after: str | None, limit: int, order: str) -> dict[str, Any]:
    """A page of items as the API lists them; ApiError for an ``after`` that is none of them."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise invalid_pagination("after", after, "the id of one of the items")
        start = ids.index(after) + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }


def invalid_pagination(name: str, value: str, expected: str) -> ApiError:
    """A query parameter of a list that is wrong."""
    return ApiError(f"{name} is {value!r}, expected {expected}", code="invalid_pagination", param=name)
