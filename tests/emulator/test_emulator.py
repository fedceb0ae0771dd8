"""Mistakes of kernels are found and named, and the device behaves as the ``Device`` protocol says."""

import ctypes
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from ninfer_runtime.backends.cuda.compiler import Compiler, KernelSpec, Sources
from ninfer_runtime.backends.cuda.device import Device, DeviceError, DeviceMemoryError
from tests.emulator import build
from tests.emulator.device import EmulatedDevice, KernelError
from tests.emulator.recording import Order

THREADS = 64
POISON = 0xFFFFFFFF


class MistakeParams(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("n", ctypes.c_int))


def spec_of(mistake: int) -> KernelSpec:
    return KernelSpec("mistakes.cu", "mistake", (("MISTAKE", mistake),), threads=THREADS, shared_bytes=4 * 4 * THREADS)


def launch(device: EmulatedDevice, mistake: int, out: int, n: int = 0) -> None:
    device.kernel(spec_of(mistake)).launch((1, 1, 1), MistakeParams(out, n), device.stream(), pdl=False)


def test_the_emulator_is_a_device() -> None:
    device: Device = EmulatedDevice()
    device.close()


@pytest.mark.parametrize(
    "mistake, message",
    [
        (2, r"thread 16 \(warp 0, lane 16\): diverged: it has come to ballot while 16 lanes .* wait in a shuffle"),
        (3, r"not every thread reaches the barrier .* warp 0 has ended, warp 1 waits at barrier 0"),
        (4, r"lane 1\): diverged: it has come to the end of the kernel while 1 lanes .* wait in a shuffle"),
        (6, r"access to address 0x[0-9a-f]+, in no allocation of the device"),
        (7, r"thread 0 .*: address 0x[0-9a-f]+ is not a multiple of 16"),
        (8, r"access \d+ bytes behind the block's 1024 bytes of dynamic shared memory"),
        (9, r"ran for more than 1 s"),
        (10, r"waits for ever for a value"),
        (11, r"ldmatrix from 0x[0-9a-f]+: not a 16-byte aligned row in shared memory"),
        (13, r"integer division by zero"),
    ],
)
def test_a_mistake_is_an_error_that_names_kernel_block_and_thread(mistake: int, message: str) -> None:
    with EmulatedDevice(cpu_seconds=1) as device:
        out = device.put(np.zeros(THREADS, np.uint32))
        with pytest.raises(KernelError, match=message) as caught:
            launch(device, mistake, out)
        assert str(caught.value).startswith(f"kernel mistake[MISTAKE={mistake}]x64, block (0, 0, 0)")
        launch(device, 0, out)  # the process and the device go on
        assert np.array_equal(device.get(out, np.uint32, THREADS), (np.arange(THREADS) + 1) % THREADS)


@pytest.mark.parametrize("mistake", [1, 12, 14, 15])
def test_what_was_not_waited_for_is_poison(mistake: int) -> None:
    with EmulatedDevice(watch=False) as device:
        out = device.put(np.zeros(4 * THREADS, np.uint32))
        launch(device, mistake, out)
        assert POISON in device.get(out, np.uint32, THREADS)


@pytest.mark.parametrize(
    "mistake, message",
    [
        (
            1,
            r"race: shared memory byte \d+ is \w+ here and \w+ by thread \d+, with no \w+ in between",
        ),
        (12, None),
        (14, r"byte 0 is read while a cp.async of thread 0 is under way"),
        (15, r"race: shared memory byte \d+ .* with no warp_sync in between"),
        (
            16,
            r"reads in front of grid_dependency_wait\(\) what an earlier kernel writes \(mistake\[MISTAKE=0\]x64\)",
        ),
        (17, r"writes in front of grid_dependency_wait\(\) what an earlier kernel writes"),
        (18, r"race: shared memory byte \d+ is written here and read by thread \d+, with no barrier in between"),
        (0, None),
    ],
)
def test_watching_names_the_thread_that_races(mistake: int, message: str | None) -> None:
    with EmulatedDevice(watch=True) as device:
        out, stream = device.put(np.zeros(THREADS, np.uint32)), device.stream()
        for which, pdl in ((0, False), (mistake, mistake in (16, 17))):
            kernel, expected = device.kernel(spec_of(which)), message if which == mistake else None
            with pytest.raises(KernelError, match=expected) if expected else nullcontext():
                kernel.launch((1, 1, 1), MistakeParams(out, 0), stream, pdl=pdl)


def test_what_earlier_kernels_wrote_may_be_read_early_once_they_have_ended() -> None:
    with EmulatedDevice(watch=True) as device:
        out, stream = device.put(np.zeros(THREADS, np.uint32)), device.stream()
        device.kernel(spec_of(0)).launch((1, 1, 1), MistakeParams(out, 0), stream, pdl=False)
        stream.synchronize()
        device.kernel(spec_of(16)).launch((1, 1, 1), MistakeParams(out, 0), stream, pdl=True)


