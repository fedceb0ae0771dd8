"""Attention of one round: norm, rotation and append of the new tokens, split-KV attention, and the gated merge.

Two launches: ``attention_decode`` writes the new keys and values into their pages and partial results into the
workspace; ``attention_combine`` merges them in a fixed order, applies the output gate, and writes bf16 rows.
Specification: ``specs/kernels.md``, "Attention"; reference: ``backends/reference/attention.py``.
"""

import ctypes
from dataclasses import dataclass

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.attention import AttentionGeometry
from ninfer_runtime.backends.cuda.ops.kv_cache import HEAD_DIM, SCALE_GROUP, KvPlanes
from ninfer_runtime.backends.cuda.ops.round_state import MAX_COLUMNS, MAX_ROWS

_TILE_ROWS = 16
_STAGES = 2
_COMBINE_SLOTS = 16
_COMBINE_DIMS = 64
_MAX_SHARED_BYTES = 101_376
_STATE_BYTES = 512
_FLOAT = 4


class AttentionDecodeParams(ctypes.Structure):
    """Mirrors ``include/attention_round.cuh``; both kernels take it."""

    _fields_ = (
        ("rows", ctypes.c_uint64),
        ("page_table", ctypes.c_uint64),
        ("qk", ctypes.c_uint64),
        ("gv", ctypes.c_uint64),
        ("q_norm", ctypes.c_uint64),
        ("k_norm", ctypes.c_uint64),
        ("rope", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("k_scales", ctypes.c_uint64),
        ("v_scales", ctypes.c_uint64),
        ("partial", ctypes.c_uint64),
        ("stats", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("n_rows", ctypes.c_int32),
        ("pages_per_row", ctypes.c_int32),
        ("qk_stride", ctypes.c_int32),
        ("gv_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("n_parts", ctypes.c_int32),
        ("lowest", ctypes.c_int32),
        ("rotates", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("row_columns", ctypes.c_int32),
        ("first_column", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """What follows from the geometry and q: m16 tiles of query rows, keys per stage, shared bytes, blocks per SM."""

    geometry: AttentionGeometry
    q: int

    @property
    def rows(self) -> int:
        """Query rows per KV head."""
        return self.geometry.ratio * self.q

    @property
    def tiles(self) -> int:
        """Of 16 query rows."""
        return -(-self.rows // _TILE_ROWS)

    def shared_bytes_with(self, stage_keys: int) -> int:
        """Shared memory with so many keys per stage, as laid out in the kernel."""
        format, scales = self.geometry.format, 2 * HEAD_DIM // SCALE_GROUP
        key = {"bf16": 2 * HEAD_DIM, "int8": HEAD_DIM + scales, "fp6": HEAD_DIM * 6 // 8 + scales}[format]
        padding = 16 if format == "fp6" else 0
        padded_rows = _TILE_ROWS * self.tiles
        query = padded_rows * 2 * HEAD_DIM
        score_bytes = 2 * padded_rows * (stage_keys + 8) * _FLOAT
        weights = padded_rows * (stage_keys + 8) * 2
        query_scales = padded_rows * _FLOAT if format == "int8" else 0
        turns = self.q * self.geometry.rotary_dim * _FLOAT
        planes = 2 * _STAGES * stage_keys * (key + padding) + 2 * self.q * key
        return planes + max(query, score_bytes + weights) + query_scales + turns + _STATE_BYTES

    @property
    def stage_keys(self) -> int:
        """Keys per pipeline stage, also the unit of work that blocks are dealt: 64 where they fit."""
        return 64 if self.shared_bytes_with(64) <= _MAX_SHARED_BYTES else 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.shared_bytes_with(self.stage_keys)

    @property
    def threads(self) -> int:
        """Of a block: eight warps, and where there are two tiles, eight for each."""
        return 512 if self.tiles == 2 else 256

    @property
    def min_blocks(self) -> int:
        """Blocks per SM that registers allow; the grid is one wave of them."""
        return 2 if self.tiles == 1 else 1


_MOST_COLUMNS = MAX_COLUMNS + 1
"""Of a row: the draft layer reads one more than a round evaluates."""
_MOST_QUERY_ROWS = 48


def _passes(geometry: AttentionGeometry, q: int) -> tuple[int, ...]:
    """Columns that are taken at once: all, or about half, where all together have too many query rows."""
    if not 1 <= q <= _MOST_COLUMNS:
        raise ValueError(f"{q} columns per row, expected 1 to {_MOST_COLUMNS}")
    n = -(-q * geometry.ratio // _MOST_QUERY_ROWS)
    return tuple(q * (i + 1) // n - q * i // n for i in range(n))


def _combine_dims(geometry: AttentionGeometry) -> int:
    """Dims of a head that a block of the merge takes: a rotated head goes back as a whole."""
    return HEAD_DIM if geometry.rotation else _COMBINE_DIMS


def _specs(geometry: AttentionGeometry, q: int) -> tuple[KernelSpec, KernelSpec]:
    shape = _Shape(geometry, q)
    defines = (*geometry.defines, ("COLUMNS", q), ("STAGE_KEYS", shape.stage_keys))
    decode = KernelSpec(
        "attention_decode.cu",
        "attention_decode",
        defines,
        shape.threads,
        shape.shared_bytes,
        min_blocks=shape.min_blocks,
    )
    threads, shared = _COMBINE_SLOTS * _combine_dims(geometry) // 4, 0
    if geometry.rotation:
        shared = _COMBINE_SLOTS * HEAD_DIM * _FLOAT
    combine = KernelSpec(
        "attention_combine.cu",
        "attention_combine",
        (*defines, ("ROTATED", int(geometry.rotation))),
        threads,
        shared,
        min_blocks=1 if geometry.rotation else decode.min_blocks,
    )
    return decode, combine


def specs(geometry: AttentionGeometry, max_columns: int = MAX_COLUMNS) -> list[KernelSpec]:
    """Every variant for rounds of up to ``max_columns`` columns per row."""
    columns = {n for q in range(1, max_columns + 1) for n in _passes(geometry, q)}
    return [spec for n in sorted(columns) for spec in _specs(geometry, n)]


def _parts(geometry: AttentionGeometry, q: int, n_sms: int) -> int:
    return n_sms * _Shape(geometry, q).min_blocks


def workspace_bytes(
    geometry: AttentionGeometry, n_sms: int, max_rows: int = MAX_ROWS, max_columns: int = MAX_COLUMNS
) -> int:
    """Bytes of ``workspace`` for rounds of up to these sizes; rounds and layers may share it, one after the other."""
    sizes = []
    for n in {n for q in range(1, max_columns + 1) for n in _passes(geometry, q)}:
        slots = _parts(geometry, n, n_sms) + max_rows * geometry.n_kv_heads
        sizes.append(slots * _Shape(geometry, n).rows * (HEAD_DIM + 2) * _FLOAT)
    return max(sizes)


class _Pass:
    """The kernels that take ``n`` columns of every row at once."""

    def __init__(self, device: Device, geometry: AttentionGeometry, n: int) -> None:
        self.n = n
        self.n_parts = _parts(geometry, n, device.n_sms)
        self.decode, self.combine = (device.kernel(spec) for spec in _specs(geometry, n))


class AttentionDecode:
    """Rounds of ``q`` columns per row."""

    def __init__(self, device: Device, geometry: AttentionGeometry, q: int) -> None:
        self._geometry = geometry
        self._q = q
        self._passes = [_Pass(device, geometry, n) for n in _passes(geometry, q)]

    def launch(
        self,
        stream: Stream,
        *,
        n_rows: int,
        rows: int,
        page_table: int,
        pages_per_row: int,
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
        lowest: int = 0,
        pdl: bool = True,
    ) -> None:
        """Column c = b · q + i of the round, i below the row's ``n_columns``, sees indices ``lowest`` to ``start + i``.

        rows           RowState [n_rows]: ``start``, ``n_columns`` and ``rope_delta`` are read; must be older than the
                       launch just before this one, as must be ``page_table`` int32 [n_rows][pages_per_row]
        qk, gv         bf16 [n_rows · q][stride]: query then key heads, gate then value heads; strides in elements,
                       multiples of 8; addresses 16-byte aligned
        q_norm, k_norm bf16 [256], stored around zero; rope: ``rope_table`` on the device
        out            bf16 [n_rows · q][out_stride]: n_heads · 256 per row, zeros for columns that are not evaluated
        """
        geometry, first_column = self._geometry, 0
        blocks_per_column = geometry.n_heads * HEAD_DIM // _combine_dims(geometry)
        for step in self._passes:
            slots = step.n_parts + n_rows * geometry.n_kv_heads
            stats = workspace + slots * geometry.ratio * step.n * HEAD_DIM * _FLOAT
            params = AttentionDecodeParams(
                rows,
                page_table,
                qk,
                gv,
                q_norm,
                k_norm,
                rope,
                planes.k,
                planes.v,
                planes.k_scales,
                planes.v_scales,
                workspace,
                stats,
                out,
                n_rows,
                pages_per_row,
                qk_stride,
                gv_stride,
                out_stride,
                step.n_parts,
                lowest,
                geometry.rotation,
                geometry.norm_eps,
                self._q,
                first_column,
            )
            # A pass reads what the one before it appended: that is older than the merge between them.
            step.decode.launch((step.n_parts, 1, 1), params, stream, pdl=pdl)
            step.combine.launch((blocks_per_column, n_rows * step.n, 1), params, stream)
            first_column += step.n
