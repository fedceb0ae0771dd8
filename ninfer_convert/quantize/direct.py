"""Direct objects: BF16 words stored as they are, transposed, or widened to FP32; only finite values pass."""

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.quantize.bad_value import NOT_FINITE, BadValue
from ninfer_format.numeric.direct import widen_bf16

Words = NDArray[np.uint16]

_POSITIVE_INFINITY = 0x7F80
_NEGATIVE_INFINITY = 0xFF80


def check_finite(words: Words, first_row: int = 0) -> None:
    """Raise BadValue at the first NaN or infinity of BF16 ``words`` [n, K], rows numbered from ``first_row``."""
    if not words.size:
        return
    # Two maxima without temporaries: non-finite words are the largest of their sign, as int16 and as uint16.
    if int(words.view(np.int16).max()) < _POSITIVE_INFINITY and int(words.max()) < _NEGATIVE_INFINITY:
        return
    bad = (words & _POSITIVE_INFINITY) == _POSITIVE_INFINITY
    row, column = np.unravel_index(int(bad.argmax()), bad.shape)
    value = float(widen_bf16(words[row, column : column + 1])[0])
    raise BadValue(first_row + int(row), int(column), value, NOT_FINITE)


def store_transposed(words: Words, out: Words) -> None:
    """``out`` [T, C] = the transpose of ``words`` [C, T]; BadValue for non-finite values."""
    check_finite(words)
    out[...] = words.T


def store_widened(words: Words, out: NDArray[np.float32]) -> None:
    """``out`` = BF16 ``words`` (same number of elements) as float32, exactly; BadValue for non-finite values."""
    check_finite(words)
    widen_bf16(words.reshape(out.shape), out)
