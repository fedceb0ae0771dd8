"""The roofs of a machine, measured in the same run as what is held against them."""

from typing import TYPE_CHECKING

from ninfer_runtime.bench import host
from ninfer_runtime.bench.report import Limits

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.device import Device

_HOST_BYTES = 256 << 20
_COPIED_BYTES = 2 << 30
_READ_BYTES = 4 << 30
_LINK_BYTES = 256 << 20
_LINK_SAMPLES = 8


def host_limits(n_bytes: int = _HOST_BYTES) -> Limits:
    """Without a device: the host's memory and a float32 matrix product."""
    return Limits(host.read_gbps(n_bytes), host.product_tflops(), None, host.memcpy_gbps(n_bytes))


def device_limits(
    device: "Device", *, read_bytes: int = _READ_BYTES, link_bytes: int = _LINK_BYTES, copied_bytes: int = _COPIED_BYTES
) -> Limits:
    """Of a card and the host it hangs on."""
    from ninfer_runtime.backends.cuda.ops import probes

    stream = device.stream()
    return Limits(
        read_gbps=probes.read_gbps(device, stream, n_bytes=read_bytes).value,
        mma_tflops=probes.mma_tflops(device, stream).value,
        h2d_gbps=h2d_gbps(device, link_bytes),
        memcpy_gbps=host.memcpy_gbps(copied_bytes),
    )


def h2d_gbps(device: "Device", n_bytes: int) -> float:
    """GB/s of copies of ``n_bytes`` of pinned memory to the device, one behind the other: the median."""
    from ninfer_runtime.backends.cuda.ops.probes import median_ms

    stream, source, target = device.stream(), device.allocate_host(n_bytes), device.allocate(n_bytes)
    source[:] = 0x5A
    try:
        milliseconds = median_ms(
            device, stream, lambda: device.upload(target, source, stream), samples=_LINK_SAMPLES, warm_up=2
        )
    finally:
        device.synchronize(stream)
        device.free(target)
        device.free_host(source)
    return n_bytes / milliseconds / 1e6