@pytest.mark.parametrize("between, is_fine", [(19, True), (20, False)])
def test_a_kernel_that_releases_after_its_wait_says_that_those_ahead_have_ended(between: int, is_fine: bool) -> None:
    with EmulatedDevice(watch=True) as device:
        out, stream = device.put(np.zeros(THREADS, np.uint32)), device.stream()
        for which in (0, between):
            device.kernel(spec_of(which)).launch((1, 1, 1), MistakeParams(out, 0), stream, pdl=which != 0)
        early = device.kernel(spec_of(16))
        with nullcontext() if is_fine else pytest.raises(KernelError, match=r"in front of grid_dependency_wait\(\)"):
            early.launch((1, 1, 1), MistakeParams(out, 0), stream, pdl=True)


def test_a_dependent_launch_that_never_waits_is_refused() -> None:
    with EmulatedDevice() as device:
        out, kernel = device.allocate(4 * THREADS), device.kernel(spec_of(0))
        with pytest.raises(KernelError, match=r"pdl=True, and no thread of the block called grid_dependency_wait\(\)"):
            kernel.launch((1, 1, 1), MistakeParams(out, 0), device.stream())


def test_fresh_memory_is_poison_and_256_byte_aligned() -> None:
    with EmulatedDevice() as device:
        for n_bytes in (1, 255, 256, 257, 4096, 4097):
            pointer = device.allocate(n_bytes)
            assert pointer % 256 == 0
            assert (device.get(pointer, np.uint8, n_bytes) == 0xFF).all()


def test_a_write_behind_an_allocation_is_found_when_waiting() -> None:
    with EmulatedDevice() as device:
        out = device.allocate(4 * THREADS - 4)
        launch(device, 0, out)
        with pytest.raises(DeviceError, match="wrote 0 bytes behind the end of the allocation of 252 bytes"):
            device.synchronize()
        whole = device.allocate(4 * THREADS)
        with pytest.raises(KernelError, match="0 bytes behind the end of the allocation of 256 bytes"):
            launch(device, 5, whole)


def test_freed_memory_cannot_be_used() -> None:
    with EmulatedDevice() as device:
        out = device.allocate(4 * THREADS)
        device.free(out)
        with pytest.raises(DeviceError, match="in no allocation"):
            device.download(out, np.empty(1, np.uint8))
        with pytest.raises(DeviceError, match="free already"):
            device.free(out)


def test_memory_ends() -> None:
    with EmulatedDevice(total_bytes=1000) as device:
        first = device.allocate(600)
        assert device.free_bytes() == 400
        with pytest.raises(DeviceMemoryError, match="401 bytes of device memory do not fit, 400 are left"):
            device.allocate(401)
        device.free(first)
        assert device.free_bytes() == 1000


def test_transfers_outside_an_allocation_are_refused() -> None:
    with EmulatedDevice() as device:
        pointer, stream = device.allocate(16), device.stream()
        with pytest.raises(DeviceError, match="an upload of 17 bytes"):
            device.upload(pointer, np.zeros(17, np.uint8))
        with pytest.raises(DeviceError, match="a fill of 17 bytes"):
            device.fill(pointer, 0, 17, stream)
        with pytest.raises(DeviceError, match="the ranges overlap"):
            device.copy(pointer, pointer + 1, 15, stream)


def test_a_parameter_struct_of_another_size_is_refused() -> None:
    class Longer(ctypes.Structure):
        _fields_ = (*MistakeParams._fields_, ("more", ctypes.c_uint64))

    with EmulatedDevice() as device, pytest.raises(KernelError, match="struct has 16 bytes, the caller's 24"):
        device.kernel(spec_of(0)).launch((1, 1, 1), Longer(device.allocate(256), 0, 0), device.stream())


def test_what_no_card_could_launch_is_refused() -> None:
    with EmulatedDevice() as device:
        for spec in (
            KernelSpec("mistakes.cu", "mistake", threads=48),
            KernelSpec("mistakes.cu", "mistake", threads=2048),
            KernelSpec("mistakes.cu", "mistake", shared_bytes=101_377),
        ):
            with pytest.raises(DeviceError, match="kernel mistake"):
                device.kernel(spec)
        with pytest.raises(DeviceError, match="grid"):
            device.kernel(spec_of(0)).launch((0, 1, 1), MistakeParams(), device.stream())


