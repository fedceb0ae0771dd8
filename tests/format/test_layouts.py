"""Byte positions: planes, bits inside a group, the NVFP4 swizzle, against formulas written out one by one."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ninfer_format.codec import pack_tensor, unpack_tensor
from ninfer_format.formats import (
    BLOCKSCALE,
    NUMERIC_FORMATS,
    ROW_SPLIT,
    blockscale_planes,
    encoded_size,
    row_split_planes,
)
from ninfer_format.layouts import blockscale, planes
from tests.format import scalar_codec

GROUPED = list(scalar_codec.FORMATS)
COLUMNS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("k", COLUMNS)
def test_bits_lie_where_the_formula_puts_them(name: str, k: int, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[name]
    rng = np.random.default_rng(fresh_seed)
    codes = rng.integers(fmt.qmin, fmt.qmax + 1, (3, k)).astype(np.int8)
    scales = rng.integers(1, 0x7C00, (3, -(-k // fmt.group))).astype(np.uint16)
    payload = pack_tensor(codes, scales, None, name, ROW_SPLIT)
    assert payload == scalar_codec.pack(codes.tolist(), scales.tolist(), name)
    assert len(payload) == encoded_size(name, ROW_SPLIT, (3, k))


@pytest.mark.parametrize("name", GROUPED)
def test_each_code_in_each_lane_survives_alone(name: str) -> None:
    fmt = NUMERIC_FORMATS[name]
    values = np.arange(fmt.qmin, fmt.qmax + 1)
    codes = np.zeros((values.size * fmt.group, 1, fmt.group), np.int8)
    codes[np.arange(codes.shape[0]), 0, np.tile(np.arange(fmt.group), values.size)] = np.repeat(values, fmt.group)
    base = np.empty((codes.shape[0], 1, 32), np.uint8)
    high = np.empty((codes.shape[0], 1, fmt.group * fmt.high_bits // 8), np.uint8)
    planes.pack_codes(codes, fmt, base, high)
    assert (planes.unpack_codes(base, high, fmt) == codes).all()


@pytest.mark.parametrize("name", GROUPED)
def test_every_byte_pattern_is_a_pattern_of_codes(name: str, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[name]
    rng = np.random.default_rng(fresh_seed)
    base = rng.integers(0, 256, (500, 2, 32)).astype(np.uint8)
    high = rng.integers(0, 256, (500, 2, fmt.group * fmt.high_bits // 8)).astype(np.uint8)
    codes = planes.unpack_codes(base, high, fmt)
    again, again_high = np.empty_like(base), np.empty_like(high)
    planes.pack_codes(codes, fmt, again, again_high)
    assert (again == base).all()
    assert (again_high == high).all()
    least = -(1 << (fmt.bits - 1))
    assert least <= codes.min() <= codes.max() < -least


@pytest.mark.parametrize("name", GROUPED)
def test_bytes_between_planes_are_zero_and_listed_as_gaps(name: str) -> None:
    fmt = NUMERIC_FORMATS[name]
    codes = np.full((3, 64), fmt.qmax, np.int8)
    payload = pack_tensor(codes, np.full((3, 64 // fmt.group), 0x3C00, np.uint16), None, name, ROW_SPLIT)
    geometry = row_split_planes(name, (3, 64))
    used = {*range(geometry.base_bytes)}
    used |= {*range(geometry.high_offset, geometry.high_offset + geometry.high_bytes)}
    used |= {*range(geometry.scale_offset, geometry.total_bytes)}
    gaps = {byte for gap in planes.plane_gaps(geometry) for byte in range(gap.start, gap.stop)}
    assert gaps == {*range(geometry.total_bytes)} - used
    assert gaps
    assert not any(payload[byte] for byte in gaps)


def scale_position(n: int, g: int, k: int) -> int:
    return ((n // 128) * (k // 64) + g // 4) * 512 + (n % 32) * 16 + ((n % 128) // 32) * 4 + g % 4


@pytest.mark.parametrize("n, k", [(128, 64), (256, 64), (128, 192), (384, 320)])
def test_nvfp4_bytes_lie_where_the_formulas_put_them(n: int, k: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    nibbles = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales = rng.integers(0, 127, (n, k // 16)).astype(np.uint8)
    payload = pack_tensor(nibbles, scales, np.float32(3.25), "NVFP4", BLOCKSCALE)
    parts = blockscale_planes((n, k))
    expected = bytearray(parts.total_bytes)
    for row in range(n):
        for column in range(k):
            expected[row * k // 2 + column // 2] |= int(nibbles[row, column]) << 4 * (column % 2)
        for group in range(k // 16):
            position = scale_position(row, group, k)
            expected[parts.scale_offset + position] = scales[row, group]
            assert blockscale.scale_place(position, k) == (row, group)
    struct.pack_into("<f", expected, parts.divisor_offset, 3.25)
    assert payload == bytes(expected)
    words = unpack_tensor(payload, "NVFP4", BLOCKSCALE, (n, k))
    assert words.scales is not None
    assert (words.scales == scales).all()
    rows = rng.integers(0, n, 50)
    tiled = blockscale.plane_views(np.frombuffer(payload, np.uint8), (n, k)).scales
    assert (blockscale.gather_scales(tiled, rows) == scales[rows]).all()
