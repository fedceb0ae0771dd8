"""Matrix products of many tokens (prefill): y[t, n] = sum_k w[n, k] x[t, k], weights packed as tiles.

One launch multiplies several matrices of the same K and of any formats with the same activations. The grid is
persistent, at most one block per multiprocessor; blocks that share a tile hand sums over through the workspace, in a
fixed order, so results repeat bit for bit on one card. Launches that share a workspace belong on one stream.
"""

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ninfer_format.errors import SignatureError
from ninfer_format.geometry import up
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.packing import PackedMatrix

MAX_MATRICES = 6
ROW_TILES = 16
"""Tile rows of a block's tile: two for each of its eight warps."""
TOKEN_TILES = (128, 64)
"""Tokens of a block's tile: the compiled variants."""
STAGE_COLUMNS = 128
STAGES = {128: 3, 64: 5}
"""Depth of the ring of activations, as far as 99 KB of shared memory reach."""
MIN_SPAN = 4
"""Stages that a block is given at least: below that handing over costs more than it saves."""
_COST = {128: 1.0, 64: 0.58}  # time of a tile relative to the largest, measured on an H200
_THREADS = 256
_WEIGHT_FACTOR = 2.0**24  # grouped weights are multiplied as this part of themselves, see linear_large.cu
_SCALE_BYTES = 1024  # of a stage: a word of each thread


class Epilogue(enum.IntEnum):
    """What becomes of a sum; the number is the kernel's EPILOGUE."""

    STORE = 0  # out[t, n] = y, bf16 or fp32
    SWIGLU = 1  # out[t, n] = silu(gate) · up of an interleaved matrix, bf16, rounded once
    RESIDUAL = 2  # out[t, n] += y, fp32


@dataclass(frozen=True, slots=True)
class Output:
    """Where one matrix's result goes: row t starts ``stride`` elements behind row t − 1 (0: the matrix's outputs)."""

    pointer: int
    dtype: Literal["bf16", "fp32"] = "bf16"
    stride: int = 0


