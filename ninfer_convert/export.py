"""``export``: from an artifact back to a checkpoint folder that Hugging Face libraries load.

Weights are the decoded values, rounded to BF16 (or kept in float32). The folder appears under its name only when it
is complete. Specification: ``specs/conversion.md`` and ``specs/convert-cli.md``.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from ninfer_convert.checkpoint import CONFIG, INDEX
from ninfer_convert.checkpoint_view import CheckpointTensor, CheckpointView, head_is_embedding, view_checkpoint
from ninfer_convert.families import Origin
from ninfer_convert.hf_config import Dtype, checkpoint_config, companion_config
from ninfer_convert.output_folder import OutputFolder
from ninfer_convert.resources import PREFIX
from ninfer_convert.safetensors_layout import PlannedFile, PlannedTensor, index_of, plan_files
from ninfer_convert.stored_rows import StoredRows
from ninfer_format import Artifact, ArtifactError
from ninfer_format.errors import DiskFullError
from ninfer_format.hashing import parallel
from ninfer_format.numeric.direct import round_bf16, widen_bf16
from ninfer_format.published import FRONTEND_RESOURCES
from ninfer_format.writer import storage_error

SCHEMA = "ninfer.export/1"
REPORT = "ninfer-export.json"
"""Written into the folder; by it a later export recognises a folder that it may replace."""
DFLASH_FOLDER = "dflash"
SHARD_BYTES = 5_000_000_000
PIECE_ELEMENTS = 1 << 20
_BF16_EXPONENT = 0x7F80
_SIDE_FILES_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What the user asked for."""

    out: Path
    dtype: Dtype = "bfloat16"
    shard_bytes: int = SHARD_BYTES
    force: bool = False
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class ExportFolder:
    """One folder of the checkpoint: its config and its weight files. ``name`` is empty for the model's own."""

    name: str
    config: dict[str, Any]
    files: tuple[PlannedFile, ...]
    tensors: dict[str, CheckpointTensor]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Everything that will be written, from headers and the few FP32 tensors alone."""

    artifact: Artifact
    options: ExportOptions
    folders: tuple[ExportFolder, ...]
    notes: tuple[str, ...]
    weight_bytes: int
    """Bytes of tensor data."""
    output_bytes: int
    """Bytes of all files but the report."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A finished export."""

    path: Path
    n_tensors: int
    files: tuple[str, ...]
    output_bytes: int
    elapsed_seconds: float
    notes: tuple[str, ...]


def plan_export(artifact: Artifact, options: ExportOptions) -> ExportPlan:
    """Plan the checkpoint of ``artifact``; InventoryError if it does not hold the objects of a model we know."""
    notes: list[str] = []
    view = view_checkpoint(artifact)
    tied = _is_tied(artifact, view, notes)
    if tied:
        view = view_checkpoint(artifact, tied=True)
    with StoredRows(artifact) as stored:
        dtypes = {(t.origin, t.name): _dtype_of(t, stored, options.dtype) for t in view.tensors}
    _say_dtypes(artifact, view, dtypes, options, notes)
    config = checkpoint_config(view.config, dtype=options.dtype, tied=tied)
    folders = [_folder("", "base", config, view, dtypes, options)]
    if view.config.dflash is not None:
        companion = companion_config(view.config.dflash, dtype=options.dtype)
        folders.append(_folder(DFLASH_FOLDER, "dflash", companion, view, dtypes, options))
    files = [file for folder in folders for file in folder.files]
    frontend = sum(artifact.objects[name].n_bytes for name in _frontend_names(artifact))
    weights = sum(tensor.n_bytes for file in files for tensor in file.tensors)
    return ExportPlan(
        artifact, options, tuple(folders), tuple(notes), weights, frontend + sum(file.file_bytes for file in files)
    )


def _is_tied(artifact: Artifact, view: CheckpointView, notes: list[str]) -> bool:
    """Whether the checkpoint ties head and embedding: its config says so, and the stored matrices allow it."""
    if view.config.text_config.get("tie_word_embeddings") is not True:
        return False
    if head_is_embedding(artifact):
        return True
    notes.append(
        "the checkpoint tied its embeddings, but head and embedding are stored in different formats and decode to "
        "different values: the export has an lm_head of its own and tie_word_embeddings is false"
    )
    return False


