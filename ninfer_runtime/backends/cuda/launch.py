"""A card through the CUDA driver: modules, launches, copies, events and captured graphs."""

import contextlib
import ctypes
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import UnsupportedError, UsageError
from ninfer_runtime.backends.cuda.compiler import Compiler, Cubin, KernelSpec, arch_for, capability_of
from ninfer_runtime.backends.cuda.device import Array, DeviceError, DeviceMemoryError, Event, Grid, Stream
from ninfer_runtime.backends.cuda.driver import HELPFUL_FLAGS, Driver, HostFunction, driver

_MIB = 1 << 20
_FIRST_WITH_PDL = 90
_ATTRIBUTES = {
    "major": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "minor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "n_sms": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
    "shared_per_sm": "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "l2_bytes": "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE",
}


def short_of_memory(what: str, n_bytes: int, free: int, total: int, where: str) -> str:
    """One line about an allocation that does not fit."""
    missing = max(0, n_bytes - free) / _MIB
    return (
        f"{what} of {n_bytes / _MIB:.0f} MiB does not fit on {where}: {free / _MIB:.0f} of {total / _MIB:.0f} MiB are "
        f"free, {missing:.0f} MiB are missing; {HELPFUL_FLAGS}"
    )


class CudaEvent:
    """``device.Event`` of the driver."""

    def __init__(self, calls: Driver, timing: bool) -> None:
        self._calls = calls
        flags = calls.bindings.CUevent_flags
        chosen = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        self.handle = calls.call("making an event", "cuEventCreate", int(chosen))

    def record(self, stream: Stream) -> None:
        """See ``device.Event``."""
        self._calls.call("recording an event", "cuEventRecord", self.handle, _handle(stream))

    def query(self) -> bool:
        """See ``device.Event``."""
        if self._calls.status("cuEventQuery", self.handle) == "CUDA_ERROR_NOT_READY":
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """See ``device.Event``."""
        self._calls.call("waiting for the device", "cuEventSynchronize", self.handle)

    def elapsed_ms(self, since: Event) -> float:
        """See ``device.Event``."""
        if not isinstance(since, CudaEvent):
            raise TypeError("events of two devices")
        return float(self._calls.call("measuring a time", "cuEventElapsedTime", since.handle, self.handle))


class CudaStream:
    """``device.Stream`` of the driver; does not wait for the driver's own default stream."""

    def __init__(self, calls: Driver) -> None:
        self._calls = calls
        flags = int(calls.bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.handle = calls.call("making a stream", "cuStreamCreate", flags)

    def synchronize(self) -> None:
        """See ``device.Stream``."""
        self._calls.call("waiting for the device", "cuStreamSynchronize", self.handle)

    def wait(self, event: Event) -> None:
        """See ``device.Stream``."""
        if not isinstance(event, CudaEvent):
            raise TypeError("an event of another device")
        self._calls.call("waiting for an event", "cuStreamWaitEvent", self.handle, event.handle, 0)


def _handle(stream: Stream) -> Any:
    if not isinstance(stream, CudaStream):
        raise TypeError("a stream of another device")
    return stream.handle


def _address(array: Array) -> int:
    """Of an array's first byte; three times as fast as ``array.ctypes.data``."""
    return int(array.__array_interface__["data"][0])


class CudaKernel:
    """One loaded entry point. ``registers`` and ``local_bytes`` are per thread, as the driver reports them."""

    def __init__(self, calls: Driver, spec: KernelSpec, cubin: Cubin, *, has_pdl: bool) -> None:
        """Raises DeviceError when the driver refuses the machine code or the shared memory."""
        bindings = calls.bindings
        what = f"loading kernel {spec.variant}"
        self.spec = spec
        self._calls = calls
        self._bindings = bindings
        self._module = calls.call(what, "cuModuleLoadData", cubin.image)
        self._function = calls.call(what, "cuModuleGetFunction", self._module, spec.name.encode())
        if spec.shared_bytes:
            attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            calls.call(what, "cuFuncSetAttribute", self._function, attribute, spec.shared_bytes)
        # One division of L1 for all kernels: a change between two neighbours waits until the SM is empty.
        attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        calls.call(what, "cuFuncSetAttribute", self._function, attribute, 100)
        calls.call(what, "cuFuncLoad", self._function)  # lazy loading would load it inside a capture
        self._programmatic: list[Any] = []
        if has_pdl:
            attribute = bindings.CUlaunchAttribute()
            attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self._programmatic = [attribute]
        self._configs: dict[tuple[Grid, int, bool], Any] = {}

    def launch(self, grid: Grid, params: ctypes.Structure, stream: Stream, *, pdl: bool = True) -> None:
        """See ``device.Kernel``."""
        handle = _handle(stream)
        config = self._configs.get((grid, int(handle), pdl))
        if config is None:
            config = self._configs[grid, int(handle), pdl] = self._config(grid, handle, pdl)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        status = self._bindings.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0)[0]
        if status:
            what = f"launching {self.spec.variant} with {grid[0]} x {grid[1]} x {grid[2]} blocks"
            self._calls.refuse(what, "cuLaunchKernelEx", status)

    def _config(self, grid: Grid, handle: Any, pdl: bool) -> Any:
        config = self._bindings.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.spec.threads, 1, 1
        config.sharedMemBytes = self.spec.shared_bytes
        config.hStream = handle
        if pdl and self._programmatic:
            config.attrs = self._programmatic
            config.numAttrs = len(self._programmatic)
        return config

    def attribute(self, name: str) -> int:
        """A function attribute by the end of its name, for example ``NUM_REGS`` or ``LOCAL_SIZE_BYTES``."""
        wanted = getattr(self._bindings.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self._calls.call(f"reading {name}", "cuFuncGetAttribute", wanted, self._function))

    def blocks_per_sm(self) -> int:
        """Blocks of the spec's size that one SM holds at once."""
        arguments = (self._function, self.spec.threads, self.spec.shared_bytes)
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self._calls.call("computing occupancy", name, *arguments))


