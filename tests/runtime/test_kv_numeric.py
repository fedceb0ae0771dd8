"""INT8-G64, FP6-G64 and the rotation against slow, separate definitions, bit for bit, in numpy and in torch."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ninfer_format.errors import UsageError
from ninfer_runtime.backends.kv_numeric import (
    check_head_dim,
    decode_fp6,
    decode_int8,
    encode_fp6,
    encode_int8,
    fp6_values,
    head_bytes,
    pack_fp6,
    rotate,
    token_bytes,
    unpack_fp6,
)
from ninfer_runtime.backends.reference.kv_formats import Fp6, Int8, rotate_head
from ninfer_runtime.config import KvStorage

Floats = NDArray[np.float32]
CPU = torch.device("cpu")
FP6_MAGNITUDES = [Fraction(m, 16) for m in range(4)] + [
    Fraction(2) ** (e - 3) * (1 + Fraction(m, 4)) for e in range(1, 7) for m in range(4)
]
"""Code → magnitude of the 28 codes that are written, straight from the definition."""
CODECS: list[tuple[Callable[[Floats], tuple[NDArray[Any], NDArray[Any]]], Callable[[Any, Any], Floats]]]
CODECS = [(encode_int8, decode_int8), (encode_fp6, decode_fp6)]


def half(x: float) -> float:
    """The nearest float16, ties to even, by the standard library; infinity beyond its range."""
    try:
        return float(struct.unpack("<e", struct.pack("<e", x))[0])
    except OverflowError:
        return float("inf")


def scaled_group(group: Floats, largest: int) -> tuple[float, list[float]]:
    """(scale, x · (1 / scale)) of 64 dims, every step rounded to float32."""
    scale = half(float(np.float32(max(abs(float(x)) for x in group)) / np.float32(largest)))
    inverse = np.float32(0) if scale == 0 else np.float32(1) / np.float32(scale)
    return scale, [float(np.float32(x) * inverse) for x in group]


def slow_int8(group: Floats) -> tuple[float, list[int]]:
    """One group by Python's own rounding, which takes ties to even."""
    scale, values = scaled_group(group, 127)
    return scale, [max(-127, min(127, round(value))) for value in values]


def slow_fp6(group: Floats) -> tuple[float, list[int]]:
    """One group by search through all magnitudes in exact arithmetic."""
    scale, values = scaled_group(group, 14)
    codes = []
    for value in values:
        distance = [abs(Fraction(abs(value)) - magnitude) for magnitude in FP6_MAGNITUDES]
        nearest = [code for code, d in enumerate(distance) if d == min(distance)]
        code = next((code for code in nearest if code % 2 == 0), nearest[0])
        codes.append(code | (0x20 if value < 0 and code else 0))
    return scale, codes


