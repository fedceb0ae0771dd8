"""One stored object while it is made: which maker it has, the pieces of its rows, how much is ready to write.

An object has up to two rounds of pieces. In the first, if its maker measures, every piece is measured; then the object
is settled; in the second every piece is encoded. ``Assembly`` hands out the pieces of both rounds in order.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.makers import ContentMaker, CopyMaker, GroupedMaker, GroupedMseMaker, Maker, located
from ninfer_convert.nvfp4_makers import EncodedNvfp4Maker, PackedNvfp4Maker, input_divisor
from ninfer_convert.plan import ConversionPlan
from ninfer_convert.quantize.bad_value import BadValue
from ninfer_convert.row_reader import RowReader
from ninfer_convert.workspace import Workspace
from ninfer_format.directory import Entry, TensorEntry
from ninfer_format.formats import NUMERIC_FORMATS

if TYPE_CHECKING:
    from ninfer_convert.families import ObjectSource

Bytes = NDArray[np.uint8]


class StoredObject:
    """An object being made. Numbered pieces may be worked on by any worker, in any order within a round."""

    def __init__(self, plan: ConversionPlan, entry: Entry, source: "ObjectSource", lanes: int) -> None:
        self.entry = entry
        self.source = source
        self._maker = maker_for(plan, entry, source, lanes)
        pieces = self._maker.pieces
        self._n_measures = len(pieces) if self._maker.measured else 0
        self.n_pieces = self._n_measures + len(pieces)
        """Pieces of both rounds."""
        self._results: list[Any] = [None] * self.n_pieces
        self._done = [False] * self.n_pieces
        self._first_open = 0
        self._settled = not self._n_measures
        self._finished = False

    @property
    def payload(self) -> Bytes:
        """The buffer that the object is made in, uint8 [n_bytes]."""
        return self._maker.payload

    def begin(self, buffer: Bytes) -> None:
        """Make the object in ``buffer``, whose content is undefined."""
        self._maker.start(buffer)

    def end(self) -> Bytes:
        """Let go of the buffer and return it."""
        buffer, self._maker.payload = self._maker.payload, np.empty(0, np.uint8)
        return buffer

    def may_start(self, number: int) -> bool:
        """Whether piece ``number`` can be worked on: encoding waits for what the first round finds."""
        return number < self._n_measures or self._settled

    def work(self, number: int, space: Workspace) -> Any:
        """Measure or encode one piece; what is returned goes to ``finish_piece``.

        SourceError names the tensor and index of a value that cannot be stored; OSError and others pass through.
        """
        measuring = number < self._n_measures
        begin, end = self._maker.pieces[number if measuring else number - self._n_measures]
        try:
            return (self._maker.measure if measuring else self._maker.encode)(begin, end, space)
        except BadValue as error:
            raise located(self._maker, self.entry.name, error) from None

    def finish_piece(self, number: int, result: Any) -> bool:
        """Record a piece as done; whether ``close_round`` is due, which the caller must then call. Not thread-safe."""
        self._results[number] = result
        self._done[number] = True
        while self._first_open < self.n_pieces and self._done[self._first_open]:
            self._first_open += 1
        return self._first_open == (self.n_pieces if self._settled else self._n_measures)

    def close_round(self, space: Workspace) -> None:
        """Settle what was measured, or finish what was encoded; before ``end_round``."""
        if not self._settled:
            self._maker.settle(self._results[: self._n_measures], space)
        else:
            self._results[self._n_measures :] = self._maker.finish(self._results[self._n_measures :], space)

    def end_round(self) -> None:
        """Let the next round, or the writing of a held object, begin. Not thread-safe."""
        self._settled, self._finished = True, self._settled

    @property
    def ready_bytes(self) -> int:
        """Bytes from the start of the payload that will not change any more."""
        if self._finished:
            return self.entry.n_bytes
        if not self._settled or self._maker.held or self._first_open <= self._n_measures:
            return 0
        encoded = min(self._first_open, self.n_pieces - 1) - self._n_measures
        return self._maker.ready_bytes(self._maker.pieces[encoded][0])

    def error_figures(self) -> dict[str, float] | None:
        """Errors of a finished object, as in the report; None for an exact copy."""
        return self._maker.figures(self._results[self._n_measures :])


def maker_for(plan: ConversionPlan, entry: Entry, source: "ObjectSource", lanes: int) -> Maker:
    """How ``entry`` is made; SourceError for stored divisors that cannot be."""
    target = plan.require()
    if source.transform == "resource":
        return ContentMaker(target.resources[entry.name])
    if source.transform == "draft_ids":
        assert target.draft_ids is not None
        return ContentMaker(target.draft_ids.astype("<i4").tobytes())
    assert isinstance(entry, TensorEntry)
    if source.transform == "input_divisor":
        return ContentMaker(np.array(input_divisor(plan, entry, source), "<f4").tobytes())
    ids = target.draft_ids if source.transform == "draft_rows" else None
    checkpoint = plan.checkpoint_of(source)
    reader = RowReader(checkpoint, source, ids)
    kind = NUMERIC_FORMATS[entry.format].kind
    if kind == "direct":
        return CopyMaker(entry, reader, source.transform, lanes)
    importance = target.coding.importance(entry)
    if kind == "grouped":
        if target.coding.method == "mse":
            return GroupedMseMaker(entry, reader, lanes, importance)
        return GroupedMaker(entry, reader, lanes)
    if source.transform == "packed":
        return PackedNvfp4Maker(entry, reader, checkpoint, lanes)
    return EncodedNvfp4Maker(entry, reader, lanes, target.coding.method, importance)
