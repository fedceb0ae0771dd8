"""``diff``: how two artifacts differ, object by object, and how far apart the values are.

Objects are matched by name. Where one artifact stores a matrix split and the other fused, the checkpoint tensors that
both hold are compared instead. Errors take the first artifact as the truth. Specification: ``specs/convert-cli.md``.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.checkpoint_view import CheckpointTensor, CheckpointView, view_checkpoint
from ninfer_convert.stored_rows import StoredRows, matrix_shape
from ninfer_format import Artifact, Identity, NinferError, ResourceEntry, TensorEntry
from ninfer_format.directory import Entry
from ninfer_format.hashing import parallel

PIECE_ELEMENTS = 1 << 20
_COMPARE_BYTES = 8 << 20

Status = Literal["equal", "bytes", "format", "values", "content", "shape", "kind", "only-first", "only-second"]
"""``bytes``: same values, other bytes (padding, signed zeros). ``format``: same values in another format. ``values``:
other values. ``content``: a resource with other bytes. ``shape``, ``kind``: not comparable. ``only-…``: one has it."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Of values y against x: max |x − y|, sqrt(Σ(x − y)² / n), sqrt(Σ(x − y)² / Σx²), and how many of n differ."""

    max: float
    rms: float
    relative: float
    n_different: int
    n_values: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One object (or checkpoint tensor) of two artifacts; ``first`` and ``second`` describe it, None where absent."""

    name: str
    status: Status
    first: str | None
    second: str | None
    errors: Errors | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two artifacts."""

    path: Path
    identity: Identity
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """All comparisons: objects in the first artifact's order, then those that only the second has."""

    first: Side
    second: Side
    objects: tuple[Comparison, ...]
    tensors: tuple[Comparison, ...]
    """Checkpoint tensors with rows in objects that the two artifacts do not share."""

    @property
    def equal(self) -> bool:
        """Same identity, same objects, same bytes."""
        return self.first.identity == self.second.identity and all(c.status == "equal" for c in self.objects)

    def count(self, status: Status) -> int:
        """Objects with this status."""
        return sum(comparison.status == status for comparison in self.objects)


