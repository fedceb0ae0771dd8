"""A checkpoint folder: its index, the headers of its shards, and reads of rows; tensor data is never mapped.

``Checkpoint.open`` reads headers only and collects every problem. Only files that the index names count. Rows are
read with ``pread``: mapped pages would be counted as resident memory and defeat the bound that the plan promises.
"""

import json
import math
import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.problems import Problem, some_names
from ninfer_convert.safetensors_header import LFS_POINTER, Header, read_header
from ninfer_convert.sources.bf16 import DIRECT_DTYPES, to_bf16_words
from ninfer_format import SourceError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
HEADERS_ONLY = ".ninfer-headers-only"
"""A file by which a folder is marked whose shards have their headers and holes where the values would be."""
_MAX_JSON_BYTES = 256 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_ROUNDING_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One stored tensor: safetensors ``dtype``, ``file_offset`` from the start of ``file``, both sizes in bytes."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    file_offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file as it was when the plan was made; a build refuses a file that has changed since."""

    file: str
    file_bytes: int
    mtime_ns: int
    header_sha256: str
    n_tensors: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            both = f" ({members[key]} and {value})" if isinstance(value, str) else ""
            raise ValueError(f"{key!r} appears twice{both}")
        members[key] = value
    return members


def read_json_object(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """The JSON object in ``path``; None and a problem if it is absent, unreadable or something else."""
    where, advice = path.name, "download it again"
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            problems.append(Problem("bad-json", f"the file is larger than {_MAX_JSON_BYTES} bytes", where, advice))
            return None
        text = path.read_bytes()
        if not text:
            problems.append(Problem("empty-file", "the file is empty", where, advice))
            return None
        if text.startswith(LFS_POINTER):
            message = "this is a Git LFS pointer, not the file itself"
            problems.append(Problem("lfs-pointer", message, where, "fetch the file with `git lfs pull`"))
            return None
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except FileNotFoundError:
        problems.append(Problem("missing-file", "the file is missing", where, advice))
        return None
    except OSError as error:
        problems.append(Problem("unreadable-file", f"cannot be read: {error.strerror}", where, advice))
        return None
    except (ValueError, RecursionError) as error:
        problems.append(Problem("bad-json", f"the file is not valid JSON: {error}", where, advice))
        return None
    if not isinstance(value, dict):
        problems.append(Problem("bad-json", "the file does not hold a JSON object", where, advice))
        return None
    return value


def _escapes(file: str) -> bool:
    parts = PurePosixPath(file).parts
    return not parts or file.startswith("/") or ".." in parts or "\0" in file or "\\" in file


def _read_index(folder: Path, problems: list[Problem]) -> dict[str, str] | None:
    """Tensor name → shard file, or None (with a problem) when the index cannot be used."""
    index = read_json_object(folder / INDEX, problems)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        message = "weight_map is not a nonempty object of tensor name to file name"
        problems.append(Problem("bad-index", message, INDEX, "download the index again"))
        return None
    if escaping := sorted({f for f in weight_map.values() if _escapes(f)}):
        message = f"it names files outside the folder: {some_names(escaping)}"
        problems.append(Problem("escaping-shard", message, INDEX, "use an index whose files lie beside it"))
        return None
    return weight_map


class Checkpoint:
    """Headers of one checkpoint folder. Reading is safe from several threads; closing is the owner's business."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any] | None,
        tensors: Mapping[str, TensorRef],
        shards: Sequence[Shard],
        absent: Mapping[str, tuple[str, ...]],
        unavailable: frozenset[str],
        ignored: Sequence[str],
        problems: Sequence[Problem],
    ) -> None:
        self.folder = folder
        self.config = config
        """``config.json``, or None when it could not be read (then ``problems`` says why)."""
        self.tensors = tensors
        self.shards = tuple(shards)
        self.absent = absent
        """Shard files that the index names and the folder lacks, with the tensors they should hold."""
        self.unavailable = unavailable
        """Tensors named by the index that cannot be read; a problem or ``absent`` already accounts for each."""
        self.ignored = tuple(ignored)
        """Weight files in the folder that the index does not name."""
        self.problems = tuple(problems)
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read config, index and every shard's header in ``folder``.

        Never raises for what the files contain: ``problems`` has it all. Missing shards are in ``absent``, because
        whether they matter depends on what is converted.
        """
        problems: list[Problem] = []
        config = read_json_object(folder / CONFIG, problems)
        files, weight_map = _shard_files(folder, problems)
        headers: dict[str, Header] = {}
        absent: dict[str, tuple[str, ...]] = {}
        by_file: dict[str, list[str]] = defaultdict(list)
        for name, file in (weight_map or {}).items():
            by_file[file].append(name)
        for file in files:
            try:
                header, problem = read_header(folder / file, file)
            except FileNotFoundError:
                absent[file] = tuple(by_file[file])
                continue
            except OSError as error:
                message = f"cannot be read: {error.strerror}"
                header, problem = None, Problem("unreadable-file", message, file, "check its permissions and its disk")
            if header is not None:
                headers[file] = header
            if problem is not None:
                problems.append(problem)
        refs = {file: _refs(file, header) for file, header in headers.items()}
        if weight_map is None:
            tensors = {name: ref for in_file in refs.values() for name, ref in in_file.items()}
        else:
            tensors = _reconcile(weight_map, refs, problems)
        shards = [Shard(f, h.file_bytes, h.mtime_ns, h.sha256, len(h.tensors)) for f, h in headers.items()]
        unavailable = frozenset(weight_map or ()) - tensors.keys()
        return cls(folder, config, tensors, shards, absent, unavailable, _ignored(folder, files), problems)

    @property
    def headers_only(self) -> bool:
        """Whether the shards hold no values, because a plan from the Hub needs none."""
        return (self.folder / HEADERS_ONLY).exists()

    @property
    def has_weights(self) -> bool:
        """Whether it is known which tensors there should be; False when the index or the only file is unusable."""
        return bool(self.shards or self.absent or self.unavailable)

    @property
    def source_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.file_bytes for shard in self.shards)

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if (known := self._descriptors.get(file)) is not None:
                return known
            if self.headers_only:
                raise SourceError(f"{file}: only its header was read for this plan, its values were not downloaded")
            descriptor = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(descriptor)
            shard = next(s for s in self.shards if s.file == file)
            if (status.st_size, status.st_mtime_ns) != (shard.file_bytes, shard.mtime_ns):
                os.close(descriptor)
                raise SourceError(f"{self.folder / file}: the file has changed since the plan was made; start again")
            self._descriptors[file] = descriptor
            return descriptor

    def read_into(self, name: str, byte_begin: int, out: memoryview) -> None:
        """Fill ``out`` (bytes, C-contiguous) with the stored bytes of tensor ``name`` from ``byte_begin``.

        SourceError if the file has changed or ends early; OSError passes through.
        """
        ref = self.tensors[name]
        if byte_begin < 0 or byte_begin + len(out) > ref.n_bytes:
            raise ValueError(f"{len(out)} bytes from {byte_begin} do not lie in {name!r} of {ref.n_bytes}")
        descriptor, done = self._descriptor(ref.file), 0
        while done < len(out):
            n = os.preadv(descriptor, [out[done:]], ref.file_offset + byte_begin + done)
            if n == 0:
                raise SourceError(f"{self.folder / ref.file}: ends inside tensor {name!r}; download the file again")
            done += n

    def read_words(
        self,
        name: str,
        row_begin: int = 0,
        n_rows: int | None = None,
        out: NDArray[np.uint16] | None = None,
        *,
        row_width: int | None = None,
    ) -> NDArray[np.uint16]:
        """BF16 words ``[n_rows, row_width]`` of tensor ``name`` seen as C-order rows of ``row_width`` elements.

        ``row_width`` defaults to the last dimension (1 for a scalar), ``n_rows`` to the rest. F16 and F32 tensors
        are rounded to nearest even. ``out``, if given, is a C-contiguous array of that many words and is returned
        in that shape. SourceError if a finite value does not fit in BF16; NaN and infinity pass.
        """
        ref = self.tensors[name]
        if ref.dtype not in DIRECT_DTYPES:
            raise SourceError(f"tensor {name!r} is {ref.dtype}; only {', '.join(DIRECT_DTYPES)} hold plain weights")
        width = row_width or (ref.shape[-1] if ref.shape else 1)
        total = ref.n_elements // width
        count = total - row_begin if n_rows is None else n_rows
        if ref.n_elements % width or row_begin < 0 or count < 0 or row_begin + count > total:
            raise ValueError(f"{count} rows of {width} from {row_begin} do not lie in {name!r} {list(ref.shape)}")
        words = np.empty((count, width), np.uint16) if out is None else out.reshape(count, width)
        word_bytes = DIRECT_DTYPES[ref.dtype].itemsize
        flat, first = words.reshape(-1), row_begin * width
        if ref.dtype == "BF16":
            self.read_into(name, first * word_bytes, flat.view(np.uint8).data)
            return words
        for begin in range(0, flat.size, _ROUNDING_ELEMENTS):
            part = flat[begin : begin + _ROUNDING_ELEMENTS]
            stored = np.empty(part.size, DIRECT_DTYPES[ref.dtype])
            self.read_into(name, (first + begin) * word_bytes, stored.view(np.uint8).data)
            part[:] = to_bf16_words(stored, where=f"tensor {name!r}", first_index=first + begin)
        return words

    def close(self) -> None:
        """Close the shard files; reading again reopens them."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _shard_files(folder: Path, problems: list[Problem]) -> tuple[list[str], dict[str, str] | None]:
    """Files to open, and the index if there is one; neither when the folder holds no checkpoint."""
    if (folder / INDEX).exists():
        weight_map = _read_index(folder, problems)
        return (sorted(set(weight_map.values())), weight_map) if weight_map else ([], None)
    if (folder / SINGLE).exists():
        return [SINGLE], None
    others = _ignored(folder, ())
    found = f"found {some_names(others)}" if others else "the folder holds no weight files"
    message = f"neither {INDEX} nor {SINGLE} is there; {found}"
    advice = "download the complete safetensors checkpoint"
    if others and all(name.endswith(".gguf") for name in others):
        advice = "give a GGUF file itself as SOURCE, with --frontend for the tokenizer"
    problems.append(Problem("no-weights", message, str(folder), advice))
    return [], None


def _ignored(folder: Path, files: Sequence[str]) -> list[str]:
    names = (entry.name for entry in os.scandir(folder))
    return sorted(name for name in names if name.endswith(_WEIGHT_SUFFIXES) and name not in files)


def _refs(file: str, header: Header) -> dict[str, TensorRef]:
    return {
        name: TensorRef(name, file, t.dtype, t.shape, header.data_offset + t.begin, t.end - t.begin)
        for name, t in header.tensors.items()
    }


def _reconcile(
    weight_map: Mapping[str, str], refs: Mapping[str, Mapping[str, TensorRef]], problems: list[Problem]
) -> dict[str, TensorRef]:
    """Tensors by name where index and headers agree; every disagreement is a problem, grouped by the files involved."""
    holders: dict[str, list[str]] = defaultdict(list)
    for file, in_file in refs.items():
        for name in in_file:
            holders[name].append(file)
    tensors: dict[str, TensorRef] = {}
    elsewhere: dict[tuple[str, str], list[str]] = defaultdict(list)
    nowhere: dict[str, list[str]] = defaultdict(list)
    unindexed: dict[str, list[str]] = defaultdict(list)
    for name, indexed in weight_map.items():
        held = holders.pop(name, [])
        for file in held:
            tensors.setdefault(name, refs[file][name])
            if file != indexed:
                elsewhere[indexed, file].append(name)
        if not held and indexed in refs:
            nowhere[indexed].append(name)
    for name, held in holders.items():
        tensors[name] = refs[held[0]][name]
        for file in held:
            unindexed[file].append(name)
    fix = "download the index and the shards again, from one revision"
    for (indexed, file), names in elsewhere.items():
        message = f"{some_names(names)}: the index names {indexed}, but {file} holds it"
        problems.append(Problem("wrong-shard", message, INDEX, fix))
    for indexed, names in nowhere.items():
        message = f"{some_names(names)}: the index names {indexed}, which does not hold it, nor does any other shard"
        problems.append(Problem("tensor-not-in-shard", message, INDEX, fix))
    for file, names in unindexed.items():
        message = f"{some_names(names)}: held by {file}, but not in the index"
        problems.append(Problem("unindexed-tensor", message, INDEX, fix))
    return tensors
