"""Weights from the file to the device: reading, copying and repacking overlap.

Each reader thread fills pinned buffers of its own and queues their copies into a ring of staging memory (or straight to
their place); a second stream turns what is complete into its packed form. An ``Upload`` says which file bytes go where,
and what to run once they have arrived; who plans the uploads knows formats, this file knows only bytes.

Measured on an H200 with 16 cores and a link of 54 GB/s: threads that ``pread`` from the page cache keep it busy, a map
costs a third of the rate in page tables. Pinning runs at 2.6 GB/s there, so the buffers are few and small.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from threading import Condition

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import StorageError
from ninfer_format.geometry import up
from ninfer_format.hashing import Advance, Progress, available_cores, read_exactly, silent
from ninfer_format.reader import open_regular
from ninfer_runtime.backends.cuda.device import Device, DeviceMemoryError, Event, Stream

CHUNK_BYTES = 4 << 20
MAX_STAGING_BYTES = 64 << 20
"""What one upload should stage at most; larger ones work, and take as much device memory during the load."""

_MAX_READERS = 12
_BUFFERS_PER_READER = 2
_N_STAGING = 4
_STAGING_ALIGNMENT = 256

Finish = Callable[[int, Stream], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """``n_bytes`` from file offset ``begin`` to ``target``: an offset into the staging memory, or a device address."""

    begin: int
    n_bytes: int
    target: int


@dataclass(frozen=True, slots=True)
class Upload:
    """One unit of loading.

    staging_bytes  device memory that its pieces go to; 0: their targets are device addresses
    finish         queued once all pieces have arrived: ``finish(staging address, stream)``; the staging memory is
                   reused when the work that it put on ``stream`` has ended
    """

    name: str
    pieces: tuple[Piece, ...]
    staging_bytes: int = 0
    finish: Finish | None = None

    @property
    def n_bytes(self) -> int:
        """File bytes to move."""
        return sum(piece.n_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load moved and took, from the call to the last repacked byte."""

    n_bytes: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes per second."""
        return self.n_bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece, or as much of one as fits a buffer; ``at`` is its place in the buffer."""

    upload: int
    begin: int
    n_bytes: int
    at: int
    target: int


def _chunks(uploads: Sequence[Upload], chunk_bytes: int) -> Iterator[list[_Part]]:
    """The parts of all uploads in order, grouped so that each group fills one buffer."""
    parts: list[_Part] = []
    used = 0
    for index, upload in enumerate(uploads):
        for piece in upload.pieces:
            done = 0
            while done < piece.n_bytes:
                if used >= chunk_bytes:
                    yield parts
                    parts, used = [], 0
                n_bytes = min(piece.n_bytes - done, chunk_bytes - used)
                parts.append(_Part(index, piece.begin + done, n_bytes, used, piece.target + done))
                done += n_bytes
                used += up(n_bytes, _STAGING_ALIGNMENT)
    if parts:
        yield parts


@dataclass(slots=True)
class _Slot:
    """One part of the staging memory.

    ``turn`` is the rank of the upload that may use it now, which is to say that the work of the one before is queued;
    ``event`` is behind that work. Ranks count the uploads that stage, and take the slots in turn.
    """

    pointer: int
    event: Event
    turn: int


