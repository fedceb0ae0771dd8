"""What one worker owns: buffers for a piece of rows, and encoders that are made when first needed."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ninfer_convert.row_reader import RowReader, Rows
from ninfer_format.formats import ROW_SPLIT_COLUMNS
from ninfer_format.geometry import up

if TYPE_CHECKING:
    from ninfer_convert.quantize.groupwise import GroupEncoder
    from ninfer_convert.quantize.groupwise_mse import GroupMseEncoder
    from ninfer_convert.quantize.nvfp4 import Nvfp4Encoder


@dataclass(frozen=True, slots=True)
class Lanes:
    """Values per piece of rows, and per step of each encoder; a row of any object fits in each."""

    piece: int
    grouped: int
    grouped_mse: int
    nvfp4: int


def lanes_for(device: str, widest_row: int, step: int | None = None) -> Lanes:
    """Lanes for rows of up to ``widest_row`` values; ``step`` replaces what suits ``device``."""
    from ninfer_convert.quantize import groupwise, groupwise_mse, nvfp4

    widest = up(widest_row, ROW_SPLIT_COLUMNS)
    grouped = max(step or groupwise.STEP_LANES[device], widest)
    return Lanes(
        max(4 * step if step else groupwise.PIECE_LANES[device], grouped),
        grouped,
        max(step or groupwise_mse.DEVICE_STEP_LANES[device], widest),
        max(step or nvfp4.DEVICE_STEP_LANES[device], widest),
    )


class Workspace:
    """Buffers and encoders of one worker. Not for use by two threads at once."""

    def __init__(self, lanes: Lanes, device: str) -> None:
        self._lanes = lanes
        self._device = device
        self._buffers: dict[tuple[str, bool], Rows] = {}

    @cached_property
    def grouped(self) -> "GroupEncoder":
        """Canonical grouped integers."""
        from ninfer_convert.quantize.groupwise import GroupEncoder

        return GroupEncoder(self._lanes.grouped, self._device)

    @cached_property
    def grouped_mse(self) -> "GroupMseEncoder":
        """Grouped integers with scales of least squared error."""
        from ninfer_convert.quantize.groupwise_mse import GroupMseEncoder

        return GroupMseEncoder(self._lanes.grouped_mse, self._device)

    @cached_property
    def nvfp4(self) -> "Nvfp4Encoder":
        """NVFP4, both methods."""
        from ninfer_convert.quantize.nvfp4 import Nvfp4Encoder

        return Nvfp4Encoder(self._lanes.nvfp4, self._device)

    def rows(self, n_rows: int, width: int, *, floats: bool = False, second: bool = False) -> Rows:
        """Buffer [n_rows, width] of words or float32 values, undefined content; ``second`` is another one.

        Each is made when first asked for.
        """
        kind, size = ("float32" if floats else "uint16"), n_rows * width
        buffer = self._buffers.get((kind, second))
        if buffer is None or size > buffer.size:
            buffer = self._buffers[kind, second] = np.empty(max(self._lanes.piece, size), kind)
        return buffer[:size].reshape(n_rows, width)

    def read(self, reader: RowReader, begin: int, end: int, out: Rows | None = None, *, words: bool = False) -> Rows:
        """Rows [begin, end) of ``reader`` in ``out`` or a buffer of this worker.

        An encoder is given float32 values where some rows are made by dequantizing, BF16 words otherwise; ``words``
        asks for words in any case.
        """
        floats = reader.as_floats and not words
        n, width = end - begin, reader.width
        rows = self.rows(n, width, floats=floats) if out is None else out
        reader.read(begin, rows, self.rows(n, width, floats=floats, second=True) if reader.gathers else None)
        return rows
