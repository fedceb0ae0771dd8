"""Floats to NVFP4: methods ``max`` and ``mse`` (specs/formats.md, NVFP4 encoder). The yardstick for faster ones.

Everything that decides a byte is a comparison of exact numbers or a float32 operation in a stated order, so another
implementation can give the same bytes: see ninfer_convert/quantize/nvfp4.py for torch.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import EncodeError
from ninfer_format.numeric.least_squares import KEEP, Floats, relative_importance, sum_of_squares
from ninfer_format.numeric.nvfp4 import BLOCK, E2M1, E4M3FN, MAX_SCALE
from ninfer_format.numeric.nvfp4_divisor import (
    SquaredError,
    best_divisor,
    candidate_divisors,
    max_divisor,
    sample_bands,
    total_error,
)

Method = Literal["max", "mse"]

STEPS_DOWN, STEPS_UP, LOW_WORDS = 16, 7, 15
"""``mse`` tries this many scale words below and above the one of ``max``, and all up to ``LOW_WORDS``.

Without importance the best word is always among them. A scale more than 12/7 of the largest magnitude over 6 uses
codes up to 3 only, and half of it reaches the same products: 7 words up, except that odd words up to 15 have no half.
A scale below 0.35 of it loses more by clipping that one magnitude than all others can gain: 13 words down.
"""
SCALES = E4M3FN[: MAX_SCALE + 1]
"""float32 value of the legal scale words."""

_TILE_VALUES = 1 << 18
_FLOAT32_INFINITY = 0x7F80_0000


class Nvfp4Words(NamedTuple):
    """``codes`` uint8 [N, K/2], low nibble the even column; ``scales`` uint8 [N, K/16]; ``divisor``."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    divisor: np.float32


def _scale_thresholds() -> Floats:
    """Entry w: the smallest float32 that is nearer to a scale beyond word w; midpoints belong to the even word."""
    midpoints = ((SCALES[:-1].astype(np.float64) + SCALES[1:]) / 2).astype(np.float32)
    even = np.arange(MAX_SCALE) % 2 == 0
    midpoints[even] = np.nextafter(midpoints[even], np.float32(np.inf))
    return midpoints


_SCALE_THRESHOLDS = _scale_thresholds()


def encode_nvfp4(values: Floats, *, method: Method = "max", importance: Floats | None = None) -> Nvfp4Words:
    """Encode float32 [N, K], K a multiple of 16.

    ``importance`` float32 [K] weighs the squared errors of columns in ``mse``; ``max`` takes none. Code 8 (-0) is never
    written, and a block has scale word 0 exactly when all its codes are 0. Raises EncodeError for NaN, infinity, a K
    that does not divide into blocks, and an importance that is not one finite number ≥ 0 per column.
    """
    k = values.shape[1]
    if k % BLOCK:
        raise EncodeError(f"NVFP4 takes a multiple of {BLOCK} columns, found {k}")
    amax = largest_magnitude(values)
    plain = max_divisor(amax)
    if method == "max":
        if importance is not None:
            raise EncodeError("method max looks at magnitudes only; give importance to method mse")
        return _encode(values, plain, None, search=False)[0]
    weights = relative_importance(importance, k)
    divisor = choose_divisor(values, amax, weights)
    words, error = _encode(values, divisor, weights, search=True)
    if divisor != plain:
        _, error_of_max = _encode(values, plain, weights, search=False)
        # With the divisor of max no block is worse than there, so this way out never leads to a worse matrix.
        if error.of_weights(divisor) > error_of_max.of_weights(plain):
            words, _ = _encode(values, plain, weights, search=True)
    return words


