"""The canonical encoder and the row-split layout once more: one value, one bit at a time, in exact rationals.

Written from the specification alone and sharing no code with the product; slow, for small shapes.
"""

from __future__ import annotations

import struct
from fractions import Fraction

# name: bits, group, qmin, qmax
FORMATS = {
    "Q4G64_F16S": (4, 64, -8, 7),
    "Q5G64_F16S": (5, 64, -16, 15),
    "Q6G64_F16S": (6, 64, -32, 31),
    "W8G32_F16S": (8, 32, -127, 127),
}


def round_binary(x: Fraction, precision: int, least_exponent: int, greatest_exponent: int) -> Fraction | None:
    """Nearest value of a binary float type, ties to even; None beyond its range."""
    if x == 0:
        return Fraction(0)
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, least_exponent) - precision + 1)
    rounded = round(x / quantum) * quantum
    return None if abs(rounded) >= Fraction(2) ** (greatest_exponent + 1) else rounded


def f32(x: Fraction) -> Fraction | None:
    return round_binary(x, 24, -126, 127)


def f16(x: Fraction) -> Fraction | None:
    return round_binary(x, 11, -14, 15)


def quantize_group(values: list[float], name: str) -> tuple[list[int], int]:
    """Codes and scale word of one group; ValueError where the encoder refuses."""
    _, _, qmin, qmax = FORMATS[name]
    if any(v != v or v in (float("inf"), float("-inf")) for v in values):
        raise ValueError("not finite")
    exact = [Fraction(v) for v in values]
    amax = max(abs(x) for x in exact)
    if amax == 0:
        return [0] * len(values), 0
    raw = f32(amax / qmax)
    assert raw is not None
    scale = f16(raw)
    if scale is None:
        raise ValueError("scale overflow")
    scale = scale or Fraction(1, 1 << 24)
    inverse = f32(1 / scale)
    assert inverse is not None
    codes = []
    for x in exact:
        product = f32(x * inverse)
        assert product is not None
        codes.append(min(max(round(product), qmin), qmax))
    return codes, struct.unpack("<H", struct.pack("<e", float(scale)))[0]


def pack(codes: list[list[int]], scales: list[list[int]], name: str) -> bytes:
    """Row-split payload of logical codes [N][K] and scale words [N][ceil(K / G)], set bit by bit."""
    bits, group, _, _ = FORMATS[name]
    n, k = len(codes), len(codes[0])
    groups = -(-k // 128) * 128 // group
    high_bits = bits - 4 if bits in (5, 6) else 0
    low_bits = bits - high_bits
    high_offset = -(-n * groups * 32 // 256) * 256
    scale_offset = high_offset + -(-n * groups * group * high_bits // 8 // 256) * 256
    payload = bytearray(scale_offset + n * groups * 2)

    def set_bit(byte: int, bit: int) -> None:
        payload[byte + bit // 8] |= 1 << bit % 8

    for r in range(n):
        for c in range(k):
            g, lane = divmod(c, group)
            word = codes[r][c] % (1 << bits)
            for bit in range(bits):
                if not word >> bit & 1:
                    continue
                if bit < low_bits:
                    set_bit((r * groups + g) * 32, lane * low_bits + bit)
                else:
                    set_bit(high_offset + (r * groups + g) * group * high_bits // 8, lane * high_bits + bit - low_bits)
        for g, word in enumerate(scales[r]):
            struct.pack_into("<H", payload, scale_offset + (r * groups + g) * 2, word)
    return bytes(payload)


def encode(values: list[list[float]], name: str) -> bytes:
    """Payload of a small matrix by the canonical encoder; ValueError where it refuses."""
    group = FORMATS[name][1]
    codes, scales = [], []
    for row in values:
        parts = [quantize_group(row[first : first + group], name) for first in range(0, len(row), group)]
        codes.append([code for part, _ in parts for code in part])
        scales.append([word for _, word in parts])
    return pack(codes, scales, name)
