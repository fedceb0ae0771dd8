"""Scales of the canonical encoder MAXABS_F16_RECIP_RNE_V1 (specs/formats.md §3): from a group's largest magnitude.

The division stays on the host in numpy: IEEE division of float32, whatever device quantizes. A device may turn a
division by a constant into a multiplication by its reciprocal, which gives other scales at ties.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ninfer_format.formats import NumericFormat

MIN_SUBNORMAL = 0x0001
"""binary16 word 2^-24, the scale of a nonzero group whose own scale rounds to zero."""
MIN_NORMAL = 0x0400
"""Smallest normal binary16 word; with a smaller scale, codes beyond ±qmax occur and must be clamped."""


class Scales(NamedTuple):
    """Per group: binary16 ``words`` uint16, ``inverses`` float32 (0 for an all-zero group), ``values`` float32."""

    words: NDArray[np.uint16]
    inverses: NDArray[np.float32]
    values: NDArray[np.float32]


def scales_of(amax: NDArray[np.float32], fmt: NumericFormat) -> Scales:
    """Scales of groups whose largest magnitudes are ``amax`` (finite, below ``first_refused``)."""
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        words = (amax / np.float32(fmt.qmax)).astype(np.float16).view(np.uint16)
        words[(words == 0) & (amax > 0)] = MIN_SUBNORMAL
        values = words.view(np.float16).astype(np.float32)
        inverse = np.float32(1) / values
    inverse[amax == 0] = 0
    return Scales(words, inverse, values)


@dataclass(frozen=True, slots=True)
class ScaleTable:
    """``scales_of`` for every finite BF16 magnitude, indexed by the magnitude's word (0x0000..0x7f7f)."""

    scales: Scales
    first_refused: float
    """Smallest magnitude whose scale would round to infinity: 65520 · qmax, exactly."""
    first_normal: float
    """Smallest BF16 magnitude whose scale is a normal binary16; with this and above no code needs clamping."""


@cache
def scale_table(fmt: NumericFormat) -> ScaleTable:
    """The table of ``fmt``, made once: BF16 has only 32,640 finite magnitudes."""
    magnitudes = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    scales = scales_of(magnitudes, fmt)
    first_normal = magnitudes[int(np.searchsorted(scales.words, MIN_NORMAL))]
    for column in scales:
        column.flags.writeable = False
    return ScaleTable(scales, 65520.0 * fmt.qmax, float(first_normal))
