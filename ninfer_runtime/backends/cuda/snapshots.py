"""Saved states of slots: which place of device or host memory each lies in. Copies are queued on the program's stream.

Copies of one stream follow each other, so a place may be given away while one to or from it is still queued.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from ninfer_runtime.backends.base import Place, ProgramLimits, StateSnapshot
from ninfer_runtime.backends.checks import require
from ninfer_runtime.backends.cuda.device import Device, Stream

Position = tuple[int, int, int]
"""Rotary position of a token: temporal, height, width."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of every state: ``n_bytes`` at ``base + slot · n_bytes``, and per saved state behind ``saved``."""

    base: int
    saved: int
    n_bytes: int

    def of_slot(self, slot: int) -> int:
        """Device address in a slot."""
        return self.base + slot * self.n_bytes

    def of_place(self, index: int) -> int:
        """Device address in a saved state."""
        return self.saved + index * self.n_bytes


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a snapshot is, and the rotary position of its last token."""

    place: Place
    index: int
    position: Position


class Snapshots:
    """All snapshots of one program."""

    def __init__(self, device: Device, stream: Stream, limits: ProgramLimits, parts: Sequence[Part]) -> None:
        self._device, self._stream, self._limits, self._parts = device, stream, limits, parts
        self._host = [[device.allocate_host(part.n_bytes) for part in parts] for _ in range(limits.host_snapshots)]
        self._saved: dict[int, Saved] = {}
        self._serials = count(1)

    def clear(self, slot: int) -> None:
        """The state before the first token."""
        for part in self._parts:
            self._device.fill(part.of_slot(slot), 0, part.n_bytes, self._stream)

    def save(self, slot: int, n_tokens: int, position: Position, place: Place) -> StateSnapshot:
        """Copy a slot's state; ContractError beyond the planned number."""
        index = self._free(place)
        for i, part in enumerate(self._parts):
            if place == "device":
                self._device.copy(part.of_place(index), part.of_slot(slot), part.n_bytes, self._stream)
            else:
                self._device.download(part.of_slot(slot), self._host[index][i], self._stream)
        return self._named(n_tokens, Saved(place, index, position))

    def load(self, slot: int, snapshot: StateSnapshot) -> Position:
        """Copy it into a slot."""
        saved = self._find(snapshot)
        for i, part in enumerate(self._parts):
            if saved.place == "device":
                self._device.copy(part.of_slot(slot), part.of_place(saved.index), part.n_bytes, self._stream)
            else:
                self._device.upload(part.of_slot(slot), self._host[saved.index][i], self._stream)
        return saved.position

    def release(self, snapshot: StateSnapshot) -> None:
        """Give its place back."""
        self._find(snapshot)
        del self._saved[snapshot.serial]

    def relocate(self, snapshot: StateSnapshot, place: Place) -> StateSnapshot:
        """Move it to the other place; the old name is released."""
        old = self._find(snapshot)
        require(place != old.place, f"snapshot {snapshot.serial} is in {place} memory already")
        index = self._free(place)
        for i, part in enumerate(self._parts):
            if place == "host":
                self._device.download(part.of_place(old.index), self._host[index][i], self._stream)
            else:
                self._device.upload(part.of_place(index), self._host[old.index][i], self._stream)
        del self._saved[snapshot.serial]
        return self._named(snapshot.n_tokens, Saved(place, index, old.position))

    def _find(self, snapshot: StateSnapshot) -> Saved:
        require(snapshot.serial in self._saved, f"snapshot {snapshot.serial} was released or belongs elsewhere")
        return self._saved[snapshot.serial]

    def _free(self, place: Place) -> int:
        """The first place for a snapshot that none has."""
        limit = self._limits.device_snapshots if place == "device" else self._limits.host_snapshots
        taken = {saved.index for saved in self._saved.values() if saved.place == place}
        require(len(taken) < limit, f"{len(taken)} {place} snapshots are alive, the program was planned for {limit}")
        return next(i for i in range(limit) if i not in taken)

    def _named(self, n_tokens: int, saved: Saved) -> StateSnapshot:
        snapshot = StateSnapshot(next(self._serials), n_tokens, saved.place)
        self._saved[snapshot.serial] = saved
        return snapshot
