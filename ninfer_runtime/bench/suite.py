"""Which numbers a command measures, in one process and on one program, against roofs measured beside them."""

import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninfer_runtime.bench.decode import COLUMN_SHAPES, Shape, columns, decode, finite_logits
from ninfer_runtime.bench.limits import device_limits, host_limits
from ninfer_runtime.bench.load import load
from ninfer_runtime.bench.ops import ops
from ninfer_runtime.bench.prefill import LateChunk, Prompt, attention, prefill
from ninfer_runtime.bench.report import Limits, Record, Result, current_commit, plot_roofline, render
from ninfer_runtime.bench.running import BenchOptions, Room, Running, running
from ninfer_runtime.commands.report import say

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.device import Device

CONTEXT = 7_680
CONTEXTS = (CONTEXT, 65_536, 250_000)
LATE_CHUNK = LateChunk(131_072, 1_024)
ROUNDS = 64

Measure = Callable[[Running], Iterator[Result]]


@dataclass(frozen=True, slots=True)
class Output:
    """Where a record goes: stdout as a table or JSON, and files."""

    as_json: bool = False
    plot: Path | None = None
    folder: Path | None = None


def bench_decode(options: BenchOptions, shapes: Sequence[Shape], output: Output) -> int:
    """``decode/…`` and ``host/…`` of the shapes; the exit code."""
    room = _room(shape.room for shape in shapes)

    def measure(run: Running) -> Iterator[Result]:
        for shape in shapes:
            yield from decode(run, shape, options.seed)

    return _report(_measured(options, room, measure), output)


def bench_prefill(options: BenchOptions, prompts: Sequence[Prompt], late: LateChunk | None, output: Output) -> int:
    """``prefill/…`` of the prompts and ``attention/…`` of a late chunk; the exit code."""
    room = _room([*(prompt.room for prompt in prompts), *([late.room] if late else [])])

    def measure(run: Running) -> Iterator[Result]:
        for prompt in prompts:
            yield prefill(run, prompt, options.seed)
        if late is not None and (result := attention(run, late, options.seed)) is not None:
            yield result

    return _report(_measured(options, room, measure), output)


def bench_ops(options: BenchOptions, context: int, rounds: int, output: Output) -> int:
    """``matrix/…`` and ``columns/…``; the exit code."""
    widest = max(rows for rows, _ in COLUMN_SHAPES), max(n for _, n in COLUMN_SHAPES)

    def measure(run: Running) -> Iterator[Result]:
        yield from ops(run)
        yield from columns(run, context, rounds, options.seed)

    return _report(_measured(options, Shape(context, *widest, rounds).room, measure), output)


def bench_load(options: BenchOptions, output: Output) -> int:
    """``load/…``; the exit code."""
    return _report(_measured(options, Room(), lambda run: iter(()), and_load=True), output)


def bench_all(options: BenchOptions, contexts: Sequence[int], rounds: int, output: Output) -> int:
    """Every number, on one program but for loading; the exit code."""
    shapes = [Shape(context, rounds=rounds) for context in contexts]
    short = min(contexts)
    wide = Shape(short, max(rows for rows, _ in COLUMN_SHAPES), max(n for _, n in COLUMN_SHAPES), rounds)
    late = LATE_CHUNK if max(contexts) >= LATE_CHUNK.start + LATE_CHUNK.n_tokens else None
    room = _room([*(shape.room for shape in (*shapes, wide)), Prompt(short).room, *([late.room] if late else [])])

    def measure(run: Running) -> Iterator[Result]:
        for shape in shapes:
            yield from decode(run, shape, options.seed)
        yield from columns(run, short, rounds, options.seed)
        yield from ops(run)
        yield prefill(run, Prompt(short), options.seed)
        if late is not None and (result := attention(run, late, options.seed)) is not None:
            yield result

    return _report(_measured(options, room, measure, and_load=True), output)


def _room(rooms: Any) -> Room:
    total = Room()
    for room in rooms:
        total = total.including(room)
    return total


def _measured(options: BenchOptions, room: Room, measure: Measure, *, and_load: bool = False) -> Record:
    """Create the program, measure the roofs on the same device, then the rest; loading after the program has gone."""
    with running(options, room) as run:
        say(f"started {run.identity} in {run.create_seconds:.1f} s")
        device: Device | None = getattr(run.program, "device", None)
        limits = host_limits() if device is None else device_limits(device)
        say("limits " + ", ".join(f"{name} {value}" for name, value in limits.to_json().items()))
        wrong = finite_logits(run, min(256, room.context // 2), options.seed)
        notes = (f"raw logits of one round: {wrong or 'finite'}", f"backend {options.backend}, {run.kv_dtype} KV")
        results = list(_said(measure(run), limits))
        if wrong:
            results.append(Result(f"check/{run.identity}/logits", 0.0, "good", problem=wrong))
        name = platform.machine() if device is None else device.name.partition("\0")[0].strip()
    if and_load:
        results += _said(load(options), limits)
    return Record(name, limits, tuple(results), current_commit(), notes=notes)


def _said(results: Iterator[Result], limits: Limits) -> Iterator[Result]:
    """The results, each on stderr as soon as it is there."""
    for result in results:
        share = result.share(limits)
        tail = "" if share is None else f", {share:.1%} of {result.limit}"
        say(
            f"{result.id}: {result.value:,.5g} {result.unit}{tail}{' WRONG ' if result.problem else ''}{result.problem}"
        )
        yield result


def _report(record: Record, output: Output) -> int:
    """Print and write a record; 1 when an output check failed."""
    if output.plot is not None:
        plot_roofline(record, output.plot)
    if output.folder is not None:
        say(f"wrote {record.write(output.folder)}")
    if output.as_json:
        sys.stdout.write(json.dumps(record.to_json(), indent=2) + "\n")
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160).print(render(record))
    return 0 if record.is_good else 1