def _dtype_of(tensor: CheckpointTensor, stored: StoredRows, dtype: Dtype) -> str:
    """Safetensors dtype: BF16, or F32 where that was asked for or a stored float32 value has no BF16 word."""
    if dtype == "float32":
        return "F32"
    if tensor.formats != ("FP32",):
        return "BF16"
    values = tensor.values(stored, 0, tensor.n_rows)
    exact = np.array_equal(widen_bf16(round_bf16(values)).view(np.uint32), values.view(np.uint32))
    return "BF16" if exact else "F32"


def _say_dtypes(
    artifact: Artifact,
    view: CheckpointView,
    dtypes: dict[tuple[Origin, str], str],
    options: ExportOptions,
    notes: list[str],
) -> None:
    kept = [name for (_, name), dtype in dtypes.items() if dtype == "F32" and options.dtype == "bfloat16"]
    if kept:
        notes.append(f"{len(kept)} tensors stay in F32, because BF16 does not hold their values: {kept[0]}, …")
    quantized = sum(1 for tensor in view.tensors if set(tensor.formats) - {"BF16", "FP32"})
    if quantized and options.dtype == "bfloat16":
        notes.append(
            f"{quantized} tensors are decoded from quantized words and rounded to BF16; --dtype float32 keeps the "
            "decoded values exactly"
        )
    divisors = len([name for name in artifact.objects.names() if name.endswith("/input_scale_divisor")])
    if divisors:
        notes.append(f"{divisors} activation divisors are left out: a plain checkpoint has no place for them")
    notes.append("the draft head's row choice is left out: build again with --ranking and this artifact to keep it")


def _frontend_names(artifact: Artifact) -> list[str]:
    held = artifact.objects.names()
    return [name for name in FRONTEND_RESOURCES if name in held]


def _folder(
    name: str,
    origin: Origin,
    config: dict[str, Any],
    view: CheckpointView,
    dtypes: dict[tuple[Origin, str], str],
    options: ExportOptions,
) -> ExportFolder:
    tensors = {tensor.name: tensor for tensor in view.tensors if tensor.origin == origin}
    planned = [PlannedTensor(t.name, dtypes[origin, t.name], t.shape) for t in tensors.values()]
    return ExportFolder(name, config, plan_files(planned, options.shard_bytes), tensors)


def export(plan: ExportPlan, *, progress: Callable[[int], None] = lambda n_bytes: None) -> ExportResult:
    """Write the folder that ``plan`` describes; ``progress`` is called with bytes of tensor data.

    UsageError for what is in the way, ArtifactError for values that are NaN or infinite, DiskFullError or
    StorageError from the file system. Nothing is left of an export that did not finish.
    """
    started, options = monotonic(), plan.options
    output = OutputFolder(options.out, force=options.force, replaceable=REPORT)
    with output as folder, StoredRows(plan.artifact) as rows:
        free = shutil.disk_usage(folder.partial).free
        if plan.output_bytes + _SIDE_FILES_BYTES > free:
            raise DiskFullError(
                f"{options.out}: the export needs {plan.output_bytes + _SIDE_FILES_BYTES:,} bytes, the file system has "
                f"{free:,} free; free some space or choose another folder"
            )
        for part in plan.folders:
            target = folder.partial / part.name
            target.mkdir(exist_ok=True)
            _write_json(target / CONFIG, part.config)
            if len(part.files) > 1:
                _write_json(target / INDEX, index_of(part.files))
            for file in part.files:
                _write_weights(target / file.name, file, part.tensors, rows, options.jobs, progress)
        for name in _frontend_names(plan.artifact):
            _write_file(folder.partial / name.removeprefix(PREFIX), plan.artifact.payload(name))
        _write_json(folder.partial / REPORT, report_of(plan))
        folder.commit()
    files = tuple(str(Path(part.name) / file.name) for part in plan.folders for file in part.files)
    n_tensors = sum(len(part.tensors) for part in plan.folders)
    return ExportResult(options.out, n_tensors, files, plan.output_bytes, monotonic() - started, plan.notes)


