"""Pinned host memory of one program: what its weights keep there, given back with it.

Kernels read it at the same addresses (the driver maps pinned memory into the device's address space), copies from it
run beside kernels. Pinning more than the host has free would bring the machine to its knees, or end the process, before
the driver refused: so free memory is looked at first.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.backends.cuda.device import Device, DeviceMemoryError

_MIB = 1 << 20
_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_host_bytes(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int | None:
    """What the system, and the container it runs in, has left for processes; None where neither says."""
    found = []
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        found.append(int(rows["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        rows = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        found.append(int(limit) - int(used) + int(rows["inactive_file"]))
    except (OSError, KeyError, ValueError):
        pass
    return max(0, min(found)) if found else None


class HostStore:
    """Named regions of pinned memory, up to ``planned_bytes`` in all; an ``arena.Taker``."""

    def __init__(self, device: Device, planned_bytes: int, *, free: Callable[[], int | None] = free_host_bytes) -> None:
        """DeviceMemoryError when the host has less than that free."""
        self._device = device
        self._planned = planned_bytes
        self._taken: list[NDArray[np.uint8]] = []
        left = free() if planned_bytes else None
        if left is not None and left < planned_bytes:
            raise DeviceMemoryError(self._refusal(f"{left / _MIB:,.0f} MiB of it are free"))

    def _refusal(self, why: str) -> str:
        return (
            f"{self._planned / _MIB:,.0f} MiB of host memory are to be pinned for weights, {why}; free host memory, "
            "raise --n-ffn-layers, or leave --host-embedding out"
        )

    def take(self, name: str, n_bytes: int, alignment: int = 256) -> int:
        """Address of a new region, page-aligned. DeviceMemoryError when it cannot be pinned; then all is given back."""
        try:
            self._taken.append(self._device.allocate_host(max(1, n_bytes)))
        except DeviceMemoryError:
            done = sum(array.nbytes for array in self._taken)
            self.close()
            line = f"{n_bytes / _MIB:,.0f} MiB of them, for {name}, were refused after {done / _MIB:,.0f} MiB"
            raise DeviceMemoryError(self._refusal(line)) from None
        return int(self._taken[-1].ctypes.data)

    def close(self) -> None:
        """Give everything back; no copy of it may be running."""
        while self._taken:
            self._device.free_host(self._taken.pop())
