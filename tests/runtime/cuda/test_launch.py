"""The launch layer against a driver in Python: what reaches the driver, and one clear line for each of its refusals."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_format.errors import UnsupportedError, UsageError
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import DeviceError, DeviceMemoryError
from ninfer_runtime.backends.cuda.driver import Driver
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.program import CudaProgram
from tests.runtime.cuda.fake_driver import TOTAL, FakeBindings, Status
from tests.runtime.cuda.kernels import COPY_SPEC, compiler_in


class CopyParams(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("n", ctypes.c_int))


@pytest.fixture
def bindings() -> FakeBindings:
    return FakeBindings()


@pytest.fixture
def device(bindings: FakeBindings, tmp_path: Path) -> CudaDevice:
    return CudaDevice(calls=Driver(bindings), compiler=compiler_in(tmp_path, "sm_90a"))


def test_card_describes_itself(device: CudaDevice) -> None:
    found = (device.name, device.arch, device.n_sms, device.shared_per_sm, device.l2_bytes, device.total_bytes)
    assert found == ("Fake", "sm_90a", 132, 233_472, 60 << 20, TOTAL)


def test_absent_card_and_old_card_are_refused(tmp_path: Path, bindings: FakeBindings) -> None:
    with pytest.raises(UsageError, match="no cuda:3: this machine has 1 NVIDIA cards"):
        CudaDevice(3, calls=Driver(bindings))
    old = FakeBindings(COMPUTE_CAPABILITY_MAJOR=7, COMPUTE_CAPABILITY_MINOR=5)
    with pytest.raises(UnsupportedError, match=r"7\.5, 8\.0 or newer"):
        CudaDevice(calls=Driver(old))
    with pytest.raises(UnsupportedError, match="makes code for sm_80, the card runs sm_90a"):
        CudaDevice(calls=Driver(bindings), compiler=compiler_in(tmp_path, "sm_80"))


def test_kernel_is_loaded_once_and_before_any_launch(device: CudaDevice, bindings: FakeBindings) -> None:
    first = device.kernel(COPY_SPEC)
    device.prepare([COPY_SPEC, COPY_SPEC])
    assert device.kernel(COPY_SPEC) is first
    assert bindings.calls.count("cuModuleLoadData") == 1
    assert bindings.calls.count("cuFuncLoad") == 1


def test_dynamic_shared_memory_is_allowed_before_the_first_launch(device: CudaDevice, bindings: FakeBindings) -> None:
    device.kernel(COPY_SPEC)
    without = bindings.calls.count("cuFuncSetAttribute")
    device.kernel(KernelSpec("copy.cu", "copy", (("SCALE", "2.0f"),), 128, shared_bytes=1024))
    assert bindings.calls.count("cuFuncSetAttribute") == 2 * without + 1


@pytest.mark.parametrize("pdl", [True, False])
def test_launch_passes_grid_block_shared_memory_parameters_and_order(
    device: CudaDevice, bindings: FakeBindings, pdl: bool
) -> None:
    spec = KernelSpec("copy.cu", "copy", (("SCALE", "2.0f"),), 128, shared_bytes=1024)
    bindings.params_bytes = ctypes.sizeof(CopyParams)
    stream = device.stream()
    for n in (7, 8):
        device.kernel(spec).launch((3, 4, 5), CopyParams(1, 2, n), stream, pdl=pdl)
    (config, first), (again, second) = bindings.launches
    assert config is again, "the configuration is made once"
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 4, 5)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes) == (128, 1, 1, 1024)
    assert config.hStream == stream.handle
    assert [CopyParams.from_buffer_copy(one).n for one in (first, second)] == [7, 8]
    assert getattr(config, "numAttrs", 0) == int(pdl)


def test_card_before_hopper_gets_no_launch_attribute(tmp_path: Path) -> None:
    bindings = FakeBindings(COMPUTE_CAPABILITY_MAJOR=8, COMPUTE_CAPABILITY_MINOR=6)
    device = CudaDevice(calls=Driver(bindings), compiler=compiler_in(tmp_path, "sm_86"))
    device.kernel(COPY_SPEC).launch((1, 1, 1), CopyParams(), device.stream())
    assert not hasattr(bindings.launches[0][0], "attrs")


def test_memory_that_does_not_fit_says_how_much_is_missing_and_what_helps(
    device: CudaDevice, bindings: FakeBindings
) -> None:
    bindings.used = 3 << 30
    bindings.failures["cuMemAlloc"] = "CUDA_ERROR_OUT_OF_MEMORY"
    line = (
        "an allocation of 6144 MiB does not fit on Fake: 5120 of 8192 MiB are free, 1024 MiB are missing; "
        "lower --max-context, --kv-capacity or --prefill-chunk"
    )
    with pytest.raises(DeviceMemoryError, match=f"^{re.escape(line)}$"):
        device.allocate(6 << 30)


def test_pinned_memory_that_cannot_be_had_is_one_line(device: CudaDevice, bindings: FakeBindings) -> None:
    bindings.failures["cuMemHostAlloc"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(DeviceMemoryError, match=r"^64 MiB of host memory could not be pinned; .*ulimit -l\)$"):
        device.allocate_host(64 << 20)


def test_launch_that_is_refused_names_variant_and_grid(device: CudaDevice, bindings: FakeBindings) -> None:
    bindings.failures["cuLaunchKernelEx"] = "CUDA_ERROR_INVALID_VALUE"
    line = (
        "launching copy[SCALE=2.0f]x128 with 1 x 2 x 3 blocks failed: cuLaunchKernelEx answered "
        "CUDA_ERROR_INVALID_VALUE (in words)"
    )
    with pytest.raises(DeviceError, match=f"^{re.escape(line)}$") as raised:
        device.kernel(COPY_SPEC).launch((1, 2, 3), CopyParams(), device.stream())
    assert raised.value.exit_code == 3


def test_failed_kernel_says_that_the_device_is_lost(device: CudaDevice, bindings: FakeBindings) -> None:
    stream = device.stream()
    bindings.failures["cuStreamSynchronize"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(DeviceError, match=r"waiting for the device failed: .*ILLEGAL_ADDRESS.*start again$"):
        device.synchronize(stream)


def test_refused_machine_code_names_the_variant(device: CudaDevice, bindings: FakeBindings) -> None:
    bindings.failures["cuModuleLoadData"] = "CUDA_ERROR_NO_BINARY_FOR_GPU"
    with pytest.raises(DeviceError, match=r"^loading kernel copy\[SCALE=2\.0f\]x128 failed: .*NO_BINARY_FOR_GPU"):
        device.kernel(COPY_SPEC)


def test_copies_reach_memory_and_only_pinned_ones_return_early(device: CudaDevice, bindings: FakeBindings) -> None:
    stream, pinned, plain = device.stream(), device.allocate_host(64), np.arange(64, dtype=np.uint8)
    pointer, second = device.allocate(64), device.allocate(64)
    pinned[:] = 7
    device.upload(pointer + 8, pinned[8:], stream)
    assert "cuStreamSynchronize" not in bindings.calls
    device.upload(pointer, plain[:8], stream)
    assert bindings.calls.count("cuStreamSynchronize") == 1
    device.copy(second, pointer, 64, stream)
    device.fill(second + 60, 9, 4, stream)
    out = np.zeros(64, np.uint8)
    device.download(second, out)
    assert bindings.calls[-2:] == ["cuCtxSynchronize", "cuMemcpyDtoH"], "without a stream everything before has ended"
    assert out.tolist() == [*range(8), *[7] * 52, *[9] * 4]
    device.upload(pointer, plain)
    assert bindings.calls[-2:] == ["cuMemcpyHtoD", "cuCtxSynchronize"], "pageable bytes may be under way until then"


def test_empty_copies_do_nothing_and_scattered_arrays_are_our_own_mistake(
    device: CudaDevice, bindings: FakeBindings
) -> None:
    stream, before = device.stream(), len(bindings.calls)
    device.upload(0, np.zeros(0), stream)
    device.copy(0, 0, 0, stream)
    device.fill(0, 0, 0, stream)
    assert len(bindings.calls) == before
    with pytest.raises(ValueError, match="not C-contiguous"):
        device.download(0, np.zeros((4, 4))[:, 0])


def test_pinned_memory_given_back_is_pinned_no_more(device: CudaDevice, bindings: FakeBindings) -> None:
    stream, pinned = device.stream(), device.allocate_host(64)
    device.free_host(pinned)
    with pytest.raises(ValueError, match="given back already"):
        device.free_host(pinned)
    device.upload(device.allocate(8), np.zeros(8, np.uint8), stream)
    assert "cuStreamSynchronize" in bindings.calls


def test_capture_makes_a_graph_that_counts_nodes_programmatic_edges_and_memory(
    device: CudaDevice, bindings: FakeBindings
) -> None:
    stream, kernel = device.stream(), device.kernel(COPY_SPEC)
    bindings.edges = [1, 0, 1]
    with device.capture(stream) as graph:
        for _ in range(4):
            kernel.launch((1, 1, 1), CopyParams(), stream)
    assert (graph.n_nodes, graph.n_programmatic, graph.n_bytes) == (4, 2, 4096)
    graph.launch(stream)
    assert bindings.calls[-1] == "cuGraphLaunch"
    graph.close()
    graph.close()
    assert bindings.calls.count("cuGraphExecDestroy") == 1
    with pytest.raises(DeviceError, match="is closed"):
        graph.launch(stream)


def test_calls_of_the_host_go_to_the_library_and_are_kept(
    device: CudaDevice, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Any] = []

    class Library:
        status = 0

        def cuLaunchHostFunc(self, stream: Any, function: Any, data: Any) -> int:  # noqa: N802
            queued.append(function)
            return self.status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    stream, done = device.stream(), list[str]()
    device.call(stream, lambda: done.append("first"))
    device.call(stream, lambda: done.append("second"))
    assert not done
    for function in (*queued, queued[0]):  # a recorded one runs again
        function(None)
    assert done == ["first", "second", "first"]
    Library.status = 1
    monkeypatch.setattr(bindings, "CUresult", lambda _: Status.named("CUDA_ERROR_INVALID_VALUE"), raising=False)
    with pytest.raises(DeviceError, match="a call of the host failed: cuLaunchHostFunc answered CUDA_ERROR_INV"):
        device.call(stream, lambda: None)


def test_failure_inside_a_capture_ends_it_and_leaves_no_graph(device: CudaDevice, bindings: FakeBindings) -> None:
    stream = device.stream()
    with pytest.raises(RuntimeError), device.capture(stream) as graph:
        raise RuntimeError
    assert bindings.calls[-1] == "cuStreamEndCapture"
    with pytest.raises(DeviceError, match="not captured to its end"):
        graph.launch(stream)


def test_graph_that_does_not_fit_is_one_line(device: CudaDevice, bindings: FakeBindings) -> None:
    bindings.failures["cuGraphInstantiate"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with (
        pytest.raises(DeviceMemoryError, match=r"instantiating a graph failed: .*; lower --max-context"),
        device.capture(device.stream()),
    ):
        pass
    assert bindings.calls[-1] == "cuGraphDestroy"


def test_events_measure_and_answer(device: CudaDevice, bindings: FakeBindings) -> None:
    stream, begin, end = device.stream(), device.event(timing=True), device.event(timing=True)
    begin.record(stream)
    end.record(stream)
    stream.wait(end)
    assert end.elapsed_ms(begin) == 1.5
    assert end.query()
    bindings.failures["cuEventQuery"] = "CUDA_ERROR_NOT_READY"
    assert not end.query()
    bindings.failures |= {"cuEventQuery": "CUDA_ERROR_LAUNCH_FAILED", "cuEventSynchronize": "CUDA_ERROR_LAUNCH_FAILED"}
    with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
        end.query()


def test_closing_gives_everything_back_once(device: CudaDevice, bindings: FakeBindings) -> None:
    device.allocate(128)
    device.allocate_host(128)
    device.close()
    device.close()
    assert bindings.used == 0
    assert bindings.calls.count("cuDevicePrimaryCtxRelease") == 1


def test_another_thread_makes_the_device_its_own_before_it_drives_the_program(bindings: FakeBindings) -> None:
    device = CudaDevice(calls=Driver(bindings))
    program = CudaProgram.__new__(CudaProgram)  # its start needs a model; entering a thread needs the device alone
    program.device = device
    before = bindings.calls.count("cuCtxSetCurrent")
    thread = threading.Thread(target=program.enter_thread)
    thread.start()
    thread.join()
    assert bindings.calls.count("cuCtxSetCurrent") == before + 1
