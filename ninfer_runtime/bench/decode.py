"""Time of decode rounds, driven as the engine drives them: the next round is launched before this one is read."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from ninfer_runtime.backends.base import Int32s, Round, RoundResult, RowStatus, Ticket, page_table
from ninfer_runtime.bench.bytes_moved import attention_flops, matrix_flops, round_bytes
from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import GREEDY, Room, Running, in_range

BUDGET = 1 << 30
CHECKED_ROUNDS = 16
"""Rounds that are run a second time, from an equal context, to compare their tokens."""
WARM_UP_ROUNDS = 8
COLUMN_SHAPES = ((1, 4), (2, 4), (4, 4), (8, 4))
"""Rows × columns of the rounds of 4, 8, 16 and 32 columns."""
ROW_COUNTS = (1, 2, 4, 8)

Span = tuple[float, float]


@runtime_checkable
class TimesRounds(Protocol):
    """A program that can say when the device worked."""

    def bench_spans(self, n_rounds: int | None) -> list[Span]:
        """Start recording at most ``n_rounds`` rounds, or (None) end it and return (begin, end) of each, seconds."""


@runtime_checkable
class TellsRouting(Protocol):
    """A program that keeps which experts its last round's columns went to."""

    def bench_routing(self, n_columns: int) -> Int32s:
        """int32 [layers, n_columns, k]; no layers for a dense model."""


def distinct_routed(run: Running, n_columns: int) -> float | None:
    """Experts of a layer that the last round of so many columns read, on average over the layers; None: not known."""
    if not isinstance(run.program, TellsRouting):
        return None
    layers = run.program.bench_routing(n_columns)
    return float(np.mean([len(np.unique(ids)) for ids in layers])) if len(layers) else None


@runtime_checkable
class LeavesStates(Protocol):
    """A program whose rounds do not write every recurrent state back."""

    def bench_state_writes(self, n_rows: int, n_columns: int, committed: float) -> float:
        """Writes of a state per round of this shape, where rounds commit so many columns on average."""


def state_writes(run: Running, shape: "Shape", committed: float) -> float:
    """Writes of a recurrent state per round of ``shape``."""
    if not isinstance(run.program, LeavesStates):
        return 1.0
    return run.program.bench_state_writes(shape.rows, shape.columns, committed)


