"""Quantized keys and values, exactly: INT8-G64, FP6-G64, and the rotation before them. numpy, the definition.

Every function works on the last axis, one head of one token: float32 [..., D], D a multiple of 64. Both backends are
tested against this page. Specification: ``specs/kv-cache.md``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import UsageError
from ninfer_runtime.config import KvStorage

Float32s = NDArray[np.float32]
Halves = NDArray[np.float16]
Bytes = NDArray[np.uint8]

GROUP = 64
"""Consecutive dims that share a scale."""
INT8_MAX = 127
FP6_MAX = 14.0
FP6_MAX_CODE = 0x1B
_FP6_SMALLEST_NORMAL = 0.25
_FP6_SIGN = 0x20
_EXPONENT_BITS = 0x7F800000
_SCALE_BYTES = 2
_CODE_BITS: Mapping[KvStorage, int] = {"float32": 32, "bf16": 16, "int8": 8, "fp6": 6}
QUANTIZED: tuple[KvStorage, ...] = ("int8", "fp6")


def head_bytes(storage: KvStorage, head_dim: int) -> int:
    """Bytes of one key or one value vector of one KV head: codes, and a float16 scale per group if quantized."""
    scales = head_dim // GROUP * _SCALE_BYTES if storage in QUANTIZED else 0
    return head_dim * _CODE_BITS[storage] // 8 + scales


def token_bytes(storage: KvStorage, n_layers: int, n_kv_heads: int, head_dim: int) -> int:
    """Bytes of one token over ``n_layers`` attention layers, keys and values."""
    return 2 * n_layers * n_kv_heads * head_bytes(storage, head_dim)


def check_head_dim(storage: KvStorage, head_dim: int, *, rotation: bool) -> None:
    """UsageError for heads that the format, or the rotation before it, does not divide."""
    if storage not in QUANTIZED:
        return
    if head_dim % GROUP:
        raise UsageError(
            f"--kv-dtype {storage} needs heads in groups of {GROUP} dims, this model has head_dim {head_dim}; "
            "use --kv-dtype bf16"
        )
    if rotation and head_dim & (head_dim - 1):
        raise UsageError(
            f"the rotation needs a power of two, this model has head_dim {head_dim}; use --kv-rotation off"
        )


def rotate(x: Float32s) -> Float32s:
    """R·x with R = H / sqrt(D), H the Walsh-Hadamard matrix in Sylvester order, D a power of two; R·R = I.

    Butterflies in float32, (a, b) → (a + b, a − b) at distances 1, 2, 4, …, D / 2; the scale comes last.
    """
    dim = x.shape[-1]
    out, distance = x.astype(np.float32), 1
    while distance < dim:
        pairs = out.reshape(*x.shape[:-1], dim // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        distance *= 2
    return out * np.float32(dim**-0.5)


def _scales(x: Float32s, largest: float) -> tuple[Halves, Float32s]:
    """float16 scales [..., D / 64] = rne(max |x| / largest), and x · (1 / scale) in groups [..., D / 64, 64].

    NaN and infinity reach the scale, so that a group which held one decodes to NaN. A group of zeros has scale 0.
    """
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scales = (np.abs(groups).max(axis=-1) / np.float32(largest)).astype(np.float16)
        wide = scales.astype(np.float32)
        inverse = np.where(wide == 0, np.float32(0), np.float32(1) / wide)
        return scales, np.nan_to_num(groups * inverse[..., None], nan=0.0)


def _times_scales(values: Float32s, scales: Halves) -> Float32s:
    groups = values.reshape(*scales.shape, GROUP)
    with np.errstate(invalid="ignore"):
        return (groups * scales.astype(np.float32)[..., None]).reshape(values.shape)


def encode_int8(x: Float32s) -> tuple[NDArray[np.int8], Halves]:
    """Codes int8 [..., D] = clamp(rne(x · (1 / scale)), ±127) and float16 scales [..., D / 64] of max |x| / 127."""
    scales, scaled = _scales(x, INT8_MAX)
    return np.clip(np.rint(scaled), -INT8_MAX, INT8_MAX).astype(np.int8).reshape(x.shape), scales


def decode_int8(codes: NDArray[np.int8], scales: Halves) -> Float32s:
    """code · scale, float32 [..., D]."""
    return _times_scales(codes.astype(np.float32), scales)


def fp6_values() -> Float32s:
    """What each of the 64 codes (sign, 3 exponent bits with bias 3, 2 mantissa bits) stands for.

    Exponent 0 counts sixteenths; exponent 7 is never written and reads as 14.
    """
    codes = np.arange(_FP6_SIGN)
    exponent, mantissa = codes >> 2, codes & 3
    normal = np.ldexp(1 + mantissa / 4, exponent - 3)
    magnitude = np.minimum(np.where(exponent == 0, mantissa / 16, normal), FP6_MAX).astype(np.float32)
    return np.concatenate([magnitude, -magnitude])


def encode_fp6(x: Float32s) -> tuple[Bytes, Halves]:
    """Codes uint8 [..., D], each below 64, nearest to x · (1 / scale), and float16 scales of max |x| / 14.

    Ties go to the even mantissa, magnitudes from 14 on to 0x1B. What rounds to zero is code 0 whatever its sign.
    """
    scales, scaled = _scales(x, FP6_MAX)
    magnitude = np.minimum(np.abs(scaled), np.float32(FP6_MAX))
    power = _power_of_two(np.maximum(magnitude, np.float32(_FP6_SMALLEST_NORMAL)))
    quarters = np.rint(magnitude / power * 4).astype(np.int32)
    exponent = (power.view(np.int32) >> 23) - 127
    codes = 4 * (exponent + 2) + quarters
    signs = np.where((scaled < 0) & (codes > 0), _FP6_SIGN, 0)
    return (codes | signs).astype(np.uint8).reshape(x.shape), scales


def _power_of_two(x: Float32s) -> Float32s:
    """The largest power of two that is no larger than x, for normal positive x."""
    return (x.view(np.int32) & _EXPONENT_BITS).view(np.float32)


def decode_fp6(codes: Bytes, scales: Halves) -> Float32s:
    """value · scale, float32 [..., D]."""
    return _times_scales(fp6_values()[codes], scales)


def pack_fp6(codes: Bytes) -> Bytes:
    """uint8 [..., D] → [..., 3 D / 4]: dim i in bits 6 i .. 6 i + 5, lowest bit first; 4 dims are 3 bytes."""
    a, b, c, d = (codes[..., i::4].astype(np.uint32) for i in range(4))
    word = a | b << 6 | c << 12 | d << 18
    return np.stack([word >> shift & 0xFF for shift in (0, 8, 16)], -1).astype(np.uint8).reshape(*codes.shape[:-1], -1)


def unpack_fp6(packed: Bytes) -> Bytes:
    """The inverse of ``pack_fp6``."""
    a, b, c = (packed[..., i::3].astype(np.uint32) for i in range(3))
    word = a | b << 8 | c << 16
    codes: NDArray[Any] = np.stack([word >> shift & 0x3F for shift in (0, 6, 12, 18)], -1)
    return codes.astype(np.uint8).reshape(*packed.shape[:-1], -1)
