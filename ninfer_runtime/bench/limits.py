"""The roofs of a machine, measured in the same run as what is held against them."""

from typing import TYPE_CHECKING

from ninfer_runtime.bench import host
from ninfer_runtime.bench.report import Limits

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.device import Device

_HOST_BYTES = 256 << 20
_LOAD_BYTES = 2 << 30


def host_limits(n_bytes: int = _HOST_BYTES) -> Limits:
    """Without a device: the host's memory and a float32 matrix product."""
    return Limits(host.read_gbps(n_bytes), host.product_tflops(), None, host.memcpy_gbps(n_bytes))


def device_limits(device: "Device") -> Limits:
    """Of a card and the host it hangs on."""
    from ninfer_runtime.backends.cuda.ops import probes

    return Limits(
        read_gbps=probes.read_gbps(device),
        mma_tflops=probes.mma_tflops(device),
        h2d_gbps=probes.h2d_gbps(device),
        memcpy_gbps=host.memcpy_gbps(_LOAD_BYTES),
    )
