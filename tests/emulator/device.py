"""The CPU as a device: kernels built by the C++ compiler, run thread by thread, so that no test needs a card.

How to test a kernel (``tests/emulator/vector_add.cu`` and ``test_vector_add.py`` are the example to copy):

    spec = KernelSpec("my_kernel.cu", "my_kernel", defines=(("N", 128),), threads=256, shared_bytes=4096)
    with EmulatedDevice() as device:
        x, out = device.put(array), device.empty(n_bytes)            # device addresses, poisoned until written
        device.kernel(spec).launch((n_blocks, 1, 1), MyParams(x, out, n), device.stream())
        device.synchronize()                                         # guard bytes are checked here
        result = device.get(out, np.float32, (rows, columns))

Code that takes a ``Device`` (ops, a whole program) gets the ``EmulatedDevice`` itself. What a launch finds out:
 - ``KernelError`` names kernel, block and thread: lanes of a warp that meet in different calls, a barrier that some
   threads never reach, misaligned or unmapped addresses, an endless loop, a parameter struct of another size;
 - stale values instead of races: lanes run one after another between two meetings of their warp, warps between two
   barriers, blocks from the last to the first; a missing ``warp_sync`` or ``__syncthreads`` shows as poison;
 - poison is 0xFF: NaN as a float, -1 as an integer. Shared memory holds it at the start of every block, new
   allocations until they are written, and targets of ``cp_async_*`` until the ``cp_async_wait`` that completes them.
``EmulatedDevice(watch=True)``, or NINFER_WATCH=1 for a whole run of tests, looks at every access: races in shared
memory (also with an unfinished cp.async), and what earlier kernels touch in front of ``grid_dependency_wait()``.
``EmulatedDevice(lazy=True)`` leaves queued work undone until something waits for it: forgotten waits become visible;
a stream's own ``lazy`` can be changed. ``order`` says in which of the allowed orders graphs do the work of two streams.
A block is one row of threads (``threads``, a multiple of 32); no clusters, no float atomics, no textures.
fp32 results: fma where NVRTC contracts, mma sums products in order of k in fp32; expf and friends are the C library's.
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ninfer_runtime.backends.cuda.compiler import KERNEL_FOLDER, KernelSpec
from ninfer_runtime.backends.cuda.device import Array, DeviceError, Event, Graph, Grid, Kernel, Stream
from tests.emulator.build import HERE, Builder
from tests.emulator.memory import POISON, Memory, view
from tests.emulator.recording import Order, Recording, Work
from tests.emulator.running import Running

MAX_SHARED_BYTES = 101_376
MAX_THREADS = 1024
_MAX_PARAMS_BYTES = 4096
_MAX_GRID = (2**31 - 1, 65_535, 65_535)
_ERROR_BYTES = 2048
# The host state of the libraries and the signal handlers are the process's: one launch at a time.
_ONE_LAUNCH = threading.RLock()


class KernelError(DeviceError):
    """A kernel did what the hardware does not allow; the message names it, its block and its thread."""


class _Launch(ctypes.Structure):
    """``emulator::Launch`` of cuda_emulator.hpp."""

    _fields_ = (
        ("params", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("error", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("n_regions", ctypes.c_uint64),
        ("params_bytes", ctypes.c_uint64),
        ("error_bytes", ctypes.c_uint64),
        ("fault_address", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("cpu_seconds", ctypes.c_uint32),
        ("pdl", ctypes.c_uint32),
        ("serial", ctypes.c_uint32),
        ("first_serial", ctypes.c_uint32),
        ("other_serial", ctypes.c_uint32),
        ("released_early", ctypes.c_uint32),
    )


class EmulatedStream:
    """A queue; its work is done at once, or with ``lazy`` when something waits for it."""

    def __init__(self, device: "EmulatedDevice") -> None:
        self._device = device
        self.lock = device.lock
        self._pending: deque[Work] = deque()
        self.recording: Recording | None = None
        self.lazy = device.lazy
        self.n_queued = 0
        self.n_done = 0

    def queue(self, work: Work) -> None:
        """Record, postpone or do a piece of work."""
        if self.recording is not None:
            self.recording.add(self, work)
            return
        with self.lock:
            self.n_queued += 1
            self._pending.append(work)
            if not self.lazy:
                self.run_until(self.n_queued)

    def run_until(self, count: int) -> None:
        """Do the work up to the ``count``-th piece ever queued."""
        with self.lock:
            while self.n_done < count:
                self.n_done += 1
                self._pending.popleft()()

    def synchronize(self) -> None:
        """Do everything that is queued."""
        self.refuse_while_recording("synchronize")
        self.run_until(self.n_queued)
        self._device.running.end_all()
        self._device.memory.check()

    def wait(self, event: Event) -> None:
        """Let later work run after the event; one that was captured takes the stream into its capture."""
        assert isinstance(event, EmulatedEvent)
        if event.captured is None:
            self.refuse_while_recording("wait")
            self.queue(event.as_recorded())
            return
        recording, after = event.captured
        if not recording.is_open or self.recording not in (None, recording):
            raise DeviceError("waiting for an event that was recorded in another capture")
        self.recording = recording
        recording.wait(self, after)

    def refuse_while_recording(self, what: str) -> None:
        """DeviceError while the stream is captured."""
        if self.recording is not None:
            raise DeviceError(f"{what} on a stream that is being captured")


class EmulatedEvent:
    """A point on a stream, with the time at which it was passed."""

    def __init__(self, timing: bool) -> None:
        self._timing = timing
        self._stream: EmulatedStream | None = None
        self.captured: tuple[Recording, frozenset[int]] | None = None
        self._position = 0
        self._seconds = 0.0

    def record(self, stream: Stream) -> None:
        """Put the point behind the work queued so far."""
        assert isinstance(stream, EmulatedStream)
        if stream.recording is not None:
            self.captured = stream.recording, stream.recording.tail(stream)
            return
        self.captured = None
        with stream.lock:
            self._stream, self._position = stream, stream.n_queued + 1
            stream.queue(self._passed)

    def _passed(self) -> None:
        self._seconds = time.perf_counter()

    def reached(self) -> None:
        """Do the work in front of the point."""
        self.as_recorded()()

    def as_recorded(self) -> Work:
        """``reached`` for the point as it is now; recording the event again does not change it."""
        stream, position = self._stream, self._position
        return lambda: None if stream is None else stream.run_until(position)

    def query(self) -> bool:
        """Whether the point is passed; asking lets one more piece of work be done."""
        if self._stream is None or self._stream.n_done >= self._position:
            return True
        self._stream.run_until(self._stream.n_done + 1)
        return False

    def synchronize(self) -> None:
        """Do the work in front of the point."""
        self.reached()

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds between two passed points."""
        assert isinstance(since, EmulatedEvent)
        if not (self._timing and since._timing):
            raise DeviceError("elapsed time of events that were made without timing=True")
        return (self._seconds - since._seconds) * 1e3