def heads(seed: int, n: int = 12, dim: int = 256) -> Floats:
    """Groups of every magnitude a float16 scale can and cannot hold, with zeros, both signs of zero and outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim)) * np.exp2(rng.integers(-40, 20, (n, 1)))
    x[0, :64], x[1, 64:128], x[2, 3] = 0.0, -0.0, 1e4
    x[3] = np.round(x[3] * 4) / 4
    return x.astype(np.float32)


def test_int8_codes_and_scales_are_those_of_the_slow_encoder(fresh_seed: int) -> None:
    x = heads(fresh_seed)
    codes, scales = encode_int8(x)
    for row, group in np.ndindex(len(x), 4):
        part = slice(64 * group, 64 * group + 64)
        scale, expected = slow_int8(x[row, part])
        assert float(scales[row, group]) == scale
        assert codes[row, part].tolist() == expected
    np.testing.assert_array_equal(
        decode_int8(codes, scales), codes.astype(np.float32) * np.repeat(scales.astype(np.float32), 64, axis=-1)
    )


def test_fp6_codes_and_scales_are_those_of_the_slow_encoder(fresh_seed: int) -> None:
    x = heads(fresh_seed)
    codes, scales = encode_fp6(x)
    for row, group in np.ndindex(len(x), 4):
        part = slice(64 * group, 64 * group + 64)
        scale, expected = slow_fp6(x[row, part])
        assert float(scales[row, group]) == scale
        assert codes[row, part].tolist() == expected


def test_every_fp6_code_has_its_value_and_is_written_for_it() -> None:
    values = fp6_values()
    magnitudes = [float(m) for m in FP6_MAGNITUDES] + [14.0] * 4
    assert values.tolist() == magnitudes + [-m for m in magnitudes]
    group = np.zeros(64, np.float32)
    group[: len(values)] = values
    codes, scales = encode_fp6(group)
    assert scales.tolist() == [1.0]
    canonical = [*range(0x1C), *[0x1B] * 4, 0, *range(0x21, 0x3C), *[0x3B] * 4]
    assert codes.tolist() == canonical
    np.testing.assert_array_equal(decode_fp6(codes, scales), group)


def test_fp6_ties_go_to_the_even_mantissa_and_large_magnitudes_to_the_last_code() -> None:
    middles = [float((a + b) / 2) for a, b in itertools.pairwise(FP6_MAGNITUDES)]
    group = np.zeros(64, np.float32)
    group[: len(middles)], group[-1] = middles, 14.0
    codes = encode_fp6(group)[0]
    assert codes[: len(middles)].tolist() == [code + code % 2 for code in range(len(middles))]
    just = np.zeros(64, np.float32)
    just[:4] = [14.0, 13.0, np.nextafter(np.float32(13), np.float32(14)), -14.0]
    assert encode_fp6(just)[0][:4].tolist() == [0x1B, 0x1A, 0x1B, 0x3B]
    rounded_down = np.full(64, 14 * (1 + 2**-12), np.float32)  # its scale rounds to 1, so that 14.003 is encoded
    codes, scales = encode_fp6(rounded_down)
    assert (set(codes.tolist()), scales.tolist()) == ({0x1B}, [1.0])


def test_int8_ties_go_to_even_and_codes_stay_within_127() -> None:
    group = np.zeros(64, np.float32)
    group[:6] = [127.0, 0.5, 1.5, -0.5, -2.5, 126.5]
    assert encode_int8(group)[0][:6].tolist() == [127, 0, 2, 0, -2, 126]
    tiny = np.full(
        64, 127 * 1.4 * 2.0**-24, np.float32
    )  # the smallest float16 is the nearest scale, 178 of it are meant
    codes, scales = encode_int8(tiny)
    assert (set(codes.tolist()), scales.tolist()) == ({127}, [2.0**-24])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_with_a_value_that_is_not_finite_decodes_to_nan_and_spares_the_others(bad: float) -> None:
    x = np.ones(256, np.float32)
    x[70] = bad
    for encode, decode in CODECS:
        codes, scales = encode(x)
        decoded = decode(codes, scales)
        assert codes[70] == 0
        assert np.isnan(decoded[64:128]).all()
        assert np.isfinite(np.delete(decoded, slice(64, 128))).all()


def test_groups_of_zeros_have_scale_and_codes_zero() -> None:
    for zero in (0.0, -0.0, 1e-12):
        for encode in (encode_int8, encode_fp6):
            codes, scales = encode(np.full(128, zero, np.float32))
            assert not codes.any()
            assert scales.tolist() == [0.0, 0.0]


def test_packed_fp6_is_one_bit_stream_with_the_lowest_bit_first(fresh_seed: int) -> None:
    codes = np.random.default_rng(fresh_seed).integers(0, 64, (3, 256)).astype(np.uint8)
    packed = pack_fp6(codes)
    assert packed.shape == (3, 192)
    for row, stored in zip(codes, packed, strict=True):
        stream = sum(int(code) << 6 * i for i, code in enumerate(row))
        assert stored.tobytes() == stream.to_bytes(192, "little")
    np.testing.assert_array_equal(unpack_fp6(packed), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_stores_the_same_bits_as_numpy(dtype: torch.dtype, fresh_seed: int) -> None:
    x = torch.from_numpy(heads(fresh_seed)).to(dtype)
    x[5, 9], x[6, 100] = torch.nan, torch.inf
    plain = x.float().numpy()
    codes, scales = encode_int8(plain)
    stored = Int8().encode(x)
    np.testing.assert_array_equal(stored[0].numpy(), codes)
    np.testing.assert_array_equal(stored[1].numpy().view(np.uint16), scales.view(np.uint16))
    np.testing.assert_array_equal(Int8().decode(stored).numpy(), decode_int8(codes, scales))
    fp6 = Fp6(CPU)
    minifloats, scales = encode_fp6(plain)
    stored = fp6.encode(x)
    np.testing.assert_array_equal(stored[0].numpy(), pack_fp6(minifloats))
    np.testing.assert_array_equal(stored[1].numpy().view(np.uint16), scales.view(np.uint16))
    np.testing.assert_array_equal(fp6.decode(stored).numpy(), decode_fp6(minifloats, scales))


def sylvester(dim: int) -> NDArray[np.float64]:
    """H of the given order: H_1 = 1, H_2n = [[H, H], [H, -H]]."""
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rotation_is_the_scaled_sylvester_matrix_and_its_own_inverse(dim: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    q, k = (rng.standard_normal((5, dim)).astype(np.float32) for _ in range(2))
    expected = q @ (sylvester(dim) / np.sqrt(dim))
    np.testing.assert_allclose(rotate(q), expected, atol=4e-6)
    np.testing.assert_allclose(rotate(rotate(q)), q, atol=4e-6)
    scores = (rotate(q).astype(np.float64) * rotate(k)).sum(-1)
    np.testing.assert_allclose(scores, (q.astype(np.float64) * k).sum(-1), atol=1e-4)
    np.testing.assert_array_equal(rotate_head(torch.from_numpy(q)).numpy(), rotate(q))


def test_rotation_by_basis_vectors_gives_the_columns_exactly() -> None:
    np.testing.assert_array_equal(rotate(np.eye(256, dtype=np.float32)), (sylvester(256) / 16).astype(np.float32))


@pytest.mark.parametrize("storage", ["int8", "fp6"])
def test_rotation_lowers_the_errors_of_scores_on_outlier_channels(storage: KvStorage, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    query, keys = (rng.standard_normal((200, 256)).astype(np.float32) for _ in range(2))
    channels = rng.choice(256, 8, replace=False)
    query[:, channels] *= 10
    keys[:, channels] *= 10
    exact = query.astype(np.float64) @ keys.T

    def error(turn: Callable[[Floats], Floats]) -> float:
        turned = turn(keys)
        back = decode_int8(*encode_int8(turned)) if storage == "int8" else decode_fp6(*encode_fp6(turned))
        return float(np.sqrt(np.mean((turn(query).astype(np.float64) @ back.T - exact) ** 2)))

    assert error(rotate) < 0.75 * error(lambda x: x)


@pytest.mark.parametrize("storage, n_bytes", [("float32", 1024), ("bf16", 512), ("int8", 264), ("fp6", 200)])
def test_bytes_of_a_head_are_those_of_the_table(storage: KvStorage, n_bytes: int) -> None:
    assert head_bytes(storage, 256) == n_bytes


@pytest.mark.parametrize(
    "storage, dense, sparse", [("bf16", 65_536, 20_480), ("int8", 33_792, 10_560), ("fp6", 25_600, 8_000)]
)
def test_bytes_of_a_token_are_those_of_the_published_models(storage: KvStorage, dense: int, sparse: int) -> None:
    assert token_bytes(storage, 16, 4, 256) == dense
    assert token_bytes(storage, 10, 2, 256) == sparse


def test_heads_that_no_group_divides_are_refused_with_the_flag_that_helps() -> None:
    check_head_dim("bf16", 96, rotation=True)
    check_head_dim("int8", 192, rotation=False)
    with pytest.raises(UsageError, match="head_dim 96; use --kv-dtype bf16"):
        check_head_dim("fp6", 96, rotation=True)
    with pytest.raises(UsageError, match="head_dim 192; use --kv-rotation off"):
        check_head_dim("int8", 192, rotation=True)
