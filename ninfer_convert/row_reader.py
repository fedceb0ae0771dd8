"""Rows of a stored object's fused source matrix, read in file order; and where in the checkpoint a row comes from."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.families import ObjectSource, RowRun
from ninfer_convert.sources.logical import Floats, LogicalCheckpoint, Words

Rows = Words | Floats


class RowReader:
    """Reads the rows of ``source``; ``ids`` picks and orders them for a draft head. Thread-safe."""

    def __init__(
        self, checkpoint: LogicalCheckpoint, source: ObjectSource, ids: NDArray[np.int32] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._ids = ids
        self._starts = [0, *accumulate(run.count for run in source.runs)]
        self.n_rows = source.n_rows if ids is None else int(ids.size)
        self.width = source.row_width
        self.tensors = source.tensors
        """Names of the tensors that rows come from."""
        self.gathers = ids is not None
        """Whether ``read`` needs ``scratch``."""
        self.as_floats = any(checkpoint.tensors[name].as_floats for name in source.tensors)
        """Whether an encoder should be given float32 rows, because some are made by dequantizing."""

    def read(self, begin: int, out: Rows, scratch: Rows | None = None) -> None:
        """Fill ``out`` [n, width] with rows from ``begin``, as BF16 words or float32 values by its dtype.

        ``scratch`` is a second array like ``out``, needed where rows are gathered: they are read in ascending file
        position, neighbours together. SourceError and OSError pass through.
        """
        if self._ids is None:
            self._read_span(begin, out)
            return
        assert scratch is not None
        ids = self._ids[begin : begin + len(out)]
        order = np.argsort(ids, kind="stable")
        ascending = ids[order]
        breaks = np.flatnonzero(np.diff(ascending) != 1) + 1
        for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(ids)], strict=True):
            self._read_span(int(ascending[first]), scratch[first:last])
        out[order] = scratch[: len(ids)]

    def locate(self, row: int, column: int) -> tuple[str, tuple[int, ...]]:
        """Tensor name and index in that tensor of an element of the fused matrix."""
        source_row = row if self._ids is None else int(self._ids[row])
        run, row_in_run = next(self._parts(source_row, 1))[:2]
        flat = (run.begin + row_in_run) * self.width + column
        shape = self._checkpoint.tensors[run.tensor].shape
        return run.tensor, tuple(int(i) for i in np.unravel_index(flat, shape))

    def spans(self, begin: int, count: int) -> Iterator[tuple[str, int, int]]:
        """Where rows [begin, begin + count) of the fused matrix come from: tensor, first row in it, how many."""
        for run, skipped, here in self._parts(begin, count):
            yield run.tensor, run.begin + skipped, here

    def _parts(self, begin: int, count: int) -> Iterator[tuple[RowRun, int, int]]:
        """Runs that hold rows [begin, begin + count): the run, its first needed row, how many."""
        number = bisect_right(self._starts, begin) - 1
        while count:
            run, skipped = self._source.runs[number], begin - self._starts[number]
            here = min(count, run.count - skipped)
            yield run, skipped, here
            number, begin, count = number + 1, begin + here, count - here

    def _read_span(self, begin: int, out: Rows) -> None:
        done = 0
        for tensor, first, count in self.spans(begin, len(out)):
            self._checkpoint.read_rows(tensor, first, out[done : done + count])
            done += count
