"""One stored object while it is made: the pieces of its rows, how each is encoded, how much is ready to write."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.plan import ConversionPlan
from ninfer_convert.quantize.bad_value import BadValue
from ninfer_convert.quantize.direct import check_finite, store_transposed, store_widened
from ninfer_convert.row_reader import RowReader, Rows
from ninfer_convert.sources.logical import Words
from ninfer_format import SourceError
from ninfer_format.directory import Entry, TensorEntry
from ninfer_format.formats import NUMERIC_FORMATS, ROW_SPLIT_COLUMNS, row_split_planes
from ninfer_format.geometry import up
from ninfer_format.layouts.planes import plane_gaps

if TYPE_CHECKING:
    from ninfer_convert.families import ObjectSource
    from ninfer_convert.quantize.groupwise import ErrorSums

Bytes = NDArray[np.uint8]


class Workspace:
    """What one worker owns: an encoder and buffers for the words of a piece of up to ``lanes`` lanes."""

    def __init__(self, lanes: int, step_lanes: int, device: str) -> None:
        from ninfer_convert.quantize.groupwise import GroupEncoder

        self.encoder = GroupEncoder(step_lanes, device)
        self._lanes = lanes
        self._buffers: dict[tuple[str, bool], Rows] = {}

    def rows(self, n_rows: int, width: int, *, floats: bool = False, second: bool = False) -> Rows:
        """Buffer [n_rows, width] of words or float32 values, undefined content; ``second`` is another one.

        Each is made when first asked for.
        """
        kind, size = ("float32" if floats else "uint16"), n_rows * width
        buffer = self._buffers.get((kind, second))
        if buffer is None or size > buffer.size:
            buffer = self._buffers[kind, second] = np.empty(max(self._lanes, size), kind)
        return buffer[:size].reshape(n_rows, width)


class StoredObject:
    """An object being made. ``pieces`` are row ranges that any worker may encode, in any order."""

    def __init__(self, plan: ConversionPlan, entry: Entry, source: "ObjectSource", lanes: int) -> None:
        target = plan.require()
        self.entry = entry
        self.source = source
        self.reader: RowReader | None = None
        self.content: bytes | None = None
        """The whole payload, where it is not made from tensors."""
        self.quantized = isinstance(entry, TensorEntry) and NUMERIC_FORMATS[entry.format].kind == "grouped"
        self.known_largest = 0.0
        """Largest quantization error met so far."""
        n_rows = 1
        if source.transform == "resource":
            self.content = target.resources[entry.name]
        elif source.transform == "draft_ids":
            assert target.draft_ids is not None
            self.content = target.draft_ids.astype("<i4").tobytes()
        else:
            ids = target.draft_ids if source.transform == "draft_rows" else None
            self.reader = RowReader(plan.checkpoint_of(source), source, ids)
            n_rows = self.reader.n_rows
        whole = self.reader is None or source.transform in ("widen", "conv_transpose")
        step = n_rows if whole else max(1, lanes // up(source.row_width, ROW_SPLIT_COLUMNS))
        self.pieces = [(row, min(row + step, n_rows)) for row in range(0, n_rows, step)]
        self._row_bytes = self._first_plane_row_bytes(n_rows)
        self._payload: Bytes | None = None
        self._done = [False] * len(self.pieces)
        self._sums: list[ErrorSums | None] = [None] * len(self.pieces)
        self._first_open = 0

    def _first_plane_row_bytes(self, n_rows: int) -> int:
        """Bytes per row at the start of the payload, so that finished rows can be written before the others."""
        if not self.quantized:
            return self.entry.n_bytes // n_rows
        assert isinstance(self.entry, TensorEntry)
        return row_split_planes(self.entry.format, self.entry.shape).base_bytes // n_rows

    @property
    def payload(self) -> Bytes:
        """The buffer that the object is made in, uint8 [n_bytes]."""
        assert self._payload is not None
        return self._payload

    def begin(self, buffer: Bytes) -> None:
        """Make the object in ``buffer``, whose content is undefined."""
        self._payload = buffer
        if self.quantized:
            assert isinstance(self.entry, TensorEntry)
            for gap in plane_gaps(row_split_planes(self.entry.format, self.entry.shape)):
                buffer[gap] = 0

    def end(self) -> Bytes:
        """Let go of the buffer and return it."""
        buffer, self._payload = self.payload, None
        return buffer

    def finish_piece(self, number: int, sums: "ErrorSums | None") -> None:
        """Record a piece as encoded. Not thread-safe."""
        self._done[number] = True
        while self._first_open < len(self.pieces) and self._done[self._first_open]:
            self._first_open += 1
        if sums is not None:
            self._sums[number] = sums
            self.known_largest = max(self.known_largest, sums.largest)

    def error_figures(self) -> dict[str, float] | None:
        """``max``, ``rms`` and ``relative`` error of a finished quantized object; None for an exact copy.

        max |x − y|, sqrt(Σ(x − y)² / n) and sqrt(Σ(x − y)² / Σx²) over its n source values x and decoded values y.
        """
        if not self.quantized:
            return None
        assert isinstance(self.entry, TensorEntry)
        sums = [s for s in self._sums if s is not None]
        # Summed in piece order, so that the figures do not depend on which worker was faster.
        squares, source = math.fsum(s.squares for s in sums), math.fsum(s.source_squares for s in sums)
        return {
            "max": self.known_largest,
            "rms": math.sqrt(squares / math.prod(self.entry.shape)),
            "relative": math.sqrt(squares / source) if source else 0.0,
        }

    @property
    def ready_bytes(self) -> int:
        """Bytes from the start of the payload that will not change any more."""
        if self._first_open == len(self.pieces):
            return self.entry.n_bytes
        return self.pieces[self._first_open][0] * self._row_bytes

    def encode_piece(self, number: int, space: Workspace) -> "ErrorSums | None":
        """Read and encode one piece into the payload; error sums if it was quantized.

        SourceError names the tensor and index of a value that cannot be stored; OSError and others pass through.
        """
        begin, end = self.pieces[number]
        if self.content is not None:
            self.payload[:] = np.frombuffer(self.content, np.uint8)
            return None
        try:
            return _ENCODERS[self.source.transform](self, begin, end, space)
        except BadValue as error:
            assert self.reader is not None
            tensor, index = self.reader.locate(error.row, error.column)
            raise SourceError(
                f"tensor {tensor!r} holds {error.value} at index {list(index)} (for {self.entry.name}); {error.why}"
            ) from None

    def read(self, begin: int, end: int, space: Workspace, out: Words | None = None) -> Words:
        """BF16 words of rows [begin, end), in ``out`` or the worker's own buffer."""
        assert self.reader is not None
        n, width = end - begin, self.reader.width
        words: Any = space.rows(n, width) if out is None else out
        self.reader.read(begin, words, space.rows(n, width, second=True) if self.reader.gathers else None)
        return words  # type: ignore[no-any-return]

    def read_values(self, begin: int, end: int, space: Workspace) -> Rows:
        """The same for an encoder: float32 values where some rows are made by dequantizing, otherwise words."""
        assert self.reader is not None
        n, width, floats = end - begin, self.reader.width, self.reader.as_floats
        rows = space.rows(n, width, floats=floats)
        scratch = space.rows(n, width, floats=floats, second=True) if self.reader.gathers else None
        self.reader.read(begin, rows, scratch)
        return rows


