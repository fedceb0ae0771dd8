"""Rows read with ``pread`` equal the rows of the mapped artifact, whatever the format and wherever a range begins."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ninfer_convert.stored_rows import StoredRows, matrix_shape
from ninfer_format import Artifact, ArtifactWriter, Directory, Identity, StorageError, TensorEntry, pack_tensor
from ninfer_format.formats import NUMERIC_FORMATS, layout_for
from ninfer_format.geometry import up
from ninfer_format.numeric.direct import round_bf16

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "BF16": [(7, 33), (5,), ()], "FP32": [(3, 40), (6,)], "I32": [(9,)], "Q4G64_F16S": [(37, 200)],
    "Q5G64_F16S": [(19, 129)], "Q6G64_F16S": [(8, 64)], "W8G32_F16S": [(21, 4304)], "NVFP4": [(384, 192)],
}  # fmt: skip


def payload_of(format: str, shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    """Random legal words, all of them numbers."""
    fmt, layout = NUMERIC_FORMATS[format], layout_for(format)
    if fmt.kind == "direct":
        words = rng.integers(0, 0x7F80, shape).astype({2: np.uint16, 4: np.int32}[fmt.word_bytes])
        return pack_tensor(np.asarray(words), None, None, format, layout)
    n, k = shape
    if fmt.kind == "nvfp4":
        codes = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
        scales = rng.integers(0, 0x7F, (n, k // 16)).astype(np.uint8)
        return pack_tensor(codes, scales, np.float32(rng.uniform(1, 9)), format, layout)
    codes = rng.integers(fmt.qmin, fmt.qmax + 1, (n, k)).astype(np.int8)
    scales = rng.integers(1, 0x7C00, (n, -(-k // fmt.group))).astype(np.uint16)
    return pack_tensor(codes, scales, None, format, layout)


@pytest.fixture
def artifact(tmp_path: Path, fresh_seed: int) -> Path:
    """A container with a tensor of every format and shape of ``SHAPES``."""
    rng, payloads, entries, end = np.random.default_rng(fresh_seed), {}, [], 0
    for format, shapes in SHAPES.items():
        for number, shape in enumerate(shapes):
            name, payload = f"{format} {number}", payload_of(format, shape, rng)
            offset = up(end, 256)
            entries.append(TensorEntry(name, shape, format, layout_for(format), offset, len(payload)))
            payloads[name], end = payload, offset + len(payload)
    path = tmp_path / "x.ninfer"
    with ArtifactWriter(path, Directory(Identity("m", "w"), tuple(entries))) as writer:
        for name, payload in payloads.items():
            writer.write(name, payload)
        writer.commit()
    return path


def test_every_range_of_rows_is_what_the_whole_tensor_has(artifact: Path, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    with Artifact.open(artifact) as opened, StoredRows(opened) as stored:
        for entry in opened.objects:
            assert isinstance(entry, TensorEntry)
            n_rows, k = matrix_shape(entry)
            whole = opened.tensor(entry.name).reshape(n_rows, k)
            ranges = [(0, n_rows), (0, 1), (n_rows - 1, n_rows)]
            ranges += [tuple(sorted(rng.choice(n_rows + 1, 2, replace=False).tolist())) for _ in range(12)]
            for begin, end in ranges:
                values = stored.values(entry, begin, end)
                assert values.dtype == whole.dtype
                assert np.array_equal(values, whole[begin:end])
                if entry.format != "I32":
                    assert np.array_equal(stored.bf16_words(entry, begin, end), round_bf16(whole[begin:end]))


def test_file_that_changed_or_shrank_is_an_error_and_no_signal(artifact: Path) -> None:
    with Artifact.open(artifact) as opened:
        entry = opened.objects["NVFP4 0"]
        assert isinstance(entry, TensorEntry)
        with StoredRows(opened) as stored:
            os.truncate(artifact, opened.payload_offset + entry.offset + 10)
            with pytest.raises(StorageError, match="became shorter"):
                stored.values(entry, 0, 384)
        with pytest.raises(StorageError, match="has changed since it was opened"):
            StoredRows(opened)
