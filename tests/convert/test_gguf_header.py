"""GGUF headers: read as the ``gguf`` package reads them, and one refusal per lie."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ninfer_convert.sources.gguf import open_gguf
from ninfer_convert.sources.gguf_header import DEFAULT_ALIGNMENT, model_name, read_gguf_header
from tests.convert.gguf_files import of_checkpoint
from tests.convert.tiny import TinyCheckpoint

TOKENS = "tokenizer.ggml.tokens"


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCHITECTURE = field("general.architecture", 8, text("qwen35"))
ONE = tensor("a", [4, 2])


def head(
    fields: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A header, and 64 bytes of data behind its padding."""
    fields, tensors = [ARCHITECTURE] if fields is None else fields, [ONE] if tensors is None else tensors
    n_tensors, n_fields = counts or (len(tensors), len(fields))
    start = magic + struct.pack("<IQQ", version, n_tensors, n_fields) + b"".join([*fields, *tensors])
    return start + bytes(-len(start) % DEFAULT_ALIGNMENT) + bytes(64)


def problems_of(path: Path, content: bytes) -> list[Any]:
    path.write_bytes(content)
    return list(open_gguf(path).checkpoint.problems)


def test_header_agrees_with_the_package(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    of_checkpoint(path, tiny, choose=lambda name, shape: "BF16" if len(shape) > 1 else "F32")
    header, problem = read_gguf_header(path, (TOKENS,))
    assert problem is None
    assert header is not None
    theirs = gguf.GGUFReader(path)
    for key, value in header.fields.items():
        expected = theirs.fields[key].contents()
        assert value == (None if key == "tokenizer.ggml.merges" else expected), key
    names = {name for name in theirs.fields if not name.startswith("GGUF.")}
    assert names == set(header.fields)
    ours = {t.name: t for t in header.tensors}
    assert list(ours) == [t.name for t in theirs.tensors]
    for info in theirs.tensors:
        assert ours[info.name].shape == tuple(reversed(info.shape.tolist()))
        assert ours[info.name].type_id == info.tensor_type.value
        assert header.data_offset + ours[info.name].offset == info.data_offset
    assert header.sha256 == hashlib.sha256(path.read_bytes()[: _end_of(theirs)]).hexdigest()


def _end_of(reader: gguf.GGUFReader) -> int:
    last = reader.tensors[-1].field
    return int(last.offset + sum(part.nbytes for part in last.parts))


def test_every_kind_of_metadata_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "x")
    expected: dict[str, Any] = {}
    for kind, value in (("uint8", 200), ("int8", -3), ("uint16", 60000), ("int16", -7), ("uint32", 1 << 31),
                        ("int32", -9), ("float32", 0.5), ("uint64", 1 << 63), ("int64", -(1 << 40)),
                        ("float64", 1e-300), ("bool", True), ("string", "grün")):  # fmt: skip
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
        expected[f"k.{kind}"] = value
    for name, values in (("ints", [1, -2, 3]), ("floats", [0.5, 2.0]), ("bools", [True, False])):
        writer.add_array(f"k.{name}", values)
        expected[f"k.{name}"] = values
    writer.add_array("k.kept", ["a", "ö"])
    writer.add_array("k.passed", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header, problem = read_gguf_header(path, ("k.kept",))
    assert problem is None
    assert header is not None
    assert header.fields == expected | {"general.architecture": "x", "k.kept": ["a", "ö"], "k.passed": None}


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"", "empty-file", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "lfs-pointer", "LFS pointer"),
        (b"<!DOCTYPE html>", "bad-gguf", "no GGUF file"),
        (b"GGU", "bad-gguf", "no GGUF file"),
        (head(magic=b"GGML"), "bad-gguf", "no GGUF file"),
        (head(version=1), "unsupported-gguf", "version 1"),
        (head(version=4), "unsupported-gguf", "version 4"),
        (head(version=3 << 24), "unsupported-gguf", "big-endian"),
        (head(counts=(1 << 63, 1)), "bad-gguf", str(1 << 63)),
        (head(counts=(1, 1 << 62)), "bad-gguf", str(1 << 62)),
        (head(counts=(2, 1)), "bad-gguf", ""),
        (head([text(b"k" * 10)[:8] + b"k"]), "bad-gguf", "the header wants"),
        (head([struct.pack("<Q", (1 << 64) - 1)]), "bad-gguf", str((1 << 64) - 1)),
        (head([field("k", 13, b"")]), "bad-gguf", "unknown type 13"),
        (head([field("k", 9, struct.pack("<IQ", 9, 1))]), "bad-gguf", "array of type 9"),
        (head([field("k", 9, struct.pack("<IQ", 4, 1 << 60))]), "bad-gguf", str(1 << 60)),
        (head([field("k", 9, struct.pack("<IQ", 4, 1 << 19))]), "bad-gguf", "the header wants"),
        (head([field("k", 9, struct.pack("<IQ", 8, 1 << 19))]), "bad-gguf", "the header wants"),
        (head([ARCHITECTURE, ARCHITECTURE]), "bad-gguf", "twice"),
        (head([field("k", 8, text(b"\xff\xfe"))]), "bad-gguf", "UTF-8"),
        *((head([ARCHITECTURE, field("general.alignment", 4, struct.pack("<I", n))]), "bad-gguf", "alignment")
          for n in (0, 3, 48, 1 << 30)),
        (head(tensors=[tensor("a", [])]), "bad-gguf", "rank 0"),
        (head(tensors=[tensor("a", [1] * 5)]), "bad-gguf", "rank 5"),
        (head(tensors=[tensor("a", [4, 0])]), "bad-gguf", "shape [0, 4]"),
        (head(tensors=[tensor("a", [1 << 40, 1 << 40])]), "bad-gguf", "shape"),
        (head(tensors=[tensor("a", [4], offset=4)]), "bad-gguf", "multiple of 32"),
        (head(tensors=[ONE, ONE]), "bad-gguf", "described twice"),
        (head(tensors=[ONE, tensor("b", [4])]), "bad-gguf", "inside 'a'"),
        (head(tensors=[tensor("a", [17])]), "truncated-file", "the file has"),
        (head(tensors=[tensor("a", [4], offset=1 << 40)]), "truncated-file", "the file has"),
        (head(tensors=[tensor("a", [33], kind=8)]), "bad-gguf", "no whole number of blocks"),
    ],
)  # fmt: skip
def test_lies_are_refused_in_one_line(tmp_path: Path, content: bytes, code: str, says: str) -> None:
    problems = problems_of(tmp_path / "m.gguf", content)
    assert [problem.code for problem in problems] == [code]
    assert says in problems[0].message
    assert "m.gguf" in problems[0].where


