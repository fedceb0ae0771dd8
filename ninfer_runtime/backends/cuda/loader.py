"""Weights from the file to the device: reading, copying and repacking overlap.

Reader threads fill a ring of pinned buffers; one stream copies them into a ring of staging memory (or straight to their
place); a second stream turns what is complete into its packed form. An ``Upload`` says which file bytes go where, and
what to run once they have arrived; who plans the uploads knows formats, this file knows only bytes.

Measured on an H200 with 16 cores, 6 GiB in the page cache and a link of 54 GB/s: 16 threads that ``pread`` 4 MiB at a
time keep the link busy; through a map the page tables cost a third of the rate. Pinning runs at 2.6 GB/s there, so the
ring is small, and each of its buffers is pinned by the thread that fills it first.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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

_MAX_READERS = 16
_COPY_LAG = 6  # copies still queued when a buffer is filled again: the copy engine never waits for the host
_SPARE_BUFFERS = 2  # read, and not yet queued
_N_STAGING = 3
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
    """What a load took: seconds in all, and those the copies stood still because the readers were behind."""

    n_bytes: int
    seconds: float
    reading_seconds: float

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


class _Staging:
    """A ring of device memory; a slot is handed out again when the work that used it last has ended."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        self._device = device
        self._slots: deque[tuple[int, Event]] = deque()
        self._pointer = device.allocate(n_bytes * _N_STAGING) if n_bytes else 0
        if n_bytes:
            self._slots.extend((self._pointer + n_bytes * i, device.event()) for i in range(_N_STAGING))

    def take(self, copies: Stream) -> tuple[int, Event]:
        """Address and event of the next slot; ``copies`` waits for its last use, the caller records its next one."""
        slot = self._slots.popleft()
        self._slots.append(slot)
        copies.wait(slot[1])
        return slot

    def close(self) -> None:
        if self._pointer:
            self._device.free(self._pointer)


class _Finisher:
    """Puts the parts of a chunk on the copy stream, and each upload's ``finish`` on the other one at its last byte."""

    def __init__(self, device: Device, uploads: Sequence[Upload], staging: _Staging) -> None:
        self._device = device
        self._uploads = uploads
        self._staging = staging
        self._copies, self._repacks = device.stream(), device.stream()
        self._arrived = device.event()
        self._current = -1
        self._left = 0
        self._slot: tuple[int, Event] | None = None

    def _open(self, index: int) -> None:
        upload = self._uploads[index]
        self._current, self._left = index, upload.n_bytes
        self._slot = self._staging.take(self._copies) if upload.staging_bytes else None

    def queue(self, parts: Sequence[_Part], buffer: NDArray[np.uint8], copied: Event) -> None:
        """Copy ``buffer`` to where its parts belong; ``copied`` is passed when it may be filled again."""
        for part in parts:
            if part.upload != self._current:
                self._open(part.upload)
            target = part.target + (self._slot[0] if self._slot else 0)
            self._device.upload(target, buffer[part.at : part.at + part.n_bytes], self._copies)
            self._left -= part.n_bytes
            if self._left == 0:
                self._complete(self._uploads[part.upload].finish)
        copied.record(self._copies)

    def _complete(self, finish: Finish | None) -> None:
        self._arrived.record(self._copies)
        self._repacks.wait(self._arrived)
        if finish is not None:
            finish(self._slot[0] if self._slot else 0, self._repacks)
        if self._slot:
            self._slot[1].record(self._repacks)


class _Ring:
    """Pinned buffers, made when they are first filled."""

    def __init__(self, device: Device, n_buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._bytes = buffer_bytes
        self._buffers: list[NDArray[np.uint8] | None] = [None] * n_buffers
        self.copied = [device.event() for _ in range(n_buffers)]

    def fill(self, index: int, descriptor: int, parts: Sequence[_Part]) -> NDArray[np.uint8]:
        """Read ``parts`` into buffer ``index``; called by the reader threads, by one at a time for each buffer."""
        buffer = self._buffers[index]
        if buffer is None:
            buffer = self._buffers[index] = self._device.allocate_host(self._bytes)
        whole = memoryview(buffer.data)
        for part in parts:
            read_exactly(descriptor, whole[part.at : part.at + part.n_bytes], part.begin)
        return buffer

    def close(self) -> None:
        """Give the buffers back; no copy of them may be running."""
        for buffer in self._buffers:
            if buffer is not None:
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
    """Run all uploads, in order; everything has ended when it returns.

    ``readers`` threads read (default: the cores, at most 16). Raises StorageError when the file became shorter or
    cannot be read, DeviceMemoryError when the staging memory or the pinned buffers do not fit.
    """
    started = time.perf_counter()
    uploads = [upload for upload in uploads if upload.n_bytes]
    n_bytes = sum(upload.n_bytes for upload in uploads)
    chunk_bytes = up(min(chunk_bytes, max(n_bytes, 1)), _STAGING_ALIGNMENT)
    chunks = list(_chunks(uploads, chunk_bytes))
    readers = min(readers or min(available_cores(), _MAX_READERS), max(1, len(chunks)))
    staging_bytes = up(max((upload.staging_bytes for upload in uploads), default=0), _STAGING_ALIGNMENT)
    try:
        staging = _Staging(device, staging_bytes)
    except DeviceMemoryError as error:
        raise DeviceMemoryError(f"loading needs {_N_STAGING} staging buffers beside the weights: {error}") from None
    ring = _Ring(device, readers + _COPY_LAG + _SPARE_BUFFERS, chunk_bytes)
    try:
        with open_regular(path) as stream, progress(n_bytes, "loading") as advance:
            reading = _run(chunks, stream.fileno(), _Finisher(device, uploads, staging), ring, readers, advance)
        device.synchronize()
        return LoadReport(n_bytes, time.perf_counter() - started, reading)
    except StorageError as error:
        raise StorageError(f"{path}: {error}; copy or download it again") from None
    finally:
        device.synchronize()
        staging.close()
        ring.close()


def _run(
    chunks: Sequence[Sequence[_Part]], descriptor: int, finisher: _Finisher, ring: _Ring, readers: int, advance: Advance
) -> float:
    """Read, copy and finish all chunks in order; seconds that the copies waited for readers."""
    n_buffers = len(ring.copied)
    waiting: deque[Future[NDArray[np.uint8]]] = deque()
    submitted, reading = 0, 0.0
    with ThreadPoolExecutor(readers) as pool:
        try:
            for number, parts in enumerate(chunks):
                while submitted < min(len(chunks), number + n_buffers - _COPY_LAG):
                    index = submitted % n_buffers
                    ring.copied[index].synchronize()
                    waiting.append(pool.submit(ring.fill, index, descriptor, chunks[submitted]))
                    submitted += 1
                before = time.perf_counter()
                buffer = waiting.popleft().result()
                reading += time.perf_counter() - before
                finisher.queue(parts, buffer, ring.copied[number % n_buffers])
                advance(sum(part.n_bytes for part in parts))
        finally:
            for future in waiting:
                future.cancel()
    return reading
