"""What a caller holds of a request: its events, its end, and the means to end it early."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from ninfer_format.errors import EngineStoppedError
from ninfer_runtime.engine.sequence import Finish, FinishReason, Request, TokenEvent

Listener = Callable[["Handle", tuple[TokenEvent, ...]], None]
"""Called in the engine's worker with the new events after each step that has some, and once with () when done."""

_BY_LENGTH = (FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_CAPACITY)


class Driver(Protocol):
    """What a handle needs of its engine."""

    def advance(self, handle: "Handle") -> None:
        """Return once the handle has new events or is done: by working, or by waiting for who does."""

    def withdraw(self, handle: "Handle") -> None:
        """End the handle's sequence and give back what it holds; returns when that is done."""


class Handle:
    """The token events of one request, in order; ``finish`` is set once the iteration has ended.

    A consumer that has seen enough calls ``stop`` (a stop string) or ``cancel``, from any thread; the iteration then
    ends. ``close`` gives everything back at once and is safe to call twice. An error that ended the request
    (NonFiniteError, QueueTimeoutError, EngineStoppedError) is raised while iterating; the engine stays usable unless
    it says otherwise. With a listener, events go there instead, and ``finish`` or ``error`` is set when ``done`` is.
    """

    def __init__(self, request: Request, n_prompt: int, driver: Driver, listener: Listener | None = None) -> None:
        self.request = request
        self.n_prompt = n_prompt
        self.listener = listener
        self.n_prefilled = 0
        """Prompt tokens that are in the state so far, reused ones included."""
        self.asked_to_end: FinishReason | None = None
        """Set by ``stop`` and ``cancel``; the engine looks at it at every boundary."""
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        """Guards what follows, and tells waiting consumers of news."""
        self._driver = driver
        self._events: deque[TokenEvent] = deque()
        self._n_taken = 0
        self._finish: Finish | None = None
        self._done = False
        self._is_over = False

    # ---- for the consumer --------------------------------------------------------------------
    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        while True:
            with self.changed:
                if self.asked_to_end is not None:
                    self._events.clear()
                if self._events:
                    self._n_taken += 1
                    return self._events.popleft()
                if self._done:
                    break
            self._driver.advance(self)
        self._is_over = True
        if self.error is not None:
            raise self.error
        raise StopIteration

    @property
    def n_generated(self) -> int:
        """Tokens the consumer has; with a listener, all that were emitted."""
        return self._n_taken

    @property
    def done(self) -> bool:
        """Nothing more will come from the engine."""
        return self._done

    @property
    def has_news(self) -> bool:
        """An event can be taken, or the handle is done."""
        return self._done or bool(self._events)

    @property
    def finish(self) -> Finish | None:
        """The end, once the consumer has seen it. None for a request that an error ended."""
        if self._finish is None or not (self._is_over or self.listener is not None):
            return None
        if self.listener is not None:
            return self._finish
        # The consumer may have left before the engine's end, or found its own in the last token there could be.
        asked, reason = self.asked_to_end, self._finish.reason
        if asked is not None and (self._n_taken < self._finish.n_generated or reason in _BY_LENGTH):
            reason = asked
        return replace(self._finish, reason=reason, n_generated=self._n_taken)

    def stop(self, reason: FinishReason = FinishReason.STOP_STRING) -> None:
        """End after the event taken last; that event stays part of the result."""
        if self.asked_to_end is None:
            self.asked_to_end = reason

    def cancel(self) -> None:
        """End at the next boundary: after the prefill chunk or the round in progress."""
        self.stop(FinishReason.CANCELLED)

    def close(self) -> None:
        """Give up the rest; without a finish so far the request counts as cancelled."""
        if not self._is_over:
            self.cancel()
            self._driver.withdraw(self)
            self._events.clear()
            self._is_over = True

    # ---- for the engine ----------------------------------------------------------------------
    def deliver(self, events: tuple[TokenEvent, ...]) -> None:
        """New events, in order."""
        if self.listener is not None:
            self._n_taken += len(events)
            self.listener(self, events)
            return
        with self.changed:
            self._events.extend(events)
            self.changed.notify_all()

    def end(self, finish: Finish | None, error: BaseException | None = None) -> None:
        """Nothing follows. A second call changes nothing."""
        if self._done:
            return
        with self.changed:
            self._finish, self.error = finish, error
            self._done = True
            self.changed.notify_all()
        if self.listener is not None:
            self.listener(self, ())

    def wait(self, seconds: float | None = None) -> None:
        """Block until there is news, or the time is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.has_news, seconds)


def stopped(why: str) -> EngineStoppedError:
    """The error of requests that an engine gives up."""
    return EngineStoppedError(f"the engine runs nothing any more: {why}")