def test_a_neighbour_of_those_passes_the_header(tmp_path: Path) -> None:
    problems = problems_of(tmp_path / "m.gguf", head(tensors=[ONE, tensor("b", [8], offset=32)]))
    assert {problem.code for problem in problems} == {"bad-config"}


def test_truncated_anywhere_is_refused(dense: TinyCheckpoint, tmp_path: Path, fresh_seed: int) -> None:
    path = tmp_path / "m.gguf"
    of_checkpoint(path, dense)
    content = path.read_bytes()
    cuts = np.random.default_rng(fresh_seed).integers(0, len(content), 40)
    for cut in (0, 3, 4, 8, 24, len(content) - 1, *cuts.tolist()):
        assert problems_of(path, content[:cut]), cut


def test_damaged_headers_never_raise(dense: TinyCheckpoint, tmp_path: Path, fresh_seed: int) -> None:
    path, rng = tmp_path / "m.gguf", np.random.default_rng(fresh_seed)
    of_checkpoint(path, dense)
    content = path.read_bytes()
    header, _ = read_gguf_header(path, ())
    assert header is not None
    for _ in range(150):
        damaged = bytearray(content)
        for at in rng.integers(0, header.data_offset, 3):
            damaged[at] = int(rng.integers(0, 256))
        problems_of(path, bytes(damaged))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Qwen3.5-27B-Q4_K_M.gguf", "Qwen3.5-27B-Q4_K_M"),
        ("m-00002-of-00003.gguf", "m"),
        ("M.GGUF", "M"),
        (".gguf", ".gguf"),
    ],
)
def test_model_name_is_the_file_name(file: str, name: str) -> None:
    assert model_name(file) == name
