"""A checkpoint as its model sees it: plain tensors by name, however each of them is stored.

An adapter turns the stored tensors of one matrix (codes, scales) into one ``LogicalTensor``; everything after that,
families, plan, row reader, knows logical tensors only. ``specs/conversion.md``, Sources.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.checkpoint import Checkpoint, Shard, TensorRef
from ninfer_convert.problems import Problem
from ninfer_convert.sources.bf16 import DIRECT_DTYPES, to_bf16_words
from ninfer_format import SourceError
from ninfer_format.numeric.direct import widen_bf16

if TYPE_CHECKING:
    from ninfer_convert.sources.nvfp4 import PackedNvfp4

Words = NDArray[np.uint16]
Floats = NDArray[np.float32]

PLAIN = "plain"
"""Kind of a tensor that is stored as BF16, F16 or F32."""
_TILE_ELEMENTS = 1 << 18


class TensorReader(Protocol):
    """Values of one logical tensor, by position in C order; safe from several threads.

    Ranges are whole rows of the last dimension, except for plain tensors, where any range goes.
    """

    def read_words(self, first: int, out: Words) -> None:
        """Fill flat ``out`` with BF16 words of the elements from ``first``, rounded to nearest even if need be."""

    def read_floats(self, first: int, out: Floats) -> None:
        """Fill flat ``out`` with float32 values of the elements from ``first``."""


class StoredFiles(Protocol):
    """What is asked of the files behind a logical checkpoint; ``Checkpoint`` describes the members."""

    folder: Path
    config: dict[str, Any] | None
    shards: tuple[Shard, ...]
    absent: Mapping[str, tuple[str, ...]]
    unavailable: frozenset[str]
    ignored: tuple[str, ...]

    @property
    def has_weights(self) -> bool: ...

    @property
    def source_bytes(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor of the model."""

    name: str
    """As a plain checkpoint names it."""
    shape: tuple[int, ...]
    dtype: str
    """Of the stored values, as the file calls it."""
    kind: str
    """``PLAIN``, or what the adapter that presents it calls itself, with the details a person wants to know."""
    stored: tuple[str, ...]
    """Names of the stored tensors that it accounts for; its values lie in the first."""
    file: str
    """File of the first stored tensor, and where that begins in it."""
    file_offset: int
    reader: TensorReader
    packed: "PackedNvfp4 | None" = None
    """The stored words of an NVFP4 matrix, for objects that take them as they are."""

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def as_floats(self) -> bool:
        """Whether an encoder is given float32 values: what is dequantized makes no detour through BF16."""
        return self.kind != PLAIN


