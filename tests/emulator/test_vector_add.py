"""The example to copy: a parameter struct, a spec, a comparison with numpy at boundary sizes."""

import ctypes

import numpy as np
import pytest

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from tests.emulator.device import EmulatedDevice


class VectorAddParams(ctypes.Structure):
    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_int))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 127, 128, 129, 1000])
def test_sum_equals_numpy(n: int, fresh_seed: int) -> None:
    a, b = np.random.default_rng(fresh_seed).standard_normal((2, n)).astype(np.float32)
    spec = KernelSpec("vector_add.cu", "vector_add", threads=128)
    with EmulatedDevice() as device:
        out = device.empty(4 * n)
        params = VectorAddParams(device.put(a), device.put(b), out, n)
        device.kernel(spec).launch((-(-n // spec.threads), 1, 1), params, device.stream())
        assert np.array_equal(device.get(out, np.float32, n), a + b)