class CudaGraph:
    """``device.Graph`` of the driver; behind ``n_programmatic`` of its edges a kernel may start early."""

    def __init__(self, calls: Driver) -> None:
        self._calls = calls
        self._executable: Any = None
        self.n_nodes = 0
        self.n_programmatic = 0
        self.n_bytes = 0

    def instantiate(self, recorded: Any, stream: CudaStream, free_bytes: int) -> None:
        """Make it launchable from what a capture recorded; ``free_bytes`` is the device's free memory before."""
        calls = self._calls
        self.n_nodes = int(calls.call("counting graph nodes", "cuGraphGetNodes", recorded, 0)[1])
        n_edges = int(calls.call("counting graph edges", "cuGraphGetEdges", recorded, 0)[3])
        if n_edges:
            edges = calls.call("reading graph edges", "cuGraphGetEdges", recorded, n_edges)[2]
            programmatic = calls.bindings.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
            self.n_programmatic = sum(int(edge.type) == int(programmatic) for edge in edges)
        self._executable = calls.call("instantiating a graph", "cuGraphInstantiate", recorded, 0)
        calls.call("uploading a graph", "cuGraphUpload", self._executable, stream.handle)
        stream.synchronize()
        self.n_bytes = max(0, free_bytes - int(calls.call("asking for free memory", "cuMemGetInfo")[0]))

    def launch(self, stream: Stream) -> None:
        """See ``device.Graph``."""
        if self._executable is None:
            raise DeviceError("the graph was not captured to its end, or is closed")
        self._calls.call("launching a graph", "cuGraphLaunch", self._executable, _handle(stream))

    def close(self) -> None:
        """See ``device.Graph``."""
        if self._executable is not None:
            self._calls.call("giving a graph back", "cuGraphExecDestroy", self._executable)
            self._executable = None


