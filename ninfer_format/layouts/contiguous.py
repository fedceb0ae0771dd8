"""``contiguous-le-v1``: little-endian words in C order and nothing else (specs/layouts.md §1)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import EncodeError
from ninfer_format.formats import CONTIGUOUS, NumericFormat, check_signature
from ninfer_format.layouts.words import Bytes, Divisor, RowIndex, Words, assemble
from ninfer_format.numeric.direct import round_bf16, widen_bf16
from ninfer_format.numeric.exact import exact_float32, exact_int32

STORED: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"BF16": np.dtype("<u2"), "FP32": np.dtype("<u4"), "I32": np.dtype("<i4")}
)
"""Type of the stored words of each direct format."""

_TILE_VALUES = 1 << 18


def stored_words(data: Bytes, fmt: NumericFormat, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Words of a payload (uint8 [n]) in ``shape``, without a copy on little-endian machines."""
    stored = STORED[fmt.name]
    return data.view(stored).reshape(tuple(shape)).astype(stored.newbyteorder("="), copy=False)


def encode(values: npt.NDArray[Any], fmt: NumericFormat) -> bytes:
    """Payload of float32 values (int32 for I32) of any shape; BF16 rounds to nearest even, NaN stays NaN."""
    if fmt.name == "I32":
        return _stored_bytes(exact_int32(values), fmt)
    stored = STORED[fmt.name]
    flat = np.ascontiguousarray(values).reshape(-1)

    def fill(payload: Bytes) -> None:
        words = payload.view(stored)
        for first in range(0, flat.size, _TILE_VALUES):
            part = exact_float32(flat[first : first + _TILE_VALUES])
            words[first : first + part.size] = round_bf16(part) if fmt.name == "BF16" else part.view(np.uint32)

    return assemble(flat.size * stored.itemsize, fill)


def pack(codes: npt.NDArray[Any], scales: npt.NDArray[Any] | None, divisor: Divisor, fmt: NumericFormat) -> bytes:
    """Payload of ``codes``, bit for bit: integers of the format's width, signed or not."""
    check_signature(fmt.name, CONTIGUOUS, codes.shape)
    stored = STORED[fmt.name]
    if scales is not None or divisor is not None:
        raise EncodeError(f"{fmt.name} has neither scales nor a divisor; its words are the values")
    if codes.dtype.kind not in "iu" or codes.dtype.itemsize != stored.itemsize:
        raise EncodeError(
            f"{fmt.name} words are {stored.itemsize}-byte integers, found {codes.dtype}; "
            "view the words as integers, or give values to encode_tensor"
        )
    return _stored_bytes(codes, fmt)


def unpack(data: Bytes, fmt: NumericFormat, shape: Sequence[int]) -> Words:
    """Words of a payload as a read-only view of it."""
    return Words(stored_words(data, fmt, shape), None, None)


def decode(data: Bytes, fmt: NumericFormat, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Values in ``shape``: float32, or int32 for I32; a new array."""
    return _values(stored_words(data, fmt, shape), fmt)


def decode_rows(data: Bytes, fmt: NumericFormat, shape: Sequence[int], rows: RowIndex) -> npt.NDArray[Any]:
    """Values of chosen entries of the first axis, [len(rows), *shape[1:]]."""
    return _values(stored_words(data, fmt, shape)[rows], fmt)


def _values(words: npt.NDArray[Any], fmt: NumericFormat) -> npt.NDArray[Any]:
    if fmt.name == "BF16":
        return widen_bf16(words)
    copied = np.array(words)
    return copied.view(np.float32) if fmt.name == "FP32" else copied


def _stored_bytes(integers: npt.NDArray[Any], fmt: NumericFormat) -> bytes:
    """Two's complement words of integers of the format's width, little-endian, C order."""
    return integers.astype(integers.dtype.newbyteorder("<"), copy=False).tobytes()