def largest_magnitude(values: Floats) -> np.float32:
    """max |x| of a float32 matrix; EncodeError names the first NaN or infinity."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0x7FFF_FFFF)
    largest = bits.max(initial=0)
    if largest >= _FLOAT32_INFINITY:
        row, column = np.unravel_index(int((bits >= _FLOAT32_INFINITY).argmax()), bits.shape)
        raise EncodeError(
            f"value at row {row}, column {column} is {values[row, column]}; NVFP4 holds finite values only, so the "
            "source is damaged or was never valid"
        )
    return np.uint32(largest).view(np.float32)


def choose_divisor(values: Floats, amax: np.float32, weights: Floats | None) -> np.float32:
    """The divisor that method ``mse`` settles on for ``values`` [N, K] with largest magnitude ``amax``."""
    candidates = candidate_divisors(amax)
    if len(candidates) == 1:
        return candidates[0]
    sample = np.concatenate([values[begin:end] for begin, end in sample_bands(*values.shape)])
    return best_divisor(candidates, [_encode(sample, d, weights, search=True)[1] for d in candidates])


def scale_words(amax: Floats, divisor: np.float32) -> npt.NDArray[np.intp]:
    """Scale words of ``max`` for blocks with largest magnitudes ``amax``: f32(f32(amax / 6) * divisor), to nearest.

    At least 1: a block whose scale rounds to zero is better off with the smallest one.
    """
    scales = amax / np.float32(6) * divisor
    return np.maximum(np.searchsorted(_SCALE_THRESHOLDS, scales, side="right"), 1)


def e2m1_words(y: Floats) -> npt.NDArray[np.uint8]:
    """E2M1 words 0..7 nearest to ``y`` ≥ 0, ties to the even word, saturating at 6."""
    words = (y > 0.25).astype(np.uint8)
    for passed in (y >= 0.75, y > 1.25, y >= 1.75, y > 2.5, y >= 3.5, y > 5):
        words += passed
    return words


def block_errors(z: Floats, scales: npt.NDArray[np.intp], weights: Floats | None) -> Floats:
    """Squared error of blocks ``z`` [rows, blocks, 16] ≥ 0 under scale words [rows, blocks]; ``weights`` [blocks, 16].

    The differences z - code * scale are exact in float32.
    """
    s = SCALES[scales][..., np.newaxis]
    return sum_of_squares(z - E2M1[e2m1_words(z / s)] * s, weights)


def search_scales(
    z: Floats, start: npt.NDArray[np.intp], weights: Floats | None
) -> tuple[npt.NDArray[np.intp], Floats]:
    """Scale words of least error near ``start`` [rows, blocks], those of ``max``, and the errors of the result.

    ``start`` stays unless another gets below ``KEEP`` of
    its error; among others of equal error the lowest word wins.
    """
    start_error = block_errors(z, start, weights)
    best, words = start_error * KEEP, start.copy()
    highest = np.minimum(np.maximum(start + STEPS_UP, LOW_WORDS), MAX_SCALE)
    for step in range(max(STEPS_UP, LOW_WORDS - int(start.min())), -STEPS_DOWN - 1, -1):
        tried = np.clip(start + step, 1, highest)
        error = block_errors(z, tried, weights)
        better = (error < best) | ((error == best) & (words != start))
        best = np.where(better, error, best)
        words = np.where(better, tried, words)
    return words, np.where(words == start, start_error, best)


def _encode(
    values: Floats, divisor: np.float32, weights: Floats | None, *, search: bool
) -> tuple[Nvfp4Words, SquaredError]:
    n_rows, k = values.shape
    blocks = k // BLOCK
    codes = np.empty((n_rows, blocks, BLOCK // 2), np.uint8)
    scales = np.empty((n_rows, blocks), np.uint8)
    by_block = None if weights is None else weights.reshape(blocks, BLOCK)
    total = SquaredError()
    with np.errstate(all="ignore"):
        for rows in _row_tiles(n_rows, k):
            x = np.ascontiguousarray(values[rows], np.float32).reshape(-1, blocks, BLOCK)
            magnitudes = np.abs(x)
            words, z = scale_words(magnitudes.max(axis=-1), divisor), magnitudes * divisor
            if search:
                words, errors = search_scales(z, words, by_block)
            else:
                errors = block_errors(z, words, by_block)
            plain = e2m1_words(z / SCALES[words][..., np.newaxis])
            signed = plain | (((x < 0) & (plain > 0)).astype(np.uint8) << 3)
            codes[rows] = signed[..., 0::2] | (signed[..., 1::2] << 4)
            scales[rows] = np.where(plain.any(axis=-1), words, 0)
            total = total.plus(total_error(errors))
    return Nvfp4Words(codes.reshape(n_rows, k // 2), scales, divisor), total


def _row_tiles(n_rows: int, k: int) -> Iterator[slice]:
    step = max(1, _TILE_VALUES // k)
    for begin in range(0, n_rows, step):
        yield slice(begin, min(begin + step, n_rows))
