"""Products of many tokens with few rows of BF16: routers, gates (``kernels/linear_narrow.cu``).

``linear_large`` takes these launches where an operation has such matrices; a tile of it would be nearly empty.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ninfer_format.errors import SignatureError
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.packing import PackedMatrix

MAX_MATRICES = 6
BLOCK_TOKENS = 32
TILE_ROWS = (1, 2, 5)
"""Of a block, the compiled variants: enough blocks for a card where rows are few, little to read twice where not."""
_THREADS = 256


class LinearNarrowParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("tiles", ctypes.c_void_p * MAX_MATRICES),
        ("out", ctypes.c_void_p * MAX_MATRICES),
        ("x", ctypes.c_void_p),
        ("n_rows", ctypes.c_int * MAX_MATRICES),
        ("n_tile_rows", ctypes.c_int * MAX_MATRICES),
        ("out_stride", ctypes.c_int * MAX_MATRICES),
        ("out_float", ctypes.c_int * MAX_MATRICES),
        ("n_tokens", ctypes.c_int),
        ("x_stride", ctypes.c_int),
        ("n_groups", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True)
class NarrowOutput:
    """Where one matrix's result goes: rows of ``stride`` elements."""

    pointer: int
    is_float: bool
    stride: int


def block_tile_rows(matrices: Sequence[PackedMatrix]) -> int:
    """Tile rows of a block for these matrices: a quarter of them, as far as there are variants."""
    quarter = -(-max(matrix.n_tiles for matrix in matrices) // 4)
    return max(rows for rows in TILE_ROWS if rows <= quarter)


def spec(matrices: Sequence[PackedMatrix]) -> KernelSpec:
    """The variant for these matrices. SignatureError for other formats."""
    for matrix in matrices:
        if matrix.format != "BF16":
            raise SignatureError(f"{matrix.name} is stored in {matrix.format}, expected BF16")
    tile_rows = block_tile_rows(matrices)
    defines = (("TILE_ROWS", tile_rows), ("MATRICES", len(matrices)))
    shared = _THREADS // 32 * BLOCK_TOKENS * (16 * tile_rows + 4) * 4
    return KernelSpec("linear_narrow.cu", "linear_narrow", defines, _THREADS, shared)


class LinearNarrow:
    """BF16 matrices of equal K, each with few rows."""

    def __init__(self, device: Device, matrices: Sequence[PackedMatrix]) -> None:
        self._kernel = device.kernel(spec(matrices))
        self._params = params = LinearNarrowParams()
        most = max(matrix.n_tiles for matrix in matrices)
        self._row_blocks, self._n_matrices = -(-most // block_tile_rows(matrices)), len(matrices)
        for i, matrix in enumerate(matrices):
            params.tiles[i] = matrix.pointer
            params.n_rows[i] = matrix.n_rows
            params.n_tile_rows[i] = matrix.n_tiles
        params.n_groups = matrices[0].k_steps

    def launch(
        self,
        stream: Stream,
        n_tokens: int,
        x: int,
        x_stride: int,
        outputs: Sequence[NarrowOutput],
        *,
        pdl: bool = True,
    ) -> None:
        """Queue the products; rows of ``x`` hold zeros from K up to the next multiple of 128."""
        params = self._params
        for i, output in enumerate(outputs):
            params.out[i] = output.pointer
            params.out_stride[i] = output.stride
            params.out_float[i] = output.is_float
        params.x, params.x_stride, params.n_tokens = x, x_stride, n_tokens
        grid = (-(-n_tokens // BLOCK_TOKENS), self._row_blocks, self._n_matrices)
        self._kernel.launch(grid, params, stream, pdl=pdl)
