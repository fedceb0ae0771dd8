"""GGUF files as a source: rows are dequantized as the ``gguf`` package does, and encoded again.

A file of the language model, or the parts that it was split into; frontend files come from elsewhere. Specification:
``specs/conversion.md``, GGUF sources.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ninfer_convert.checkpoint import Checkpoint, Shard, TensorRef
from ninfer_convert.problems import Problem, some_names
from ninfer_convert.source_facts import hub_origin
from ninfer_convert.sources.gguf_config import TEMPLATE, TOKENS, config_of_metadata, heads_of
from ninfer_convert.sources.gguf_header import PART, GgufHeader, GgufTensor, model_name, read_gguf_header
from ninfer_convert.sources.gguf_names import Logical, logical_tensors
from ninfer_convert.sources.logical import Fault, FloatReader, Floats, LogicalCheckpoint, LogicalTensor
from ninfer_format import SourceError
from ninfer_format.command import require_extra

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""GGML types that are read: the last four stand in for K types where rows are no multiple of 256."""

_TILE_VALUES = 1 << 18
_AGAIN = "download the file again"


@dataclass(frozen=True, slots=True)
class GgufSource:
    """An opened source: the checkpoint that it presents, and what it says about text."""

    checkpoint: LogicalCheckpoint
    tokens: Sequence[str] | None
    template: str | None


def open_gguf(path: Path) -> GgufSource:
    """Open ``path`` and, if it is one part of several, the others beside it.

    MissingExtraError without the ``gguf`` package; never raises for what the files contain.
    """
    kinds = _kinds()
    problems: list[Problem] = []
    headers = _headers(path, problems)
    fields = next(iter(headers.values())).fields if headers else {}
    refs = _refs(headers, kinds, problems)
    shapes = {name: ref.shape for name, ref in refs.items()}
    config: dict[str, Any] | None = None
    if headers and not problems:
        config, wrong = config_of_metadata(fields, shapes, next(iter(headers)))
        problems += wrong
    whole = config is not None and not problems
    shards = [Shard(f, h.file_bytes, h.mtime_ns, h.sha256, len(h.tensors)) for f, h in headers.items()] if whole else ()
    files = Checkpoint(path.parent, config if whole else None, refs, shards, {}, frozenset(), (), problems)
    tensors: dict[str, LogicalTensor] = {}
    faults: list[Fault] = []
    if whole and config is not None:
        found, unknown = logical_tensors(shapes, heads_of(config["text_config"]))
        problems += _unknown(unknown, path.name)
        tensors, faults = _present(found, files, kinds)
    checkpoint = LogicalCheckpoint(
        files, tensors, faults=faults, unavailable=frozenset(f.name for f in faults), problems=problems,
        notes=_notes(path.name, refs.values()) if whole else (), facts=_facts(path, fields),
    )  # fmt: skip
    return GgufSource(checkpoint, fields.get(TOKENS), fields.get(TEMPLATE))


def _kinds() -> Mapping[int, "GGMLQuantizationType"]:
    """All GGML types of the package by number."""
    return {kind.value: kind for kind in require_extra("gguf", "gguf").GGMLQuantizationType}


def _headers(path: Path, problems: list[Problem]) -> dict[str, GgufHeader]:
    """Headers by file name, the first part first; none if any of them is missing or unreadable."""
    files = [path.name]
    if match := PART.fullmatch(path.name):
        files = [f"{match[1]}-{n:05d}-of-{match[3]}{path.suffix}" for n in range(1, min(int(match[3]), 9999) + 1)]
    if absent := [f for f in files if not (path.parent / f).exists()]:
        message = f"the model is split into {len(files)} parts, and {some_names(absent)} is not beside {path.name}"
        problems.append(Problem("missing-shard", message, str(path.parent), "download all parts into one folder"))
        return {}
    headers: dict[str, GgufHeader] = {}
    for file in files:
        try:
            header, problem = read_gguf_header(path.parent / file, (TOKENS,))
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            header, problem = None, Problem("unreadable-file", message, file, "check its permissions and its disk")
        if header is not None:
            headers[file] = header
        if problem is not None:
            problems.append(problem)
    if problems:
        return {}
    for number, (file, header) in enumerate(headers.items()):
        part, count = header.fields.get("split.no", 0), header.fields.get("split.count", 1) or 1
        if (part, count) != (number, len(files)):
            message = f"the file says that it is part {part} of {count}, its name makes it {number} of {len(files)}"
            problems.append(Problem("bad-gguf", message, file, "give split files the names that llama.cpp gave them"))
    return {} if problems else headers


