"""Plain floating-point sources: BF16 words as they are, F16 and F32 rounded to them."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ninfer_format import SourceError

DIRECT_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
"""Safetensors dtypes that hold plain weights, as numpy reads them (BF16 as words)."""


def to_bf16_words(values: NDArray[np.generic], *, where: str, first_index: int = 0) -> NDArray[np.uint16]:
    """Round F16 or F32 ``values`` to BF16 words, nearest, ties to even; NaN stays NaN and infinity infinity.

    SourceError if a finite value is too large for BF16; the message counts elements from ``first_index``.
    """
    bits = values.astype(np.float32).view(np.uint32)
    words = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    words[nan] = 0x7FC0
    overflowed = np.flatnonzero(((words & 0x7F80) == 0x7F80) & ((bits & 0x7F800000) != 0x7F800000))
    if overflowed.size:
        index = int(overflowed[0])
        raise SourceError(
            f"{where}: element {first_index + index} is {values[index]}, too large for BF16 (at most 3.3895e38)"
        )
    return words