def report_of(plan: ExportPlan) -> dict[str, Any]:
    """What the folder is and where it comes from, as its report says it."""
    artifact = plan.artifact
    return {
        "schema": SCHEMA,
        "artifact": {"file": artifact.path.name, "bytes": artifact.file_bytes, "identity": str(artifact.identity)},
        "dtype": plan.options.dtype,
        "tensors": sum(len(part.tensors) for part in plan.folders),
        "weight_bytes": plan.weight_bytes,
        "files": [
            {"file": str(Path(part.name) / file.name), "bytes": file.file_bytes, "tensors": len(file.tensors)}
            for part in plan.folders
            for file in part.files
        ],
        "notes": list(plan.notes),
    }


def _write_weights(
    path: Path,
    file: PlannedFile,
    tensors: dict[str, CheckpointTensor],
    rows: StoredRows,
    jobs: int,
    progress: Callable[[int], None],
) -> None:
    """One safetensors file: every piece is decoded by some thread and written at its place."""

    def write(piece: tuple[PlannedTensor, int, int]) -> int:
        planned, begin, end = piece
        tensor = tensors[planned.name]
        content = _bf16(tensor, rows, begin, end) if planned.dtype == "BF16" else _float32(tensor, rows, begin, end)
        _pwrite(descriptor, content, file.offsets[planned.name] + begin * (planned.n_bytes // tensor.n_rows), path)
        return content.nbytes

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise storage_error(error, path, "creating") from None
    try:
        _pwrite(descriptor, np.frombuffer(file.header, np.uint8), 0, path)
        for n_bytes in parallel(write, _pieces(file, tensors), jobs or None):
            progress(n_bytes)
        os.fsync(descriptor)
    except OSError as error:
        raise storage_error(error, path, "writing") from None
    finally:
        os.close(descriptor)


def _pieces(file: PlannedFile, tensors: dict[str, CheckpointTensor]) -> Iterator[tuple[PlannedTensor, int, int]]:
    for planned in file.tensors:
        tensor = tensors[planned.name]
        step = tensor.n_rows if tensor.transposed else max(1, PIECE_ELEMENTS // tensor.width)
        for begin in range(0, tensor.n_rows, step):
            yield planned, begin, min(begin + step, tensor.n_rows)


def _bf16(tensor: CheckpointTensor, rows: StoredRows, begin: int, end: int) -> np.ndarray[Any, Any]:
    words = tensor.bf16_words(rows, begin, end)
    _check_finite(tensor, (words & _BF16_EXPONENT) != _BF16_EXPONENT, begin)
    return words.astype("<u2", copy=False)


def _float32(tensor: CheckpointTensor, rows: StoredRows, begin: int, end: int) -> np.ndarray[Any, Any]:
    values = tensor.values(rows, begin, end)
    _check_finite(tensor, np.isfinite(values), begin)
    return values.astype("<f4", copy=False)


def _check_finite(tensor: CheckpointTensor, finite: np.ndarray[Any, np.dtype[np.bool_]], first_row: int) -> None:
    if finite.all():
        return
    row, column = np.unravel_index(int(np.argmin(finite)), finite.shape)
    flat = (first_row + int(row)) * tensor.width + int(column)
    index = [int(i) for i in np.unravel_index(flat, tensor.shape)]
    raise ArtifactError(
        f"{tensor.name} is NaN or infinite at {index}: the artifact is damaged; "
        "check it with `ninfer-verify check --full`"
    )


def _pwrite(descriptor: int, content: np.ndarray[Any, Any], position: int, path: Path) -> None:
    view = np.ascontiguousarray(content).data.cast("B")
    try:
        while view:
            done = os.pwrite(descriptor, view, position)
            view, position = view[done:], position + done
    except OSError as error:
        raise storage_error(error, path, "writing") from None


def _write_json(path: Path, document: dict[str, Any]) -> None:
    _write_file(path, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def _write_file(path: Path, content: bytes | memoryview) -> None:
    try:
        with open(path, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise storage_error(error, path, "writing") from None