class EmulatedGraph:
    """Recorded work, done again by each launch."""

    def __init__(self, recording: Recording, order: Order) -> None:
        self._recording: Recording | None = recording
        self._order = order
        self._work: list[Work] = []
        self.n_nodes = 0
        self.n_bytes = 0

    def end(self) -> None:
        """The recording is complete."""
        assert self._recording is not None
        self._recording.end()
        self.n_nodes = len(self._recording)
        self._work = self._recording.in_order(self._order)

    def launch(self, stream: Stream) -> None:
        """Queue all of it."""
        assert isinstance(stream, EmulatedStream)
        if self._recording is None:
            raise DeviceError("the graph is closed")
        if self._recording.is_open:
            raise DeviceError("a graph can be launched only after its capture has ended")
        stream.refuse_while_recording("launching a graph")
        for work in self._work:
            stream.queue(work)

    def close(self) -> None:
        """Forget it."""
        self._recording = None
        self._work = []


class EmulatedKernel:
    """One built variant."""

    def __init__(self, device: "EmulatedDevice", spec: KernelSpec, library: Path) -> None:
        self._device = device
        self._spec = spec
        self._run: Callable[[Any], int] = ctypes.CDLL(str(library)).emulator_run
        self.seconds = 0.0
        self.n_launches = 0

    def launch(self, grid: Grid, params: ctypes.Structure, stream: Stream, *, pdl: bool = True) -> None:
        """Queue the kernel with a copy of ``params``; KernelError when it runs and goes wrong."""
        assert isinstance(stream, EmulatedStream)
        variant = self._spec.variant
        if any(not 1 <= size <= limit for size, limit in zip(grid, _MAX_GRID, strict=True)):
            raise DeviceError(f"kernel {variant}: grid {grid}, each of its sizes must be 1..{_MAX_GRID}")
        n_bytes = ctypes.sizeof(params)
        if n_bytes > _MAX_PARAMS_BYTES:
            raise DeviceError(f"kernel {variant}: {n_bytes} bytes of parameters, at most {_MAX_PARAMS_BYTES}")
        copied = ctypes.create_string_buffer(ctypes.string_at(ctypes.addressof(params), n_bytes), n_bytes)
        stream.queue(lambda: self._launch(grid, copied, pdl))

    def _launch(self, grid: Grid, params: ctypes.Array[ctypes.c_char], pdl: bool) -> None:
        spec = self._spec
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        regions = self._device.memory.regions()
        serial, first = self._device.running.begin(spec.variant, pdl)
        request = _Launch(
            ctypes.addressof(params), spec.variant.encode(), ctypes.addressof(error), ctypes.addressof(regions),
            len(regions), ctypes.sizeof(params), _ERROR_BYTES, 0, grid, spec.threads, spec.shared_bytes,
            self._device.cpu_seconds, pdl, serial, first, 0, 0,
        )  # fmt: skip
        began = time.perf_counter()
        with _ONE_LAUNCH:
            failed = self._run(ctypes.byref(request))
        self.seconds += time.perf_counter() - began
        self.n_launches += 1
        if failed:
            message = error.value.decode(errors="replace")
            if request.other_serial:
                message += f" ({self._device.running.name(request.other_serial)})"
            if request.fault_address:
                message += f", {self._device.memory.describe(request.fault_address)}"
            raise KernelError(message)
        if not request.released_early:
            self._device.running.end_before(serial)