@dataclass(frozen=True, slots=True)
class Shape:
    """Rounds to time: rows × columns, every row at ``context`` tokens."""

    context: int
    rows: int = 1
    columns: int = 1
    rounds: int = 64

    @property
    def room(self) -> Room:
        """What the program must be able to hold; a round may commit all its columns."""
        per_row = self.context + (WARM_UP_ROUNDS + self.rounds + 4) * self.columns
        return Room(self.rows, self.columns, per_row, self.rows * (-(-per_row // 64) * 64))


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds between the reads of consecutive rounds, what the rounds emitted, and when the device worked."""

    seconds: tuple[float, ...]
    results: tuple[RoundResult, ...]
    spans: tuple[Span, ...]

    @property
    def mean(self) -> float:
        """Wall time per round."""
        return float(np.mean(self.seconds))

    @property
    def median(self) -> float:
        """Of the rounds."""
        return float(np.median(self.seconds))

    @property
    def p95(self) -> float:
        """Of the rounds."""
        return float(np.percentile(self.seconds, 95))

    @property
    def idle_share(self) -> float | None:
        """Share of the wall time in which the device waited for the host; None where it cannot be seen."""
        if len(self.spans) < 2:
            return None
        busy = sum(end - begin for begin, end in self.spans)
        return max(0.0, 1 - busy / (self.spans[-1][1] - self.spans[0][0]))


class RoundDriver:
    """Launches rounds of one shape one after the other, as ``Generation`` does."""

    def __init__(self, run: Running, shape: Shape, pages: Sequence[Int32s], seed: int) -> None:
        self._program = run.program
        self._vocabulary = run.model.spec.n_addressable
        self._rng = np.random.default_rng(seed)
        self._shape = shape
        rows = np.arange(shape.rows, dtype=np.int32)
        self.first = self._round = Round(
            slots=rows,
            token_ids=self._draw(),
            n_columns=np.full(shape.rows, shape.columns, np.int32),
            starts=np.full(shape.rows, shape.context, np.int32),
            rope_deltas=np.zeros(shape.rows, np.int32),
            pages=page_table([p.tolist() for p in pages], max(len(p) for p in pages)),
            sampling=(GREEDY,) * shape.rows,
            stop_ids=(frozenset[int](),) * shape.rows,
            budget=np.full(shape.rows, BUDGET, np.int32),
        )
        self._open: Ticket | None = None

    def _draw(self) -> Int32s:
        """Random inputs: column 0 of the first round, and drafts that are hardly ever right."""
        shape = (self._shape.rows, self._shape.columns)
        return self._rng.integers(0, self._vocabulary, shape).astype(np.int32)

    def next(self) -> RoundResult:
        """The result of one more round; the round behind it is on its way."""
        program = self._program
        if self._open is None:
            self._open = program.launch(self._round)
        ticket = self._open
        if program.runs_ahead:
            self._round = replace(self._round, token_ids=self._draw(), previous=ticket)
            self._open = program.launch(self._round)
            return program.read(ticket)
        result = program.read(ticket)
        program.commit(ticket)
        inputs = self._draw()
        inputs[:, 0] = [result.token_ids[b, n - 1] for b, n in enumerate(result.emitted)]
        self._round = replace(self._round, token_ids=inputs, starts=result.starts + result.columns)
        self._open = None
        return result

    def end(self) -> None:
        """Give up the round that is on its way."""
        if self._open is not None:
            self._program.rollback(self._open)
            self._open = None


def time_rounds(run: Running, shape: Shape, seed: int, *, spans: bool = False) -> RoundTimes:
    """Fill the contexts, warm up, and time ``shape.rounds`` rounds."""
    driver = RoundDriver(run, shape, run.fill(range(shape.rows), shape.context, seed), seed)
    results = [driver.next() for _ in range(WARM_UP_ROUNDS)]
    program = run.program
    timed = program if spans and isinstance(program, TimesRounds) else None
    if timed is not None:
        timed.bench_spans(shape.rounds)
    stamps = [time.perf_counter()]
    for _ in range(shape.rounds):
        results.append(driver.next())
        stamps.append(time.perf_counter())
    driver.end()
    found = tuple(timed.bench_spans(None)) if timed is not None else ()
    return RoundTimes(tuple(np.diff(stamps).tolist()), tuple(results), found)


def problem_of(run: Running, shape: Shape, times: RoundTimes, seed: int) -> str:
    """What is wrong with the output, or nothing: status, ids, and a second run that must emit the same."""
    for n, result in enumerate(times.results):
        for b, status in enumerate(result.status):
            tokens = result.token_ids[b, : result.emitted[b]].tolist()
            if status is not RowStatus.RUNNING or not tokens or not in_range(run.model, tokens):
                return f"round {n}, row {b}: {status.name}, tokens {tokens}"
    again = time_rounds(run, replace(shape, rounds=CHECKED_ROUNDS - WARM_UP_ROUNDS), seed)
    for n, (first, second) in enumerate(zip(times.results, again.results, strict=False)):
        if not np.array_equal(first.token_ids, second.token_ids) or not np.array_equal(first.emitted, second.emitted):
            return f"round {n} emitted {first.token_ids.tolist()}, in a second run {second.token_ids.tolist()}"
    return ""


def decode(run: Running, shape: Shape, seed: int) -> list[Result]:
    """``decode/…`` and, where it can be seen, ``host/…`` of one shape."""
    times = time_rounds(run, shape, seed, spans=True)
    text, objects = run.model.spec.text, run.artifact.directory.objects
    context = shape.context + WARM_UP_ROUNDS + shape.rounds / 2
    n_columns = shape.rows * shape.columns
    touched = distinct_routed(run, n_columns)
    written = state_writes(run, shape, shape.columns)
    moved = round_bytes(objects, text, [context] * shape.rows, run.kv_dtype, n_columns, touched, written)
    flops = n_columns * (matrix_flops(objects, text, head=True) + attention_flops(text, round(context), 1))
    emitted = sum(int(result.emitted.sum()) for result in times.results[WARM_UP_ROUNDS:])
    name = f"{run.identity}/c{shape.rows}{f'x{shape.columns}' if shape.columns > 1 else ''}/ctx{shape.context}"
    problem = problem_of(run, shape, times, seed)
    results = [
        Result(
            id=f"decode/{name}",
            value=emitted / sum(times.seconds),
            unit="tok/s",
            limit="read_gbps",
            achieved=moved.total / times.mean / 1e9,
            check=f"{len(times.results)} rounds in range, {CHECKED_ROUNDS} repeated equal",
            problem=problem,
            details={
                "mean_ms": round(times.mean * 1e3, 4),
                "median_ms": round(times.median * 1e3, 4),
                "p95_ms": round(times.p95 * 1e3, 4),
                "rounds": shape.rounds,
                "bytes": moved.total,
                "flops": flops,
                "seconds": times.mean,
                "kv_dtype": run.kv_dtype,
                **({} if touched is None else {"distinct_experts": round(touched, 2)}),
            },
        )
    ]
    if times.idle_share is not None:
        check = f"{len(times.spans)} graphs between their events"
        results.append(Result(f"host/{name}", times.idle_share, "share of wall time", check=check, problem=problem))
    return results


def columns(run: Running, context: int, rounds: int, seed: int) -> list[Result]:
    """``columns/…``: time of rounds of 4, 8, 16 and 32 columns over that of one column, medians."""
    base = time_rounds(run, Shape(context, rounds=rounds), seed)
    results = []
    for rows, n_columns in COLUMN_SHAPES:
        limits = run.plan.limits
        if rows > limits.max_rows or n_columns > limits.max_columns:
            continue
        shape = Shape(context, rows, n_columns, rounds)
        times = time_rounds(run, shape, seed)
        results.append(
            Result(
                id=f"columns/{run.identity}/c{rows * n_columns}",
                value=times.median / base.median,
                unit="x of one column",
                check=f"{len(times.results)} rounds in range, {CHECKED_ROUNDS} repeated equal",
                problem=problem_of(run, shape, times, seed),
                details={
                    "rows": rows,
                    "columns": n_columns,
                    "context": context,
                    "median_ms": round(times.median * 1e3, 4),
                    "p95_ms": round(times.p95 * 1e3, 4),
                    "one_column_ms": round(base.median * 1e3, 4),
                },
            )
        )
    return results


def aggregate(run: Running, context: int, rounds: int, seed: int, seconds: dict[int, float]) -> list[Result]:
    """``decode/…`` at 1, 2, 4 and 8 rows, and ``rows/…``: tokens per second over those of one row.

    ``seconds`` gets the mean time of a round by rows.
    """
    out: list[Result] = []
    single = 0.0
    for n_rows in ROW_COUNTS:
        if n_rows > run.plan.limits.max_rows:
            continue
        found = decode(run, Shape(context, n_rows, rounds=rounds), seed)
        single = single or found[0].value
        seconds[n_rows] = float(found[0].details["seconds"])
        out += found
        if n_rows > 1:
            name = f"rows/{run.identity}/c{n_rows}"
            value, check, problem = found[0].value / single, found[0].check, found[0].problem
            out.append(Result(name, value, "x of one row", check=check, problem=problem, details=found[0].details))
    return out


def finite_logits(run: Running, context: int, seed: int) -> str:
    """What is wrong with the raw logits of one round, or nothing."""
    pages = run.fill([0], context, seed)
    shape = Shape(context)
    driver = RoundDriver(run, shape, pages, seed)
    ticket = run.program.launch(replace(driver.first, want_logits=True))
    result = run.program.read(ticket)
    run.program.rollback(ticket)
    if result.logits is None:
        return "no logits came back"
    addressable = result.logits[0, 0, : run.model.spec.n_addressable]
    spread = float(addressable.max() - addressable.min()) if np.isfinite(addressable).all() else 0.0
    return "" if spread > 0 else "logits are not finite, or all the same"
