"""y = W x for up to 48 token columns, several matrices in one launch (``kernels/linear_small.cu``).

Reference: ``backends/reference/linear.py``. Against float64 on the dequantized weights the sums are within 1e-5 ‖w‖‖x‖.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.linear_small_tuning import LinearSmallTuning, linear_small_tuning
from ninfer_runtime.backends.cuda.packing import TILE_ROWS, PackedMatrix, TileFormat, activation_stride

__all__ = ["LinearSmall", "Output", "Residual", "RmsScale", "Workspace", "activation_stride", "specs"]

Epilogue = Literal["store", "swiglu", "residual"]

MAX_MATRICES = 4
MAX_COLUMNS = 48
TOKEN_TILE = 8
MAX_BLOCK_SHARED = 101_376
SUMS_TILES = 2  # as in the kernel
EPILOGUES: tuple[Epilogue, ...] = ("store", "swiglu", "residual")  # numbered as in the kernel


class LinearSmallParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("tiles", ctypes.c_uint64 * MAX_MATRICES),
        ("out", ctypes.c_uint64 * MAX_MATRICES),
        ("x", ctypes.c_uint64),
        ("ss", ctypes.c_uint64),
        ("spans", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("normed", ctypes.c_uint64),
        ("next_norm", ctypes.c_uint64),
        ("ss_out", ctypes.c_uint64),
        ("format", ctypes.c_int32 * MAX_MATRICES),
        ("n_out", ctypes.c_int32 * MAX_MATRICES),
        ("n_tiles", ctypes.c_int32 * MAX_MATRICES),
        ("k_steps", ctypes.c_int32 * MAX_MATRICES),
        ("first_unit", ctypes.c_int32 * MAX_MATRICES),
        ("out_stride", ctypes.c_int32 * MAX_MATRICES),
        ("out_float", ctypes.c_int32 * MAX_MATRICES),
        ("n_columns", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("k_padded", ctypes.c_int32),
        ("n_parts", ctypes.c_int32),
        ("normed_stride", ctypes.c_int32),
        ("inverse_hidden", ctypes.c_float),
        ("epsilon", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class RmsScale:
    """The rms division of a normed input: ``ss`` fp32 [n_parts][T], parts of Σ x² over ``hidden`` elements."""

    ss: int
    n_parts: int
    hidden: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class Output:
    """Where a matrix's result goes: [T][stride] of bf16 or fp32; stride in elements, the number of outputs if None."""

    pointer: int
    is_float: bool = False
    stride: int | None = None


@dataclass(frozen=True, slots=True)
class Residual:
    """Residual stream ``x`` fp32 [T][n] to add to, and what the next launch reads.

    ``normed`` bf16 [T][activation_stride(n)] = bf16(x · (1 + next_norm)) (0: not written); ``ss`` fp32 [n_parts][T]
    with n_parts = ``LinearSmall.ss_parts``.
    """

    x: int
    ss: int
    normed: int = 0
    next_norm: int = 0


def step_columns(matrix: PackedMatrix) -> int:
    """Columns of a step of the kernel: a block's, or half a block's for BF16, whose blocks are large."""
    return matrix.tile.step if matrix.tile.group else matrix.tile.step // 2


def step_bytes(tile: TileFormat) -> int:
    """Bytes of a step of a tile row."""
    return tile.block_bytes if tile.group else tile.block_bytes // 2


