"""``blockscale-k16-m128x4-v1``: packed NVFP4 codes, swizzled block scales, one divisor (specs/layouts.md §3)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import EncodeError
from ninfer_format.formats import BLOCKSCALE, NumericFormat, blockscale_planes, check_signature
from ninfer_format.geometry import up
from ninfer_format.layouts.words import Bytes, Divisor, RowIndex, Words, assemble, native_float32
from ninfer_format.numeric import nvfp4

ROW_TILE = 128
GROUP_TILE = 4
_TILE_VALUES = 1 << 18


class PlaneViews(NamedTuple):
    """codes uint8 [N, K/2]; scales uint8 [N/128, K/64, 32, 4, 4] as stored; divisor float32 [1]. All views."""

    codes: Bytes
    scales: Bytes
    divisor: npt.NDArray[np.float32]


def plane_views(data: Bytes, shape: Sequence[int]) -> PlaneViews:
    """The parts of a payload (uint8) of a matrix ``shape`` = [N, K], sharing its memory."""
    n, k = shape
    planes = blockscale_planes(shape)
    return PlaneViews(
        data[: planes.code_bytes].reshape(n, k // 2),
        data[planes.scale_offset : planes.divisor_offset].reshape(n // ROW_TILE, k // 64, 32, 4, GROUP_TILE),
        data[planes.divisor_offset : planes.total_bytes].view("<f4"),
    )


def natural_scales(tiled: Bytes) -> Bytes:
    """Scales uint8 [N, K/16] in natural order, from stored tiles [N/128, K/64, 32, 4, 4]."""
    return tiled.transpose(0, 3, 2, 1, 4).reshape(tiled.shape[0] * ROW_TILE, -1)


def tile_scales(natural: Bytes, tiled: Bytes) -> None:
    """Write natural scales uint8 [N, K/16] into stored tiles [N/128, K/64, 32, 4, 4]."""
    row_tiles, group_tiles = tiled.shape[:2]
    tiled[...] = natural.reshape(row_tiles, 4, 32, group_tiles, GROUP_TILE).transpose(0, 3, 2, 1, 4)


def gather_scales(tiled: Bytes, rows: npt.NDArray[np.intp]) -> Bytes:
    """Scales uint8 [len(rows), K/16] of chosen rows, in natural order."""
    within = rows % ROW_TILE
    return tiled[rows // ROW_TILE, :, within % 32, within // 32, :].reshape(rows.size, -1)


def scale_place(position: int, k: int) -> tuple[int, int]:
    """(row, group) of the byte at ``position`` in the stored scale plane of a matrix with K columns."""
    tile, inside = divmod(position, ROW_TILE * GROUP_TILE)
    row_tile, group_tile = divmod(tile, k // 64)
    lane, rest = divmod(inside, 16)
    return row_tile * ROW_TILE + (rest // GROUP_TILE) * 32 + lane, group_tile * GROUP_TILE + rest % GROUP_TILE


def encode(values: npt.NDArray[Any], fmt: NumericFormat) -> bytes:
    """Always EncodeError: the words of this layout are copied from a prepacked source, never made from floats here."""
    raise EncodeError(
        f"{fmt.name} words come from a prepacked source, found {values.dtype} {list(values.shape)} values; "
        "give codes, scales and divisor to pack_tensor"
    )


def pack(codes: npt.NDArray[Any], scales: npt.NDArray[Any] | None, divisor: Divisor, fmt: NumericFormat) -> bytes:
    """Payload of codes (packed pairs [N, K/2] or one per byte [N, K]), scales [N, K/16] and the divisor.

    EncodeError names the first illegal word.
    """
    if scales is None or scales.ndim != 2 or codes.ndim != 2:
        raise EncodeError(f"{fmt.name} is packed from codes and scales of rank 2, and a divisor")
    n, k = scales.shape[0], scales.shape[1] * nvfp4.BLOCK
    check_signature(fmt.name, BLOCKSCALE, (n, k))
    if codes.shape not in ((n, k // 2), (n, k)):
        raise EncodeError(
            f"scales {list(scales.shape)} belong to codes [{n}, {k // 2}] (packed) or [{n}, {k}], "
            f"found {list(codes.shape)}"
        )
    if codes.dtype != np.uint8 or scales.dtype != np.uint8:
        raise EncodeError(f"{fmt.name} codes and scales are uint8, found {codes.dtype} and {scales.dtype}")
    packed = codes.shape[1] == k // 2
    if not packed and int(codes.max()) > 15:
        row, column = np.argwhere(codes > 15)[0]
        raise EncodeError(f"code {codes[row, column]:#04x} at row {row}, column {column} has more than 4 bits")
    if int(scales.max()) > nvfp4.MAX_SCALE:
        row, group = np.argwhere(scales > nvfp4.MAX_SCALE)[0]
        raise EncodeError(
            f"block scale {scales[row, group]:#04x} at row {row}, group {group} is NaN or negative; "
            "legal words are 0x00 to 0x7e"
        )
    word = nvfp4.checked_divisor(divisor)

    def fill(payload: Bytes) -> None:
        parts = plane_views(payload, (n, k))
        parts.codes[...] = codes if packed else nvfp4.pack_nibbles(codes)
        tile_scales(scales, parts.scales)
        parts.divisor[0] = word

    return assemble(blockscale_planes((n, k)).total_bytes, fill)


def unpack(data: Bytes, fmt: NumericFormat, shape: Sequence[int]) -> Words:
    """Packed codes (a read-only view), scales in natural order (a new array) and the divisor."""
    parts = plane_views(data, shape)
    return Words(parts.codes, natural_scales(parts.scales), native_float32(parts.divisor))


def decode(data: Bytes, fmt: NumericFormat, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """Values float32 [N, K]: the exact product of code and scale, divided and rounded once."""
    return decode_rows(data, fmt, shape, slice(0, shape[0]))


def decode_rows(data: Bytes, fmt: NumericFormat, shape: Sequence[int], rows: RowIndex) -> npt.NDArray[np.float32]:
    """Values float32 [len(rows), K] of chosen rows; only their bytes are read."""
    parts = plane_views(data, shape)
    divisor = native_float32(parts.divisor)
    numbers = np.arange(shape[0])[rows] if isinstance(rows, slice) else rows
    out = np.empty((numbers.size, shape[1]), np.float32)
    step = up(max(1, _TILE_VALUES // shape[1]), ROW_TILE)
    for first in range(0, numbers.size, step):
        some = numbers[first : first + step]
        nvfp4.dequantize(parts.codes[some], gather_scales(parts.scales, some), divisor, out[first : first + step])
    return out
