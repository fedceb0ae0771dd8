"""Direct words: BF16, FP32 and I32 are stored as they are; only BF16 needs arithmetic (specs/formats.md §2)."""

import numpy as np
import numpy.typing as npt

_QUIET = np.uint32(0x0040)


def widen_bf16(words: npt.NDArray[np.uint16], out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    """float32 values of BF16 ``words`` (any shape); exact for every word, NaN payloads included.

    The word becomes the high half of the float32 word. ``out``: C-contiguous float32 of the same shape.
    """
    out = np.empty(words.shape, np.float32) if out is None else out
    np.left_shift(words, 16, out=out.view(np.uint32), dtype=np.uint32)
    return out


def round_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """BF16 words of float32 ``values`` (any shape), round to nearest, ties to even.

    A value that BF16 holds keeps its exact word, signalling NaNs included; any other NaN stays a NaN, made quiet, with
    sign and leading payload bits kept. Finite values beyond the largest BF16 by half a step become infinity, as IEEE
    rounding has it.
    """
    bits = np.ascontiguousarray(values, np.float32).reshape(values.shape).view(np.uint32)
    kept = bits >> 16
    # Adding 0x7fff plus the last kept bit carries into the kept half exactly when RNE rounds up.
    rounded = (bits + (np.uint32(0x7FFF) + (kept & 1))) >> 16
    nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000
    if nan.any():
        rounded = np.where(nan, np.where(bits & 0xFFFF, kept | _QUIET, kept), rounded)
    return rounded.astype(np.uint16)
