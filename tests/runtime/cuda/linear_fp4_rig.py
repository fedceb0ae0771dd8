"""The FP4 product on any device: random NVFP4 matrices and rows, and what float64 makes of the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ninfer_format.numeric.nvfp4 import E2M1, E4M3FN
from ninfer_format.numeric.nvfp4_activations import QuantizedRows, quantize_rows
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.ops.linear_fp4 import LinearFp4, bf16_twin
from ninfer_runtime.backends.cuda.ops.linear_large import (
    Epilogue,
    LinearLarge,
    Output,
    clear_workspace,
    workspace_bytes,
)
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, QuantizeRows, row_bytes
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride, pack_matrix
from tests.runtime.cuda.small_ops import bf16_words, poisoned, put, rounded

Floats = npt.NDArray[np.float64]
MAX_TOKENS = 1024


@dataclass(frozen=True)
class Weight:
    """A random matrix: packed in device memory, and its values times its divisor."""

    matrix: PackedMatrix
    products: Floats  # [n_rows, k]: code · scale


@dataclass(frozen=True)
class Rows:
    """Random activations: quantized rows in device memory, and their values times their divisor."""

    pointer: int
    n_tokens: int
    divisor: float
    products: Floats  # [T, k]
    words: QuantizedRows


def random_weight(
    device: Device, rng: np.random.Generator, n_rows: int, k: int, *, glu: bool = False, any_scale: bool = True
) -> Weight:
    """``any_scale`` False: powers of two near 1, so that sums of a few hundred products are exact in any order."""
    divisor = float(np.float32(rng.uniform(1.0, 500.0)))
    matrix = PackedMatrix("w", "NVFP4", n_rows, k, interleaved=glu, divisor=divisor)
    codes = rng.integers(0, 16, (n_rows, k))
    low, high = (0, 0x7F) if any_scale else (0, 4)
    scales = rng.integers(low, high, (n_rows, k // 16)).astype(np.uint8)
    scales = scales if any_scale else (0x28 + 8 * scales).astype(np.uint8)
    products = E2M1[codes].astype(np.float64) * np.repeat(E4M3FN[scales].astype(np.float64), 16, axis=1)
    return Weight(matrix.at(put(device, pack_matrix(matrix, codes, scales))), products)


def random_rows(
    device: Device, rng: np.random.Generator, n_tokens: int, k: int, form: QuantizedForm, *, exact: bool = False
) -> Rows:
    """``exact``: scales are powers of two near 1."""
    x = rng.standard_normal((n_tokens, k)).astype(np.float32) * rng.uniform(0.5, 3, (n_tokens, 1)).astype(np.float32)
    divisor = float(np.float32(rng.uniform(3.0, 60.0)))
    if exact:
        scales = 2.0 ** rng.integers(-1, 3, (n_tokens, k // 16, 1))
        x = (rng.choice(E2M1[1:8], (n_tokens, k // 16, 16)) * scales).astype(np.float32)
        x[..., 0] = 6 * scales[..., 0]
        x *= rng.choice(np.array([-1, 1], np.float32), x.shape)
        x, divisor = x.reshape(n_tokens, k), 0.25
    x = rounded(x)
    words = quantize_rows(x, np.float32(divisor))
    padded = np.zeros((n_tokens, activation_stride(k)), np.float32)
    padded[:, :k] = x
    pointer = poisoned(device, n_tokens * row_bytes(k, form))
    QuantizeRows(device, k, form).launch(device.stream(), n_tokens, put(device, bf16_words(padded)), divisor, pointer)
    device.synchronize()  # what reads the rows is on another stream
    return Rows(pointer, n_tokens, divisor, words.products.astype(np.float64), words)


def product(weight: Weight, rows: Rows) -> Floats:
    """float64 [T, n_rows]."""
    out: Floats = rows.products @ weight.products.T / (rows.divisor * weight.matrix.divisor)
    return out


def bound(weight: Weight, rows: Rows) -> Floats:
    """Largest error of fp32 sums in any order, and then some: 2e-6 |x| |w|."""
    of_rows = np.linalg.norm(rows.products, axis=1) / rows.divisor
    of_weights = np.linalg.norm(weight.products, axis=1) / weight.matrix.divisor
    limit: Floats = 2e-6 * of_rows[:, None] * of_weights[None]
    return limit


def workspace(device: Device) -> int:
    """Cleared."""
    pointer = poisoned(device, workspace_bytes(device))
    clear_workspace(device, pointer)
    return pointer


def run(
    device: Device,
    weights: Sequence[Weight],
    epilogue: Epilogue,
    rows: Rows,
    outputs: Sequence[Output],
    out_divisor: float | None = None,
) -> None:
    """The FP4 product of FP4 rows."""
    matrices = [weight.matrix for weight in weights]
    op = LinearFp4(
        device,
        matrices,
        epilogue,
        max_tokens=MAX_TOKENS,
        workspace=workspace(device),
        divisor=rows.divisor,
        out_divisor=out_divisor,
    )
    op.launch(device.stream(), rows.n_tokens, rows.pointer, outputs)


def run_twin(
    device: Device,
    weights: Sequence[Weight],
    epilogue: Epilogue,
    rows: Rows,
    outputs: Sequence[Output],
    out_divisor: float | None = None,
) -> None:
    """The bf16 product of bf16 rows."""
    op = LinearLarge(
        device,
        [bf16_twin(weight.matrix, rows.divisor) for weight in weights],
        epilogue,
        max_tokens=MAX_TOKENS,
        workspace=workspace(device),
        out_divisor=out_divisor,
    )
    op.launch(device.stream(), rows.n_tokens, rows.pointer, activation_stride(weights[0].matrix.k), outputs)
