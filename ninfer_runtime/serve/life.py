"""From ready to gone: health, the drain that a first signal begins, the fault of a device, and the exit code.

starting → ready → draining → stopping        a signal; the second one skips the draining
              └──────→ failed → stopping      the engine's device failed
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from ninfer_format.errors import EngineStoppedError
from ninfer_runtime.serve.errors import ApiError

if TYPE_CHECKING:
    from ninfer_runtime.serve.service import Service

State = Literal["starting", "ready", "draining", "failed", "stopping"]

LOG = logging.getLogger("ninfer.serve")
TICK_SECONDS = 0.25
KEEP_ALIVE_SECONDS = 10.0
"""A stream without news for so long gets a comment, so that nothing on its way thinks it is dead."""
FAULT_SECONDS = 2.0
"""Between a fault and the exit: streams get their error event, health checks see it."""
EXIT_GOOD = 0
EXIT_FAULT = 1
EXIT_INTERRUPTED = 130


class Life:
    """The state of one server, and what changes it."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self.state: State = "starting"
        self.fault: str | None = None
        self.exit_code = EXIT_GOOD
        self.on_stop: Callable[[], None] = lambda: None
        """Called once, when the server is to stop listening and end."""
        self._until = 0.0
        self._ticker: asyncio.Task[None] | None = None

    # ---- asked by routes ---------------------------------------------------------------------
    @property
    def is_healthy(self) -> bool:
        """False once the device has failed."""
        return self.state != "failed" and self.fault is None

    @property
    def is_ready(self) -> bool:
        """True while new requests are taken."""
        return self.state == "ready"

    def check_accepting(self) -> None:
        """ApiError 503 unless new requests are taken."""
        if not self.is_ready:
            why = "its device has failed" if self.fault else "it is stopping"
            raise ApiError(f"the server takes no requests: {why}", status=503, retry_after=5)

    # ---- changes -----------------------------------------------------------------------------
    def start(self) -> None:
        """Ready; called in the running loop."""
        self.state = "ready"
        self._ticker = asyncio.get_running_loop().create_task(self._run())

    def signal(self) -> None:
        """A signal, in the loop's thread: the first one drains, the second one stops."""
        if self.state in ("starting", "ready"):
            seconds = self._service.settings.drain_seconds
            LOG.info("stopping: %d requests may end within %g s; a second signal ends them", self._n_active, seconds)
            self.state, self._until = "draining", time.monotonic() + seconds
            return
        self.exit_code = self.exit_code or EXIT_INTERRUPTED
        self._abort("the server was stopped")

    def note_error(self, error: BaseException) -> None:
        """A request ended with this."""
        if isinstance(error, EngineStoppedError) and self.state in ("ready", "draining"):
            self._fail(str(error))

    def end(self) -> None:
        """The loop is about to end."""
        self.state = "stopping"
        if self._ticker is not None:
            self._ticker.cancel()

    # ---- the clockwork -----------------------------------------------------------------------
    @property
    def _n_active(self) -> int:
        return len(self._service.active)

    async def _run(self) -> None:
        next_keep_alive = time.monotonic() + KEEP_ALIVE_SECONDS
        while self.state != "stopping":
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            if is_due := now >= next_keep_alive:
                next_keep_alive = now + KEEP_ALIVE_SECONDS
            try:
                self._tick(now, is_due)
            except Exception:  # one tick that fails must not be the last: draining and faults are found here
                LOG.exception("the server's clockwork failed")

    def _tick(self, now: float, keep_alive: bool) -> None:
        stats = self._service.engine.stats()
        if not stats.is_healthy and self.state in ("ready", "draining"):
            self._fail(stats.fault or "unknown")
        if keep_alive:
            for answers in list(self._service.active):
                answers.poke()
        self._service.log.tick(stats)
        if self.state == "draining" and not (self._n_active or self._service.n_alive):
            self._stop()
        elif self.state == "draining" and now >= self._until:
            self._abort("the server is stopping and its time for running requests is over")
        elif self.state == "failed" and now >= self._until:
            self._stop()

    def _fail(self, fault: str) -> None:
        LOG.error("the engine has failed: %s", fault)
        self.state, self.fault, self.exit_code = "failed", fault, EXIT_FAULT
        self._until = time.monotonic() + FAULT_SECONDS
        for answers in list(self._service.active):
            answers.abort(EngineStoppedError(f"the engine has failed: {fault}"))

    def _abort(self, why: str) -> None:
        for answers in list(self._service.active):
            answers.abort(ApiError(why, status=503, retry_after=5))
        self._stop()

    def _stop(self) -> None:
        if self.state != "stopping":
            self.state = "stopping"
            self.on_stop()
