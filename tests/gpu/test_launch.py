"""The launch layer on the card: order, programmatic edges, copies, memory, loading, and failures in one line."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ninfer_runtime.backends.cuda.compiler import Compiler, KernelSpec, Sources
from ninfer_runtime.backends.cuda.device import DeviceError, DeviceMemoryError, Stream
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.loader import Piece, Upload, load
from ninfer_runtime.backends.cuda.resources import blocks_per_sm, limits_of, resources_of

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
N_CHAINED = 500

# x[0] = 3 x[0] + step, modulo 2^32: the result depends on the order of every launch.
SOURCE = """
struct ChainParams { unsigned int* x; unsigned int step; };
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) chain(const __grid_constant__ ChainParams p) {
    extern __shared__ unsigned char unused[];
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (blockIdx.x == 0 && threadIdx.x == 0) p.x[0] = 3u * p.x[0] + p.step;
}
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) astray(const __grid_constant__ ChainParams p) {
    p.x[(long long)p.step << 32] = 1;
}
"""


class ChainParams(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("step", ctypes.c_uint32))


def card(folder: Path) -> CudaDevice:
    (folder / "chain.cu").write_text(SOURCE)
    arch = CudaDevice().arch
    return CudaDevice(compiler=Compiler(arch, sources=Sources(folder, folder), folder=folder / "cache"))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaDevice]:
    opened = card(tmp_path_factory.mktemp("kernels"))
    yield opened
    opened.close()


def chain_spec(shared_bytes: int = 0) -> KernelSpec:
    return KernelSpec("chain.cu", "chain", (), 128, shared_bytes)


def queue_chain(device: CudaDevice, pointer: int, stream: Stream, *, pdl: bool) -> None:
    """500 launches in which neighbours take different amounts of shared memory."""
    kernels = [device.kernel(chain_spec(n)) for n in (0, 98_304, 32_768)]
    for i in range(N_CHAINED):
        kernels[i % len(kernels)].launch((device.n_sms, 1, 1), ChainParams(pointer, i), stream, pdl=pdl)


def expected(times: int) -> int:
    value = 0
    for _ in range(times):
        for i in range(N_CHAINED):
            value = (3 * value + i) % 2**32
    return value


def read_word(device: CudaDevice, pointer: int) -> int:
    out = np.zeros(1, np.uint32)
    device.download(pointer, out)
    return int(out[0])


@pytest.mark.parametrize("pdl", [True, False])
def test_launches_take_effect_in_order(device: CudaDevice, pdl: bool) -> None:
    stream, pointer = device.stream(), device.allocate(256)
    device.fill(pointer, 0, 256, stream)
    queue_chain(device, pointer, stream, pdl=pdl)
    assert read_word(device, pointer) == expected(1)
    device.free(pointer)


def test_graph_keeps_programmatic_edges_and_order(device: CudaDevice) -> None:
    stream, pointer = device.stream(), device.allocate(256)
    for n in (0, 98_304, 32_768):
        device.kernel(chain_spec(n))
    device.fill(pointer, 0, 256, stream)
    device.synchronize(stream)
    with device.capture(stream) as graph:
        queue_chain(device, pointer, stream, pdl=True)
    assert read_word(device, pointer) == 0, "capturing runs nothing"
    assert graph.n_nodes == N_CHAINED
    has_pdl = int(device.arch.strip("sma_")) >= 90
    assert graph.n_programmatic == (N_CHAINED - 1 if has_pdl else 0)
    for _ in range(3):
        graph.launch(stream)
    assert read_word(device, pointer) == expected(3)
    graph.close()
    device.free(pointer)


def test_programmatic_launches_are_faster_and_the_host_is_not_in_the_way(device: CudaDevice) -> None:
    stream, pointer = device.stream(), device.allocate(256)
    begin, end = device.event(timing=True), device.event(timing=True)
    best = {}
    for pdl in (False, True):
        queue_chain(device, pointer, stream, pdl=pdl)
        device.synchronize(stream)
        with device.capture(stream) as graph:
            queue_chain(device, pointer, stream, pdl=pdl)
        times = []
        for _ in range(10):
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(end.elapsed_ms(begin))
        best[pdl] = 1e3 * min(times) / N_CHAINED
        graph.close()
    print(f"per launch: {best[False]:.3f} us, programmatic {best[True]:.3f} us")
    if device.arch == "sm_90a":
        assert best[True] < best[False]
    device.free(pointer)


def test_streams_wait_for_events_of_others(device: CudaDevice) -> None:
    first, second, pointer, event = device.stream(), device.stream(), device.allocate(256), device.event()
    assert event.query(), "never recorded"
    device.fill(pointer, 0, 256, first)
    for _ in range(20):
        queue_chain(device, pointer, first, pdl=True)
    device.fill(pointer, 1, 4, first)
    event.record(first)
    second.wait(event)
    device.kernel(chain_spec()).launch((1, 1, 1), ChainParams(pointer, 7), second)
    device.synchronize(second)
    assert event.query()
    assert read_word(device, pointer) == 3 * 0x01010101 + 7
    device.free(pointer)


def test_copies_of_pinned_and_plain_memory_arrive(device: CudaDevice, fresh_seed: int) -> None:
    content = np.random.default_rng(fresh_seed).integers(0, 256, 1 << 20, np.uint8)
    stream, pinned = device.stream(), device.allocate_host(1 << 20)
    source, target = device.allocate(1 << 20), device.allocate(1 << 20)
    pinned[:] = content
    device.upload(source, pinned, stream)
    device.copy(target, source, 1 << 20, stream)
    device.fill(target, 3, 100, stream)
    out = np.zeros(1 << 20, np.uint8)
    device.download(target, out, stream)
    assert np.array_equal(out[100:], content[100:])
    assert set(out[:100].tolist()) == {3}
    device.free_host(pinned)
    device.free(source)
    device.free(target)


def test_resources_and_occupancy_are_those_the_driver_reports(device: CudaDevice) -> None:
    for shared_bytes in (0, 32_768, 98_304):
        spec = chain_spec(shared_bytes)
        kernel, cubin = device.kernel(spec), device._compiler.compile(spec)
        ours = resources_of(cubin.image, cubin.log, spec.name)
        assert ours.registers == kernel.attribute("NUM_REGS")
        assert ours.local_bytes == kernel.attribute("LOCAL_SIZE_BYTES")
        assert blocks_per_sm(ours, spec.threads, shared_bytes, limits_of(device.arch)) == kernel.blocks_per_sm()


def test_memory_beyond_the_card_is_one_line(device: CudaDevice) -> None:
    with pytest.raises(DeviceMemoryError, match=r"does not fit on .*MiB are missing; lower --max-context") as raised:
        device.allocate(2 * device.total_bytes)
    assert "\n" not in str(raised.value)
    device.free(device.allocate(1 << 20))


def test_shared_memory_beyond_the_card_is_one_line(device: CudaDevice) -> None:
    with pytest.raises(DeviceError, match=r"^loading kernel chain\[\]x128 failed: cuFuncSetAttribute") as raised:
        device.kernel(chain_spec(1 << 20))
    assert "\n" not in str(raised.value)


def test_loading_moves_and_finishes_every_byte(device: CudaDevice, tmp_path: Path, fresh_seed: int) -> None:
    n, per = 40, 5 << 20
    content = np.random.default_rng(fresh_seed).integers(0, 256, n * per, np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    target = device.allocate(n * per)

    def upload(i: int) -> Upload:
        def finish(staging: int, stream: Stream) -> None:
            device.copy(target + i * per, staging + 256, per, stream)

        return Upload(str(i), (Piece(i * per, per // 2, 256), Piece(i * per + per // 2, per // 2, 256 + per // 2)),
                      per + 256, finish)  # fmt: skip

    load(device, tmp_path / "file", [upload(i) for i in range(n)])
    out = np.zeros(n * per, np.uint8)
    device.download(target, out)
    assert np.array_equal(out, content)
    device.free(target)


ASTRAY = """
import sys
from pathlib import Path
from tests.gpu.test_launch import ChainParams, KernelSpec, card
device = card(Path(sys.argv[1]))
stream, pointer = device.stream(), device.allocate(256)
device.kernel(KernelSpec("chain.cu", "astray", (), 128)).launch((1, 1, 1), ChainParams(pointer, 9), stream)
for _ in range(2):
    try:
        device.synchronize(stream)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_failed_kernel_is_one_line_and_stays_one(tmp_path: Path) -> None:
    """In a process of its own, which the failure leaves without a device."""
    command = [sys.executable, "-c", ASTRAY, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    lines = run.stdout.splitlines()
    assert len(lines) == 2, run.stderr
    for line in lines:
        assert line.startswith("DeviceError waiting for the device failed: cuStreamSynchronize answered CUDA_ERROR_")
        assert line.endswith("start again")
