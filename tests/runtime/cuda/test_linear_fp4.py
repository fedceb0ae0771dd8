"""linear_fp4.cu under the emulator, with the instruction's model behind it: against float64, and against the twin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ninfer_format.errors import SignatureError
from ninfer_format.numeric.nvfp4_activations import quantize_rows
from ninfer_runtime.backends.cuda.ops.linear_fp4 import LinearFp4
from ninfer_runtime.backends.cuda.ops.linear_large import Epilogue, Output
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, row_bytes
from ninfer_runtime.backends.cuda.packing import PackedMatrix
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.fp4_rig import expected_bytes
from tests.runtime.cuda.linear_fp4_rig import bound, product, random_rows, random_weight, run, run_twin
from tests.runtime.cuda.small_ops import from_bf16

FP4, BF16 = QuantizedForm.FP4, QuantizedForm.BF16


@pytest.fixture(params=[3])
def device(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    with EmulatedDevice(n_sms=request.param, arch="sm_120a") as device:
        yield device


@pytest.mark.parametrize("n_tokens", [49, 64, 65, 130])
def test_stored_product_is_the_float64_one(device: EmulatedDevice, n_tokens: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_rows, k = 77, 320
    weight, rows = random_weight(device, rng, n_rows, k), random_rows(device, rng, n_tokens, k, FP4)
    out = device.empty(n_tokens * n_rows * 4)
    run(device, [weight], Epilogue.STORE, rows, [Output(out, "fp32")])
    found = device.get(out, np.float32, (n_tokens, n_rows))
    assert (np.abs(found - product(weight, rows)) <= bound(weight, rows)).all()


def test_sums_that_every_order_gives_exactly_are_bit_identical(device: EmulatedDevice, fresh_seed: int) -> None:
    """A wrong fragment, nibble or scale changes them; no tolerance hides it."""
    rng = np.random.default_rng(fresh_seed)
    weight = random_weight(device, rng, 48, 256, any_scale=False)
    weight = replace(weight, matrix=replace(weight.matrix, divisor=1.0))
    rows = random_rows(device, rng, 49, 256, FP4, exact=True)
    out = device.empty(49 * 48 * 4)
    run(device, [weight], Epilogue.STORE, rows, [Output(out, "fp32")])
    assert np.array_equal(device.get(out, np.float32, (49, 48)), product(weight, rows))


@pytest.mark.parametrize("exact", [True, False])
def test_the_twin_has_the_same_sums(device: EmulatedDevice, exact: bool, fresh_seed: int) -> None:
    """The product that every card has, of the same rows as bf16: equal up to the order of fp32 additions."""
    n_tokens, n_rows, k = 49, 40, 256
    found = []
    for form, launch in ((FP4, run), (BF16, run_twin)):
        rng = np.random.default_rng(fresh_seed)
        weight = random_weight(device, rng, n_rows, k, any_scale=not exact)
        weight = replace(weight, matrix=replace(weight.matrix, divisor=2.0 if exact else weight.matrix.divisor))
        rows = random_rows(device, rng, n_tokens, k, form, exact=exact)
        out = device.empty(n_tokens * n_rows * 4)
        launch(device, [weight], Epilogue.STORE, rows, [Output(out, "fp32")])
        found.append(device.get(out, np.float32, (n_tokens, n_rows)))
    assert (np.abs(found[0] - found[1]) <= (0 if exact else 1) * bound(weight, rows)).all()


def test_small_matrices_share_a_launch(device: EmulatedDevice, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, k = 50, 128
    weights = [random_weight(device, rng, n_rows, k) for n_rows in (16, 40)]
    rows = random_rows(device, rng, n_tokens, k, FP4)
    outputs = [device.empty(n_tokens * 16 * 2), device.empty(n_tokens * 40 * 4)]
    run(device, weights, Epilogue.STORE, rows, [Output(outputs[0]), Output(outputs[1], "fp32")])
    first = from_bf16(device.get(outputs[0], np.int16, (n_tokens, 16)))
    second = device.get(outputs[1], np.float32, (n_tokens, 40))
    expected = product(weights[0], rows)
    assert (np.abs(first - expected) <= bound(weights[0], rows) + 2.0**-8 * np.abs(expected)).all()
    assert (np.abs(second - product(weights[1], rows)) <= bound(weights[1], rows)).all()


def test_residual_is_added_to(device: EmulatedDevice, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, n_rows, k = 49, 272, 192
    weight, rows = random_weight(device, rng, n_rows, k), random_rows(device, rng, n_tokens, k, FP4)
    before = rng.standard_normal((n_tokens, n_rows)).astype(np.float32)
    out = device.put(before)
    run(device, [weight], Epilogue.RESIDUAL, rows, [Output(out, "fp32")])
    found = device.get(out, np.float32, (n_tokens, n_rows))
    expected = before + product(weight, rows)
    assert (np.abs(found - expected) <= bound(weight, rows) + 1e-7 * np.abs(expected)).all()


@pytest.mark.parametrize("n_sms", [1, 2, 5])
def test_how_work_is_cut_changes_rounding_only(n_sms: int, fresh_seed: int) -> None:
    """Tiles that several blocks share, and a card on which each is one block's."""
    rng = np.random.default_rng(fresh_seed)
    n_tokens, n_rows, k = 70, 64, 1536
    with EmulatedDevice(n_sms=n_sms, arch="sm_120a") as device:
        weight, rows = random_weight(device, rng, n_rows, k), random_rows(device, rng, n_tokens, k, FP4)
        found = []
        for _ in range(2):
            out = device.empty(n_tokens * n_rows * 4)
            run(device, [weight], Epilogue.STORE, rows, [Output(out, "fp32")])
            found.append(device.get(out, np.float32, (n_tokens, n_rows)))
        assert (np.abs(found[0] - product(weight, rows)) <= bound(weight, rows)).all()
        assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize(("form", "width"), [(FP4, 48), (FP4, 192), (BF16, 192)])
