"""Group scales of least squared error: never worse than the canonical ones, close to the best there is, same rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_format.codec import encode_tensor, pack_tensor, unpack_tensor
from ninfer_format.errors import EncodeError
from ninfer_format.formats import NUMERIC_FORMATS, ROW_SPLIT, NumericFormat
from ninfer_format.numeric.grouped import GroupedWords, groups_of, quantize_groups
from ninfer_format.numeric.grouped_mse import COARSE_STEPS, quantize_groups_mse
from ninfer_format.numeric.least_squares import sum_of_squares

Floats = NDArray[np.float32]
FORMATS = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")
SHARE_OF_NORMAL = {"Q4G64_F16S": 0.225, "Q5G64_F16S": 0.14, "Q6G64_F16S": 0.12, "W8G32_F16S": 0.14}
"""Share of the canonical encoder's squared error that the search removes from normal weights, to 0.04."""


def by_group(matrix: NDArray[Any], fmt: NumericFormat) -> NDArray[Any]:
    """[N, K] → [N, groups, G], zero beyond K."""
    n, k = matrix.shape
    groups = groups_of(k, fmt)
    return np.pad(matrix, ((0, 0), (0, groups * fmt.group - k))).reshape(n, groups, fmt.group)


def group_errors(values: Floats, words: GroupedWords, fmt: NumericFormat, columns: Floats | None) -> Any:
    """float64 [N, groups]: (weighted) squared errors."""
    scales = np.ascontiguousarray(words.scales).view(np.float16).astype(np.float64)
    errors = (by_group(values.astype(np.float64), fmt) - by_group(words.codes, fmt) * scales[..., np.newaxis]) ** 2
    if columns is not None:
        errors *= by_group(columns.astype(np.float64)[np.newaxis], fmt)
    return errors.sum(axis=-1)


def drawn(seed: int) -> dict[str, Floats]:
    rng, shape = np.random.default_rng(seed), (24, 200)
    cases = {
        "normal": rng.standard_normal(shape),
        "heavy tails": rng.standard_t(2, shape),
        "uniform": rng.uniform(-1, 1, shape),
        "one sign": -rng.random(shape),
        "ternary": rng.choice([-0.7, 0, 0.7], shape),
        "rows of all sizes": rng.standard_normal(shape) * np.exp2(rng.integers(-45, 12, (shape[0], 1))),
        "all sizes": rng.standard_normal(shape) * np.exp2(rng.integers(-60, 12, shape)),
        "subnormal scales": rng.standard_normal(shape) * 2e-6,
        "subnormal values": rng.standard_normal(shape) * 1e-41,
        "zeros": rng.choice([0.0, -0.0], shape),
    }
    return {name: values.astype(np.float32) for name, values in cases.items()}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_no_group_is_worse_than_with_its_canonical_scale(format: str, weighted: bool, fresh_seed: int) -> None:
    fmt, rng = NUMERIC_FORMATS[format], np.random.default_rng(fresh_seed)
    for name, values in drawn(fresh_seed).items():
        columns = np.exp(3 * rng.standard_normal(values.shape[1])).astype(np.float32) if weighted else None
        canonical = group_errors(values, quantize_groups(values, fmt), fmt, columns)
        searched = group_errors(values, quantize_groups_mse(values, fmt, columns), fmt, columns)
        assert (searched <= canonical).all(), name