def diff(
    first: Artifact,
    second: Artifact,
    *,
    jobs: int = 0,
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> Difference:
    """Compare two open artifacts; ``progress`` is called with payload bytes of ``first``."""
    left, right = ({entry.name: entry for entry in artifact.objects} for artifact in (first, second))
    names = list(left | right)
    with StoredRows(first) as ours, StoredRows(second) as theirs:

        def compare(name: str) -> tuple[Comparison, int]:
            a, b = left.get(name), right.get(name)
            return _compare(name, a, b, ours, theirs), a.n_bytes if a is not None else 0

        objects = []
        for comparison, n_bytes in parallel(compare, names, jobs or None):
            objects.append(comparison)
            progress(n_bytes)
        alone = {c.name for c in objects if c.status in ("only-first", "only-second")}
        tensors = tuple(
            parallel(
                lambda pair: _compare_tensors(*pair, ours, theirs), _shared_tensors(first, second, alone), jobs or None
            )
        )
    return Difference(_side(first), _side(second), tuple(objects), tensors)


def _side(artifact: Artifact) -> Side:
    return Side(artifact.path, artifact.identity, artifact.file_bytes)


def _described(entry: Entry) -> str:
    if isinstance(entry, ResourceEntry):
        return f"{entry.n_bytes} bytes"
    return f"{entry.format} {list(entry.shape)}"


def _compare(name: str, a: Entry | None, b: Entry | None, ours: StoredRows, theirs: StoredRows) -> Comparison:
    if b is None:
        return Comparison(name, "only-first", _described(a) if a is not None else None, None)
    if a is None:
        return Comparison(name, "only-second", None, _described(b))
    described = _described(a), _described(b)
    if a.kind != b.kind:
        return Comparison(name, "kind", *described)
    if _same_bytes(a, b, ours, theirs):
        return Comparison(name, "equal", *described)
    if not isinstance(a, TensorEntry) or not isinstance(b, TensorEntry):
        return Comparison(name, "content", *described)
    if a.shape != b.shape:
        return Comparison(name, "shape", *described)
    errors = _sum_errors(_value_pairs(a, b, ours, theirs))
    if errors.n_different:
        return Comparison(name, "values", *described, errors)
    return Comparison(name, "bytes" if a.format == b.format else "format", *described, errors)


def _same_bytes(a: Entry, b: Entry, ours: StoredRows, theirs: StoredRows) -> bool:
    """Whether two objects have the same description and the same payload."""
    if _described(a) != _described(b) or a.n_bytes != b.n_bytes:
        return False
    for begin in range(0, a.n_bytes, _COMPARE_BYTES):
        left, right = (np.empty(min(_COMPARE_BYTES, a.n_bytes - begin), np.uint8) for _ in range(2))
        ours.stored(a.offset + begin, left)
        theirs.stored(b.offset + begin, right)
        if not np.array_equal(left, right):
            return False
    return True


Pair = tuple[NDArray[np.number], NDArray[np.number]]


def _value_pairs(a: TensorEntry, b: TensorEntry, ours: StoredRows, theirs: StoredRows) -> Iterator[Pair]:
    n_rows, width = matrix_shape(a)
    step = max(1, PIECE_ELEMENTS // width)
    for begin in range(0, n_rows, step):
        end = min(begin + step, n_rows)
        yield ours.values(a, begin, end), theirs.values(b, begin, end)


def _sum_errors(pairs: Iterator[Pair]) -> Errors:
    """Errors over all pieces, sums in float64. What is not finite on one side alone makes them infinite."""
    largest, squares, energy, n_different, n_values = 0.0, 0.0, 0.0, 0, 0
    for x, y in pairs:
        n_values += x.size
        differs = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        n_different += int(np.count_nonzero(differs))
        with np.errstate(all="ignore"):
            truth = x.astype(np.float64)
            error = np.where(differs, truth - y, 0.0)
            largest = max(largest, _or_infinite(float(np.abs(error).max(initial=0.0))))
            squares += float(np.vdot(error, error))
            energy += float(np.vdot(truth, truth))
    rms = _or_infinite(math.sqrt(squares / n_values) if squares == squares else math.nan)
    relative = math.sqrt(squares / energy) if energy > 0 else math.inf if squares else 0.0
    return Errors(largest, rms, _or_infinite(relative), n_different, n_values)


def _or_infinite(value: float) -> float:
    return value if value == value else math.inf


def _shared_tensors(
    first: Artifact, second: Artifact, alone: set[str]
) -> Iterator[tuple[str, CheckpointTensor, CheckpointTensor]]:
    """Checkpoint tensors of both artifacts that have rows in objects which only one of them has."""
    if not alone:
        return
    try:
        ours, theirs = view_checkpoint(first), view_checkpoint(second)
    except NinferError:  # containers that hold no model: objects are all there is to compare
        return
    others = _by_name(theirs)
    for name, tensor in _by_name(ours).items():
        other = others.get(name)
        if other is None or other.shape != tensor.shape:
            continue
        if any(part.entry.name in alone for part in (*tensor.parts, *other.parts)):
            yield tensor.name, tensor, other


def _by_name(view: CheckpointView) -> dict[tuple[str, str], CheckpointTensor]:
    """Tensors by origin and name, text tensors without the prefix that differs between kinds of checkpoints."""
    return {(tensor.origin, tensor.name.removeprefix(view.names.text)): tensor for tensor in view.tensors}


def _compare_tensors(
    name: str, a: CheckpointTensor, b: CheckpointTensor, ours: StoredRows, theirs: StoredRows
) -> Comparison:
    step = a.n_rows if a.transposed else max(1, PIECE_ELEMENTS // a.width)
    pieces = ((begin, min(begin + step, a.n_rows)) for begin in range(0, a.n_rows, step))
    errors = _sum_errors((a.values(ours, *piece), b.values(theirs, *piece)) for piece in pieces)
    described = " + ".join(a.formats), " + ".join(b.formats)
    status: Status = "values" if errors.n_different else "equal" if described[0] == described[1] else "format"
    return Comparison(name, status, *described, errors)