class FloatReader(ABC):
    """A reader that makes float32 rows; words are those values rounded, a tile at a time."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name = name
        self.width = shape[-1]

    @abstractmethod
    def read_rows(self, begin: int, out: Floats) -> None:
        """Fill ``out`` [n, width] with the rows from ``begin``, leading dimensions flattened."""

    def read_floats(self, first: int, out: Floats) -> None:
        """See ``TensorReader``; ValueError for a range that is not whole rows."""
        if first % self.width or out.size % self.width:
            raise ValueError(f"{out.size} elements from {first} are not whole rows of {self.width} of {self.name!r}")
        self.read_rows(first // self.width, out.reshape(-1, self.width))

    def read_words(self, first: int, out: Words) -> None:
        """See ``TensorReader``; SourceError for a finite value beyond BF16."""
        step = max(1, _TILE_ELEMENTS // self.width) * self.width
        for begin in range(0, out.size, step):
            part = out[begin : begin + step]
            values = np.empty(part.size, np.float32)
            self.read_floats(first + begin, values)
            part[:] = to_bf16_words(values, where=f"tensor {self.name!r}", first_index=first + begin)


class PlainReader:
    """BF16, F16 or F32 values as they are stored in a safetensors file."""

    def __init__(self, files: Checkpoint, name: str) -> None:
        self._files = files
        self._name = name

    def read_words(self, first: int, out: Words) -> None:
        """See ``TensorReader``; F16 and F32 are rounded, SourceError for a finite value beyond BF16."""
        self._files.read_words(self._name, first, out.size, out, row_width=1)

    def read_floats(self, first: int, out: Floats) -> None:
        """See ``TensorReader``; every value is exact."""
        dtype = DIRECT_DTYPES[self._files.tensors[self._name].dtype]
        for begin in range(0, out.size, _TILE_ELEMENTS):
            part = out[begin : begin + _TILE_ELEMENTS]
            stored = np.empty(part.size, dtype)
            self._files.read_into(self._name, (first + begin) * dtype.itemsize, stored.view(np.uint8).data)
            if dtype == DIRECT_DTYPES["BF16"]:
                widen_bf16(stored, part)
            else:
                with np.errstate(invalid="ignore"):  # a signalling NaN is refused by the encoder
                    part[:] = stored


def plain_tensor(files: Checkpoint, ref: TensorRef, *, stored: Sequence[str] = ()) -> LogicalTensor:
    """The logical tensor of a stored one that needs no adapter; it also accounts for the tensors in ``stored``."""
    names = (ref.name, *stored)
    return LogicalTensor(
        ref.name, ref.shape, ref.dtype, PLAIN, names, ref.file, ref.file_offset, PlainReader(files, ref.name)
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """Stored tensors that make no logical tensor: the one called ``name`` would need them."""

    name: str
    code: str
    message: str
    advice: str


class LogicalCheckpoint:
    """The logical tensors of a checkpoint folder or file, and what is known about the files behind them."""

    def __init__(
        self,
        files: StoredFiles,
        tensors: Mapping[str, LogicalTensor],
        *,
        faults: Sequence[Fault] = (),
        unavailable: frozenset[str] = frozenset(),
        problems: Sequence[Problem] = (),
        notes: Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.files = files
        self.tensors = tensors
        self.faults = tuple(faults)
        """Matters only where the tensor is converted."""
        self.unavailable = unavailable
        """Logical tensors that cannot be read because stored ones are missing; a problem accounts for each."""
        self.problems = tuple(problems)
        """Everything that is wrong with the files themselves."""
        self.notes = tuple(notes)
        """What a report should say about how the tensors are stored."""
        self.facts = facts
        """Members of ``source_facts.source_facts``, where files say them and not their folder."""

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return self.files.folder

    @property
    def config(self) -> dict[str, Any] | None:
        """``config.json``, or None when it could not be read."""
        return self.files.config

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The files as they were when the plan was made."""
        return self.files.shards

    @property
    def absent(self) -> Mapping[str, tuple[str, ...]]:
        """Files that the index names and the folder lacks, with the stored tensors they should hold."""
        return self.files.absent

    @property
    def ignored(self) -> tuple[str, ...]:
        """Weight files in the folder that do not belong to the checkpoint."""
        return self.files.ignored

    @property
    def has_weights(self) -> bool:
        """Whether it is known which tensors there should be."""
        return self.files.has_weights

    @property
    def source_bytes(self) -> int:
        """Bytes of all files."""
        return self.files.source_bytes

    def read_words(
        self,
        name: str,
        row_begin: int = 0,
        n_rows: int | None = None,
        out: Words | None = None,
        *,
        row_width: int | None = None,
    ) -> Words:
        """BF16 words [n_rows, row_width] of tensor ``name`` seen as C-order rows of ``row_width`` elements.

        ``row_width`` defaults to the last dimension (1 for a scalar), ``n_rows`` to the rest. ``out``, if given, is a
        C-contiguous array of that many words. SourceError and OSError pass through.
        """
        first, shape = self._span(name, row_begin, n_rows, row_width)
        words = np.empty(shape, np.uint16) if out is None else out.reshape(shape)
        self.tensors[name].reader.read_words(first, words.reshape(-1))
        return words

    def read_floats(
        self,
        name: str,
        row_begin: int = 0,
        n_rows: int | None = None,
        out: Floats | None = None,
        *,
        row_width: int | None = None,
    ) -> Floats:
        """The same as float32 values, exact for plain tensors."""
        first, shape = self._span(name, row_begin, n_rows, row_width)
        values = np.empty(shape, np.float32) if out is None else out.reshape(shape)
        self.tensors[name].reader.read_floats(first, values.reshape(-1))
        return values

    def read_rows(self, name: str, row_begin: int, out: Words | Floats) -> None:
        """Fill ``out`` [n, row_width] with rows of tensor ``name``: words if it is uint16, values if it is float32."""
        read: Any = self.read_words if out.dtype == np.uint16 else self.read_floats
        read(name, row_begin, len(out), out, row_width=out.shape[1])

    def _span(
        self, name: str, row_begin: int, n_rows: int | None, row_width: int | None
    ) -> tuple[int, tuple[int, int]]:
        tensor = self.tensors[name]
        width = row_width or (tensor.shape[-1] if tensor.shape else 1)
        total = tensor.n_elements // width
        count = total - row_begin if n_rows is None else n_rows
        if tensor.kind == PLAIN and tensor.dtype not in DIRECT_DTYPES:
            raise SourceError(f"tensor {name!r} is {tensor.dtype}; only {', '.join(DIRECT_DTYPES)} hold plain weights")
        if tensor.n_elements % width or row_begin < 0 or count < 0 or row_begin + count > total:
            raise ValueError(f"{count} rows of {width} from {row_begin} do not lie in {name!r} {list(tensor.shape)}")
        return row_begin * width, (count, width)

    def close(self) -> None:
        """Close the files; reading again reopens them."""
        self.files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
