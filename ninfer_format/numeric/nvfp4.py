"""NVFP4: E2M1 codes, E4M3FN block scales of 16 columns, one float32 divisor per matrix (specs/formats.md §5)."""

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import EncodeError

BLOCK = 16
"""Columns that share one block scale."""
MAX_SCALE = 0x7E
"""Largest legal E4M3FN scale word (448); 0x7f is NaN and words with bit 7 set are negative."""

Float = TypeVar("Float", np.float32, np.float64)


def _e2m1_table() -> npt.NDArray[np.float32]:
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([magnitudes, -magnitudes])


def _e4m3fn_table() -> npt.NDArray[np.float32]:
    word = np.arange(128)
    exponent, mantissa = word >> 3, word & 7
    magnitudes = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitudes[0x7F] = np.nan
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float32)


E2M1 = _e2m1_table()
"""float32 value of each of the 16 E2M1 words; 0x8 is -0."""
E4M3FN = _e4m3fn_table()
"""float32 value of each of the 256 E4M3FN words; 0x7f and 0xff are NaN."""
# Both values of a packed byte as one 8-byte table entry: one lookup per two columns.
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1).view(np.uint64).reshape(256)
E2M1.flags.writeable = E4M3FN.flags.writeable = _PAIRS.flags.writeable = False


def pack_nibbles(nibbles: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """One code per byte [N, K] → packed pairs [N, K/2]; the low nibble is the even column."""
    pairs = np.left_shift(nibbles[:, 1::2], 4, dtype=np.uint8)
    return np.bitwise_or(pairs, nibbles[:, 0::2], out=pairs)


def split_nibbles(pairs: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Packed pairs [N, K/2] → one code per byte [N, K]."""
    out = np.empty((pairs.shape[0], pairs.shape[1] * 2), np.uint8)
    np.bitwise_and(pairs, 15, out=out[:, 0::2])
    np.right_shift(pairs, 4, out=out[:, 1::2])
    return out


def legal_divisor(divisor: np.float32) -> bool:
    """Whether a weight or input scale divisor is finite and greater than zero."""
    return bool(np.isfinite(divisor) and divisor > 0)


def checked_divisor(divisor: np.floating[Any] | float | None) -> np.float32:
    """``divisor`` as the float32 word to store; EncodeError if absent, illegal, or not exactly a float32."""
    if divisor is None:
        raise EncodeError("NVFP4 needs the divisor of the matrix, found none")
    with np.errstate(all="ignore"):
        word = np.float32(divisor)
    if not legal_divisor(word):
        raise EncodeError(f"NVFP4 divisor {divisor} must be finite and greater than 0")
    if float(word) != float(divisor):
        raise EncodeError(f"NVFP4 divisor {divisor!r} is not a float32; pass the source's own float32 word")
    return word


def dequantize(
    pairs: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], divisor: np.float32, out: npt.NDArray[Float]
) -> None:
    """``out`` [N, K] = e2m1(code) * e4m3fn(scale) / divisor, in the precision of ``out`` (float32 or float64).

    ``pairs`` packed codes uint8 [N, K/2], ``scales`` uint8 [N, K/16] in natural order. The product is exact in either
    precision, so the result is the quotient rounded once.
    """
    n_rows, width = pairs.shape
    values = np.take(_PAIRS, pairs).view(np.float32).reshape(n_rows, width // 8, BLOCK)
    with np.errstate(all="ignore"):
        products = np.multiply(values, E4M3FN[scales][..., np.newaxis], out=values).reshape(n_rows, width * 2)
        np.divide(products, divisor, out=out, dtype=out.dtype)