@pytest.mark.parametrize("format", FORMATS)
def test_search_removes_a_stated_share_of_the_error_of_normal_weights(format: str, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[format]
    values = np.random.default_rng(fresh_seed).standard_normal((256, 512), np.float32)
    words = quantize_groups(values, fmt), quantize_groups_mse(values, fmt)
    canonical, searched = (group_errors(values, w, fmt, None).sum() for w in words)
    assert 1 - searched / canonical == pytest.approx(SHARE_OF_NORMAL[format], abs=0.04)


@pytest.mark.parametrize("format", FORMATS)
def test_search_comes_close_to_the_best_of_all_binary16_scales(format: str, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[format]
    values = np.random.default_rng(fresh_seed).standard_normal((400, fmt.group), np.float32)
    found = group_errors(values, quantize_groups_mse(values, fmt), fmt, None)[:, 0]
    amax = np.abs(values).max(axis=1)
    least, most = (
        (amax / np.float32(fmt.qmax + t)).astype(np.float16).view(np.uint16) for t in (8, COARSE_STEPS[0] - 0.5)
    )
    best = np.full(len(values), np.inf)
    for row, x in enumerate(values):
        scales = np.arange(int(least[row]), int(most[row]) + 1, dtype=np.uint16).view(np.float16).astype(np.float32)
        codes = np.clip(np.rint(x * (np.float32(1) / scales)[:, np.newaxis]), fmt.qmin, fmt.qmax)
        best[row] = ((x - codes.astype(np.float64) * scales[:, np.newaxis]) ** 2).sum(axis=1).min()
    assert (found >= best * (1 - 1e-12)).all()
    canonical = group_errors(values, quantize_groups(values, fmt), fmt, None)[:, 0]
    assert (canonical - found).sum() >= (0.75 if fmt.bits == 8 else 0.85) * (canonical - best).sum()


@pytest.mark.parametrize("format", FORMATS)
def test_codes_follow_from_the_scale_by_the_canonical_rule_and_pack(format: str, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[format]
    for name, values in drawn(fresh_seed).items():
        words = quantize_groups_mse(values, fmt)
        scales = np.ascontiguousarray(words.scales).view(np.float16).astype(np.float32)
        with np.errstate(divide="ignore"):
            inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        lanes = by_group(values, fmt) * inverse[..., np.newaxis]
        assert (by_group(words.codes, fmt) == np.clip(np.rint(lanes), fmt.qmin, fmt.qmax)).all(), name
        payload = pack_tensor(words.codes, words.scales, None, format, ROW_SPLIT)
        restored = unpack_tensor(payload, format, ROW_SPLIT, values.shape)
        assert (restored.codes == words.codes).all(), name


@pytest.mark.parametrize("format", FORMATS)
def test_groups_without_a_choice_keep_their_canonical_words(format: str) -> None:
    fmt = NUMERIC_FORMATS[format]
    values = np.zeros((3, 130), np.float32)
    values[1] = 1e-30
    values[2] = np.float32(0.5) * np.where(np.arange(130) % 3, 1, -1)
    canonical, searched = quantize_groups(values, fmt), quantize_groups_mse(values, fmt)
    assert (searched.scales[:2] == canonical.scales[:2]).all()
    assert (searched.codes[:2] == canonical.codes[:2]).all()
    assert not searched.scales[0].any()
    assert (searched.scales[1] == 1).all()
    assert (group_errors(values, searched, fmt, None) <= group_errors(values, canonical, fmt, None)).all()


def test_extreme_negative_code_is_used() -> None:
    fmt = NUMERIC_FORMATS["Q4G64_F16S"]
    values = np.tile(np.arange(-8, 8, dtype=np.float32), (1, 4)) * np.float32(0.25)
    words = quantize_groups_mse(values, fmt)
    assert words.scales[0, 0] == np.float16(0.25).view(np.uint16)
    assert words.codes.min() == -8
    assert not group_errors(values, words, fmt, None).any()


@pytest.mark.parametrize("format", FORMATS)
def test_equal_importance_gives_the_bytes_of_none(format: str, fresh_seed: int) -> None:
    fmt = NUMERIC_FORMATS[format]
    values = np.random.default_rng(fresh_seed).standard_normal((16, 200), np.float32)
    plain = quantize_groups_mse(values, fmt)
    for weight in (1, 2.0**-90):
        same = quantize_groups_mse(values, fmt, np.full(200, weight, np.float32))
        assert (same.codes == plain.codes).all()
        assert (same.scales == plain.scales).all()


@pytest.mark.parametrize("format", FORMATS)
def test_columns_of_no_importance_do_not_count(format: str, fresh_seed: int) -> None:
    fmt, rng = NUMERIC_FORMATS[format], np.random.default_rng(fresh_seed)
    values = rng.standard_normal((64, 512), np.float32)
    columns = (rng.random(512) < 0.5).astype(np.float32)
    outlying = np.where(columns > 0, values, 1.5 * values).astype(np.float32)
    canonical = group_errors(outlying, quantize_groups(outlying, fmt), fmt, columns).sum()
    searched = group_errors(outlying, quantize_groups_mse(outlying, fmt, columns), fmt, columns).sum()
    assert searched < 0.9 * canonical


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused_as_by_the_canonical_encoder(format: str, bad: float) -> None:
    values = np.zeros((3, 100), np.float32)
    values[1, 70] = bad
    with pytest.raises(EncodeError) as expected:
        encode_tensor(values, format, ROW_SPLIT)
    with pytest.raises(EncodeError) as found:
        quantize_groups_mse(values, NUMERIC_FORMATS[format])
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_magnitudes_are_beyond_the_format(format: str) -> None:
    fmt = NUMERIC_FORMATS[format]
    values = np.zeros((1, 64), np.float32)
    values[0, 3] = np.nextafter(np.float32(65520 * fmt.qmax), np.float32(0))
    assert quantize_groups_mse(values, fmt).scales.max() <= 0x7BFF
    values[0, 3] = 65520 * fmt.qmax
    with pytest.raises(EncodeError, match="beyond binary16"):
        quantize_groups_mse(values, fmt)


def test_importance_that_does_not_fit_is_refused() -> None:
    with pytest.raises(EncodeError, match=r"shape \[5\].*64 columns"):
        quantize_groups_mse(np.ones((1, 64), np.float32), NUMERIC_FORMATS["Q4G64_F16S"], np.ones(5, np.float32))


def test_sums_are_added_in_the_stated_order(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    errors, weights = rng.standard_normal((50, 32), np.float32), rng.random(32, np.float32)
    found = sum_of_squares(errors.copy(), weights)
    for row, total in zip(errors, found, strict=True):
        lanes = [np.float32(np.float32(e * e) * w) for e, w in zip(row, weights, strict=True)]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [np.float32(a + b) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        assert lanes[0] == total
