"""``row-split-k128-v1``: encode, pack, unpack and decode grouped integer matrices (specs/layouts.md §2)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import EncodeError
from ninfer_format.formats import ROW_SPLIT, ROW_SPLIT_COLUMNS, NumericFormat, check_signature, row_split_planes
from ninfer_format.layouts.planes import PlaneViews, pack_codes, plane_views, unpack_codes
from ninfer_format.layouts.words import Bytes, Divisor, RowIndex, Words, assemble
from ninfer_format.numeric import grouped
from ninfer_format.numeric.exact import exact_float32


def encode(values: npt.NDArray[Any], fmt: NumericFormat) -> bytes:
    """Payload of float32 [N, K] by the canonical encoder; EncodeError for NaN, infinity and scale overflow."""
    planes = row_split_planes(fmt.name, values.shape)

    def fill(payload: Bytes) -> None:
        views = plane_views(payload, planes)
        for tile in grouped.tiles(planes.n_rows, planes.groups_per_row, fmt):
            columns = tile.columns(fmt)
            part = grouped.pad_to_groups(exact_float32(values[tile.rows, columns]), tile, fmt)
            codes = np.empty(part.shape, np.int8)
            grouped.quantize_tile(part, fmt, codes, views.scales[tile], tile.rows.start, columns.start)
            pack_codes(codes, fmt, views.base[tile], views.high[tile])

    return assemble(planes.total_bytes, fill)


def pack(codes: npt.NDArray[Any], scales: npt.NDArray[Any] | None, divisor: Divisor, fmt: NumericFormat) -> bytes:
    """Payload of codes [N, K] or [N, K_pad] and binary16 scale words [N, ceil(K / G)] or [N, K_pad / G].

    EncodeError names the first code out of range, illegal scale, or nonzero code under a zero scale.
    """
    if scales is None or divisor is not None:
        raise EncodeError(f"{fmt.name} is packed from codes and scales, without a divisor")
    check_signature(fmt.name, ROW_SPLIT, codes.shape)
    if codes.dtype.kind not in "iu":
        raise EncodeError(f"{fmt.name} codes are integers, found {codes.dtype}")
    planes = row_split_planes(fmt.name, codes.shape)
    words = _scale_words(codes.shape, scales, fmt)

    def fill(payload: Bytes) -> None:
        views = plane_views(payload, planes)
        views.scales[:, : words.shape[1]] = words
        for tile in grouped.tiles(planes.n_rows, planes.groups_per_row, fmt):
            part = grouped.pad_to_groups(codes[tile.rows, tile.columns(fmt)], tile, fmt)
            _check_codes(part, views.scales[tile], fmt, tile)
            pack_codes(part.astype(np.int8, copy=False), fmt, views.base[tile], views.high[tile])

    return assemble(planes.total_bytes, fill)


def unpack(data: Bytes, fmt: NumericFormat, shape: Sequence[int]) -> Words:
    """Codes int8 [N, K] and scale words uint16 [N, ceil(K / G)], padding left out; new arrays."""
    n, k = shape
    views = plane_views(data, row_split_planes(fmt.name, shape))
    groups = grouped.groups_of(k, fmt)
    codes = np.empty((n, k), np.int8)
    for tile in grouped.tiles(n, groups, fmt):
        part = unpack_codes(views.base[tile], views.high[tile], fmt)
        target = codes[tile.rows, tile.columns(fmt)]
        target[...] = part.reshape(part.shape[0], -1)[:, : target.shape[1]]
    return Words(codes, views.scales[:, :groups].astype(np.uint16), None)


def decode(data: Bytes, fmt: NumericFormat, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """Values float32 [N, K], exact."""
    out = np.empty(tuple(shape), np.float32)
    _decode(plane_views(data, row_split_planes(fmt.name, shape)), fmt, out)
    return out


def decode_rows(data: Bytes, fmt: NumericFormat, shape: Sequence[int], rows: RowIndex) -> npt.NDArray[np.float32]:
    """Values float32 [len(rows), K] of chosen rows; only their bytes are read."""
    views = plane_views(data, row_split_planes(fmt.name, shape))
    if isinstance(rows, slice):
        views = PlaneViews(views.base[rows], views.high[rows], views.scales[rows])
        out = np.empty((views.scales.shape[0], shape[1]), np.float32)
        _decode(views, fmt, out)
        return out
    out = np.empty((rows.size, shape[1]), np.float32)
    step = max(1, grouped.TILE_VALUES // shape[1])
    for first in range(0, rows.size, step):
        some = rows[first : first + step]
        _decode(PlaneViews(views.base[some], views.high[some], views.scales[some]), fmt, out[first : first + step])
    return out


def gather(data: Bytes, fmt: NumericFormat, shape: Sequence[int], rows: RowIndex, n_rows: int) -> bytes:
    """Payload of chosen rows as a matrix [n_rows, K] of their own: row runs copied per plane, nothing recoded."""
    source = plane_views(data, row_split_planes(fmt.name, shape))
    planes = row_split_planes(fmt.name, (n_rows, shape[1]))

    def fill(payload: Bytes) -> None:
        target = plane_views(payload, planes)
        for name in PlaneViews._fields:
            parent: npt.NDArray[Any] = getattr(source, name)
            own: npt.NDArray[Any] = getattr(target, name)
            if isinstance(rows, slice):
                own[...] = parent[rows]
            else:
                np.take(parent, rows, axis=0, out=own, mode="clip")  # rows are checked; "raise" would buffer `own`

    return assemble(planes.total_bytes, fill)


def _decode(views: PlaneViews, fmt: NumericFormat, out: npt.NDArray[np.float32]) -> None:
    """Fill ``out`` [N, K] from planes of the same rows."""
    n, k = out.shape
    if not n:
        return
    for tile in grouped.tiles(n, grouped.groups_of(k, fmt), fmt):
        codes = unpack_codes(views.base[tile], views.high[tile], fmt)
        scales = views.scales[tile].astype(np.uint16)
        target = out[tile.rows, tile.columns(fmt)]
        if target.size == codes.size and target.flags.c_contiguous:
            grouped.dequantize_tile(codes, scales, target.reshape(codes.shape))
        else:
            product = np.empty(codes.shape, np.float32)
            grouped.dequantize_tile(codes, scales, product)
            target[...] = product.reshape(target.shape[0], -1)[:, : target.shape[1]]


def _scale_words(shape: Sequence[int], scales: npt.NDArray[Any], fmt: NumericFormat) -> npt.NDArray[np.uint16]:
    """Scale words as uint16 after checking their shape against the codes' and the legality of every word."""
    n, k = shape
    if scales.dtype not in (np.uint16, np.float16):
        raise EncodeError(f"{fmt.name} scales are binary16 words (uint16 or float16), found {scales.dtype}")
    planes = row_split_planes(fmt.name, shape)
    # Padded codes do not say how many columns are logical: any count that pads to the same width is possible.
    fewest = grouped.groups_of(k if k < planes.k_pad else k - ROW_SPLIT_COLUMNS + 1, fmt)
    if scales.ndim != 2 or scales.shape[0] != n or not fewest <= scales.shape[1] <= planes.groups_per_row:
        raise EncodeError(
            f"{fmt.name} codes {list(shape)} take scales [{n}, {grouped.groups_of(k, fmt)}], "
            f"or [{n}, {planes.groups_per_row}] with padding; found {list(scales.shape)}"
        )
    words: npt.NDArray[np.uint16] = np.ascontiguousarray(scales).view(np.uint16)
    if int(words.max()) >= grouped.SCALE_INFINITY:
        row, group = np.argwhere(words >= grouped.SCALE_INFINITY)[0]
        raise EncodeError(
            f"scale word {words[row, group]:#06x} at row {row}, group {group} is negative, infinite or NaN; "
            "legal words are 0x0000 to 0x7bff"
        )
    return words


def _check_codes(
    codes: npt.NDArray[Any], scales: npt.NDArray[np.uint16], fmt: NumericFormat, tile: grouped.Tile
) -> None:
    """Code range, and zero codes under a zero scale; codes [rows, groups, G], scales [rows, groups]."""
    outside = int(codes.min()) < fmt.qmin or int(codes.max()) > fmt.qmax
    under_zero = (scales == 0) & codes.any(axis=-1)
    if not outside and not under_zero.any():
        return
    bad = (codes < fmt.qmin) | (codes > fmt.qmax) if outside else (codes != 0) & under_zero[..., np.newaxis]
    row, group, lane = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    found = f"code {codes[row, group, lane]}"
    place = f"row {tile.rows.start + row}, column {(tile.groups.start + group) * fmt.group + lane}"
    if outside:
        raise EncodeError(f"{found} at {place}: {fmt.name} holds {fmt.qmin} to {fmt.qmax}")
    raise EncodeError(f"{found} at {place} lies under scale word 0x0000, where every code is 0")
