"""What the CUDA backend asks of a device, and nothing about how: a card (``launch.py``) and the tests' emulator answer.

Device memory is addressed by plain integers; a kernel gets one parameter struct (pointers first, then 4-byte members),
a ``ctypes.Structure`` that mirrors the struct of the same name in the ``.cu`` file.

Order: work on one stream runs in the order of the calls. A launch with ``pdl=True`` may *start* before the work ahead
of it has ended, so its kernel calls ``grid_dependency_wait()`` before it touches anything that earlier work writes or
reads; with ``pdl=False`` it starts when all earlier work on the stream has ended.
"""

import ctypes
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import NinferError
from ninfer_runtime.backends.cuda.compiler import KernelSpec

Grid = tuple[int, int, int]
Array = NDArray[Any]


class DeviceError(NinferError):
    """The device or its driver refused, or a kernel failed; after a kernel's failure the device is of no more use."""

    exit_code = 3


class DeviceMemoryError(DeviceError):
    """Device or pinned memory that does not fit; the message says what, by how much, and which option helps."""


class Event(Protocol):
    """A point on a stream."""

    def record(self, stream: "Stream") -> None:
        """Put the point behind the work queued on ``stream`` so far; on a captured stream a point of that capture,
        which only streams of the same capture can wait for."""

    def query(self) -> bool:
        """Whether the point has been passed; True for an event that was never recorded."""

    def synchronize(self) -> None:
        """Wait on the host until the point has been passed."""

    def elapsed_ms(self, since: "Event") -> float:
        """Milliseconds from ``since`` to this event; both recorded and passed, both made with ``timing=True``."""


class Stream(Protocol):
    """A queue of device work."""

    def synchronize(self) -> None:
        """Wait on the host until everything queued so far has ended. DeviceError if any of it failed."""

    def wait(self, event: Event) -> None:
        """Let everything queued from now on start after ``event``; the host does not wait. An event of a capture takes
        the stream into it, until the capture ends."""


class Kernel(Protocol):
    """One compiled, loaded variant."""

    def launch(self, grid: Grid, params: ctypes.Structure, stream: Stream, *, pdl: bool = True) -> None:
        """Queue the kernel: ``grid`` blocks of the spec's ``threads``; ``params`` is copied before the call returns."""


class Graph(Protocol):
    """Work recorded once and repeated by one call; pointers and parameters are those of the recording."""

    @property
    def n_nodes(self) -> int:
        """Launches, copies and fills that one launch of it runs."""

    @property
    def n_bytes(self) -> int:
        """Device memory that holding it took; 0 where unknown."""

    def launch(self, stream: Stream) -> None:
        """Queue all of the recorded work on ``stream``."""

    def close(self) -> None:
        """Give it back; no launch of it may be running."""


class Device(Protocol):
    """One card, or the emulator."""

    arch: str  # compile target, for example "sm_120a"
    name: str
    n_sms: int
    shared_per_sm: int  # bytes
    l2_bytes: int
    total_bytes: int  # device memory

    def activate(self) -> None:
        """Make this device current in the calling thread; its other calls follow in one thread at a time."""

    def kernel(self, spec: KernelSpec) -> Kernel:
        """The compiled variant; compiled and loaded at the first call, the same object afterwards."""

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        """Compile and load many variants in parallel, so that ``kernel`` answers at once."""

    def free_bytes(self) -> int:
        """Device memory that can still be allocated."""

    def allocate(self, n_bytes: int) -> int:
        """Device memory at an address that is a multiple of 256; content undefined. DeviceMemoryError."""

    def free(self, pointer: int) -> None:
        """Give back what ``allocate`` returned, once all work that uses it has ended."""

    def allocate_host(self, n_bytes: int) -> NDArray[np.uint8]:
        """Pinned host memory, which copies asynchronously and which kernels can read at the same address; it lives as
        long as the device object. DeviceMemoryError.

        The one call that any thread may make.
        """

    def free_host(self, array: NDArray[np.uint8]) -> None:
        """Give back what ``allocate_host`` returned, before that; no copy of it may be running, no view be used."""

    def stream(self) -> Stream:
        """A new stream."""

    def event(self, *, timing: bool = False) -> Event:
        """A new event; one that can measure time costs more to record."""

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for one stream, or for everything on the device."""

    def upload(self, pointer: int, array: Array, stream: Stream | None = None) -> None:
        """Copy a C-contiguous array to the device.

        With a stream and pinned memory the call returns at once and ``array`` must stay unchanged until the copy has
        run; otherwise the copy has ended when the call returns.
        """

    def download(self, pointer: int, array: Array, stream: Stream | None = None) -> None:
        """Fill a C-contiguous array from the device; asynchronous under the same rule as ``upload``."""

    def copy(self, target: int, source: int, n_bytes: int, stream: Stream) -> None:
        """Queue a copy between non-overlapping ranges of device memory."""

    def fill(self, pointer: int, byte: int, n_bytes: int, stream: Stream) -> None:
        """Queue setting ``n_bytes`` bytes to ``byte`` (0..255)."""

    def call(self, stream: Stream, work: Callable[[], None]) -> None:
        """Queue a call of the host: ``work`` runs in a thread of the driver when all earlier work on the stream has
        ended, and later work waits for it. It must not raise, nor call the device. It is kept as long as the device."""

    def capture(self, stream: Stream) -> AbstractContextManager[Graph]:
        """Record what is queued on ``stream`` inside the block; none of it runs.

        The Graph may be launched once the block has ended. Inside: launches, copies, fills, calls of the host and
        asynchronous uploads and downloads of pinned memory, on this stream and on streams that wait for an event of the
        capture; this one waits for all of theirs before the end. No waiting on the host, no allocation, no first use of
        a kernel.
        """

    def close(self) -> None:
        """Give everything back: memory, graphs, modules, streams. The device is unusable afterwards."""
