"""Grouped integers on torch, CPU or CUDA: BF16 words or float32 values → base, high and scale planes.

Bit-equal to the numpy encoder. Measured in ns per lane, planes and error sums included, Q4 / Q5 / W8:

    EPYC 9004, 1 MiB L2, one thread: steps of 128 Ki 1.7 / 1.7 / 1.6, 256 Ki 1.4 / 1.5 / 1.8, 512 Ki 1.2 / 1.4 / 1.4
    the same in a whole build with two workers: 128 Ki 1.36, 256 Ki 1.23, 512 Ki 1.31
    16 cores, 2 MiB L2, 256 Ki: one thread 2.2 / 2.5 / 2.1, 16 threads 0.37 / 0.36 / 0.32 (plain Python 2.6)

Smaller steps spend their time on starting operations (40 us a step), larger ones on the shared cache. Threads with one
torch thread each beat torch's own, which stall when other processes want the cores.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ninfer_convert.quantize.bad_value import NOT_FINITE, BadValue
from ninfer_convert.quantize.block import Scratch, encode_block, make_scratch, scripted_block
from ninfer_convert.quantize.scales import Scales, ScaleTable, scale_table, scales_of
from ninfer_format.formats import NUMERIC_FORMATS, ROW_SPLIT_COLUMNS, NumericFormat, RowSplitPlanes, row_split_planes
from ninfer_format.geometry import up

Rows = NDArray[np.uint16] | NDArray[np.float32]
"""A matrix [n, K] of BF16 words (uint16) or float32 values."""

STEP_LANES: Mapping[str, int] = MappingProxyType({"cpu": 1 << 18, "cuda": 1 << 24})
"""Lanes (padding included) that pass through the scratch at once, by device; see the measurement above."""
PIECE_LANES: Mapping[str, int] = MappingProxyType({"cpu": 1 << 20, "cuda": 1 << 24})
"""Lanes per call of an encoder: the fixed cost of a call is Python's, and the interpreter lock is shared."""


class ErrorSums(NamedTuple):
    """Quantization error of some values x with decoded values y: max |x − y|, Σ (x − y)², Σ x²."""

    largest: float = 0.0
    squares: float = 0.0
    source_squares: float = 0.0

    def merged(self, other: "ErrorSums") -> "ErrorSums":
        """Error sums of both sets of values together."""
        return ErrorSums(
            max(self.largest, other.largest),
            self.squares + other.squares,
            self.source_squares + other.source_squares,
        )


class Planes(NamedTuple):
    """Rows of the three planes as flat arrays: base uint8, high uint8 (empty for 4 and 8 bits), scale words uint16."""

    base: NDArray[np.uint8]
    high: NDArray[np.uint8]
    scales: NDArray[np.uint16]


class _ScaleColumns(NamedTuple):
    words: torch.Tensor
    inverses: torch.Tensor
    values: torch.Tensor


