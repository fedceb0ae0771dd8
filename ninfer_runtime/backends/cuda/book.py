"""Rounds between launch and end on the device: which are open, what each left to commit, and when the host knows it.

The device runs ahead of the host: a round that a later one named as ``previous`` was committed there by its own counts,
which the host learns when it reads the result. ``RoundBook`` keeps both sides apart: a round is *settled* when nothing
may change its outcome any more, and *resolved* when the host's lanes show that outcome.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from ninfer_runtime.backends.base import MAX_ROUNDS_IN_FLIGHT, Int32s, Round, RoundResult, RowStatus, Ticket
from ninfer_runtime.backends.checks import require
from ninfer_runtime.backends.cuda.snapshots import Position

NO_BUFFER = -1
"""The state lacks no column."""


@dataclass(slots=True)
class Lane:
    """Host side of one slot.

    length            tokens folded into the committed state, those that the state in memory lacks included
    pending_columns   columns of the newest round that the next use of the slot folds
    pending_buffer    which of the slot's two windows that round left; only the device knows whether the state lacks
                      columns of earlier rounds as well
    position          rotary position of the last of the tokens, three axes
    """

    length: int = 0
    pending_columns: int = 0
    pending_buffer: int = NO_BUFFER
    position: Position = (0, 0, 0)

    def pend(self, columns: int, buffer: int) -> None:
        """A round left ``columns`` that count, in ``buffer``."""
        self.pending_columns, self.pending_buffer = columns, buffer

    def make_whole(self, length: int) -> None:
        """The state in memory is that of ``length`` tokens and lacks nothing."""
        self.length = length
        self.pend(0, NO_BUFFER)


@dataclass(slots=True)
class Launched:
    """A launched round. ``buffer``: index of its pinned transfer buffers; ``record_buffer`` per row.

    ``max_starts`` int32 [B]: the largest index its column 0 can have, for page checks of a round that follows;
    ``ends`` int32 [B]: the index of the last token that the row may emit; no round begins there.
    """

    serial: int
    round: Round
    buffer: int
    record_buffers: Int32s
    max_starts: Int32s
    ends: Int32s
    wait: Callable[[], RoundResult]
    result: RoundResult | None = None
    is_read: bool = False
    is_settled: bool = False
    is_resolved: bool = False

    def outcome(self) -> RoundResult:
        """The result, waiting for the device the first time."""
        if self.result is None:
            self.result = self.wait()
        return self.result

    def latest_start(self, b: int) -> int:
        """The largest index at which a row can go on behind this round; exact once the result is known."""
        if self.result is not None:
            return int(self.result.starts[b] + self.result.columns[b])
        return int(min(self.max_starts[b] + self.round.n_columns[b], self.ends[b] - 1))


def evaluated_columns(round_: Round, result: RoundResult) -> Int32s:
    """int32 [B] columns each row evaluated."""
    frozen = np.array([status is RowStatus.FROZEN for status in result.status])
    columns = round_.n_columns
    if round_.own_drafts and result.drafted is not None:
        columns = 1 + result.drafted
    return np.where(frozen, 0, columns).astype(np.int32)


class RoundBook:
    """Tickets and lanes of one program."""

    def __init__(self, n_slots: int) -> None:
        self.lanes = [Lane() for _ in range(n_slots)]
        self._launched: dict[int, Launched] = {}
        self._serials = count(1)

    def open(self) -> list[Launched]:
        """Rounds that are neither committed nor rolled back."""
        return [launched for launched in self._launched.values() if not launched.is_settled]

    def busy_slots(self) -> set[int]:
        """Slots that take part in an open round."""
        return {int(slot) for launched in self.open() for slot in launched.round.slots}

    def free_buffer(self) -> int:
        """A pinned transfer buffer that no living round uses."""
        used = {launched.buffer for launched in self._launched.values()}
        return next(i for i in range(MAX_ROUNDS_IN_FLIGHT + 1) if i not in used)

    def find(self, ticket: Ticket) -> Launched:
        """The round of a ticket that is not over."""
        require(ticket.serial in self._launched, f"round {ticket.serial} is over, or was never launched here")
        return self._launched[ticket.serial]

    def unsettled(self, ticket: Ticket) -> Launched:
        """The round of a ticket that may still be committed or rolled back."""
        launched = self.find(ticket)
        require(not launched.is_settled, f"round {ticket.serial} was committed already")
        return launched

    def previous_of(self, round_: Round) -> Launched | None:
        """The round that ``round_`` continues, or None; ContractError when it may not be launched now."""
        alive = len(self._launched)
        require(
            alive < MAX_ROUNDS_IN_FLIGHT,
            f"{alive} rounds are unread or uncommitted, at most {MAX_ROUNDS_IN_FLIGHT} may be; read the older one",
        )
        if round_.previous is None:
            require(not self.open(), "a round is open; commit it, roll it back, or name it as previous")
            return None
        previous = self.find(round_.previous)
        require(not previous.is_settled, f"round {round_.previous.serial} is committed; launch without previous")
        same = np.array_equal(previous.round.slots, round_.slots)
        require(same, f"slots {round_.slots.tolist()} follow {previous.round.slots.tolist()}, expected the same")
        return previous

    def add(self, launched: Launched) -> Ticket:
        """Keep a launched round."""
        self._launched[launched.serial] = launched
        return Ticket(launched.serial)

    def next_serial(self) -> int:
        """Serial of the next ticket."""
        return next(self._serials)

    def read(self, ticket: Ticket) -> RoundResult:
        """Its result, once."""
        launched = self.find(ticket)
        require(not launched.is_read, f"round {ticket.serial} was read already")
        result = launched.outcome()
        launched.is_read = True
        self.resolve()
        return result

    def commit_by_own_counts(self, launched: Launched) -> None:
        """A later round follows: the device folds this one's record there, the host learns the counts later."""
        launched.is_settled = True

    def commit(self, launched: Launched, columns: Int32s | None) -> Int32s:
        """Fold ``columns`` (None: its own) into the lanes; returns int32 [B] tokens to count per row."""
        result, q = launched.outcome(), launched.round
        wanted = result.columns if columns is None else columns
        require(wanted.shape == result.columns.shape, f"commit names {wanted.shape} rows of {q.n_rows}")
        evaluated = evaluated_columns(q, result)
        for b in range(q.n_rows):
            limit = int(evaluated[b])
            require(0 <= wanted[b] <= limit, f"commit of {wanted[b]} columns in row {b}, which evaluated {limit}")
        self.resolve()
        self._advance(launched, wanted)
        for b, slot in enumerate(q.slots.tolist()):
            self.lanes[slot].pend(int(wanted[b]), int(launched.record_buffers[b]))
        launched.is_settled = launched.is_resolved = True
        self._forget_what_is_over()
        if q.verify:
            return np.minimum(wanted, result.emitted).astype(np.int32)
        return np.where(wanted == evaluated, result.emitted, 0).astype(np.int32) * (wanted > 0)

    def roll_back(self, launched: Launched) -> None:
        """Nothing of the round stays; nobody will read it."""
        launched.is_settled = launched.is_resolved = launched.is_read = True
        self._forget_what_is_over()

    def resolve(self, *, wait: bool = False) -> None:
        """Bring the lanes up to date with rounds that were committed by their own counts.

        Those whose result is not known yet stay behind unless ``wait``.
        """
        for launched in list(self._launched.values()):
            if launched.is_settled and not launched.is_resolved and (wait or launched.result is not None):
                self._advance(launched, launched.outcome().columns)
                launched.is_resolved = True
        self._forget_what_is_over()

    def _advance(self, launched: Launched, columns: Int32s) -> None:
        starts, deltas = launched.outcome().starts, launched.round.rope_deltas
        for b, slot in enumerate(launched.round.slots.tolist()):
            lane, n = self.lanes[slot], int(columns[b])
            lane.length += n
            if n:
                lane.position = (int(starts[b] + n - 1 + deltas[b]),) * 3

    def _forget_what_is_over(self) -> None:
        for serial, one in list(self._launched.items()):
            if one.is_settled and one.is_read and one.is_resolved:
                del self._launched[serial]
