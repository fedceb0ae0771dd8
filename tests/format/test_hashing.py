"""Hashing of ranges: mapped or read, the digest is the same; what cannot be read is an error, never a signal."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest

from ninfer_format import hashing
from ninfer_format.errors import StorageError, UsageError
from ninfer_format.hashing import hash_range, parallel, pieces, sha256_file

MIB = 1 << 20


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hashing") / "sample"
    path.write_bytes(random.Random(5).randbytes(3 * MIB + 77) + bytes(34 * MIB))
    return path


def ranges(size: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    drawn = [tuple(sorted((rng.randrange(size), rng.randrange(size)))) for _ in range(6)]
    edges = [0, 1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 4097, 32 * MIB - 1, 32 * MIB, 32 * MIB + 1, size]
    return [(a, b) for a, b in drawn] + [(a, b) for a in edges[::3] for b in edges if a <= b]


@pytest.mark.parametrize("mappable", [True, False])
def test_digest_of_any_range_is_the_one_of_its_bytes(
    mappable: bool, sample: Path, fresh_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mappable:
        monkeypatch.setattr(hashing, "_POPULATE_READ", 9_999)
    content = sample.read_bytes()
    with open(sample, "rb") as stream:
        for begin, end in ranges(len(content), fresh_seed):
            counted: list[int] = []
            digest = hash_range(stream.fileno(), begin, end, head=b"head", advance=counted.append)
            assert digest == hashlib.sha256(b"head" + content[begin:end]).digest(), (begin, end)
            assert sum(counted) == end - begin
    assert sha256_file(sample) == hashlib.sha256(content).hexdigest()


def test_large_ranges_are_mapped_and_unmapped_slice_by_slice(sample: Path) -> None:
    with open(sample, "rb") as stream:
        sizes = [len(piece) for piece in pieces(stream.fileno(), 3, 37 * MIB)]
        assert sizes == [32 * MIB - 3, 5 * MIB]
        assert [len(piece) for piece in pieces(stream.fileno(), 3, 1000)] == [997]
        with open("/proc/self/maps") as maps:
            assert str(sample) not in maps.read()


def test_file_that_shrinks_under_its_map_is_an_error_not_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(8 * MIB))

    def shrinking_map(*arguments: Any, **options: Any) -> mmap.mmap:
        mapped = real(*arguments, **options)
        os.truncate(path, 100_000)
        return mapped

    real = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", shrinking_map)
    with pytest.raises(StorageError, match="shorter"):
        sha256_file(path)


@pytest.mark.parametrize("size", [10, 5 * MIB])
def test_range_beyond_the_end_is_an_error(size: int, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(size))
    with open(path, "rb") as stream, pytest.raises(StorageError, match="shorter"):
        hash_range(stream.fileno(), 0, size + 1)


def test_empty_file_and_missing_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert sha256_file(tmp_path / "empty") == hashlib.sha256(b"").hexdigest()
    with pytest.raises(UsageError, match="no such file"):
        sha256_file(tmp_path / "absent")


def test_parallel_keeps_order_bounds_what_runs_ahead_and_passes_errors() -> None:
    started: list[int] = []

    def work(i: int) -> int:
        started.append(i)
        if i == 50:
            raise ValueError("fifty")
        return i * i

    results = parallel(work, range(1000), 2)
    assert [next(results) for _ in range(50)] == [i * i for i in range(50)]
    with pytest.raises(ValueError, match="fifty"):
        next(results)
    assert max(started) < 100