class LinearLargeParams(ctypes.Structure):
    """``struct LinearLargeParams`` of linear_large.cu."""

    _fields_ = (
        ("tiles", ctypes.c_void_p * MAX_MATRICES),
        ("out", ctypes.c_void_p * MAX_MATRICES),
        ("x", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("format", ctypes.c_int * MAX_MATRICES),
        ("n_rows", ctypes.c_int * MAX_MATRICES),
        ("n_tile_rows", ctypes.c_int * MAX_MATRICES),
        ("stage_bytes", ctypes.c_int * MAX_MATRICES),
        ("scales_at", ctypes.c_int * MAX_MATRICES),
        ("first_pair", ctypes.c_int * MAX_MATRICES),
        ("out_stride", ctypes.c_int * MAX_MATRICES),
        ("out_float", ctypes.c_int * MAX_MATRICES),
        ("factor", ctypes.c_float * MAX_MATRICES),
        ("n_pairs", ctypes.c_int),
        ("n_tokens", ctypes.c_int),
        ("token_tiles", ctypes.c_int),
        ("k", ctypes.c_int),
        ("x_stride", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("whole_tiles", ctypes.c_int),
        ("shared_tiles", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one launch is cut: ``whole_tiles`` go to one block each, ``shared_tiles`` in equal spans to all blocks."""

    tokens: int
    token_tiles: int
    whole_tiles: int
    shared_tiles: int
    blocks: int


def schedule(n_pairs: int, stages: int, n_tokens: int, n_sms: int) -> Schedule:
    """The cut for ``n_pairs`` pairs of tile rows, ``stages`` · 128 columns and ``n_tokens`` tokens on ``n_sms``."""
    row_tiles = -(-n_pairs // (ROW_TILES // 2))
    tokens = min(TOKEN_TILES, key=lambda size: (-(-n_tokens // size) * _COST[size], -size))
    token_tiles = -(-n_tokens // tokens)
    tiles = row_tiles * token_tiles
    whole = max(0, tiles // n_sms - 1) * n_sms
    if tiles and tiles % n_sms == 0:
        whole = tiles
    shared = tiles - whole
    blocks = n_sms if tiles >= n_sms else min(n_sms, max(1, tiles * stages // MIN_SPAN))
    return Schedule(tokens, token_tiles, whole, shared, blocks)


def specs(matrices: Sequence[PackedMatrix], epilogue: Epilogue) -> list[KernelSpec]:
    """Variants that a launch of these matrices may need; shapes are parameters, so many launches share them."""
    formats = 0
    for matrix in matrices:
        formats |= 1 << matrix.tile.code
    return [_spec(formats, len(matrices), epilogue, tokens) for tokens in TOKEN_TILES]


def _spec(formats: int, n_matrices: int, epilogue: Epilogue, tokens: int) -> KernelSpec:
    defines = {
        "FORMATS": formats,
        "MATRICES": n_matrices,
        "EPILOGUE": int(epilogue),
        "TOKENS": tokens,
        "STAGES": STAGES[tokens],
    }
    stage_bytes = tokens * STAGE_COLUMNS * 2 + _SCALE_BYTES
    return KernelSpec("linear_large.cu", "linear_large", tuple(defines.items()), _THREADS, STAGES[tokens] * stage_bytes)


def _flags_at(n_sms: int) -> int:
    return n_sms * ROW_TILES * 16 * max(TOKEN_TILES) * 4


def workspace_bytes(device: Device) -> int:
    """Device memory that all launches on one stream share: a tile of sums and a flag per multiprocessor."""
    return _flags_at(device.n_sms) + up(device.n_sms * 4, 256)


def clear_workspace(device: Device, workspace: int) -> None:
    """Set the flags to 0, once before the first launch; every launch leaves them so."""
    device.upload(workspace + _flags_at(device.n_sms), np.zeros(device.n_sms, np.uint32))


class LinearLarge:
    """One launch: matrices of equal K (packed, resident) times up to ``max_tokens`` tokens."""

    def __init__(
        self,
        device: Device,
        matrices: Sequence[PackedMatrix],
        epilogue: Epilogue,
        *,
        max_tokens: int,
        workspace: int,
    ) -> None:
        """``workspace``: ``workspace_bytes`` of memory, cleared. SignatureError when matrices do not go together."""
        if not 1 <= len(matrices) <= MAX_MATRICES:
            raise SignatureError(f"one launch takes 1 to {MAX_MATRICES} matrices, not {len(matrices)}")
        for matrix in matrices:
            if matrix.k != matrices[0].k:
                raise SignatureError(f"{matrix.name} has {matrix.k} columns, {matrices[0].name} has {matrices[0].k}")
            if matrix.interleaved != (epilogue is Epilogue.SWIGLU):
                raise SignatureError(f"{matrix.name}: SwiGLU takes interleaved gate and up rows, and nothing else does")
            if matrix.n_bytes >= 1 << 32:
                raise SignatureError(
                    f"{matrix.name} has {matrix.n_bytes} bytes packed, fewer than {1 << 32} are needed"
                )
        self._epilogue = epilogue
        self._matrices = tuple(matrices)
        self._max_tokens = max_tokens
        self._n_sms = device.n_sms
        variants = specs(matrices, epilogue)
        self._kernels = {size: device.kernel(spec) for size, spec in zip(TOKEN_TILES, variants, strict=True)}
        self._params = self._fixed_params(workspace)

    def _fixed_params(self, workspace: int) -> LinearLargeParams:
        params = LinearLargeParams()
        pairs = 0
        for i, matrix in enumerate(self._matrices):
            params.tiles[i] = matrix.pointer
            params.format[i] = matrix.tile.code
            params.n_rows[i] = matrix.n_outputs
            params.n_tile_rows[i] = matrix.n_tiles
            params.stage_bytes[i] = STAGE_COLUMNS // matrix.tile.step * matrix.block_bytes
            staged = matrix.tile.step == STAGE_COLUMNS and matrix.tile.scale_bytes
            params.scales_at[i] = matrix.block_bytes - matrix.tile.scale_bytes if staged else -1
            params.factor[i] = _WEIGHT_FACTOR if matrix.tile.group else 1.0
            params.first_pair[i] = pairs
            pairs += -(-matrix.n_tiles // 2)
        params.n_pairs = pairs
        params.k = self._matrices[0].k
        params.stages = self._matrices[0].k_padded // STAGE_COLUMNS
        params.partials = workspace
        params.flags = workspace + _flags_at(self._n_sms)
        return params

    def launch(self, stream: Stream, n_tokens: int, x: int, x_stride: int, outputs: Sequence[Output]) -> None:
        """Queue the product of ``n_tokens`` rows of ``x``, bf16 [T][x_stride], 16-byte aligned, x_stride % 8 == 0.

        Columns of ``x`` from K up to the next multiple of 128 hold zeros; later ones are not read. ``outputs``: one
        per matrix; STORE writes bf16 or fp32, SWIGLU bf16, RESIDUAL adds to fp32.
        """
        if not 0 < n_tokens <= self._max_tokens:
            raise ValueError(f"{n_tokens} tokens, the launch was made for 1 to {self._max_tokens}")
        columns = self._params.stages * STAGE_COLUMNS
        if x % 16 or x_stride % 8 or x_stride < columns or n_tokens * x_stride >= 1 << 31:
            raise ValueError(f"activations at {x:#x}, stride {x_stride}: expected 16-byte aligned rows of {columns}")
        cut = schedule(self._params.n_pairs, self._params.stages, n_tokens, self._n_sms)
        params = self._params
        for i, (matrix, output) in enumerate(zip(self._matrices, outputs, strict=True)):
            params.out[i] = output.pointer
            params.out_stride[i] = output.stride or matrix.n_outputs
            params.out_float[i] = output.dtype == "fp32"
        params.x, params.x_stride, params.n_tokens = x, x_stride, n_tokens
        params.token_tiles = cut.token_tiles
        params.whole_tiles, params.shared_tiles = cut.whole_tiles, cut.shared_tiles
        self._kernels[cut.tokens].launch((cut.blocks, 1, 1), params, stream)
