"""What the host's memory and cores can do, measured: the roofs of a run without a device, and of loading."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

REPEATS = 5
_MIB = 1 << 20
_BUFFER_BYTES = 32 * _MIB
"""What one thread copies into: as large as the buffers of a loader, so the source alone comes from memory."""
_PRODUCT_WIDTH = 1024


def best_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The fastest of some runs, after one that does not count."""
    work()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def n_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memcpy_gbps(n_bytes: int, threads: int | None = None) -> float:
    """GB/s of copying ``n_bytes`` from memory into buffers, all threads together; bytes counted once."""
    count = threads or n_threads()
    source = np.ones(n_bytes, np.uint8)
    targets = [np.ones(min(_BUFFER_BYTES, n_bytes), np.uint8) for _ in range(count)]
    step = targets[0].size

    def copy(thread: int) -> None:
        for begin in range(thread * step, n_bytes, count * step):
            part = source[begin : begin + step]
            np.copyto(targets[thread][: part.size], part)

    with ThreadPoolExecutor(count) as pool:
        return n_bytes / best_seconds(lambda: list(pool.map(copy, range(count)))) / 1e9


def read_gbps(n_bytes: int, threads: int | None = None) -> float:
    """GB/s of reading ``n_bytes`` of memory once, all threads together."""
    count = threads or n_threads()
    parts = np.array_split(np.ones(n_bytes // 8, np.int64), count)
    with ThreadPoolExecutor(count) as pool:
        return n_bytes / best_seconds(lambda: list(pool.map(np.add.reduce, parts))) / 1e9


def product_tflops() -> float:
    """TFLOP/s of a float32 matrix product."""
    matrix = np.ones((_PRODUCT_WIDTH, _PRODUCT_WIDTH), np.float32)
    return 2 * _PRODUCT_WIDTH**3 / best_seconds(lambda: matrix @ matrix) / 1e12
