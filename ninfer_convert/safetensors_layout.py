"""Safetensors files before they are written: headers, offsets, shards by size, and the index."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_convert.safetensors_header import DTYPE_BITS

_METADATA = {"format": "pt"}  # what transformers looks for
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written: safetensors dtype (``BF16`` or ``F32``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One safetensors file: its header, and where in the file each tensor's data starts."""

    name: str
    tensors: tuple[PlannedTensor, ...]
    header: bytes
    offsets: Mapping[str, int]
    file_bytes: int


def plan_files(tensors: Sequence[PlannedTensor], shard_bytes: int) -> tuple[PlannedFile, ...]:
    """Files of at most ``shard_bytes`` of data each, in the order given; a larger tensor gets one of its own.

    One file is ``model.safetensors``, several are ``model-0000i-of-0000n.safetensors``.
    """
    groups: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.n_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.n_bytes
    if len(groups) == 1:
        return (_file("model.safetensors", groups[0]),)
    return tuple(
        _file(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group) for number, group in enumerate(groups, 1)
    )


def _file(name: str, tensors: Sequence[PlannedTensor]) -> PlannedFile:
    # Wider elements first: then every tensor starts at a multiple of its element size, which readers rely on.
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    document: dict[str, Any] = {"__metadata__": _METADATA}
    begins, end = {}, 0
    for tensor in ordered:
        begins[tensor.name], begin = end, end
        end += tensor.n_bytes
        document[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = {tensor: len(header) + begin for tensor, begin in begins.items()}
    return PlannedFile(name, tuple(ordered), header, offsets, len(header) + end)


def index_of(files: Sequence[PlannedFile]) -> dict[str, Any]:
    """``model.safetensors.index.json`` of several files."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.n_bytes for file in files for tensor in file.tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
