"""A program whose state is the text itself: the next token is a hash of every token before it.

Nothing is approximate: a wrong state, a page that somebody else wrote, a round committed by the wrong count, or a draft
taken over by mistake changes the text at once. Keys and values are the tokens, kept in the pages the engine names, and
every draw checks that the pages hold the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ninfer_runtime.backends.base import (
    Int32s,
    Logprobs,
    MemoryPlan,
    Place,
    PrefillChunk,
    PrefillResult,
    ProgramLimits,
    ProgramOptions,
    Round,
    RoundResult,
    RowStatus,
    StateSnapshot,
    Ticket,
    Uint32s,
)
from ninfer_runtime.backends.checks import check_pages, require
from ninfer_runtime.config import PAGE_TOKENS, SamplingParams
from ninfer_runtime.models.binder import BoundModel

VOCAB = 1000
_PRIME = 1_000_003


def next_token(history: Sequence[int], params: SamplingParams) -> int:
    """What follows a text; sampled rows depend on their seed, and penalties on nothing (the counts are checked)."""
    value = 17 if params.is_greedy else int(params.seed or 0) % _PRIME + 29
    for token in history:
        value = (value * 131 + int(token) + 7) % _PRIME
    return value % VOCAB


def continuation(
    prompt: Sequence[int], params: SamplingParams, n: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The ``n`` tokens that follow, up to and including the first stop id."""
    text = [int(t) for t in prompt]
    out: list[int] = []
    while len(out) < n and not (out and out[-1] in stop_ids):
        out.append(next_token([*text, *out], params))
    return out


def allowed(token: int, mask: Uint32s | None) -> int:
    """The token, or the next larger one that the mask allows, beginning again at 0."""
    if mask is None:
        return token
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")[:VOCAB]
    return token + int(np.roll(bits, -token).argmax()) - (VOCAB if not bits[token:].any() else 0)


@dataclass
class _Slot:
    history: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


@dataclass
class _Launched:
    round: Round
    inputs: list[list[int]]
    result: RoundResult
    budgets: list[int]
    is_read: bool = False
    is_settled: bool = False


