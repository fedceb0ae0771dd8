"""Matrices from the file's rows to tiles on the device (``kernels/repack.cu``); oracle: ``packing.pack_matrix``.

``uploads`` cuts a matrix into runs of tile rows whose file bytes fit the loader's staging memory; each is one
``loader.Upload`` that repacks its tile rows once their bytes have arrived.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ninfer_format.formats import blockscale_planes, row_split_planes
from ninfer_format.geometry import up
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.loader import MAX_STAGING_BYTES, Piece, Upload
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS, TILE_ROWS, PackedMatrix, TileFormat

_THREADS = 256
_BLOCKS_PER_SM = 8
_ALIGNMENT = 256
_SWIZZLE_ROWS = 128
"""Rows whose NVFP4 scales lie together."""


class RepackParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("base", ctypes.c_uint64 * 2),
        ("high", ctypes.c_uint64 * 2),
        ("scales", ctypes.c_uint64 * 2),
        ("out", ctypes.c_uint64),
        ("n_rows", ctypes.c_int32 * 2),
        ("row_stride", ctypes.c_int32),
        ("n_tiles", ctypes.c_int32),
        ("k_steps", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("expert_tiles", ctypes.c_int32),
        ("expert_rows", ctypes.c_int32),
        ("scale_row", ctypes.c_int32 * 2),
    )


@dataclass(frozen=True, slots=True)
class _Plane:
    """One plane of the file's matrix: offset in the object, and bytes of so many rows, which are not divided."""

    offset: int
    row_bytes: int
    n_rows: int = 1


@dataclass(frozen=True, slots=True)
class _Run:
    """``n_rows`` rows that lie together in the file, and where each plane's bytes of them are staged.

    ``scale_row``: the first row, from the first row of what is staged of the scales on.
    """

    n_rows: int
    staged: tuple[int, ...]
    scale_row: int = 0


def kernel_spec(tile: TileFormat) -> KernelSpec:
    """The variant for a format."""
    return KernelSpec("repack.cu", "repack", (("FORMAT", tile.code),), _THREADS)


def specs(formats: Iterable[str] = TILE_FORMATS) -> list[KernelSpec]:
    """The variants for matrices of these formats."""
    return [kernel_spec(TILE_FORMATS[name]) for name in formats]


