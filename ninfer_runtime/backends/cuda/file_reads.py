"""Reads of one file that run beside each other in the C library's own threads (POSIX AIO).

Python threads that read and a Python thread that queues copies take the interpreter lock from each other some thousand
times; on an H200 machine with 16 cores that cost half of the rate of loading. These threads never need it.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ninfer_format.errors import StorageError
from ninfer_format.hashing import read_exactly
from ninfer_format.reader import open_regular

_SIGEV_NONE = 1
_SMALL_BYTES = 64 << 10  # below this a request costs more than the copy


class _Request(ctypes.Structure):
    """``struct aiocb`` of glibc on 64-bit machines."""

    _fields_ = (
        ("fildes", ctypes.c_int),
        ("lio_opcode", ctypes.c_int),
        ("reqprio", ctypes.c_int),
        ("buf", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("sigev_value", ctypes.c_void_p),
        ("sigev_signo", ctypes.c_int),
        ("sigev_notify", ctypes.c_int),
        ("sigev_rest", ctypes.c_char * 48),
        ("internal", ctypes.c_char * 32),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_char * 32),
    )


@cache
def _library() -> ctypes.CDLL:
    for name in (None, "librt.so.1"):  # part of libc since glibc 2.34
        try:
            found = ctypes.CDLL(name, use_errno=True)
            _ = found.aio_read, found.aio_suspend
        except (OSError, AttributeError):
            continue
        found.aio_return.restype = ctypes.c_ssize_t
        return found
    raise StorageError("this system's C library has no asynchronous reads; the cuda backend needs glibc")


class Run(NamedTuple):
    """``n_bytes`` from file offset ``begin`` to memory at ``address``."""

    begin: int
    n_bytes: int
    address: int


class FileReads:
    """Up to ``n_parallel`` reads of ``path`` at a time. StorageError for every failure, UsageError without the file."""

    def __init__(self, path: Path, n_parallel: int) -> None:
        self._calls = _library()
        # Requests of one descriptor are done one after the other, those of its duplicates are not.
        with open_regular(path) as stream:
            self._descriptors = [os.dup(stream.fileno()) for _ in range(n_parallel)]
        self._turn = 0
        self._idle: list[_Request] = []
        self._started: dict[int, list[tuple[_Request, Run]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self, ticket: int, runs: Sequence[Run]) -> None:
        """Begin reading; ``wait`` with the same ticket ends it. The memory must stay until then."""
        requests = self._started.setdefault(ticket, [])
        for run in runs:
            descriptor = self._descriptors[self._turn]
            if run.n_bytes < _SMALL_BYTES:
                self._read_rest(descriptor, run, 0)
                continue
            self._turn = (self._turn + 1) % len(self._descriptors)
            request = self._idle.pop() if self._idle else _Request(sigev_notify=_SIGEV_NONE)
            request.fildes, request.buf, request.nbytes, request.offset = (
                descriptor,
                run.address,
                run.n_bytes,
                run.begin,
            )
            if self._calls.aio_read(ctypes.byref(request)):
                raise StorageError(f"reading at byte {run.begin} failed: {os.strerror(ctypes.get_errno())}")
            requests.append((request, run))

    def wait(self, ticket: int) -> None:
        """Until everything started under ``ticket`` has been read."""
        requests = self._started[ticket]
        while requests:
            request, run = requests[-1]
            self._until_done(request)
            requests.pop()
            failed = self._calls.aio_error(ctypes.byref(request))
            n_read = self._calls.aio_return(ctypes.byref(request))
            self._idle.append(request)
            if failed:
                raise StorageError(f"reading at byte {run.begin} failed: {os.strerror(failed)}")
            if n_read < run.n_bytes:
                self._read_rest(self._descriptors[0], run, n_read)
        del self._started[ticket]

    def _until_done(self, request: _Request) -> None:
        waited = (ctypes.c_void_p * 1)(ctypes.addressof(request))
        while self._calls.aio_error(ctypes.byref(request)) == errno.EINPROGRESS:
            self._calls.aio_suspend(waited, 1, None)

    def _read_rest(self, descriptor: int, run: Run, n_read: int) -> None:
        rest = (ctypes.c_char * (run.n_bytes - n_read)).from_address(run.address + n_read)
        read_exactly(descriptor, memoryview(rest).cast("B"), run.begin + n_read)

    def close(self) -> None:
        """Wait for what is still running, whatever becomes of it, and close the file."""
        for requests in self._started.values():
            for request, _ in requests:
                self._until_done(request)
                self._calls.aio_return(ctypes.byref(request))
        self._started.clear()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
