"""The CUDA driver, every refusal of which is one DeviceError line."""

import ctypes
import sys
from functools import cache
from typing import Any, NoReturn

from ninfer_format.command import require_extra
from ninfer_runtime.backends.cuda.device import DeviceError, DeviceMemoryError

HELPFUL_FLAGS = "lower --max-context, --kv-capacity or --prefill-chunk"
"""What makes a program smaller."""

_NO_DRIVER = "no NVIDIA driver was found on this machine; the cuda backend needs one of release 580 or newer"
_GONE = "the device is of no more use to this process, start again"

# What the driver says after a kernel has failed; every later call repeats it.
_FATAL = {
    "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ECC_UNCORRECTABLE",
}  # fmt: skip


HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""What the driver can call back."""


class Driver:
    """Calls of ``cuda.bindings.driver`` by name: the values without the status, or DeviceError."""

    def __init__(self, bindings: Any) -> None:
        self.bindings = bindings

    def call(self, what: str, name: str, *arguments: Any) -> Any:
        """Result of ``name``: None, one value or a tuple; ``what`` says in the message what was being done."""
        status, *values = getattr(self.bindings, name)(*arguments)
        if status:
            self.refuse(what, name, status)
        return values[0] if len(values) == 1 else tuple(values) or None

    def status(self, name: str, *arguments: Any) -> str:
        """Name of the status alone: ``CUDA_SUCCESS``, ``CUDA_ERROR_NOT_READY``, …"""
        return str(getattr(self.bindings, name)(*arguments)[0].name)

    def queue_host_call(self, what: str, stream: Any, function: Any) -> None:
        """``cuLaunchHostFunc`` of a ``HostFunction``, straight from the library: what the bindings pass on in its place
        may be gone when it has run once, and a recorded call runs many times."""
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        status = library.cuLaunchHostFunc(ctypes.c_void_p(int(stream)), function, None)
        if status:
            self.refuse(what, "cuLaunchHostFunc", self.bindings.CUresult(status))

    def refuse(self, what: str, name: str, status: Any) -> NoReturn:
        """Raise the error of a status that is not success."""
        code, text = str(status.name), ""
        described = self.bindings.cuGetErrorString(status)[1]
        if described:
            text = f" ({described.decode()})"
        if code == "CUDA_ERROR_OUT_OF_MEMORY":
            raise DeviceMemoryError(f"{what} failed: {name} answered {code}{text}; {HELPFUL_FLAGS}")
        end = f"; {_GONE}" if code in _FATAL else ""
        raise DeviceError(f"{what} failed: {name} answered {code}{text}{end}")


@cache
def driver() -> Driver:
    """The machine's driver, initialised. MissingExtraError without the bindings, DeviceError without a driver."""
    require_extra("cuda.bindings.driver", "cuda")
    from cuda.bindings import driver as bindings

    try:
        status = bindings.cuInit(0)[0]
    except (RuntimeError, OSError):  # the bindings look for the library at the first call
        raise DeviceError(_NO_DRIVER) from None
    if status:
        raise DeviceError(f"the NVIDIA driver could not be started: cuInit answered {status.name}")
    return Driver(bindings)
