"""Matrices that torch multiplies on the CPU: grouped integer codes as they are, everything else as bfloat16.

torch has a product of bfloat16 rows with four-bit codes, with a bfloat16 scale and offset per group of 64 or 32
columns. Codes of more bits are two of them: with u = 2^(bits - 4) h + l, h is a plane whose scale is 2^(bits - 4) times
as large, l another. Codes stay exact, scales are rounded from binary16 to bfloat16: at most 2^-9 of each weight.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ninfer_format import Artifact, TensorEntry
from ninfer_format.codec import decode_rows, slice_rows, unpack_tensor
from ninfer_format.formats import NUMERIC_FORMATS, ROW_SPLIT_COLUMNS, NumericFormat
from ninfer_format.geometry import up

_ROWS = 1024
"""Converted at a time: torch takes codes as 32-bit words."""
_ROWS_OF_FOUR_BITS = 16
_NIBBLE_BITS, _NIBBLE_ZERO = 4, 8


class CpuMatrix(Protocol):
    """A matrix [n, k] in memory of the host."""

    n_bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` bfloat16 [t, k padded to 128 columns with zeros] → float32 [t, n]; each row by itself."""


class FourBitPlanes:
    """Grouped integer codes of four to eight bits as one or two planes of four bits."""

    def __init__(self, fmt: NumericFormat, n_rows: int, k: int) -> None:
        """Room for [n_rows, k]; ``fill`` brings the rows."""
        self._fmt, self._k = fmt, up(k, ROW_SPLIT_COLUMNS)
        self._planes: list[list[Tensor]] = [[] for _ in range(1 if fmt.bits == _NIBBLE_BITS else 2)]
        n_groups = self._k // fmt.group
        self._scales = [torch.zeros(n_groups, n_rows, 2, dtype=torch.bfloat16) for _ in self._planes]
        self._n_filled = 0
        self._packed: list[Tensor] = []
        self.n_bytes = _bytes(fmt, n_rows, k)

    def fill(self, codes: NDArray[np.int8], scale_words: NDArray[np.uint16]) -> None:
        """The next rows: codes [n, k], scales as binary16 words [n, groups]."""
        fmt = self._fmt
        n, low_bits = len(codes), fmt.bits - _NIBBLE_BITS
        unsigned = np.full((n, self._k), 1 << (fmt.bits - 1), np.int32)  # a code of zero where columns are padding
        unsigned[:, : codes.shape[1]] += codes
        scales = np.zeros((n, self._k // fmt.group), np.float32)
        scales[:, : scale_words.shape[1]] = scale_words.view(np.float16)
        rounded = torch.from_numpy(scales.T.copy()).bfloat16()
        rows = slice(self._n_filled, self._n_filled + n)
        parts = (unsigned >> low_bits, unsigned & ((1 << low_bits) - 1))
        for i, (plane, stored) in enumerate(zip(self._planes, self._scales, strict=True)):
            plane.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(parts[i]), 1))
            # torch takes (code - 8) * scale + offset: what the upper plane means, and the lower one with 8 added back.
            stored[:, rows, 0] = rounded * 2.0**low_bits if i == 0 else rounded
            stored[:, rows, 1] = 0.0 if i == 0 else _NIBBLE_ZERO * rounded
        self._n_filled += n
        if self._n_filled == self._scales[0].shape[1]:
            self._packed = [torch.cat(plane) for plane in self._planes]
            self._planes.clear()

    def __call__(self, x: Tensor) -> Tensor:
        """See ``CpuMatrix``."""
        sums = torch.zeros(len(x), self._scales[0].shape[1])
        for packed, scales in zip(self._packed, self._scales, strict=True):
            sums += torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, self._fmt.group, scales)
        return sums


class Bfloat16Matrix:
    """Values as bfloat16."""

    def __init__(self, n_rows: int, k: int) -> None:
        """Room for [n_rows, k]; ``fill`` brings the rows."""
        self._rows = torch.zeros(n_rows, up(k, ROW_SPLIT_COLUMNS), dtype=torch.bfloat16)
        self._n_filled = 0
        self.n_bytes = self._rows.nbytes

    def fill(self, values: NDArray[np.float32]) -> None:
        """The next rows."""
        n, k = values.shape
        self._rows[self._n_filled : self._n_filled + n, :k] = torch.from_numpy(values)
        self._n_filled += n

    def __call__(self, x: Tensor) -> Tensor:
        """See ``CpuMatrix``. One row at a time: torch sums rows of a batch in another order."""
        return torch.stack([(self._rows @ row).float() for row in x])


def has_four_bits(fmt: NumericFormat, n_rows: int) -> bool:
    """Whether torch multiplies such a matrix by its codes."""
    if fmt.kind != "grouped" or n_rows % _ROWS_OF_FOUR_BITS:
        return False
    names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    return all(hasattr(torch.ops.aten, name) for name in names)


def cpu_matrix_bytes(entry: TensorEntry) -> int:
    """What ``read_matrix`` of it takes."""
    n_rows, k = entry.shape
    return _bytes(NUMERIC_FORMATS[entry.format], n_rows, k)


def _bytes(fmt: NumericFormat, n_rows: int, k: int) -> int:
    """Planes of four bits with a scale and an offset per group, or bfloat16."""
    k = up(k, ROW_SPLIT_COLUMNS)
    if not has_four_bits(fmt, n_rows):
        return 2 * n_rows * k
    return (1 if fmt.bits == _NIBBLE_BITS else 2) * n_rows * (k // 2 + 4 * (k // fmt.group))


def _empty(fmt: NumericFormat, n_rows: int, k: int) -> FourBitPlanes | Bfloat16Matrix:
    if has_four_bits(fmt, n_rows):
        return FourBitPlanes(fmt, n_rows, k)
    return Bfloat16Matrix(n_rows, k)


def read_matrix(artifact: Artifact, name: str) -> CpuMatrix:
    """The matrix of an object, in the form that fits its format."""
    entry = artifact.objects[name]
    assert isinstance(entry, TensorEntry)
    fmt, (n_rows, k) = NUMERIC_FORMATS[entry.format], entry.shape
    matrix = _empty(fmt, n_rows, k)
    payload = artifact.payload(name)
    for rows in _slices(n_rows):
        if isinstance(matrix, FourBitPlanes):
            part = slice_rows(payload, entry.format, entry.shape, rows)
            words = unpack_tensor(part, entry.format, entry.layout, (rows.stop - rows.start, k))
            assert words.scales is not None
            matrix.fill(words.codes, words.scales)
        else:
            matrix.fill(decode_rows(payload, entry.format, entry.layout, entry.shape, rows))
    return matrix


def random_matrix(format: str, n_rows: int, k: int, rng: np.random.Generator) -> CpuMatrix:
    """One of such a format with random weights near 1 / sqrt(k), to be timed."""
    fmt = NUMERIC_FORMATS[format]
    matrix = _empty(fmt, n_rows, k)
    for rows in _slices(n_rows):
        n = rows.stop - rows.start
        if isinstance(matrix, FourBitPlanes):
            codes = rng.integers(fmt.qmin, fmt.qmax + 1, (n, k), np.int8)
            step = np.float16(1 / (fmt.qmax * k**0.5))
            matrix.fill(codes, np.full((n, -(-k // fmt.group)), step, np.float16).view(np.uint16))
        else:
            matrix.fill(rng.standard_normal((n, k), np.float32) / np.float32(k**0.5))
    return matrix


def _slices(n_rows: int) -> Iterator[slice]:
    for begin in range(0, n_rows, _ROWS):
        yield slice(begin, min(n_rows, begin + _ROWS))
