"""What the layout codecs share: the stored words of a tensor, and building a payload in place."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
RowIndex = npt.NDArray[np.intp] | slice
"""Chosen rows, already inside the matrix."""
Divisor = np.floating[Any] | float | None


class Words(NamedTuple):
    """Stored words of a tensor.

    direct: ``codes`` uint16 (BF16), uint32 (FP32) or int32 (I32) in the logical shape; no scales, no divisor.
    grouped: ``codes`` int8 [N, K], ``scales`` uint16 binary16 words [N, ceil(K / G)].
    NVFP4: ``codes`` uint8 packed pairs [N, K/2] (low nibble = even column), ``scales`` uint8 [N, K/16] in natural
    order, ``divisor`` float32.
    """

    codes: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None
    divisor: np.float32 | None


def assemble(total_bytes: int, fill: Callable[[Bytes], None]) -> bytes:
    """Bytes object of zeros that ``fill`` has written into.

    BytesIO hands its buffer over without a copy, which halves the peak for a matrix of a gigabyte. The view is released
    only on success: after an exception the traceback still holds arrays on it.
    """
    store = io.BytesIO()
    store.seek(total_bytes - 1)
    store.write(b"\0")
    view = store.getbuffer()
    fill(np.frombuffer(view, np.uint8))
    view.release()
    return store.getvalue()


def native_float32(stored: npt.NDArray[np.float32]) -> np.float32:
    """The one float32 of a stored scalar [1], in the machine's byte order."""
    return np.float32(stored.astype(np.float32)[0])
