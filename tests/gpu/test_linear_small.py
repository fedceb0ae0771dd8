"""linear_small on the card against float64 on the dequantized weights: formats, epilogues, boundary column counts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ninfer_runtime.backends.cuda.arena import Arena
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops.linear_small import (
    Epilogue,
    LinearSmall,
    Output,
    Residual,
    RmsScale,
    Workspace,
    workspace_bytes,
)
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS, PackedMatrix, activation_stride, pack_matrix
from tests.runtime.cuda.random_nvfp4 import random_nvfp4

pytestmark = pytest.mark.gpu

Floats = npt.NDArray[np.float64]
FORMATS = tuple(TILE_FORMATS)
COLUMNS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 47, 48)
K = 1928


def bf16_words(values: npt.NDArray[np.floating]) -> npt.NDArray[np.uint16]:
    """Nearest bf16 words, ties to even, of finite values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_words(words: npt.NDArray[np.uint16]) -> Floats:
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Weight:
    """A random matrix on the card, and its exact values [n_rows, k]."""

    matrix: PackedMatrix
    values: Floats


class Bench:
    """The card, a workspace, and operands in its memory."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.stream = self.device.stream()
        self.arena = Arena(self.device, workspace_bytes(self.device))
        self.workspace = Workspace(self.arena, workspace_bytes(self.device))
        self.workspace.clear(self.device, self.stream)
        self.stream.synchronize()

    def put(self, array: npt.NDArray[np.generic]) -> int:
        pointer = self.device.allocate(array.nbytes)
        self.device.upload(pointer, np.ascontiguousarray(array))
        return pointer

    def poisoned(self, n_bytes: int) -> int:
        return self.put(np.full(n_bytes, 0xFF, np.uint8))

    def get(self, pointer: int, dtype: type[np.generic], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        self.stream.synchronize()
        out = np.empty(shape, dtype)
        self.device.download(pointer, out)
        return out

    def weight(self, rng: np.random.Generator, format: str, n_rows: int, interleaved: bool = False) -> Weight:
        matrix = PackedMatrix(format, format, n_rows, K, interleaved=interleaved)
        tile = matrix.tile
        if not tile.group:
            words = bf16_words(rng.standard_normal((n_rows, K)) / np.sqrt(K))
            return Weight(matrix.at(self.put(pack_matrix(matrix, words, None))), from_words(words))
        if tile.floating:
            matrix, codes, scale_words, values = random_nvfp4(rng, matrix)
            return Weight(matrix.at(self.put(pack_matrix(matrix, codes, scale_words))), values)
        top = 1 << (tile.bits - 1)
        codes = rng.integers(-top, top, (n_rows, K))
        scales = (rng.uniform(0.2, 2.0, (n_rows, -(-K // tile.group))) / (top * np.sqrt(K))).astype(np.float16)
        packed = self.put(pack_matrix(matrix, codes, scales.view(np.uint16)))
        return Weight(matrix.at(packed), codes * np.repeat(scales.astype(np.float64), tile.group, axis=1)[:, :K])

    def activations(self, rng: np.random.Generator, n_columns: int) -> tuple[int, Floats]:
        words = np.zeros((n_columns, activation_stride(K)), np.uint16)
        words[:, :K] = bf16_words(rng.standard_normal((n_columns, K)))
        return self.put(words), from_words(words[:, :K])

    def op(self, weights: Sequence[Weight], epilogue: Epilogue, n_columns: int) -> LinearSmall:
        op = LinearSmall(self.device, self.arena, [w.matrix for w in weights], epilogue, n_columns, self.workspace)
        op.prepare()
        return op


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    found = made.get(made.workspace.pointer, np.uint8, (made.workspace.n_bytes,))
    assert np.all(found == 0xFF)
    made.device.close()


def bound(x: Floats, w: Floats) -> Floats:
    """The tensor cores keep fewer bits than fp32 below the largest term: 1e-5 ‖x‖ ‖w‖."""
    error: Floats = 1e-5 * np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None]
    return error


@pytest.mark.parametrize("n_columns", COLUMNS)
@pytest.mark.parametrize("n_rows", [301, 11008])
def test_matrices_of_all_formats_in_launches_of_two(bench: Bench, n_rows: int, n_columns: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    x_pointer, x = bench.activations(rng, n_columns)
    parts = np.abs(rng.standard_normal((5, n_columns))).astype(np.float32) * 40
    scale = 1 / np.sqrt(parts.astype(np.float64).sum(axis=0) / 96 + 1e-6)[:, None]
    rstd = RmsScale(bench.put(parts), 5, 96, 1e-6)
    for i, format in enumerate(FORMATS):
        weights = [bench.weight(rng, format, n_rows), bench.weight(rng, FORMATS[i - 1], 48)]
        op = bench.op(weights, "store", n_columns)
        runs = []
        for _ in range(2):
            outputs = [Output(bench.poisoned(n_columns * w.matrix.n_rows * 4), True) for w in weights]
            op.launch(bench.stream, n_columns, x_pointer, rstd, outputs)
            shapes = [(n_columns, w.matrix.n_rows) for w in weights]
            runs.append([bench.get(o.pointer, np.float32, s) for o, s in zip(outputs, shapes, strict=True)])
        for weight, first, second in zip(weights, *runs, strict=True):
            assert np.array_equal(first, second)
            error = np.abs(first.astype(np.float64) - x @ weight.values.T * scale)
            assert np.all(error <= bound(x, weight.values) * scale), weight.matrix
            bench.device.free(weight.matrix.pointer)


@pytest.mark.parametrize("n_columns", COLUMNS)
@pytest.mark.parametrize("formats", [("Q4G64_F16S", "Q5G64_F16S"), ("NVFP4", "NVFP4"), ("W8G32_F16S", "BF16")])
def test_swiglu_and_residual_epilogues(bench: Bench, formats: tuple[str, str], n_columns: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    x_pointer, x = bench.activations(rng, n_columns)
    width = 5000
    weight = bench.weight(rng, formats[0], 2 * width, interleaved=True)
    out = bench.poisoned(n_columns * width * 2)
    bench.op([weight], "swiglu", n_columns).launch(bench.stream, n_columns, x_pointer, None, [Output(out)])
    found = from_words(bench.get(out, np.uint16, (n_columns, width)).astype(np.uint16))
    gate, up = np.split(x @ weight.values.T, 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    error = bound(x, weight.values).max() * (1 + np.abs(gate) + np.abs(up))
    assert np.all(np.abs(found - expected) <= error + 2.0**-8 * np.abs(expected))

    hidden = 2560
    weight = bench.weight(rng, formats[1], hidden)
    before = rng.standard_normal((n_columns, hidden)).astype(np.float32)
    norm = bf16_words(rng.standard_normal(hidden))
    op = bench.op([weight], "residual", n_columns)
    residual = Residual(
        bench.put(before),
        bench.poisoned(op.ss_parts * n_columns * 4),
        bench.poisoned(before.nbytes // 2),
        bench.put(norm),
    )
    op.launch(bench.stream, n_columns, x_pointer, residual=residual)
    after = bench.get(residual.x, np.float32, before.shape)
    assert np.all(np.abs(after - (before + x @ weight.values.T)) <= bound(x, weight.values) + 1e-6)
    normed = bench.get(residual.normed, np.uint16, before.shape)
    assert np.array_equal(normed, bf16_words(after * (1 + from_words(norm)).astype(np.float32)))
    ss = bench.get(residual.ss, np.float32, (op.ss_parts, n_columns)).astype(np.float64)
    assert np.allclose(ss.sum(axis=0), (after.astype(np.float64) ** 2).sum(axis=1), rtol=1e-5)
