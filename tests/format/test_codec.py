"""The public codec: which inputs are taken, what is refused and how, rows, and bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ninfer_format.codec import (
    decode_rows,
    decode_tensor,
    encode_tensor,
    gather_rows,
    pack_tensor,
    slice_rows,
    unpack_tensor,
)
from ninfer_format.errors import EncodeError, NinferError, RegistryError, SignatureError, UsageError
from ninfer_format.formats import BLOCKSCALE, CONTIGUOUS, NUMERIC_FORMATS, ROW_SPLIT, layout_for
from ninfer_format.numeric import grouped
from ninfer_format.payload_rules import scan_payload
from tests.format import scalar_codec

GROUPED = list(scalar_codec.FORMATS)
Array = np.ndarray[Any, np.dtype[Any]]


def sample(format: str, shape: tuple[int, ...], seed: int) -> bytes:
    """A legal payload with drawn words."""
    rng = np.random.default_rng(seed)
    if format == "NVFP4":
        n, k = shape
        codes, scales = rng.integers(0, 256, (n, k // 2)), rng.integers(0, 127, (n, k // 16))
        return pack_tensor(codes.astype(np.uint8), scales.astype(np.uint8), np.float32(1.5), format, BLOCKSCALE)
    if format == "I32":
        return encode_tensor(rng.integers(-(2**31), 2**31, shape).astype(np.int32), format, CONTIGUOUS)
    return encode_tensor(rng.standard_normal(shape).astype(np.float32), format, layout_for(format))


# --- values in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["BF16", "FP32", *GROUPED])
def test_types_that_float32_holds_exactly_give_the_same_bytes(format: str) -> None:
    values = np.array([[1.5, -0.25, 3.0, 0.0], [-1.0, 0.125, 2.0, -0.0]], np.float32)
    expected = encode_tensor(values, format, layout_for(format))
    others: list[Array] = [
        values.astype(np.float64),
        values.astype(np.float16),
        values.astype(ml_dtypes.bfloat16),
        values.astype(">f4"),
        np.asfortranarray(values),
        np.repeat(values, 2, axis=0)[::2],
        np.repeat(values, 3, axis=1)[:, ::3],
    ]
    for other in others:
        assert encode_tensor(other, format, layout_for(format)) == expected, (other.dtype, other.strides)


@pytest.mark.parametrize("format", ["BF16", "FP32", *GROUPED])
def test_values_that_float32_would_round_are_refused(format: str) -> None:
    for values in (np.full((1, 4), 0.1), np.full((1, 4), 1e300), np.ones((1, 4), np.int64), np.ones((1, 4), complex)):
        with pytest.raises(EncodeError, match=r"astype\(numpy.float32\)"):
            encode_tensor(values, format, layout_for(format))


def test_i32_takes_integers_in_range_and_refuses_the_rest() -> None:
    ids = np.array([0, -1, 2**31 - 1, -(2**31)])
    payload = encode_tensor(ids, "I32", CONTIGUOUS)
    assert (decode_tensor(payload, "I32", CONTIGUOUS, (4,)) == ids).all()
    for bad in (np.array([2**31]), np.array([-(2**31) - 1]), np.array([2**32 - 1], np.uint32)):
        with pytest.raises(EncodeError, match="2\\^31"):
            encode_tensor(bad, "I32", CONTIGUOUS)
    with pytest.raises(EncodeError, match="I32 takes integers"):
        encode_tensor(np.array([1.0], np.float32), "I32", CONTIGUOUS)


def test_nan_stays_nan_in_bf16_and_large_finite_values_are_fine_there() -> None:
    values = np.array([np.nan, -np.nan, np.inf, 70000.0, 3.3e38], np.float32)
    decoded = decode_tensor(encode_tensor(values, "BF16", CONTIGUOUS), "BF16", CONTIGUOUS, (5,))
    assert np.isnan(decoded[:2]).all()
    assert decoded[2] == np.inf
    assert np.isfinite(decoded[3:]).all()


@pytest.mark.parametrize("format", GROUPED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_non_finite_value_is_named_by_row_and_column(format: str, bad: float) -> None:
    values = np.ones((600, 1000), np.float32)
    values[577, 903] = bad
    values[599, 0] = bad
    with pytest.raises(EncodeError, match=rf"row 577, column 903 is {bad}"):
        encode_tensor(values, format, ROW_SPLIT)


@pytest.mark.parametrize("format", GROUPED)
def test_group_beyond_binary16_is_refused_by_row_and_group_and_the_value_below_is_not(format: str) -> None:
    fmt = NUMERIC_FORMATS[format]
    first_bad = np.float32(65520 * fmt.qmax)
    values = np.ones((300, 1000), np.float32)
    values[299, 999] = np.nextafter(first_bad, np.float32(0))
    encode_tensor(values, format, ROW_SPLIT)
    for bad in (first_bad, np.float32(3e38)):
        values[299, 999] = bad
        with pytest.raises(EncodeError, match=f"row 299, group {999 // fmt.group} .*BF16"):
            encode_tensor(values, format, ROW_SPLIT)


def test_nvfp4_is_never_made_from_floats() -> None:
    with pytest.raises(EncodeError, match="prepacked source"):
        encode_tensor(np.zeros((128, 64), np.float32), "NVFP4", BLOCKSCALE)


@pytest.mark.parametrize("format", GROUPED)
def test_one_long_row_is_encoded_in_parts_and_equals_its_pieces(format: str, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[format]
    k = 2 * grouped.TILE_VALUES + 37
    values = np.random.default_rng(fresh_seed).standard_normal((1, k)).astype(np.float32)
    payload = encode_tensor(values, format, ROW_SPLIT)
    words = unpack_tensor(payload, format, ROW_SPLIT, (1, k))
    assert words.scales is not None
    for first in (0, grouped.TILE_VALUES - 128, k - 37):
        codes, scales = grouped.quantize_groups(values[:, first : first + 128], fmt)
        assert (words.codes[:, first : first + codes.shape[1]] == codes).all()
        begin = first // fmt.group
        assert (words.scales[:, begin : begin + scales.shape[1]] == scales).all()
    assert pack_tensor(*words, format, ROW_SPLIT) == payload
    assert (
        decode_tensor(payload, format, ROW_SPLIT, (1, k)) == grouped.dequantize(words.codes, words.scales, fmt)
    ).all()


# --- words in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", GROUPED)
def test_code_out_of_range_is_refused_by_place(format: str) -> None:
    fmt = NUMERIC_FORMATS[format]
    scales = np.full((3, 200 // fmt.group + 1), 0x3C00, np.uint16)
    for code in (fmt.qmin - 1, fmt.qmax + 1):
        codes = np.zeros((3, 200), np.int16)
        codes[2, 199] = code
        with pytest.raises(
            EncodeError, match=f"code {code} at row 2, column 199: {format} holds {fmt.qmin} to {fmt.qmax}"
        ):
            pack_tensor(codes, scales, None, format, ROW_SPLIT)


@pytest.mark.parametrize("format", GROUPED)
def test_nonzero_code_under_zero_scale_is_refused_by_place(format: str) -> None:
    fmt = NUMERIC_FORMATS[format]
    codes = np.ones((3, 200), np.int8)
    scales = np.full((3, 200 // fmt.group + 1), 0x0001, np.uint16)
    scales[1, 1] = 0
    with pytest.raises(EncodeError, match=f"code 1 at row 1, column {fmt.group} lies under scale word 0x0000"):
        pack_tensor(codes, scales, None, format, ROW_SPLIT)
    codes[1, fmt.group : 2 * fmt.group] = 0
    pack_tensor(codes, scales, None, format, ROW_SPLIT)


@pytest.mark.parametrize("format", GROUPED)
def test_padded_and_logical_words_and_float16_scales_give_the_same_bytes(format: str, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[format]
    values = np.random.default_rng(fresh_seed).standard_normal((4, 70)).astype(np.float32)
    expected = encode_tensor(values, format, ROW_SPLIT)
    logical, padded = grouped.quantize_groups(values, fmt), grouped.quantize_rows(values, fmt)
    assert padded.codes.shape == (4, 128)
    for codes in (logical.codes, padded.codes, logical.codes.astype(np.int64), np.asfortranarray(logical.codes)):
        for scales in (logical.scales, padded.scales, logical.scales.view(np.float16), padded.scales[:, :-1]):
            if scales.shape[1] >= logical.scales.shape[1]:
                assert pack_tensor(codes, scales, None, format, ROW_SPLIT) == expected


@pytest.mark.parametrize(
    "codes, scales, divisor, format, message",
    [
        (np.ones((2, 64), np.int8), None, None, "Q4G64_F16S", "codes and scales"),
        (np.ones((2, 64), np.int8), np.ones((2, 1), np.uint16), 1.0, "Q4G64_F16S", "without a divisor"),
        (np.ones((2, 64), np.int8), np.ones((2, 3), np.uint16), None, "Q4G64_F16S", r"scales \[2, 1\]"),
        (np.ones((2, 64), np.int8), np.ones((1, 1), np.uint16), None, "Q4G64_F16S", r"found \[1, 1\]"),
        (np.ones((2, 64), np.int8), np.ones(2, np.uint16), None, "Q4G64_F16S", r"found \[2\]"),
        (np.ones((2, 64), np.int8), np.ones((2, 1), np.int16), None, "Q4G64_F16S", "binary16 words"),
        (np.ones((2, 64), np.float32), np.ones((2, 1), np.uint16), None, "Q4G64_F16S", "codes are integers"),
        (np.ones((2, 384), np.int8), np.ones((2, 4), np.uint16), None, "Q4G64_F16S", r"scales \[2, 6\]"),
        (np.ones(4, np.uint16), np.ones(4, np.uint16), None, "BF16", "neither scales nor a divisor"),
        (np.ones(4, np.uint32), None, None, "BF16", "2-byte integers, found uint32"),
        (np.ones(4, np.float32), None, None, "FP32", "4-byte integers, found float32"),
        (np.ones((128, 32), np.uint8), None, 1.0, "NVFP4", "codes and scales"),
        (np.ones((128, 32), np.uint8), np.ones((128, 4), np.uint8), None, "NVFP4", "needs the divisor"),
        (np.ones((128, 32), np.uint8), np.ones((128, 4), np.uint8), 0.1, "NVFP4", "not a float32"),
        (
            np.ones((128, 48), np.uint8),
            np.ones((128, 4), np.uint8),
            1.0,
            "NVFP4",
            r"\[128, 32\] \(packed\)",
        ),
        (np.full((128, 64), 16, np.uint8), np.ones((128, 4), np.uint8), 1.0, "NVFP4", "more than 4 bits"),
        (np.ones((128, 32), np.int8), np.ones((128, 4), np.uint8), 1.0, "NVFP4", "are uint8"),
        (np.ones((128, 32), np.uint8), np.full((128, 4), 0x7F, np.uint8), 1.0, "NVFP4", "block scale 0x7f at row 0"),
        (np.ones((128, 32), np.uint8), np.ones((128, 4), np.uint8), -1.0, "NVFP4", "greater than 0"),
    ],
)
def test_words_that_do_not_fit_are_refused_in_words(
    codes: Array, scales: Array | None, divisor: float | None, format: str, message: str
) -> None:
    with pytest.raises(EncodeError, match=message):
        pack_tensor(codes, scales, divisor, format, layout_for(format))


def test_wrong_layout_and_wrong_shape_are_signature_errors_and_unknown_names_registry_errors() -> None:
    values = np.zeros((2, 64), np.float32)
    for error, format, layout in (
        (SignatureError, "BF16", ROW_SPLIT),
        (SignatureError, "Q4G64_F16S", CONTIGUOUS),
        (RegistryError, "Q4", ROW_SPLIT),
        (RegistryError, "BF16", "contiguous"),
    ):
        calls: dict[Callable[..., object], tuple[Any, ...]] = {
            encode_tensor: (values, format, layout),
            pack_tensor: (values, None, None, format, layout),
            unpack_tensor: (b"", format, layout, (2, 64)),
            decode_tensor: (b"", format, layout, (2, 64)),
            decode_rows: (b"", format, layout, (2, 64), [0]),
            scan_payload: ("x", format, layout, (2, 64), b""),
        }
        for call, arguments in calls.items():
            with pytest.raises(error):
                call(*arguments)
    with pytest.raises(SignatureError):
        encode_tensor(values.reshape(-1), "Q4G64_F16S", ROW_SPLIT)
    with pytest.raises(SignatureError):
        encode_tensor(np.zeros((0, 64), np.float32), "Q4G64_F16S", ROW_SPLIT)


@pytest.mark.parametrize("format, shape", [("BF16", (3, 4)), ("Q5G64_F16S", (2, 130)), ("NVFP4", (128, 64))])
@pytest.mark.parametrize("change", [-1, 1])
def test_payload_of_another_length_is_refused_with_both_lengths(
    format: str, shape: tuple[int, int], change: int, fresh_seed: int
) -> None:
    payload = sample(format, shape, fresh_seed)
    wrong = payload[:-1] if change < 0 else payload + b"\0"
    with pytest.raises(SignatureError, match=f"takes {len(payload)} bytes, the payload has {len(wrong)}"):
        decode_tensor(wrong, format, layout_for(format), shape)


def test_sizes_beyond_any_machine_are_refused_before_memory_is_taken() -> None:
    for format, shape in (("BF16", (1 << 40, 1 << 40)), ("Q4G64_F16S", (1 << 62, 1 << 62)), ("NVFP4", (1 << 60, 64))):
        with pytest.raises(NinferError):
            decode_tensor(b"", format, layout_for(format), shape)


# --- reading --------------------------------------------------------------------------------------------------------

SHAPES = [("BF16", (300, 70)), ("FP32", (300, 7, 3)), ("I32", (300,)), ("NVFP4", (384, 128))]


@pytest.mark.parametrize("format, shape", [*SHAPES, *((name, (300, 1001)) for name in GROUPED)])
def test_chosen_rows_equal_rows_of_the_whole(format: str, shape: tuple[int, ...], fresh_seed: int) -> None:
    payload = sample(format, shape, fresh_seed)
    whole = decode_tensor(payload, format, layout_for(format), shape)
    assert whole.shape == shape
    drawn = np.random.default_rng(fresh_seed).integers(0, shape[0], 700)
    selections: list[Any] = [
        slice(None), slice(7, 7), slice(5, 299), slice(None, None, -3), slice(-4, None), [], [0], [299, 0, 0], drawn,
    ]  # fmt: skip
    for rows in selections:
        part = decode_rows(payload, format, layout_for(format), shape, rows)
        index = np.asarray(rows, np.intp) if isinstance(rows, list) else rows
        assert part.dtype == whole.dtype
        assert np.array_equal(part, whole[index]), rows


@pytest.mark.parametrize("format", GROUPED)
def test_gathered_rows_equal_encoding_those_rows(format: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    values = rng.standard_normal((40, 300)).astype(np.float32)
    payload = encode_tensor(values, format, ROW_SPLIT)
    drawn = rng.integers(0, 40, 90)
    assert gather_rows(payload, format, (40, 300), drawn) == encode_tensor(values[drawn], format, ROW_SPLIT)
    for rows in (slice(3, 17), slice(None), slice(39, None), slice(30, 2, -7)):
        assert slice_rows(payload, format, (40, 300), rows) == encode_tensor(values[rows], format, ROW_SPLIT)


@pytest.mark.parametrize("rows", [[-1], [300], [[0]], [0.5], ["a"], np.array([True] * 300)])
def test_rows_outside_the_matrix_or_of_another_kind_are_refused(rows: Any, fresh_seed: int) -> None:
    payload = sample("Q6G64_F16S", (300, 64), fresh_seed)
    with pytest.raises(UsageError, match="row"):
        decode_rows(payload, "Q6G64_F16S", ROW_SPLIT, (300, 64), rows)
    with pytest.raises(UsageError, match="row"):
        gather_rows(payload, "Q6G64_F16S", (300, 64), rows)


def test_no_rows_and_no_axis_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one row"):
        gather_rows(sample("Q4G64_F16S", (2, 64), 0), "Q4G64_F16S", (2, 64), slice(1, 1))
    with pytest.raises(UsageError, match="rank-0"):
        decode_rows(b"\0\0\0\0", "FP32", CONTIGUOUS, (), [0])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("format, shape", [*SHAPES, ("Q5G64_F16S", (3, 70))])
def test_payloads_may_be_bytes_bytearray_or_unaligned_memoryview(
    kind: Any, format: str, shape: tuple[int, ...], fresh_seed: int
) -> None:
    payload = sample(format, shape, fresh_seed)
    expected = decode_tensor(payload, format, layout_for(format), shape)
    given = memoryview(b"x" + payload)[1:] if kind is memoryview else kind(payload)
    assert np.array_equal(decode_tensor(given, format, layout_for(format), shape), expected)
    assert pack_tensor(*unpack_tensor(given, format, layout_for(format), shape), format, layout_for(format)) == payload


def test_views_of_a_payload_are_read_only_and_decoded_values_are_not() -> None:
    payload = bytearray(sample("BF16", (4,), 0))
    codes = unpack_tensor(payload, "BF16", CONTIGUOUS, (4,)).codes
    assert not codes.flags.writeable
    for format in ("BF16", "FP32", "I32", "Q4G64_F16S", "NVFP4"):
        shape = (128, 64)
        decoded = decode_tensor(sample(format, shape, 0), format, layout_for(format), shape)
        assert decoded.flags.writeable
        assert decoded.flags.c_contiguous


# --- memory ---------------------------------------------------------------------------------------------------------

EXTRA_BYTES = 24 << 20
"""Allowance beyond input and output: some tiles of 2^18 values and their scratch."""


@pytest.fixture
def traced() -> Iterator[Callable[[Callable[[], Any]], tuple[Any, int]]]:
    """Runs a call and gives its result and the peak of bytes it allocated."""

    def run(call: Callable[[], Any]) -> tuple[Any, int]:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        result = call()
        return result, tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    yield run
    tracemalloc.stop()


@pytest.mark.parametrize("k", [4096, 4000])
@pytest.mark.parametrize("format", ["Q6G64_F16S", "W8G32_F16S", "BF16"])
def test_encode_pack_decode_and_scan_need_a_few_megabytes_beyond_input_and_output(
    format: str, k: int, traced: Callable[[Callable[[], Any]], tuple[Any, int]]
) -> None:
    n, layout = 6000, layout_for(format)
    values = np.zeros((n, k), np.float32)
    values[:, ::3] = 0.5
    payload, peak = traced(lambda: encode_tensor(values, format, layout))
    assert peak - len(payload) < EXTRA_BYTES
    words, peak = traced(lambda: unpack_tensor(payload, format, layout, (n, k)))
    assert peak - (0 if format == "BF16" else words.codes.nbytes + words.scales.nbytes) < EXTRA_BYTES
    packed, peak = traced(lambda: pack_tensor(words.codes, words.scales, words.divisor, format, layout))
    assert packed == payload
    assert peak - len(payload) < EXTRA_BYTES
    decoded, peak = traced(lambda: decode_tensor(payload, format, layout, (n, k)))
    assert peak - decoded.nbytes < EXTRA_BYTES
    findings, peak = traced(lambda: scan_payload("x", format, layout, (n, k), payload, strict=True))
    assert findings == []
    assert peak < EXTRA_BYTES


def test_decode_of_nvfp4_needs_a_few_megabytes_beyond_its_output(
    traced: Callable[[Callable[[], Any]], tuple[Any, int]],
) -> None:
    shape = (6016, 4096)
    payload = sample("NVFP4", shape, 0)
    decoded, peak = traced(lambda: decode_tensor(payload, "NVFP4", BLOCKSCALE, shape))
    assert peak - decoded.nbytes < EXTRA_BYTES
    rows, peak = traced(lambda: decode_rows(payload, "NVFP4", BLOCKSCALE, shape, [6015, 0]))
    assert peak < 1 << 20
    assert np.array_equal(rows, decoded[[6015, 0]])
