"""What the card can do, measured: the limits that shares are taken of, and two helpers of measurements.

``mma_tflops``: bf16 ``mma.sync`` with fp32 sums from registers, on random operands. ``read_gbps``: 16-byte streaming
reads of ``n_bytes``, several times the L2, the best of a few launch shapes. ``L2Flush`` overwrites twice the L2.
"""

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Kernel, Stream

FLOPS_PER_MMA = 2 * 16 * 8 * 16
_SOURCE = "probes.cu"
_A_TILES, _B_TILES = 2, 8  # independent products of a warp, as in probes.cu
_OPERAND_WORDS = 4 * _A_TILES + 2 * _B_TILES
_READ_SHAPES = ((256, 2, 8), (256, 4, 8), (512, 2, 8), (512, 4, 4), (1024, 2, 4))  # threads, blocks per SM, unroll
_MMA_SHAPES = ((256, 1), (256, 2), (128, 4))  # threads, blocks per SM


class MmaRateParams(ctypes.Structure):
    """``struct MmaRateParams`` of probes.cu."""

    _fields_ = (("operands", ctypes.c_void_p), ("out", ctypes.c_void_p), ("steps", ctypes.c_int))


class ReadRateParams(ctypes.Structure):
    """``struct ReadRateParams`` of probes.cu."""

    _fields_ = (("data", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n_pieces", ctypes.c_uint64))


class FlushParams(ctypes.Structure):
    """``struct FlushParams`` of probes.cu."""

    _fields_ = (("data", ctypes.c_void_p), ("n_pieces", ctypes.c_uint64), ("value", ctypes.c_uint32))


class NothingParams(ctypes.Structure):
    """``struct NothingParams`` of probes.cu."""

    _fields_ = (("unused", ctypes.c_int),)


@dataclass(frozen=True, slots=True)
class Rate:
    """The best median of the launch shapes: ``value`` in ``unit``, and how it was launched."""

    value: float
    unit: str
    shape: str


def _mma_spec(threads: int, blocks_per_sm: int) -> KernelSpec:
    return KernelSpec(_SOURCE, "mma_rate", threads=threads, min_blocks=blocks_per_sm)


def _read_spec(threads: int, unroll: int) -> KernelSpec:
    return KernelSpec(_SOURCE, "read_rate", (("UNROLL", unroll),), threads=threads)


FLUSH = KernelSpec(_SOURCE, "flush_l2")
NOTHING = KernelSpec(_SOURCE, "nothing", threads=32)


def specs() -> list[KernelSpec]:
    """All variants."""
    reads = [_read_spec(threads, unroll) for threads, _, unroll in _READ_SHAPES]
    return list(dict.fromkeys([*(_mma_spec(*shape) for shape in _MMA_SHAPES), *reads, FLUSH, NOTHING]))


def median_ms(
    device: Device,
    stream: Stream,
    work: Callable[[], None],
    *,
    samples: int = 20,
    warm_up: int = 3,
    before: Callable[[], None] | None = None,
) -> float:
    """Median device time of ``work``, which queues on ``stream``; ``before`` runs ahead of each sample, untimed."""
    times = []
    for sample in range(warm_up + samples):
        if before is not None:
            before()
        start, end = device.event(timing=True), device.event(timing=True)
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        if sample >= warm_up:
            times.append(end.elapsed_ms(start))
    return statistics.median(times)


def mma_tflops(device: Device, stream: Stream, *, steps: int = 20_000, samples: int = 5) -> Rate:
    """Rate of bf16 ``mma.sync`` on all multiprocessors; a sample of 20,000 steps takes about 10 ms on an H200."""
    threads = max(shape[0] for shape in _MMA_SHAPES)
    words = (
        np.random.default_rng(0).standard_normal(_OPERAND_WORDS * threads * 2).astype(np.float32).view(np.uint32) >> 16
    )
    operands = device.allocate(words.size * 2)
    device.upload(operands, words.astype(np.uint16))
    out = device.allocate(device.n_sms * max(t * b for t, b in _MMA_SHAPES) * 4)
    best = Rate(0.0, "TFLOP/s", "")
    try:
        for n_threads, per_sm in _MMA_SHAPES:
            kernel = device.kernel(_mma_spec(n_threads, per_sm))
            blocks = device.n_sms * per_sm
            params = MmaRateParams(operands, out, steps)

            def work(kernel: Kernel = kernel, blocks: int = blocks, params: MmaRateParams = params) -> None:
                kernel.launch((blocks, 1, 1), params, stream, pdl=False)

            ms = median_ms(device, stream, work, samples=samples, warm_up=2)
            products = blocks * (n_threads // 32) * steps * _A_TILES * _B_TILES
            rate = products * FLOPS_PER_MMA / ms / 1e9
            if rate > best.value:
                best = Rate(rate, "TFLOP/s", f"{blocks} blocks of {n_threads} threads")
    finally:
        device.synchronize()
        device.free(out)
        device.free(operands)
    return best


def read_gbps(device: Device, stream: Stream, *, n_bytes: int = 4 << 30, samples: int = 5) -> Rate:
    """Read-only bandwidth over ``n_bytes`` (rounded down to 128 KiB) of device memory, in 10^9 bytes per second."""
    unit = max(threads * unroll for threads, _, unroll in _READ_SHAPES) * 16
    n_bytes = n_bytes // unit * unit
    data = device.allocate(n_bytes)
    out = device.allocate(256)
    best = Rate(0.0, "GB/s", "")
    try:
        flush = device.kernel(FLUSH)
        flush.launch((device.n_sms * 8, 1, 1), FlushParams(data, n_bytes // 16, 0x3C5A96E1), stream, pdl=False)
        for threads, per_sm, unroll in _READ_SHAPES:
            kernel = device.kernel(_read_spec(threads, unroll))
            blocks = device.n_sms * per_sm
            params = ReadRateParams(data, out, n_bytes // 16)

            def work(kernel: Kernel = kernel, blocks: int = blocks, params: ReadRateParams = params) -> None:
                kernel.launch((blocks, 1, 1), params, stream, pdl=False)

            rate = n_bytes / median_ms(device, stream, work, samples=samples, warm_up=1) / 1e6
            if rate > best.value:
                best = Rate(rate, "GB/s", f"{blocks} blocks of {threads} threads, {unroll} pieces each")
    finally:
        device.synchronize()
        device.free(out)
        device.free(data)
    return best


class L2Flush:
    """Evicts what earlier work left in the L2, by writing twice its size."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._n_bytes = 2 * device.l2_bytes // 16 * 16
        self._pointer = device.allocate(self._n_bytes)
        self._kernel = device.kernel(FLUSH)
        self._value = 0

    def launch(self, stream: Stream) -> None:
        """Queue it."""
        self._value += 1
        params = FlushParams(self._pointer, self._n_bytes // 16, self._value)
        self._kernel.launch((self._device.n_sms * 4, 1, 1), params, stream, pdl=False)

    def close(self) -> None:
        """Free its memory; no launch may be running."""
        self._device.free(self._pointer)


class Nothing:
    """An empty kernel of one warp per multiprocessor: what a launch alone costs, in chains."""

    def __init__(self, device: Device) -> None:
        self._grid = (device.n_sms, 1, 1)
        self._kernel = device.kernel(NOTHING)

    def launch(self, stream: Stream, *, pdl: bool = True) -> None:
        """Queue it."""
        self._kernel.launch(self._grid, NothingParams(0), stream, pdl=pdl)
