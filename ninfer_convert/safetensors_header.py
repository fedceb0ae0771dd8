"""The header of a safetensors file, read strictly: 8 bytes of length, JSON, and a check against the file's size.

Only the header is ever read here. A file that is not what its name says (a Git LFS pointer, an error page, an
interrupted download) is told apart from a damaged one, because the way on differs.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ninfer_convert.problems import Problem

MAX_HEADER_BYTES = 100_000_000
"""Cap of the safetensors format itself."""
MAX_RANK = 16

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_AGAIN = "download the file again"
LFS_POINTER = b"version https://git-lfs"
_OTHER = "not-safetensors"
_IMPOSTORS: Sequence[tuple[bytes, str, str, str]] = (
    (LFS_POINTER, "lfs-pointer", "this is a Git LFS pointer, not the file itself", "fetch it with `git lfs pull`"),
    (b"<", _OTHER, "this is an HTML or XML page, not safetensors", f"{_AGAIN}; an error page was saved instead"),
    (b'{"', _OTHER, "this is a JSON text, not safetensors", f"{_AGAIN}; an error reply was saved instead"),
    (b"GGUF", _OTHER, "this is a GGUF file under a safetensors name", "name it .gguf and give it as SOURCE"),
    (b"PK\x03\x04", _OTHER, "this is a zip or PyTorch archive under a safetensors name", "save it as safetensors"),
    (b"\x80\x02", _OTHER, "this is a Python pickle under a safetensors name", "save it as safetensors"),
)


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor of a header; ``begin``/``end`` count from the end of the header, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A readable header; ``tensors`` is in file order, ``data_offset`` is where the first tensor starts in the file."""

    tensors: Mapping[str, HeaderTensor]
    data_offset: int
    sha256: str
    """Digest of the length word and the JSON."""
    file_bytes: int
    mtime_ns: int


class _BadHeaderError(Exception):
    """Internal: text of a header problem."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BadHeaderError(f"{key!r} appears twice")
            seen.add(key)
    return members


def _not_integer(text: str) -> NoReturn:
    raise _BadHeaderError(f"the number {text} is not an integer")


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _tensor(name: str, value: Any) -> HeaderTensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _BadHeaderError(f"tensor {name!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPE_BITS:
        raise _BadHeaderError(f"tensor {name!r} has unknown dtype {dtype!r}")
    if not _integers(shape) or len(shape) > MAX_RANK:
        raise _BadHeaderError(f"tensor {name!r} has a shape that is not a list of at most {MAX_RANK} sizes")
    if not _integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _BadHeaderError(f"tensor {name!r} has data_offsets {offsets!r:.60}, expected [begin, end]")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise _BadHeaderError(
            f"tensor {name!r}: {dtype} {shape} takes {bits} bits, its data_offsets span {offsets[1] - offsets[0]} bytes"
        )
    return HeaderTensor(dtype, tuple(shape), offsets[0], offsets[1])


def _parse(text: bytes) -> dict[str, HeaderTensor]:
    """Tensors in file order, contiguous from 0; _BadHeaderError otherwise."""
    try:
        root = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_float=_not_integer, parse_constant=_not_integer
        )
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _BadHeaderError(f"it is not JSON ({error})") from None
    if not isinstance(root, dict):
        raise _BadHeaderError("it is not a JSON object")
    metadata = root.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _BadHeaderError("__metadata__ is not an object of strings")
    tensors = {name: _tensor(name, value) for name, value in root.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    end, last = 0, "the start of the data"
    for name, tensor in ordered.items():
        if tensor.begin != end:
            fault = "overlaps" if tensor.begin < end else "leaves a hole after"
            raise _BadHeaderError(f"tensor {name!r} starts at {tensor.begin} and {fault} {last!r}, which ends at {end}")
        end, last = tensor.end, name
    return ordered


def _impostor(start: bytes, where: str) -> Problem | None:
    """What a file without a plausible header length is, if its first bytes tell."""
    for magic, code, message, advice in _IMPOSTORS:
        if start.lstrip().startswith(magic):
            return Problem(code, message, where, advice)
    return None


def _bad_length(n_header: int, file_bytes: int, where: str) -> Problem:
    message = f"its first 8 bytes announce a header of {n_header} bytes, the file has {file_bytes}"
    if file_bytes < 8:
        return Problem("truncated-file", f"the file has {file_bytes} bytes, too few for a header", where, _AGAIN)
    if n_header <= MAX_HEADER_BYTES:
        return Problem("truncated-file", message, where, _AGAIN)
    return Problem("bad-header", f"{message}; at most {MAX_HEADER_BYTES} are allowed", where, _AGAIN)


def read_header(path: Path, where: str) -> tuple[Header | None, Problem | None]:
    """Read the header of ``path`` (``where`` names it in messages).

    Returns the header if one can be read, and the problem if there is one. A truncated file has both: what it should
    hold is known, so that nothing else needs to be reported about it. OSError passes through.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return None, Problem("not-a-file", "this is not a regular file", where, "put the safetensors file there")
    size = status.st_size
    if size == 0:
        return None, Problem("empty-file", "the file is empty", where, _AGAIN)
    with open(path, "rb") as file:
        start = file.read(64)
        n_header = int.from_bytes(start[:8], "little")
        if size < 8 or n_header > min(size - 8, MAX_HEADER_BYTES):
            return None, _impostor(start, where) or _bad_length(n_header, size, where)
        file.seek(8)
        text = file.read(n_header)
    try:
        tensors = _parse(text)
    except _BadHeaderError as error:
        return None, Problem("bad-header", f"the safetensors header is wrong: {error}", where, _AGAIN)
    header = Header(tensors, 8 + n_header, hashlib.sha256(start[:8] + text).hexdigest(), size, status.st_mtime_ns)
    needed = header.data_offset + max((t.end for t in tensors.values()), default=0)
    if size < needed:
        message = f"the file is truncated: its header describes {needed} bytes, it has {size}"
        return header, Problem("truncated-file", message, where, _AGAIN)
    if size > needed:
        message = f"the file has {size - needed} bytes after the {needed} that its header describes"
        return header, Problem("trailing-bytes", message, where, _AGAIN)
    return header, None