class _Load:
    """What the readers of one load share; everything that is not constant changes under ``_changed``."""

    def __init__(
        self, device: Device, uploads: Sequence[Upload], chunk_bytes: int, descriptor: int, advance: Advance
    ) -> None:
        self._device = device
        self._uploads = uploads
        self._chunk_bytes = chunk_bytes
        self._chunks = _chunks(uploads, chunk_bytes)
        self._descriptor = descriptor
        self._advance = advance
        self._changed = Condition()
        self._stopped = False
        self._left = [upload.n_bytes for upload in uploads]
        self._copies, self._repacks = device.stream(), device.stream()
        self._arrived = device.event()
        staging_bytes = up(max((upload.staging_bytes for upload in uploads), default=0), _STAGING_ALIGNMENT)
        self._staging = device.allocate(_N_STAGING * staging_bytes) if staging_bytes else 0
        self._slots = [_Slot(self._staging + i * staging_bytes, device.event(), i) for i in range(_N_STAGING)]
        staged = (index for index, upload in enumerate(uploads) if upload.staging_bytes)
        self._ranks = {index: rank for rank, index in enumerate(staged)}
        self._opened: set[int] = set()
        self._pinned: list[NDArray[np.uint8]] = []

    def read_all(self) -> None:
        """What one reader does: chunk after chunk into its buffers in turn, until none is left."""
        buffers: list[tuple[NDArray[np.uint8], Event]] = []
        try:
            for turn in cycle(range(_BUFFERS_PER_READER)):
                with self._changed:
                    parts = None if self._stopped else next(self._chunks, None)
                if parts is None:
                    return
                if turn == len(buffers):
                    # The first call of this thread on the device: it makes the device usable from here.
                    buffers.append((self._device.allocate_host(self._chunk_bytes), self._device.event()))
                    self._pinned.append(buffers[turn][0])
                self._move(parts, *buffers[turn])
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Let every reader end after its chunk."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _move(self, parts: Sequence[_Part], buffer: NDArray[np.uint8], copied: Event) -> None:
        copied.synchronize()
        whole = memoryview(buffer.data)
        for part in parts:
            read_exactly(self._descriptor, whole[part.at : part.at + part.n_bytes], part.begin)
        for part in parts:
            base = self._open(part.upload) if self._uploads[part.upload].staging_bytes else 0
            if self._stopped:
                return
            self._device.upload(base + part.target, buffer[part.at : part.at + part.n_bytes], self._copies)
            self._count(part)
        copied.record(self._copies)

    def _open(self, index: int) -> int:
        """Staging address of an upload; waits until the upload that had the slot before is queued to its end.

        That never waits for ever: uploads use the slots in order, and chunks are handed out in that order too, so a
        reader waits only for readers that have earlier chunks.
        """
        rank = self._ranks[index]
        slot = self._slots[rank % _N_STAGING]
        with self._changed:
            while slot.turn != rank and not self._stopped:
                self._changed.wait()
            if rank not in self._opened:
                self._opened.add(rank)
                self._copies.wait(slot.event)
        return slot.pointer

    def _count(self, part: _Part) -> None:
        """A part's copy is queued; behind an upload's last one goes its ``finish``."""
        with self._changed:
            self._left[part.upload] -= part.n_bytes
            self._advance(part.n_bytes)
            if self._left[part.upload] == 0:
                self._finish(part.upload)

    def _finish(self, index: int) -> None:
        upload = self._uploads[index]
        if upload.finish is None and not upload.staging_bytes:
            return
        rank = self._ranks.get(index, 0)
        slot = self._slots[rank % _N_STAGING]
        self._arrived.record(self._copies)
        self._repacks.wait(self._arrived)
        if upload.finish is not None:
            upload.finish(slot.pointer if upload.staging_bytes else 0, self._repacks)
        if upload.staging_bytes:
            slot.event.record(self._repacks)
            slot.turn = rank + _N_STAGING
            self._changed.notify_all()

    def close(self) -> None:
        """Give buffers and staging memory back, once the device is idle."""
        self._device.synchronize()
        if self._staging:
            self._device.free(self._staging)
        for buffer in self._pinned:
            self._device.free_host(buffer)


def load(
    device: Device,
    path: Path,
    uploads: Sequence[Upload],
    *,
    progress: Progress = silent,
    readers: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> LoadReport:
    """Run all uploads; everything has ended when it returns. They are read in order, and finish in about that order.

    ``readers`` threads read (default: the cores, at most 12). Raises StorageError when the file became shorter or
    cannot be read, DeviceMemoryError when the staging memory or the pinned buffers do not fit.
    """
    started = time.perf_counter()
    uploads = [upload for upload in uploads if upload.n_bytes]
    n_bytes = sum(upload.n_bytes for upload in uploads)
    chunk_bytes = up(min(chunk_bytes, max(n_bytes, 1)), _STAGING_ALIGNMENT)
    readers = readers or max(1, min(available_cores(), _MAX_READERS, -(-n_bytes // chunk_bytes)))
    with open_regular(path) as stream, progress(n_bytes, "loading") as advance:
        try:
            job = _Load(device, uploads, chunk_bytes, stream.fileno(), advance)
        except DeviceMemoryError as error:
            raise DeviceMemoryError(f"loading needs {_N_STAGING} staging buffers beside the weights: {error}") from None
        try:
            _run(job, readers)
            device.synchronize()
            return LoadReport(n_bytes, time.perf_counter() - started)
        except StorageError as error:
            raise StorageError(f"{path}: {error}; copy or download it again") from None
        finally:
            job.close()


def _run(job: _Load, readers: int) -> None:
    """Read with ``readers`` threads; the first error of any of them ends them all."""
    with ThreadPoolExecutor(readers) as pool:
        try:
            running = [pool.submit(job.read_all) for _ in range(readers)]
            for each in running:
                each.result()
        except BaseException:
            job.stop()
            raise
