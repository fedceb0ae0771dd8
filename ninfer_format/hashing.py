"""SHA-256 of files and byte ranges, on one core or on all of them.

Files are read with ``pread`` into small buffers rather than mapped: the buffers stay in the second-level cache (the
speed is the same), resident memory stays flat, and a file that shrinks meanwhile is an error instead of a SIGBUS.
"""

import hashlib
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


def pieces(descriptor: int, begin: int, end: int) -> Iterator[memoryview]:
    """The file's bytes [begin, end) as views of one reused buffer of 1 MiB."""
    buffer = memoryview(bytearray(min(_READ_BYTES, max(0, end - begin))))
    while begin < end:
        piece = buffer[: end - begin]
        read_exactly(descriptor, piece, begin)
        yield piece
        begin += len(piece)


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
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
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
