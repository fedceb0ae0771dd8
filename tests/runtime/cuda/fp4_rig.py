"""Quantized activations on any device against the numpy oracle: rows of many kinds, both forms, both launches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ninfer_format.numeric.nvfp4_activations import QuantizedRows, quantize_rows
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, QuantizeRows, row_bytes
from ninfer_runtime.backends.cuda.ops.rms_norm import QuantizingRmsNorm, RmsNorm
from ninfer_runtime.backends.cuda.packing import activation_stride
from tests.runtime.cuda.small_ops import bf16_words, from_bf16, get, poisoned, put, rounded

EPS = 1e-6


def any_rows(rng: np.random.Generator, n_rows: int, k: int) -> NDArray[np.float32]:
    """bf16 values: ordinary rows, tiny and huge ones, zeros of both signs, lone outliers."""
    scales = np.array([1.0, 1e-4, 3e4, 0.02, 1.0], np.float32)[np.arange(n_rows) % 5, None]
    x = rng.normal(0.0, 1.0, (n_rows, k)).astype(np.float32) * scales
    x[rng.random((n_rows, k)) < 0.05] = 0.0
    x[rng.random((n_rows, k)) < 0.05] = -0.0
    x[rng.random((n_rows, k)) < 0.01] *= 50
    x[n_rows // 2, : k // 2] = 0.0
    return rounded(x)


def operand_order(rows: QuantizedRows) -> NDArray[np.uint8]:
    """Bytes of FP4 rows as the product reads them, placed element by element as ``quantize_fp4.cuh`` says."""
    n_rows, k = rows.codes.shape
    stride = activation_stride(k)
    words = np.zeros((n_rows, stride // 8), np.uint32)
    for column in range(k):
        group, half, lane, at = column // 64 % 2, column // 32 % 2, column // 8 % 4, column % 8
        word = column // 128 * 16 + 4 * lane + 2 * group + half
        words[:, word] |= rows.codes[:, column].astype(np.uint32) << np.uint32(4 * (at // 2 + 4 * (at % 2)))
    scales = np.zeros((n_rows, stride // 16), np.uint8)
    scales[:, : k // 16] = rows.scales
    return np.concatenate([words.view(np.uint8).reshape(n_rows, -1), scales], axis=1)


def stored(device: Device, pointer: int, n_rows: int, k: int, form: QuantizedForm) -> NDArray[np.uint8]:
    """Used bytes of quantized rows."""
    n_bytes = row_bytes(k, form)
    used = activation_stride(k) * 9 // 16 if form is QuantizedForm.FP4 else n_bytes
    rows: NDArray[np.uint8] = get(device, pointer, np.uint8, (n_rows, n_bytes))
    return rows[:, :used]


def expected_bytes(rows: QuantizedRows, form: QuantizedForm) -> NDArray[np.uint8]:
    """What must be stored, bit for bit."""
    if form is QuantizedForm.FP4:
        return operand_order(rows)
    n_rows, k = rows.codes.shape
    padded = np.zeros((n_rows, activation_stride(k)), np.float32)
    padded[:, :k] = rows.products
    return bf16_words(padded).view(np.uint8).reshape(n_rows, -1)


def check_rows(
    device: Device, k: int, n_rows: int, form: QuantizedForm, divisor: float, seed: int, *, in_place: bool = False
) -> None:
    """``QuantizeRows`` writes the oracle's words."""
    x = any_rows(np.random.default_rng(seed), n_rows, k)
    padded = np.zeros((n_rows, activation_stride(k)), np.float32)
    padded[:, :k] = x
    source = put(device, bf16_words(padded))
    out = source if in_place else poisoned(device, n_rows * row_bytes(k, form))
    QuantizeRows(device, k, form).launch(device.stream(), n_rows, source, divisor, out)
    expected = expected_bytes(quantize_rows(x, np.float32(divisor)), form)
    assert np.array_equal(stored(device, out, n_rows, k, form), expected)


def check_norm(device: Device, hidden: int, n_rows: int, form: QuantizedForm, divisor: float, seed: int) -> None:
    """The fused norm writes the words of its own bf16 rows, which are those of the plain norm."""
    rng = np.random.default_rng(seed)
    scales = np.array([1.0, 1e-3, 1e3, 30.0, 0.0], np.float32)[np.arange(n_rows) % 5, None]
    x = put(device, rng.normal(0.0, 1.0, (n_rows, hidden)).astype(np.float32) * scales)
    weight = put(device, bf16_words(rounded(rng.normal(0.0, 0.4, hidden).astype(np.float32))))
    stride, stream = activation_stride(hidden), device.stream()
    plain, beside = (poisoned(device, 2 * n_rows * stride) for _ in range(2))
    both, alone = (poisoned(device, n_rows * row_bytes(hidden, form)) for _ in range(2))
    RmsNorm(device, hidden, EPS).launch(stream, n_rows, x, weight, plain)
    norm = QuantizingRmsNorm(device, hidden, EPS, form)
    norm.launch(stream, n_rows, x, weight, divisor, both, beside)
    norm.launch(stream, n_rows, x, weight, divisor, alone)
    words = get(device, plain, np.int16, (n_rows, stride))
    assert np.array_equal(get(device, beside, np.int16, (n_rows, stride)), words)
    expected = expected_bytes(quantize_rows(from_bf16(words)[:, :hidden], np.float32(divisor)), form)
    assert np.array_equal(stored(device, both, n_rows, hidden, form), expected)
    assert np.array_equal(stored(device, alone, n_rows, hidden, form), expected)
