"""Grouped signed integers with one binary16 scale per group: Q4, Q5, Q6 and W8 (specs/formats.md §3 and §4).

The canonical encoder works on tiles of a few hundred thousand values, so its temporaries stay in the cache and never
grow with the matrix. It is independent of numpy's error state and, because zero and finiteness are judged on the bits,
of flush-to-zero modes too.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import EncodeError
from ninfer_format.formats import ROW_SPLIT_COLUMNS, NumericFormat
from ninfer_format.geometry import up

TILE_VALUES = 1 << 18
"""Values per tile: 1 MiB of float32. Measured on one core: 2^14 runs at half this speed, 2^17 to 2^20 are equal."""
MIN_SUBNORMAL = 0x0001
"""binary16 word 2^-24: the scale of a nonzero group whose own scale rounds to zero."""
SCALE_INFINITY = 0x7C00
"""First binary16 word that is not a legal scale; 0x0000..0x7bff are legal."""

Number = TypeVar("Number", bound=np.generic)

_ABS = np.int32(0x7FFF_FFFF)
_FLOAT32_INFINITY = 0x7F80_0000


class GroupedWords(NamedTuple):
    """Codes int8 [N, K] and scale words uint16 (binary16 bits) [N, groups]."""

    codes: npt.NDArray[np.int8]
    scales: npt.NDArray[np.uint16]


class Tile(NamedTuple):
    """A block of whole groups: matrix rows and, of each, a range of groups."""

    rows: slice
    groups: slice

    def columns(self, fmt: NumericFormat) -> slice:
        """Columns of the tile in the padded matrix."""
        return slice(self.groups.start * fmt.group, self.groups.stop * fmt.group)


def groups_of(k: int, fmt: NumericFormat) -> int:
    """Logical groups per row, ceil(K / G)."""
    return -(-k // fmt.group)


def tiles(n_rows: int, groups_per_row: int, fmt: NumericFormat, budget: int = TILE_VALUES) -> Iterator[Tile]:
    """Cover [n_rows, groups_per_row] with tiles of about ``budget`` values: whole rows, or parts of one long row."""
    per_tile = max(1, budget // fmt.group)
    rows, groups = max(1, per_tile // groups_per_row), min(per_tile, groups_per_row)
    for row in range(0, n_rows, rows):
        for group in range(0, groups_per_row, groups):
            yield Tile(slice(row, min(row + rows, n_rows)), slice(group, min(group + groups, groups_per_row)))


def quantize_tile(
    values: npt.NDArray[np.float32],
    fmt: NumericFormat,
    codes: npt.NDArray[np.int8],
    scales: npt.NDArray[np.uint16],
    first_row: int = 0,
    first_column: int = 0,
) -> None:
    """Canonical encoder MAXABS_F16_RECIP_RNE_V1 on whole groups.

    ``values`` float32 [rows, groups, G] (padding lanes zero) → ``codes`` int8 of the same shape and ``scales`` uint16
    [rows, groups], both written in place. ``first_row`` and ``first_column`` place the tile in error messages.
    Raises EncodeError for NaN, infinity, and a group whose scale exceeds binary16.
    """
    work = np.bitwise_and(values.view(np.int32), _ABS)
    # Absolute float bits order like integers: one integer maximum finds amax, NaN and infinity, and twice as fast.
    amax_bits = work.max(axis=-1)
    if amax_bits.size and int(amax_bits.max()) >= _FLOAT32_INFINITY:
        _refuse_non_finite(values, first_row, first_column)
    nonzero = amax_bits != 0
    with np.errstate(all="ignore"):
        raw = amax_bits.view(np.float32) / np.float32(fmt.qmax)
        words = raw.astype(np.float16).view(np.uint16)
        words[nonzero & (words == 0)] = MIN_SUBNORMAL
        if words.size and int(words.max()) >= SCALE_INFINITY:
            _refuse_overflow(words, amax_bits.view(np.float32), fmt, first_row, first_column)
        inverse = np.float32(1) / words.view(np.float16).astype(np.float32)
        inverse[~nonzero] = 0
        scaled = np.multiply(values, inverse[..., np.newaxis], out=work.view(np.float32))
        np.rint(scaled, out=scaled)
        np.clip(scaled, np.float32(fmt.qmin), np.float32(fmt.qmax), out=scaled)
        np.copyto(codes, scaled, casting="unsafe")
    scales[...] = words


def quantize_rows(values: npt.NDArray[np.float32], fmt: NumericFormat) -> GroupedWords:
    """Canonical encoder with the padding of the row-split layout: codes [N, K_pad], scales [N, K_pad / G].

    ``values`` float32 [N, K]. Padding lanes get code 0, padding groups scale word 0x0000. EncodeError as
    ``quantize_tile``.
    """
    n_rows, k = values.shape
    k_pad = up(k, ROW_SPLIT_COLUMNS)
    groups = k_pad // fmt.group
    codes = np.empty((n_rows, groups, fmt.group), np.int8)
    scales = np.empty((n_rows, groups), np.uint16)
    for tile in tiles(n_rows, groups, fmt):
        columns = tile.columns(fmt)
        part = pad_to_groups(values[tile.rows, columns], tile, fmt)
        quantize_tile(part, fmt, codes[tile], scales[tile], tile.rows.start, columns.start)
    return GroupedWords(codes.reshape(n_rows, k_pad), scales)


def quantize_groups(values: npt.NDArray[np.float32], fmt: NumericFormat) -> GroupedWords:
    """Canonical encoder: float32 [N, K] → codes int8 [N, K] and scale words uint16 [N, ceil(K / G)].

    Raises EncodeError for NaN, infinity, and a group whose scale exceeds binary16.
    """
    k = values.shape[1]
    codes, scales = quantize_rows(values, fmt)
    return GroupedWords(codes[:, :k], scales[:, : groups_of(k, fmt)])


def dequantize_tile(codes: npt.NDArray[np.int8], scales: npt.NDArray[np.uint16], out: npt.NDArray[np.float32]) -> None:
    """``out`` = float32(scale) * float32(code), exact; codes and out [rows, groups, G], scales [rows, groups]."""
    multipliers = scales.view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        np.multiply(codes, multipliers[..., np.newaxis], out=out)


def dequantize(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.uint16], fmt: NumericFormat
) -> npt.NDArray[np.float32]:
    """Decoded float32 [N, K] of codes [N, K] and scale words [N, at least ceil(K / G)].

    The product of a binary16 and an integer of up to 8 bits is exact in float32; illegal scales decode as IEEE has it.
    """
    n_rows, k = codes.shape
    out = np.empty((n_rows, k), np.float32)
    whole = k // fmt.group
    columns = whole * fmt.group
    words = np.ascontiguousarray(scales, np.uint16)
    if whole:
        for tile in tiles(n_rows, whole, fmt):
            part = pad_to_groups(codes[tile.rows, tile.columns(fmt)], tile, fmt)
            product = np.empty(part.shape, np.float32)
            dequantize_tile(part, words[tile], product)
            out[tile.rows, tile.columns(fmt)] = product.reshape(part.shape[0], -1)
    if columns < k:
        multipliers = words[:, whole].view(np.float16).astype(np.float32)
        with np.errstate(all="ignore"):
            np.multiply(codes[:, columns:], multipliers[:, np.newaxis], out=out[:, columns:])
    return out


def pad_to_groups(part: npt.NDArray[Number], tile: Tile, fmt: NumericFormat) -> npt.NDArray[Number]:
    """``part`` [rows, logical columns of the tile] as C-contiguous [rows, groups, G], zero in the padding lanes.

    A view where the tile has no padding and ``part`` is contiguous.
    """
    n_groups = tile.groups.stop - tile.groups.start
    width = n_groups * fmt.group
    if part.shape[1] < width:
        padded = np.zeros((part.shape[0], width), part.dtype)
        padded[:, : part.shape[1]] = part
        part = padded
    return np.ascontiguousarray(part).reshape(part.shape[0], n_groups, fmt.group)


def _refuse_non_finite(values: npt.NDArray[np.float32], first_row: int, first_column: int) -> None:
    row, column = _first(~np.isfinite(values.reshape(values.shape[0], -1)))
    found = values.reshape(values.shape[0], -1)[row, column]
    raise EncodeError(
        f"value at row {first_row + row}, column {first_column + column} is {found}; grouped formats hold finite "
        "values only, so the source is damaged or was never valid"
    )


def _refuse_overflow(
    words: npt.NDArray[np.uint16],
    amax: npt.NDArray[np.float32],
    fmt: NumericFormat,
    first_row: int,
    first_column: int,
) -> None:
    row, group = _first(words >= SCALE_INFINITY)
    raise EncodeError(
        f"magnitude {amax[row, group]} in row {first_row + row}, group {first_column // fmt.group + group} needs a "
        f"scale beyond binary16; {fmt.name} holds magnitudes below {65520 * fmt.qmax}; store this matrix as BF16"
    )


def _first(mask: npt.NDArray[np.bool_]) -> tuple[int, int]:
    row, column = np.unravel_index(int(mask.argmax()), mask.shape)
    return int(row), int(column)
