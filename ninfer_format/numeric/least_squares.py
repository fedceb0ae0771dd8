"""What the encoders that search for least squared error share: importance of columns, sums in a fixed order, ties.

Errors are float32, so that every implementation can compute them; they decide bytes, so their order is part of the
definition (specs/formats.md, Least-squares group scales).
"""

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import EncodeError

Floats = npt.NDArray[np.float32]

KEEP = np.float32(1 - 2.0**-20)
"""A search leaves the scale it starts from only for an error below this share of its error.

Two sums of up to 64 rounded, weighted squares can be off by 2^-21 each, so what is chosen is never truly worse.
"""


def relative_importance(importance: Floats | None, k: int) -> Floats | None:
    """``importance`` [K] scaled by a power of two so that the largest lies in [1, 2); None stays None.

    EncodeError for another shape, for negative or non-finite numbers, and if none is greater than zero.
    """
    if importance is None:
        return None
    weights = np.asarray(importance, np.float32)
    if weights.shape != (k,):
        raise EncodeError(f"importance has shape {list(weights.shape)}, expected one number for each of {k} columns")
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        column = int(bad.argmax())
        raise EncodeError(f"importance of column {column} is {weights[column]}; finite numbers from 0 up are expected")
    largest = float(weights.max())
    if largest == 0:
        raise EncodeError("importance is 0 in all columns; leave it out to weigh all columns alike")
    return np.ldexp(weights, 1 - int(np.frexp(largest)[1])).astype(np.float32)


def sum_of_squares(errors: Floats, weights: Floats | None) -> Floats:
    """Σ weight · error² over the last axis, whose length is a power of two; changes ``errors``.

    Each square is rounded, multiplied by its weight, rounded, and then halves are added: lane i and lane i + n/2 first.
    """
    np.multiply(errors, errors, out=errors)
    if weights is not None:
        np.multiply(errors, weights, out=errors)
    half = errors.shape[-1] // 2
    while half:
        errors = errors[..., :half] + errors[..., half:]
        half //= 2
    return errors[..., 0]
