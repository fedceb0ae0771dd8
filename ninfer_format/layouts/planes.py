"""Planes of ``row-split-k128-v1`` and the bits inside a group (specs/layouts.md §2).

Codes travel as whole groups, int8 [rows, groups, G]; bytes as base [rows, groups, 32] and high [rows, groups, H].
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ninfer_format.formats import NumericFormat, RowSplitPlanes
from ninfer_format.layouts.words import Bytes


class PlaneViews(NamedTuple):
    """Planes of a payload as arrays: base [N, groups, 32], high [N, groups, H], scales uint16 [N, groups]."""

    base: Bytes
    high: Bytes
    scales: npt.NDArray[np.uint16]


def plane_views(data: Bytes, planes: RowSplitPlanes) -> PlaneViews:
    """The three planes of a payload (uint8 [planes.total_bytes]) as views that share its memory."""
    n, groups = planes.n_rows, planes.groups_per_row
    base = data[planes.base_offset : planes.base_offset + planes.base_bytes]
    high = data[planes.high_offset : planes.high_offset + planes.high_bytes]
    scales = data[planes.scale_offset : planes.scale_offset + planes.scale_bytes]
    return PlaneViews(
        base.reshape(n, groups, planes.base_bytes_per_group),
        high.reshape(n, groups, planes.high_bytes_per_group),
        scales.view("<u2").reshape(n, groups),
    )


def plane_gaps(planes: RowSplitPlanes) -> tuple[slice, ...]:
    """Byte ranges between the planes, which hold zeros; empty ones left out."""
    base_end, high_end = planes.base_offset + planes.base_bytes, planes.high_offset + planes.high_bytes
    candidates = (slice(base_end, planes.high_offset), slice(high_end, planes.scale_offset))
    return tuple(gap for gap in candidates if gap.start < gap.stop)


def pack_codes(codes: npt.NDArray[np.int8], fmt: NumericFormat, base: Bytes, high: Bytes) -> None:
    """Write C-contiguous ``codes`` into ``base`` and ``high`` (empty for 4 and 8 bits)."""
    if fmt.bits == 8:
        base[...] = codes.view(np.uint8)
        return
    pairs = codes.view("<u2")
    np.copyto(base, (pairs & 0x0F) | ((pairs >> 4) & 0xF0), casting="unsafe")
    if fmt.high_bits:
        field = _HIGH[fmt.high_bits]
        lanes = (codes.view(field.stored) >> 4) & field.mask
        # One multiplication moves the fields of all lanes side by side into the top byte.
        np.copyto(high, (lanes * field.gather) >> field.top, casting="unsafe")


def unpack_codes(base: Bytes, high: Bytes, fmt: NumericFormat) -> npt.NDArray[np.int8]:
    """Codes of ``base`` and ``high``, sign-extended; always a new array."""
    if fmt.bits == 8:
        return base.view(np.int8).copy()
    pairs = base.astype(np.uint16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    codes = pairs.astype("<u2", copy=False).view(np.uint8)
    if fmt.high_bits:
        codes |= np.take(_HIGH[fmt.high_bits].spread, high).view(np.uint8)
    sign = np.uint8(1 << (fmt.bits - 1))
    codes ^= sign
    codes -= sign
    return codes.view(np.int8)


class _HighField(NamedTuple):
    """How the high bits of ``8 / bits`` adjacent codes share one byte."""

    stored: np.dtype[Any]
    mask: np.unsignedinteger[Any]
    gather: np.unsignedinteger[Any]
    top: int
    spread: npt.NDArray[Any]


def _high_field(bits: int) -> _HighField:
    n_lanes = 8 // bits
    word = np.dtype(f"u{n_lanes}")
    field = (1 << bits) - 1
    top = 8 * (n_lanes - 1)
    mask = sum(field << (8 * lane) for lane in range(n_lanes))
    # Lane i sits at bit 8i and belongs at bit top + bits*i: multiply by 2^(top - (8 - bits) * i) for every i.
    gather = sum(1 << (top - (8 - bits) * lane) for lane in range(n_lanes))
    byte = np.arange(256)
    spread = np.stack([((byte >> (bits * lane)) & field) << 4 for lane in range(n_lanes)], axis=1)
    table = spread.astype(np.uint8).view(word).reshape(256)
    table.flags.writeable = False
    return _HighField(word.newbyteorder("<"), word.type(mask), word.type(gather), top, table)


_HIGH: Mapping[int, _HighField] = MappingProxyType({bits: _high_field(bits) for bits in (1, 2)})
