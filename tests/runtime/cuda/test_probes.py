"""The probes under the emulator: they run, count what they did, and give their memory back."""

import numpy as np
import pytest

from ninfer_runtime.backends.cuda.ops.probes import L2Flush, Nothing, mma_tflops, read_gbps, specs
from tests.emulator.device import EmulatedDevice


def test_rates_are_positive_and_memory_comes_back() -> None:
    with EmulatedDevice(n_sms=2) as device:
        device.prepare(specs())
        stream = device.stream()
        free = device.free_bytes()
        matrix = mma_tflops(device, stream, steps=1, samples=1)
        read = read_gbps(device, stream, n_bytes=1 << 20, samples=1)
        assert matrix.value > 0
        assert matrix.unit == "TFLOP/s"
        assert read.value > 0
        assert read.unit == "GB/s"
        assert device.free_bytes() == free


def test_flush_writes_all_of_twice_the_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedDevice, "l2_bytes", 50_000)
    with EmulatedDevice(n_sms=2) as device:
        pointers: list[int] = []
        allocate = device.allocate

        def noted(n_bytes: int) -> int:
            pointers.append(allocate(n_bytes))
            return pointers[-1]

        monkeypatch.setattr(device, "allocate", noted)
        flush = L2Flush(device)
        for value in (1, 2):
            flush.launch(device.stream())
            written = device.get(pointers[0], np.uint32, 100_000 // 4)
            assert np.all(written == value)
        flush.close()


def test_an_empty_launch_chains() -> None:
    with EmulatedDevice(n_sms=2) as device:
        nothing, stream = Nothing(device), device.stream()
        for pdl in (True, False):
            nothing.launch(stream, pdl=pdl)
        device.synchronize()
