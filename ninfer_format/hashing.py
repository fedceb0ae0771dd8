"""SHA-256 of files and byte ranges, on one core or on all of them.

Large ranges are mapped slice by slice and populated before they are touched: as fast as hashing a plain map (``pread``
costs about 15 %), while a bad sector or a file that shrinks is an error instead of a SIGBUS, and a slice is unmapped
before the next one, so resident memory stays flat.
"""

import errno
import hashlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from ninfer_format.errors import StorageError
from ninfer_format.reader import open_regular

_READ_BYTES = 1 << 20
_SLICE_BYTES = 32 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; reports what would be a SIGBUS
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENODEV)

Advance = Callable[[int], None]
Progress = Callable[[int, str], AbstractContextManager[Advance]]
"""``progress(total_bytes, description)`` opens a context that yields ``advance(n_bytes)``; ``command.progress_bytes``
is one."""

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def silent(total: int, description: str) -> Iterator[Advance]:
    """The Progress that shows nothing."""
    yield lambda n_bytes: None


def available_cores() -> int:
    """Number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_exactly(descriptor: int, buffer: memoryview, begin: int) -> None:
    """Fill ``buffer`` with the file's bytes from ``begin`` on; StorageError when reading fails or the file ends."""
    while buffer:
        try:
            n = os.preadv(descriptor, [buffer], begin)
        except OSError as error:
            raise StorageError(f"reading at byte {begin} failed: {error.strerror}") from None
        if n == 0:
            raise StorageError(f"the file ends at byte {begin}: it became shorter while it was read")
        buffer, begin = buffer[n:], begin + n


def _mapped(descriptor: int, begin: int, end: int) -> mmap.mmap | None:
    """The pages that hold [begin, end), present in memory; None where the system cannot promise that."""
    base = begin - begin % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mmap.mmap(descriptor, end - base, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=base)
    except (OSError, ValueError):
        return None
    try:
        mapped.madvise(_POPULATE_READ)
    except OSError as error:
        mapped.close()
        if error.errno in _NOT_SUPPORTED:
            return None
        raise StorageError(
            f"reading bytes {begin} to {end} failed: damaged storage, or the file became shorter"
        ) from None
    return mapped


def pieces(descriptor: int, begin: int, end: int) -> Iterator[memoryview]:
    """The file's bytes [begin, end) in order; a view is valid until the next one is asked for.

    StorageError when reading fails or the file ends early.
    """
    buffer: memoryview | None = None
    while begin < end:
        stop = min(end, begin - begin % _SLICE_BYTES + _SLICE_BYTES)
        mapped = _mapped(descriptor, begin, stop) if stop - begin >= _READ_BYTES and buffer is None else None
        if mapped is not None:
            if stop < end:
                os.posix_fadvise(descriptor, stop, _SLICE_BYTES, os.POSIX_FADV_WILLNEED)
            try:
                with memoryview(mapped) as pages, pages[begin % mmap.ALLOCATIONGRANULARITY :] as piece:
                    yield piece
            finally:
                mapped.close()
        else:
            buffer = buffer or memoryview(bytearray(_READ_BYTES))
            stop = min(stop, begin + _READ_BYTES)
            read_exactly(descriptor, buffer[: stop - begin], begin)
            yield buffer[: stop - begin]
        begin = stop


def hash_range(descriptor: int, begin: int, end: int, *, head: bytes = b"", advance: Advance | None = None) -> bytes:
    """SHA-256 of ``head`` followed by the file's bytes [begin, end)."""
    digest = hashlib.sha256(head)
    for piece in pieces(descriptor, begin, end):
        digest.update(piece)
        if advance:
            advance(len(piece))
    return digest.digest()


def first_nonzero(descriptor: int, begin: int, end: int) -> int | None:
    """File offset of the first byte in [begin, end) that is not zero, or None."""
    for piece in pieces(descriptor, begin, end):
        rest = bytes(piece).lstrip(b"\0")
        if rest:
            return begin + len(piece) - len(rest)
        begin += len(piece)
    return None


def sha256_file(path: str | os.PathLike[str], progress: Progress = silent) -> str:
    """SHA-256 of a whole file in hexadecimal, in one sequential pass on one core."""
    with open_regular(path) as stream:
        n = os.fstat(stream.fileno()).st_size
        with progress(n, "sha256") as advance:
            return hash_range(stream.fileno(), 0, n, advance=advance).hex()


def parallel(
    work: Callable[[T], R], items: Iterable[T], jobs: int | None, stop: threading.Event | None = None
) -> Iterator[R]:
    """``work`` over ``items`` on ``jobs`` threads (default: all cores), results in order, a bounded number ahead.

    When the caller leaves early, nothing new starts, and ``stop`` is set so that long work can look at it and end.
    """
    jobs = max(1, jobs or available_cores())
    with ThreadPoolExecutor(jobs) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= 4 * jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            if stop is not None:
                stop.set()
            for future in waiting:
                future.cancel()
