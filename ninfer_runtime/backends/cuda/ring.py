"""Feed-forward networks that pass through the device: slots with fixed addresses, and copies ahead of every use.

Copies have a stream of their own. Each half of a network (gate and up; down) is guarded by itself: its product waits
until it has arrived, and once it has been multiplied the half that comes next in that slot is copied. Passes end as
they began: slot i holds the network of the i-th streamed layer, whichever round or chunk runs next. In a captured round
the same waits become edges of its graph, which the copies join before its end; a prompt chunk makes them as it goes.
Networks that the CPU computes in rounds pass their slot in prompt chunks only.
"""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.backends.cuda.device import Device, Event, Stream
from ninfer_runtime.backends.cuda.residency import following_users, moving_layers

GATE_UP, DOWN = 0, 1
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class StreamedHalf:
    """A matrix that waits in host memory at ``payload``, packed as its product reads it, and passes ``slot``."""

    name: str
    payload: int
    slot: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """A decoder layer's network: gate and up, down."""

    layer: int
    halves: tuple[StreamedHalf, StreamedHalf]


@dataclass(frozen=True, slots=True)
class RingLayout:
    """All streamed layers, in order; the k-th uses slot k modulo ``n_slots``. ``on_cpu``: numbers of those that pass
    no slot in rounds."""

    layers: tuple[StreamedLayer, ...]
    n_slots: int
    on_cpu: frozenset[int] = frozenset()

    @property
    def is_moving(self) -> bool:
        """Whether rounds copy anything: not where every layer has a slot of its own."""
        return bool(self.moving)

    @property
    def copied_bytes(self) -> int:
        """Of one round."""
        return sum(half.n_bytes for k in self.moving for half in self.layers[k].halves)

    @property
    def moving(self) -> tuple[int, ...]:
        """Numbers of the layers that share their slot, and are copied in every round."""
        return moving_layers(len(self.layers), self.n_slots, self.on_cpu)


class NetworkUse(Protocol):
    """How a layer's network is reached."""

    def half(self, stream: Stream, which: int) -> AbstractContextManager[bool]:
        """Around the launch of the product; gives whether that may start before the work ahead of it has ended."""


class ResidentUse:
    """The network is where it always is."""

    def half(self, stream: Stream, which: int) -> AbstractContextManager[bool]:
        """Nothing to wait for."""
        return nullcontext(True)


RESIDENT = ResidentUse()


def paced(n_bytes: int, slowdown: float) -> list[int]:
    """Lengths of copies from the start of ``n_bytes`` bytes that together take ``slowdown`` times as long as one.

    Copying the same bytes again changes nothing and takes no multiprocessor from the products beside it.
    """
    whole, part = divmod(max(1.0, slowdown), 1.0)
    rest = int(part * n_bytes) // _ALIGNMENT * _ALIGNMENT
    return [n_bytes] * int(whole) + ([rest] if rest else [])


class _Events:
    """Of every half of every slot: has arrived, has been multiplied."""

    def __init__(self, device: Device, n_slots: int) -> None:
        keys = [(slot, half) for slot in range(n_slots) for half in (GATE_UP, DOWN)]
        self.arrived: Mapping[tuple[int, int], Event] = {key: device.event() for key in keys}
        self.used: Mapping[tuple[int, int], Event] = {key: device.event() for key in keys}


class Ring:
    """The slots of one program."""

    def __init__(self, device: Device, layout: RingLayout, slowdown: float = 1.0) -> None:
        """``slowdown``: how many times as long as they need copies take."""
        self.layout = layout
        self._device, self._slowdown = device, slowdown
        self._copies = device.stream()
        self._in_chunks = following_users(len(layout.layers), layout.n_slots)
        self._in_rounds = following_users(len(layout.layers), layout.n_slots, layout.on_cpu)
        self._following = self._in_chunks
        self._as_queued, self._as_captured = (_Events(device, layout.n_slots) for _ in range(2))
        self._events = self._as_queued
        self._copied: set[tuple[int, int]] = set()
        self._joined = device.event()
        self._is_ahead = False

    def fill(self) -> None:
        """The first networks into the slots; once, before any use."""
        for k in range(min(self.layout.n_slots, len(self.layout.layers))):
            for which in (GATE_UP, DOWN):
                self._copy(k, which)
        self._is_ahead = True

    def uses(self) -> dict[int, NetworkUse]:
        """By decoder layer, of those that are streamed."""
        return {layer.layer: _RingUse(self, k) for k, layer in enumerate(self.layout.layers)}

    @contextmanager
    def captured(self, stream: Stream) -> Iterator[None]:
        """Uses inside belong to a capture on ``stream``; slots hold the first networks when its graph is launched."""
        kept = self._events, self._copied, self._is_ahead, self._following
        self._events, self._copied, self._following = self._as_captured, set(), self._in_rounds
        try:
            yield
            if self._copied:
                self._joined.record(self._copies)
                stream.wait(self._joined)
        finally:
            self._events, self._copied, self._is_ahead, self._following = kept

    def settle(self, stream: Stream) -> None:
        """Before a graph is launched on ``stream``: copies that chunks made have ended."""
        if self._is_ahead:
            for event in self._as_queued.arrived.values():
                stream.wait(event)
        self._is_ahead = False

    @contextmanager
    def using(self, stream: Stream, k: int, which: int) -> Iterator[bool]:
        """Around the product of a half of the k-th streamed network."""
        key = k % self.layout.n_slots, which
        if key in self._copied:
            self._wait_for_arrival(stream, key)
        yield False  # an early start would read the slot, or leave it to be overwritten, ahead of those waits
        if self._following[k] != k:
            self._wait_for_use(stream, key)
            self._copy(self._following[k], which)
            self._is_ahead = True

    def _wait_for_arrival(self, stream: Stream, key: tuple[int, int]) -> None:
        stream.wait(self._events.arrived[key])

    def _wait_for_use(self, stream: Stream, key: tuple[int, int]) -> None:
        self._events.used[key].record(stream)
        self._copies.wait(self._events.used[key])

    def _copy(self, k: int, which: int) -> None:
        half, key = self.layout.layers[k].halves[which], (k % self.layout.n_slots, which)
        payload = bytes_at(half.payload, half.n_bytes)
        for n_bytes in paced(half.n_bytes, self._slowdown):
            self._device.upload(half.slot, payload[:n_bytes], self._copies)
        self._events.arrived[key].record(self._copies)
        self._copied.add(key)

    def seconds_of_copies(self) -> float:
        """What the copies of a round take alone; nothing else may be running."""
        begin, end = self._device.event(timing=True), self._device.event(timing=True)
        begin.record(self._copies)
        for k in self.layout.moving:
            for which in (GATE_UP, DOWN):
                self._copy(k, which)
        end.record(self._copies)
        self.fill()
        self._copies.synchronize()
        return end.elapsed_ms(begin) / 1e3


class _RingUse:
    """The network passes a slot."""

    def __init__(self, ring: Ring, k: int) -> None:
        self._ring, self._k = ring, k

    def half(self, stream: Stream, which: int) -> AbstractContextManager[bool]:
        """See ``NetworkUse``."""
        return self._ring.using(stream, self._k, which)


def bytes_at(address: int, n_bytes: int) -> NDArray[np.uint8]:
    """Host memory without a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
