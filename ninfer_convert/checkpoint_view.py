"""An artifact seen as the checkpoint it came from: every tensor of that checkpoint, and which stored rows hold it.

The inverse of the row maps of ``families``: fused matrices come apart, per-head rows are interleaved again, the
convolution is transposed back. Specification: ``specs/conversion.md``, export.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.families import ObjectSource, Origin
from ninfer_convert.families.qwen3_5 import Names, object_sources
from ninfer_convert.stored_rows import StoredRows
from ninfer_format import Artifact, InventoryError, ModelConfig, TensorEntry, compare_inventory, config_of
from ninfer_format.inventory import Inventory, expected_inventory

HEAD, EMBEDDING = "text/output_head", "text/token_embedding"
_COMPARE_BYTES = 8 << 20
_WHOLE = ("rows", "widen", "conv_transpose")


@dataclass(frozen=True, slots=True)
class Part:
    """``count`` rows of a checkpoint tensor from row ``begin``: rows of one stored object from ``object_begin``."""

    begin: int
    count: int
    entry: TensorEntry
    object_begin: int


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of the checkpoint, as a matrix [n_rows, width] in C order whatever its ``shape``."""

    name: str
    shape: tuple[int, ...]
    origin: Origin
    width: int
    transposed: bool
    """Stored as [width, n_rows]; then it has one part, which is the whole object."""
    parts: tuple[Part, ...]
    """Ascending, without gaps."""

    @property
    def n_rows(self) -> int:
        """Rows of the matrix."""
        return self.parts[-1].begin + self.parts[-1].count

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of the stored rows, in order of first use."""
        return tuple(dict.fromkeys(part.entry.format for part in self.parts))

    def values(self, stored: StoredRows, begin: int, end: int) -> NDArray[np.float32]:
        """Decoded rows [begin, end), float32 [end - begin, width]; a transposed tensor is read whole."""
        if self.transposed:
            return np.ascontiguousarray(self._whole(stored).T)[begin:end]
        out = np.empty((end - begin, self.width), np.float32)
        for part, first, count in self._covering(begin, end):
            at, row = part.begin + first - begin, part.object_begin + first
            out[at : at + count] = stored.values(part.entry, row, row + count)
        return out

    def bf16_words(self, stored: StoredRows, begin: int, end: int) -> NDArray[np.uint16]:
        """The same rows as BF16 words, rounded to nearest even where they are not stored so."""
        if self.transposed:
            entry = self.parts[0].entry
            return np.ascontiguousarray(stored.bf16_words(entry, 0, entry.shape[0]).T)[begin:end]
        runs = list(self._covering(begin, end))
        if len(runs) == 1:
            part, first, _ = runs[0]
            row = part.object_begin + first
            return stored.bf16_words(part.entry, row, row + end - begin).reshape(end - begin, self.width)
        out = np.empty((end - begin, self.width), np.uint16)
        for part, first, count in runs:
            at, row = part.begin + first - begin, part.object_begin + first
            out[at : at + count] = stored.bf16_words(part.entry, row, row + count)
        return out

    def _whole(self, stored: StoredRows) -> NDArray[np.float32]:
        entry = self.parts[0].entry
        return stored.values(entry, 0, entry.shape[0])

    def _covering(self, begin: int, end: int) -> Iterator[tuple[Part, int, int]]:
        """Parts that hold rows [begin, end): the part, its first needed row, how many."""
        number = bisect_right(self.parts, begin, key=lambda part: part.begin) - 1
        while begin < end:
            part = self.parts[number]
            count = min(end, part.begin + part.count) - begin
            yield part, begin - part.begin, count
            number, begin = number + 1, begin + count


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """All checkpoint tensors of an artifact, in the artifact's order."""

    config: ModelConfig
    names: Names
    tensors: tuple[CheckpointTensor, ...]


def checked_model(artifact: Artifact) -> tuple[ModelConfig, Inventory]:
    """Config and expected inventory of a model artifact; InventoryError if its objects are not those."""
    config = config_of(artifact)
    expected = expected_inventory(artifact.directory, config)
    if problems := compare_inventory(expected, artifact.directory, packed=False):
        raise InventoryError(f"{artifact.path}: " + "; ".join(problems))
    return config, expected


def view_checkpoint(artifact: Artifact, *, tied: bool = False) -> CheckpointView:
    """The checkpoint that ``artifact`` stands for, expert banks fused as in the official checkpoints.

    ``tied`` leaves the output head out. Tensor names are the official ones; without vision, those of a text-only
    checkpoint. InventoryError if the artifact does not hold the objects of its model.
    """
    config, expected = checked_model(artifact)
    text = "model.language_model." if config.geometry.vision is not None else "model."
    names = Names(text, "model.visual.", "lm_head.weight", tied)
    source_map = object_sources(config, expected, (), names)
    parts: dict[tuple[Origin, str], list[Part]] = defaultdict(list)
    found: dict[tuple[Origin, str], ObjectSource] = {}
    for source in source_map.sources:
        if source.transform not in _WHOLE or not source.runs or (tied and source.name == HEAD):
            continue
        entry = artifact.objects[source.name]
        assert isinstance(entry, TensorEntry)
        begin = 0
        for run in source.runs:
            parts[source.origin, run.tensor].append(Part(run.begin, run.count, entry, begin))
            found.setdefault((source.origin, run.tensor), source)
            begin += run.count
    tensors = tuple(
        _tensor(name, source, source_map.shapes[source.origin], parts[origin, name])
        for (origin, name), source in found.items()
    )
    return CheckpointView(config, names, tensors)


def _tensor(
    name: str, source: ObjectSource, shapes: Mapping[str, tuple[int, ...]], parts: list[Part]
) -> CheckpointTensor:
    shape, ordered = shapes[name], _joined(sorted(parts, key=lambda part: part.begin))
    end = 0
    for part in ordered:
        if part.begin != end:
            raise InventoryError(f"rows {end} to {part.begin - 1} of {name} are stored nowhere, or twice")
        end = part.begin + part.count
    if end * source.row_width != int(np.prod(shape, dtype=np.int64)):
        raise InventoryError(f"{end} rows of {source.row_width} are stored of {name} {list(shape)}")
    return CheckpointTensor(
        name, shape, source.origin, source.row_width, source.transform == "conv_transpose", tuple(ordered)
    )


def _joined(parts: list[Part]) -> list[Part]:
    """The same rows in fewer parts: neighbours that continue each other in one object are joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        continues = last is not None and last.entry is part.entry and last.begin + last.count == part.begin
        if last is not None and continues and last.object_begin + last.count == part.object_begin:
            joined[-1] = replace(last, count=last.count + part.count)
        else:
            joined.append(part)
    return joined


def head_is_embedding(artifact: Artifact) -> bool:
    """Whether output head and token embedding are stored in one format with the same bytes."""
    head, embedding = artifact.objects[HEAD], artifact.objects[EMBEDDING]
    if not isinstance(head, TensorEntry) or not isinstance(embedding, TensorEntry):
        return False
    if (head.format, head.layout, head.shape) != (embedding.format, embedding.layout, embedding.shape):
        return False
    with StoredRows(artifact) as stored:
        for begin in range(0, head.n_bytes, _COMPARE_BYTES):
            ours, theirs = (np.empty(min(_COMPARE_BYTES, head.n_bytes - begin), np.uint8) for _ in range(2))
            stored.stored(head.offset + begin, ours)
            stored.stored(embedding.offset + begin, theirs)
            if not np.array_equal(ours, theirs):
                return False
    return True
