"""The recorded rounds of a program, with the drafts behind them where networks are streamed.

Copies of streamed networks join a graph before its end. Drafts in graphs of their own would leave the link idle, so the
usual rounds are recorded once more with their drafts in one graph.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from ninfer_runtime.backends.base import ProgramLimits, Round
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.drafting import Drafting
from ninfer_runtime.backends.cuda.graphs import GraphBook
from ninfer_runtime.backends.cuda.ring import Ring

T = TypeVar("T")
Queue = Callable[[Stream, int, int], None]
"""Puts a round of B rows and q columns on a stream."""


class RoundGraphs:
    """One graph per (B, q), recorded at the start."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        limits: ProgramLimits,
        queue: Queue,
        drafting: Drafting | None,
        ring: Ring | None,
    ) -> None:
        """``ring``: the networks that pass through the device, if any do."""
        self._stream, self._drafting = stream, drafting
        self._queue, self._ring = queue, ring
        self._n_drafts = limits.max_drafts if ring is not None and ring.layout.is_moving else 0
        self.book, self._with_drafts = GraphBook(device, stream), GraphBook(device, stream)
        rows = range(1, limits.max_rows + 1)
        self.book.record_all([(b, q) for b in rows for q in range(1, limits.max_columns + 1)], self._record)
        if drafting is not None:
            drafting.record(limits.max_rows)
        if self._n_drafts:
            columns = sorted({1, 1 + self._n_drafts})
            self._with_drafts.record_all([(b, q) for b in rows for q in columns], self._record_with_drafts)

    def _copies(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext() if self._ring is None else self._ring.captured(stream)

    def _record(self, shape: tuple[int, int], stream: Stream) -> None:
        with self._copies(stream):
            self._queue(stream, *shape)

    def _record_with_drafts(self, shape: tuple[int, int], stream: Stream) -> None:
        assert self._drafting is not None
        with self._copies(stream):
            self._queue(stream, *shape)
            self._drafting.queue(stream, shape[0], self._n_drafts)

    def launch(self, round_: Round, between: Callable[[Round], T]) -> T:
        """Queue a round and its drafts; ``between`` runs behind the round, before drafts overwrite what it left."""
        shape = round_.token_ids.shape
        n_drafts = 0 if round_.n_drafts is None else int(round_.n_drafts.max())
        if self._ring is not None:
            self._ring.settle(self._stream)
        at_once = n_drafts == self._n_drafts > 0 and shape in self._with_drafts
        if at_once and not (round_.want_logits or round_.want_hidden):
            self._with_drafts.launch((shape[0], shape[1]), self._stream)
            return between(round_)
        self.book.launch((shape[0], shape[1]), self._stream)
        found = between(round_)
        if self._drafting is not None:
            self._drafting.follow_round(shape[0], n_drafts)
        return found

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """For reports."""
        n_graphs = len(self.book) + len(self._with_drafts)
        rounds = ("rounds", f"{n_graphs} graphs of {self.book.n_nodes + self._with_drafts.n_nodes} launches")
        return (rounds, *(() if self._drafting is None else self._drafting.notes))

    def close(self) -> None:
        """Give the graphs back; none may be running."""
        self.book.close()
        self._with_drafts.close()
        if self._drafting is not None:
            self._drafting.close()
