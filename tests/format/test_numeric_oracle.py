"""Words against independent implementations: ml_dtypes on every word, exact rationals and torch for the encoder."""

from __future__ import annotations

import random
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ninfer_format.codec import decode_tensor, encode_tensor, pack_tensor, unpack_tensor
from ninfer_format.errors import EncodeError
from ninfer_format.formats import NUMERIC_FORMATS, ROW_SPLIT
from ninfer_format.numeric import direct, grouped, nvfp4
from tests.format import scalar_codec

GROUPED = list(scalar_codec.FORMATS)
ALL_16_BIT = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)

# Signs, subnormals, both sides of every rounding step that a 16-bit cut can meet, NaN payloads of both kinds.
LOW_HALVES = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)


def bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return values.astype(np.float32, copy=False).view(np.uint32)


def test_every_bf16_word_widens_as_ml_dtypes_has_it() -> None:
    expected = ALL_16_BIT.view(ml_dtypes.bfloat16).astype(np.float32)
    ours = direct.widen_bf16(ALL_16_BIT)
    number = ~np.isnan(expected)
    assert (np.isnan(ours) == ~number).all()
    assert (bits(ours)[number] == bits(expected)[number]).all()
    assert (bits(ours) == ALL_16_BIT.astype(np.uint32) << 16).all()


def test_every_bf16_word_survives_widening_and_rounding() -> None:
    assert (direct.round_bf16(direct.widen_bf16(ALL_16_BIT)) == ALL_16_BIT).all()
    payload = pack_tensor(ALL_16_BIT, None, None, "BF16", "contiguous-le-v1")
    assert encode_tensor(
        decode_tensor(payload, "BF16", "contiguous-le-v1", (1 << 16,)), "BF16", "contiguous-le-v1"
    ) == (payload)


def test_rounding_to_bf16_agrees_with_ml_dtypes_around_every_word() -> None:
    words = ((ALL_16_BIT.astype(np.uint32) << 16)[:, None] | LOW_HALVES[None, :]).reshape(-1)
    values = words.view(np.float32)
    ours = direct.round_bf16(values)
    nan = np.isnan(values)
    expected = values[~nan].astype(ml_dtypes.bfloat16).view(np.uint16)
    assert (ours[~nan] == expected).all()
    assert np.isnan(direct.widen_bf16(ours[nan])).all(), "a NaN became a number"
    assert ((ours[nan] >> 15) == (words[nan] >> 31)).all(), "a NaN lost its sign"
    quiet = (words[nan] & 0xFFFF) != 0
    assert (ours[nan][quiet] == ((words[nan][quiet] >> 16) | 0x40)).all()


def test_every_e4m3fn_word_decodes_as_ml_dtypes_has_it() -> None:
    words = np.arange(256, dtype=np.uint16).astype(np.uint8)
    expected = words.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    nan = np.isnan(expected)
    assert (np.isnan(nvfp4.E4M3FN) == nan).all()
    assert (bits(nvfp4.E4M3FN)[~nan] == bits(expected)[~nan]).all()
    legal = np.flatnonzero(~nan & ~np.signbit(expected))
    assert legal.tolist() == list(range(nvfp4.MAX_SCALE + 1)), "legal scales are the finite nonnegative words"


def test_every_e2m1_word_decodes_as_ml_dtypes_has_it() -> None:
    expected = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert (bits(nvfp4.E2M1) == bits(expected)).all()


def test_every_nvfp4_code_under_every_scale_is_the_exact_quotient_rounded_once(fresh_seed: int) -> None:
    pairs = np.tile(np.arange(256, dtype=np.uint16).astype(np.uint8)[:, None], (1, 127 * 8))
    scales = np.tile(np.arange(127, dtype=np.uint8)[None, :], (256, 1))
    low = np.array([pairs & 15, pairs >> 4]).transpose(1, 2, 0).reshape(256, -1)
    e2m1 = low.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    e4m3 = np.repeat(scales, 16, axis=1).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    drawn = np.random.default_rng(fresh_seed).lognormal(0, 8, 3).astype(np.float32)
    for divisor in (np.float32(1), np.float32(1e-45), np.finfo(np.float32).max, *drawn):
        out = np.empty(e2m1.shape, np.float32)
        nvfp4.dequantize(pairs, scales, divisor, out)
        with np.errstate(over="ignore", under="ignore"):
            expected = (e2m1 * e4m3 / np.float64(divisor)).astype(np.float32)
        assert (bits(out) == bits(expected)).all(), divisor


