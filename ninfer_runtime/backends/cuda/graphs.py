"""Captured rounds by shape: one graph per (rows, columns), recorded at start-up and launched by one call each."""

from collections.abc import Callable, Iterable

from ninfer_runtime.backends.cuda.device import Device, Graph, Stream

Shape = tuple[int, int]
"""(B rows, q columns per row) of a round."""


class GraphBook:
    """The graphs of one program; ``n_bytes`` of device memory hold them, as far as the device can tell."""

    def __init__(self, device: Device, stream: Stream) -> None:
        """Recording happens on ``stream``; launches go to any stream."""
        self._device = device
        self._stream = stream
        self._graphs: dict[Shape, Graph] = {}

    def record(self, shape: Shape, queue: Callable[[Stream], None]) -> None:
        """Capture what ``queue`` puts on the stream as the graph of ``shape``; every kernel must be loaded already."""
        with self._device.capture(self._stream) as graph:
            queue(self._stream)
        if (old := self._graphs.pop(shape, None)) is not None:
            old.close()
        self._graphs[shape] = graph

    def record_all(self, shapes: Iterable[Shape], queue: Callable[[Shape, Stream], None]) -> None:
        """Capture one graph per shape, the largest first: what does not fit fails before the small ones are made."""
        for shape in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
            self.record(shape, lambda stream, shape=shape: queue(shape, stream))  # type: ignore[misc]

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def launch(self, shape: Shape, stream: Stream) -> None:
        """Queue the round of that shape. KeyError for a shape that was not recorded."""
        self._graphs[shape].launch(stream)

    @property
    def n_bytes(self) -> int:
        """Device memory of all graphs, in bytes."""
        return sum(graph.n_bytes for graph in self._graphs.values())

    @property
    def n_nodes(self) -> int:
        """Nodes of all graphs."""
        return sum(graph.n_nodes for graph in self._graphs.values())

    def close(self) -> None:
        """Give all graphs back; none may be running."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