class GroupEncoder:
    """One worker's encoder: scratch for ``lanes`` lanes on ``device``. Not for use by two threads at once."""

    def __init__(self, lanes: int, device: str = "cpu") -> None:
        self.lanes = up(lanes, ROW_SPLIT_COLUMNS)
        self.device = torch.device(device)
        self._scratch: Scratch = make_scratch(self.lanes, self.device)
        self._encode: Callable[..., Any] = scripted_block() if self.device.type == "cpu" else encode_block
        self._tables: dict[str, _ScaleColumns] = {}

    @torch.inference_mode()  # measured: 7 % of the time is autograd's dispatch
    def encode(
        self, rows: Rows, fmt: NumericFormat, out: Planes, *, first_row: int = 0, known_largest: float = 0.0
    ) -> ErrorSums:
        """Encode ``rows`` [n, K] into the bytes of these rows in the planes; K padded to 128 must not exceed ``lanes``.

        ``first_row`` places the rows in error messages. Where no error can exceed ``known_largest``, the largest error
        is not searched for, and ``largest`` is at least ``known_largest`` in any case. Raises BadValue for NaN,
        infinity or a scale overflow.
        """
        k_pad = up(rows.shape[1], ROW_SPLIT_COLUMNS)
        if k_pad > self.lanes:
            raise ValueError(f"rows of {k_pad} lanes exceed the encoder's {self.lanes}")
        by_word = rows.dtype == np.uint16
        source = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16) if by_word else torch.from_numpy(rows)
        source, table = source.to(self.device), scale_table(fmt)
        stored = [torch.from_numpy(plane) for plane in (out.base, out.high, out.scales.view(np.int16))]
        planes = stored if self.device.type == "cpu" else [torch.empty_like(p, device=self.device) for p in stored]
        accepted, *sums = self._encode(
            source,
            self.lanes // k_pad,
            *(self._word_columns(fmt) if by_word else self._group_columns(source, fmt, table)),
            by_word,
            table.first_refused,
            table.first_normal,
            fmt.group,
            fmt.bits,
            fmt.qmin,
            fmt.qmax,
            known_largest,
            *planes,
            *self._scratch,
        )
        if not accepted:
            _refuse(rows, fmt, table, first_row)
        for target, plane in zip(stored, planes, strict=True):
            if target is not plane:
                target.copy_(plane)
        return ErrorSums(*sums)

    def _word_columns(self, fmt: NumericFormat) -> _ScaleColumns:
        """The scale table of ``fmt``, indexed by BF16 magnitude words."""
        columns = self._tables.get(fmt.name)
        if columns is None:
            columns = self._tables[fmt.name] = self._on_device(scale_table(fmt).scales)
        return columns

    def _group_columns(self, source: torch.Tensor, fmt: NumericFormat, table: ScaleTable) -> _ScaleColumns:
        """Scales of the groups of float32 ``source``, indexed by group; refused groups get the scale of zero."""
        padded = torch.nn.functional.pad(source, (0, up(source.shape[1], ROW_SPLIT_COLUMNS) - source.shape[1]))
        amax = torch.abs(padded).view(-1, fmt.group).amax(1).cpu().numpy()
        return self._on_device(scales_of(np.where(amax < table.first_refused, amax, np.float32(0)), fmt))

    def _on_device(self, scales: Scales) -> _ScaleColumns:
        columns = scales.words.view(np.int16), scales.inverses, scales.values
        return _ScaleColumns(*(torch.tensor(column, device=self.device) for column in columns))


def _refuse(rows: Rows, fmt: NumericFormat, table: ScaleTable, first_row: int) -> NoReturn:
    if rows.dtype == np.uint16:
        values = (rows.astype(np.uint32) << 16).view(np.float32)
    else:
        values = rows.astype(np.float32, copy=False)
    for bad, why in (
        (~np.isfinite(values), NOT_FINITE),
        (
            np.abs(values) >= np.float32(table.first_refused),
            f"{fmt.name} with its binary16 scales holds magnitudes below {65520 * fmt.qmax}; build with --recipe bf16",
        ),
    ):
        if bad.any():
            row, column = np.unravel_index(int(bad.argmax()), bad.shape)
            raise BadValue(first_row + int(row), int(column), float(values[row, column]), why)
    raise AssertionError("a bound was exceeded by no value")


def plane_rows(payload: NDArray[np.uint8], planes: RowSplitPlanes, begin: int, end: int) -> Planes:
    """Rows [begin, end) of the three planes of ``payload`` (uint8 [total_bytes]), as views."""
    base, high = (
        planes.groups_per_row * planes.base_bytes_per_group,
        planes.groups_per_row * planes.high_bytes_per_group,
    )
    scale = planes.groups_per_row * 2

    def run(offset: int, row_bytes: int) -> NDArray[np.uint8]:
        return payload[offset + begin * row_bytes : offset + end * row_bytes]

    return Planes(
        run(planes.base_offset, base),
        run(planes.high_offset, high),
        run(planes.scale_offset, scale).view(np.uint16),
    )


def encode_matrix(
    values: Rows, format: str, *, device: str = "cpu", lanes: int = STEP_LANES["cpu"]
) -> tuple[bytes, ErrorSums]:
    """Row-split payload and error of a whole matrix [N, K], ``lanes`` lanes at a time.

    The same bytes as ``ninfer_format.encode_tensor`` of the values, on any ``device``. Raises BadValue.
    """
    planes = row_split_planes(format, values.shape)
    payload = np.zeros(planes.total_bytes, np.uint8)
    encoder = GroupEncoder(max(lanes, planes.k_pad), device)
    sums = encoder.encode(values, NUMERIC_FORMATS[format], plane_rows(payload, planes, 0, planes.n_rows))
    return payload.tobytes(), sums
