"""Rows of the tensors of an artifact, read with ``pread``: only their bytes, and no mapped pages in resident memory.

A range of rows of any layout is gathered into a small payload of its own, which the codec then decodes.
"""

import os
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ninfer_format import Artifact, TensorEntry, decode_tensor
from ninfer_format.errors import StorageError
from ninfer_format.formats import (
    BLOCKSCALE,
    NUMERIC_FORMATS,
    ROW_SPLIT,
    blockscale_planes,
    row_split_planes,
)
from ninfer_format.geometry import up
from ninfer_format.hashing import read_exactly
from ninfer_format.layouts.blockscale import ROW_TILE
from ninfer_format.numeric.direct import round_bf16

Bytes = NDArray[np.uint8]
_TILE = 1 << 17
"""Values that are rounded at a time: four times as fast as a whole piece, whose temporaries leave the cache."""


def matrix_shape(entry: TensorEntry) -> tuple[int, int]:
    """(rows, columns) of a stored tensor: its own for matrices, one row otherwise."""
    shape = entry.shape
    return (shape[0], shape[1]) if len(shape) == 2 else (1, int(np.prod(shape, dtype=np.int64)))


class StoredRows:
    """Reads the rows of one open artifact. Safe from several threads."""

    def __init__(self, artifact: Artifact) -> None:
        self._payload_offset = artifact.payload_offset
        self._path = artifact.path
        self._descriptor = os.open(artifact.path, os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(self._descriptor).st_size != artifact.file_bytes:
            self.close()
            raise StorageError(f"{artifact.path}: the file has changed since it was opened; start again")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def values(self, entry: TensorEntry, begin: int, end: int) -> NDArray[Any]:
        """Decoded rows [begin, end) of ``entry``: float32 (int32 for I32) [end - begin, columns]."""
        first, payload = self._payload(entry, begin, end)
        n_rows, k = matrix_shape(entry)
        last = min(n_rows, up(end, ROW_TILE)) if entry.layout == BLOCKSCALE else end
        decoded = decode_tensor(payload.data, entry.format, entry.layout, (last - first, k))
        return decoded[begin - first : end - first]

    def bf16_words(self, entry: TensorEntry, begin: int, end: int) -> NDArray[np.uint16]:
        """The same rows as BF16 words uint16: as stored, or rounded to nearest even from the decoded values."""
        if entry.format == "BF16":
            return self._payload(entry, begin, end)[1].view("<u2").reshape(end - begin, -1)
        values = self.values(entry, begin, end)
        words = np.empty(values.shape, np.uint16)
        ours, theirs = words.reshape(-1), values.reshape(-1)
        for first in range(0, ours.size, _TILE):
            ours[first : first + _TILE] = round_bf16(theirs[first : first + _TILE])
        return words

    def stored(self, name_offset: int, buffer: Bytes) -> None:
        """Fill ``buffer`` with payload bytes from ``name_offset``, counted from the start of the payload area."""
        try:
            read_exactly(self._descriptor, buffer.data, self._payload_offset + name_offset)
        except StorageError as error:
            raise StorageError(f"{self._path}: {error}") from None

    def _payload(self, entry: TensorEntry, begin: int, end: int) -> tuple[int, Bytes]:
        """A payload of rows that cover [begin, end), and the first of them."""
        n_rows, k = matrix_shape(entry)
        if entry.layout == ROW_SPLIT:
            return begin, self._row_split(entry, begin, end)
        if entry.layout == BLOCKSCALE:
            begin, end = begin // ROW_TILE * ROW_TILE, min(n_rows, up(end, ROW_TILE))
            return begin, self._blockscale(entry, begin, end)
        row_bytes = k * NUMERIC_FORMATS[entry.format].word_bytes
        payload = np.empty((end - begin) * row_bytes, np.uint8)
        self.stored(entry.offset + begin * row_bytes, payload)
        return begin, payload

    def _row_split(self, entry: TensorEntry, begin: int, end: int) -> Bytes:
        whole = row_split_planes(entry.format, entry.shape)
        part = row_split_planes(entry.format, (end - begin, whole.k))
        payload = np.empty(part.total_bytes, np.uint8)
        for source, target, n_bytes in (
            (whole.base_offset, part.base_offset, whole.base_bytes),
            (whole.high_offset, part.high_offset, whole.high_bytes),
            (whole.scale_offset, part.scale_offset, whole.scale_bytes),
        ):
            row_bytes = n_bytes // whole.n_rows
            piece = payload[target : target + (end - begin) * row_bytes]
            self.stored(entry.offset + source + begin * row_bytes, piece)
        return payload

    def _blockscale(self, entry: TensorEntry, begin: int, end: int) -> Bytes:
        """``begin`` and ``end`` are multiples of the row tile, whose scales lie together."""
        k = entry.shape[1]
        whole, part = blockscale_planes(entry.shape), blockscale_planes((end - begin, k))
        payload = np.empty(part.total_bytes, np.uint8)
        self.stored(entry.offset + begin * k // 2, payload[: part.code_bytes])
        scales = payload[part.scale_offset : part.scale_offset + part.scale_bytes]
        self.stored(entry.offset + whole.scale_offset + begin * k // 16, scales)
        self.stored(entry.offset + whole.divisor_offset, payload[part.divisor_offset :])
        return payload
