"""NVFP4 objects: made from values by our encoder, or from words that a checkpoint stores as they are."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.makers import Maker, error_figures
from ninfer_convert.nvfp4_rescale import common_divisor, rescaled_words
from ninfer_convert.row_reader import RowReader
from ninfer_convert.sources.logical import Floats, LogicalCheckpoint
from ninfer_convert.sources.nvfp4 import PackedNvfp4
from ninfer_convert.workspace import Workspace
from ninfer_format import TensorEntry
from ninfer_format.layouts.blockscale import ROW_TILE, plane_views, tile_scales
from ninfer_format.layouts.words import native_float32
from ninfer_format.numeric.nvfp4 import BLOCK, dequantize

if TYPE_CHECKING:
    from ninfer_convert.families import ObjectSource
    from ninfer_convert.plan import ConversionPlan
    from ninfer_convert.quantize.groupwise import ErrorSums
    from ninfer_convert.quantize.nvfp4 import MatrixChoice
    from ninfer_format.numeric.nvfp4_encode import Method

Bytes = NDArray[np.uint8]

_TILE_VALUES = 1 << 18


def _rows_per_piece(width: int, lanes: int) -> int:
    """Whole tiles of rows."""
    return max(1, lanes // width // ROW_TILE) * ROW_TILE


class EncodedNvfp4Maker(Maker):
    """NVFP4 made from values: measured, so that its divisor is known, then encoded.

    Method ``mse`` is compared with ``max`` when all is encoded; in the rare case that it is not better, everything is
    encoded again with the divisor of ``max``.
    """

    measured = True
    row_unit = ROW_TILE

    def __init__(
        self, entry: TensorEntry, reader: RowReader, lanes: int, method: "Method", importance: Floats | None
    ) -> None:
        from ninfer_convert.quantize.nvfp4 import Importance

        super().__init__(reader.n_rows, _rows_per_piece(reader.width, lanes))
        self.reader = reader
        self._rows = reader
        self._shape = entry.shape
        self._method: Method = method
        self._importance = None if importance is None else Importance(importance)
        self._choice: MatrixChoice | None = None

    @property
    def held(self) -> bool:  # type: ignore[override]
        """See ``Maker``."""
        return self._choice is None or self._choice.guarded

    def measure(self, begin: int, end: int, space: Workspace) -> np.float32:
        """See ``Maker``: the largest magnitude; BadValue for NaN and infinity."""
        from ninfer_convert.quantize.nvfp4 import largest_magnitude

        rows: Any = space.read(self._rows, begin, end)
        return largest_magnitude(rows, begin)

    def settle(self, measures: Sequence[np.float32], space: Workspace) -> None:
        """See ``Maker``: choose the divisor."""
        from ninfer_format.numeric.nvfp4_divisor import sample_bands

        sample: list[Any] = []
        if self._method == "mse":
            bands = sample_bands(self.n_rows, self._rows.width)
            sample = [np.array(space.read(self._rows, begin, end)) for begin, end in bands]
        self._choose(space.nvfp4.settle(max(measures), self._method, sample, self._importance))

    def assume(self, stored: Bytes) -> None:
        """See ``Maker``: the divisor."""
        from ninfer_convert.quantize.nvfp4 import MatrixChoice

        divisor = native_float32(plane_views(stored, self._shape).divisor)
        self._choose(MatrixChoice(self._method, divisor, divisor))

    def _choose(self, choice: "MatrixChoice") -> None:
        from ninfer_convert.quantize.nvfp4 import store_divisor

        self._choice = choice
        store_divisor(self.payload, self._shape, choice.divisor)

    def encode(self, begin: int, end: int, space: Workspace) -> Any:
        """See ``Maker``."""
        from ninfer_convert.quantize.nvfp4 import block_rows

        assert self._choice is not None
        rows: Any = space.read(self._rows, begin, end)
        planes = block_rows(self.payload, self._shape, begin, end)
        return space.nvfp4.encode_into(rows, self._choice, planes, importance=self._importance)

    def finish(self, sums: list[Any], space: Workspace) -> list[Any]:
        """See ``Maker``."""
        from ninfer_convert.quantize.nvfp4 import EncodedSums, accepted

        assert self._choice is not None
        total = EncodedSums()
        for part in sums:
            total = total.merged(part)
        if accepted(self._choice, total):
            return sums
        self._choose(self._choice.fallback())
        return [self.encode(begin, end, space) for begin, end in self.pieces]

    def ready_bytes(self, n_rows: int) -> int:
        """See ``Maker``."""
        return n_rows * self._shape[1] // 2

    def figures(self, sums: Sequence[Any]) -> dict[str, float]:
        """Errors as of grouped integers and the ``divisor``; for ``mse`` also ``removed``, against method ``max``."""
        from ninfer_convert.quantize.nvfp4 import EncodedSums

        assert self._choice is not None
        figures = error_figures([s.figures for s in sums], math.prod(self._shape))
        figures["divisor"] = float(self._choice.divisor)
        if self._method == "mse":
            total = EncodedSums()
            for part in sums:
                total = total.merged(part)
            found = total.error.of_weights(self._choice.divisor)
            of_max = total.error_of_max.of_weights(self._choice.plain)
            figures["removed"] = float(1 - found / of_max) if of_max else 0.0
        return figures


class PackedNvfp4Maker(Maker):
    """NVFP4 words taken over from the checkpoint: codes as they are, scales moved into tiles, the divisor's word.

    Where the parts of the fused matrix have different divisors, block scales are encoded anew for a common one.
    """

    row_unit = ROW_TILE

    def __init__(self, entry: TensorEntry, reader: RowReader, checkpoint: LogicalCheckpoint, lanes: int) -> None:
        super().__init__(reader.n_rows, _rows_per_piece(reader.width, lanes))
        self._rows = reader
        self._shape = entry.shape
        self._packed = {name: packed_words(checkpoint, name) for name in reader.tensors}
        self._divisors = {name: packed.weight_divisor() for name, packed in self._packed.items()}
        self._common = next(iter(self._divisors.values()))
        self.measured = any(divisor != self._common for divisor in self._divisors.values())
        self._words: dict[str, Bytes] = {}

    def start(self, payload: Bytes) -> None:
        """See ``Maker``."""
        super().start(payload)
        self._store_divisor()

    def _store_divisor(self) -> None:
        plane_views(self.payload, self._shape).divisor[0] = self._common

    def measure(self, begin: int, end: int, space: Workspace) -> dict[str, tuple[int, int]]:
        """See ``Maker``: rows and the largest scale word by tensor."""
        found: dict[str, tuple[int, int]] = {}
        for name, first, count in self._rows.spans(begin, end - begin):
            scales = np.empty((count, self._shape[1] // BLOCK), np.uint8)
            self._packed[name].read_scales(first, scales)
            rows, largest = found.get(name, (0, 0))
            found[name] = rows + count, max(largest, int(scales.max()))
        return found

    def settle(self, measures: Sequence[dict[str, tuple[int, int]]], space: Workspace) -> None:
        """See ``Maker``: choose the common divisor."""
        names = list(self._packed)
        rows = [sum(m[name][0] for m in measures if name in m) for name in names]
        largest = [max((m[name][1] for m in measures if name in m), default=0) for name in names]
        self._common = common_divisor([self._divisors[name] for name in names], rows, largest)
        self._words = {name: rescaled_words(self._divisors[name], self._common) for name in names}
        self._store_divisor()

    def encode(self, begin: int, end: int, space: Workspace) -> "ErrorSums | None":
        """See ``Maker``."""
        from ninfer_convert.quantize.groupwise import ErrorSums

        views, k = plane_views(self.payload, self._shape), self._shape[1]
        natural = np.empty((end - begin, k // BLOCK), np.uint8)
        row, errors = begin, list[ErrorSums]()
        for name, first, count in self._rows.spans(begin, end - begin):
            codes, scales = views.codes[row : row + count], natural[row - begin : row - begin + count]
            self._packed[name].read_codes(first, codes)
            self._packed[name].read_scales(first, scales)
            if self.measured:
                stored = scales.copy()
                scales[...] = self._words[name][stored]
                errors += self._errors(codes, stored, scales, self._divisors[name])
            row += count
        tile_scales(natural, views.scales[begin // ROW_TILE : end // ROW_TILE])
        return _merged(errors) if self.measured else None

    def _errors(self, codes: Bytes, stored: Bytes, scales: Bytes, divisor: np.float32) -> "Sequence[ErrorSums]":
        from ninfer_convert.quantize.groupwise import ErrorSums

        step, sums = max(1, _TILE_VALUES // self._shape[1]), []
        for begin in range(0, len(codes), step):
            some = slice(begin, begin + step)
            x, y = (np.empty((len(codes[some]), self._shape[1]), np.float64) for _ in range(2))
            dequantize(codes[some], stored[some], divisor, x)
            dequantize(codes[some], scales[some], self._common, y)
            y -= x
            sums.append(ErrorSums(float(np.abs(y).max()), float(np.vdot(y, y)), float(np.vdot(x, x))))
        return sums

    def ready_bytes(self, n_rows: int) -> int:
        """See ``Maker``."""
        return n_rows * self._shape[1] // 2

    def figures(self, sums: Sequence[Any]) -> dict[str, float] | None:
        """None for an exact copy; otherwise the errors of the new scales and the common ``divisor``."""
        if not self.measured:
            return None
        return error_figures(sums, math.prod(self._shape)) | {"divisor": float(self._common)}


def _merged(errors: "Sequence[ErrorSums]") -> "ErrorSums":
    total = errors[0]
    for part in errors[1:]:
        total = total.merged(part)
    return total


def packed_words(checkpoint: LogicalCheckpoint, name: str) -> PackedNvfp4:
    """The stored NVFP4 words of tensor ``name``, which the plan has made sure of."""
    packed = checkpoint.tensors[name].packed
    assert packed is not None, name
    return packed


def input_divisor(plan: "ConversionPlan", entry: TensorEntry, source: "ObjectSource") -> np.float32:
    """The activation divisor ``entry``: the one stored with the matrix, else from activation statistics, else 1.

    Where parts of a fused matrix have different ones, the smallest, which covers the largest activations.
    """
    checkpoint = plan.checkpoint_of(source)
    words = [packed for name in source.tensors if (packed := checkpoint.tensors[name].packed) is not None]
    stored = [divisor for packed in words if (divisor := packed.input_divisor()) is not None]
    if stored:
        return min(stored)
    return plan.require().coding.input_divisor(entry.name) or np.float32(1)