class EmulatedDevice:
    """A ``Device`` of ``n_sms`` multiprocessors in host memory; addresses are those of this process."""

    name = "CUDA emulator"
    shared_per_sm = 102_400
    l2_bytes = 8 << 20

    def __init__(
        self,
        *,
        n_sms: int = 4,
        arch: str = "sm_90a",
        total_bytes: int = 4 << 30,
        lazy: bool = False,
        order: Order = "recorded",
        watch: bool | None = None,
        folders: Sequence[Path] = (KERNEL_FOLDER, HERE),
        cpu_seconds: int = 120,
    ) -> None:
        """``folders`` are searched for kernel sources; a launch that uses more than ``cpu_seconds`` is ended.

        ``watch`` looks at every access (default: whether the environment has ``NINFER_WATCH=1``).
        """
        if watch is None:
            watch = os.environ.get("NINFER_WATCH") == "1"
        self.arch = arch
        self.n_sms = n_sms
        self.total_bytes = total_bytes
        self.lazy = lazy
        self.order: Order = order
        self.cpu_seconds = cpu_seconds
        self.lock = threading.RLock()  # a load queues from several threads
        self.memory = Memory(total_bytes, marked=watch)
        self.running = Running()
        self._builder = Builder(folders, watch=watch)
        self._kernels: dict[KernelSpec, EmulatedKernel] = {}
        self._streams: list[EmulatedStream] = []
        self._pinned: list[NDArray[np.uint8]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def activate(self) -> None:
        """Every thread may use it."""

    def kernel(self, spec: KernelSpec) -> Kernel:
        """The built variant; the same object at every call."""
        if spec not in self._kernels:
            self._refuse_while_recording(f"the first use of kernel {spec.variant}")
            self.prepare([spec])
        return self._kernels[spec]

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        """Build many variants on all cores."""
        wanted = [spec for spec in dict.fromkeys(specs) if spec not in self._kernels]
        for spec in wanted:
            if not 0 <= spec.shared_bytes <= MAX_SHARED_BYTES:
                limit = f"at most {MAX_SHARED_BYTES} on every architecture"
                raise DeviceError(f"kernel {spec.variant}: {spec.shared_bytes} bytes of shared memory, {limit}")
            if spec.threads % 32 or not 32 <= spec.threads <= MAX_THREADS:
                limit = f"a multiple of 32 up to {MAX_THREADS}"
                raise DeviceError(f"kernel {spec.variant}: {spec.threads} threads, expected {limit}")
        for spec, library in zip(wanted, self._builder.libraries(wanted), strict=True):
            self._kernels[spec] = EmulatedKernel(self, spec, library)

    def free_bytes(self) -> int:
        """What can still be allocated."""
        return self.total_bytes - self.memory.used_bytes

    def allocate(self, n_bytes: int) -> int:
        """Poisoned memory between guard bytes."""
        self._refuse_while_recording("an allocation")
        return self.memory.allocate(n_bytes)

    def free(self, pointer: int) -> None:
        """Give memory back; DeviceError when its guard bytes were written."""
        self._refuse_while_recording("freeing memory")
        self.memory.free(pointer)

    def allocate_host(self, n_bytes: int) -> NDArray[np.uint8]:
        """Memory that counts as pinned."""
        array = np.full(n_bytes, POISON, dtype=np.uint8)
        self._pinned.append(array)
        return array

    def free_host(self, array: NDArray[np.uint8]) -> None:
        """Forget what ``allocate_host`` returned; DeviceError for anything else."""
        before = len(self._pinned)
        self._pinned = [one for one in self._pinned if one is not array]
        if len(self._pinned) == before:
            raise DeviceError("an array that was not allocated here as pinned memory, or is given back already")

    def stream(self) -> EmulatedStream:
        """A new stream."""
        self._streams.append(EmulatedStream(self))
        return self._streams[-1]

    def event(self, *, timing: bool = False) -> EmulatedEvent:
        """A new event."""
        return EmulatedEvent(timing)

    def synchronize(self, stream: Stream | None = None) -> None:
        """Do what one stream or all of them have queued, and check the guard bytes."""
        for each in self._streams if stream is None else (stream,):
            each.synchronize()
        self.memory.check()

    def upload(self, pointer: int, array: Array, stream: Stream | None = None) -> None:
        """Host to device."""
        host = self._bytes(array)
        self._transfer("an upload", pointer, host, stream, lambda: self._copy(view(pointer, host.size), host))

    def download(self, pointer: int, array: Array, stream: Stream | None = None) -> None:
        """Device to host."""
        host = self._bytes(array)
        if not array.flags.writeable:
            raise DeviceError("a download into an array that cannot be written")
        self._transfer("a download", pointer, host, stream, lambda: self._copy(host, view(pointer, host.size)))

    def _transfer(self, what: str, pointer: int, host: NDArray[np.uint8], stream: Stream | None, work: Work) -> None:
        if host.size == 0:
            return
        self.memory.check_range(pointer, host.size, what)
        if stream is None:
            self._refuse_while_recording(f"{what} without a stream")
            work()
            return
        assert isinstance(stream, EmulatedStream)
        pinned = self._is_pinned(host)
        if not pinned:
            stream.refuse_while_recording(f"{what} of memory that is not pinned")
        stream.queue(work)
        if not pinned:
            stream.run_until(stream.n_queued)

    def copy(self, target: int, source: int, n_bytes: int, stream: Stream) -> None:
        """Device to device."""
        assert isinstance(stream, EmulatedStream)
        if n_bytes == 0:
            return
        self.memory.check_range(source, n_bytes, "a copy from the range")
        self.memory.check_range(target, n_bytes, "a copy to the range")
        if abs(target - source) < n_bytes:
            raise DeviceError(f"a copy of {n_bytes} bytes from {source:#x} to {target:#x}: the ranges overlap")
        stream.queue(lambda: self._copy(view(target, n_bytes), view(source, n_bytes)))

    def _copy(self, target: NDArray[np.uint8], source: NDArray[np.uint8] | int) -> None:
        self.running.end_all()
        target[:] = source

    def call(self, stream: Stream, work: Work) -> None:
        """The host's own work, behind everything earlier."""
        assert isinstance(stream, EmulatedStream)
        stream.queue(self.running.end_all)
        stream.queue(work)

    def fill(self, pointer: int, byte: int, n_bytes: int, stream: Stream) -> None:
        """Set bytes."""
        assert isinstance(stream, EmulatedStream)
        if not 0 <= byte <= 255:
            raise DeviceError(f"filling with {byte}, expected a byte")
        if n_bytes == 0:
            return
        self.memory.check_range(pointer, n_bytes, "a fill")
        stream.queue(lambda: self._copy(view(pointer, n_bytes), byte))

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[Graph]:
        """Record the calls on ``stream`` instead of doing them."""
        assert isinstance(stream, EmulatedStream)
        stream.refuse_while_recording("a second capture")
        recording = stream.recording = Recording(stream)
        graph = EmulatedGraph(recording, self.order)
        try:
            yield graph
        finally:
            for each in (stream, *recording.joined):
                each.recording = None
            recording.is_open = False
        graph.end()

    def close(self) -> None:
        """Unmap all memory."""
        self.memory.close()
        self._kernels.clear()
        self._streams.clear()
        self._pinned.clear()

    def empty(self, n_bytes: int) -> int:
        """``allocate``, for symmetry with ``put``."""
        return self.allocate(n_bytes)

    def put(self, array: Array) -> int:
        """A new allocation with the array's bytes; returns its address."""
        array = np.ascontiguousarray(array)
        pointer = self.allocate(max(1, array.nbytes))
        self.upload(pointer, array)
        return pointer

    def get(self, pointer: int, dtype: DTypeLike, shape: int | tuple[int, ...]) -> NDArray[Any]:
        """A new array with the bytes at ``pointer``, after everything queued has been done."""
        self.synchronize()
        array = np.empty(shape, dtype=dtype)
        self.download(pointer, array)
        return array

    def seconds_by_kernel(self) -> list[tuple[str, int, float]]:
        """(variant, launches, seconds) of every kernel, the slowest first."""
        rows = [(spec.variant, kernel.n_launches, kernel.seconds) for spec, kernel in self._kernels.items()]
        return sorted(rows, key=lambda row: -row[2])

    def _bytes(self, array: Array) -> NDArray[np.uint8]:
        if not array.flags.c_contiguous:
            raise DeviceError("a transfer needs a C-contiguous array")
        return array.reshape(-1).view(np.uint8)

    def _is_pinned(self, host: NDArray[np.uint8]) -> bool:
        return any(np.may_share_memory(host, pinned) for pinned in self._pinned)

    def _refuse_while_recording(self, what: str) -> None:
        if any(stream.recording is not None for stream in self._streams):
            raise DeviceError(f"{what} while a stream is being captured")
