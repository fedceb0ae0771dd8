"""linear_int8.cu and its rows under the emulator, against the numpy oracle and float64 of the same words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ninfer_format.errors import SignatureError
from ninfer_runtime.backends.cuda.ops.linear_int8 import LinearInt8
from ninfer_runtime.backends.cuda.ops.linear_large import Epilogue, Output
from ninfer_runtime.backends.cuda.packing import PackedMatrix
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.int8_rig import FORMATS, check_rows, product, random_rows, random_weight, run
from tests.runtime.cuda.small_ops import from_bf16


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice(n_sms=3) as device:
        yield device


@pytest.mark.parametrize("k", [128, 192, 2048])
def test_rows_are_the_oracles(device: EmulatedDevice, k: int, fresh_seed: int) -> None:
    check_rows(device, k, 7, fresh_seed)


@pytest.mark.parametrize("n_tokens", [49, 65])
@pytest.mark.parametrize("name", FORMATS)
def test_stored_product_is_the_float64_one(device: EmulatedDevice, name: str, n_tokens: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_rows, k = 77, 320
    weight, x = random_weight(device, rng, name, n_rows, k), random_rows(rng, n_tokens, k)
    out = device.empty(n_tokens * n_rows * 4)
    run(device, [weight], Epilogue.STORE, x, [Output(out, "fp32")])
    expected, limit = product(weight, x)
    assert (np.abs(device.get(out, np.float32, (n_tokens, n_rows)) - expected) <= limit).all()


def test_residual_over_shared_tiles(device: EmulatedDevice, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, n_rows, k = 49, 272, 1536
    weight, x = random_weight(device, rng, "Q5G64_F16S", n_rows, k), random_rows(rng, n_tokens, k)
    before = rng.standard_normal((n_tokens, n_rows)).astype(np.float32)
    out = device.put(before)
    run(device, [weight], Epilogue.RESIDUAL, x, [Output(out, "fp32")])
    expected, limit = product(weight, x)
    found = device.get(out, np.float32, (n_tokens, n_rows))
    assert (np.abs(found - before - expected) <= limit + 1e-6 * np.abs(before)).all()


def test_swiglu(device: EmulatedDevice, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, width, k = 49, 48, 128
    weight, x = random_weight(device, rng, "Q4G64_F16S", 2 * width, k, glu=True), random_rows(rng, n_tokens, k)
    out = device.empty(n_tokens * width * 2)
    run(device, [weight], Epilogue.SWIGLU, x, [Output(out)])
    (gate, up), limit = np.split(product(weight, x)[0], 2, axis=1), product(weight, x)[1].max()
    expected = gate / (1 + np.exp(-gate)) * up
    error = limit * (1.1 * np.abs(up) + np.abs(gate) + 1) + (2.0**-8 + 1e-6) * np.abs(expected)
    assert (np.abs(from_bf16(device.get(out, np.int16, (n_tokens, width))) - expected) <= error).all()


@pytest.mark.parametrize("name", ["BF16", "NVFP4"])
def test_codes_that_are_no_integers_are_refused(device: EmulatedDevice, name: str) -> None:
    matrix = PackedMatrix("w", name, 48, 128)
    with pytest.raises(SignatureError, match=f"w is {name}, bytes multiply grouped integer codes"):
        LinearInt8(device, [matrix], Epilogue.STORE, max_tokens=64, workspace=0)