def test_a_capture_runs_nothing_and_its_graph_repeats_all_of_it() -> None:
    with EmulatedDevice() as device:
        stream, pinned = device.stream(), device.allocate_host(4 * THREADS)
        out, copied = device.put(np.zeros(THREADS, np.uint32)), device.put(np.zeros(THREADS, np.uint32))
        kernel = device.kernel(spec_of(0))
        params = MistakeParams(out, 0)
        with device.capture(stream) as graph:
            kernel.launch((1, 1, 1), params, stream, pdl=False)
            device.copy(copied, out, 4 * THREADS, stream)
            device.fill(out, 0, 4 * THREADS, stream)
            device.download(copied, pinned, stream)
            with pytest.raises(DeviceError, match="that is being captured"):
                stream.synchronize()
            with pytest.raises(DeviceError, match="allocation while"):
                device.allocate(1)
            with pytest.raises(DeviceError, match="first use of kernel"):
                device.kernel(spec_of(1))
        params.out = 0  # the recording has its own copy
        assert graph.n_nodes == 4
        assert not device.get(copied, np.uint32, THREADS).any()
        for _ in range(2):
            pinned[:] = 0
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(pinned.view(np.uint32), (np.arange(THREADS) + 1) % THREADS)
        assert not device.get(out, np.uint32, THREADS).any()
        graph.close()
        with pytest.raises(DeviceError, match="closed"):
            graph.launch(stream)


@pytest.mark.parametrize("order", ["recorded", "side_first", "side_last"])
@pytest.mark.parametrize("forgotten", ["", "copy waits", "reader waits", "join"])
def test_a_second_stream_takes_part_in_a_capture_and_forgotten_edges_show(order: Order, forgotten: str) -> None:
    """Round: the main stream takes the slot's content, the side stream fills the slot again and again."""
    with EmulatedDevice(order=order) as device:
        main, side, taken, filled = device.stream(), device.stream(), device.event(), device.event()
        slot, out = device.put(np.zeros(1, np.uint8)), device.put(np.zeros(4, np.uint8))
        with nullcontext() if forgotten != "join" else pytest.raises(DeviceError, match=r"1 pieces .* not joined"):
            with device.capture(main) as graph:
                for i in range(4):
                    device.copy(out + i, slot, 1, main)
                    if i == 0 or forgotten != "copy waits":
                        taken.record(main)
                        side.wait(taken)
                    device.fill(slot, i + 1, 1, side)
                    filled.record(side)
                    if forgotten != "reader waits" and not (forgotten == "join" and i == 3):
                        main.wait(filled)
                main.wait(filled) if forgotten != "join" else None
            graph.launch(main)
        if forgotten == "join":
            return
        found = device.get(out, np.uint8, 4).tolist()
        shows = {"": "", "copy waits": "side_first", "reader waits": "side_last"}[forgotten]
        assert graph.n_nodes == 8
        assert (found == [0, 1, 2, 3]) == (order != shows)


def test_events_of_a_capture_mean_nothing_outside_of_it() -> None:
    with EmulatedDevice() as device:
        stream, other, event = device.stream(), device.stream(), device.event()
        with device.capture(stream):
            event.record(stream)
        with pytest.raises(DeviceError, match="recorded in another capture"):
            other.wait(event)
        event.record(stream)
        other.wait(event)


def test_lazy_work_is_done_only_when_something_waits() -> None:
    with EmulatedDevice(lazy=True) as device:
        first, second, event = device.stream(), device.stream(), device.event()
        pointer, pinned = device.put(np.zeros(8, np.uint8)), device.allocate_host(8)
        device.fill(pointer, 7, 8, first)
        event.record(first)
        device.fill(pointer, 9, 8, first)
        second.wait(event)
        device.download(pointer, pinned, second)
        assert (pinned == 0xFF).all()
        assert not event.query()
        second.synchronize()
        assert event.query()
        assert (pinned == 7).all()
        assert (device.get(pointer, np.uint8, 8) == 9).all()


def test_events_measure_time_only_when_made_for_it() -> None:
    with EmulatedDevice() as device:
        stream, begin, end = device.stream(), device.event(timing=True), device.event(timing=True)
        begin.record(stream)
        end.record(stream)
        assert end.elapsed_ms(begin) >= 0
        with pytest.raises(DeviceError, match="timing=True"):
            end.elapsed_ms(device.event())


def test_a_source_that_does_not_compile_shows_the_compilers_complaint(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text('#include "common.cuh"\nint x = undeclared;\n')
    with (
        EmulatedDevice(folders=(tmp_path,)) as device,
        pytest.raises(build.EmulatorBuildError, match=r"kernel broken.*x256 is no valid C\+\+ here(.|\n)*undeclared"),
    ):
        device.kernel(KernelSpec("broken.cu", "broken"))


def test_a_missing_compiler_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.EmulatorBuildError, match=r"looked for c\+\+, g\+\+, clang\+\+.*install g\+\+"):
        build.compiler.__wrapped__()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_the_same_sources_compile_for_cards(arch: str, tmp_path: Path) -> None:
    names = ("mma_bf16", "mma_f16", "mma_s8", "ldmatrix", "shuffle", "numbers", "cp_async", "barriers", "block_order")
    compiler = Compiler(arch, sources=Sources(build.HERE), folder=tmp_path)
    specs = [KernelSpec("instructions.cu", f"probe_{name}", (("WAIT_GROUPS", 0),), threads=32) for name in names]
    specs += [spec_of(0), KernelSpec("vector_add.cu", "vector_add")]
    for cubin in compiler.compile_all(specs).values():
        assert cubin.image.startswith(b"\x7fELF")
        assert not cubin.warnings
