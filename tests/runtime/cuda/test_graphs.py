"""One graph per shape: recorded once, launched by shape, replaced whole, given back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ninfer_runtime.backends.cuda.device import Stream
from ninfer_runtime.backends.cuda.graphs import GraphBook
from tests.emulator.device import EmulatedDevice


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice(total_bytes=1 << 20) as opened:
        yield opened


def first_byte(device: EmulatedDevice, pointer: int) -> int:
    out = np.zeros(1, np.uint8)
    device.synchronize()
    device.download(pointer, out)
    return int(out[0])


def test_recording_runs_nothing_and_launching_runs_the_shapes_own_graph(device: EmulatedDevice) -> None:
    stream, pointer = device.stream(), device.allocate(256)
    device.fill(pointer, 9, 256, stream)
    book = GraphBook(device, stream)
    shapes = [(1, 1), (8, 6), (2, 3)]
    order: list[tuple[int, int]] = []

    def queue(shape: tuple[int, int], on: Stream) -> None:
        order.append(shape)
        device.fill(pointer, 10 * shape[0] + shape[1], 256, on)

    book.record_all(shapes, queue)
    assert order == [(8, 6), (2, 3), (1, 1)], "the largest is recorded first"
    assert first_byte(device, pointer) == 9
    for shape in shapes:
        book.launch(shape, stream)
        assert first_byte(device, pointer) == 10 * shape[0] + shape[1]
    assert ((2, 3) in book, (3, 2) in book, len(book), book.n_nodes) == (True, False, 3, 3)


def test_recording_a_shape_again_replaces_its_graph(device: EmulatedDevice) -> None:
    stream, pointer = device.stream(), device.allocate(256)
    book = GraphBook(device, stream)
    for value in (1, 2):
        book.record((1, 1), lambda on, value=value: device.fill(pointer, value, 256, on))  # type: ignore[misc]
    book.launch((1, 1), device.stream())
    assert first_byte(device, pointer) == 2
    assert len(book) == 1


def test_failed_recording_keeps_the_old_graph(device: EmulatedDevice) -> None:
    stream, pointer = device.stream(), device.allocate(256)
    book = GraphBook(device, stream)
    book.record((1, 1), lambda on: device.fill(pointer, 7, 256, on))

    def fails(on: Stream) -> None:
        device.fill(pointer, 8, 256, on)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        book.record((1, 1), fails)
    book.launch((1, 1), stream)
    assert first_byte(device, pointer) == 7


def test_closed_book_and_unknown_shape_have_no_graph(device: EmulatedDevice) -> None:
    stream, pointer = device.stream(), device.allocate(256)
    book = GraphBook(device, stream)
    book.record((1, 1), lambda on: device.fill(pointer, 7, 256, on))
    with pytest.raises(KeyError):
        book.launch((1, 2), stream)
    book.close()
    assert (len(book), book.n_bytes) == (0, 0)
    with pytest.raises(KeyError):
        book.launch((1, 1), stream)
