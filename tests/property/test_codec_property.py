"""Codec properties on drawn matrices: exact encoder, roundtrips, canonical form, rows, and the scanner as a judge."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ninfer_format.codec import decode_rows, decode_tensor, encode_tensor, gather_rows, pack_tensor, unpack_tensor
from ninfer_format.errors import EncodeError
from ninfer_format.formats import BLOCKSCALE, CONTIGUOUS, NUMERIC_FORMATS, ROW_SPLIT, encoded_size
from ninfer_format.numeric.direct import round_bf16
from ninfer_format.payload_rules import scan_payload
from tests.format import scalar_codec

Array = np.ndarray[Any, np.dtype[Any]]

grouped_formats = st.sampled_from(list(scalar_codec.FORMATS))
columns = st.one_of(st.sampled_from((1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 192, 256)), st.integers(1, 300))
seeds = st.integers(0, 2**32 - 1)


@st.composite
def finite_matrices(draw: st.DrawFn) -> Array:
    """float32 [1..3, K] from drawn words whose exponents cover one narrow band, a wide one, or all; zeros included."""
    shape = draw(st.integers(1, 3)), draw(columns)
    rng = np.random.default_rng(draw(seeds))
    centre, width = draw(st.integers(1, 254)), draw(st.sampled_from((0, 2, 12, 254)))
    exponent = np.clip(centre - rng.integers(0, width + 1, shape), 0, 254).astype(np.uint32)
    words = rng.integers(0, 1 << 23, shape).astype(np.uint32) | exponent << 23
    words |= rng.integers(0, 2, shape).astype(np.uint32) << 31
    words[rng.random(shape) < draw(st.sampled_from((0.0, 0.3, 1.0)))] &= 0x8000_0000
    if draw(st.booleans()):
        words &= 0xFFFF_0000
    return words.view(np.float32)


@st.composite
def legal_words(draw: st.DrawFn) -> tuple[str, Array, Array]:
    """Format, codes int8 [N, K] and scale words [N, ceil(K / G)], every legal word possible, zero scales frequent."""
    name = draw(grouped_formats)
    fmt = NUMERIC_FORMATS[name]
    n, k = draw(st.integers(1, 4)), draw(columns)
    rng = np.random.default_rng(draw(seeds))
    codes = rng.integers(fmt.qmin, fmt.qmax + 1, (n, k)).astype(np.int8)
    scales = rng.integers(0, 0x7C00, (n, -(-k // fmt.group))).astype(np.uint16)
    scales[rng.random(scales.shape) < draw(st.sampled_from((0.0, 0.4)))] = 0
    codes[np.repeat(scales == 0, fmt.group, axis=1)[:, :k]] = 0
    return name, codes, scales


@settings(max_examples=120, deadline=None)
@given(grouped_formats, finite_matrices())
@example("Q4G64_F16S", np.full((1, 64), 45.5 * 2.0**-24, np.float32))
def test_encoder_equals_exact_rationals_bit_by_bit(name: str, values: Array) -> None:
    try:
        expected = scalar_codec.encode(values.tolist(), name)
    except ValueError:
        try:
            encode_tensor(values, name, ROW_SPLIT)
        except EncodeError:
            return
        raise AssertionError("a group beyond binary16 was encoded") from None
    assert encode_tensor(values, name, ROW_SPLIT) == expected


@settings(max_examples=150, deadline=None)
@given(grouped_formats, finite_matrices())
def test_encoded_matrix_is_canonical_close_and_clean(name: str, values: Array) -> None:
    fmt = NUMERIC_FORMATS[name]
    limit = np.nextafter(np.float32(65520 * fmt.qmax), np.float32(0))
    values = np.clip(values, -limit, limit)
    payload = encode_tensor(values, name, ROW_SPLIT)
    assert len(payload) == encoded_size(name, ROW_SPLIT, values.shape)
    assert scan_payload("m", name, ROW_SPLIT, values.shape, payload) == []
    words = unpack_tensor(payload, name, ROW_SPLIT, values.shape)
    assert words.scales is not None
    k = values.shape[1]
    for group in range(words.scales.shape[1]):
        span = slice(group * fmt.group, min((group + 1) * fmt.group, k))
        amax, scale = np.abs(values[:, span]).max(axis=1), words.scales[:, group]
        codes = words.codes[:, span].astype(np.int32)
        assert ((scale == 0) == (amax == 0)).all()
        normal = scale >= 0x0400
        assert (np.abs(codes).max(axis=1)[normal] == fmt.qmax).all(), "the extreme lane of a normal group is not ±qmax"
        # A code is off by half a step plus the rounding of scale and reciprocal; subnormal scales may clamp.
        step = scale.view(np.float16).astype(np.float64)
        error = np.abs(values[:, span].astype(np.float64) - codes * step[:, None]).max(axis=1)
        assert (error[normal] <= step[normal] * (0.5 + fmt.qmax * 2.0**-10)).all()
    decoded = decode_tensor(payload, name, ROW_SPLIT, values.shape)
    if (words.scales >= 0x0400).all():
        assert encode_tensor(decoded, name, ROW_SPLIT) == payload, "encoding decoded values again changes them"


@settings(max_examples=150, deadline=None)
@given(legal_words(), st.booleans())
def test_legal_words_survive_and_decode_to_exact_products(words: tuple[str, Array, Array], fortran: bool) -> None:
    name, codes, scales = words
    fmt = NUMERIC_FORMATS[name]
    payload = pack_tensor(np.asfortranarray(codes) if fortran else codes, scales, None, name, ROW_SPLIT)
    assert scan_payload("m", name, ROW_SPLIT, codes.shape, payload) == []
    back = unpack_tensor(payload, name, ROW_SPLIT, codes.shape)
    assert back.scales is not None
    assert back.codes.dtype == np.int8
    assert back.scales.dtype == np.uint16
    assert (back.codes == codes).all()
    assert (back.scales == scales).all()
    exact = codes.astype(np.float64) * np.repeat(scales, fmt.group, axis=1)[:, : codes.shape[1]].view(np.float16)
    assert (decode_tensor(payload, name, ROW_SPLIT, codes.shape) == exact).all()


@settings(max_examples=100, deadline=None)
@given(legal_words(), st.data())
def test_rows_in_any_order_are_those_rows(words: tuple[str, Array, Array], data: st.DataObject) -> None:
    name, codes, scales = words
    payload = pack_tensor(codes, scales, None, name, ROW_SPLIT)
    rows = data.draw(st.lists(st.integers(0, codes.shape[0] - 1), min_size=1, max_size=9))
    expected = pack_tensor(codes[rows], scales[rows], None, name, ROW_SPLIT)
    assert gather_rows(payload, name, codes.shape, rows) == expected
    whole = decode_tensor(payload, name, ROW_SPLIT, codes.shape)
    assert (decode_rows(payload, name, ROW_SPLIT, codes.shape, rows) == whole[rows]).all()


def repacks_to_itself(payload: bytes, format: str, layout: str, shape: tuple[int, ...]) -> bool:
    try:
        return pack_tensor(*unpack_tensor(payload, format, layout, shape), format, layout) == payload
    except EncodeError:
        return False


@settings(max_examples=300, deadline=None)
@given(legal_words(), st.data())
def test_scanner_finds_exactly_the_payloads_that_packing_could_not_have_made(
    words: tuple[str, Array, Array], data: st.DataObject
) -> None:
    name, codes, scales = words
    payload = bytearray(pack_tensor(codes, scales, None, name, ROW_SPLIT))
    edits = st.tuples(st.integers(0, len(payload) - 1), st.integers(0, 255) | st.sampled_from((0x80, 0x7C, 0xFC)))
    for byte, value in data.draw(st.lists(edits, min_size=1, max_size=3)):
        payload[byte] = value
    clean = scan_payload("m", name, ROW_SPLIT, codes.shape, payload) == []
    assert clean == repacks_to_itself(bytes(payload), name, ROW_SPLIT, codes.shape)


@settings(max_examples=100, deadline=None)
@given(seeds, st.sampled_from(((128, 64), (256, 64), (128, 192))), st.data())
def test_nvfp4_words_survive_and_the_scanner_judges(seed: int, shape: tuple[int, int], data: st.DataObject) -> None:
    n, k = shape
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    scales = rng.integers(0, 0x7F, (n, k // 16)).astype(np.uint8)
    divisor = np.array([data.draw(st.integers(1, 0x7F7F_FFFF))], np.uint32).view(np.float32)[0]
    payload = bytearray(pack_tensor(codes, scales, divisor, "NVFP4", BLOCKSCALE))
    back = unpack_tensor(payload, "NVFP4", BLOCKSCALE, shape)
    assert back.scales is not None
    assert (back.codes == codes).all()
    assert (back.scales == scales).all()
    assert back.divisor == divisor
    assert scan_payload("m", "NVFP4", BLOCKSCALE, shape, payload) == []
    rows = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
    part = decode_rows(payload, "NVFP4", BLOCKSCALE, shape, rows)
    assert np.array_equal(part, decode_tensor(payload, "NVFP4", BLOCKSCALE, shape)[np.array(rows, np.intp)])
    byte = data.draw(st.integers(0, len(payload) - 1) | st.integers(n * k // 2, len(payload) - 1))
    del back
    payload[byte] = data.draw(st.integers(0, 255))
    clean = scan_payload("m", "NVFP4", BLOCKSCALE, shape, payload) == []
    assert clean == repacks_to_itself(bytes(payload), "NVFP4", BLOCKSCALE, shape)


shapes = st.lists(st.integers(1, 4), max_size=5).map(tuple)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from((("BF16", "u2"), ("FP32", "u4"), ("I32", "i4"))), shapes, seeds)
def test_direct_words_of_any_value_and_rank_survive(kind: tuple[str, str], shape: tuple[int, ...], seed: int) -> None:
    format, dtype = kind
    drawn = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize)).astype(np.uint8)
    words = drawn.view(dtype)[..., 0]
    payload = pack_tensor(words, None, None, format, CONTIGUOUS)
    assert payload == words.astype(words.dtype.newbyteorder("<")).tobytes()
    assert (unpack_tensor(payload, format, CONTIGUOUS, shape).codes == words).all()
    values = decode_tensor(payload, format, CONTIGUOUS, shape)
    assert values.shape == shape
    assert encode_tensor(values, format, CONTIGUOUS) == payload


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 0xFFFF_FFFF))
@example(0x7F7F_FFFF)
@example(0x3F80_8000)
@example(0x3F81_8000)
@example(0x7F80_0001)
def test_bf16_is_the_nearest_word_ties_to_even(word: int) -> None:
    value = np.array([word], np.uint32).view(np.float32)
    rounded = int(round_bf16(value)[0])
    if np.isnan(value[0]):
        assert rounded & 0x7FFF > 0x7F80
        assert rounded >> 15 == word >> 31
        return
    low, rest = word >> 16, word & 0xFFFF
    up = rest > 0x8000 or (rest == 0x8000 and low & 1)
    assert rounded == low + bool(up)
