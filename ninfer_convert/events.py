"""Progress of a build as JSON lines, schema ``ninfer.event/1``: for pipelines that watch, log and add up.

Every line is one object with ``event``. The last one is either ``done``, which is the ``ninfer.build/1`` document, or
``failed``. Specification: ``specs/convert-cli.md``.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from ninfer_format.directory import Entry, TensorEntry

if TYPE_CHECKING:
    from ninfer_convert.journal import Finished
    from ninfer_convert.problems import Problem

SCHEMA = "ninfer.event/1"
PROGRESS_SECONDS = 0.5
"""Shortest time between two ``progress`` lines."""


class BuildObserver:
    """What a build tells while it runs, from any thread. This one hears everything and does nothing."""

    def started(self, total_bytes: int, n_objects: int, resumed: Sequence[Entry]) -> None:
        """Objects and payload bytes in all, and the objects that an earlier run has finished."""

    def begun(self, entry: Entry) -> None:
        """The first rows of an object are about to be read."""

    def advanced(self, n_bytes: int) -> None:
        """So many payload bytes have been written since the last call; those of resumed objects count at the start."""

    def finished(self, entry: Entry, record: "Finished") -> None:
        """An object is durable and journaled: a resumed build will not make it again."""


class EventLines(BuildObserver):
    """Writes every event as a line through ``write``, which gets whole lines, one at a time."""

    def __init__(
        self,
        write: Callable[[str], object],
        *,
        clock: Callable[[], float] = monotonic,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        self.facts: Mapping[str, Any] = {}
        """Further members of ``start``."""
        self._write = write
        self._clock = clock
        self._pause = progress_seconds
        self._lock = threading.Lock()
        self._born = self._began = self._told = clock()
        self._total = self._resumed = self._done = 0
        self._ended = False
        """Whether the last line is out: a thread that a second interrupt left running must not write after it."""

    def started(self, total_bytes: int, n_objects: int, resumed: Sequence[Entry]) -> None:
        self._total, self._resumed = total_bytes, sum(entry.n_bytes for entry in resumed)
        self._began = self._told = self._clock()
        numbers = {"objects": n_objects, "bytes": total_bytes}
        earlier = {"resumed_objects": len(resumed), "resumed_bytes": self._resumed}
        self._line("start", {**self.facts, **numbers, **earlier})

    def begun(self, entry: Entry) -> None:
        self._line("begin", _object(entry))

    def advanced(self, n_bytes: int) -> None:
        with self._lock:
            self._done += n_bytes
            now, complete = self._clock(), self._done == self._total
            if not complete and now - self._told < self._pause:
                return
            self._told = now
            rate = (self._done - self._resumed) / max(now - self._began, 1e-9)
            left = (self._total - self._done) / rate if rate > 0 else None
            figures = {
                "bytes": self._done,
                "total": self._total,
                "bytes_per_second": round(rate),
                "seconds_left": None if left is None else round(left, 1),
            }
            self._write_line("progress", figures)

    def finished(self, entry: Entry, record: "Finished") -> None:
        error = None if record.error is None else dict(record.error)
        self._line("finish", _object(entry) | {"sha256": record.sha256, "error": error})

    def failed(self, message: str, exit_code: int, *, resumable: bool, problems: Sequence["Problem"] = ()) -> None:
        """The last line of a build that did not end well."""
        listed = [{"code": p.code, "where": p.where, "message": p.message, "advice": p.advice} for p in problems]
        ending = {"exit_code": exit_code, "error": message, "problems": listed, "resumable": resumable}
        with self._lock:
            self._write_line("failed", ending)
            self._ended = True

    def done(self, document: Mapping[str, Any]) -> None:
        """The last line of a build that did: ``document`` with its own schema."""
        with self._lock:
            self._write(json.dumps({"schema": document["schema"], "event": "done", **document}) + "\n")
            self._ended = True

    def _line(self, event: str, members: Mapping[str, Any]) -> None:
        with self._lock:
            self._write_line(event, members)

    def _write_line(self, event: str, members: Mapping[str, Any]) -> None:
        if self._ended:
            return
        seconds = round(self._clock() - self._born, 3)
        self._write(json.dumps({"schema": SCHEMA, "event": event, "seconds": seconds, **members}) + "\n")


def _object(entry: Entry) -> dict[str, Any]:
    form = {"format": entry.format, "shape": list(entry.shape)} if isinstance(entry, TensorEntry) else {"format": None}
    return {"object": entry.name, "bytes": entry.n_bytes, **form}