def token_tiles(n_columns: int) -> int:
    """Tiles of eight token columns."""
    return -(-n_columns // TOKEN_TILE)


def kernel_spec(
    formats: frozenset[TileFormat], epilogue: Epilogue, tiles: int, tuning: LinearSmallTuning
) -> KernelSpec:
    """The variant for matrices of ``formats`` and 8 · ``tiles`` columns."""
    slot = max(step_bytes(f) for f in formats)
    sums_bytes = tuning.x_columns // 64 * tiles * 64 if tiles <= SUMS_TILES else 0
    x_bytes = 2 * (TOKEN_TILE * tiles * (tuning.x_columns * 2 + 64) + sums_bytes)
    stage_bytes = tuning.warps * tuning.tile_rows * slot
    budget = min(tuning.shared_bytes, MAX_BLOCK_SHARED)
    stages = min((budget - x_bytes) // stage_bytes, tuning.max_stages)
    if stages < 2:
        raise UnsupportedError(f"linear_small tuning {tuning} leaves {stages} stages of {stage_bytes} bytes, 2 needed")
    defines = (
        ("FORMATS", sum(1 << f.code for f in formats)),
        ("EPILOGUE", EPILOGUES.index(epilogue)),
        ("NT", tiles),
        ("MT", tuning.tile_rows),
        ("STAGES", stages),
        ("X_COLUMNS", tuning.x_columns),
    )
    return KernelSpec(
        "linear_small.cu", "linear_small", defines, 32 * tuning.warps, x_bytes + stages * stage_bytes, tuning.min_blocks
    )


def specs(
    device: Device, matrices: Sequence[PackedMatrix], epilogue: Epilogue, max_columns: int = MAX_COLUMNS
) -> list[KernelSpec]:
    """Every variant that ``LinearSmall`` of these matrices may launch."""
    formats = frozenset(m.tile for m in matrices)
    return [
        kernel_spec(formats, epilogue, tiles, linear_small_tuning(device, tiles))
        for tiles in range(1, token_tiles(max_columns) + 1)
    ]


def k_steps(matrix: PackedMatrix) -> int:
    """Steps of a tile row."""
    return matrix.k_padded // step_columns(matrix)


def n_units(matrix: PackedMatrix, block_tiles: int) -> int:
    """(row block, step) pairs of a matrix; a row block is ``block_tiles`` tile rows."""
    return -(-matrix.n_tiles // block_tiles) * k_steps(matrix)


def cut_spans(matrices: Sequence[PackedMatrix], block_tiles: int, n_blocks: int) -> npt.NDArray[np.uint32]:
    """First unit of each block of the grid and the end, at most [n_blocks + 1]: equal bytes up to half a unit.

    A unit weighs its bytes; where warps of a row block have no tile row, half of what they would have read, because the
    block's other warps cannot read faster in their place.
    """
    weights = []
    for matrix in matrices:
        row_blocks = -(-matrix.n_tiles // block_tiles)
        filled = np.full(row_blocks, block_tiles, np.float64)
        filled[-1] = matrix.n_tiles - block_tiles * (row_blocks - 1)
        weights.append(np.repeat(step_bytes(matrix.tile) * (filled + block_tiles) / 2, k_steps(matrix)))
    ends = np.concatenate([[0.0], np.cumsum(np.concatenate(weights))])
    n_blocks = min(n_blocks, ends.size - 1)
    targets = ends[-1] * np.arange(n_blocks + 1) / n_blocks
    above = np.clip(np.searchsorted(ends, targets), 1, ends.size - 1)
    cuts = np.where(targets - ends[above - 1] < ends[above] - targets, above - 1, above)
    cuts[0], cuts[-1] = 0, ends.size - 1
    return np.unique(cuts).astype(np.uint32)  # no span is empty


class Workspace:
    """Sums on their way between blocks; every launch on one stream may share it.

    A launch writes it only after the launches ahead have ended, and leaves it as it found it: all bits one.
    """

    def __init__(self, arena: Taker, n_bytes: int) -> None:
        """``n_bytes``: the largest ``workspace_bytes`` of the launches that share it."""
        self.n_bytes = n_bytes
        self.pointer = arena.take("workspace/linear_small", n_bytes)

    def clear(self, device: Device, stream: Stream) -> None:
        """Once, before the first launch."""
        device.fill(self.pointer, 0xFF, self.n_bytes, stream)


def workspace_bytes(device: Device, max_columns: int = MAX_COLUMNS) -> int:
    """Bytes that launches of up to ``max_columns`` columns need on this device."""
    sizes = []
    for tiles in range(1, token_tiles(max_columns) + 1):
        tuning = linear_small_tuning(device, tiles)
        sizes.append(device.n_sms * tuning.blocks_per_sm * tuning.warps * tuning.tile_rows * tiles * 4 * 32 * 4)
    return max(sizes)


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a number of token tiles launches."""

    spec: KernelSpec
    cuts: npt.NDArray[np.uint32]
    block_tiles: int
    table: int  # device address of the cuts


class LinearSmall:
    """One launch: ``matrices`` of one K, applied to the same activations."""

    def __init__(
        self,
        device: Device,
        arena: Taker,
        matrices: Sequence[PackedMatrix],
        epilogue: Epilogue,
        max_columns: int,
        workspace: Workspace,
    ) -> None:
        """Lays out the tables in ``arena``; ``prepare`` fills them. UnsupportedError for matrices that do not fit."""
        if not 1 <= len(matrices) <= MAX_MATRICES or len({m.k for m in matrices}) != 1:
            found = ", ".join(f"{m.name} [{m.n_rows}, {m.k}]" for m in matrices)
            raise UnsupportedError(f"one launch takes 1 to {MAX_MATRICES} matrices of one K, found {found}")
        if any(m.interleaved != (epilogue == "swiglu") for m in matrices):
            raise UnsupportedError(f"{matrices[0].name}: interleaved rows and the swiglu epilogue go together")
        if epilogue == "residual" and len(matrices) != 1:
            raise UnsupportedError("a launch with the residual epilogue takes one matrix")
        if not 1 <= max_columns <= MAX_COLUMNS:
            raise UnsupportedError(f"linear_small takes 1 to {MAX_COLUMNS} columns, found {max_columns}")
        self.matrices, self.epilogue, self.max_columns = tuple(matrices), epilogue, max_columns
        self._device, self._workspace = device, workspace
        formats = frozenset(m.tile for m in matrices)
        self._variants: list[_Variant] = []
        tables: dict[tuple[int, int], tuple[npt.NDArray[np.uint32], int]] = {}
        for tiles in range(1, token_tiles(max_columns) + 1):
            tuning = linear_small_tuning(device, tiles)
            spec = kernel_spec(formats, epilogue, tiles, tuning)
            key = (tuning.warps * tuning.tile_rows, device.n_sms * tuning.blocks_per_sm)
            if key not in tables:
                cuts = cut_spans(matrices, *key)
                tables[key] = cuts, arena.take(f"tables/linear_small/{matrices[0].name}", cuts.nbytes)
            self._variants.append(_Variant(spec, tables[key][0], key[0], tables[key][1]))

    @property
    def specs(self) -> list[KernelSpec]:
        """Its kernel variants."""
        return [variant.spec for variant in self._variants]

    @property
    def ss_parts(self) -> int:
        """Parts of Σ x² that the residual epilogue writes per column."""
        return self.matrices[0].n_tiles

    def prepare(self) -> None:
        """Upload the tables and load the kernels; before the first launch, outside of captures."""
        for variant in self._variants:
            self._device.upload(variant.table, variant.cuts)
            self._device.kernel(variant.spec)

    def launch(
        self,
        stream: Stream,
        n_columns: int,
        x: int,
        rstd: RmsScale | None = None,
        outputs: Sequence[Output] = (),
        residual: Residual | None = None,
    ) -> None:
        """Queue the product with ``x``, bf16 [n_columns][activation_stride(k)].

        ``outputs``: one per matrix for "store" and "swiglu"; ``residual`` for "residual", where ``rstd`` is None.
        """
        assert 1 <= n_columns <= self.max_columns
        assert len(outputs) == (0 if self.epilogue == "residual" else len(self.matrices))
        assert (residual is not None) == (self.epilogue == "residual")
        assert not (residual and rstd)
        variant = self._variants[token_tiles(n_columns) - 1]
        p = LinearSmallParams()
        first = 0
        for i in range(MAX_MATRICES):
            p.first_unit[i] = first if i < len(self.matrices) else 2**31 - 1
            if i < len(self.matrices):
                matrix = self.matrices[i]
                p.tiles[i], p.format[i] = matrix.pointer, matrix.tile.code
                p.n_out[i], p.n_tiles[i], p.k_steps[i] = matrix.n_outputs, matrix.n_tiles, k_steps(matrix)
                first += n_units(matrix, variant.block_tiles)
        for i, output in enumerate(outputs):
            p.out[i], p.out_float[i] = output.pointer, output.is_float
            p.out_stride[i] = self.matrices[i].n_outputs if output.stride is None else output.stride
        p.x, p.x_stride, p.k_padded = x, activation_stride(self.matrices[0].k), self.matrices[0].k_padded
        p.spans, p.workspace, p.n_columns = variant.table, self._workspace.pointer, n_columns
        if rstd is not None:
            p.ss, p.n_parts, p.inverse_hidden, p.epsilon = rstd.ss, rstd.n_parts, 1 / rstd.hidden, rstd.epsilon
        if residual is not None:
            p.residual, p.ss_out = residual.x, residual.ss
            p.normed, p.next_norm = residual.normed, residual.next_norm
            p.normed_stride = activation_stride(self.matrices[0].n_outputs)
        grid = (variant.cuts.size - 1, 1, 1)
        self._device.kernel(variant.spec).launch(grid, p, stream)


def rows_per_block(tuning: LinearSmallTuning) -> int:
    """Output rows of a row block (not interleaved)."""
    return tuning.warps * tuning.tile_rows * TILE_ROWS
