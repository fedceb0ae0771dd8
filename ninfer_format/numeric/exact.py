"""Conversions that lose nothing, or refuse: formats never round a caller's values behind their back."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import EncodeError


def exact_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """``values`` as float32 when nothing is lost, else EncodeError: rounding is the caller's decision."""
    if np.can_cast(values.dtype, np.float32, "safe"):
        return values.astype(np.float32, copy=False)
    if values.dtype.kind != "f":
        raise EncodeError(f"values are {values.dtype}, expected float32; convert with .astype(numpy.float32) if meant")
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32)
        lost = (narrow != values) & (values == values)
    if lost.any():
        value = values[lost].flat[0]
        raise EncodeError(
            f"{values.dtype} value {value!r} is not a float32; round with .astype(numpy.float32) before encoding"
        )
    return narrow


def exact_int32(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """``values`` as int32 when they are integers in its range, else EncodeError."""
    if values.dtype.kind not in "iu":
        raise EncodeError(f"I32 takes integers, found {values.dtype}; convert with .astype(numpy.int32) if meant")
    if not np.can_cast(values.dtype, np.int32, "safe") and values.size:
        least, most = int(values.min()), int(values.max())
        if least < -(1 << 31) or most >= 1 << 31:
            raise EncodeError(f"I32 holds -2^31 to 2^31 - 1, found values from {least} to {most}")
    return values.astype(np.int32, copy=False)