def test_swiglu_outputs_as_bf16_and_as_quantized_rows(
    device: EmulatedDevice, form: QuantizedForm, width: int, fresh_seed: int
) -> None:
    """The quantized rows are those of the bf16 outputs, bit for bit, padding included."""
    rng = np.random.default_rng(fresh_seed)
    n_tokens, k, out_divisor, launch = 50, 128, 5.5, run if form is FP4 else run_twin
    weight = random_weight(device, rng, 2 * width, k, glu=True)
    rows = random_rows(device, rng, n_tokens, k, form)
    plain = device.empty(n_tokens * width * 2)
    quantized = device.empty(n_tokens * row_bytes(width, form))
    launch(device, [weight], Epilogue.SWIGLU, rows, [Output(plain)])
    stride = 0 if form is FP4 else row_bytes(width, form) // 2
    launch(device, [weight], Epilogue.SWIGLU, rows, [Output(quantized, stride=stride)], out_divisor)
    values = from_bf16(device.get(plain, np.int16, (n_tokens, width)))
    gate, up = np.split(product(weight, rows), 2, axis=1)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    error = np.max(bound(weight, rows)) * (1.1 * np.abs(up) + np.abs(gate) + 1) + 1e-6 * np.abs(expected)
    assert (np.abs(values - expected) <= error + 2.0**-8 * np.abs(expected)).all()
    found = device.get(quantized, np.uint8, (n_tokens, row_bytes(width, form)))
    words = expected_bytes(quantize_rows(values, np.float32(out_divisor)), form)
    assert np.array_equal(found[:, : words.shape[1]], words)


def test_what_does_not_go_together_is_refused() -> None:
    nvfp4 = PackedMatrix("a", "NVFP4", 48, 128)
    refused = [
        ([], Epilogue.STORE, None, "at least one matrix"),
        ([PackedMatrix("w", "BF16", 48, 128)], Epilogue.STORE, None, "w is BF16, FP4 activations multiply NVFP4"),
        ([nvfp4, PackedMatrix("b", "NVFP4", 48, 256)], Epilogue.STORE, None, "b has 256 columns, a has 128"),
        ([nvfp4], Epilogue.SWIGLU, None, "a: SwiGLU takes interleaved"),
        ([nvfp4], Epilogue.STORE, 1.0, "a: only SwiGLU outputs in whole blocks"),
    ]
    with EmulatedDevice() as device:
        for matrices, epilogue, out_divisor, message in refused:
            with pytest.raises(SignatureError, match=message):
                LinearFp4(
                    device,
                    matrices,
                    epilogue,
                    max_tokens=64,
                    workspace=0,
                    divisor=1.0,
                    out_divisor=out_divisor,
                )
