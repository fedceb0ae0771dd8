"""Rows of stored objects made again and compared with an artifact, byte for byte."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import local
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.families import ObjectSource
from ninfer_convert.makers import Maker, located
from ninfer_convert.memory import Device, worker_count
from ninfer_convert.nvfp4_makers import EncodedNvfp4Maker
from ninfer_convert.plan import ConversionPlan
from ninfer_convert.quantize.bad_value import BadValue
from ninfer_convert.stored_object import maker_for
from ninfer_convert.workspace import Workspace, lanes_for
from ninfer_format import Artifact, ModelGeometry, TensorEntry
from ninfer_format.directory import Entry
from ninfer_format.formats import NUMERIC_FORMATS, row_split_planes
from ninfer_format.layouts.blockscale import ROW_TILE, natural_scales, plane_views
from ninfer_format.roles import expert_rows, role_named, row_views

Bytes = NDArray[np.uint8]
RowRanges = Sequence[tuple[int, int]]

_WHOLE_BYTES = 1 << 16
"""Objects up to this size are compared whole."""
_COMPARE_BYTES = 8 << 20
_GUESSES = 4
"""Matrices on which methods are tried."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An object that is not what the source gives: ``what`` differs, first in ``row`` (None: not a matter of rows)."""

    name: str
    what: str
    row: int | None = None
    n_rows: int = 0
    """Compared rows that differ."""

    def __str__(self) -> str:
        if self.row is None:
            return f"{self.name}: {self.what}"
        more = f", and in {self.n_rows - 1} more of the compared rows" if self.n_rows > 1 else ""
        return f"{self.name}: the {self.what} differ in row {self.row}{more}"


