"""A CUDA driver in Python for the launch layer's tests: it records calls, keeps memory, and fails on demand."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

TOTAL = 8 << 30
NUMBERS = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233_472,
    "L2_CACHE_SIZE": 60 << 20,
}


class Status(int):
    """A CUresult: an integer with a name."""

    name: str

    @classmethod
    def named(cls, name: str) -> Status:
        made = cls(0 if name == "CUDA_SUCCESS" else 1)
        made.name = name
        return made


class Names:
    """Any enumeration: its members are numbers made from their names."""

    def __init__(self, **numbers: int) -> None:
        self._numbers = numbers

    def __getattr__(self, name: str) -> int:
        return self._numbers.get(name, sum(name.encode()) % 1000)


class FakeBindings:
    """The part of ``cuda.bindings.driver`` that the launch layer uses."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = NUMBERS | numbers
        self.calls: list[str] = []
        self.launches: list[tuple[Any, bytes]] = []
        self.failures: dict[str, str] = {}
        self.params_bytes = 0
        self.edges: list[int] = []
        self.used = 0
        self.memory: dict[int, Any] = {}
        self.CUevent_flags = self.CUstream_flags = self.CUstreamCaptureMode = self.CUfunction_attribute = Names()
        self.CUlaunchAttributeID = Names()
        self.CUgraphDependencyType = Names(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
        self.CUdevice_attribute = SimpleNamespace(
            **{f"CU_DEVICE_ATTRIBUTE_{name}": value for name, value in self.numbers.items()}
        )
        self.CUlaunchConfig = SimpleNamespace

    def CUlaunchAttribute(self) -> Any:  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace())

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.failures:
                return (Status.named(self.failures[name]), *[None] * 4)
            given = getattr(self, f"_{name}", None)
            values = given(*arguments) if given else ()
            return (Status.named("CUDA_SUCCESS"), *values)

        return call

    def _cuGetErrorString(self, status: Status) -> tuple[bytes]:  # noqa: N802
        return (b"in words",)

    def _cuDeviceGetCount(self) -> tuple[int]:  # noqa: N802
        return (1,)

    def _cuDeviceGet(self, ordinal: int) -> tuple[int]:  # noqa: N802
        return (ordinal,)

    def _cuDeviceGetAttribute(self, attribute: int, card: int) -> tuple[int]:  # noqa: N802
        return (attribute,)

    def _cuDeviceGetName(self, size: int, card: int) -> tuple[bytes]:  # noqa: N802
        return (b"Fake".ljust(size, b"\0"),)

    def _cuDevicePrimaryCtxRetain(self, card: int) -> tuple[str]:  # noqa: N802
        return ("context",)

    def _cuMemGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return (TOTAL - self.used, TOTAL)

    def _allocate(self, n_bytes: int) -> tuple[int]:
        memory = ctypes.create_string_buffer(n_bytes)
        self.memory[ctypes.addressof(memory)] = memory
        self.used += n_bytes
        return (ctypes.addressof(memory),)

    def _cuMemAlloc(self, n_bytes: int) -> tuple[int]:  # noqa: N802
        return self._allocate(n_bytes)

    def _cuMemHostAlloc(self, n_bytes: int, flags: int) -> tuple[int]:  # noqa: N802
        return self._allocate(n_bytes)

    def _cuMemFree(self, pointer: int) -> tuple[()]:  # noqa: N802
        self.used -= len(self.memory.pop(pointer))
        return ()

    def _cuMemFreeHost(self, pointer: int) -> tuple[()]:  # noqa: N802
        return self._cuMemFree(pointer)

    def _cuMemcpyHtoD(self, target: int, source: int, n_bytes: int, *stream: Any) -> tuple[()]:  # noqa: N802
        ctypes.memmove(target, source, n_bytes)
        return ()

    _cuMemcpyHtoDAsync = _cuMemcpyDtoH = _cuMemcpyDtoHAsync = _cuMemcpyDtoDAsync = _cuMemcpyHtoD  # noqa: N815

    def _cuMemsetD8Async(self, target: int, byte: int, n_bytes: int, stream: Any) -> tuple[()]:  # noqa: N802
        ctypes.memset(target, byte, n_bytes)
        return ()

    def _cuStreamCreate(self, flags: int) -> tuple[int]:  # noqa: N802
        return (len(self.calls),)

    def _cuEventCreate(self, flags: int) -> tuple[str]:  # noqa: N802
        return ("event",)

    def _cuEventElapsedTime(self, begin: Any, end: Any) -> tuple[float]:  # noqa: N802
        return (1.5,)

    def _cuModuleLoadData(self, image: bytes) -> tuple[str]:  # noqa: N802
        return ("module",)

    def _cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[str]:  # noqa: N802
        return (name.decode(),)

    def _cuLaunchKernelEx(self, config: Any, function: str, params: int, extra: int) -> tuple[()]:  # noqa: N802
        pointer = ctypes.c_void_p.from_address(params).value
        assert pointer is not None
        self.launches.append((config, ctypes.string_at(pointer, self.params_bytes)))
        return ()

    def _cuStreamEndCapture(self, stream: Any) -> tuple[str]:  # noqa: N802
        return ("recorded",)

    def _cuGraphGetNodes(self, graph: Any, count: int) -> tuple[list[Any], int]:  # noqa: N802
        return ([], len(self.launches))

    def _cuGraphGetEdges(self, graph: Any, count: int) -> tuple[list[Any], list[Any], list[Any], int]:  # noqa: N802
        kinds = [SimpleNamespace(type=kind) for kind in self.edges[:count]]
        return ([], [], kinds, len(self.edges))

    def _cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[str]:  # noqa: N802
        self.used += 4096
        return ("executable",)