def _refs(
    headers: Mapping[str, GgufHeader], kinds: Mapping[int, "GGMLQuantizationType"], problems: list[Problem]
) -> dict[str, TensorRef]:
    """Stored tensors by name; spans that leave the file or overlap are problems."""
    refs: dict[str, TensorRef] = {}
    for file, header in headers.items():
        end, last = header.data_offset, "the header"
        for tensor in sorted(header.tensors, key=lambda t: t.offset):
            kind = kinds.get(tensor.type_id)
            n_bytes = _n_bytes(tensor, kind)
            begin = header.data_offset + tensor.offset
            if n_bytes is None:
                message = f"tensor {tensor.name!r:.80} has {tensor.shape[-1]} columns, no whole number of blocks"
                problems.append(Problem("bad-gguf", message, file, _AGAIN))
            elif begin < end:
                message = f"tensor {tensor.name!r:.80} begins at {begin}, inside {last}, which ends at {end}"
                problems.append(Problem("bad-gguf", message, file, _AGAIN))
            elif begin + n_bytes > header.file_bytes:
                message = (
                    f"tensor {tensor.name!r:.80} ends at {begin + n_bytes}, the file has {header.file_bytes} bytes"
                )
                problems.append(Problem("truncated-file", message, file, f"the download was cut; {_AGAIN}"))
            elif tensor.name in refs:
                message = f"tensor {tensor.name!r:.80} is in {refs[tensor.name].file} too"
                problems.append(Problem("bad-gguf", message, file, _AGAIN))
            else:
                end, last = begin + n_bytes, repr(tensor.name)
                dtype = kind.name if kind is not None else f"GGML type {tensor.type_id}"
                refs[tensor.name] = TensorRef(tensor.name, file, dtype, tensor.shape, begin, n_bytes)
                continue
            return refs  # one line per file: what follows a wrong span is wrong too
    return refs


def _n_bytes(tensor: GgufTensor, kind: "GGMLQuantizationType | None") -> int | None:
    """Bytes of the tensor: 0 for a type that the package does not know, None for a broken row."""
    if kind is None:
        return 0
    per_block, block_bytes = require_extra("gguf", "gguf").GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % per_block:
        return None
    n_blocks = tensor.shape[-1] // per_block
    for size in tensor.shape[:-1]:
        n_blocks *= size
    return int(n_blocks * block_bytes)


def _present(
    found: Sequence[Logical], files: Checkpoint, kinds: Mapping[int, "GGMLQuantizationType"]
) -> tuple[dict[str, LogicalTensor], list[Fault]]:
    """Logical tensors, and those that cannot be made."""
    by_name = {kind.name: kind for kind in kinds.values()}
    tensors: dict[str, LogicalTensor] = {}
    faults: list[Fault] = []
    for logical in found:
        refs = [files.tensors[name] for name in logical.stored]
        if unread := [ref for ref in refs if ref.dtype not in TYPES]:
            message = f"stored as {unread[0].dtype}; of GGUF types this release reads {', '.join(TYPES)}"
            faults.append(Fault(logical.name, "unsupported-type", message, "use a file of one of these types"))
        elif logical.name in tensors:
            both = some_names([*tensors[logical.name].stored, *logical.stored])
            message = f"stored twice, as {both}; which one counts is not known"
            faults.append(Fault(logical.name, "stored-twice", message, "use a file that stores every matrix once"))
        else:
            dtypes = " and ".join(dict.fromkeys(f"GGUF {ref.dtype}" for ref in refs))
            reader = _Reader(logical, files, {ref.name: by_name[ref.dtype] for ref in refs})
            tensors[logical.name] = LogicalTensor(
                logical.name, logical.shape, dtypes, dtypes, logical.stored, refs[0].file, refs[0].file_offset, reader
            )
    return {name: t for name, t in tensors.items() if name not in {f.name for f in faults}}, faults


