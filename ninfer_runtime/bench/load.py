"""Time of loading an artifact: from the page cache to a program that can run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import BenchOptions, Room, Running, running

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.loader import LoadReport

REPEATS = 3


@runtime_checkable
class TimesLoading(Protocol):
    """A program that knows how long its weights took from the file to where they are used."""

    load_report: "LoadReport"


def load(options: BenchOptions) -> Iterator[Result]:
    """``load/…``: weights and, beside it, the whole start, the fastest of ``REPEATS`` after one that warms the cache.

    ``load/…/weights`` is left out for programs that do not time it.
    """
    starts: list[tuple[float, float | None, int]] = []
    for _ in range(1 + REPEATS):
        with running(options, Room()) as run:
            program = run.program
            report = program.load_report if isinstance(program, TimesLoading) else None
            seconds = None if report is None else report.seconds
            n_bytes = run.artifact.file_bytes if report is None else report.n_bytes
            starts.append((run.create_seconds, seconds, n_bytes))
            identity, problem = run.identity, _problem(run, options.seed)
    weights = [(seconds, n_bytes) for _, seconds, n_bytes in starts[1:] if seconds is not None]
    check = "logits of a first prompt finite"
    if weights:
        seconds, n_bytes = min(weights)
        yield Result(
            id=f"load/{identity}/weights",
            value=n_bytes / seconds / 1e9,
            unit="GB/s",
            limit="load_gbps",
            achieved=n_bytes / seconds / 1e9,
            check=check,
            problem=problem,
            details={"seconds": seconds, "bytes": n_bytes},
        )
    yield Result(
        id=f"load/{identity}/start",
        value=min(seconds for seconds, _, _ in starts[1:]),
        unit="s",
        check=check,
        problem=problem,
        details={"first_start_s": starts[0][0], "file_bytes": starts[0][2]},
    )


def _problem(run: Running, seed: int) -> str:
    run.program.reset(0)
    result = run.prefill(0, 0, 16, run.pages(0, 1), seed)
    return "" if result.finite and result.token_id is not None else "logits of a first prompt were not finite"
