"""Hashing keeps up with plain hashlib on one core, and an index makes two cores count. Medians of interleaved pairs."""

from __future__ import annotations

import hashlib
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ninfer_format import verify
from ninfer_format.digests import build_index, index_path, write_index
from ninfer_format.directory import Directory, Identity
from ninfer_format.hashing import available_cores
from ninfer_format.reader import Artifact
from ninfer_format.writer import ArtifactWriter
from tests.format.samples import packed, tensor

ROUNDS = 5
PIECE = 32 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid file of 2 GiB of random bytes, in the page cache."""
    directory = Directory(Identity("large", "test"), packed([tensor("t", (32, PIECE), "BF16", 0)]))
    path = tmp_path_factory.mktemp("large") / "large.ninfer"
    with ArtifactWriter(path, directory) as writer:
        for i in range(64):
            writer.write_at("t", i * PIECE, os.urandom(PIECE))
        writer.commit()
    write_index(build_index(path), index_path(path))
    return path


def mapped_hashlib(path: Path) -> str:
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        return hashlib.sha256(mapped).hexdigest()


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_full_check_keeps_up_with_hashlib_and_an_index_doubles_it(large: Path) -> None:
    assert verify(large, "full").sha256 == mapped_hashlib(large)
    one_core, indexed = [], []
    for _ in range(ROUNDS):
        plain = seconds(lambda: mapped_hashlib(large))
        one_core.append(plain / seconds(lambda: verify(large, "full")))
        plain = seconds(lambda: mapped_hashlib(large))
        indexed.append(plain / seconds(lambda: verify(large, "full", index=index_path(large), jobs=2)))
    with Artifact.open(large) as artifact:
        speed = artifact.file_bytes / plain / 1e6
    one, two = statistics.median(one_core), statistics.median(indexed)
    print(f"hashlib {speed:.0f} MB/s; check --full {one:.2f}×; with an index and 2 threads {two:.2f}×")
    assert one >= 0.9
    if available_cores() >= 2:
        assert two >= 1.7
