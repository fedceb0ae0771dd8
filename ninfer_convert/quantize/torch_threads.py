"""One torch thread per worker thread: each worker is its own parallelism."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def one_thread_here() -> None:
    """Make torch operations of the calling thread run on it alone.

    The setting is per thread for OpenMP and MKL; a thread that never made it would start a team of its own.
    """
    torch.set_num_threads(1)


@contextmanager
def threads_restored() -> Iterator[None]:
    """Give the calling thread its number of torch threads back afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
