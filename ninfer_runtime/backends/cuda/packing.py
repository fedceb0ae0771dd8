"""Device layout of weight matrices ("tiles") and its numpy oracle. Specification: specs/kernels.md, "Packed weights".

A *tile row* is 16 output rows, a *step* is a fixed number of columns (128 for Q4/Q5/Q6/NVFP4, 64 for W8 and BF16). One
(tile row, step) pair is one contiguous *block*; blocks lie tile row after tile row, in a tile row step after step.
N pads to 16 rows and K to 128 columns with scale 0 and code 0.

Inside a block every lane of a warp finds the words of its operand-A fragments of ``mma.m16n8k16`` where it reads them.
Lane = 4 g + t. The order of K inside a 64-column group is ours: lane t owns columns 8t..8t+7 (mma 0 and 1) and
32+8t..32+8t+7 (mma 2 and 3), so operand B of a token is two 16-byte loads from a plain row-major activation. *Pair*
p = 4j + i of a lane is register a_i of mma j: row g (i even) or g+8 (i odd), columns c and c+1 with
c = 32 (j // 2) + 8 t + 4 (j % 2) + 2 (i // 2). A pair's first column sits in the low 16-bit half of its word.

Words of a lane and a 64-column group (offset-binary codes u = q + 2^(bits-1); each half of a word alike):

- Q4, 4 words: word i bits 4j..4j+3 = pair 4j + i.
- Q5, 5 words: word w bits 5f..5f+4 = pair 3w + f, f = 0..2; bit 15 of word w = bit w of pair 15.
- Q6, 6 words: word w bits 6f..6f+5 = pair 2w + f, f = 0..1; the low four bits of pair 12 + w are bits 12..15 of word
  w = 0..3; the high two bits of pair 12 + 2v + f are bits 12+2f, 13+2f of word 4 + v.
- W8, 4 words per 32 columns (half h of the group): two's complement; byte 0 of each half of word i = pair 8h + i,
  byte 1 = pair 8h + 4 + i.
- BF16, 16 words: pair p as it is.
- NVFP4, 4 words of E2M1 codes: word 2h + r bits 4q..4q+3 = the pair of row g + 8r and columns 32h + 8t + 2q, + 1. So
  word w holds the eight codes of register a_w of ``mma.m16n8k64``, in an order of its own within the eight columns.

Block: 16-byte pieces (words 0..3 of lane 0, lane 1, …) per group, then the rest of the words of both groups (Q5 8 bytes
per lane, Q6 16), then 64 bytes of binary16 scales: for g = 0..7 row g's two groups, then row g+8's two groups. NVFP4
has 128 bytes of E4M3 scales: for g = 0..7 row g's eight blocks of 16 columns, then row g+8's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import SignatureError
from ninfer_format.geometry import up

TILE_ROWS = 16
GROUP_COLUMNS = 64
"""Columns whose products one fragment of four mma accumulates."""
K_ALIGNMENT = 128
"""K of every packed matrix, and the row stride of its activations, is padded to this many columns."""

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.uint16] | npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TileFormat:
    """Geometry of one packed format.

    ``code`` is the number kernels know it by; ``step`` columns per block; ``group`` columns per scale (0: no scales);
    ``words`` 32-bit words per lane and 64-column group; ``bits`` per code. ``floating``: codes are not integers, and
    scales are bytes.
    """

    name: str
    code: int
    bits: int
    step: int
    group: int
    words: int
    floating: bool = False

    @property
    def scale_type(self) -> type[np.unsignedinteger[Any]]:
        """Words of scales."""
        return np.uint8 if self.floating else np.uint16

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales in a block."""
        return TILE_ROWS * (self.step // self.group) * np.dtype(self.scale_type).itemsize if self.group else 0

    @property
    def code_offset(self) -> int:
        """What is added to a code so that none is negative; 0 where bits are stored as they are."""
        return 1 << (self.bits - 1) if self.bits < 8 and not self.floating else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a (tile row, step) block; a multiple of 64."""
        return self.step // GROUP_COLUMNS * self.words * 128 + self.scale_bytes


TILE_FORMATS: Mapping[str, TileFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            TileFormat("Q4G64_F16S", 0, bits=4, step=128, group=64, words=4),
            TileFormat("Q5G64_F16S", 1, bits=5, step=128, group=64, words=5),
            TileFormat("Q6G64_F16S", 2, bits=6, step=128, group=64, words=6),
            TileFormat("W8G32_F16S", 3, bits=8, step=64, group=32, words=8),
            TileFormat("BF16", 4, bits=16, step=64, group=0, words=16),
            TileFormat("NVFP4", 5, bits=4, step=128, group=16, words=4, floating=True),
        )
    }
)


def tile_format(name: str) -> TileFormat:
    """The packed form of numeric format ``name``; SignatureError when kernels have none."""
    try:
        return TILE_FORMATS[name]
    except KeyError:
        known = ", ".join(TILE_FORMATS)
        raise SignatureError(f"matrices of format {name} have no packed device layout; packed are {known}") from None


def activation_stride(k: int) -> int:
    """Elements between activation rows of a matrix with K = ``k``; elements from ``k`` on are zero."""
    return up(k, K_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix [n_rows, k] in device memory, packed as tiles.

    ``interleaved``: rows are gate rows followed by as many up rows; tile row i holds gate rows 8i..8i+7 and then the
    up rows of the same numbers, so that one thread has both halves of a SwiGLU pair.
    ``n_experts``: matrices of equal shape one after the other, a bank; each is packed by itself, its tile rows follow
    those of the one before.
    ``divisor`` of all weights (NVFP4), which is not part of the packed bytes. ``input_divisor`` of the rows that it
    multiplies where those are NVFP4 too; None: they never are.
    """

    name: str
    format: str
    n_rows: int
    k: int
    pointer: int = 0
    interleaved: bool = False
    n_experts: int = 1
    divisor: float = 1.0
    input_divisor: float | None = None
    tile: TileFormat = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile", tile_format(self.format))
        if self.n_rows % self.n_experts:
            raise SignatureError(f"{self.name}: {self.n_rows} rows are not {self.n_experts} matrices of equal number")
        if self.interleaved and self.n_rows // self.n_experts % 2:
            raise SignatureError(f"{self.name}: {self.n_rows} rows are not gate and up rows of equal number")

    @property
    def n_outputs(self) -> int:
        """Rows of the result of one of the matrices: half of the rows when gate and up are interleaved."""
        return self.n_rows // self.n_experts // (2 if self.interleaved else 1)

    @property
    def expert_tiles(self) -> int:
        """Tile rows of one of the matrices."""
        return -(-self.n_outputs // (TILE_ROWS // 2 if self.interleaved else TILE_ROWS))

    @property
    def n_tiles(self) -> int:
        """Tile rows."""
        return self.n_experts * self.expert_tiles

    @property
    def k_padded(self) -> int:
        """Columns with padding."""
        return up(self.k, K_ALIGNMENT)

    @property
    def k_steps(self) -> int:
        """Blocks per tile row."""
        return self.k_padded // self.tile.step

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.tile.block_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of the packed matrix."""
        return self.n_tiles * self.k_steps * self.block_bytes

    @property
    def sums_factor(self) -> float:
        """What sums over exact operands are multiplied with: those of NVFP4 are code · scale / 128 (tiles.cuh)."""
        return 128.0 / self.divisor if self.tile.floating else 1.0

    def at(self, pointer: int) -> "PackedMatrix":
        """The same matrix stored at device address ``pointer``."""
        return replace(self, pointer=pointer)


def tile_row_sources(matrix: PackedMatrix) -> npt.NDArray[np.int64]:
    """Matrix row held by each of the ``n_tiles`` · 16 packed rows; −1 for padding."""
    count = TILE_ROWS // 2 if matrix.interleaved else TILE_ROWS
    rows = np.arange(matrix.expert_tiles * count).reshape(-1, count)
    rows = np.where(rows < matrix.n_outputs, rows, -1)
    if matrix.interleaved:
        rows = np.concatenate([rows, np.where(rows < 0, -1, rows + matrix.n_outputs)], axis=1)
    first = np.arange(matrix.n_experts)[:, None, None] * (matrix.n_rows // matrix.n_experts)
    return np.where(rows < 0, -1, rows + first).reshape(-1)


def pair_columns() -> npt.NDArray[np.int64]:
    """Column inside a 64-column group of [lane t, pair p, half]: shape [4, 16, 2]."""
    t, j, i, half = np.meshgrid(np.arange(4), np.arange(4), np.arange(4), np.arange(2), indexing="ij")
    columns: npt.NDArray[np.int64] = 32 * (j // 2) + 8 * t + 4 * (j % 2) + 2 * (i // 2) + half
    return columns.reshape(4, 16, 2)


def _to_pairs(padded: npt.NDArray[np.uint32]) -> Words:
    """Words of 16-bit halves [16 rows, K] → pairs [groups, lane, pair] with the halves' values in place."""
    groups = padded.shape[1] // GROUP_COLUMNS
    columns = pair_columns()  # [t, p, half]
    rows = np.arange(8)[:, None] + 8 * (np.arange(16) % 2)[None, :]  # [g, p]
    picked = padded.reshape(TILE_ROWS, groups, GROUP_COLUMNS)[
        rows[:, None, :, None], :, columns[None]
    ]  # [g, t, p, half, group]
    pairs = picked[..., 0, :] | picked[..., 1, :] << np.uint32(16)
    return np.ascontiguousarray(np.moveaxis(pairs, -1, 0)).reshape(groups, 32, 16)


def _from_pairs(pairs: Words) -> npt.NDArray[np.uint32]:
    """Inverse of ``_to_pairs``: 16-bit halves [16 rows, K]."""
    groups = pairs.shape[0]
    columns = pair_columns()
    rows = np.arange(8)[:, None] + 8 * (np.arange(16) % 2)[None, :]
    halves = np.stack([pairs & np.uint32(0xFFFF), pairs >> np.uint32(16)], axis=-1).reshape(groups, 8, 4, 16, 2)
    out = np.zeros((TILE_ROWS, groups, GROUP_COLUMNS), np.uint32)
    out[rows[:, None, :, None], :, columns[None]] = np.moveaxis(halves, 0, -1)
    return out.reshape(TILE_ROWS, groups * GROUP_COLUMNS)


def _field_places(tile: TileFormat) -> list[list[tuple[int, int, int, int]]]:
    """For each pair the pieces it is cut into: (word, bit in word, bit in code, number of bits)."""
    bits = tile.bits
    if tile.floating:
        return [[(2 * (p // 8) + p % 2, 4 * (2 * (p // 4 % 2) + p // 2 % 2), 0, 4)] for p in range(16)]
    if bits == 4:
        return [[(p % 4, 4 * (p // 4), 0, 4)] for p in range(16)]
    if bits == 5:
        return [[(p // 3, 5 * (p % 3), 0, 5)] for p in range(15)] + [[(w, 15, w, 1) for w in range(5)]]
    if bits == 6:
        whole = [[(p // 2, 6 * (p % 2), 0, 6)] for p in range(12)]
        return whole + [[(w, 12, 0, 4), (4 + w // 2, 12 + 2 * (w % 2), 4, 2)] for w in range(4)]
    if bits == 8:
        return [[(4 * (p // 8) + p % 4, 8 * (p % 8 // 4), 0, 8)] for p in range(16)]
    return [[(p, 0, 0, 16)] for p in range(16)]


def _pack_words(pairs: Words, tile: TileFormat) -> Words:
    """Pairs [groups, 32, 16] of codes → words [groups, 32, tile.words]."""
    words = np.zeros((*pairs.shape[:2], tile.words), np.uint32)
    for pair, pieces in enumerate(_field_places(tile)):
        for word, at, start, count in pieces:
            mask = np.uint32(((1 << count) - 1) * 0x10001)
            words[..., word] |= ((pairs[..., pair] >> np.uint32(start)) & mask) << np.uint32(at)
    return words


def _unpack_words(words: Words, tile: TileFormat) -> Words:
    """Inverse of ``_pack_words``."""
    pairs = np.zeros((*words.shape[:2], 16), np.uint32)
    for pair, pieces in enumerate(_field_places(tile)):
        for word, at, start, count in pieces:
            mask = np.uint32(((1 << count) - 1) * 0x10001)
            pairs[..., pair] |= ((words[..., word] >> np.uint32(at)) & mask) << np.uint32(start)
    return pairs


def pack_matrix(matrix: PackedMatrix, codes: npt.NDArray[np.integer], scales: Scales | None) -> Bytes:
    """Packed bytes [matrix.n_bytes] of a matrix.

    ``codes`` [n_rows, k]: signed codes, E2M1 or BF16 words. ``scales`` [n_rows, ceil(k / group)]: binary16 words
    (uint16), E4M3 words (uint8) for NVFP4, None for BF16.
    """
    tile, k_padded = matrix.tile, matrix.k_padded
    sources = tile_row_sources(matrix)
    offset = tile.code_offset
    padded = np.full((sources.size, k_padded), offset, np.uint32)
    real = sources >= 0
    padded[real, : matrix.k] = (codes[sources[real]].astype(np.int64) + offset) & ((1 << tile.bits) - 1)
    per_row = k_padded // tile.group if tile.group else 0
    scale_rows = np.zeros((sources.size, per_row), tile.scale_type)
    if scales is not None:
        scale_rows[real, : scales.shape[1]] = scales[sources[real]]
    groups = tile.step // GROUP_COLUMNS
    blocks = np.zeros((matrix.n_tiles, matrix.k_steps, tile.block_bytes), np.uint8)
    for i in range(matrix.n_tiles):
        rows = slice(TILE_ROWS * i, TILE_ROWS * (i + 1))
        words = _pack_words(_to_pairs(padded[rows]), tile).reshape(matrix.k_steps, groups, 32, tile.words)
        pieces = [words[..., w : w + 4] for w in range(0, tile.words // 4 * 4, 4)]
        # Whole 16-byte pieces: group-major, then piece, then lane; what is left: lane-major with both groups.
        body = np.stack(pieces, axis=2).reshape(matrix.k_steps, -1)
        rest = np.moveaxis(words[..., tile.words // 4 * 4 :], 1, 2).reshape(matrix.k_steps, -1)
        scale = np.empty((matrix.k_steps, 0), tile.scale_type)
        if tile.group:
            by_step = scale_rows[rows].reshape(2, 8, matrix.k_steps, -1)  # [half, g, step, group]
            scale = np.ascontiguousarray(by_step.transpose(2, 1, 0, 3)).reshape(matrix.k_steps, -1)
        packed = [np.ascontiguousarray(part).view(np.uint8).reshape(matrix.k_steps, -1) for part in (body, rest, scale)]
        blocks[i] = np.concatenate(packed, axis=1)
    return blocks.reshape(-1)


def unpack_matrix(matrix: PackedMatrix, packed: Bytes) -> tuple[npt.NDArray[np.int64], Scales | None]:
    """Codes int64 [n_rows, k] (E2M1, BF16: words) and scale words [n_rows, ceil(k / group)] of packed bytes."""
    tile = matrix.tile
    sources = tile_row_sources(matrix)
    groups = tile.step // GROUP_COLUMNS
    blocks = packed.reshape(matrix.n_tiles, matrix.k_steps, tile.block_bytes)
    offset = tile.code_offset
    codes = np.zeros((matrix.n_rows, matrix.k), np.int64)
    per_row = -(-matrix.k // tile.group) if tile.group else 0
    scales = np.zeros((matrix.n_rows, per_row), tile.scale_type)
    whole = tile.words // 4
    body_bytes, rest_words = groups * whole * 512, tile.words % 4
    for i in range(matrix.n_tiles):
        block = np.ascontiguousarray(blocks[i])
        body = np.ascontiguousarray(block[:, :body_bytes]).view(np.uint32)
        words = body.reshape(matrix.k_steps, groups, whole, 32, 4).transpose(0, 1, 3, 2, 4)
        words = words.reshape(matrix.k_steps, groups, 32, whole * 4)
        rest_end = body_bytes + groups * rest_words * 128
        rest = np.ascontiguousarray(block[:, body_bytes:rest_end]).view(np.uint32)
        rest = np.moveaxis(rest.reshape(matrix.k_steps, 32, groups, rest_words), 2, 1)
        words = np.concatenate([words, rest], axis=-1).reshape(-1, 32, tile.words)
        values = _from_pairs(_unpack_words(words, tile)).astype(np.int64) - offset
        if tile.bits == 8:
            values = np.where(values >= 128, values - 256, values)
        rows = sources[TILE_ROWS * i : TILE_ROWS * (i + 1)]
        real = rows >= 0
        codes[rows[real]] = values[real, : matrix.k]
        if tile.group:
            stored = np.ascontiguousarray(block[:, rest_end:]).view(tile.scale_type).reshape(matrix.k_steps, 8, 2, -1)
            by_row = stored.transpose(2, 1, 0, 3).reshape(TILE_ROWS, -1)
            scales[rows[real]] = by_row[real, :per_row]
    return codes, scales if tile.group else None
