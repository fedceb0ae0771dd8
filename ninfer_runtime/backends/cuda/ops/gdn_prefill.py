"""Gated DeltaNet over the tokens of one sequence, in chunks of 64: three launches, state and history in place.

The chunked form agrees with the recurrence to rounding (relative error below 1 %), not bit for bit; any number of
tokens from 1 on, in any cut into calls. Formulas and workspace: ``include/gdn_prefill.cuh``; specification:
``specs/kernels.md``, "Gated DeltaNet"; reference: ``backends/reference/gdn.py``.
"""

import ctypes
from collections.abc import Collection
from typing import Final

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.gdn_decode import GdnInputs, GdnLayerWeights
from ninfer_runtime.backends.cuda.ops.gdn_state import DIM, GdnGeometry, GdnLayerState, GdnStateLayout

CHUNK: Final = 64
MAX_GROUP: Final = 3
"""Value heads that one block of the first kernel takes on after another; more would not raise what they share."""
_STATE_WARPS = 4
_TILE_BYTES = CHUNK * DIM * 2
_STATE_BYTES = DIM * DIM * 2
_SCALAR_BYTES = CHUNK * 4

_PITCHED_TILE = CHUNK * (DIM + 8) * 2
_MATRIX = CHUNK * (CHUNK + 8) * 4


class GdnWorkspace(ctypes.Structure):
    """Mirrors ``include/gdn_prefill.cuh``; arrays [chunk][head][…]."""

    _fields_ = (
        ("query", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("query_scale", ctypes.c_uint64),
        ("key_scale", ctypes.c_uint64),
        ("decay", ctypes.c_uint64),
        ("w", ctypes.c_uint64),
        ("u", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
    )


class GdnChunksParams(ctypes.Structure):
    """Mirrors ``kernels/gdn_prefill_chunks.cu``."""

    _fields_ = (
        ("qk", ctypes.c_uint64),
        ("vz", ctypes.c_uint64),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("taps", ctypes.c_uint64),
        ("a_log", ctypes.c_uint64),
        ("dt_bias", ctypes.c_uint64),
        ("history", ctypes.c_uint64),
        ("workspace", GdnWorkspace),
        ("qk_stride", ctypes.c_int32),
        ("vz_stride", ctypes.c_int32),
        ("gate_stride", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
    )


class GdnStateParams(ctypes.Structure):
    """Mirrors ``kernels/gdn_prefill_state.cu``."""

    _fields_ = (
        ("qk", ctypes.c_uint64),
        ("vz", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
        ("history", ctypes.c_uint64),
        ("workspace", GdnWorkspace),
        ("qk_stride", ctypes.c_int32),
        ("vz_stride", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
    )


class GdnOutputParams(ctypes.Structure):
    """Mirrors ``kernels/gdn_prefill_output.cu``."""

    _fields_ = (
        ("vz", ctypes.c_uint64),
        ("norm", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("workspace", GdnWorkspace),
        ("vz_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
    )


def _group(geometry: GdnGeometry) -> int:
    return max(size for size in range(1, MAX_GROUP + 1) if geometry.ratio % size == 0)


def _specs(geometry: GdnGeometry) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
    group = _group(geometry)
    chunks = 2 * _PITCHED_TILE + 2 * _MATRIX + (2 * group + 1) * _SCALAR_BYTES
    state = 2 * (2 * _TILE_BYTES + _STATE_WARPS * CHUNK * 16 * 2 + 2 * _SCALAR_BYTES)
    output = 3 * _TILE_BYTES + _STATE_BYTES + 3 * _SCALAR_BYTES

    def spec(name: str, threads: int, shared: int, min_blocks: int, *defines: tuple[str, int]) -> KernelSpec:
        constants = (*geometry.defines, *defines, ("BLOCK_SHARED", shared))
        return KernelSpec(f"{name}.cu", name, constants, threads, shared, min_blocks)

    return (
        spec("gdn_prefill_chunks", 256, chunks, 2, ("GROUP", group)),
        spec("gdn_prefill_state", 32 * _STATE_WARPS, state, 1),
        spec("gdn_prefill_output", 128, output, 1),
    )


def specs(geometry: GdnGeometry) -> list[KernelSpec]:
    """Every variant of a prefill."""
    return list(_specs(geometry))


def _workspace_sizes(geometry: GdnGeometry, max_tokens: int) -> tuple[int, ...]:
    """Bytes of each array, in the order of ``GdnWorkspace``; all are multiples of 256."""
    chunks = -(-max_tokens // CHUNK)
    keys, values = chunks * geometry.key_heads, chunks * geometry.value_heads
    per_key = (_TILE_BYTES, _TILE_BYTES, _SCALAR_BYTES, _SCALAR_BYTES)
    per_value = (_SCALAR_BYTES, _TILE_BYTES, _TILE_BYTES, _STATE_BYTES)
    return (*(keys * size for size in per_key), *(values * size for size in per_value))


def workspace_bytes(geometry: GdnGeometry, max_tokens: int) -> int:
    """Bytes of ``workspace`` for calls of up to ``max_tokens`` tokens; all layers may share it."""
    return sum(_workspace_sizes(geometry, max_tokens))


class GdnPrefill:
    """One layer of a prefill."""

    def __init__(self, device: Device, geometry: GdnGeometry) -> None:
        self._geometry = geometry
        self._layout = GdnStateLayout(geometry)
        self._chunks, self._state, self._output = (device.kernel(spec) for spec in _specs(geometry))

    def launch(
        self,
        stream: Stream,
        *,
        n_tokens: int,
        slot: int,
        inputs: GdnInputs,
        weights: GdnLayerWeights,
        state: GdnLayerState,
        out: int,
        out_stride: int = 0,
        workspace: int,
        skip: Collection[str] = (),
    ) -> None:
        """Tokens 0 .. n_tokens - 1 follow those already in the slot's state, which advances over all of them.

        The slot must have no pending record (``GdnFold``). out: bf16 [n_tokens][out_stride], rms(o) · norm · silu(z);
        workspace: ``workspace_bytes(geometry, n_tokens)`` bytes or more, content undefined. ``skip`` leaves out some of
        the launches "chunks", "state", "output", to time the others.
        """
        g, offset = self._geometry, self._layout.state_offset(slot)
        pointers = []
        for size in _workspace_sizes(g, n_tokens):
            pointers.append(workspace)
            workspace += size
        space = GdnWorkspace(*pointers)
        qk_stride, vz_stride = inputs.qk_stride or 2 * g.key_width, inputs.vz_stride or 2 * g.value_width
        matrix, history = state.matrix + offset, state.history + offset
        n_chunks = -(-n_tokens // CHUNK)
        chunks = GdnChunksParams(
            inputs.qk,
            inputs.vz,
            inputs.a,
            inputs.b,
            weights.taps,
            weights.a_log,
            weights.dt_bias,
            history,
            space,
            qk_stride,
            vz_stride,
            inputs.gate_stride or g.value_heads,
            n_tokens,
        )
        if "chunks" not in skip:
            self._chunks.launch((g.value_heads // _group(g), n_chunks, 1), chunks, stream)
        advance = GdnStateParams(inputs.qk, inputs.vz, matrix, history, space, qk_stride, vz_stride, n_tokens)
        if "state" not in skip:
            self._state.launch((g.value_heads, DIM // (16 * _STATE_WARPS), 1), advance, stream)
        output = GdnOutputParams(
            inputs.vz, weights.norm, out, space, vz_stride, out_stride or g.value_width, n_tokens, g.norm_eps
        )
        if "output" not in skip:
            self._output.launch((g.value_heads, n_chunks, 1), output, stream)