class CudaDevice:
    """``device.Device`` on card ``ordinal``. Made and used in one thread; another calls ``activate`` first."""

    def __init__(self, ordinal: int = 0, *, calls: Driver | None = None, compiler: Compiler | None = None) -> None:
        """Raises DeviceError without driver or card, UnsupportedError for a card older than compute capability 8.0."""
        self._calls = calls = calls or driver()
        count = int(calls.call("counting cards", "cuDeviceGetCount"))
        if not 0 <= ordinal < count:
            raise UsageError(f"there is no cuda:{ordinal}: this machine has {count} NVIDIA cards")
        self._card = calls.call("choosing a card", "cuDeviceGet", ordinal)
        numbers = {field: self._number(name) for field, name in _ATTRIBUTES.items()}
        name = calls.call("reading the card's name", "cuDeviceGetName", 128, self._card)
        self.name = name.partition(b"\0")[0].decode().strip()
        self.arch = arch_for((numbers["major"], numbers["minor"]))
        self.n_sms, self.shared_per_sm, self.l2_bytes = (numbers[k] for k in ("n_sms", "shared_per_sm", "l2_bytes"))
        self._context = calls.call(f"opening {self.name}", "cuDevicePrimaryCtxRetain", self._card)
        self.activate()
        self.total_bytes = int(calls.call("asking for memory", "cuMemGetInfo")[1])
        self._compiler = compiler or Compiler(self.arch)
        if self._compiler.arch != self.arch:
            raise UnsupportedError(f"the compiler makes code for {self._compiler.arch}, the card runs {self.arch}")
        self._kernels: dict[KernelSpec, CudaKernel] = {}
        self._allocated: dict[int, int] = {}
        self._pinned_ranges: tuple[tuple[int, int], ...] = ()  # (begin, end), sorted; replaced whole
        self._pinned_lock = threading.Lock()
        self._host_calls: list[Any] = []

    def _number(self, name: str) -> int:
        attribute = getattr(self._calls.bindings.CUdevice_attribute, name)
        return int(self._calls.call("reading the card's limits", "cuDeviceGetAttribute", attribute, self._card))

    def activate(self) -> None:
        """Make this device current in the calling thread."""
        self._calls.call(f"opening {self.name}", "cuCtxSetCurrent", self._context)

    def kernel(self, spec: KernelSpec) -> CudaKernel:
        """See ``device.Device``. CompileError, or DeviceError when the driver refuses the code."""
        if spec not in self._kernels:
            self._load(spec, self._compiler.compile(spec))
        return self._kernels[spec]

    def _load(self, spec: KernelSpec, cubin: Cubin) -> None:
        has_pdl = capability_of(self.arch) >= _FIRST_WITH_PDL
        self._kernels[spec] = CudaKernel(self._calls, spec, cubin, has_pdl=has_pdl)

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        """See ``device.Device``."""
        missing = [spec for spec in specs if spec not in self._kernels]
        for spec, cubin in self._compiler.compile_all(missing).items():
            self._load(spec, cubin)

    def free_bytes(self) -> int:
        """See ``device.Device``."""
        return int(self._calls.call("asking for free memory", "cuMemGetInfo")[0])

    def allocate(self, n_bytes: int) -> int:
        """See ``device.Device``."""
        try:
            pointer = int(self._calls.call("allocating", "cuMemAlloc", max(1, n_bytes)))
        except DeviceMemoryError:
            where = f"{self.name}"
            line = short_of_memory("an allocation", n_bytes, self.free_bytes(), self.total_bytes, where)
            raise DeviceMemoryError(line) from None
        self._allocated[pointer] = n_bytes
        return pointer

    def free(self, pointer: int) -> None:
        """See ``device.Device``."""
        del self._allocated[pointer]
        self._calls.call("giving memory back", "cuMemFree", pointer)

    def allocate_host(self, n_bytes: int) -> NDArray[np.uint8]:
        """See ``device.Device``."""
        self.activate()
        try:
            address = int(self._calls.call("pinning memory", "cuMemHostAlloc", max(1, n_bytes), 0))
        except DeviceMemoryError:
            raise DeviceMemoryError(
                f"{n_bytes / _MIB:.0f} MiB of host memory could not be pinned; free host memory, or raise the limit of "
                "locked memory (ulimit -l)"
            ) from None
        with self._pinned_lock:
            self._pinned_ranges = tuple(sorted((*self._pinned_ranges, (address, address + n_bytes))))
        pinned: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
        return pinned

    def free_host(self, array: NDArray[np.uint8]) -> None:
        """See ``device.Device``."""
        address = _address(array)
        known = (address, address + array.nbytes)
        if known not in self._pinned_ranges:
            raise ValueError("an array that was not allocated here as pinned memory, or is given back already")
        with self._pinned_lock:
            self._pinned_ranges = tuple(one for one in self._pinned_ranges if one != known)
        self._calls.call("giving pinned memory back", "cuMemFreeHost", address)

    def stream(self) -> CudaStream:
        """See ``device.Device``."""
        return CudaStream(self._calls)

    def event(self, *, timing: bool = False) -> CudaEvent:
        """See ``device.Device``."""
        return CudaEvent(self._calls, timing)

    def synchronize(self, stream: Stream | None = None) -> None:
        """See ``device.Device``."""
        if stream is None:
            self._calls.call("waiting for the device", "cuCtxSynchronize")
        else:
            stream.synchronize()

    def _is_pinned(self, address: int, n_bytes: int) -> bool:
        ranges = self._pinned_ranges
        at = bisect_right(ranges, (address, sys.maxsize)) - 1
        return at >= 0 and address + n_bytes <= ranges[at][1]

    def _transfer(self, what: str, name: str, target: int, source: int, host: Array, stream: Stream | None) -> None:
        if not host.flags.c_contiguous:
            raise ValueError(f"{what}: the array of shape {host.shape} is not C-contiguous")
        n_bytes = host.nbytes
        if n_bytes == 0:
            return
        if stream is None:
            self.synchronize()
            self._calls.call(what, name, target, source, n_bytes)
            return
        self._calls.call(what, f"{name}Async", target, source, n_bytes, _handle(stream))
        if not self._is_pinned(_address(host), n_bytes):
            stream.synchronize()

    def upload(self, pointer: int, array: Array, stream: Stream | None = None) -> None:
        """See ``device.Device``."""
        self._transfer("copying to the device", "cuMemcpyHtoD", pointer, _address(array), array, stream)
        if stream is None:
            self.synchronize()  # the driver may return while the last of pageable memory is still on its way

    def download(self, pointer: int, array: Array, stream: Stream | None = None) -> None:
        """See ``device.Device``."""
        self._transfer("copying from the device", "cuMemcpyDtoH", _address(array), pointer, array, stream)

    def copy(self, target: int, source: int, n_bytes: int, stream: Stream) -> None:
        """See ``device.Device``."""
        if n_bytes:
            self._calls.call("copying", "cuMemcpyDtoDAsync", target, source, n_bytes, _handle(stream))

    def fill(self, pointer: int, byte: int, n_bytes: int, stream: Stream) -> None:
        """See ``device.Device``."""
        if n_bytes:
            self._calls.call("filling", "cuMemsetD8Async", pointer, byte, n_bytes, _handle(stream))

    def call(self, stream: Stream, work: Callable[[], None]) -> None:
        """See ``device.Device``."""
        self._host_calls.append(HostFunction(lambda _: work()))
        self._calls.queue_host_call("queueing a call of the host", _handle(stream), self._host_calls[-1])

    @contextlib.contextmanager
    def capture(self, stream: Stream) -> Iterator[CudaGraph]:
        """See ``device.Device``."""
        if not isinstance(stream, CudaStream):
            raise TypeError("a stream of another device")
        calls = self._calls
        graph = CudaGraph(calls)
        free = self.free_bytes()
        mode = calls.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        calls.call("starting a capture", "cuStreamBeginCapture", stream.handle, mode)
        try:
            yield graph
        except BaseException:
            calls.bindings.cuStreamEndCapture(stream.handle)
            raise
        recorded = calls.call("ending a capture", "cuStreamEndCapture", stream.handle)
        try:
            graph.instantiate(recorded, stream, free)
        finally:
            calls.call("giving a recording back", "cuGraphDestroy", recorded)

    def close(self) -> None:
        """See ``device.Device``. Memory that is still allocated goes with the context."""
        if self._context is None:
            return
        for pointer in list(self._allocated):
            self.free(pointer)
        for address, _ in self._pinned_ranges:
            self._calls.call("giving pinned memory back", "cuMemFreeHost", address)
        self._pinned_ranges = ()
        self._kernels.clear()
        self._host_calls.clear()
        self._calls.call(f"closing {self.name}", "cuDevicePrimaryCtxRelease", self._card)
        self._context = None
