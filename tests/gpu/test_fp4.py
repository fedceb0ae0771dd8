"""Quantized activations and the twin of their product on the card: the oracle's words, and float64 of the same."""

from collections.abc import Iterator

import numpy as np
import pytest

from ninfer_format.numeric.nvfp4_activations import quantize_rows
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops import linear_large, rms_norm
from ninfer_runtime.backends.cuda.ops.linear_large import Epilogue, Output
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, has_fp4_product, kernel_spec, row_bytes
from ninfer_runtime.backends.cuda.packing import PackedMatrix
from tests.runtime.cuda import fp4_rig
from tests.runtime.cuda.linear_fp4_rig import bound, product, random_rows, random_weight, run, run_twin
from tests.runtime.cuda.small_ops import from_bf16, get, poisoned, put

pytestmark = pytest.mark.gpu

FORMS = (QuantizedForm.FP4, QuantizedForm.BF16)
WIDTHS = (128, 5120, 6144)
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 47, 48, 64, 65, 127, 128, 255, 1000, 1024)


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    card = CudaDevice()
    plain, pairs = PackedMatrix("w", "NVFP4", 32, 128), PackedMatrix("w", "NVFP4", 32, 128, interleaved=True)
    wanted = [kernel_spec(k, form) for k in (*WIDTHS, 192, 256, 1984) for form in FORMS]
    wanted += [rms_norm.kernel_spec(k, "bf16", form) for k in WIDTHS for form in FORMS]
    for epilogue in (Epilogue.STORE, Epilogue.RESIDUAL):
        wanted += linear_large.specs([plain], epilogue)
    for quantized in (False, True):
        wanted += linear_large.specs([pairs], Epilogue.SWIGLU, quantized=quantized)
    card.prepare(wanted)
    yield card
    card.close()


@pytest.mark.parametrize("n_rows", ROWS)
def test_rows_are_the_oracles(device: CudaDevice, n_rows: int, fresh_seed: int) -> None:
    for form in FORMS:
        fp4_rig.check_rows(device, WIDTHS[n_rows % 3], n_rows, form, 37.5, fresh_seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_the_norm_writes_them_too(device: CudaDevice, hidden: int, form: QuantizedForm, fresh_seed: int) -> None:
    fp4_rig.check_norm(device, hidden, 37, form, 448.0, fresh_seed)


def test_products_may_take_the_place_of_their_rows(device: CudaDevice, fresh_seed: int) -> None:
    fp4_rig.check_rows(device, 5120, 255, QuantizedForm.BF16, 11.0, fresh_seed, in_place=True)


@pytest.mark.parametrize("n_tokens", [49, 64, 65, 127, 128, 255, 1000, 1024])
def test_stored_and_added_sums(device: CudaDevice, n_tokens: int, fresh_seed: int) -> None:
    """The FP4 product too where the card has it."""
    rng = np.random.default_rng(fresh_seed)
    n_rows, k = 1043, 1984
    weight = random_weight(device, rng, n_rows, k)
    for form in FORMS:
        if form is QuantizedForm.FP4 and not has_fp4_product(device.arch):
            continue
        rows, launch = random_rows(device, rng, n_tokens, k, form), run if form is QuantizedForm.FP4 else run_twin
        out = poisoned(device, 4 * n_tokens * n_rows)
        launch(device, [weight], Epilogue.STORE, rows, [Output(out, "fp32")])
        found = get(device, out, np.float32, (n_tokens, n_rows))
        assert (np.abs(found - product(weight, rows)) <= bound(weight, rows)).all()
        before = rng.standard_normal((n_tokens, n_rows)).astype(np.float32)
        out = put(device, before)
        launch(device, [weight], Epilogue.RESIDUAL, rows, [Output(out, "fp32")])
        assert np.array_equal(get(device, out, np.float32, (n_tokens, n_rows)), before + found)


@pytest.mark.parametrize("width", [192, 2048])
def test_swiglu_writes_quantized_rows(device: CudaDevice, width: int, fresh_seed: int) -> None:
    """Those of its bf16 outputs, bit for bit."""
    rng = np.random.default_rng(fresh_seed)
    n_tokens, k, out_divisor, form = 255, 256, 5.5, QuantizedForm.BF16
    weight, rows = random_weight(device, rng, 2 * width, k, glu=True), random_rows(device, rng, n_tokens, k, form)
    plain, quantized = poisoned(device, n_tokens * width * 2), poisoned(device, n_tokens * row_bytes(width, form))
    run_twin(device, [weight], Epilogue.SWIGLU, rows, [Output(plain)])
    outputs = [Output(quantized, stride=row_bytes(width, form) // 2)]
    run_twin(device, [weight], Epilogue.SWIGLU, rows, outputs, out_divisor)
    values = from_bf16(get(device, plain, np.int16, (n_tokens, width)))
    words = fp4_rig.expected_bytes(quantize_rows(values, np.float32(out_divisor)), form)
    assert np.array_equal(get(device, quantized, np.uint8, (n_tokens, row_bytes(width, form))), words)
