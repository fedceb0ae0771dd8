"""Rounds of the ready lanes: launched one ahead where that gains anything, read, handed out, committed.

The state that is committed is exact: a row that ends or bends inside a round folds only what it emitted before that.
With a round in flight the one before it has been committed by its own counts, and what the host finds in it costs the
row its part of the round in flight.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_runtime.backends.base import (
    Int32s,
    Logprobs,
    Program,
    Round,
    RoundResult,
    RowStatus,
    Ticket,
    following,
    page_table,
)
from ninfer_runtime.engine.lane import Lane
from ninfer_runtime.engine.masks import RoundMasks, have_grammars, masks_of, may_come_late, note_left, note_masked_round
from ninfer_runtime.engine.sequence import TokenEvent
from ninfer_runtime.engine.stats import Totals

Deliver = Callable[[Lane, tuple[TokenEvent, ...]], None]


@dataclass(slots=True)
class _Flight:
    """A launched round that is neither read nor committed. ``late``: its masks, where it was launched without."""

    round: Round
    ticket: Ticket
    lanes: tuple[Lane, ...]
    late: RoundMasks | None = None


class Rounds:
    """Drives a program's rounds; ``deliver`` gets the events of each row."""

    def __init__(self, program: Program, max_drafts: int, totals: Totals, deliver: Deliver) -> None:
        self._program = program
        self._max_drafts = max_drafts
        self._totals = totals
        self._deliver = deliver
        self._flight: _Flight | None = None
        self._words = -(-program.model.spec.text.vocab_rows // 32)

    @property
    def in_flight(self) -> tuple[Lane, ...]:
        """Lanes whose slots take part in an open round."""
        return self._flight.lanes if self._flight is not None else ()

    def step(self, ready: Sequence[Lane]) -> None:
        """One round of ``ready``, or the end of the one in flight when its rows are no longer these."""
        if self._flight is not None and tuple(ready) != self._flight.lanes:
            self.settle()
            return
        if self._flight is None:
            self._flight = self._launch(self._build(ready), tuple(ready))
            if self._flight.round.logits_mask is None and have_grammars(ready):
                # While the device works; its own drafts are those the host knows.
                held = [int(n) - 1 for n in self._flight.round.n_columns]
                self._flight.late = masks_of(ready, held, self._words)
        if not self._may_run_ahead(self._flight):
            self.settle()
            return
        first = self._flight
        ahead = self._follow(first)
        second = self._flight = self._launch(ahead, first.lanes)
        result = self._program.read(first.ticket)
        kept = self._hand_out(first, result)
        for b, lane in enumerate(first.lanes):
            # It was committed by its own counts, whatever the host has found in it since.
            lane.n_folded += int(result.columns[b])
            lane.is_exact &= int(kept[b]) == int(result.columns[b])
        over = [lane.ended is not None or lane.is_prefilling for lane in first.lanes]
        if any(over):
            self._flight = None
            self._commit(second, over)

    def settle(self) -> None:
        """Read and commit the round in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._commit(flight)

    def abandon(self) -> None:
        """Forget the round in flight; its rows stay as they were before it."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._program.rollback(flight.ticket)

    # ---- inside ------------------------------------------------------------------------------
    def _commit(self, flight: _Flight, over: Sequence[bool] | None = None) -> None:
        """Read a round, hand it out and commit what belongs to the sequences; nothing for rows that are ``over``."""
        result = self._program.read(flight.ticket)
        columns = self._hand_out(flight, result, over)
        self._program.commit(flight.ticket, columns)
        for b, lane in enumerate(flight.lanes):
            lane.n_folded += int(columns[b])

    def _launch(self, round_: Round, lanes: tuple[Lane, ...]) -> _Flight:
        flight = _Flight(round_, self._program.launch(round_), lanes)
        self._totals.rounds += 1
        self._totals.row_rounds += len(lanes)
        return flight

    def _may_run_ahead(self, flight: _Flight) -> bool:
        """Launching one more now is exact, and not all of it would be thrown away."""
        if not self._program.runs_ahead or have_grammars(flight.lanes):
            return False
        if any(lane.handle.asked_to_end is not None for lane in flight.lanes):
            return False
        # Text forced behind a token inside the round would need a state that is gone once the next one is launched.
        if flight.round.token_ids.shape[1] > 1 and any(lane.may_be_forced for lane in flight.lanes):
            return False
        return any(lane.budget > 1 for lane in flight.lanes)

    def _follow(self, flight: _Flight) -> Round:
        """The round behind one in flight. What that emits is not known yet: the most counts."""
        if not self._max_drafts:
            return following(flight.round, flight.ticket)
        asked = flight.round.n_drafts if flight.round.n_drafts is not None else np.zeros(len(flight.lanes), np.int32)
        room = np.array(
            [
                # Behind the most the row may emit, a column needs a place that is reserved.
                lane.n_places - lane.n_folded - int(flight.round.n_columns[b]) - 1
                for b, lane in enumerate(flight.lanes)
            ],
            np.int32,
        )
        n_columns = 1 + np.clip(np.minimum(asked, room), 0, None).astype(np.int32)
        wanted = np.array([lane.drafting.wanted() for lane in flight.lanes], np.int32)
        return following(flight.round, flight.ticket, n_columns, wanted)

    def _build(self, lanes: Sequence[Lane]) -> Round:
        """A round from what the host knows."""
        held = [min(len(lane.drafts), lane.budget - 1) for lane in lanes]
        masks = None
        if have_grammars(lanes) and not may_come_late(lanes):
            masks = masks_of(lanes, held, self._words)
            held = list(masks.held)
            for lane in lanes:
                note_masked_round(lane)
        q = 1 + max(held)
        token_ids = np.zeros((len(lanes), q), np.int32)
        for b, lane in enumerate(lanes):
            token_ids[b, 0] = lane.tokens[-1]
            token_ids[b, 1 : 1 + held[b]] = lane.drafts[: held[b]]
        wanted = None
        if self._max_drafts:
            wanted = _ints(max(0, min(lane.drafting.wanted(), lane.budget - 2)) for lane in lanes)
        tops = [lane.handle.request.n_top_logprobs for lane in lanes]
        asked = [n for n in tops if n is not None]
        width = max(len(lane.pages) for lane in lanes)
        return Round(
            slots=_ints(lane.slot for lane in lanes),
            token_ids=token_ids,
            n_columns=_ints(1 + n for n in held),
            starts=_ints(lane.n_folded for lane in lanes),
            rope_deltas=np.zeros(len(lanes), np.int32),
            pages=page_table([lane.pages for lane in lanes], width),
            sampling=tuple(lane.sampling for lane in lanes),
            stop_ids=tuple(lane.stop_ids for lane in lanes),
            budget=_ints(lane.budget for lane in lanes),
            logits_mask=None if masks is None else np.ascontiguousarray(masks.words[:, :q]),
            n_top_logprobs=max(asked) if asked else None,
            # Drafts that a row does not evaluate take part in its draw, or what is cut would bend the distribution.
            own_drafts=self._max_drafts > 0,
            n_drafts=wanted,
        )

    def _hand_out(self, flight: _Flight, result: RoundResult, skip: Sequence[bool] | None = None) -> Int32s:
        """Give each row its tokens; int32 [B] of the columns that belong to the sequence after what was found."""
        columns = result.columns.copy()
        for b, lane in enumerate(flight.lanes):
            if lane.ended is not None or (skip is not None and skip[b]) or result.status[b] is RowStatus.FROZEN:
                columns[b] = 0
                continue
            if lane.handle.asked_to_end is not None:
                lane.ended = lane.handle.asked_to_end
                columns[b] = 0
                continue
            columns[b] = self._hand_out_row(b, lane, result, flight.late)
        return columns

    def _hand_out_row(self, b: int, lane: Lane, result: RoundResult, late: RoundMasks | None) -> int:
        lane.n_rounds += 1
        emitted, accepted = int(result.emitted[b]), int(result.accepted[b])
        n_allowed = emitted if late is None else late.n_allowed(b, result.token_ids[b, :emitted])
        has_left = n_allowed < emitted
        if has_left:
            note_left(lane)
            accepted = min(accepted, n_allowed)
        if result.drafted is not None:
            drafted = int(result.drafted[b])
            lane.drafting.note(drafted, accepted)
            self._totals.note_drafts(drafted, accepted)
        lane.drafts = ()
        if result.drafts is not None and result.n_drafts is not None and not has_left:
            lane.drafts = tuple(result.drafts[b, : result.n_drafts[b]].tolist())
        events: list[TokenEvent] = []
        n_taken = 0
        for column in range(n_allowed):
            new = events_of(lane, int(result.token_ids[b, column]), result.logprobs, (b, column))
            events += new
            n_taken = column + 1
            if lane.ended is not None or len(new) > 1:
                break
        if lane.ended is None and not has_left and result.status[b] is RowStatus.NOT_FINITE:
            lane.ended = lane.not_finite()
        self._totals.generated_tokens += len(events)
        if events:
            self._deliver(lane, tuple(events))
        return n_taken


def events_of(lane: Lane, token_id: int, logprobs: Logprobs | None, at: tuple[int, ...]) -> list[TokenEvent]:
    """Events of one drawn token: its own, and those of what its reader forces behind it."""
    n_top = lane.handle.request.n_top_logprobs
    if n_top is None or logprobs is None:
        event = lane.take(token_id)
    else:
        pairs = zip(logprobs.top_ids[at][:n_top].tolist(), logprobs.top[at][:n_top].tolist(), strict=True)
        event = lane.take(token_id, float(logprobs.chosen[at]), tuple(pairs))
    return [event, *lane.forced_events(event.index + 1)]


def _ints(values: Iterable[int]) -> Int32s:
    return np.array(list(values), np.int32)