class HistoryProgram:
    """``backends.base.Program``.

    ahead         what ``runs_ahead`` says
    draft_errors  of 10 drafts so many are wrong
    """

    name = "history"
    notes: tuple[tuple[str, str], ...] = ()

    def __init__(self, limits: ProgramLimits, *, ahead: bool = False, draft_errors: int = 3) -> None:
        self.plan = MemoryPlan(limits, ProgramOptions(), 0, 0, 0, 0, 0, 0)
        text = SimpleNamespace(vocab_rows=VOCAB, hidden=8)
        spec = SimpleNamespace(text=text, n_addressable=VOCAB, max_position=None)
        self.model = cast(BoundModel, SimpleNamespace(spec=spec, artifact=None))
        self.runs_ahead = ahead
        self.slots = [_Slot() for _ in range(limits.n_slots)]
        self.pages = np.full((limits.n_pages, PAGE_TOKENS), -1, np.int64)
        self.snapshots: dict[int, tuple[list[int], Place]] = {}
        self.n_prefilled = 0
        self.fails_at: int | None = None
        self.not_finite_at: int | None = None
        self._draft_errors = draft_errors
        self._serials = count(1)
        self._launched: dict[int, _Launched] = {}

    def enter_thread(self) -> None:
        """Any thread will do."""

    # ---- slots -------------------------------------------------------------------------------
    def length(self, slot: int) -> int:
        return len(self.slots[slot].history)

    def reset(self, slot: int) -> None:
        self._check_free(slot)
        self.slots[slot] = _Slot()

    def set_output_counts(self, slot: int, token_ids: Int32s) -> None:
        self._check_free(slot)
        self.slots[slot].counted = token_ids.tolist()

    def snapshot(self, slot: int, place: Place = "device") -> StateSnapshot:
        self._check_free(slot)
        limits = self.plan.limits
        limit = limits.device_snapshots if place == "device" else limits.host_snapshots
        require(sum(p == place for _, p in self.snapshots.values()) < limit, f"more than {limit} {place} snapshots")
        saved = StateSnapshot(next(self._serials), self.length(slot), place)
        self.snapshots[saved.serial] = (list(self.slots[slot].history), place)
        return saved

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        self._check_free(slot)
        self.slots[slot] = _Slot(list(self.snapshots[snapshot.serial][0]))

    def release(self, snapshot: StateSnapshot) -> None:
        del self.snapshots[snapshot.serial]

    def relocate(self, snapshot: StateSnapshot, place: Place) -> StateSnapshot:
        history, _ = self.snapshots.pop(snapshot.serial)
        limits = self.plan.limits
        limit = limits.device_snapshots if place == "device" else limits.host_snapshots
        require(sum(p == place for _, p in self.snapshots.values()) < limit, f"more than {limit} {place} snapshots")
        moved = StateSnapshot(next(self._serials), len(history), place)
        self.snapshots[moved.serial] = (history, place)
        return moved

    def copy_pages(self, sources: Int32s, targets: Int32s) -> None:
        self.pages[targets] = self.pages[sources]

    # ---- prompts -----------------------------------------------------------------------------
    def prefill(self, chunk: PrefillChunk) -> PrefillResult:
        self._check_free(chunk.slot)
        slot, limits = self.slots[chunk.slot], self.plan.limits
        require(1 <= len(chunk.token_ids) <= limits.prefill_chunk, f"a chunk of {len(chunk.token_ids)} tokens")
        require(chunk.start == len(slot.history), f"the chunk starts at {chunk.start} of {len(slot.history)}")
        check_pages("pages", chunk.pages, chunk.start + len(chunk.token_ids), limits)
        self._write(chunk.pages, chunk.start, chunk.token_ids.tolist())
        slot.history += chunk.token_ids.tolist()
        slot.drafts = []
        self.n_prefilled += len(chunk.token_ids)
        self._check_pages(chunk.pages, slot.history)
        if chunk.sampling is None:
            return PrefillResult(None, np.zeros((0, VOCAB), np.float32), None, None, True)
        if self.not_finite_at == len(slot.history):
            return PrefillResult(None, np.zeros((0, VOCAB), np.float32), None, None, False)
        token = allowed(next_token(slot.history, chunk.sampling), chunk.logits_mask)
        slot.counted.append(token)
        slot.drafts = self._draft([*slot.history, token], chunk.sampling, chunk.n_drafts)
        logprobs = None
        if (n := chunk.n_top_logprobs) is not None:
            logprobs = Logprobs(np.array(-token, np.float32), np.zeros(n, np.int32), np.zeros(n, np.float32))
        empty = np.zeros((0, VOCAB), np.float32)
        return PrefillResult(token, empty, None, logprobs, True, np.array(slot.drafts, np.int32))

    # ---- rounds ------------------------------------------------------------------------------
    def launch(self, round_: Round) -> Ticket:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                raise RuntimeError("the device is gone")
        require(len(self._launched) < 2, "two rounds are unread or uncommitted")
        previous = None
        if round_.previous is not None:
            previous = self._launched[round_.previous.serial]
            require(previous.round.slots.tolist() == round_.slots.tolist(), "the slots changed")
            self._fold(previous, previous.result.columns)
        else:
            require(all(one.is_settled for one in self._launched.values()), "a round is open")
        limits, b = self.plan.limits, round_.n_rows
        require(1 <= b <= limits.max_rows and round_.token_ids.shape[1] <= limits.max_columns, "a round too large")
        q = round_.token_ids.shape[1]
        ids, drafts = np.zeros((b, q), np.int32), np.zeros((b, max(1, limits.max_drafts)), np.int32)
        accepted, emitted, columns, starts, drafted, n_drafts, budgets = (np.zeros(b, np.int32) for _ in range(7))
        status, inputs = [RowStatus.FROZEN] * b, [[0]] * b
        for row in range(b):
            slot = self.slots[int(round_.slots[row])]
            n, anchor = int(round_.n_columns[row]), int(round_.token_ids[row, 0])
            start, budget = int(round_.starts[row]), int(round_.budget[row])
            if previous is not None:
                if previous.result.status[row] is not RowStatus.RUNNING:
                    continue
                anchor = int(previous.result.token_ids[row, previous.result.emitted[row] - 1])
                start = len(slot.history)
                budget = previous.budgets[row] - int(previous.result.emitted[row])
            require(start == len(slot.history), f"row {row} starts at {start}, its slot holds {len(slot.history)}")
            require(budget >= 1, f"row {row} has a budget of {budget}")
            given = slot.drafts[: n - 1] if round_.own_drafts else round_.token_ids[row, 1:n].tolist()
            known = [anchor, *given]
            check_pages("pages", round_.pages[row], start + len(known), limits)
            self._write(round_.pages[row], start, known)
            inputs[row], starts[row], drafted[row], budgets[row] = known, start, len(given), budget
            status[row], text, draws = RowStatus.RUNNING, list(slot.history), []
            for i, token in enumerate(known):
                text.append(token)
                if self.not_finite_at == len(text):
                    status[row] = RowStatus.NOT_FINITE
                    break
                self._check_pages(round_.pages[row], text)
                mask = None if round_.logits_mask is None else round_.logits_mask[row, i]
                draws.append(allowed(next_token(text, round_.sampling[row]), mask))
                right = i + 1 < len(known) and known[i + 1] == draws[-1]
                accepted[row] += right
                if draws[-1] in round_.stop_ids[row]:
                    status[row] = RowStatus.STOP_ID
                elif len(draws) >= budget:
                    status[row] = RowStatus.BUDGET
                if not right or status[row] is not RowStatus.RUNNING:
                    break
            ids[row, : len(draws)] = draws
            emitted[row] = columns[row] = len(draws)
            slot.drafts = []
            if round_.n_drafts is not None and status[row] is RowStatus.RUNNING:
                slot.drafts = self._draft([*text, draws[-1]], round_.sampling[row], int(round_.n_drafts[row]))
                n_drafts[row] = len(slot.drafts)
                drafts[row, : len(slot.drafts)] = slot.drafts
        logprobs = None
        if (n_top := round_.n_top_logprobs) is not None:
            shape = (b, q, n_top)
            logprobs = Logprobs(-ids.astype(np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.float32))
        asked = round_.n_drafts is not None
        result = RoundResult(
            ids,
            accepted,
            emitted,
            columns,
            tuple(status),
            starts,
            logprobs,
            drafted=drafted,
            drafts=drafts if asked else None,
            n_drafts=n_drafts if asked else None,
        )
        ticket = Ticket(next(self._serials))
        self._launched[ticket.serial] = _Launched(round_, inputs, result, budgets.tolist())
        return ticket

    def read(self, ticket: Ticket) -> RoundResult:
        launched = self._launched[ticket.serial]
        require(not launched.is_read, "read twice")
        launched.is_read = True
        self._forget()
        return replace(launched.result)

    def commit(self, ticket: Ticket, columns: Int32s | None = None) -> None:
        launched = self._launched[ticket.serial]
        require(not launched.is_settled, "committed twice")
        self._fold(launched, launched.result.columns if columns is None else columns)

    def rollback(self, ticket: Ticket) -> None:
        launched = self._launched[ticket.serial]
        launched.is_read = True
        self._fold(launched, np.zeros_like(launched.result.columns))

    def close(self) -> None:
        self._launched.clear()

    # ---- inside ------------------------------------------------------------------------------
    def _fold(self, launched: _Launched, columns: Int32s) -> None:
        for row, slot_id in enumerate(launched.round.slots.tolist()):
            n = int(columns[row])
            require(0 <= n <= launched.result.columns[row], f"commit of {n} columns")
            slot = self.slots[slot_id]
            slot.history += launched.inputs[row][:n]
            slot.counted += launched.result.token_ids[row, :n].tolist()
        launched.is_settled = True
        self._forget()

    def _forget(self) -> None:
        self._launched = {s: one for s, one in self._launched.items() if not (one.is_settled and one.is_read)}

    def _check_free(self, slot: int) -> None:
        busy = {int(s) for one in self._launched.values() if not one.is_settled for s in one.round.slots}
        require(slot not in busy, f"slot {slot} is part of an open round")

    def _draft(self, text: list[int], params: SamplingParams, n: int) -> list[int]:
        out: list[int] = []
        for _ in range(n):
            token = next_token([*text, *out], params)
            out.append((token + 1) % VOCAB if (token * 7 + len(text)) % 10 < self._draft_errors else token)
        return out

    def _write(self, pages: Int32s, start: int, token_ids: list[int]) -> None:
        for i, token in enumerate(token_ids, start):
            self.pages[int(pages[i // PAGE_TOKENS]), i % PAGE_TOKENS] = token

    def _check_pages(self, pages: Int32s, history: list[int]) -> None:
        rows = self.pages[pages[: -(-len(history) // PAGE_TOKENS)]].reshape(-1)[: len(history)]
        wrong = np.flatnonzero(rows != np.array(history))
        require(not wrong.size, f"pages hold another text from token {wrong[:1].tolist()} on")


def limits_of(**fields: Any) -> ProgramLimits:
    """Small limits."""
    values: dict[str, Any] = {
        "max_rows": 4, "max_columns": 4, "max_context": 256, "n_pages": 16, "n_slots": 4, "prefill_chunk": 128,
        "device_snapshots": 3, "host_snapshots": 3, "max_drafts": 3,
    }  # fmt: skip
    return ProgramLimits(**{**values, **fields})
