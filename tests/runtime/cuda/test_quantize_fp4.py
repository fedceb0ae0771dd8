"""Activations as NVFP4: every launch and form writes the words of the numpy oracle, and the oracle follows its rule."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from ninfer_format.errors import UnsupportedError
from ninfer_format.numeric.nvfp4 import E2M1, E4M3FN
from ninfer_format.numeric.nvfp4_activations import nearest_scale, quantize_rows
from ninfer_runtime.backends.cuda.ops.quantize_rows import (
    QuantizedForm,
    QuantizeRows,
    form_for,
    kernel_spec,
    row_bytes,
)
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda import fp4_rig
from tests.runtime.cuda.small_ops import bf16_words, from_bf16

FORMS = (QuantizedForm.FP4, QuantizedForm.BF16)


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as device:
        yield device


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k, divisor", [(128, 1.0), (192, 37.5), (5120, 2688 / 7.0)])
def test_rows_are_the_oracles(
    device: EmulatedDevice, k: int, divisor: float, form: QuantizedForm, fresh_seed: int
) -> None:
    fp4_rig.check_rows(device, k, 7, form, float(np.float32(divisor)), fresh_seed)


def test_products_may_take_the_place_of_their_rows(device: EmulatedDevice, fresh_seed: int) -> None:
    fp4_rig.check_rows(device, 192, 5, QuantizedForm.BF16, 11.0, fresh_seed, in_place=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hidden", [128, 192, 2048])
def test_the_norm_writes_them_too(device: EmulatedDevice, hidden: int, form: QuantizedForm, fresh_seed: int) -> None:
    fp4_rig.check_norm(device, hidden, 6, form, 448.0, fresh_seed)


def test_numbers_that_are_none_stay_visible(device: EmulatedDevice) -> None:
    x = np.full((1, 128), 6, np.float32)
    x[0, 17], x[0, 40] = np.nan, np.inf
    out = device.empty(256)
    source = device.put(bf16_words(x))
    QuantizeRows(device, 128, QuantizedForm.BF16).launch(device.stream(), 1, source, 1.0, out)
    for products in (quantize_rows(x, np.float32(1)).products, from_bf16(device.get(out, np.int16, (1, 128)))):
        assert np.isnan(products[0, 16:32]).all()
        assert products[0, 40] == 6 * 448
        assert (np.delete(products[0], np.r_[16:48]) == 6).all()


def test_every_scale_is_the_nearest_with_ties_to_even() -> None:
    values = E4M3FN[:0x7F].astype(np.float64)
    halves = (values[1:] + values[:-1]) / 2
    tried = np.concatenate([values, halves, [449.0, 500.0, 1e30]]).astype(np.float32)
    tried = np.concatenate([tried, np.nextafter(tried, np.float32(0)), np.nextafter(tried, np.float32(1e38))])
    for value, word in zip(tried.tolist(), nearest_scale(tried).tolist(), strict=True):
        distances = [abs(Fraction(float(v)) - Fraction(value)) for v in values]
        best = min(distances)
        nearest = [w for w, distance in enumerate(distances) if distance == best]
        assert word == (nearest[0] if len(nearest) == 1 else next(w for w in nearest if w % 2 == 0))


def test_every_code_is_the_nearest_with_ties_to_even(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    divisor = np.float32(rng.uniform(0.5, 40))
    x = rng.normal(0, 1, (40, 64)).astype(np.float32)
    x[:, 0] = x[:, 16] = 6 / divisor  # scale near 1: halves of it are midpoints
    x[:, 1::4] = np.float32(rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], x[:, 1::4].shape)) / divisor
    rows = quantize_rows(x, divisor)
    scales = np.repeat(E4M3FN[rows.scales], 16, axis=1)
    flat = (array.ravel().tolist() for array in (x, scales, rows.codes))
    for value, scale, code in zip(*flat, strict=True):
        scaled = Fraction(float(np.float32(value) * divisor))
        distances = [abs(Fraction(float(v)) * Fraction(scale) - abs(scaled)) for v in E2M1[:8]]
        best = min(distances)
        nearest = [w for w, distance in enumerate(distances) if distance == best]
        assert code & 7 == (nearest[0] if len(nearest) == 1 else next(w for w in nearest if w % 2 == 0))
        assert code >> 3 == (scaled < 0)


def test_forms_and_sizes() -> None:
    assert form_for("sm_120a") is QuantizedForm.FP4
    assert form_for("sm_90a") is form_for("sm_86") is QuantizedForm.BF16
    assert row_bytes(5120, QuantizedForm.FP4) == 5120 * 9 // 16
    assert row_bytes(192, QuantizedForm.BF16) == 512
    with pytest.raises(UnsupportedError, match="200 columns of NVFP4 activations"):
        kernel_spec(200, QuantizedForm.FP4)
