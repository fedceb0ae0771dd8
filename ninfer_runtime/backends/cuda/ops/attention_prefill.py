"""Attention of a prompt chunk: norm, rotation and append of the new tokens, then causal flash attention with the gate.

Three launches, four with rotation: ``kv_append`` writes the new keys and values into their pages and the turned queries
back in place; ``attention_prefill`` (``attention_prefill_int8`` over INT8) deals (KV head, tile of query rows, keys)
evenly to one wave of blocks; ``prefill_combine`` merges tiles that more than one block worked on; ``prefill_unrotate``
turns rotated heads back and gates them. Specification: ``specs/kernels.md``, "Attention"; reference:
``backends/reference/attention.py``.
"""

import ctypes

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.attention import AttentionGeometry
from ninfer_runtime.backends.cuda.ops.kv_cache import HEAD_DIM, SCALE_GROUP, KvPlanes

_TILE_ROWS = 128
_COMBINE_SPLIT = 4
_FLOAT = 4


class KvAppendParams(ctypes.Structure):
    """Mirrors ``kernels/kv_append.cu``."""

    _fields_ = (
        ("qk", ctypes.c_uint64),
        ("gv", ctypes.c_uint64),
        ("q_norm", ctypes.c_uint64),
        ("k_norm", ctypes.c_uint64),
        ("rope", ctypes.c_uint64),
        ("positions", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("k_scales", ctypes.c_uint64),
        ("v_scales", ctypes.c_uint64),
        ("n_tokens", ctypes.c_int32),
        ("start", ctypes.c_int32),
        ("qk_stride", ctypes.c_int32),
        ("gv_stride", ctypes.c_int32),
        ("rotates", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class AttentionPrefillParams(ctypes.Structure):
    """Mirrors ``include/attention_prefill.cuh``; every launch but the append takes it."""

    _fields_ = (
        ("qk", ctypes.c_uint64),
        ("gv", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("k_scales", ctypes.c_uint64),
        ("v_scales", ctypes.c_uint64),
        ("partial", ctypes.c_uint64),
        ("stats", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("mixed", ctypes.c_uint64),
        ("n_tokens", ctypes.c_int32),
        ("start", ctypes.c_int32),
        ("qk_stride", ctypes.c_int32),
        ("gv_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("n_parts", ctypes.c_int32),
    )


def _shared_bytes(geometry: AttentionGeometry) -> int:
    """K and V tiles of 32 keys twice each in 16-bit words, probabilities twice, factors; coded bytes of FP6."""
    tile = 32 * HEAD_DIM * 2
    raw = 2 * 32 * HEAD_DIM * 6 // 8 if geometry.format == "fp6" else 0
    return 4 * tile + 2 * _TILE_ROWS * 32 * 2 + raw + 2 * _TILE_ROWS * _FLOAT


def _int8_shared_bytes() -> int:
    """K tiles of 32 keys three times, V four times; weights and factors twice; low bytes; per thread 24 bytes."""
    tile = 32 * (HEAD_DIM + 2 * HEAD_DIM // SCALE_GROUP)
    low_bytes = _TILE_ROWS * HEAD_DIM // 2
    return 7 * tile + 2 * _TILE_ROWS * 32 * 2 + 2 * _TILE_ROWS * _FLOAT + low_bytes + 24 * 256 + 128


def _attend_spec(geometry: AttentionGeometry, lowest: int) -> KernelSpec:
    defines = (*geometry.defines, ("LOWEST", lowest)) if lowest else geometry.defines
    if geometry.format == "int8":
        return KernelSpec("attention_prefill_int8.cu", "attention_prefill_int8", defines, 256, _int8_shared_bytes())
    return KernelSpec("attention_prefill.cu", "attention_prefill", defines, 256, _shared_bytes(geometry))


def append_spec(geometry: AttentionGeometry) -> KernelSpec:
    """The launch that stores keys and values."""
    return KernelSpec("kv_append.cu", "kv_append", geometry.defines)


def _specs(geometry: AttentionGeometry, lowest: int) -> tuple[KernelSpec, KernelSpec, KernelSpec, KernelSpec]:
    return (
        append_spec(geometry),
        _attend_spec(geometry, lowest),
        KernelSpec("prefill_combine.cu", "prefill_combine", geometry.defines),
        KernelSpec("prefill_combine.cu", "prefill_unrotate", geometry.defines),
    )


def specs(geometry: AttentionGeometry, *, lowest: int = 0) -> list[KernelSpec]:
    """Every variant; ``lowest`` 1: of a layer that does not see index 0."""
    return list(_specs(geometry, lowest)[: 4 if geometry.rotation else 3])


def _tiles_bytes(n_sms: int) -> int:
    """At most two unfinished tiles per block."""
    return 2 * n_sms * _TILE_ROWS * (HEAD_DIM + 2) * _FLOAT


def workspace_bytes(geometry: AttentionGeometry, n_sms: int, max_tokens: int) -> int:
    """Bytes of ``workspace`` for chunks of up to ``max_tokens``; rotated heads wait there in float32."""
    heads = max_tokens * geometry.n_heads * HEAD_DIM * _FLOAT if geometry.rotation else 0
    return _tiles_bytes(n_sms) + heads


class AttentionPrefill:
    """Prompt chunks of one model."""

    def __init__(self, device: Device, geometry: AttentionGeometry, *, lowest: int = 0) -> None:
        """``lowest``: 0 or 1, the first index of a row that is seen."""
        self._geometry = geometry
        self._n_parts = device.n_sms
        variants = specs(geometry, lowest=lowest)
        self._append, self._attend, self._combine, *unrotate = (device.kernel(spec) for spec in variants)
        self._unrotate = unrotate[0] if unrotate else None

    def launch(
        self,
        stream: Stream,
        *,
        n_tokens: int,
        start: int,
        positions: int,
        pages: int,
        qk: int,
        qk_stride: int,
        gv: int,
        gv_stride: int,
        q_norm: int,
        k_norm: int,
        rope: int,
        planes: KvPlanes,
        out: int,
        out_stride: int,
        workspace: int,
    ) -> None:
        """Token t of the chunk is index ``start + t`` of its row and sees the indices up to its own.

        positions      int32 [3][n_tokens]: temporal, height, width
        pages          int32 [ceil((start + n_tokens) / 64)], the row's pages
        qk, gv         bf16 [n_tokens][stride]: query then key heads, gate then value heads; strides in elements,
                       multiples of 8; addresses 16-byte aligned. The queries in ``qk`` are overwritten
        q_norm, k_norm bf16 [256], stored around zero; rope: ``rope_table`` on the device
        out            bf16 [n_tokens][out_stride]: n_heads · 256 per row
        """
        geometry = self._geometry
        append = KvAppendParams(
            qk,
            gv,
            q_norm,
            k_norm,
            rope,
            positions,
            pages,
            planes.k,
            planes.v,
            planes.k_scales,
            planes.v_scales,
            n_tokens,
            start,
            qk_stride,
            gv_stride,
            geometry.rotation,
            geometry.norm_eps,
        )
        self._append.launch((n_tokens, 1, 1), append, stream)
        stats = workspace + 2 * self._n_parts * _TILE_ROWS * HEAD_DIM * _FLOAT
        attend = AttentionPrefillParams(
            qk,
            gv,
            pages,
            planes.k,
            planes.v,
            planes.k_scales,
            planes.v_scales,
            workspace,
            stats,
            out,
            workspace + _tiles_bytes(self._n_parts) if geometry.rotation else 0,
            n_tokens,
            start,
            qk_stride,
            gv_stride,
            out_stride,
            self._n_parts,
        )
        self._attend.launch((self._n_parts, 1, 1), attend, stream)
        tiles = -(-n_tokens * geometry.ratio // _TILE_ROWS)
        self._combine.launch((tiles, geometry.n_kv_heads, _COMBINE_SPLIT), attend, stream)
        if self._unrotate is not None:
            self._unrotate.launch((n_tokens, 1, 1), attend, stream)