def _encode_rows(item: StoredObject, begin: int, end: int, space: Workspace) -> "ErrorSums | None":
    entry = item.entry
    assert isinstance(entry, TensorEntry)
    if item.quantized:
        from ninfer_convert.quantize.groupwise import plane_rows

        rows = item.read_values(begin, end, space)
        planes = plane_rows(item.payload, row_split_planes(entry.format, entry.shape), begin, end)
        return space.encoder.encode(
            rows, NUMERIC_FORMATS[entry.format], planes, first_row=begin, known_largest=item.known_largest
        )
    assert item.reader is not None
    width = item.reader.width
    stored = item.payload.view(np.uint16).reshape(-1, width)[begin:end]
    check_finite(item.read(begin, end, space, out=stored), begin)
    return None


def _encode_widened(item: StoredObject, begin: int, end: int, space: Workspace) -> None:
    store_widened(item.read(begin, end, space), item.payload.view(np.float32))


def _encode_transposed(item: StoredObject, begin: int, end: int, space: Workspace) -> None:
    words = item.read(begin, end, space)
    store_transposed(words, item.payload.view(np.uint16).reshape(words.shape[1], words.shape[0]))


_ENCODERS: Mapping[str, Callable[[StoredObject, int, int, Workspace], "ErrorSums | None"]] = MappingProxyType(
    {"rows": _encode_rows, "draft_rows": _encode_rows, "widen": _encode_widened, "conv_transpose": _encode_transposed}
)
