"""Every byte arrives where it was sent, whatever the sizes; staging memory and buffers are never reused too early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ninfer_format.errors import StorageError
from ninfer_runtime.backends.cuda.device import DeviceMemoryError, Stream
from ninfer_runtime.backends.cuda.loader import Piece, Upload, load
from tests.emulator.device import EmulatedDevice

FILE_BYTES = 300_000


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def device(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    with EmulatedDevice(total_bytes=8 << 20, lazy=request.param) as opened:
        yield opened


@pytest.fixture
def content(tmp_path: Path, fresh_seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    drawn = np.random.default_rng(fresh_seed).integers(0, 256, FILE_BYTES, np.uint8)
    (tmp_path / "file").write_bytes(drawn.tobytes())
    return drawn


def downloaded(device: EmulatedDevice, pointer: int, n_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    out = np.zeros(n_bytes, np.uint8)
    device.download(pointer, out)
    return out


@pytest.mark.parametrize("chunk_bytes", [256, 4096, 65_536, 1 << 20])
@pytest.mark.parametrize("readers", [1, 3])
def test_pieces_without_staging_go_to_their_addresses(
    tmp_path: Path, device: EmulatedDevice, content: np.ndarray, chunk_bytes: int, readers: int
) -> None:
    spans = [(0, 1), (1, 255), (256, 256), (512, 257), (1000, 0), (769, 99_231), (100_000, 200_000)]
    pointers = [device.allocate(max(1, n_bytes)) for _, n_bytes in spans]
    uploads = [
        Upload(str(begin), (Piece(begin, n_bytes, pointer),))
        for (begin, n_bytes), pointer in zip(spans, pointers, strict=True)
    ]
    report = load(device, tmp_path / "file", uploads, readers=readers, chunk_bytes=chunk_bytes)
    assert report.n_bytes == FILE_BYTES
    for (begin, n_bytes), pointer in zip(spans, pointers, strict=True):
        assert np.array_equal(downloaded(device, pointer, max(1, n_bytes))[:n_bytes], content[begin : begin + n_bytes])


@pytest.mark.parametrize("chunk_bytes", [256, 8192, 1 << 20])
@pytest.mark.parametrize("readers", [1, 2, 8])
def test_finish_sees_all_pieces_of_its_upload_in_staging(
    tmp_path: Path, device: EmulatedDevice, content: np.ndarray, chunk_bytes: int, readers: int
) -> None:
    """More uploads than staging slots, two planes each, and a ``finish`` that copies them to their place."""
    n_uploads, plane = 23, 3000
    target = device.allocate(2 * plane * n_uploads)
    order: list[int] = []

    def upload(i: int) -> Upload:
        def finish(staging: int, stream: Stream) -> None:
            order.append(i)
            device.copy(target + 2 * plane * i, staging, plane, stream)
            device.copy(target + 2 * plane * i + plane, staging + 4096, plane, stream)

        pieces = (Piece(plane * i, plane, 0), Piece(100_000 + plane * i, plane, 4096))
        return Upload(f"matrix {i}", pieces, 8192, finish)

    load(device, tmp_path / "file", [upload(i) for i in range(n_uploads)], readers=readers, chunk_bytes=chunk_bytes)
    assert order == list(range(n_uploads))
    for i in range(n_uploads):
        got = downloaded(device, target + 2 * plane * i, 2 * plane)
        low, high = content[plane * i :][:plane], content[100_000 + plane * i :][:plane]
        assert np.array_equal(got, np.concatenate([low, high])), f"matrix {i}"


def test_progress_adds_up_and_nothing_stays_allocated(
    tmp_path: Path, device: EmulatedDevice, content: np.ndarray
) -> None:
    pointer = device.allocate(FILE_BYTES)
    before = device.free_bytes()
    seen: list[tuple[int, str] | int] = []

    @contextmanager
    def progress(total: int, description: str) -> Iterator[object]:
        seen.append((total, description))
        yield seen.append

    upload = Upload("all", (Piece(0, FILE_BYTES, 0),), FILE_BYTES, lambda staging, stream: None)
    plain = Upload("again", (Piece(0, FILE_BYTES, pointer),))
    load(device, tmp_path / "file", [upload, plain], progress=progress, readers=2, chunk_bytes=8192)  # type: ignore[arg-type]
    assert seen[0] == (2 * FILE_BYTES, "loading")
    assert sum(n for n in seen[1:] if isinstance(n, int)) == 2 * FILE_BYTES
    assert device.free_bytes() == before


@pytest.mark.parametrize("lent_bytes", [24_576, 24_575])
def test_memory_that_is_lent_stages_where_it_is_enough(
    tmp_path: Path, device: EmulatedDevice, content: np.ndarray, lent_bytes: int
) -> None:
    target, lent = device.allocate(FILE_BYTES), device.allocate(24_576)
    before, seen = device.free_bytes(), set[int]()

    def upload(begin: int) -> Upload:
        n_bytes = min(8192, FILE_BYTES - begin)

        def finish(staging: int, stream: Stream) -> None:
            seen.add(staging)
            assert device.free_bytes() == before - (0 if lent_bytes == 24_576 else 24_576)
            device.copy(target + begin, staging, n_bytes, stream)

        return Upload(str(begin), (Piece(begin, n_bytes, 0),), 8192, finish)

    uploads = [upload(begin) for begin in range(0, FILE_BYTES, 8192)]
    load(device, tmp_path / "file", uploads, readers=2, chunk_bytes=4096, lent=(lent, lent_bytes))
    assert (seen == {lent, lent + 8192, lent + 16_384}) == (lent_bytes == 24_576)
    assert device.free_bytes() == before
    assert np.array_equal(downloaded(device, target, FILE_BYTES), content)


def test_no_uploads_are_no_work(tmp_path: Path, device: EmulatedDevice, content: np.ndarray) -> None:
    assert load(device, tmp_path / "file", [Upload("none", ())]).n_bytes == 0


@pytest.mark.parametrize("readers", [1, 4])
def test_file_that_became_shorter_is_one_line(
    tmp_path: Path, device: EmulatedDevice, content: np.ndarray, readers: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content[:200_000].tobytes())
    pointer = device.allocate(FILE_BYTES)
    before = device.free_bytes()
    uploads = [Upload("all", (Piece(0, FILE_BYTES, pointer),))]
    with pytest.raises(StorageError, match=rf"^{path}: the file ends at byte 200000: it became shorter.*again$"):
        load(device, path, uploads, readers=readers, chunk_bytes=4096)
    assert device.free_bytes() == before


def test_device_too_full_for_staging_is_one_line(tmp_path: Path, device: EmulatedDevice, content: np.ndarray) -> None:
    upload = Upload("all", (Piece(0, FILE_BYTES, 0),), 4 << 20)
    with pytest.raises(DeviceMemoryError, match=r"loading needs 3 staging buffers beside the weights: .*do not fit"):
        load(device, tmp_path / "file", [upload])


def test_failing_finish_leaves_nothing_behind(tmp_path: Path, device: EmulatedDevice, content: np.ndarray) -> None:
    before = device.free_bytes()

    def finish(staging: int, stream: Stream) -> None:
        raise RuntimeError("no")

    uploads = [Upload(str(i), (Piece(0, 50_000, 0),), 50_000, finish) for i in range(4)]
    with pytest.raises(RuntimeError, match="no"):
        load(device, tmp_path / "file", uploads, readers=2, chunk_bytes=4096)
    assert device.free_bytes() == before
