"""Value rules: each message names object, row, group and byte; one message per rule; strict adds what it says."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest

from ninfer_format.codec import encode_tensor, pack_tensor
from ninfer_format.errors import RegistryError, SignatureError
from ninfer_format.formats import (
    BLOCKSCALE,
    CONTIGUOUS,
    NUMERIC_FORMATS,
    ROW_SPLIT,
    blockscale_planes,
    row_split_planes,
)
from ninfer_format.payload_rules import scan_payload
from tests.format import scalar_codec

GROUPED = list(scalar_codec.FORMATS)
SHAPE = (5, 200)
"""Rows of 200 columns: in every format a partly filled group, and for W8 a group that is padding alone."""


def matrix(name: str) -> bytearray:
    values = np.random.default_rng(7).standard_normal(SHAPE).astype(np.float32)
    return bytearray(encode_tensor(values, name, ROW_SPLIT))


def scan(name: str, payload: bytearray) -> list[str]:
    return scan_payload("text/x", name, ROW_SPLIT, SHAPE, payload)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    "word, kind",
    [(0x8000, "negative zero"), (0xB400, "negative"), (0x7C00, "infinite"), (0x7E01, "NaN"), (0xFFFF, "NaN")],
)
def test_illegal_scale_is_named(name: str, word: int, kind: str) -> None:
    payload, planes = matrix(name), row_split_planes(name, SHAPE)
    byte = planes.scale_offset + (3 * planes.groups_per_row + 1) * 2
    struct.pack_into("<H", payload, byte, word)
    struct.pack_into("<H", payload, byte + 2 * planes.groups_per_row, word)
    expected = f"text/x: row 3, group 1 (byte {byte}): scale word {word:#06x} is {kind}, expected 0x0000 to 0x7bff"
    assert scan(name, payload) == [f"{expected}; 1 more like it"]


@pytest.mark.parametrize("name", GROUPED)
def test_codes_under_a_zero_scale_are_named_in_either_plane(name: str) -> None:
    fmt, planes = NUMERIC_FORMATS[name], row_split_planes(name, SHAPE)
    codes = np.zeros(SHAPE, np.int8)
    scales = np.zeros((SHAPE[0], -(-SHAPE[1] // fmt.group)), np.uint16)
    blank = pack_tensor(codes, scales, None, name, ROW_SPLIT)
    group = 2 * planes.groups_per_row + 1
    places = {group * 32 + 3: fmt.group + 3 * fmt.group // 32}
    if planes.high_bytes:
        per_group = planes.high_bytes_per_group
        places[planes.high_offset + group * per_group + 3] = fmt.group + 3 * fmt.group // per_group
    for byte, column in places.items():
        payload = bytearray(blank)
        payload[byte] = 1
        found = scan(name, payload)
        assert found == [
            f"text/x: row 2, group 1 has scale word 0x0000 but a nonzero code in column {column} (byte {byte}); "
            "expected zero codes"
        ]


def test_every_minus_128_is_counted_and_the_first_named() -> None:
    payload, planes = matrix("W8G32_F16S"), row_split_planes("W8G32_F16S", SHAPE)
    for row, column in ((4, 70), (1, 199), (2, 0)):
        payload[(row * planes.groups_per_row + column // 32) * 32 + column % 32] = 0x80
    byte = (planes.groups_per_row + 199 // 32) * 32 + 199 % 32
    (found,) = scan("W8G32_F16S", payload)
    assert found.startswith(f"text/x: row 1, group 6 (byte {byte}): code byte 0x80 (-128)")
    assert found.endswith("; 2 more like it")


@pytest.mark.parametrize("name", GROUPED)
def test_each_padding_lane_is_watched(name: str) -> None:
    fmt, planes = NUMERIC_FORMATS[name], row_split_planes(name, SHAPE)
    clean = matrix(name)
    for column in range(SHAPE[1], planes.k_pad):
        group, lane = divmod(column, fmt.group)
        index = 4 * planes.groups_per_row + group
        bits: list[tuple[int, int]] = []
        if fmt.bits == 8:
            bits.append((index * 32 + lane, 0))
        else:
            bits.append((index * 32 + lane // 2, 4 * (lane % 2)))
        if fmt.high_bits:
            at = lane * fmt.high_bits
            bits.append((planes.high_offset + index * planes.high_bytes_per_group + at // 8, at % 8))
        for byte, bit in bits:
            payload = bytearray(clean)
            payload[byte] |= 1 << bit
            found = scan(name, payload)
            place = f"text/x: row 4, group {group} (byte {byte})"
            assert len(found) == 1, (column, byte, found)
            assert found[0].startswith(f"{place}: nonzero code in padding column {column}, beyond the 200 columns")


def test_scale_of_a_padding_group_is_zero_and_nothing_else() -> None:
    name, planes = "W8G32_F16S", row_split_planes("W8G32_F16S", SHAPE)
    for word in (0x0001, 0x3C00, 0x8000, 0x7E00):
        payload = matrix(name)
        byte = planes.scale_offset + (2 * planes.groups_per_row + 7) * 2
        struct.pack_into("<H", payload, byte, word)
        assert scan(name, payload) == [
            f"text/x: row 2, group 7 (byte {byte}): scale word {word:#06x} in a padding group, expected 0x0000"
        ]


@pytest.mark.parametrize("name", ["Q5G64_F16S", "Q6G64_F16S"])
def test_each_byte_between_planes_is_watched(name: str) -> None:
    shape = (3, 100)
    planes = row_split_planes(name, shape)
    clean = encode_tensor(np.ones(shape, np.float32), name, ROW_SPLIT)
    gaps = [*range(planes.base_bytes, planes.high_offset)]
    gaps += range(planes.high_offset + planes.high_bytes, planes.scale_offset)
    for byte in gaps:
        payload = bytearray(clean)
        payload[byte] = 0xA5
        assert scan_payload("x", name, ROW_SPLIT, shape, payload) == [
            f"x: byte {byte}: 0xa5 in the gap between planes, expected 0"
        ]


def test_several_broken_rules_give_one_message_each() -> None:
    payload, planes = matrix("W8G32_F16S"), row_split_planes("W8G32_F16S", SHAPE)
    payload[0] = 0x80
    payload[planes.scale_offset] = payload[planes.scale_offset + 1] = 0xFF
    payload[-1] = 1
    assert len(scan("W8G32_F16S", payload)) == 3


def test_nvfp4_scale_is_named_by_row_and_group_and_the_divisor_by_byte() -> None:
    shape = (256, 128)
    parts = blockscale_planes(shape)
    payload = bytearray(
        pack_tensor(np.zeros((256, 64), np.uint8), np.ones((256, 8), np.uint8), np.float32(1), "NVFP4", BLOCKSCALE)
    )
    byte = parts.scale_offset + 1571
    payload[byte] = 0x80
    struct.pack_into("<f", payload, parts.divisor_offset, -1.0)
    assert scan_payload("x", "NVFP4", BLOCKSCALE, shape, payload) == [
        f"x: row 130, group 7 (byte {byte}): block scale 0x80 is negative, expected 0x00 to 0x7e",
        f"x: byte {parts.divisor_offset}: weight scale divisor -1.0, expected finite and greater than 0",
    ]


@pytest.mark.parametrize("value", [0.0, -0.0, -1.5, float("inf"), float("nan")])
def test_input_scale_divisor_is_finite_and_positive(value: float) -> None:
    name = "text/layers/3/mlp/down_projection/input_scale_divisor"
    (found,) = scan_payload(name, "FP32", CONTIGUOUS, (), struct.pack("<f", value))
    assert found.startswith(f"{name}: byte 0: input scale divisor {value}")
    assert scan_payload(name, "FP32", CONTIGUOUS, (), struct.pack("<f", 1e-45)) == []
    assert scan_payload("text/layers/3/gdn/a_log", "FP32", CONTIGUOUS, (), struct.pack("<f", value)) == []
    (found,) = scan_payload(name, "FP32", CONTIGUOUS, (1,), struct.pack("<f", 1.0))
    assert "shape []" in found


def ids(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def test_draft_ids_are_in_range_and_distinct() -> None:
    name = "text/draft_head_token_ids"
    assert scan_payload(name, "I32", CONTIGUOUS, (4,), ids(7, 0, 3, 2**31 - 1)) == []
    assert scan_payload(name, "I32", CONTIGUOUS, (4,), ids(7, 0, 3, 8), vocabulary=9) == []
    assert scan_payload(name, "I32", CONTIGUOUS, (4,), ids(7, 9, 3, -1), vocabulary=9) == [
        f"{name}: row 1 (byte 4): token id 9, expected 0 to 8; 1 more like it"
    ]
    assert scan_payload(name, "I32", CONTIGUOUS, (3,), ids(-5, 1, 2)) == [
        f"{name}: row 0 (byte 0): token id -5, expected 0 or more"
    ]
    assert scan_payload(name, "I32", CONTIGUOUS, (6,), ids(4, 8, 5, 8, 4, 8)) == [
        f"{name}: row 3 (byte 12): token id 8 is already in row 1, expected distinct ids; 2 more like it"
    ]
    assert scan_payload("another/table", "I32", CONTIGUOUS, (2,), ids(-5, -5)) == []


@pytest.mark.parametrize("format, word, size", [("BF16", 0x7F80, 2), ("BF16", 0xFFC1, 2), ("FP32", 0xFF80_0000, 4)])
def test_only_strict_reports_non_finite_direct_words(format: str, word: int, size: int) -> None:
    payload = bytearray(24 * size)
    payload[17 * size : 18 * size] = word.to_bytes(size, "little")
    assert scan_payload("n", format, CONTIGUOUS, (2, 3, 4), payload) == []
    (found,) = scan_payload("n", format, CONTIGUOUS, (2, 3, 4), payload, strict=True)
    assert found == (
        f"n: index [1, 1, 1] (byte {17 * size}): {format} word {word:#0{2 + 2 * size}x} is NaN or infinite, "
        "expected finite weights"
    )
    assert len(scan_payload("n", format, CONTIGUOUS, (), word.to_bytes(size, "little"), strict=True)) == 1


def test_wrong_signature_or_length_is_raised_not_reported() -> None:
    with pytest.raises(RegistryError):
        scan_payload("x", "Q4", ROW_SPLIT, (1, 64), b"")
    with pytest.raises(SignatureError, match="takes 260 bytes, the payload has 0"):
        scan_payload("x", "Q4G64_F16S", ROW_SPLIT, (1, 64), b"")


def test_findings_beyond_the_first_tile_are_placed_correctly() -> None:
    name, shape = "Q4G64_F16S", (9000, 512)
    planes = row_split_planes(name, shape)
    payload = bytearray(encode_tensor(np.ones(shape, np.float32), name, ROW_SPLIT))
    for row in (8761, 8999):
        struct.pack_into("<H", payload, planes.scale_offset + (row * 8 + 5) * 2, 0x7C00)
    (found,) = scan_payload("x", name, ROW_SPLIT, shape, payload)
    assert found.startswith("x: row 8761, group 5 ")
    assert found.endswith("; 1 more like it")


@pytest.mark.parametrize("name", ["Q6G64_F16S", "W8G32_F16S"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_hundred_megabytes_scan_within_a_second(name: str, value: float) -> None:
    shape = (20000, 5120)
    payload = encode_tensor(np.full((1, 5120), value, np.float32), name, ROW_SPLIT)
    planes, one = row_split_planes(name, shape), row_split_planes(name, (1, 5120))
    whole = np.zeros(planes.total_bytes, np.uint8)
    for begin, size, source in (
        (0, planes.base_bytes, payload[: one.base_bytes]),
        (planes.high_offset, planes.high_bytes, payload[one.high_offset : one.high_offset + one.high_bytes]),
        (planes.scale_offset, planes.scale_bytes, payload[one.scale_offset :]),
    ):
        whole[begin : begin + size].reshape(shape[0], -1)[:] = np.frombuffer(source, np.uint8)
    started = time.perf_counter()
    assert scan_payload("x", name, ROW_SPLIT, shape, whole.data) == []
    assert time.perf_counter() - started < 1.0
