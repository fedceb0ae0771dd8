"""A random mixture of experts in device memory, its float64 twin, and the launches of a round over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_format.numeric.nvfp4 import E2M1, E4M3FN, MAX_SCALE
from ninfer_runtime.backends.cuda.arena import Arena
from ninfer_runtime.backends.cuda.ops.linear_small import Residual, RmsScale
from ninfer_runtime.backends.cuda.ops.moe_round import MoeSmall, RoundExperts
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS, PackedMatrix, activation_stride, pack_matrix
from ninfer_runtime.backends.cuda.weights import MlpTensors, MoeTensors

Floats = npt.NDArray[np.float64]
EPSILON = 1e-6


def bf16_words(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Nearest bf16 words, ties to even, of finite values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_words(words: npt.NDArray[np.uint16]) -> Floats:
    """Values of bf16 words."""
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def silu(x: Floats) -> Floats:
    """x · sigmoid(x)."""
    result: Floats = x / (1 + np.exp(-x))
    return result


@dataclass(frozen=True)
class Shape:
    """Sizes and formats of a layer."""

    hidden: int = 128
    width: int = 128
    shared_width: int = 128
    n_experts: int = 8
    top_k: int = 2
    gate_up: str = "Q4G64_F16S"
    down: str = "Q5G64_F16S"
    shared: str = "W8G32_F16S"


class MoeRig:
    """The layer's tensors and values, its working memory, and up to ``n_columns`` columns."""

    def __init__(self, device: Any, shape: Shape, n_columns: int, seed: int) -> None:
        """``device``: emulated, or a card with its ``put``, ``empty`` and ``get``."""
        self.device, self.shape, self.rng = device, shape, np.random.default_rng(seed)
        self.stream = device.stream()
        e, h, f, s = shape.n_experts, shape.hidden, shape.width, shape.shared_width
        router, self.router = self._matrix("BF16", e + 1, h)
        gate_up, values = self._matrix(shape.gate_up, e * 2 * f, h, interleaved=True, n_experts=e)
        self.gate_up = values.reshape(e, 2, f, h)
        down, values = self._matrix(shape.down, e * h, f, n_experts=e)
        self.down = values.reshape(e, h, f)
        shared_gate_up, values = self._matrix(shape.shared, 2 * s, h, interleaved=True)
        self.shared_gate_up = values.reshape(2, s, h)
        shared_down, self.shared_down = self._matrix(shape.shared, h, s)
        shared = MlpTensors(shared_gate_up, shared_down)
        self.tensors = MoeTensors(router, gate_up, down, shared, shape.top_k)
        arena = Arena(device, 8 << 20)
        self.memory = RoundExperts.take(arena, self.tensors, n_columns, 1)
        self._clear_inner(n_columns)
        self.op = MoeSmall(device, self.tensors, self.memory, n_columns)

    def _clear_inner(self, n_columns: int) -> None:
        """Padding columns of inner activations are zero; the rest is NaN until a launch writes it."""
        for place, rows, k in (
            (self.memory.h, n_columns * self.shape.top_k, self.shape.width),
            (self.memory.shared_h, n_columns, self.shape.shared_width),
        ):
            words = np.zeros((rows, activation_stride(k)), np.uint16)
            words[:, :k] = 0xFFFF
            self.device.upload(place, words)

    def _matrix(
        self, format: str, n_rows: int, k: int, *, interleaved: bool = False, n_experts: int = 1
    ) -> tuple[PackedMatrix, Floats]:
        """Random weights of about 1/√k, packed in device memory, and their exact values."""
        tile, rng, divisor = TILE_FORMATS[format], self.rng, 1.0
        codes: npt.NDArray[np.integer]
        scales: npt.NDArray[np.uint16] | npt.NDArray[np.uint8] | None
        if not tile.group:
            codes, scales = bf16_words(rng.standard_normal((n_rows, k)) / np.sqrt(k)), None
            values = from_words(codes)
        elif tile.floating:
            codes = rng.integers(0, 16, (n_rows, k)).astype(np.uint16)
            scales = rng.integers(0, MAX_SCALE + 1, (n_rows, -(-k // 16)), np.uint8)
            divisor = float(np.float32(rng.uniform(300, 900) * np.sqrt(k)))
            scale = np.repeat(E4M3FN[scales].astype(np.float64), 16, axis=1)[:, :k]
            values = E2M1[codes].astype(np.float64) * scale / divisor
        else:
            top = 1 << (tile.bits - 1)
            signed = rng.integers(-top, top, (n_rows, k))
            halves = (rng.uniform(0.2, 2.0, (n_rows, -(-k // tile.group))) / (top * np.sqrt(k))).astype(np.float16)
            values = signed * np.repeat(halves.astype(np.float64), tile.group, axis=1)[:, :k]
            codes, scales = signed, halves.view(np.uint16)
        matrix = PackedMatrix(format, format, n_rows, k, 0, interleaved, n_experts, divisor)
        return matrix.at(self.device.put(pack_matrix(matrix, codes, scales))), values

    def columns(self, n_columns: int) -> tuple[int, Floats]:
        """Random activations: their address and values."""
        words = np.zeros((n_columns, activation_stride(self.shape.hidden)), np.uint16)
        words[:, : self.shape.hidden] = bf16_words(self.rng.standard_normal((n_columns, self.shape.hidden)))
        return self.device.put(words), from_words(words[:, : self.shape.hidden])

    def rms(self, n_columns: int) -> tuple[RmsScale, Floats]:
        """Random parts of Σ x², and the factor [T, 1] that they stand for."""
        parts = np.abs(self.rng.standard_normal((5, n_columns))).astype(np.float32) * 40
        scale = RmsScale(self.device.put(parts), len(parts), 96, EPSILON)
        return scale, 1 / np.sqrt(parts.astype(np.float64).sum(axis=0) / 96 + EPSILON)[:, None]

    def force(self, logits: npt.NDArray[np.float32]) -> None:
        """Router logits [T, experts + 1] in place of what the first launch leaves."""
        self.device.upload(self.memory.logits, np.ascontiguousarray(logits, np.float32))

    def routing(self, n_columns: int) -> tuple[npt.NDArray[np.int32], Floats, Floats]:
        """ids and shares [T, k] and the shared expert's share [T] that the launches left."""
        shape = (n_columns, self.shape.top_k)
        self.stream.synchronize()
        ids, shares = np.empty(shape, np.int32), np.empty(shape, np.float32)
        shared = np.empty(n_columns, np.float32)
        for place, array in (
            (self.memory.ids, ids),
            (self.memory.shares, shares),
            (self.memory.shared_share, shared),
        ):
            self.device.download(place, array)
        return ids, shares.astype(np.float64), shared.astype(np.float64)

    def inner(self, place: int, n_rows: int, k: int) -> Floats:
        """Inner activations [n_rows, k]; their padding must have stayed zero."""
        words = np.empty((n_rows, activation_stride(k)), np.uint16)
        self.stream.synchronize()
        self.device.download(place, words)
        assert not words[:, k:].any()
        return from_words(words[:, :k])

    def residual(self, n_columns: int) -> tuple[Residual, Floats]:
        """A random residual stream [T, hidden] and what the launch leaves beside it, poisoned."""
        hidden = self.shape.hidden
        x = self.rng.standard_normal((n_columns, hidden)).astype(np.float32)
        norm = self.device.put(bf16_words(self.rng.standard_normal(hidden) * 0.1))
        parts = self.tensors.routed_down.expert_tiles
        ss, normed = (
            self.device.empty(4 * parts * n_columns),
            self.device.empty(2 * n_columns * activation_stride(hidden)),
        )
        return Residual(self.device.put(x), ss, normed, norm), x.astype(np.float64)

    # ---- the float64 twin --------------------------------------------------------------------
    def expected_inner(self, x: Floats, ids: npt.NDArray[np.int32]) -> Floats:
        """[T, k, width] of normed columns x."""
        inner = np.empty((*ids.shape, self.shape.width))
        for expert in np.unique(ids):
            t, k = np.nonzero(ids == expert)
            inner[t, k] = silu(x[t] @ self.gate_up[expert, 0].T) * (x[t] @ self.gate_up[expert, 1].T)
        return inner

    def expected_sum(
        self, h: Floats, shared_h: Floats, ids: npt.NDArray[np.int32], shares: Floats, own: Floats
    ) -> Floats:
        """[T, hidden] of inner activations."""
        total: Floats = own[:, None] * (shared_h @ self.shared_down.T)
        for expert in np.unique(ids):
            t, k = np.nonzero(ids == expert)
            total[t] += shares[t, k, None] * (h[t, k] @ self.down[expert].T)
        return total


def expected_routing(logits: npt.NDArray[np.floating], top_k: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """ids and shares [T, k] as the reference has them: stable order, softmax over all, divided by the sum."""
    wide = logits[:, :-1].astype(np.float64)
    probabilities = np.exp(wide - wide.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    ids = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    top = np.take_along_axis(probabilities, ids, axis=1)
    return ids, top / top.sum(axis=1, keepdims=True)
