"""One allocation for everything: regions are handed out front to back and never given back one by one.

``ArenaPlan`` and ``Arena`` answer the same ``take`` calls, the first without a device, so that one function lays out
the memory twice: to know its size before anything is allocated, and to get the addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ninfer_format.geometry import up
from ninfer_runtime.backends.cuda.device import Device, DeviceMemoryError

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Region:
    """A named range of an arena: ``offset`` from its start, in bytes."""

    name: str
    offset: int
    n_bytes: int


class Taker(Protocol):
    """What a layout function is given."""

    def take(self, name: str, n_bytes: int, alignment: int = ALIGNMENT) -> int:
        """Address of a new region of ``n_bytes`` bytes (0 is allowed)."""


class _Regions:
    """The arithmetic that a plan and an arena share."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._end = 0

    @property
    def n_bytes(self) -> int:
        """Bytes up to the end of the last region, rounded up to the default alignment."""
        return up(self._end, ALIGNMENT)

    @property
    def regions(self) -> Sequence[Region]:
        """All regions in the order they were taken."""
        return tuple(self._regions)

    def _add(self, name: str, n_bytes: int, alignment: int) -> Region:
        if n_bytes < 0 or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"region {name!r}: {n_bytes} bytes aligned to {alignment}")
        region = Region(name, up(self._end, alignment), n_bytes)
        self._regions.append(region)
        self._end = region.offset + n_bytes
        return region

    def rows(self) -> list[tuple[str, int]]:
        """(group, bytes) per group of regions, largest first; the group of ``state/3/conv`` is ``state``."""
        groups: dict[str, int] = {}
        for region in self._regions:
            group = region.name.partition("/")[0]
            groups[group] = groups.get(group, 0) + region.n_bytes
        return sorted(groups.items(), key=lambda row: -row[1])


class ArenaPlan(_Regions):
    """Counts; its addresses are offsets from zero."""

    def take(self, name: str, n_bytes: int, alignment: int = ALIGNMENT) -> int:
        """Offset of a new region."""
        return self._add(name, n_bytes, alignment).offset


class Arena(_Regions):
    """``n_bytes`` of device memory, taken at once and given back by ``close``."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        """Raises DeviceMemoryError when the device has not that much left."""
        super().__init__()
        self._device = device
        self.capacity = n_bytes
        self._base = device.allocate(max(n_bytes, ALIGNMENT))

    def take(self, name: str, n_bytes: int, alignment: int = ALIGNMENT) -> int:
        """Device address of a new region, aligned up to 256 bytes.

        DeviceMemoryError when the arena is too small for it: then the plan and the layout differ.
        """
        if alignment > ALIGNMENT:
            raise ValueError(f"region {name!r}: alignment {alignment} exceeds {ALIGNMENT}, that of the arena itself")
        region = self._add(name, n_bytes, alignment)
        if self._end > self.capacity:
            self._regions.pop()
            self._end = self._regions[-1].offset + self._regions[-1].n_bytes if self._regions else 0
            raise DeviceMemoryError(
                f"region {name!r} of {n_bytes} bytes ends {region.offset + n_bytes - self.capacity} bytes behind the "
                f"arena of {self.capacity}; it was planned smaller"
            )
        return self._base + region.offset

    def close(self) -> None:
        """Give the memory back; all work that uses it must have ended."""
        if self._base:
            self._device.free(self._base)
            self._base = 0
