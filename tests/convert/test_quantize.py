"""The torch encoder gives the canonical bytes: goldens, boundary shapes, every magnitude, refusals, error sums."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ninfer_convert.quantize.bad_value import BadValue
from ninfer_convert.quantize.block import encode_block, scripted_block
from ninfer_convert.quantize.direct import check_finite, store_transposed, store_widened
from ninfer_convert.quantize.groupwise import GroupEncoder, encode_matrix, plane_rows
from ninfer_convert.quantize.scales import MIN_SUBNORMAL, scale_table
from ninfer_format import NUMERIC_FORMATS, EncodeError, decode_tensor, encode_tensor
from ninfer_format.formats import ROW_SPLIT, row_split_planes

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FORMATS = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")
GROUPED_VECTORS = [
    vector
    for vector in json.loads((GOLDEN / "index.json").read_text())["vectors"]
    if vector.get("format") in FORMATS and "source" in vector
]

Words = NDArray[np.uint16]


def floats(words: Words) -> NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)


def words_of(values: Any) -> Words:
    """BF16 words of values that BF16 holds exactly."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def normal_words(shape: tuple[int, ...], seed: int) -> Words:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture(params=["scripted", "plain"])
def encode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``encode_matrix`` with the block under TorchScript and as plain Python."""
    if request.param == "plain":
        monkeypatch.setattr("ninfer_convert.quantize.groupwise.scripted_block", lambda: encode_block)
    return encode_matrix


def test_goldens_cover_every_grouped_format() -> None:
    assert {vector["format"] for vector in GROUPED_VECTORS} == set(FORMATS)
    assert sum("recip" in vector["source"] for vector in GROUPED_VECTORS) == 4


@pytest.mark.parametrize("vector", GROUPED_VECTORS, ids=lambda v: v["source"].split(".")[0])
def test_golden_vector_is_reproduced_byte_for_byte(vector: dict[str, Any], encode: Callable[..., Any]) -> None:
    source, payload = np.load(GOLDEN / vector["source"]), (GOLDEN / vector["payload"]).read_bytes()
    for lanes in (128, 1 << 19):
        assert encode(source, vector["format"], lanes=lanes)[0] == payload
    if source.dtype == np.uint16:  # the same values as float32 take the path of host scales
        assert encode(floats(source), vector["format"])[0] == payload


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 576, 4304])
def test_boundary_widths_equal_the_numpy_encoder(format: str, k: int, fresh_seed: int) -> None:
    words = normal_words((7, k), fresh_seed)
    words[3] = 0
    words[5, ::2] = 0x8000
    assert encode_matrix(words, format, lanes=256)[0] == encode_tensor(floats(words), format, ROW_SPLIT)


@pytest.mark.parametrize("format", FORMATS)
def test_every_bf16_magnitude_as_group_maximum_equals_the_numpy_encoder(format: str) -> None:
    fmt = NUMERIC_FORMATS[format]
    top = int(np.float32(scale_table(fmt).first_refused).view(np.uint32)) >> 16
    magnitudes = np.arange(top, dtype=np.uint16)
    rng = np.random.default_rng(1)
    rows = np.empty((top, fmt.group), np.uint16)
    rows[:, 0] = magnitudes
    others = rng.integers(0, 1 << 16, (top, fmt.group - 1), dtype=np.uint32)
    rows[:, 1:] = np.minimum(others & 0x7FFF, magnitudes[:, None]) | (others & 0x8000)
    rows[1::2, 1] = magnitudes[1::2] | 0x8000
    assert encode_matrix(rows, format)[0] == encode_tensor(floats(rows), format, ROW_SPLIT)


def test_scale_division_is_ieee_at_the_known_trap(encode: Callable[..., Any]) -> None:
    payload, _ = encode(np.full((1, 64), 0x3636, np.uint16), "Q4G64_F16S")
    assert payload[256:258] == bytes([0x06, 0x00])


@pytest.mark.parametrize("format", FORMATS)
def test_nonzero_group_below_the_smallest_scale_gets_the_smallest_scale(format: str) -> None:
    planes = row_split_planes(format, (1, 64))
    payload, _ = encode_matrix(words_of(np.full((1, 64), 2.0**-60)), format)
    stored = np.frombuffer(payload[planes.scale_offset :], np.uint16)
    assert stored[0] == MIN_SUBNORMAL
    assert not any(payload[: planes.scale_offset])


def test_subnormal_scale_reaches_qmin_and_clamps_at_qmax() -> None:
    values = np.zeros((1, 64), np.float32)
    values[0, :2] = np.float32(3.4 * 7 * 2.0**-24), np.float32(-3.4 * 7 * 2.0**-24)
    payload, _ = encode_matrix(values, "Q4G64_F16S")
    assert payload[0] == 0x87  # codes 7 and -8
    assert payload == encode_tensor(values, "Q4G64_F16S", ROW_SPLIT)


@pytest.mark.parametrize("format", FORMATS)
def test_scale_overflow_is_refused_exactly_where_the_numpy_encoder_refuses(format: str) -> None:
    limit = np.float32(65520 * NUMERIC_FORMATS[format].qmax)
    values = np.zeros((3, 70), np.float32)
    values[2, 66] = np.nextafter(limit, np.float32(0))
    assert encode_matrix(values, format)[0] == encode_tensor(values, format, ROW_SPLIT)
    values[2, 66] = -limit
    with pytest.raises(EncodeError):
        encode_tensor(values, format, ROW_SPLIT)
    with pytest.raises(BadValue, match="binary16") as caught:
        encode_matrix(values, format)
    assert (caught.value.row, caught.value.column, caught.value.value) == (2, 66, float(-limit))


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF])
@pytest.mark.parametrize("kind", ["words", "floats"])
def test_nan_and_infinity_are_refused_by_row_and_column(
    bad: int, kind: str, encode: Callable[..., Any], fresh_seed: int
) -> None:
    words = normal_words((9, 200), fresh_seed)
    words[6, 130], words[7, 0] = bad, 0x7F80
    with pytest.raises(BadValue, match="finite") as caught:
        encode(words if kind == "words" else floats(words), "Q5G64_F16S", lanes=256)
    assert (caught.value.row, caught.value.column) == (6, 130)
    with pytest.raises(BadValue) as direct:
        check_finite(words, first_row=10)
    assert (direct.value.row, direct.value.column) == (16, 130)


@pytest.mark.parametrize("format", FORMATS)
def test_error_sums_are_those_of_the_decoded_matrix(format: str, encode: Callable[..., Any], fresh_seed: int) -> None:
    words = normal_words((50, 300), fresh_seed)
    payload, sums = encode(words, format, lanes=4 * 384)
    source = floats(words).astype(np.float64)
    error = source - decode_tensor(payload, format, ROW_SPLIT, words.shape)
    assert sums.largest == pytest.approx(np.abs(error).max(), rel=1e-6)
    assert sums.squares == pytest.approx((error**2).sum(), rel=1e-4)
    assert sums.source_squares == pytest.approx((source**2).sum(), rel=1e-4)


def test_largest_error_is_skipped_only_where_it_cannot_be_larger(fresh_seed: int) -> None:
    fmt, encoder = NUMERIC_FORMATS["Q4G64_F16S"], GroupEncoder(1 << 12)
    words = normal_words((8, 128), fresh_seed)
    payload = np.zeros(row_split_planes(fmt.name, words.shape).total_bytes, np.uint8)
    planes = plane_rows(payload, row_split_planes(fmt.name, words.shape), 0, 8)
    exact = encoder.encode(words, fmt, planes).largest
    assert encoder.encode(words, fmt, planes, known_largest=exact / 2).largest == exact
    assert encoder.encode(words, fmt, planes, known_largest=exact * 4).largest == exact * 4


def test_scratch_of_one_matrix_never_leaks_into_the_next(fresh_seed: int) -> None:
    fmt, encoder = NUMERIC_FORMATS["Q6G64_F16S"], GroupEncoder(1 << 12)
    for k in (384, 65, 1, 200, 128):
        words = normal_words((5, k), fresh_seed)
        planes = row_split_planes(fmt.name, words.shape)
        payload = np.full(planes.total_bytes, 0xAA, np.uint8)
        for begin, end in ((0, 2), (2, 5)):
            encoder.encode(words[begin:end].copy(), fmt, plane_rows(payload, planes, begin, end))
        expected = np.frombuffer(encode_tensor(floats(words), fmt.name, ROW_SPLIT), np.uint8)
        found, wanted = plane_rows(payload, planes, 0, 5), plane_rows(expected, planes, 0, 5)
        assert [plane.tobytes() for plane in found] == [plane.tobytes() for plane in wanted]


def test_encoding_leaves_its_input_alone(fresh_seed: int) -> None:
    words = normal_words((4, 256), fresh_seed)
    for rows in (words, floats(words)):
        before = rows.copy()
        encode_matrix(rows, "W8G32_F16S")
        assert np.array_equal(rows, before)


def test_block_is_scripted_on_this_interpreter() -> None:
    assert isinstance(scripted_block(), torch.jit.ScriptFunction)


def test_direct_words_are_copied_widened_and_transposed_exactly(fresh_seed: int) -> None:
    words = normal_words((6, 4), fresh_seed)
    words[0] = 0x8000, 0x0001, 0x807F, 0x7F7F  # -0, subnormals, the largest value
    transposed, widened = np.empty((4, 6), np.uint16), np.empty(24, np.float32)
    store_transposed(words, transposed)
    store_widened(words, widened)
    assert np.array_equal(transposed, words.T)
    assert np.array_equal(widened.view(np.uint32), words.ravel().astype(np.uint32) << 16)
    check_finite(words)
    words[2, 1] = 0xFF80
    with pytest.raises(BadValue):
        store_transposed(words, transposed)
    with pytest.raises(BadValue):
        store_widened(words, widened)
