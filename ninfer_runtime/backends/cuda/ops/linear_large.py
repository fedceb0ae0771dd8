"""Matrix products of many tokens (prefill): y[t, n] = sum_k w[n, k] x[t, k], weights packed as tiles.

An operation multiplies several matrices of the same K with the same activations: a launch for each, small ones of one
format together; small ones of BF16 that are stored take ``linear_narrow``. The grid is persistent, at most one block
per multiprocessor; blocks that share a tile hand sums over through the workspace, in a fixed order, so results repeat
bit for bit on one card. Launches that share a workspace belong on one stream.
"""

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ninfer_format.errors import SignatureError
from ninfer_format.geometry import up
from ninfer_format.numeric.nvfp4 import BLOCK
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops import linear_narrow
from ninfer_runtime.backends.cuda.ops.linear_narrow import LinearNarrow, NarrowOutput
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm
from ninfer_runtime.backends.cuda.packing import PackedMatrix

MAX_MATRICES = 6
ROW_TILES = 16
"""Tile rows of a block's tile: two for each of its eight warps."""
SMALL_TILE_ROWS = 8
"""Matrices of at most so many tile rows share launches."""
STAGE_COLUMNS = 128
STAGES = {128: 3, 96: 3, 64: 5}
"""Depth of the ring of activations by tokens of a block's tile, as far as 99 KB of shared memory reach."""
MIN_SPAN = 4
"""Stages that a block is given at least: below that handing over costs more than it saves."""
_COST = {128: 1.0, 96: 0.78, 64: 0.58}  # time of a tile relative to the largest, measured on an H200
_TOKEN_TILES = {"W8G32_F16S": (96, 64), "BF16": (64,)}
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
        ("x_stride", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("whole_tiles", ctypes.c_int),
        ("shared_tiles", ctypes.c_int),
        ("out_divisor", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one launch is cut: ``whole_tiles`` go to one block each, ``shared_tiles`` in equal spans to all blocks."""

    tokens: int
    token_tiles: int
    whole_tiles: int
    shared_tiles: int
    blocks: int


def token_tiles(matrix: PackedMatrix) -> tuple[int, ...]:
    """Tokens of a block's tile, the compiled variants: as many as the format's operands leave registers for."""
    return _TOKEN_TILES.get(matrix.format, (128, 64))


def sums_factor(matrix: PackedMatrix) -> float:
    """What the kernels' sums are multiplied with: grouped integer weights come as a part of themselves."""
    of_weights = _WEIGHT_FACTOR if matrix.tile.group and not matrix.tile.floating else 1.0
    return matrix.sums_factor * of_weights


def schedule(n_pairs: int, stages: int, n_tokens: int, n_sms: int, sizes: Sequence[int] = (128, 64)) -> Schedule:
    """The cut for ``n_pairs`` pairs of tile rows, ``stages`` · 128 columns and ``n_tokens`` tokens on ``n_sms``.

    ``sizes``: tokens that a tile may have.
    """
    row_tiles = -(-n_pairs // (ROW_TILES // 2))
    tokens = min(sizes, key=lambda size: (-(-n_tokens // size) * _COST[size], -size))
    n_token_tiles = -(-n_tokens // tokens)
    tiles = row_tiles * n_token_tiles
    whole = max(0, tiles // n_sms - 1) * n_sms
    if tiles % n_sms == 0:
        whole = tiles
    blocks = n_sms if tiles >= n_sms else min(n_sms, max(1, tiles * stages // MIN_SPAN))
    return Schedule(tokens, n_token_tiles, whole, tiles - whole, blocks)


def launches(matrices: Sequence[PackedMatrix]) -> list[list[int]]:
    """Indices of the matrices of each launch: neighbours that are small and of one format go together."""
    groups: list[list[int]] = []
    for i, matrix in enumerate(matrices):
        last = matrices[groups[-1][0]] if groups else None
        together = (
            last is not None
            and last.format == matrix.format
            and max(last.n_tiles, matrix.n_tiles) <= SMALL_TILE_ROWS
            and len(groups[-1]) < MAX_MATRICES
        )
        if together:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def specs(matrices: Sequence[PackedMatrix], epilogue: Epilogue, *, quantized: bool = False) -> list[KernelSpec]:
    """Variants that these matrices may need; shapes are parameters, so many operations share them.

    ``quantized``: the outputs of SWIGLU are quantized rows.
    """
    out: list[KernelSpec] = []
    for group in launches(matrices):
        of = [matrices[i] for i in group]
        if _are_narrow(of, epilogue):
            out.append(linear_narrow.spec(of))
        else:
            out += [_spec(of[0], len(of), epilogue, tokens, quantized=quantized) for tokens in token_tiles(of[0])]
    return out


def _are_narrow(matrices: Sequence[PackedMatrix], epilogue: Epilogue) -> bool:
    """Whether a launch's matrices have so few rows that ``linear_narrow`` takes them."""
    return epilogue is Epilogue.STORE and matrices[0].format == "BF16" and matrices[0].n_tiles <= SMALL_TILE_ROWS


def _spec(matrix: PackedMatrix, n_matrices: int, epilogue: Epilogue, tokens: int, *, quantized: bool) -> KernelSpec:
    defines = {
        "FORMAT": matrix.tile.code,
        "MATRICES": n_matrices,
        "EPILOGUE": int(epilogue),
        "TOKENS": tokens,
        "STAGES": STAGES[tokens],
    }
    if quantized:
        defines["QUANTIZED"] = int(QuantizedForm.BF16)
    stage_bytes = tokens * STAGE_COLUMNS * 2 + _SCALE_BYTES
    return KernelSpec("linear_large.cu", "linear_large", tuple(defines.items()), _THREADS, STAGES[tokens] * stage_bytes)


def flags_at(n_sms: int) -> int:
    """Byte of the workspace where the flags begin."""
    return n_sms * ROW_TILES * 16 * max(STAGES) * 4


def workspace_bytes(device: Device) -> int:
    """Device memory that all launches on one stream share: a tile of sums and a flag per multiprocessor."""
    return flags_at(device.n_sms) + up(device.n_sms * 4, 256)


def clear_workspace(device: Device, workspace: int) -> None:
    """Set the flags to 0, once before the first launch; every launch leaves them so."""
    device.upload(workspace + flags_at(device.n_sms), np.zeros(device.n_sms, np.uint32))


def check_matrices(matrices: Sequence[PackedMatrix], epilogue: Epilogue) -> None:
    """SignatureError when matrices do not go together: none, of different K, or rows the epilogue does not take."""
    if not matrices:
        raise SignatureError("a product of many tokens takes at least one matrix")
    for matrix in matrices:
        if matrix.k != matrices[0].k:
            raise SignatureError(f"{matrix.name} has {matrix.k} columns, {matrices[0].name} has {matrices[0].k}")
        if matrix.interleaved != (epilogue is Epilogue.SWIGLU):
            raise SignatureError(f"{matrix.name}: SwiGLU takes interleaved gate and up rows, and nothing else does")


class _Launch:
    """Matrices of one launch, by index into the operation's."""

    def __init__(
        self,
        device: Device,
        matrices: Sequence[PackedMatrix],
        indices: Sequence[int],
        epilogue: Epilogue,
        workspace: int,
        out_divisor: float | None,
    ) -> None:
        self.indices = indices
        self._matrices = [matrices[i] for i in indices]
        first = self._matrices[0]
        self._n_sms = device.n_sms
        self._sizes = token_tiles(first)
        quantized = out_divisor is not None
        specs_of = {n: _spec(first, len(indices), epilogue, n, quantized=quantized) for n in self._sizes}
        self._kernels = {n: device.kernel(spec) for n, spec in specs_of.items()}
        self._params = self._fixed_params(workspace)
        self._params.out_divisor = 1.0 if out_divisor is None else out_divisor
        self._element_bytes = 2 if quantized else 1  # strides of quantized rows are bytes

    def _fixed_params(self, workspace: int) -> LinearLargeParams:
        params = LinearLargeParams()
        pairs = 0
        for i, matrix in enumerate(self._matrices):
            tile = matrix.tile
            params.tiles[i] = matrix.pointer
            params.n_rows[i] = matrix.n_outputs
            params.n_tile_rows[i] = matrix.n_tiles
            params.stage_bytes[i] = STAGE_COLUMNS // tile.step * matrix.block_bytes
            staged = tile.step == STAGE_COLUMNS and tile.scale_bytes and not tile.floating
            params.scales_at[i] = matrix.block_bytes - tile.scale_bytes if staged else -1
            params.factor[i] = sums_factor(matrix)
            params.first_pair[i] = pairs
            pairs += -(-matrix.n_tiles // 2)
        params.n_pairs = pairs
        params.stages = self._matrices[0].k_padded // STAGE_COLUMNS
        params.partials = workspace
        params.flags = workspace + flags_at(self._n_sms)
        return params

    def launch(
        self, stream: Stream, n_tokens: int, x: int, x_stride: int, outputs: Sequence[Output], *, pdl: bool
    ) -> None:
        params = self._params
        cut = schedule(params.n_pairs, params.stages, n_tokens, self._n_sms, self._sizes)
        for i, (matrix, index) in enumerate(zip(self._matrices, self.indices, strict=True)):
            output = outputs[index]
            params.out[i] = output.pointer
            params.out_stride[i] = (output.stride or matrix.n_outputs) * self._element_bytes
            params.out_float[i] = output.dtype == "fp32"
        params.x, params.x_stride, params.n_tokens = x, x_stride, n_tokens
        params.token_tiles = cut.token_tiles
        params.whole_tiles, params.shared_tiles = cut.whole_tiles, cut.shared_tiles
        self._kernels[cut.tokens].launch((cut.blocks, 1, 1), params, stream, pdl=pdl)


class _NarrowLaunch:
    """Matrices of one launch with few rows, by index into the operation's."""

    def __init__(self, device: Device, matrices: Sequence[PackedMatrix], indices: Sequence[int]) -> None:
        self.indices = indices
        self._matrices = [matrices[i] for i in indices]
        self._narrow = LinearNarrow(device, self._matrices)

    def launch(
        self, stream: Stream, n_tokens: int, x: int, x_stride: int, outputs: Sequence[Output], *, pdl: bool
    ) -> None:
        own = [
            NarrowOutput(outputs[i].pointer, outputs[i].dtype == "fp32", outputs[i].stride or matrix.n_outputs)
            for i, matrix in zip(self.indices, self._matrices, strict=True)
        ]
        self._narrow.launch(stream, n_tokens, x, x_stride, own, pdl=pdl)


class LinearLarge:
    """Matrices of equal K (packed, resident) times up to ``max_tokens`` tokens."""

    def __init__(
        self,
        device: Device,
        matrices: Sequence[PackedMatrix],
        epilogue: Epilogue,
        *,
        max_tokens: int,
        workspace: int,
        out_divisor: float | None = None,
    ) -> None:
        """``workspace``: ``workspace_bytes`` of memory, cleared. SignatureError when matrices do not go together.

        ``out_divisor`` (SWIGLU): the outputs are quantized under this divisor, bf16(code · scale) in their places
        (``ops/quantize_rows.py``); columns up to the next multiple of 128 are zeros.
        """
        check_matrices(matrices, epilogue)
        for matrix in matrices:
            if matrix.n_bytes >= 1 << 32:
                raise SignatureError(
                    f"{matrix.name} has {matrix.n_bytes} bytes packed, fewer than {1 << 32} are needed"
                )
            if out_divisor is not None and (epilogue is not Epilogue.SWIGLU or matrix.n_outputs % BLOCK):
                raise SignatureError(f"{matrix.name}: only SwiGLU outputs in whole blocks of {BLOCK} are quantized")
        self._n_matrices = len(matrices)
        self._columns = matrices[0].k_padded
        self._max_tokens = max_tokens
        self._launches = [
            _NarrowLaunch(device, matrices, group)
            if _are_narrow([matrices[i] for i in group], epilogue)
            else _Launch(device, matrices, group, epilogue, workspace, out_divisor)
            for group in launches(matrices)
        ]

    def launch(
        self, stream: Stream, n_tokens: int, x: int, x_stride: int, outputs: Sequence[Output], *, pdl: bool = True
    ) -> None:
        """Queue the product of ``n_tokens`` rows of ``x``, bf16 [T][x_stride], 16-byte aligned, x_stride % 8 == 0.

        Columns of ``x`` from K up to the next multiple of 128 hold zeros; later ones are not read. ``outputs``: one
        per matrix; STORE writes bf16 or fp32, SWIGLU bf16, RESIDUAL adds to fp32.
        """
        if not 0 < n_tokens <= self._max_tokens:
            raise ValueError(f"{n_tokens} tokens, the operation was made for 1 to {self._max_tokens}")
        if x % 16 or x_stride % 8 or x_stride < self._columns or n_tokens * x_stride >= 1 << 31:
            raise ValueError(
                f"activations at {x:#x}, stride {x_stride}: expected 16-byte aligned rows of {self._columns}"
            )
        if len(outputs) != self._n_matrices:
            raise ValueError(f"{len(outputs)} outputs for {self._n_matrices} matrices")
        for launch in self._launches:
            launch.launch(stream, n_tokens, x, x_stride, outputs, pdl=pdl)