def _unknown(names: Sequence[str], file: str) -> list[Problem]:
    """One line per way in which unknown tensors end."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"\.\d+\.", ".*.", name)].append(name)
    advice = "converting would drop these weights or scales; use a file of exactly this architecture"
    return [
        Problem("unused-tensor", f"{len(held)} tensors {pattern!r:.80} belong to no part of this model", file, advice)
        for pattern, held in groups.items()
    ]


def _notes(file: str, refs: Any) -> list[str]:
    counts = Counter(ref.dtype for ref in refs)
    types = ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common())
    quantized = set(counts) - {"F32", "F16", "BF16"}
    how = "a quantized GGUF file, so its values had been rounded before" if quantized else "a GGUF file"
    return [f"converted from {how}: {file} ({types} tensors)", "a GGUF file of a language model holds no vision tower"]


def _facts(path: Path, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Name and licence as the file has them; None in a Hub cache, whose folder says more."""
    if hub_origin(path.parent)[0] is not None:
        return None
    licence = [fields.get(f"general.license{part}") for part in ("", ".name", ".link")]
    known = [text[:200] if isinstance(text, str) else None for text in licence]
    return {
        "name": model_name(path.name),
        "repository": None,
        "revision": None,
        "config_sha256": None,
        "licence": dict(zip(("id", "name", "link"), known, strict=True)) | {"files": []} if any(known) else None,
    }


class _Reader(FloatReader):
    """Rows as ``gguf.quants.dequantize`` makes them, in the checkpoint's order, with llama.cpp's changes undone."""

    def __init__(self, logical: Logical, files: Checkpoint, kinds: Mapping[str, "GGMLQuantizationType"]) -> None:
        super().__init__(logical.name, logical.shape)
        self._logical, self._files, self._kinds = logical, files, kinds
        self._starts = [0, *accumulate(run.count for run in logical.runs)]

    def read_rows(self, begin: int, out: Floats) -> None:
        """See ``FloatReader``; SourceError for an element whose change cannot be undone."""
        number, done = bisect_right(self._starts, begin) - 1, 0
        while done < len(out):
            run, skipped = self._logical.runs[number], begin + done - self._starts[number]
            count = min(len(out) - done, run.count - skipped)
            self._read_run(run.tensor, run.begin + skipped, out[done : done + count])
            number, done = number + 1, done + count

    def _read_run(self, tensor: str, begin: int, out: Floats) -> None:
        ref, kind = self._files.tensors[tensor], self._kinds[tensor]
        row_bytes = ref.n_bytes // (ref.n_elements // self.width)
        step = max(1, _TILE_VALUES // self.width)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            blocks = np.empty((len(part), row_bytes), np.uint8)
            self._files.read_into(tensor, (begin + first) * row_bytes, blocks.reshape(-1).data)
            values = dequantize(blocks, kind)
            part[...] = values if self._logical.columns is None else values[:, self._logical.columns]
            if self._logical.change is not None:
                self._undo(part, begin + first)

    def _undo(self, part: Floats, row: int) -> None:
        assert self._logical.change is not None
        before = part.copy()
        self._logical.change(part)
        if (bad := np.isnan(part) & ~np.isnan(before)).any():
            at_row, column = np.argwhere(bad)[0]
            index = [row + int(at_row), int(column)][-len(self._logical.shape) :]
            raise SourceError(
                f"tensor {self._logical.stored[0]!r} holds {before[at_row, column]} at index {index} (in the order of "
                f"{self.name}), expected a value below 0, which is -exp(A_log); the file is damaged or of another kind"
            )


def dequantize(blocks: np.ndarray[Any, Any], kind: "GGMLQuantizationType") -> Floats:
    """float32 values [n, K] of ``blocks`` uint8 [n, bytes of a row]."""
    from gguf.quants import dequantize as by_package

    with np.errstate(all="ignore"):  # encoders refuse what is not finite, with its place
        values: Floats = by_package(blocks, kind)
    return values
