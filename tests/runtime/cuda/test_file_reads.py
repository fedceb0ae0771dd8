"""Reads that run beside each other: the right bytes, errors that name the byte, nothing left running."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ninfer_format.errors import StorageError, UsageError
from ninfer_runtime.backends.cuda.file_reads import FileReads, Run

FILE_BYTES = 3_000_001


@pytest.fixture
def content(tmp_path: Path, fresh_seed: int) -> np.ndarray:
    drawn = np.random.default_rng(fresh_seed).integers(0, 256, FILE_BYTES, np.uint8)
    (tmp_path / "file").write_bytes(drawn.tobytes())
    return drawn


@pytest.mark.parametrize("n_parallel", [1, 3, 16])
def test_many_runs_under_many_tickets_arrive(
    tmp_path: Path, content: np.ndarray, n_parallel: int, fresh_seed: int
) -> None:
    rng = np.random.default_rng(fresh_seed)
    out = np.zeros(FILE_BYTES, np.uint8)
    cuts = [0, *sorted(rng.integers(0, FILE_BYTES, 60).tolist()), FILE_BYTES]
    runs = [Run(a, b - a, out.ctypes.data + a) for a, b in pairwise(cuts)]
    rng.shuffle(runs)
    with FileReads(tmp_path / "file", n_parallel) as reads:
        for ticket in range(8):
            reads.start(ticket, runs[ticket::8])
        for ticket in rng.permutation(8):
            reads.wait(int(ticket))
    assert np.array_equal(out, content)


@pytest.mark.parametrize("n_bytes", [1, 1000, 65_535, 65_536, 65_537, 1_000_000])
def test_run_beyond_the_end_names_the_end(tmp_path: Path, content: np.ndarray, n_bytes: int) -> None:
    out = np.zeros(n_bytes, np.uint8)

    def read(reads: FileReads) -> None:
        reads.start(0, [Run(FILE_BYTES - n_bytes + 1, n_bytes, out.ctypes.data)])
        reads.wait(0)

    shorter = f"the file ends at byte {FILE_BYTES}: it became shorter"
    with FileReads(tmp_path / "file", 2) as opened, pytest.raises(StorageError, match=shorter):
        read(opened)
    assert np.array_equal(out[: n_bytes - 1], content[FILE_BYTES - n_bytes + 1 :])


def test_reading_what_is_no_data_names_the_byte(tmp_path: Path, content: np.ndarray) -> None:
    out = np.zeros(100_000, np.uint8)
    with FileReads(tmp_path / "file", 1) as reads:
        reads.start(0, [Run(77, 100_000, 8)])  # an address that no process has
        with pytest.raises(StorageError, match="reading at byte 77 failed: Bad address"):
            reads.wait(0)
        reads.start(1, [Run(77, 100_000, out.ctypes.data)])
        reads.wait(1)
    assert np.array_equal(out, content[77:100_077])


def test_closing_waits_for_what_is_running(tmp_path: Path, content: np.ndarray) -> None:
    out = np.zeros(FILE_BYTES, np.uint8)
    reads = FileReads(tmp_path / "file", 4)
    quarter = FILE_BYTES // 4
    reads.start(0, [Run(i * quarter, quarter, out.ctypes.data + i * quarter) for i in range(4)])
    reads.close()
    assert np.array_equal(out[: 4 * quarter], content[: 4 * quarter])


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        FileReads(tmp_path / "absent", 2)
