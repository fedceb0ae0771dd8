"""A program that says a given text and costs nothing, so that what is measured or tested around it is all there is.

The token at index ``i`` of every sequence is ``script[i % len(script)]``, whatever came before; where a mask forbids
it, one of those that are allowed. Chunks and rounds take as long as they are told to; errors come when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Self

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
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.memory_plan import program_limits
from ninfer_runtime.models.binder import BoundModel

_NO_LOGITS = np.zeros((0, 0), np.float32)


class ScriptedProgram:
    """``backends.base.Program``.

    chunk_seconds, round_seconds   how long each call sleeps
    fails                          set to an exception: the next chunk or round raises it, as a device that is lost
    not_finite_at                  the draw of this index finds NaN
    on_draw                        called with the index of every token drawn
    """

    name = "scripted"
    notes: tuple[tuple[str, str], ...] = ()
    runs_ahead = False

    def __init__(self, model: BoundModel, limits: ProgramLimits, script: Sequence[int]) -> None:
        self.model = model
        self.plan = MemoryPlan(limits, ProgramOptions(), 0, 0, 0, 0, 0, 0)
        self.script = np.array(script, np.int32)
        self.chunk_seconds = 0.0
        self.round_seconds = 0.0
        self.fails: BaseException | None = None
        self.not_finite_at: int | None = None
        self.on_draw: Callable[[int], None] | None = None
        self.n_chunks = 0
        self.n_rounds = 0
        self._lengths = [0] * limits.n_slots
        self._snapshots: dict[int, tuple[int, Place]] = {}
        self._serials = count(1)
        self._open: dict[int, tuple[Round, RoundResult]] = {}

    @classmethod
    def for_config(cls, model: BoundModel, config: EngineConfig, script: Sequence[int]) -> Self:
        """A program as large as ``config`` asks for."""
        return cls(model, program_limits(config, model.spec.architecture), script)

    def enter_thread(self) -> None:
        """Any thread will do."""

    # ---- slots -------------------------------------------------------------------------------
    def length(self, slot: int) -> int:
        """Tokens in the slot."""
        return self._lengths[slot]

    def reset(self, slot: int) -> None:
        """Length 0."""
        self._lengths[slot] = 0

    def set_output_counts(self, slot: int, token_ids: Int32s) -> None:
        """Nothing is counted."""

    def snapshot(self, slot: int, place: Place = "device") -> StateSnapshot:
        """A length, kept."""
        return self._saved(self._lengths[slot], place)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """The kept length."""
        self._lengths[slot] = self._snapshots[snapshot.serial][0]

    def release(self, snapshot: StateSnapshot) -> None:
        """Forget it."""
        del self._snapshots[snapshot.serial]

    def relocate(self, snapshot: StateSnapshot, place: Place) -> StateSnapshot:
        """The same under another name."""
        length, _ = self._snapshots.pop(snapshot.serial)
        return self._saved(length, place)

    def _saved(self, length: int, place: Place) -> StateSnapshot:
        saved = StateSnapshot(next(self._serials), length, place)
        self._snapshots[saved.serial] = (length, place)
        return saved

    def copy_pages(self, sources: Int32s, targets: Int32s) -> None:
        """Pages hold nothing."""

    # ---- prompts and rounds ------------------------------------------------------------------
    def prefill(self, chunk: PrefillChunk) -> PrefillResult:
        """Take a chunk; say what follows it."""
        self.n_chunks += 1
        self._work(self.chunk_seconds)
        end = chunk.start + len(chunk.token_ids)
        self._lengths[chunk.slot] = end
        if chunk.sampling is None or end == self.not_finite_at:
            return PrefillResult(None, _NO_LOGITS, None, None, chunk.sampling is None)
        logprobs = None
        if (n := chunk.n_top_logprobs) is not None:
            logprobs = Logprobs(np.float32(-0.5), np.arange(n, dtype=np.int32), np.full(n, -1, np.float32))  # type: ignore[arg-type]
        return PrefillResult(self._token(end, chunk.logits_mask), _NO_LOGITS, None, logprobs, True)

    def launch(self, round_: Round) -> Ticket:
        """One token per row."""
        self.n_rounds += 1
        self._work(self.round_seconds)
        b = round_.n_rows
        ids, emitted = np.zeros((b, 1), np.int32), np.ones(b, np.int32)
        status = [RowStatus.RUNNING] * b
        for row, start in enumerate(round_.starts.tolist()):
            if start + 1 == self.not_finite_at:
                emitted[row], status[row] = 0, RowStatus.NOT_FINITE
                continue
            mask = round_.logits_mask
            ids[row, 0] = token = self._token(start + 1, None if mask is None else mask[row, 0])
            if token in round_.stop_ids[row]:
                status[row] = RowStatus.STOP_ID
            elif round_.budget[row] == 1:
                status[row] = RowStatus.BUDGET
        logprobs = None
        if (n := round_.n_top_logprobs) is not None:
            tops = np.broadcast_to(np.arange(n, dtype=np.int32), (b, 1, n))
            logprobs = Logprobs(np.full((b, 1), -0.5, np.float32), tops, np.full((b, 1, n), -1, np.float32))
        zeros = np.zeros(b, np.int32)
        result = RoundResult(ids, zeros, emitted, emitted, tuple(status), round_.starts, logprobs)
        ticket = Ticket(next(self._serials))
        self._open[ticket.serial] = (round_, result)
        return ticket

    def read(self, ticket: Ticket) -> RoundResult:
        """What was said."""
        return self._open[ticket.serial][1]

    def commit(self, ticket: Ticket, columns: Int32s | None = None) -> None:
        """Lengths grow."""
        round_, result = self._open.pop(ticket.serial)
        grown = result.columns if columns is None else columns
        for slot, start, n in zip(round_.slots.tolist(), round_.starts.tolist(), grown.tolist(), strict=True):
            self._lengths[slot] = start + n

    def rollback(self, ticket: Ticket) -> None:
        """As if it had not been."""
        del self._open[ticket.serial]

    def close(self) -> None:
        """Nothing is held."""

    def _token(self, index: int, mask: Uint32s | None) -> int:
        if self.on_draw is not None:
            self.on_draw(index)
        token = int(self.script[index % len(self.script)])
        if mask is None or mask[token // 32] >> (token % 32) & 1:
            return token
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return int(allowed[index % len(allowed)])

    def _work(self, seconds: float) -> None:
        if self.fails is not None:
            raise self.fails
        if seconds:
            time.sleep(seconds)
