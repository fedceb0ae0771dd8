"""From the engine's worker thread to the event loop: however many pieces wait, the loop is woken once for all."""

import asyncio
import threading
from typing import Protocol, TypeVar

P_contra = TypeVar("P_contra", contravariant=True)


class Addressee(Protocol[P_contra]):
    """Whoever gets pieces, in the loop's thread."""

    def take(self, piece: P_contra) -> None:
        """Take one piece. Must not block."""


class Mailbox:
    """Pieces on their way into the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: list[tuple[Addressee[object], object]] = []
        self._is_called = False

    def post(self, addressee: "Addressee[object]", piece: object) -> None:
        """Any thread: hand ``piece`` over. Pieces of one thread arrive in order."""
        with self._lock:
            self._waiting.append((addressee, piece))
            wake, self._is_called = not self._is_called, True
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody is left to read
                self._waiting.clear()

    def _deliver(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._is_called = False
        for addressee, piece in waiting:
            addressee.take(piece)
