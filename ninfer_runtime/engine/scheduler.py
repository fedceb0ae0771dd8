"""Who runs next: a queue with deadlines, admission in order, and prompts that alternate with rounds.

Only decisions; nothing here knows a program. Admission is the start of a prompt: one prompt at a time is processed, so
what the one before kept for reuse is there for the next.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from ninfer_format.errors import QueueTimeoutError
from ninfer_runtime.backends.base import Int32s
from ninfer_runtime.engine.handle import Handle
from ninfer_runtime.engine.lane import Lane

MAX_PASSES = 4
"""Requests that may be admitted before the head of the queue when only they fit."""
SMALL_SHARE = 8
"""A request may pass only if it needs at most one part in this many of the pool."""


class Move(Enum):
    """What a step does."""

    IDLE = auto()
    CHUNK = auto()
    ROUND = auto()


@dataclass(slots=True)
class Waiting:
    """A request in the queue: ``prompt`` int32 [n], ``n_pages`` it needs to run to its end, and until when it may wait
    (None: for ever; seconds of the scheduler's clock)."""

    handle: Handle
    prompt: Int32s
    n_pages: int
    queued_at: float
    deadline: float | None = None
    n_passed: int = 0
    """Requests admitted before it while it was the head."""


class Scheduler:
    """The queue and the order of work."""

    def __init__(self, n_slots: int, n_pages: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._small = max(1, n_pages // SMALL_SHARE)
        self._queue: deque[Waiting] = deque()
        self._free_slots = list(range(n_slots - 1, -1, -1))
        self.lanes: list[Lane] = []
        """Admitted sequences, oldest first."""
        self._last = Move.IDLE

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._queue and not self.lanes

    @property
    def waiting(self) -> Iterator[Waiting]:
        """The queue in order."""
        return iter(self._queue)

    def add(self, waiting: Waiting) -> None:
        """Queue a request."""
        self._queue.append(waiting)

    def sweep(self) -> list[tuple[Waiting, QueueTimeoutError | None]]:
        """Take out of the queue what was cancelled or has waited too long."""
        now, kept = self._clock(), deque[Waiting]()
        out: list[tuple[Waiting, QueueTimeoutError | None]] = []
        for waiting in self._queue:
            if waiting.handle.asked_to_end is not None:
                out.append((waiting, None))
            elif waiting.deadline is not None and now >= waiting.deadline:
                seconds = now - waiting.queued_at
                out.append((waiting, QueueTimeoutError(f"the request waited {seconds:.1f} s for a free place")))
            else:
                kept.append(waiting)
        self._queue = kept
        return out

    def candidates(self) -> Iterator[tuple[Waiting, int]]:
        """Requests that may be admitted now, in order of preference, each with the slot it would get."""
        if not self._free_slots or any(lane.is_prefilling for lane in self.lanes):
            return
        slot = self._free_slots[-1]
        for i, waiting in enumerate(tuple(self._queue)):
            if i == 0 or (self._queue[0].n_passed < MAX_PASSES and waiting.n_pages <= self._small):
                yield waiting, slot

    def admit(self, waiting: Waiting, lane: Lane) -> None:
        """``waiting`` runs as ``lane`` from now on."""
        if waiting is not self._queue[0]:
            self._queue[0].n_passed += 1
        self._queue.remove(waiting)
        self._free_slots.remove(lane.slot)
        self.lanes.append(lane)

    def retire(self, lane: Lane) -> None:
        """The lane is over; its slot is free."""
        self.lanes.remove(lane)
        self._free_slots.append(lane.slot)

    def next_move(self) -> Move:
        """One chunk and one round in turn while there is work for both."""
        has_chunk = any(lane.is_prefilling for lane in self.lanes)
        has_round = any(lane.is_ready for lane in self.lanes)
        if has_chunk and (not has_round or self._last is Move.ROUND):
            self._last = Move.CHUNK
        else:
            self._last = Move.ROUND if has_round else Move.IDLE
        return self._last

    @property
    def prefilling(self) -> Lane | None:
        """The lane whose prompt (or forced text) is next."""
        return next((lane for lane in self.lanes if lane.is_prefilling), None)

    @property
    def ready(self) -> list[Lane]:
        """Lanes for the next round, oldest first."""
        return [lane for lane in self.lanes if lane.is_ready]
