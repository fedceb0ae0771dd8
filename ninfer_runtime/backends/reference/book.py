"""Rounds between launch and end: which are open, which may follow which, and what each left to commit."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from ninfer_runtime.backends.base import MAX_ROUNDS_IN_FLIGHT, Int32s, Round, RoundResult, RowStatus, Ticket
from ninfer_runtime.backends.checks import require

from .state import RowRecord


@dataclass(slots=True)
class Launched:
    """A launched round. ``budgets`` int32 [B] are those in force at its start; a frozen row has no record."""

    round: Round
    result: RoundResult
    records: list[RowRecord | None]
    budgets: Int32s
    is_read: bool = False
    is_settled: bool = False

    def fold(self, columns: Int32s | None) -> Iterator[tuple[RowRecord, int, Int32s]]:
        """(record, columns to fold, tokens emitted from them) of each row a commit changes; ContractError if it may
        not."""
        wanted = self.result.columns if columns is None else columns
        require(wanted.shape == self.result.columns.shape, f"commit names {wanted.shape} rows of {self.round.n_rows}")
        for b, record in enumerate(self.records):
            limit = 0 if record is None else record.n_columns
            require(0 <= wanted[b] <= limit, f"commit of {wanted[b]} columns in row {b}, which evaluated {limit}")
        return self._folded_rows(wanted)

    def _folded_rows(self, wanted: Int32s) -> Iterator[tuple[RowRecord, int, Int32s]]:
        for b, record in enumerate(self.records):
            n, emitted = int(wanted[b]), int(self.result.emitted[b])
            if record is not None and n > 0:
                counted = min(n, emitted) if self.round.verify else emitted * (n == record.n_columns)
                yield record, n, self.result.token_ids[b, :counted]

    def continuation(self, b: int) -> tuple[int, int, int] | None:
        """(first token, start, budget) of a round that follows in row ``b``; None when the row has ended."""
        result = self.result
        if result.status[b] is not RowStatus.RUNNING:
            return None
        emitted = int(result.emitted[b])
        token = int(result.token_ids[b, emitted - 1])
        return token, int(result.starts[b] + result.columns[b]), int(self.budgets[b]) - emitted


class RoundBook:
    """Tickets of one program."""

    def __init__(self) -> None:
        self._launched: dict[int, Launched] = {}
        self._serials = count(1)

    def open(self) -> list[Launched]:
        """Rounds that are neither committed nor rolled back."""
        return [launched for launched in self._launched.values() if not launched.is_settled]

    def busy_slots(self) -> set[int]:
        """Slots that take part in an open round."""
        return {int(slot) for launched in self.open() for slot in launched.round.slots}

    def find(self, ticket: Ticket) -> Launched:
        """The round of a ticket that is not over."""
        require(ticket.serial in self._launched, f"round {ticket.serial} is over, or was never launched here")
        return self._launched[ticket.serial]

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
        """Name a launched round."""
        ticket = Ticket(next(self._serials))
        self._launched[ticket.serial] = launched
        return ticket

    def read(self, ticket: Ticket) -> RoundResult:
        """Its result, once."""
        launched = self.find(ticket)
        require(not launched.is_read, f"round {ticket.serial} was read already")
        launched.is_read = True
        self._forget_what_is_over()
        return launched.result

    def settle(self, launched: Launched, *, give_up: bool = False) -> None:
        """Note that a round was committed or rolled back; with ``give_up`` nobody will read it."""
        launched.is_settled = True
        launched.is_read |= give_up
        self._forget_what_is_over()

    def _forget_what_is_over(self) -> None:
        over = [serial for serial, one in self._launched.items() if one.is_settled and one.is_read]
        for serial in over:
            del self._launched[serial]
