"""Encode, decode, pack and unpack whole tensors.

This page checks signatures and picks the layout's module; numeric formats are in ``numeric/``, byte positions in
``layouts/``. Everything runs in tiles of a few hundred kilobytes, so beyond its input and output a call needs next to
no memory. Payloads may be bytes, bytearray or memoryview. Specification: specs/formats.md and specs/layouts.md.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import SignatureError, UsageError
from ninfer_format.formats import (
    BLOCKSCALE,
    CONTIGUOUS,
    NUMERIC_FORMATS,
    ROW_SPLIT,
    NumericFormat,
    check_signature,
    encoded_size,
    layout_named,
    numeric_format,
)
from ninfer_format.layouts import blockscale, contiguous, row_split
from ninfer_format.layouts.words import Bytes, Divisor, RowIndex, Words

__all__ = [
    "Words",
    "decode_rows",
    "decode_tensor",
    "encode_tensor",
    "gather_rows",
    "pack_tensor",
    "slice_rows",
    "unpack_tensor",
]

Payload = bytes | bytearray | memoryview
Rows = npt.NDArray[np.integer[Any]] | Sequence[int] | slice


class LayoutCodec(Protocol):
    """What the module of a layout provides; ``data`` is a checked, read-only payload uint8 [n]."""

    def encode(self, values: npt.NDArray[Any], fmt: NumericFormat) -> bytes: ...
    def pack(
        self, codes: npt.NDArray[Any], scales: npt.NDArray[Any] | None, divisor: Divisor, fmt: NumericFormat
    ) -> bytes: ...
    def unpack(self, data: Bytes, fmt: NumericFormat, shape: Sequence[int]) -> Words: ...
    def decode(self, data: Bytes, fmt: NumericFormat, shape: Sequence[int]) -> npt.NDArray[Any]: ...
    def decode_rows(
        self, data: Bytes, fmt: NumericFormat, shape: Sequence[int], rows: RowIndex
    ) -> npt.NDArray[Any]: ...


CODECS: Mapping[str, LayoutCodec] = MappingProxyType(
    {CONTIGUOUS: contiguous, ROW_SPLIT: row_split, BLOCKSCALE: blockscale}
)


def encode_tensor(values: npt.NDArray[Any], format: str, layout: str) -> bytes:
    """Payload of ``values``: canonical encoder for Q4, Q5, Q6 and W8, round to nearest even for BF16.

    ``values``: float32 (any type that float32 holds exactly is taken too); int32 for I32. BF16 keeps NaN a NaN, and
    every value it can hold keeps its exact word. Raises RegistryError or SignatureError for what the layout cannot
    hold, and EncodeError for NaN, infinity or scale overflow in a grouped format, for values that float32 or int32 does
    not hold, and for NVFP4, which is never made from floats here.
    """
    values = np.asarray(values)
    check_signature(format, layout, values.shape)
    return CODECS[layout].encode(values, NUMERIC_FORMATS[format])


def pack_tensor(
    codes: npt.NDArray[Any],
    scales: npt.NDArray[Any] | None,
    divisor: Divisor,
    format: str,
    layout: str,
) -> bytes:
    """Payload of given words, bit for bit, after checking every rule on words (specs/formats.md §6).

    direct: ``codes`` integers of the stored width in the logical shape. grouped: ``codes`` integers [N, K] or padded
    [N, K_pad], ``scales`` binary16 words (uint16, or float16) [N, ceil(K / G)] or [N, K_pad / G]. NVFP4: ``codes``
    uint8 packed pairs [N, K/2] or one code per byte [N, K], told apart by the width of ``scales`` uint8 [N, K/16] in
    natural order; ``divisor`` a float32. Raises RegistryError, SignatureError, or EncodeError naming the first bad
    word.
    """
    fmt = numeric_format(format)
    if format not in layout_named(layout).formats:
        raise SignatureError(
            f"layout {layout} does not store {format}; it stores {', '.join(layout_named(layout).formats)}"
        )
    return CODECS[layout].pack(np.asarray(codes), scales, divisor, fmt)


def unpack_tensor(payload: Payload, format: str, layout: str, shape: Sequence[int]) -> Words:
    """Stored words of a payload, padding left out; they are not judged (``payload_rules.scan_payload`` does that).

    Direct words and NVFP4 codes are read-only views that keep the payload alive; grouped codes and all scales are new
    arrays. Raises RegistryError, and SignatureError also when the length is not the encoded size.
    """
    data = checked_payload(payload, format, layout, shape)
    return CODECS[layout].unpack(data, NUMERIC_FORMATS[format], shape)


def decode_tensor(payload: Payload, format: str, layout: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Values of a payload in its logical shape: float32, or int32 for I32; always a new array.

    Exact for every format except NVFP4, whose quotient is rounded once to float32. Words are not judged. Raises
    RegistryError or SignatureError as ``unpack_tensor``.
    """
    data = checked_payload(payload, format, layout, shape)
    return CODECS[layout].decode(data, NUMERIC_FORMATS[format], shape)


def decode_rows(payload: Payload, format: str, layout: str, shape: Sequence[int], rows: Rows) -> npt.NDArray[Any]:
    """Values of chosen rows, float32 [len(rows), K] (int32 for I32), reading only those rows' bytes.

    ``rows``: a slice, or row numbers in any order with repetition. Direct tensors of another rank give
    [len(rows), *shape[1:]]. UsageError for a row outside the matrix or a tensor without rows.
    """
    data = checked_payload(payload, format, layout, shape)
    if not shape:
        raise UsageError(f"a rank-0 {format} tensor has no rows; use decode_tensor")
    return CODECS[layout].decode_rows(data, NUMERIC_FORMATS[format], shape, _row_index(rows, shape[0]))


def gather_rows(payload: Payload, format: str, shape: Sequence[int], rows: Rows) -> bytes:
    """Row-split payload of chosen rows as a tensor [len(rows), K] of their own; bytes are moved, never recoded.

    ``rows``: a slice, or row numbers in any order with repetition; at least one. UsageError for a row outside.
    """
    data = checked_payload(payload, format, ROW_SPLIT, shape)
    index = _row_index(rows, shape[0])
    n_rows = len(range(shape[0])[index]) if isinstance(index, slice) else index.size
    if not n_rows:
        raise UsageError(f"none of {shape[0]} rows chosen; a tensor has at least one row")
    return row_split.gather(data, NUMERIC_FORMATS[format], shape, index, n_rows)


def slice_rows(payload: Payload, format: str, shape: Sequence[int], rows: slice) -> bytes:
    """Row-split payload of a slice of rows as a tensor of its own; see ``gather_rows``."""
    return gather_rows(payload, format, shape, rows)


def checked_payload(payload: Payload, format: str, layout: str, shape: Sequence[int]) -> Bytes:
    expected = encoded_size(format, layout, shape)
    data = np.frombuffer(payload, np.uint8)
    if data.size != expected:
        raise SignatureError(f"{format} {list(shape)} in {layout} takes {expected} bytes, the payload has {data.size}")
    data.flags.writeable = False
    return data


def _row_index(rows: Rows, n_rows: int) -> RowIndex:
    if isinstance(rows, slice):
        return rows
    numbers = np.asarray(rows)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise UsageError(f"rows are a slice or a list of row numbers, found {numbers.dtype} {list(numbers.shape)}")
    outside = (numbers < 0) | (numbers >= n_rows)
    if outside.any():
        raise UsageError(f"row {numbers[outside][0]} is outside the matrix, whose rows are 0 to {n_rows - 1}")
    return numbers.astype(np.intp)
