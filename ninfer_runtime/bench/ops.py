"""Time of the matrix launches of a decode round, one kind at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import Running

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.device import Device, Stream

REPEATS = 20
WARM_UPS = 3
CHAIN_L2_SIZES = 4
"""A chain reads at least so many times the L2 cache, so that nothing is found there again."""

Launch = Callable[["Stream"], None]


@runtime_checkable
class ListsLaunches(Protocol):
    """A program that lends its one-column matrix launches."""

    device: "Device"

    def bench_launches(self) -> Mapping[str, Sequence[tuple[int, Launch]]]:
        """Kind → (bytes of weights, launch) of every layer. Launches only read weights and write scratch memory."""


def ops(run: Running) -> Iterator[Result]:
    """``matrix/…``: every kind in a graph of its launches over all layers, weights cold; medians of ``REPEATS``."""
    program = run.program
    if not isinstance(program, ListsLaunches):
        return
    device = program.device
    for kind, launches in program.bench_launches().items():
        n_bytes = sum(size for size, _ in launches)
        rounds = max(1, -(-CHAIN_L2_SIZES * device.l2_bytes // n_bytes))
        seconds = chain_seconds(device, [launch for _, launch in launches], rounds) / rounds
        yield Result(
            id=f"matrix/{run.identity}/{kind}",
            value=seconds / len(launches) * 1e6,
            unit="us",
            limit="read_gbps",
            achieved=n_bytes / seconds / 1e9,
            check="the same launches as in the rounds checked above",
            details={"launches": len(launches), "mb_per_launch": round(n_bytes / len(launches) / 1e6, 2)},
        )


def chain_seconds(device: "Device", launches: Sequence[Launch], rounds: int) -> float:
    """Median seconds of a graph of all launches, one after the other, ``rounds`` times over."""
    stream = device.stream()
    with device.capture(stream) as graph:
        for _ in range(rounds):
            for launch in launches:
                launch(stream)
    begin, end = device.event(timing=True), device.event(timing=True)
    found = []
    for repeat in range(WARM_UPS + REPEATS):
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        if repeat >= WARM_UPS:
            found.append(end.elapsed_ms(begin) / 1e3)
    graph.close()
    return sorted(found)[REPEATS // 2]
