"""Reading a checkpoint: strict headers, an index that must agree with the shards, exact rows."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_convert.checkpoint import Checkpoint
from ninfer_convert.safetensors_header import read_header
from ninfer_format import SourceError
from tests.convert.tiny import TinyCheckpoint, tiny_checkpoint, write_safetensors


def header_file(path: Path, header: object, data: int = 0, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * data)
    return path


def tensor(begin: int, end: int, shape: list[int], dtype: str = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_good_header_gives_tensors_in_file_order(tmp_path: Path) -> None:
    header = {"b": tensor(4, 16, [2, 3]), "__metadata__": {"format": "pt"}, "a": tensor(0, 4, [2])}
    found, problem = read_header(header_file(tmp_path / "x", header, 16), "x")
    assert problem is None
    assert found is not None
    assert list(found.tensors) == ["a", "b"]
    assert found.tensors["b"].shape == (2, 3)


BAD_HEADERS = {
    "overlap": ({"a": tensor(0, 8, [4]), "b": tensor(4, 12, [4])}, 12, "overlaps"),
    "same range": ({"a": tensor(0, 8, [4]), "b": tensor(0, 8, [4])}, 8, "overlaps"),
    "hole": ({"a": tensor(0, 8, [4]), "b": tensor(16, 24, [4])}, 24, "hole"),
    "hole at the start": ({"a": tensor(8, 16, [4])}, 16, "hole"),
    "size is not shape × dtype": ({"a": tensor(0, 8, [5])}, 8, "span 8 bytes"),
    "end before begin": ({"a": tensor(8, 0, [4])}, 8, "data_offsets"),
    "negative size": ({"a": tensor(0, 8, [-4])}, 8, "shape"),
    "true as a size": ({"a": {**tensor(0, 2, [1]), "shape": [True]}}, 2, "shape"),
    "rank 17": ({"a": tensor(0, 2, [1] * 17)}, 2, "shape"),
    "product beyond 2^63": ({"a": tensor(0, 8, [1 << 40, 1 << 40])}, 8, "span 8 bytes"),
    "unknown dtype": ({"a": tensor(0, 8, [4], "BF17")}, 8, "BF17"),
    "extra member": ({"a": {**tensor(0, 8, [4]), "x": 1}}, 8, "exactly"),
    "duplicate name": (b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{}}', 1, "twice"),
    "a real number": (b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', 1, "not an integer"),
    "NaN": (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', 1, "not an integer"),
    "a list": ([], 0, "not a JSON object"),
    "no JSON": (b'{"a":', 0, "not JSON"),
    "not UTF-8": (b'{"\xff":1}', 0, "not JSON"),
    "deep nesting": (b'{"a":' + b"[" * 200_000, 0, "not JSON"),
    "metadata not text": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_header_is_refused(tmp_path: Path, case: str) -> None:
    header, data, expected = BAD_HEADERS[case]
    found, problem = read_header(header_file(tmp_path / "x", header, data), "x")
    assert found is None
    assert problem is not None
    assert problem.code == "bad-header"
    assert expected in problem.message


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 3])
def test_impossible_header_length_is_refused_before_reading(tmp_path: Path, length: int) -> None:
    path = header_file(tmp_path / "x", {}, length=length)
    found, problem = read_header(path, "x")
    assert found is None
    assert problem is not None
    assert problem.code in ("bad-header", "truncated-file")


@pytest.mark.parametrize(("change", "code"), [(-1, "truncated-file"), (1, "trailing-bytes")])
def test_file_size_must_be_what_the_header_describes(tmp_path: Path, change: int, code: str) -> None:
    found, problem = read_header(header_file(tmp_path / "x", {"a": tensor(0, 8, [4])}, 8 + change), "x")
    assert found is not None
    assert problem is not None
    assert problem.code == code


@pytest.mark.parametrize("length", [0x3C, 0x7B22, 0x0280, 0x50])
def test_header_length_that_looks_like_another_kind_of_file_is_read(tmp_path: Path, length: int) -> None:
    text = json.dumps({"a": tensor(0, 8, [4])}).encode()
    text += b" " * (max(length, len(text)) - len(text))
    found, problem = read_header(header_file(tmp_path / "x", text, 8), "x")
    assert (problem, found is not None) == (None, True)


def test_mutated_headers_never_raise(tmp_path: Path, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    whole = header_file(tmp_path / "x", {f"t{i}": tensor(8 * i, 8 * i + 8, [2, 2]) for i in range(6)}, 48).read_bytes()
    for _ in range(500):
        damaged = bytearray(whole[: rng.integers(0, len(whole) + 1)] if rng.random() < 0.2 else whole)
        for _ in range(rng.integers(0, 4)):
            if damaged:
                damaged[rng.integers(0, len(damaged))] = rng.integers(0, 256)
        (tmp_path / "y").write_bytes(damaged)
        header, problem = read_header(tmp_path / "y", "y")
        assert header is not None or problem is not None
        if problem is None and header is not None:
            assert all(t.end <= 48 for t in header.tensors.values())


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    found, problem = read_header(tmp_path / "x", "x")
    assert found is None
    assert problem is not None
    assert problem.code == "not-a-file"


def test_rows_of_every_shape_are_read_exactly(dense: TinyCheckpoint) -> None:
    with Checkpoint.open(dense.folder) as checkpoint:
        assert checkpoint.problems == ()
        for name, words in dense.tensors.items():
            rows = words.reshape(-1, words.shape[-1])
            np.testing.assert_array_equal(checkpoint.read_words(name), rows)
            middle = len(rows) // 2
            np.testing.assert_array_equal(checkpoint.read_words(name, middle, 1), rows[middle : middle + 1])


def test_rows_may_have_another_width_than_the_last_dimension(dense: TinyCheckpoint) -> None:
    name = "model.visual.patch_embed.proj.weight"
    kernels = dense.tensors[name].reshape(48, -1)
    with Checkpoint.open(dense.folder) as checkpoint:
        out = np.empty((2, kernels.shape[1]), np.uint16)
        assert checkpoint.read_words(name, 7, 2, out, row_width=kernels.shape[1]) is not None
        np.testing.assert_array_equal(out, kernels[7:9])
        with pytest.raises(ValueError, match="do not lie in"):
            checkpoint.read_words(name, 47, 2, row_width=kernels.shape[1])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_floats_are_rounded_to_nearest_even(tmp_path: Path, dtype: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    bits = rng.integers(0, 1 << 16, (300, 41), np.uint16)
    values = bits.view(np.float16).astype(dtype) if dtype == "float16" else _singles(bits, rng)
    checkpoint = tiny_checkpoint(tmp_path / "c")
    checkpoint.tensors["model.language_model.norm.weight"] = values
    with Checkpoint.open(checkpoint.save().folder) as opened:
        words = opened.read_words("model.language_model.norm.weight", 100, 200)
    with np.errstate(invalid="ignore"):
        expected = values[100:].astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    is_nan = np.isnan(values[100:])
    np.testing.assert_array_equal(words[~is_nan], expected[~is_nan])
    assert ((words[is_nan] & 0x7FFF) > 0x7F80).all()


def _singles(high: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.float32]:
    """float32 values with random low halves; none rounds from finite to infinite."""
    low = rng.integers(0, 1 << 16, high.shape, np.uint32)
    words = (high.astype(np.uint32) << 16) | low
    words[((words >> 16) & 0x7FFF) == 0x7F7F] = 0
    singles: NDArray[np.float32] = words.view(np.float32)
    return singles


@pytest.mark.parametrize("position", [0, 1234567, 1500000])
def test_float32_beyond_bf16_is_refused_with_its_index(tmp_path: Path, position: int) -> None:
    values = np.zeros((1500, 1001), np.float32)
    values.flat[position] = -3.4e38
    write_safetensors(tmp_path / "model.safetensors", {"w": values})
    (tmp_path / "config.json").write_text("{}")
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        pytest.raises(SourceError, match=rf"'w'.*element {position} is -3.4e\+38"),
    ):
        checkpoint.read_words("w")


def test_nan_and_infinity_pass_the_reader_as_non_finite_words(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": np.array([[np.nan, np.inf, -np.inf, 1]], np.float32)})
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as checkpoint:
        words = checkpoint.read_words("w")[0]
    assert list(words[1:]) == [0x7F80, 0xFF80, 0x3F80]
    assert words[0] & 0x7FFF > 0x7F80


@pytest.mark.parametrize("change", ["size", "mtime"])
def test_shard_changed_after_planning_is_refused(dense: TinyCheckpoint, change: str) -> None:
    checkpoint = Checkpoint.open(dense.folder)
    shard = dense.folder / dense.shards()[0]
    if change == "size":
        shard.write_bytes(shard.read_bytes() + b"\0")
    else:
        os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    name = next(n for n, f in dense.weight_map.items() if f == shard.name)
    with pytest.raises(SourceError, match="has changed since the plan was made"):
        checkpoint.read_words(name)


def test_a_single_file_needs_no_index(tmp_path: Path, dense: TinyCheckpoint) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", dense.tensors)
    (folder / "config.json").write_text(json.dumps(dense.config))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.problems == ()
    assert checkpoint.tensors.keys() == dense.tensors.keys()


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/hostname", "a/../../b.safetensors", "", "..\\x"])
def test_index_that_names_files_outside_the_folder_is_refused(dense: TinyCheckpoint, file: str) -> None:
    dense.weight_map["lm_head.weight"] = file
    dense.save_index()
    assert [p.code for p in Checkpoint.open(dense.folder).problems] == ["escaping-shard"]


@pytest.mark.parametrize(
    ("text", "code"),
    [(b"", "empty-file"), (b"{", "bad-json"), (b"[]", "bad-json"), (b'{"weight_map": {}}', "bad-index"),
     (b'{"weight_map": {"a": 1}}', "bad-index"), (b"version https://git-lfs.github.com/spec/v1\n", "lfs-pointer")],
)  # fmt: skip
def test_unusable_index_is_one_problem(dense: TinyCheckpoint, text: bytes, code: str) -> None:
    (dense.folder / "model.safetensors.index.json").write_bytes(text)
    assert [p.code for p in Checkpoint.open(dense.folder).problems] == [code]


def test_every_problem_is_collected(dense: TinyCheckpoint) -> None:
    first, second, third = dense.shards()
    (dense.folder / first).write_bytes(b"")
    (dense.folder / second).write_bytes(b"<!DOCTYPE html><title>Not found</title>")
    (dense.folder / third).unlink()
    (dense.folder / "config.json").write_text("{")
    checkpoint = Checkpoint.open(dense.folder)
    assert [p.code for p in checkpoint.problems] == ["bad-json", "empty-file", "not-safetensors"]
    assert list(checkpoint.absent) == [third]
    assert checkpoint.unavailable == dense.tensors.keys()


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    problems = Checkpoint.open(tmp_path).problems
    assert [p.code for p in problems] == ["missing-file", "no-weights"]
    assert "pytorch_model.bin" in problems[1].message
