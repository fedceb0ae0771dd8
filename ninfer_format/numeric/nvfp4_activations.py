"""Rows of activations as NVFP4: E2M1 codes and E4M3FN scales under a fixed divisor (specs/formats.md §10).

The divisor belongs to the site, not to the row: a row's words depend on nothing but the row.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ninfer_format.numeric.nvfp4 import BLOCK, E2M1, E4M3FN, MAX_SCALE
from ninfer_format.numeric.nvfp4_encode import SCALES, e2m1_words

NAN_SCALE = 0x7F
"""Scale word of a block that holds NaN."""
_MIDPOINTS = (SCALES[:-1].astype(np.float64) + SCALES[1:]) / 2


class QuantizedRows(NamedTuple):
    """``codes`` uint8 [T, K], a word each; ``scales`` uint8 [T, K/16]."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]

    @property
    def products(self) -> npt.NDArray[np.float32]:
        """code · scale, float32 [T, K], exact there and in bfloat16; the value is this over the divisor."""
        blocks = E2M1[self.codes].reshape(*self.scales.shape, BLOCK) * E4M3FN[self.scales][..., np.newaxis]
        return blocks.reshape(self.codes.shape)


def nearest_scale(value: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """E4M3FN words nearest to values ≥ 0, ties to the even word; beyond 448 and infinity 448, of NaN ``NAN_SCALE``."""
    low = np.searchsorted(_MIDPOINTS, value, side="left")
    high = np.searchsorted(_MIDPOINTS, value, side="right")
    words = np.where((low != high) & (high % 2 == 0), high, low)
    return np.where(np.isnan(value), NAN_SCALE, np.minimum(words, MAX_SCALE)).astype(np.uint8)


def quantize_rows(x: npt.NDArray[np.float32], divisor: np.float32) -> QuantizedRows:
    """Words of rows [T, K], K a multiple of 16, each operation rounded to float32.

    scale = E4M3FN(f32(f32(d · max |x|) / 6)), code = E2M1(f32(d x) / scale): to nearest, ties to even, saturating. A
    zero keeps its sign; where the scale rounds to zero all codes are +0.
    """
    with np.errstate(all="ignore"):
        blocks = np.ascontiguousarray(x, np.float32).reshape(x.shape[0], -1, BLOCK)
        scales = nearest_scale(np.abs(blocks).max(axis=-1) * divisor / np.float32(6))
        scaled = blocks * divisor
        # No float32 lies so close to a midpoint that the rounded quotient would fall on it.
        codes = e2m1_words(np.abs(scaled) / E4M3FN[scales][..., np.newaxis])
        codes |= np.signbit(scaled).astype(np.uint8) << 3
        codes[scales == 0] = 0
    return QuantizedRows(codes.reshape(x.shape), scales)
