"""Group scales of least squared error for Q4, Q5, Q6 and W8 (specs/formats.md, Least-squares group scales).

The same formats and the same rule from scale to code as the canonical encoder; only the scale of each group is searched
for. This is the yardstick; ninfer_convert/quantize/groupwise_mse.py gives the same bytes with torch.
"""

import numpy as np
import numpy.typing as npt

from ninfer_format.formats import ROW_SPLIT_COLUMNS, NumericFormat
from ninfer_format.geometry import up
from ninfer_format.numeric.grouped import (
    MIN_SUBNORMAL,
    SCALE_INFINITY,
    GroupedWords,
    groups_of,
    pad_to_groups,
    quantize_tile,
    tiles,
)
from ninfer_format.numeric.least_squares import KEEP, Floats, relative_importance, sum_of_squares

Words = npt.NDArray[np.uint16]

COARSE_STEPS = tuple(quarter / 4 for quarter in range(-6, 11))
"""Where the largest magnitude is put, in codes beyond qmax: -1.5 to 2.5."""
FINE_STEPS = (-0.1875, -0.125, -0.0625, 0.0625, 0.125, 0.1875)
"""The same, relative to the best of the coarse ones."""
MAX_SCALE = SCALE_INFINITY - 1

_EXPONENT = np.uint32(0x7F80_0000)
_LEAST_EXPONENT = np.uint32(0x0080_0000)


def coarse_factors(fmt: NumericFormat) -> Floats:
    """f32(1 / (qmax + t)): times a group's largest magnitude, the scales that are tried first."""
    return np.array([1 / (fmt.qmax + t) for t in COARSE_STEPS], np.float32)


def fine_factors(fmt: NumericFormat) -> Floats:
    """f32(1 + t / qmax): times the best scale so far, the scales that are tried then."""
    return np.array([1 + t / fmt.qmax for t in FINE_STEPS], np.float32)


def quantize_groups_mse(values: Floats, fmt: NumericFormat, importance: Floats | None = None) -> GroupedWords:
    """float32 [N, K] → codes int8 [N, K] and scale words uint16 [N, ceil(K / G)] of least squared error.

    ``importance`` float32 [K] weighs the squared errors of columns. Never a larger (weighted) error in any group than
    the canonical encoder's. Raises EncodeError as that does, and for an importance that does not fit.
    """
    n_rows, k = values.shape
    groups = up(k, ROW_SPLIT_COLUMNS) // fmt.group
    weights = relative_importance(importance, k)
    by_group = None
    if weights is not None:
        by_group = np.pad(weights, (0, groups * fmt.group - k)).reshape(groups, fmt.group)
    codes = np.empty((n_rows, groups, fmt.group), np.int8)
    scales = np.empty((n_rows, groups), np.uint16)
    for tile in tiles(n_rows, groups, fmt):
        columns = tile.columns(fmt)
        part = pad_to_groups(values[tile.rows, columns], tile, fmt)
        quantize_tile(part, fmt, codes[tile], scales[tile], tile.rows.start, columns.start)
        with np.errstate(all="ignore"):
            found = search_scales(part, scales[tile], fmt, None if by_group is None else by_group[tile.groups])
            multiplier = found.view(np.float16).astype(np.float32)[..., np.newaxis]
            inverse = np.where(multiplier > 0, np.float32(1) / multiplier, np.float32(0))
            np.copyto(codes[tile], np.clip(np.rint(part * inverse), fmt.qmin, fmt.qmax), casting="unsafe")
        scales[tile] = found
    return GroupedWords(codes.reshape(n_rows, -1)[:, :k], scales[:, : groups_of(k, fmt)])


def search_scales(values: Floats, canonical: Words, fmt: NumericFormat, weights: Floats | None) -> Words:
    """Scale words for groups ``values`` [rows, groups, G], starting from the ``canonical`` ones [rows, groups].

    ``weights`` [groups, G]. The canonical word stays unless another gets below ``KEEP`` of its error; among others of
    equal error the lowest word wins.
    """
    amax = np.abs(values).max(axis=-1)
    # Errors are computed on values scaled by a power of two per group, so no square over- or underflows.
    exponent = np.maximum(amax.view(np.uint32) & _EXPONENT, _LEAST_EXPONENT)
    down = (np.uint32(0x7F00_0000) - exponent).view(np.float32)
    scaled = values * down[..., np.newaxis]

    def errors_of(words: Words) -> Floats:
        multiplier = words.view(np.float16).astype(np.float32)
        inverse = np.float32(1) / multiplier * exponent.view(np.float32)
        codes = np.clip(np.rint(scaled * inverse[..., np.newaxis]), fmt.qmin, fmt.qmax).astype(np.float32)
        return sum_of_squares(scaled - codes * (multiplier * down)[..., np.newaxis], weights)

    start = np.maximum(canonical, MIN_SUBNORMAL)
    best, words = errors_of(start) * KEEP, start.copy()

    def try_scales(scales: Floats) -> None:
        nonlocal best, words
        tried = np.clip(scales.astype(np.float16).view(np.uint16), MIN_SUBNORMAL, MAX_SCALE)
        error = errors_of(tried)
        better = (error < best) | ((error == best) & (words != start) & (tried < words))
        best, words = np.where(better, error, best), np.where(better, tried, words)

    for factor in coarse_factors(fmt):
        try_scales(amax * factor)
    settled = words.view(np.float16).astype(np.float32)
    for factor in fine_factors(fmt):
        try_scales(settled * factor)
    return np.where(words == start, canonical, words)
