"""Rows of activations as signed bytes with a scale per 64 columns (specs/formats.md §11)."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GROUP = 64
"""Columns that share a scale."""
LARGEST = 127


class Int8Rows(NamedTuple):
    """``codes`` int8 [T, K]; ``scales`` float32 [T, K/64]."""

    codes: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """code · scale, exact in float64."""
        return self.codes.astype(np.float64) * np.repeat(self.scales.astype(np.float64), GROUP, axis=1)


def int8_rows(x: npt.NDArray[np.float32]) -> Int8Rows:
    """Words of finite rows [T, K], K a multiple of 64, each operation rounded to float32.

    scale = f32(max |x| / 127), code = rint(f32(x · f32(127 / max |x|))), ties to even; a group of zeros has scale 0.
    """
    groups = np.ascontiguousarray(x, np.float32).reshape(x.shape[0], -1, GROUP)
    amax = np.abs(groups).max(axis=-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax == 0, np.float32(0), np.float32(LARGEST) / amax)
    codes = np.rint(groups * inverse[..., np.newaxis]).astype(np.int8)
    return Int8Rows(codes.reshape(x.shape), amax / np.float32(LARGEST))
