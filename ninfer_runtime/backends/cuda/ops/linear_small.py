"""y = W x for up to 48 token columns, several matrices in one launch (``kernels/linear_small.cu``).

Reference: ``backends/reference/linear.py``. Against float64 on the dequantized weights the sums are within 1e-5 ‖w‖‖x‖.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.linear_small_tuning import LinearSmallTuning, linear_small_tuning, tuning_rows
from ninfer_runtime.backends.cuda.packing import PackedMatrix, TileFormat, activation_stride

__all__ = ["LinearSmall", "Output", "Residual", "RmsScale", "Workspace", "activation_stride", "specs"]

Epilogue = Literal["store", "swiglu", "residual"]

MAX_MATRICES = 4
MAX_COLUMNS = 48
TOKEN_TILE = 8
FEW_COLUMNS = 4  # of the smallest variant
MAX_BLOCK_SHARED = 101_376
EPILOGUES: tuple[Epilogue, ...] = ("store", "swiglu", "residual")  # numbered as in the kernel


class LinearSmallParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("tiles", ctypes.c_uint64 * MAX_MATRICES),
        ("out", ctypes.c_uint64 * MAX_MATRICES),
        ("x", ctypes.c_uint64),
        ("ss", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("normed", ctypes.c_uint64),
        ("next_norm", ctypes.c_uint64),
        ("ss_out", ctypes.c_uint64),
        ("format", ctypes.c_int32 * MAX_MATRICES),
        ("n_out", ctypes.c_int32 * MAX_MATRICES),
        ("n_tiles", ctypes.c_int32 * MAX_MATRICES),
        ("k_steps", ctypes.c_int32 * MAX_MATRICES),
        ("k_steps_inverse", ctypes.c_uint32 * MAX_MATRICES),
        ("first_unit", ctypes.c_int32 * MAX_MATRICES),
        ("unit_weight", ctypes.c_uint32 * MAX_MATRICES),
        ("first_weight", ctypes.c_uint32 * MAX_MATRICES),
        ("out_stride", ctypes.c_int32 * MAX_MATRICES),
        ("out_float", ctypes.c_int32 * MAX_MATRICES),
        ("factor", ctypes.c_float * MAX_MATRICES),
        ("n_units", ctypes.c_int32),
        ("span_weight", ctypes.c_uint32),
        ("span_rest", ctypes.c_uint32),
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


def size_of(n_columns: int) -> int:
    """The size of variant that ``n_columns`` columns take: 4, or whole tiles of eight."""
    return FEW_COLUMNS if n_columns <= FEW_COLUMNS else -(-n_columns // TOKEN_TILE) * TOKEN_TILE


def sizes(max_columns: int) -> list[int]:
    """All sizes that up to ``max_columns`` columns take."""
    return sorted({size_of(n) for n in range(1, max_columns + 1)})


def kernel_spec(
    formats: frozenset[TileFormat], epilogue: Epilogue, size: int, tuning: LinearSmallTuning, k_padded: int
) -> KernelSpec:
    """The variant for matrices of ``formats`` and up to ``size`` columns."""
    few = size == FEW_COLUMNS
    tiles = -(-size // TOKEN_TILE)
    with_sums = tuning.group_sums and tiles == 1 and any(f.group == 64 for f in formats)
    shared_x = tuning.shared_x and tiles > 1
    stage_bytes = tuning.warps * tuning.tile_rows * max(step_bytes(f) for f in formats)
    if shared_x:
        stage_bytes += TOKEN_TILE * tiles * 2 * max(f.step if f.group else f.step // 2 for f in formats)
    late_warps = tuning.warps - tuning.warps // tuning.phases  # whose sums others add
    phase_bytes = (2 if tiles == 1 else 1) * late_warps * tuning.tile_rows * tiles * (2 if few else 4) * 128
    sums_bytes = k_padded // 64 * size * 4 if with_sums else 0
    static_bytes = 4 * 32 * tuning.warps
    budget = min(tuning.shared_bytes, MAX_BLOCK_SHARED) - static_bytes - phase_bytes - sums_bytes
    stages = min(budget // stage_bytes, tuning.max_stages)
    if stages < 2:
        raise UnsupportedError(f"linear_small tuning {tuning} leaves {stages} stages of {stage_bytes} bytes, 2 needed")
    defines = (
        ("FORMATS", sum(1 << f.code for f in formats)),
        ("EPILOGUE", EPILOGUES.index(epilogue)),
        ("NT", tiles),
        ("FEW", int(few)),
        ("MT", tuning.tile_rows),
        ("PHASES", tuning.phases),
        ("STAGES", stages),
        ("GROUP_SUMS", int(with_sums)),
        ("X_AHEAD", int(tuning.x_ahead and not shared_x)),
        ("SHARED_X", int(shared_x)),
        ("RELEASE_EARLY", tuning.release_early),
    )
    shared_bytes = stages * stage_bytes + phase_bytes + sums_bytes
    return KernelSpec("linear_small.cu", "linear_small", defines, 32 * tuning.warps, shared_bytes, tuning.min_blocks)


def _tuning(device: Device, matrices: Sequence[PackedMatrix], size: int) -> LinearSmallTuning:
    formats = frozenset(m.tile for m in matrices)
    return linear_small_tuning(device, size, sum(m.n_tiles for m in matrices), formats)


def specs(
    device: Device, matrices: Sequence[PackedMatrix], epilogue: Epilogue, max_columns: int = MAX_COLUMNS
) -> list[KernelSpec]:
    """Every variant that ``LinearSmall`` of these matrices may launch."""
    return [plan(device, matrices, epilogue, size).spec for size in sizes(max_columns)]


def k_steps(matrix: PackedMatrix) -> int:
    """Steps of a tile row."""
    return matrix.k_padded // step_columns(matrix)


def n_units(matrix: PackedMatrix, block_tiles: int) -> int:
    """(row block, step) pairs of a matrix; a row block is ``block_tiles`` tile rows."""
    return -(-matrix.n_tiles // block_tiles) * k_steps(matrix)


@dataclass(frozen=True, slots=True)
class Spans:
    """How a launch's line of units is cut: what the kernel computes its spans from.

    A unit of matrix i weighs ``unit_weights[i]``; ``n_blocks`` blocks of the grid take equal shares up to a unit.
    """

    first_units: tuple[int, ...]
    unit_weights: tuple[int, ...]
    first_weights: tuple[int, ...]
    n_units: int
    total_weight: int
    n_blocks: int

    def begin(self, block: int) -> int:
        """First unit of a block's span; the kernel's ``span_begin``."""
        if block >= self.n_blocks:
            return self.n_units
        share, rest = divmod(self.total_weight, self.n_blocks)
        target = block * share + min(block, rest)
        m = max(i for i, first in enumerate(self.first_weights) if target >= first)
        weight = self.unit_weights[m]
        return self.first_units[m] + (target - self.first_weights[m] + weight // 2) // weight


def cut_spans(matrices: Sequence[PackedMatrix], block_tiles: int, max_blocks: int) -> Spans:
    """Spans of at most ``max_blocks`` blocks; each weighs at least the heaviest unit.

    A unit weighs its bytes; where warps of a row block have no tile row, half of what they would have read, because the
    block's other warps cannot read faster in their place.
    """
    units = [n_units(m, block_tiles) for m in matrices]
    weights = [
        max(1, step_bytes(m.tile) * (n * block_tiles // k_steps(m) + m.n_tiles) // (128 * (n // k_steps(m))))
        for m, n in zip(matrices, units, strict=True)
    ]
    ends = np.cumsum([0, *(w * n for w, n in zip(weights, units, strict=True))]).tolist()
    n_blocks = max(1, min(max_blocks, ends[-1] // max(weights)))
    first_units = np.cumsum([0, *units]).tolist()
    return Spans(tuple(first_units[:-1]), tuple(weights), tuple(ends[:-1]), first_units[-1], ends[-1], n_blocks)


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
    rows = tuning_rows(device.arch, device.n_sms, device.shared_per_sm)
    tile_rows = {
        size: max(r.blocks_per_sm * r.warps * r.tile_rows // r.phases for r in rows if r.columns >= size)
        for size in sizes(max_columns)
    }
    return max(device.n_sms * n * max(size, TOKEN_TILE) // 2 * 32 * 4 for size, n in tile_rows.items())


@dataclass(frozen=True, slots=True)
class Variant:
    """What a size launches."""

    spec: KernelSpec
    spans: Spans


def plan(device: Device, matrices: Sequence[PackedMatrix], epilogue: Epilogue, size: int) -> Variant:
    """The variant and the division of work for up to ``size`` columns."""
    tuning = _tuning(device, matrices, size)
    formats = frozenset(m.tile for m in matrices)
    spec = kernel_spec(formats, epilogue, size, tuning, matrices[0].k_padded)
    block_tiles = tuning.warps // tuning.phases * tuning.tile_rows
    return Variant(spec, cut_spans(matrices, block_tiles, device.n_sms * tuning.blocks_per_sm))


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
        """``arena`` is not needed any more. UnsupportedError for matrices that do not go together."""
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
        self._variants = {size: plan(device, matrices, epilogue, size) for size in sizes(max_columns)}

    @property
    def specs(self) -> list[KernelSpec]:
        """Its kernel variants."""
        return [variant.spec for variant in self._variants.values()]

    @property
    def ss_parts(self) -> int:
        """Parts of Σ x² that the residual epilogue writes per column."""
        return self.matrices[0].n_tiles

    def prepare(self) -> None:
        """Load the kernels; before the first launch, outside of captures."""
        self._device.prepare(self.specs)

    def launch(
        self,
        stream: Stream,
        n_columns: int,
        x: int,
        rstd: RmsScale | None = None,
        outputs: Sequence[Output] = (),
        residual: Residual | None = None,
        pdl: bool = True,
    ) -> None:
        """Queue the product with ``x``, bf16 [n_columns][activation_stride(k)].

        ``outputs``: one per matrix for "store" and "swiglu"; ``residual`` for "residual", where ``rstd`` is None.
        """
        assert 1 <= n_columns <= self.max_columns
        assert len(outputs) == (0 if self.epilogue == "residual" else len(self.matrices))
        assert (residual is not None) == (self.epilogue == "residual")
        assert not (residual and rstd)
        variant = self._variants[size_of(n_columns)]
        p, spans = LinearSmallParams(), variant.spans
        for i in range(len(self.matrices), MAX_MATRICES):
            p.first_unit[i], p.first_weight[i] = 2**31 - 1, 2**32 - 1
        for i, matrix in enumerate(self.matrices):
            p.tiles[i], p.format[i] = matrix.pointer, matrix.tile.code
            p.n_out[i], p.n_tiles[i], p.k_steps[i] = matrix.n_outputs, matrix.n_tiles, k_steps(matrix)
            p.first_unit[i], p.first_weight[i] = spans.first_units[i], spans.first_weights[i]
            p.k_steps_inverse[i] = -(-(1 << 32) // k_steps(matrix)) & 0xFFFFFFFF
            p.unit_weight[i], p.factor[i] = spans.unit_weights[i], matrix.sums_factor
        p.n_units = spans.n_units
        p.span_weight, p.span_rest = divmod(spans.total_weight, spans.n_blocks)
        for i, output in enumerate(outputs):
            p.out[i] = output.pointer
            p.out_float[i] = output.is_float
            p.out_stride[i] = self.matrices[i].n_outputs if output.stride is None else output.stride
        p.x, p.x_stride, p.k_padded = x, activation_stride(self.matrices[0].k), self.matrices[0].k_padded
        p.workspace, p.n_columns = self._workspace.pointer, n_columns
        if rstd is not None:
            p.ss, p.n_parts, p.inverse_hidden, p.epsilon = rstd.ss, rstd.n_parts, 1 / rstd.hidden, rstd.epsilon
        if residual is not None:
            p.residual, p.ss_out = residual.x, residual.ss
            p.normed, p.next_norm = residual.normed, residual.next_norm
            p.normed_stride = activation_stride(self.matrices[0].n_outputs)
        grid = (spans.n_blocks, 1, 1)
        self._device.kernel(variant.spec).launch(grid, p, stream, pdl=pdl)