def _planes(matrix: PackedMatrix) -> tuple[_Plane, ...]:
    """Base, high (where there is one) and scale plane; the words of a BF16 matrix."""
    if not matrix.tile.group:
        return (_Plane(0, 2 * matrix.k),)
    if matrix.tile.floating:
        scale_offset = blockscale_planes((matrix.n_rows, matrix.k)).scale_offset
        return (_Plane(0, matrix.k // 2), _Plane(scale_offset, _SWIZZLE_ROWS * matrix.k // 16, _SWIZZLE_ROWS))
    p = row_split_planes(matrix.format, (matrix.n_rows, matrix.k))
    groups = p.groups_per_row
    high = (_Plane(p.high_offset, groups * p.high_bytes_per_group),) if p.high_bytes else ()
    return (_Plane(0, groups * p.base_bytes_per_group), *high, _Plane(p.scale_offset, 2 * groups))


def uploads(
    device: Device, matrix: PackedMatrix, file_begin: int, max_staging_bytes: int = MAX_STAGING_BYTES
) -> list[Upload]:
    """Uploads that together fill ``matrix``, whose object begins at file offset ``file_begin``.

    The object holds all rows, gate rows first where they are interleaved. A tile row, and an expert of a bank, is never
    divided, so one upload stages more than ``max_staging_bytes`` when one does not fit.
    """
    planes = _planes(matrix)
    row_bytes = sum(-(-plane.row_bytes // plane.n_rows) for plane in planes)
    slack = 2 * sum(_ALIGNMENT + plane.row_bytes * (plane.n_rows > 1) for plane in planes)
    if matrix.n_experts > 1:
        step = max(1, (max_staging_bytes - slack) // (matrix.n_rows // matrix.n_experts * row_bytes))
        return [
            _upload_experts(device, matrix, planes, file_begin, first, min(first + step, matrix.n_experts))
            for first in range(0, matrix.n_experts, step)
        ]
    step = max(1, (max_staging_bytes - slack) // (TILE_ROWS * row_bytes))
    undivided = max(1, max(plane.n_rows for plane in planes) // (TILE_ROWS // 2 if matrix.interleaved else TILE_ROWS))
    step = step // undivided * undivided or step
    return [
        _upload(device, matrix, planes, file_begin, first, min(first + step, matrix.n_tiles))
        for first in range(0, matrix.n_tiles, step)
    ]


def _staged(planes: Sequence[_Plane], file_begin: int, row: int, n_rows: int, at: int) -> tuple[list[Piece], _Run, int]:
    """Pieces that bring rows ``row`` on to staging memory from ``at`` on, these rows there, and where they end."""
    pieces, staged = [], []
    for plane in planes:
        first, end = row // plane.n_rows, -(-(row + n_rows) // plane.n_rows)
        n_bytes = (end - first) * plane.row_bytes
        pieces.append(Piece(file_begin + plane.offset + first * plane.row_bytes, n_bytes, at))
        staged.append(at)
        at = up(at + n_bytes, _ALIGNMENT)
    return pieces, _Run(n_rows, tuple(staged), row % planes[-1].n_rows), at


def _behind(run: _Run, planes: Sequence[_Plane], skipped: int, n_rows: int) -> _Run:
    """``n_rows`` of the same staged bytes, ``skipped`` rows further."""
    staged = (
        at if plane.n_rows > 1 else at + skipped * plane.row_bytes for at, plane in zip(run.staged, planes, strict=True)
    )
    return _Run(n_rows, tuple(staged), run.scale_row + skipped)


def _upload(
    device: Device, matrix: PackedMatrix, planes: Sequence[_Plane], file_begin: int, first: int, end: int
) -> Upload:
    """Tile rows ``first`` to ``end``."""
    stride = TILE_ROWS // 2 if matrix.interleaved else TILE_ROWS
    begin, n_rows = first * stride, min(end * stride, matrix.n_outputs) - first * stride
    pieces, run, at = _staged(planes, file_begin, begin, n_rows, 0)
    if matrix.interleaved:
        up_pieces, second, at = _staged(planes, file_begin, matrix.n_outputs + begin, n_rows, at)
        pieces += up_pieces
    else:
        second = _behind(run, planes, TILE_ROWS // 2, max(0, n_rows - TILE_ROWS // 2))
    finish = partial(_launch, device, matrix, (run, second), stride, first, end - first)
    return Upload(f"{matrix.name}[{first}:{end}]", tuple(pieces), at, finish)


def _upload_experts(
    device: Device, matrix: PackedMatrix, planes: Sequence[_Plane], file_begin: int, first: int, end: int
) -> Upload:
    """Experts ``first`` to ``end`` of a bank: their rows lie together in every plane."""
    n_rows = matrix.n_rows // matrix.n_experts
    second = matrix.n_outputs if matrix.interleaved else TILE_ROWS // 2  # where the second run begins
    pieces, run, at = _staged(planes, file_begin, first * n_rows, (end - first) * n_rows, 0)
    runs = (
        replace(run, n_rows=matrix.n_outputs),
        _behind(run, planes, second, matrix.n_outputs if matrix.interleaved else max(0, n_rows - second)),
    )
    stride, tiles = (TILE_ROWS // 2 if matrix.interleaved else TILE_ROWS), matrix.expert_tiles
    finish = partial(_launch, device, matrix, runs, stride, first * tiles, (end - first) * tiles)
    return Upload(f"{matrix.name}[{first}:{end}]", tuple(pieces), at, finish)


def _launch(
    device: Device,
    matrix: PackedMatrix,
    runs: Sequence[_Run],
    stride: int,
    first: int,
    n_tiles: int,
    staging: int,
    stream: Stream,
) -> None:
    """Queue the repacking of staged rows."""
    p = RepackParams()
    for i, run in enumerate(runs):
        addresses = [staging + offset for offset in run.staged]
        p.base[i], p.high[i], p.scales[i] = addresses[0], addresses[len(addresses) // 2], addresses[-1]
        p.n_rows[i], p.scale_row[i] = run.n_rows, run.scale_row
    p.out = matrix.pointer + first * matrix.k_steps * matrix.block_bytes
    p.row_stride, p.n_tiles, p.k_steps, p.k = stride, n_tiles, matrix.k_steps, matrix.k
    p.groups = matrix.k_padded // matrix.tile.group if matrix.tile.group else 0
    p.expert_tiles = matrix.expert_tiles if matrix.n_experts > 1 else n_tiles
    p.expert_rows = matrix.n_rows // matrix.n_experts
    blocks = -(-n_tiles * matrix.k_steps // (_THREADS // 32))
    grid = (min(blocks, _BLOCKS_PER_SM * device.n_sms), 1, 1)
    device.kernel(kernel_spec(matrix.tile)).launch(grid, p, stream, pdl=False)
