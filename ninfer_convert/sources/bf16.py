"""Plain floating-point sources: BF16 words as they are, F16 and F32 rounded to them."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ninfer_format import SourceError
from ninfer_format.numeric.direct import round_bf16

DIRECT_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
"""Safetensors dtypes that hold plain weights, as numpy reads them (BF16 as words)."""

_EXPONENT = 0x7F80


def to_bf16_words(values: NDArray[np.generic], *, where: str, first_index: int = 0) -> NDArray[np.uint16]:
    """Round F16 or F32 ``values`` to BF16 words, nearest, ties to even; NaN stays NaN and infinity infinity.

    SourceError if a finite value is too large for BF16; the message counts elements from ``first_index``.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN is no reason to warn: the value scan refuses it
        singles = values.astype(np.float32)
    words = round_bf16(singles)
    overflowed = np.flatnonzero(((words & _EXPONENT) == _EXPONENT) & np.isfinite(singles))
    if overflowed.size:
        index = int(overflowed[0])
        raise SourceError(
            f"{where}: element {first_index + index} is {singles[index]:.6g}, beyond the largest BF16 value; "
            "the model cannot be stored in BF16, use another checkpoint"
        )
    return words
