"""Pinned memory for what the host sends between rounds: ids, positions, page lists."""

import numpy as np

from ninfer_format.geometry import up
from ninfer_runtime.backends.cuda.device import Array, Device, Stream


class Staging:
    """Pinned memory for small uploads; a send waits only when the ring has come round to a copy still under way."""

    _N_SLOTS = 8

    def __init__(self, device: Device, n_bytes: int) -> None:
        self._slot_bytes = up(n_bytes, 256)
        pinned = device.allocate_host(self._N_SLOTS * self._slot_bytes)
        self._slots = [pinned[i * self._slot_bytes : (i + 1) * self._slot_bytes] for i in range(self._N_SLOTS)]
        self._sent = [device.event() for _ in self._slots]
        self._next = 0

    def send(self, device: Device, pointer: int, array: Array, stream: Stream) -> None:
        """Copy ``array`` to the device; it may be changed as soon as this returns."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        slot, sent = self._slots[self._next], self._sent[self._next]
        sent.synchronize()
        slot[: raw.size] = raw
        device.upload(pointer, slot[: raw.size], stream)
        sent.record(stream)
        self._next = (self._next + 1) % self._N_SLOTS
