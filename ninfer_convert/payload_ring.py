"""One buffer for the payloads in flight, used round and round, so that its pages are touched once."""

import mmap
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition

import numpy as np
from numpy.typing import NDArray

from ninfer_format.geometry import up

PAGE_BYTES = 4096


def ring_bytes(payloads: list[int]) -> int:
    """Size of a ring in which the largest of ``payloads`` can be made while the next largest is written."""
    return sum(up(n, PAGE_BYTES) + PAGE_BYTES for n in sorted(payloads, reverse=True)[:2])


class RingClosed(Exception):
    """The pipeline is ending; nobody will get space any more."""


@dataclass(slots=True)
class _Block:
    begin: int
    end: int
    free: bool = False


class PayloadRing:
    """``n_bytes`` of memory handed out as contiguous blocks; room is free again in the order in which it was taken."""

    def __init__(self, n_bytes: int) -> None:
        mapping = mmap.mmap(-1, max(n_bytes, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory = np.frombuffer(mapping, np.uint8)
        self._blocks: deque[_Block] = deque()
        self._changed = Condition()
        self._closed = False

    def take(self, n_bytes: int, phase: int = 0) -> NDArray[np.uint8]:
        """A block of ``n_bytes`` with undefined content, ``phase`` bytes after the start of a page.

        Waits until enough earlier blocks have been given back; RingClosed if the ring is closed first.
        """
        size = up(phase % PAGE_BYTES + n_bytes, PAGE_BYTES)
        if size > self._memory.size:
            raise ValueError(f"a payload of {n_bytes} bytes does not fit the ring of {self._memory.size}")
        with self._changed:
            while (begin := self._place(size)) is None:
                if self._closed:
                    raise RingClosed
                self._changed.wait()
            self._blocks.append(_Block(begin, begin + size))
        begin += phase % PAGE_BYTES
        return self._memory[begin : begin + n_bytes]

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Free the block that ``take`` returned as ``buffer``."""
        begin = buffer.ctypes.data - self._memory.ctypes.data
        with self._changed:
            next(block for block in self._blocks if block.begin <= begin < block.end).free = True
            while self._blocks and self._blocks[0].free:
                self._blocks.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Wake every waiting ``take`` with RingClosed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _place(self, size: int) -> int | None:
        """Where a block of ``size`` can begin now."""
        if not self._blocks:
            return 0
        oldest, newest_end = self._blocks[0].begin, self._blocks[-1].end
        if self._blocks[-1].begin < oldest:  # wrapped: free space lies between the newest and the oldest block
            return newest_end if newest_end + size <= oldest else None
        if newest_end + size <= self._memory.size:
            return newest_end
        return 0 if size <= oldest else None
