"""The rates of a card that plans depend on, measured in a fraction of a second."""

from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.ops.probes import median_ms, read_gbps
from ninfer_runtime.backends.cuda.residency import Rates

_LINK_BYTES = 96 << 20
_READ_BYTES = 1 << 30
_SAMPLES = 5


def link_bytes_per_second(device: Device, n_bytes: int = _LINK_BYTES, samples: int = _SAMPLES) -> float:
    """Copies of ``n_bytes`` of pinned memory to the device, one behind the other: the median."""
    stream, source, target = device.stream(), device.allocate_host(n_bytes), 0
    try:
        source[:] = 0x5A
        target = device.allocate(n_bytes)
        return (
            n_bytes
            / median_ms(device, stream, lambda: device.upload(target, source, stream), samples=samples, warm_up=2)
            * 1e3
        )
    finally:
        device.synchronize(stream)
        if target:
            device.free(target)
        device.free_host(source)


def measured_rates(device: Device) -> Rates:
    """Of the card and its link, in a quarter of what is free. DeviceMemoryError where that is next to nothing."""
    free = device.free_bytes() // 4
    return Rates(
        read=read_gbps(device, device.stream(), n_bytes=min(_READ_BYTES, free), samples=3).value * 1e9,
        link=link_bytes_per_second(device, min(_LINK_BYTES, free)),
    )
