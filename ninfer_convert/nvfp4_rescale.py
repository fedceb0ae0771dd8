"""One divisor for a fused NVFP4 matrix whose parts have different ones: block scales are rounded anew, codes stay.

A weight is code · scale / divisor, so with divisor d in place of d_i the scale of part i becomes scale · d / d_i, to
the nearest E4M3FN word, ties to even: at most half a step away. specs/conversion.md, Sources.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ninfer_format.numeric.nvfp4 import E4M3FN, MAX_SCALE

_SCALES = E4M3FN[: MAX_SCALE + 1].astype(np.float64)
_MIDPOINTS = (_SCALES[:-1] + _SCALES[1:]) / 2
_LARGEST = float(_SCALES[-1])


def common_divisor(divisors: Sequence[np.float32], n_rows: Sequence[int], largest_words: Sequence[int]) -> np.float32:
    """The divisor that a matrix of parts with ``divisors``, ``n_rows`` and largest scale words gets.

    Among those under which no part's scales exceed the largest E4M3FN value (the smallest never makes one do), the one
    that most rows have already, because these stay exact; of equally many the largest, because scales lose precision
    below the smallest normal one.
    """
    rows_of: dict[np.float32, int] = {}
    for divisor, rows in zip(divisors, n_rows, strict=True):
        rows_of[divisor] = rows_of.get(divisor, 0) + rows

    def fits(divisor: np.float32) -> bool:
        return all(
            _SCALES[word] * (float(divisor) / float(own)) <= _LARGEST
            for own, word in zip(divisors, largest_words, strict=True)
        )

    return max((d for d in rows_of if fits(d)), key=lambda d: (rows_of[d], d))


def rescaled_words(own: np.float32, common: np.float32) -> NDArray[np.uint8]:
    """Table from legal scale words under ``own`` to those under ``common``, uint8 [127]; saturates at the largest."""
    values = _SCALES * (float(common) / float(own))
    words = np.searchsorted(_MIDPOINTS, values, side="left")
    tie = (words < _MIDPOINTS.size) & (_MIDPOINTS[np.minimum(words, _MIDPOINTS.size - 1)] == values)
    out: NDArray[np.uint8] = (words + (tie & (words % 2 == 1))).astype(np.uint8)
    return out
