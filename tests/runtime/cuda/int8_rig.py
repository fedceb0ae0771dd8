"""Rows of signed bytes and their product on any device, against the numpy oracle and float64 of the same words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ninfer_format.numeric.int8_activations import Int8Rows, int8_rows
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.ops.linear_int8 import LinearInt8
from ninfer_runtime.backends.cuda.ops.linear_large import Epilogue, Output
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, QuantizeRows, row_bytes
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride, pack_matrix
from tests.runtime.cuda.fp4_rig import any_rows
from tests.runtime.cuda.linear_fp4_rig import workspace
from tests.runtime.cuda.small_ops import bf16_words, get, poisoned, put, rounded

Floats = npt.NDArray[np.float64]
INT8 = QuantizedForm.INT8
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
FORMATS = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")


def row_words(rows: Int8Rows) -> npt.NDArray[np.uint8]:
    """Bytes of stored rows, placed element by element as ``quantize_int8.cuh`` says."""
    n_rows, k = rows.codes.shape
    stride = activation_stride(k)
    codes = np.zeros((n_rows, stride), np.int8)
    for column in range(k):
        group, half, lane, at = column // 64, column // 32 % 2, column // 8 % 4, column % 8
        codes[:, group * 64 + lane * 16 + half * 8 + ORDER.index(at)] = rows.codes[:, column]
    extras = np.zeros((n_rows, stride // 64, 2), np.uint32)
    extras[:, : k // 64, 0] = rows.scales.view(np.uint32)
    sums = rows.codes.reshape(n_rows, -1, 64).sum(-1, dtype=np.int32)
    extras[:, : k // 64, 1] = sums.view(np.uint32)
    return np.concatenate([codes.view(np.uint8), extras.view(np.uint8).reshape(n_rows, -1)], axis=1)


def quantized(device: Device, x: npt.NDArray[np.float32]) -> int:
    """Device rows of bf16 values [T, K]."""
    n_rows, k = x.shape
    padded = np.zeros((n_rows, activation_stride(k)), np.float32)
    padded[:, :k] = x
    out = poisoned(device, n_rows * row_bytes(k, INT8))
    QuantizeRows(device, k, INT8).launch(device.stream(), n_rows, put(device, bf16_words(padded)), 1.0, out)
    device.synchronize()  # what reads the rows is on another stream
    return out


def check_rows(device: Device, k: int, n_rows: int, seed: int) -> None:
    """``QuantizeRows`` writes the oracle's words."""
    x = any_rows(np.random.default_rng(seed), n_rows, k)
    found = get(device, quantized(device, x), np.uint8, (n_rows, row_bytes(k, INT8)))
    assert np.array_equal(found, row_words(int8_rows(x)))


@dataclass(frozen=True)
class Weight:
    """A random matrix: packed in device memory, and its values."""

    matrix: PackedMatrix
    values: Floats


def random_weight(
    device: Device, rng: np.random.Generator, name: str, n_rows: int, k: int, *, glu: bool = False
) -> Weight:
    """Codes over the whole range, scales of any size near 1 / sqrt(k)."""
    matrix = PackedMatrix("w", name, n_rows, k, interleaved=glu)
    tile = matrix.tile
    top = 1 << (tile.bits - 1)
    codes = rng.integers(-top, top, (n_rows, k))
    scales = (rng.uniform(0.2, 2.0, (n_rows, -(-k // tile.group))) / (top * np.sqrt(k))).astype(np.float16)
    packed = pack_matrix(matrix, codes, scales.view(np.uint16))
    values = codes * np.repeat(scales.astype(np.float64), tile.group, axis=1)[:, :k]
    return Weight(matrix.at(put(device, packed)), values)


def random_rows(rng: np.random.Generator, n_tokens: int, k: int) -> npt.NDArray[np.float32]:
    """bf16 values."""
    return rounded(rng.standard_normal((n_tokens, k)).astype(np.float32))


def run(
    device: Device,
    weights: list[Weight],
    epilogue: Epilogue,
    x: npt.NDArray[np.float32],
    outputs: list[Output],
) -> None:
    """The product of the rows' bytes."""
    op = LinearInt8(device, [w.matrix for w in weights], epilogue, max_tokens=1024, workspace=workspace(device))
    op.launch(device.stream(), len(x), quantized(device, x), outputs)


def product(weight: Weight, x: npt.NDArray[np.float32]) -> tuple[Floats, Floats]:
    """float64 [T, n_rows] of the quantized rows, and the largest error of fp32 sums: 2e-6 |x| |w|."""
    values = int8_rows(x).values
    limit = 2e-6 * np.linalg.norm(values, axis=1)[:, None] * np.linalg.norm(weight.values, axis=1)[None]
    return values @ weight.values.T, limit
