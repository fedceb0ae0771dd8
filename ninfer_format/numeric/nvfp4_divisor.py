"""The divisor of an NVFP4 matrix: which ones are tried, on what, and which is kept (specs/formats.md, NVFP4 encoder).

Shared by every implementation of the encoder, and made of exact numbers only: errors are compared as integers and
fractions, so the choice depends neither on the order of sums nor on the machine.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FULL_RANGE = np.float32(6 * 448)
"""Largest product of an E2M1 code and an E4M3FN scale."""
MAX_DIVISOR = np.float32(2.0**126)
"""No divisor is larger, so that its reciprocal is a normal float32."""
SAMPLE_VALUES = 1 << 18
"""Values of a matrix that the divisors are tried on."""

_SAMPLE_BANDS = 8
_PARTS = 1 << 24
# A block scale up to 12/7 of its largest magnitude over 6 can be the best one; this leaves room for it below 448.
_ROOMY_RANGE = 1568.0
_MANTISSAS = (1.0, 1.0625, 1.25, 1.5)
_WORTHWHILE = Fraction(255, 256)


class SquaredError(NamedTuple):
    """A sum of float32 squared errors of blocks, in units of (weight * divisor)², free of rounding and of order.

    ``whole`` sums the integer parts, ``parts`` the fractions in units of 2^-24, each truncated.
    """

    whole: int = 0
    parts: int = 0

    def plus(self, other: "SquaredError") -> "SquaredError":
        """Error of both sets of blocks together."""
        return SquaredError(self.whole + other.whole, self.parts + other.parts)

    def of_weights(self, divisor: np.float32) -> Fraction:
        """The error in units of weights, for blocks encoded with ``divisor``."""
        return Fraction(self.whole * _PARTS + self.parts, _PARTS) / Fraction(float(divisor)) ** 2


def total_error(block_errors: npt.NDArray[np.float32]) -> SquaredError:
    """Sum of ``block_errors``, any shape."""
    whole = np.floor(block_errors)
    parts = (block_errors - whole) * np.float32(_PARTS)
    return SquaredError(int(whole.astype(np.int64).sum()), int(parts.astype(np.int64).sum()))


def max_divisor(amax: np.float32) -> np.float32:
    """f32(2688 * f32(1 / amax)): the largest magnitude of the matrix becomes 6 * 448. 1 for an all-zero matrix.

    At most 2^126, and large enough that every code decodes to a finite float32. The usual tools compute it in these two
    steps; one division instead would turn exact ties of scales the other way.
    """
    if amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        divisor = min(FULL_RANGE * (np.float32(1) / amax), MAX_DIVISOR)
    while not _decodes_finite(divisor):
        divisor = np.nextafter(divisor, MAX_DIVISOR)
    return divisor


def candidate_divisors(amax: np.float32) -> tuple[np.float32, ...]:
    """Divisors that ``mse`` tries, the preferred one first; ``max_divisor(amax)`` is among them.

    The first is a power of two, so that products of codes and scales over it are exact, in BF16 too. Others move the
    grid of scales by fractions of its step, which pays for matrices that are small or hold few distinct values.
    """
    plain = max_divisor(amax)
    if amax == 0:
        return (plain,)
    exponent = int(np.frexp(_ROOMY_RANGE / float(amax))[1]) - 1
    power = float(np.ldexp(1.0, min(exponent, 126)))
    tried = [np.float32(min(power * m, float(MAX_DIVISOR))) for m in _MANTISSAS] + [plain, plain / np.float32(2)]
    return tuple(dict.fromkeys(d for d in tried if _decodes_finite(d)))


def best_divisor(candidates: Sequence[np.float32], errors: Sequence[SquaredError]) -> np.float32:
    """The candidate of least error; the first one unless another lowers its error by more than 1/256."""
    exact = [error.of_weights(divisor) for divisor, error in zip(candidates, errors, strict=True)]
    least = min(exact)
    return candidates[exact.index(least)] if least < exact[0] * _WORTHWHILE else candidates[0]


def sample_bands(n_rows: int, k: int) -> Iterator[tuple[int, int]]:
    """Row ranges that divisors are tried on: all rows of a small matrix, else eight bands spread over it."""
    budget = max(1, SAMPLE_VALUES // k)
    if n_rows <= budget:
        yield 0, n_rows
        return
    n_bands = min(_SAMPLE_BANDS, budget)
    height = budget // n_bands
    for band in range(n_bands):
        begin = band * (n_rows - height) // max(1, n_bands - 1)
        yield begin, begin + height


def _decodes_finite(divisor: np.float32) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(FULL_RANGE / divisor))
