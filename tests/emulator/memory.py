"""Device memory of the emulator: poisoned, guarded on both sides, and gone when freed."""

import ctypes
import mmap
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.backends.cuda.device import DeviceError, DeviceMemoryError

POISON = 0xFF  # a NaN as bf16, fp16 or fp32, -1 as an integer
_GUARD = 0xA5
_ALIGNMENT = 256
_PAGE = mmap.PAGESIZE
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def view(pointer: int, n_bytes: int) -> NDArray[np.uint8]:
    """The bytes at an address, without a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(pointer))


def _map(n_bytes: int) -> int:
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base: int | None = _libc.mmap(None, n_bytes, access, flags, -1, 0)
    if base is None or base == _MAP_FAILED:
        raise DeviceMemoryError(f"the emulator could not map {n_bytes} bytes of host memory")
    return base


class _Block:
    """One allocation: [untouchable page][guard bytes][n_bytes][guard bytes][untouchable page]."""

    def __init__(self, n_bytes: int, *, marked: bool) -> None:
        self.n_bytes = n_bytes
        self.marks = 0
        self._mark_bytes = 8 * -(-n_bytes // 4)
        if marked:
            self.marks = _map(self._mark_bytes)
        used = -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        self._pages = max(1, -(-used // _PAGE)) * _PAGE
        self._mapped = self._pages + 2 * _PAGE
        self._base = base = _map(self._mapped)
        _libc.mprotect(base, _PAGE, _PROT_NONE)
        _libc.mprotect(base + _PAGE + self._pages, _PAGE, _PROT_NONE)
        self.pointer: int = base + _PAGE + self._pages - used
        front, behind = self._guards()
        front[:] = behind[:] = _GUARD
        view(self.pointer, n_bytes)[:] = POISON

    def _guards(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        start, end = self._base + _PAGE, self.pointer + self.n_bytes
        return view(start, self.pointer - start), view(end, start + self._pages - end)

    def check(self) -> None:
        """DeviceError when a byte next to the allocation was written."""
        front, behind = self._guards()
        what = f"the allocation of {self.n_bytes} bytes at {self.pointer:#x}"
        if (wrong := np.flatnonzero(front != _GUARD)).size:
            raise DeviceError(f"a kernel wrote {front.size - int(wrong[-1])} bytes in front of {what}")
        if (wrong := np.flatnonzero(behind != _GUARD)).size:
            raise DeviceError(f"a kernel wrote {int(wrong[0])} bytes behind the end of {what}")

    def unmap(self) -> None:
        _libc.munmap(self._base, self._mapped)
        if self.marks:
            _libc.munmap(self.marks, self._mark_bytes)


class Region(ctypes.Structure):
    """``emulator::Region``: a range of device memory and the marks of its last reads and writes, if it is watched."""

    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("marks", ctypes.c_uint64))


class Memory:
    """All allocations of one device, up to ``total_bytes``."""

    def __init__(self, total_bytes: int, *, marked: bool = False) -> None:
        """``marked`` gives every allocation room for a mark per access, as watching builds need it."""
        self.total_bytes = total_bytes
        self._marked = marked
        self.used_bytes = 0
        self._blocks: dict[int, _Block] = {}

    def allocate(self, n_bytes: int) -> int:
        """Address of ``n_bytes`` poisoned bytes, a multiple of 256."""
        if n_bytes <= 0:
            raise DeviceError(f"cannot allocate {n_bytes} bytes")
        if n_bytes > (left := self.total_bytes - self.used_bytes):
            raise DeviceMemoryError(f"{n_bytes} bytes of device memory do not fit, {left} are left")
        block = _Block(n_bytes, marked=self._marked)
        self._blocks[block.pointer] = block
        self.used_bytes += n_bytes
        return block.pointer

    def free(self, pointer: int) -> None:
        """Check the guards and unmap; later use of the address ends in an error."""
        if (block := self._blocks.pop(pointer, None)) is None:
            raise DeviceError(f"{pointer:#x} was not allocated here, or is free already")
        self.used_bytes -= block.n_bytes
        try:
            block.check()
        finally:
            block.unmap()

    def regions(self) -> ctypes.Array[Region]:
        """The allocations that carry marks."""
        blocks = [block for block in self._blocks.values() if block.marks]
        rows = [Region(block.pointer, block.pointer + block.n_bytes, block.marks) for block in blocks]
        return (Region * len(rows))(*rows)

    def check(self) -> None:
        """DeviceError when any guard was written."""
        for block in self._blocks.values():
            block.check()

    def check_range(self, pointer: int, n_bytes: int, what: str) -> None:
        """DeviceError unless the range lies inside one allocation."""
        starts = sorted(self._blocks)
        at = bisect_right(starts, pointer) - 1
        if at < 0 or pointer + n_bytes > starts[at] + self._blocks[starts[at]].n_bytes:
            raise DeviceError(f"{what} of {n_bytes} bytes at {pointer:#x}: {self.describe(pointer + n_bytes - 1)}")

    def describe(self, address: int) -> str:
        """Where an address lies, in words."""
        for block in self._blocks.values():
            start, end = block.pointer, block.pointer + block.n_bytes
            what = f"the allocation of {block.n_bytes} bytes at {start:#x}"
            if start <= address < end:
                return f"byte {address - start} of {what}"
            if end <= address < end + 2 * _PAGE:
                return f"{address - end} bytes behind the end of {what}"
            if start - 2 * _PAGE <= address < start:
                return f"{start - address} bytes in front of {what}"
        return "in no allocation of the device"

    def close(self) -> None:
        """Unmap everything."""
        for block in self._blocks.values():
            block.unmap()
        self._blocks.clear()
        self.used_bytes = 0
