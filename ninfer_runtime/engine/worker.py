"""The thread that drives an engine when requests come from other threads."""

import threading
import time
from collections import deque
from collections.abc import Callable

from ninfer_runtime.engine.core import EngineCore

IDLE_SECONDS = 0.002
"""Pause while requests wait and none of them can start yet."""


class Worker:
    """Runs a core's steps while there is work, and calls handed over by ``post`` between two of them."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: deque[Callable[[], None]] = deque()
        self._news = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ninfer-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, after ``stop`` or a fault."""
        return self._thread.is_alive()

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` in the worker between two steps."""
        with self._news:
            self._calls.append(call)
            self._news.notify()

    def stop(self) -> None:
        """End after the step in progress and wait for that; calls posted before are run."""
        with self._news:
            self._stopping = True
            self._news.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._core.program.enter_thread()
        except Exception as error:
            self._core.fail(error)
        while True:
            with self._news:
                self._news.wait_for(lambda: self._calls or self._stopping or not self._core.is_idle)
                calls, self._calls = self._calls, deque()
                stopping = self._stopping
            for call in calls:
                call()
            if stopping or self._core.fault is not None:
                return
            try:
                if not self._core.step() and not self._core.is_idle:
                    time.sleep(IDLE_SECONDS)
            except Exception:  # the core has ended every request with it, and says so in ``fault``
                return
