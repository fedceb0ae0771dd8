"""Weights from the file to the device: reading, copying and repacking overlap.

Threads of the C library read the file into a ring of pinned buffers (``file_reads.py``); one stream copies these into a
ring of staging memory, or straight to their place; a second stream turns what is complete into its packed form. An
``Upload`` says which file bytes go where, and what to run once they have arrived; who plans the uploads knows formats,
this file knows only bytes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import StorageError
from ninfer_format.geometry import up
from ninfer_format.hashing import Advance, Progress, available_cores, silent
from ninfer_runtime.backends.cuda.device import Device, DeviceMemoryError, Event, Stream
from ninfer_runtime.backends.cuda.file_reads import FileReads, Run

CHUNK_BYTES = 4 << 20
MAX_STAGING_BYTES = 64 << 20
"""What one upload should stage at most; larger ones work, and take as much device memory during the load."""

_MAX_READERS = 16
_COPY_LAG = 3  # copies still queued when a buffer is filled again: the copy engine never waits for the host
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
    """What a load moved and took, from the call to the last repacked byte."""

    n_bytes: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes per second."""
        return self.n_bytes / self.seconds / 1e9 if self.seconds else 0.0


class _Part(NamedTuple):
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
class _Buffer:
    """Pinned memory at ``address``; ``copied`` is behind the copies of what was read into it last."""

    memory: NDArray[np.uint8]
    address: int
    copied: Event


class _Ring:
    """Pinned buffers, of which new ones are made while the first are in use already.

    Pinning is slow (2.6 GB/s on an H200 machine), so the buffers are few and small, and a thread of its own makes them.
    """

    def __init__(self, device: Device, n_buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._made: list[NDArray[np.uint8]] = []
        self._copying: deque[_Buffer] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._coming: deque[Future[NDArray[np.uint8]]] = deque(
            self._thread.submit(device.allocate_host, buffer_bytes) for _ in range(n_buffers)
        )

    def take(self, *, wait: bool) -> _Buffer | None:
        """A buffer that nothing uses; None when there is none yet and ``wait`` is not set."""
        if self._coming and (self._coming[0].done() or (wait and not self._copying)):
            self._made.append(self._coming.popleft().result())
            return _Buffer(self._made[-1], self._made[-1].ctypes.data, self._device.event())
        if len(self._copying) > _COPY_LAG or (wait and self._copying):
            buffer = self._copying.popleft()
            buffer.copied.synchronize()
            return buffer
        return None

    def give(self, buffer: _Buffer) -> None:
        """To be used again once ``buffer.copied`` is passed."""
        self._copying.append(buffer)

    def close(self) -> None:
        """Give the memory back; no read and no copy of it may be running."""
        for future in self._coming:
            future.cancel()
        self._thread.shutdown()
        self._made += [future.result() for future in self._coming if future.done() and not future.cancelled()]
        for memory in self._made:
            self._device.free_host(memory)


class _Mover:
    """Puts what was read on the copy stream, and each upload's ``finish`` on the other one at its last byte."""

    def __init__(self, device: Device, uploads: Sequence[Upload], lent: tuple[int, int]) -> None:
        self._device = device
        self._uploads = uploads
        self._copies, self._repacks = device.stream(), device.stream()
        self._arrived = device.event()
        staging_bytes = up(max((upload.staging_bytes for upload in uploads), default=0), _STAGING_ALIGNMENT)
        self._allocated = 0
        staging, lent_bytes = lent
        if lent_bytes < _N_STAGING * staging_bytes:
            staging = self._allocated = device.allocate(_N_STAGING * staging_bytes)
        slots = ((staging + i * staging_bytes, device.event()) for i in range(_N_STAGING))
        self._slots: deque[tuple[int, Event]] = deque(slots)
        self._current = -1
        self._left = 0
        self._base = 0

    def queue(self, parts: Sequence[_Part], buffer: _Buffer) -> None:
        """Copy a buffer to where its parts belong."""
        for part in parts:
            if part.upload != self._current:
                self._open(part.upload)
            source = buffer.memory[part.at : part.at + part.n_bytes]
            self._device.upload(self._base + part.target, source, self._copies)
            self._left -= part.n_bytes
            if self._left == 0:
                self._finish(self._uploads[part.upload])
        buffer.copied.record(self._copies)

    def _open(self, index: int) -> None:
        upload = self._uploads[index]
        self._current, self._left, self._base = index, upload.n_bytes, 0
        if upload.staging_bytes:
            self._base, last_use = self._slots[0]
            self._copies.wait(last_use)

    def _finish(self, upload: Upload) -> None:
        if upload.finish is None and not upload.staging_bytes:
            return
        self._arrived.record(self._copies)
        self._repacks.wait(self._arrived)
        if upload.finish is not None:
            upload.finish(self._base, self._repacks)
        if upload.staging_bytes:
            self._slots[0][1].record(self._repacks)
            self._slots.rotate(-1)

    def close(self) -> None:
        """Give the staging memory back; no work may be running."""
        if self._allocated:
            self._device.free(self._allocated)


def load(
    device: Device,
    path: Path,
    uploads: Sequence[Upload],
    *,
    progress: Progress = silent,
    readers: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    lent: tuple[int, int] = (0, 0),
) -> LoadReport:
    """Run all uploads, in order; everything has ended when it returns.

    ``readers`` threads read (default: all cores but one, at most 16). ``lent``: address and bytes of device memory that
    nothing uses meanwhile; where that is too little, staging memory is allocated. Raises StorageError when the file
    became shorter or cannot be read, DeviceMemoryError when the staging memory or the pinned buffers do not fit.
    """
    started = time.perf_counter()
    uploads = [upload for upload in uploads if upload.n_bytes]
    n_bytes = sum(upload.n_bytes for upload in uploads)
    chunk_bytes = up(min(chunk_bytes, max(n_bytes, 1)), _STAGING_ALIGNMENT)
    readers = readers or max(1, min(available_cores() - 1, _MAX_READERS, -(-n_bytes // chunk_bytes)))
    try:
        mover = _Mover(device, uploads, lent)
    except DeviceMemoryError as error:
        raise DeviceMemoryError(f"loading needs {_N_STAGING} staging buffers beside the weights: {error}") from None
    ring = _Ring(device, readers + _COPY_LAG, chunk_bytes)
    try:
        with FileReads(path, readers) as reads, progress(n_bytes, "loading") as advance:
            _run(_chunks(uploads, chunk_bytes), reads, ring, mover, advance)
        device.synchronize()
        return LoadReport(n_bytes, time.perf_counter() - started)
    except StorageError as error:
        raise StorageError(f"{path}: {error}; copy or download it again") from None
    finally:
        device.synchronize()
        ring.close()
        mover.close()


def _run(chunks: Iterable[Sequence[_Part]], reads: FileReads, ring: _Ring, mover: _Mover, advance: Advance) -> None:
    """Read as far ahead as there are buffers; move what has been read, in order."""
    coming = enumerate(chunks)
    reading: deque[tuple[int, Sequence[_Part], _Buffer]] = deque()
    following = next(coming, None)
    while following or reading:
        while following and (buffer := ring.take(wait=not reading)) is not None:
            number, parts = following
            reads.start(number, [Run(part.begin, part.n_bytes, buffer.address + part.at) for part in parts])
            reading.append((number, parts, buffer))
            following = next(coming, None)
        number, parts, buffer = reading.popleft()
        reads.wait(number)
        mover.queue(parts, buffer)
        ring.give(buffer)
        advance(sum(part.n_bytes for part in parts))