class Comparing:
    """A pool of workers that make rows again. ``plan`` only says how wide rows are; each call brings its own."""

    def __init__(self, artifact: Artifact, device: Device, jobs: int, plan: ConversionPlan) -> None:
        self.compared_bytes = 0
        self._artifact = artifact
        self._names = frozenset(artifact.objects.names())
        widest = max((source.row_width for source in plan.require().sources), default=0)
        self._lanes = lanes_for(device, widest)
        self._device = device
        self._own = local()
        self._pool = ThreadPoolExecutor(worker_count(jobs), "ninfer-check", self._start_worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _start_worker(self) -> None:
        from ninfer_convert.quantize.torch_threads import one_thread_here

        one_thread_here()
        self._own.space = Workspace(self._lanes, self._device)

    def compare(self, plan: ConversionPlan, entry: Entry, source: ObjectSource, *, whole: bool) -> list[Mismatch]:
        """What differs in one object, if it is made ``whole`` or (larger ones) in sampled rows.

        Nothing for an object that the artifact lacks or has with another signature: the directories differ then.
        """
        there = self._artifact.objects[entry.name] if entry.name in self._names else None
        if there is None or replace(there, offset=0) != replace(entry, offset=0):
            return []
        maker = maker_for(plan, entry, source, self._lanes.piece)
        whole = whole or maker.row_unit is None or entry.n_bytes <= _WHOLE_BYTES
        ranges = maker.pieces if whole else sampled_ranges(plan, entry, maker)
        stored = np.frombuffer(self._artifact.payload(entry.name), np.uint8)
        payload = np.empty(entry.n_bytes, np.uint8)
        try:
            self._make(maker, payload, stored, ranges, whole=whole)
        except BadValue as error:
            raise located(maker, entry.name, error) from None
        found = list(self._row_differences(entry, maker, payload, stored, ranges))
        has_rows = maker.row_unit is not None
        self.compared_bytes += 0 if has_rows else entry.n_bytes
        if whole and not found and not _equal(payload, stored):
            found = [Mismatch(entry.name, "bytes between the rows differ" if has_rows else "the content differs")]
        return found

    def _make(self, maker: Maker, payload: Bytes, stored: Bytes, ranges: RowRanges, *, whole: bool) -> None:
        maker.start(payload)
        if maker.measured:
            if whole or not isinstance(maker, EncodedNvfp4Maker):
                measures = self._for_each(maker.measure, maker.pieces)
                self._pool.submit(lambda: maker.settle(measures, self._own.space)).result()
            else:
                maker.assume(stored)
        sums = self._for_each(maker.encode, ranges)
        if whole:
            self._pool.submit(lambda: maker.finish(sums, self._own.space)).result()

    def _for_each(self, work: Callable[[int, int, Workspace], Any], ranges: RowRanges) -> list[Any]:
        return list(self._pool.map(lambda rows: work(rows[0], rows[1], self._own.space), ranges))

    def _row_differences(
        self, entry: Entry, maker: Maker, payload: Bytes, stored: Bytes, ranges: RowRanges
    ) -> Iterator[Mismatch]:
        """Of objects that have rows: which planes differ and where; and the divisor."""
        if maker.row_unit is None:
            return
        assert isinstance(entry, TensorEntry)
        found: dict[str, list[int]] = {}
        for begin, end in ranges:
            ours, theirs = (row_planes(entry, maker.n_rows, data, begin, end) for data in (payload, stored))
            for plane, rows in ours.items():
                self.compared_bytes += rows.nbytes
                found.setdefault(plane, []).extend((begin + _unequal_rows(rows, theirs[plane])).tolist())
        for plane, differing in found.items():
            if differing:
                yield Mismatch(entry.name, plane, differing[0], len(differing))
        if entry.format == "NVFP4":
            made, kept = (plane_views(data, entry.shape).divisor for data in (payload, stored))
            if made.tobytes() != kept.tobytes():
                yield Mismatch(entry.name, f"the divisor is {kept[0]:.9g}, the source gives {made[0]:.9g}")

    def guess_method(self, plan: ConversionPlan) -> str:
        """``max`` if it gives the sampled rows of the first matrices; ``mse`` if that gives those which it does not."""
        target, tried, compared = plan.require(), 0, self.compared_bytes
        searched = replace(plan, target=replace(target, coding=target.coding.with_method("mse")))
        for entry, source in zip(target.inventory.objects, target.sources, strict=True):
            made = isinstance(entry, TensorEntry) and NUMERIC_FORMATS[entry.format].kind != "direct"
            if not made or source.transform not in ("rows", "draft_rows"):
                continue
            tried += 1
            if self.compare(plan, entry, source, whole=False):
                found = self.compare(searched, entry, source, whole=False)
                self.compared_bytes = compared
                return "max" if found else "mse"
            if tried == _GUESSES:
                break
        self.compared_bytes = compared
        return "max"


def sampled_ranges(plan: ConversionPlan, entry: Entry, maker: Maker) -> RowRanges:
    """Whole units of rows around the first, the middle and the last row, and around those where fused parts meet."""
    assert isinstance(entry, TensorEntry)
    assert maker.row_unit is not None
    target, n_rows = plan.require(), maker.n_rows
    role, _ = target.inventory.roles[entry.name]
    rows = {0, n_rows // 2, n_rows - 1}
    if len(entry.shape) == 2:
        for begin, end in _parts(target.config.geometry, role):
            rows |= {begin, end - 1}
    units = sorted({row // maker.row_unit * maker.row_unit for row in rows})
    return [(begin, min(begin + maker.row_unit, n_rows)) for begin in units]


def _parts(geometry: ModelGeometry, role: str) -> Iterable[tuple[int, int]]:
    dims = role_named(role).dims
    if dims and dims[0].startswith("expert_"):
        experts = {0, geometry.text.n_experts // 2, geometry.text.n_experts - 1}
        return [(begin, end) for e in sorted(experts) for _, begin, end in expert_rows(geometry, role, e)]
    return [(begin, end) for _, begin, end in row_views(geometry, role)]


def row_planes(entry: TensorEntry, n_rows: int, data: Bytes, begin: int, end: int) -> dict[str, Bytes]:
    """Bytes of rows [begin, end) of ``n_rows`` by what they are, each uint8 [rows, n]; of NVFP4 whole tiles."""
    kind = NUMERIC_FORMATS[entry.format].kind
    if kind == "nvfp4":
        views = plane_views(data, entry.shape)
        tiles = views.scales[begin // ROW_TILE : end // ROW_TILE]
        return {"codes": views.codes[begin:end], "block scales": natural_scales(tiles)}
    if kind == "direct":
        return {"words": data.reshape(n_rows, -1)[begin:end]}
    planes = row_split_planes(entry.format, entry.shape)
    spans = {
        "codes": (planes.base_offset, planes.base_bytes),
        "high bits": (planes.high_offset, planes.high_bytes),
        "scales": (planes.scale_offset, planes.scale_bytes),
    }
    return {
        name: data[offset : offset + n_bytes].reshape(planes.n_rows, -1)[begin:end]
        for name, (offset, n_bytes) in spans.items()
        if n_bytes
    }


def _unequal_rows(ours: Bytes, theirs: Bytes) -> NDArray[np.intp]:
    """Numbers of rows that differ."""
    step = max(1, _COMPARE_BYTES // max(1, ours.shape[1]))
    found = [
        begin + np.flatnonzero((ours[begin : begin + step] != theirs[begin : begin + step]).any(axis=1))
        for begin in range(0, len(ours), step)
    ]
    return np.concatenate(found)


def _equal(ours: Bytes, theirs: Bytes) -> bool:
    spans = range(0, ours.size, _COMPARE_BYTES)
    return all(np.array_equal(ours[b : b + _COMPARE_BYTES], theirs[b : b + _COMPARE_BYTES]) for b in spans)
