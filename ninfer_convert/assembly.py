"""Making the objects: workers encode pieces of objects, writers hash and write, a syncer makes them durable.

Objects are taken in the order of their first source tensor, so shards are read in file order where fusions allow. All
payloads in flight live in one ring whose size, with the workers' buffers, is the bound that ``plan`` prints.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic

from ninfer_convert.direct_file import BLOCK_BYTES, DirectFile
from ninfer_convert.events import BuildObserver
from ninfer_convert.journal import Finished, Journal
from ninfer_convert.payload_ring import PayloadRing, RingClosed, ring_bytes
from ninfer_convert.stored_object import StoredObject
from ninfer_convert.workspace import Lanes, Workspace
from ninfer_format.writer import ArtifactWriter

WRITE_BYTES = 4 << 20
"""Hashed and written at a time: large enough to keep a disk busy with direct writes."""
SYNC_BYTES = 128 << 20
"""Written bytes after which a sync makes the finished objects durable."""
SYNC_SECONDS = 2.0
"""A finished object waits at most this long for a sync."""


@dataclass(slots=True)
class Failures:
    """The first error in object order, whatever thread met it first."""

    first: BaseException | None = None
    _order: tuple[int, int] = (0, 0)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, error: BaseException, order: tuple[int, int]) -> None:
        """Keep ``error`` if it belongs to an earlier piece than the one kept."""
        with self._lock:
            if self.first is None or order < self._order:
                self.first, self._order = error, order


class Assembly:
    """Makes ``objects`` and writes them through ``writer``; ``run`` returns when all are durable and journaled."""

    def __init__(
        self,
        objects: Sequence[StoredObject],
        writer: ArtifactWriter,
        journal: Journal,
        *,
        n_workers: int,
        lanes: Lanes,
        device: str,
        progress: Callable[[int], None],
        observer: BuildObserver,
        sync_bytes: int = SYNC_BYTES,
        sync_seconds: float = SYNC_SECONDS,
    ) -> None:
        self._objects = objects
        self._writer = writer
        self._journal = journal
        self._n_workers = n_workers
        # A worker makes about 0.6 GB/s, and a writer hashes and writes 1 GB/s. But one that comes back from the disk
        # waits until a worker lets it have a processor; with four, the disk has something to do meanwhile.
        self._n_writers = max(4, n_workers // 2)
        self._file = DirectFile(writer)
        self._lanes = lanes
        self._device = device
        self._progress = progress
        self._observer = observer
        self._entries = {item.entry.name: item.entry for item in objects}
        self._sync = sync_bytes, sync_seconds
        self._ring = PayloadRing(ring_bytes([item.entry.n_bytes for item in objects]))
        self._pieces = self._all_pieces()
        self._pieces_lock = threading.Lock()
        self._queue: SimpleQueue[StoredObject | None] = SimpleQueue()
        self._advanced = threading.Condition()
        self._written: list[Finished] = []
        self._unsynced_bytes = 0
        self._unsynced_since = 0.0
        self._writers_left = self._n_writers
        self._wake_syncer = threading.Condition()
        self._stop = threading.Event()
        self._failures = Failures()
        self.finished: dict[str, Finished] = {}
        """Objects that are durable and journaled."""

    def run(self) -> None:
        """Do it all. Errors of the threads are raised here, KeyboardInterrupt included; threads have ended by then."""
        workers = [self._thread(self._work, f"worker-{i}") for i in range(self._n_workers)]
        writers = [self._thread(self._write, f"writer-{i}") for i in range(self._n_writers)]
        threads = [*workers, *writers, self._thread(self._make_durable, "syncer")]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                # With a timeout the main thread sees Ctrl-C at once.
                while thread.is_alive():
                    thread.join(0.1)
        except BaseException:
            self._halt()
            for thread in threads:
                thread.join()
            raise
        finally:
            self._file.close()
        if self._failures.first is not None:
            raise self._failures.first

    def _thread(self, body: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except RingClosed:
                pass
            except BaseException as error:
                self._failures.add(error, (len(self._objects), 0))
                self._halt()

        return threading.Thread(target=guarded, name=f"ninfer-{name}", daemon=True)

    def _halt(self) -> None:
        self._stop.set()
        self._ring.close()
        self._end_queue()
        for condition in (self._advanced, self._wake_syncer):
            with condition:
                condition.notify_all()

    def _all_pieces(self) -> Iterator[tuple[int, StoredObject, int]]:
        """Every piece in order; going to the next object waits for room in the ring and tells the writers."""
        for order, item in enumerate(self._objects):
            item.begin(self._ring.take(item.entry.n_bytes, self._file_offset(item)))
            self._observer.begun(item.entry)
            self._queue.put(item)
            for number in range(item.n_pieces):
                yield order, item, number
        self._end_queue()

    def _file_offset(self, item: StoredObject) -> int:
        return self._writer.payload_offset + item.entry.offset

    def _end_queue(self) -> None:
        for _ in range(self._n_writers):
            self._queue.put(None)

    def _next_piece(self) -> tuple[int, StoredObject, int] | None:
        with self._pieces_lock:
            return None if self._stop.is_set() else next(self._pieces, None)

    def _work(self) -> None:
        from ninfer_convert.quantize.torch_threads import one_thread_here

        one_thread_here()
        space = Workspace(self._lanes, self._device)
        while (piece := self._next_piece()) is not None:
            order, item, number = piece
            with self._advanced:
                while not item.may_start(number) and not self._stop.is_set():
                    self._advanced.wait()
            if self._stop.is_set():
                return
            try:
                self._do(item, number, space)
            except BaseException as error:
                self._failures.add(error, (order, number))
                self._halt()
                return
            # A writer that the disk has answered goes first, or the ring fills while a worker uses up its time slice.
            os.sched_yield()

    def _do(self, item: StoredObject, number: int, space: Workspace) -> None:
        result = item.work(number, space)
        with self._advanced:
            round_is_over = item.finish_piece(number, result)
            self._advanced.notify_all()
        if round_is_over:
            item.close_round(space)
            with self._advanced:
                item.end_round()
                self._advanced.notify_all()

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            digest, done = hashlib.sha256(), 0
            while done < item.entry.n_bytes:
                end = self._next_end(item, done)
                if self._stop.is_set():
                    return
                part = item.payload[done:end].data
                digest.update(part)
                self._file.write(item.entry.name, done, self._file_offset(item) + done, part)
                done = end
                self._progress(len(part))
            self._writer.mark_written(item.entry.name)
            self._ring.give_back(item.end())
            self._hand_to_syncer(item, digest.hexdigest())
        with self._wake_syncer:
            self._writers_left -= 1
            self._wake_syncer.notify_all()

    def _next_end(self, item: StoredObject, done: int) -> int:
        """End of the next part of ``item`` to write, on a block boundary of the file except at the object's end."""
        n_bytes, base = item.entry.n_bytes, self._file_offset(item)
        wanted = min(n_bytes, (base + done + WRITE_BYTES) // BLOCK_BYTES * BLOCK_BYTES - base)
        with self._advanced:
            while item.ready_bytes < wanted and not self._stop.is_set():
                self._advanced.wait()
        return wanted

    def _hand_to_syncer(self, item: StoredObject, sha256: str) -> None:
        with self._wake_syncer:
            if not self._written:
                self._unsynced_since = monotonic()
            self._written.append(Finished(item.entry.name, sha256, item.error_figures()))
            self._unsynced_bytes += item.entry.n_bytes
            self._wake_syncer.notify_all()

    def _make_durable(self) -> None:
        """Sync, then journal what was completely written before the sync; also once more when the build is halted."""
        over = False
        while not over:
            with self._wake_syncer:
                while not (over := not self._writers_left or self._stop.is_set()) and not self._sync_due():
                    self._wake_syncer.wait(self._seconds_to_sync())
                batch, self._written, self._unsynced_bytes = self._written, [], 0
            if batch:
                self._writer.sync()
                self._journal.add(batch)
                self.finished |= {record.name: record for record in batch}
                for record in batch:
                    self._observer.finished(self._entries[record.name], record)

    def _sync_due(self) -> bool:
        n_bytes, _ = self._sync
        return bool(self._written) and (self._unsynced_bytes >= n_bytes or self._seconds_to_sync() == 0.0)

    def _seconds_to_sync(self) -> float | None:
        if not self._written:
            return None
        return max(0.0, self._unsynced_since + self._sync[1] - monotonic())