@pytest.mark.parametrize("name", GROUPED)
def test_every_code_under_every_legal_scale_decodes_to_the_exact_product(name: str) -> None:
    fmt = NUMERIC_FORMATS[name]
    codes = np.arange(fmt.qmin, fmt.qmax + 1)
    k = -(-codes.size // fmt.group) * fmt.group
    row = np.zeros(k, np.int8)
    row[: codes.size] = codes
    words = np.arange(1, grouped.SCALE_INFINITY, dtype=np.uint16)
    matrix = np.broadcast_to(row, (words.size, k))
    scales = np.repeat(words[:, None], k // fmt.group, axis=1)
    payload = pack_tensor(matrix, scales, None, name, ROW_SPLIT)
    decoded = decode_tensor(payload, name, ROW_SPLIT, matrix.shape)
    exact = words.view(np.float16).astype(np.float64)[:, None] * row.astype(np.float64)
    assert (decoded.astype(np.float64) == exact).all()
    assert (grouped.dequantize(matrix, scales, fmt) == decoded).all()
    back = unpack_tensor(payload, name, ROW_SPLIT, matrix.shape)
    assert back.scales is not None
    assert (back.codes == matrix).all()
    assert (back.scales == scales).all()


def test_every_illegal_scale_word_is_refused() -> None:
    codes = np.ones((1, 1), np.int8)
    for word in range(grouped.SCALE_INFINITY, 1 << 16):
        with pytest.raises(EncodeError) as refusal:
            pack_tensor(codes, np.array([[word]], np.uint16), None, "Q4G64_F16S", ROW_SPLIT)
        assert f"{word:#06x} at row 0, group 0" in str(refusal.value)


def torch_quantize(values: np.ndarray[Any, Any], qmin: int, qmax: int) -> tuple[np.ndarray[Any, Any], ...]:
    """The encoder's nine steps in torch on [groups, G]: codes and scale words."""
    x = torch.from_numpy(values)
    amax = x.abs().amax(dim=1, keepdim=True)
    scale = (amax / torch.tensor(float(qmax))).to(torch.float16)
    scale = torch.where((scale == 0) & (amax > 0), torch.tensor(2.0**-24, dtype=torch.float16), scale)
    inverse = torch.where(amax == 0, torch.tensor(0.0), 1.0 / scale.float())
    codes = torch.clamp(torch.round(x * inverse), qmin, qmax).to(torch.int8)
    return codes.numpy(), scale.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("name", GROUPED)
def test_encoder_agrees_with_torch_across_every_scale_word(name: str, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[name]
    rng = np.random.default_rng(fresh_seed)
    # One group per finite binary16 word and its neighbourhood: maxima just below, at and just above each rounding step.
    word = np.arange(grouped.SCALE_INFINITY - 1, dtype=np.uint16)
    low, high = word.view(np.float16).astype(np.float64), (word + 1).view(np.float16).astype(np.float64)
    steps = ((low + high) / 2 * fmt.qmax).astype(np.float32)
    maxima = np.concatenate([np.nextafter(steps, np.float32(0)), steps, np.nextafter(steps, np.float32(np.inf))])
    lanes = rng.uniform(-1, 1, (maxima.size, fmt.group)).astype(np.float32) * maxima[:, None]
    # Half-way lanes k + 0.5 of the step decide ties; the extreme lane alternates in sign and place.
    halves = (rng.integers(fmt.qmin, fmt.qmax, lanes.shape) + 0.5).astype(np.float32) * (maxima / fmt.qmax)[:, None]
    lanes = np.where(rng.random(lanes.shape) < 0.5, lanes, halves.astype(np.float32))
    lanes = np.clip(lanes, -maxima[:, None], maxima[:, None])
    place = rng.integers(0, fmt.group, maxima.size)
    lanes[np.arange(maxima.size), place] = maxima * rng.choice(np.array([-1, 1], np.float32), maxima.size)
    codes, scales = grouped.quantize_groups(lanes, fmt)
    expected_codes, expected_scales = torch_quantize(lanes, fmt.qmin, fmt.qmax)
    assert (scales == expected_scales).all()
    assert (codes == expected_codes).all()


@pytest.mark.parametrize("name", GROUPED)
def test_encoder_agrees_with_exact_rationals_on_drawn_words(name: str, fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    size = scalar_codec.FORMATS[name][1]
    for _ in range(150):
        spread, centre = draw.choice((0, 3, 30)), draw.randrange(60, 140)
        words = [
            draw.getrandbits(1) << 31 | max(0, centre - draw.randint(0, spread)) << 23 | draw.getrandbits(23)
            for _ in range(size)
        ]
        values = np.array([words], np.uint32).view(np.float32)
        try:
            expected = scalar_codec.encode(values.tolist(), name)
        except ValueError:
            with pytest.raises(EncodeError, match="beyond binary16"):
                encode_tensor(values, name, ROW_SPLIT)
        else:
            assert encode_tensor(values, name, ROW_SPLIT) == expected, [f"{word:08x}" for word in words]


def subnormal_cases() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Groups whose values, quotients or scales are subnormal somewhere: rows [6, 64]."""
    rows = np.zeros((6, 64), np.float32)
    rows[0, 5] = 1e-40  # subnormal float32: nonzero, so the scale is 0x0001
    rows[1, :2] = 3.4 * 7 * 2.0**-24, -3.4 * 7 * 2.0**-24
    rows[2] = 45.5 * 2.0**-24
    rows[3, 3] = np.float32(2.0**-149)
    rows[4] = -0.0
    rows[5, :3] = 1.0, 1e-39, -1e-42
    return rows


@pytest.mark.parametrize("name", GROUPED)
def test_bytes_do_not_depend_on_numpys_error_state_or_flush_to_zero(name: str) -> None:
    values = subnormal_cases()
    expected = scalar_codec.encode(values.tolist(), name)
    with np.errstate(all="raise"):
        assert encode_tensor(values, name, ROW_SPLIT) == expected
        decode_tensor(expected, name, ROW_SPLIT, values.shape)
    flushing = torch.set_flush_denormal(True)
    try:
        assert encode_tensor(values, name, ROW_SPLIT) == expected, f"flush-to-zero (set: {flushing}) changes the bytes"
    finally:
        torch.set_flush_denormal(False)


def test_qmin_of_q4_is_reached_only_under_a_subnormal_scale() -> None:
    words = unpack_tensor(encode_tensor(subnormal_cases(), "Q4G64_F16S", ROW_SPLIT), "Q4G64_F16S", ROW_SPLIT, (6, 64))
    assert words.scales is not None
    assert words.codes[1, :2].tolist() == [7, -8]
    assert words.scales[:, 0].tolist() == [1, 3, 6, 1, 0, struct.unpack("<H", np.float16(1 / 7).tobytes())[0]]
