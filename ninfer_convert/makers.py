"""How the payload of one stored object is made, a piece of rows at a time: exact copies and grouped integers.

NVFP4 objects: ``nvfp4_makers.py``. Which maker an object gets, and when its pieces run: ``stored_object.py``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.quantize.bad_value import BadValue
from ninfer_convert.quantize.direct import check_finite, store_transposed, store_widened
from ninfer_convert.row_reader import RowReader
from ninfer_convert.workspace import Workspace
from ninfer_format import SourceError, TensorEntry
from ninfer_format.formats import NUMERIC_FORMATS, ROW_SPLIT_COLUMNS, row_split_planes
from ninfer_format.geometry import up
from ninfer_format.layouts.planes import plane_gaps
from ninfer_format.numeric.least_squares import Floats

if TYPE_CHECKING:
    from ninfer_convert.quantize.groupwise import ErrorSums

Bytes = NDArray[np.uint8]


class Maker(ABC):
    """Makes one payload. Pieces are row ranges; any worker may take any piece, in any order."""

    reader: RowReader | None = None
    """Where rows come from; names the place of a bad value."""
    measured = False
    """Whether every piece is measured before the first is encoded."""
    held = False
    """Whether nothing may be written before the last piece is encoded."""
    row_unit: int | None = None
    """Rows can be encoded in multiples of this, or (None) only all together."""

    def __init__(self, n_rows: int, rows_per_piece: int) -> None:
        self.n_rows = n_rows
        self.pieces = [(row, min(row + rows_per_piece, n_rows)) for row in range(0, n_rows, rows_per_piece)]
        self.payload: Bytes = np.empty(0, np.uint8)

    def start(self, payload: Bytes) -> None:
        """Make the object in ``payload``, whose content is undefined."""
        self.payload = payload

    def measure(self, begin: int, end: int, space: Workspace) -> Any:
        """What ``settle`` needs to know about rows [begin, end)."""
        raise NotImplementedError

    def settle(self, measures: Sequence[Any], space: Workspace) -> None:
        """Decide what holds for the whole object; ``measures`` are in row order."""
        raise NotImplementedError

    def assume(self, stored: Bytes) -> None:
        """Take from a finished payload what ``settle`` would decide, to make some of its rows again."""
        raise NotImplementedError

    @abstractmethod
    def encode(self, begin: int, end: int, space: Workspace) -> Any:
        """Make rows [begin, end); what is returned is collected for ``finish`` and ``figures``."""

    def finish(self, sums: list[Any], space: Workspace) -> list[Any]:
        """Called when all pieces are encoded, with what they returned, in row order; returns the final list."""
        return sums

    @abstractmethod
    def ready_bytes(self, n_rows: int) -> int:
        """Bytes from the start of the payload that are final once the first ``n_rows`` rows are encoded."""

    def figures(self, sums: Sequence[Any]) -> dict[str, float] | None:
        """Errors of a finished object; None for an exact copy."""
        return None


def located(maker: Maker, object_name: str, error: BadValue) -> SourceError:
    """``error`` with the tensor and index that hold the value."""
    assert maker.reader is not None
    tensor, index = maker.reader.locate(error.row, error.column)
    return SourceError(f"tensor {tensor!r} holds {error.value} at index {list(index)} (for {object_name}); {error.why}")


def error_figures(sums: "Sequence[ErrorSums]", n_values: int) -> dict[str, float]:
    """``max``, ``rms`` and ``relative`` error: max |x − y|, sqrt(Σ(x − y)² / n) and sqrt(Σ(x − y)² / Σx²).

    x are the n source values, y the decoded ones; ``source_rms`` is sqrt(Σx² / n), so that errors add up. Summed in
    piece order, so that the figures do not depend on which worker was faster.
    """
    squares, source = math.fsum(s.squares for s in sums), math.fsum(s.source_squares for s in sums)
    return {
        "max": max((s.largest for s in sums), default=0.0),
        "rms": math.sqrt(squares / n_values),
        "relative": math.sqrt(squares / source) if source else 0.0,
        "source_rms": math.sqrt(source / n_values),
    }


class ContentMaker(Maker):
    """A payload that is known beforehand: resources, id tables, scalars."""

    def __init__(self, content: bytes) -> None:
        super().__init__(1, 1)
        self._content = content

    def encode(self, begin: int, end: int, space: Workspace) -> None:
        """See ``Maker``."""
        self.payload[:] = np.frombuffer(self._content, np.uint8)

    def ready_bytes(self, n_rows: int) -> int:
        """See ``Maker``."""
        return n_rows * len(self._content)


class CopyMaker(Maker):
    """BF16 rows as they are, widened to FP32, or transposed; values that are not finite raise BadValue."""

    def __init__(self, entry: TensorEntry, reader: RowReader, transform: str, lanes: int) -> None:
        whole = transform in ("widen", "conv_transpose")
        super().__init__(reader.n_rows, reader.n_rows if whole else max(1, lanes // reader.width))
        self.row_unit = None if whole else 1
        self.reader = reader
        self._rows = reader
        self._store = _COPIES[transform]
        self._row_bytes = entry.n_bytes // reader.n_rows

    def encode(self, begin: int, end: int, space: Workspace) -> None:
        """See ``Maker``."""
        self._store(self._rows, self.payload, begin, end, space)

    def ready_bytes(self, n_rows: int) -> int:
        """See ``Maker``."""
        return n_rows * self._row_bytes


def _copy_rows(reader: RowReader, payload: Bytes, begin: int, end: int, space: Workspace) -> None:
    stored = payload.view(np.uint16).reshape(-1, reader.width)[begin:end]
    space.read(reader, begin, end, stored, words=True)
    check_finite(stored, begin)


def _widen_rows(reader: RowReader, payload: Bytes, begin: int, end: int, space: Workspace) -> None:
    words: Any = space.read(reader, begin, end, words=True)
    store_widened(words, payload.view(np.float32))


def _transpose_rows(reader: RowReader, payload: Bytes, begin: int, end: int, space: Workspace) -> None:
    words: Any = space.read(reader, begin, end, words=True)
    store_transposed(words, payload.view(np.uint16).reshape(words.shape[1], words.shape[0]))


_COPIES: Mapping[str, Callable[[RowReader, Bytes, int, int, Workspace], None]] = MappingProxyType(
    {"rows": _copy_rows, "draft_rows": _copy_rows, "widen": _widen_rows, "conv_transpose": _transpose_rows}
)


class GroupedMaker(Maker):
    """Grouped integers, canonical; ``GroupedMseMaker`` searches for the scales."""

    row_unit = 1

    def __init__(self, entry: TensorEntry, reader: RowReader, lanes: int) -> None:
        super().__init__(reader.n_rows, max(1, lanes // up(reader.width, ROW_SPLIT_COLUMNS)))
        self.reader = reader
        self._rows = reader
        self._format = NUMERIC_FORMATS[entry.format]
        self._planes = row_split_planes(entry.format, entry.shape)
        self._n_values = math.prod(entry.shape)
        self._known_largest = 0.0

    def start(self, payload: Bytes) -> None:
        """See ``Maker``."""
        super().start(payload)
        for gap in plane_gaps(self._planes):
            payload[gap] = 0

    def encode(self, begin: int, end: int, space: Workspace) -> "ErrorSums":
        """See ``Maker``."""
        from ninfer_convert.quantize.groupwise import plane_rows

        rows: Any = space.read(self._rows, begin, end)
        planes = plane_rows(self.payload, self._planes, begin, end)
        sums = space.grouped.encode(rows, self._format, planes, first_row=begin, known_largest=self._known_largest)
        self._note_largest(sums)
        return sums

    def _note_largest(self, sums: "ErrorSums") -> None:
        # Two workers may both write; a lost update only costs a search that was not needed.
        self._known_largest = max(self._known_largest, sums.largest)

    def ready_bytes(self, n_rows: int) -> int:
        """See ``Maker``."""
        return n_rows * (self._planes.base_bytes // self.n_rows)

    def figures(self, sums: Sequence[Any]) -> dict[str, float]:
        """See ``Maker``."""
        return error_figures(sums, self._n_values)


class GroupedMseMaker(GroupedMaker):
    """Grouped integers with scales of least (weighted) squared error; ``importance`` float32 [K] or None."""

    def __init__(self, entry: TensorEntry, reader: RowReader, lanes: int, importance: Floats | None) -> None:
        from ninfer_convert.quantize.groupwise_mse import ColumnImportance

        super().__init__(entry, reader, lanes)
        self._importance = None if importance is None else ColumnImportance(importance)

    def encode(self, begin: int, end: int, space: Workspace) -> Any:
        """See ``Maker``."""
        from ninfer_convert.quantize.groupwise import plane_rows

        rows: Any = space.read(self._rows, begin, end)
        sums = space.grouped_mse.encode(
            rows,
            self._format,
            plane_rows(self.payload, self._planes, begin, end),
            importance=self._importance,
            first_row=begin,
            known_largest=self._known_largest,
        )
        self._note_largest(sums.figures)
        return sums

    def figures(self, sums: Sequence[Any]) -> dict[str, float]:
        """As ``GroupedMaker``, and ``removed``: the share of the canonical encoder's squared error that is gone."""
        found, canonical = math.fsum(s.weighted for s in sums), math.fsum(s.weighted_canonical for s in sums)
        removed = 1 - found / canonical if canonical else 0.0
        return error_figures([s.figures for s in sums], self._n_values) | {"removed": removed}
