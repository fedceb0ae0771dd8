"""Which numbers a command measures, in one process and on one program, against roofs measured beside them."""

import json
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ninfer_format import NUMERIC_FORMATS, Artifact, TensorEntry
from ninfer_format.errors import NinferError
from ninfer_runtime.bench.decode import COLUMN_SHAPES, ROW_COUNTS, Shape, aggregate, columns, decode, finite_logits
from ninfer_runtime.bench.drafts import N_DRAFTS, ROWS, ForcesAcceptance, drafts, recurrence
from ninfer_runtime.bench.limits import device_limits, host_limits
from ninfer_runtime.bench.load import load
from ninfer_runtime.bench.moe import moe
from ninfer_runtime.bench.offload import OffloadCase, offload, offload_cases
from ninfer_runtime.bench.ops import ops
from ninfer_runtime.bench.prefill import LateChunk, Prompt, attention, prefill
from ninfer_runtime.bench.report import Limits, Record, Result, current_commit, plot_roofline, render
from ninfer_runtime.bench.running import BenchOptions, Room, Running, has_draft_layer, running
from ninfer_runtime.commands.report import say
from ninfer_runtime.config import Nvfp4Activations

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.device import Device

CONTEXT = 7_680
CONTEXTS = (CONTEXT, 65_536, 250_000)
LATE_CHUNK = LateChunk(131_072, 1_024)
ROUNDS = 64
NVFP4_ROWS: tuple[Nvfp4Activations, ...] = ("a4", "a16")

Part = Callable[[Running], Iterable[Result]]
"""One benchmark; an error in it does not keep the others from running."""
Variant = tuple[BenchOptions, Room, Sequence[Part]]
"""A program with other options, made when the first has gone, and what is measured on it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured of one artifact.

    ``parts`` on a program with ``room``, then without it: ``prompts`` over other activations, a program that drafts,
    ``offloads``, and loading.
    """

    options: BenchOptions
    room: Room
    parts: Sequence[Part]
    prompts: Sequence[Variant] = ()
    drafting: Variant | None = None
    offloads: Sequence[OffloadCase] = ()
    loads: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """Where a record goes: stdout as a table or JSON, and files."""

    as_json: bool = False
    plot: Path | None = None
    folder: Path | None = None


def bench_decode(options: BenchOptions, shapes: Sequence[Shape], output: Output) -> int:
    """``decode/…`` and ``host/…`` of the shapes; the exit code."""
    parts = [_decode(shape, options.seed) for shape in shapes]
    return _report([Job(options, _room(shape.room for shape in shapes), parts)], output)


def bench_prefill(options: BenchOptions, prompts: Sequence[Prompt], late: LateChunk | None, output: Output) -> int:
    """``prefill/…`` of the prompts and ``attention/…`` of a late chunk; the exit code."""
    room = _room([*(prompt.room for prompt in prompts), *([late.room] if late else [])])
    parts = [*(_prefill(prompt, options.seed) for prompt in prompts), *([_late(late, options.seed)] if late else [])]
    return _report([Job(options, room, parts)], output)


def bench_ops(options: BenchOptions, context: int, rounds: int, output: Output) -> int:
    """``matrix/…`` and ``columns/…``; the exit code."""
    parts = [ops, moe, _columns(context, rounds, options.seed)]
    return _report([Job(options, _widest(context, rounds).room, parts)], output)


def bench_drafts(options: BenchOptions, context: int, rounds: int, output: Output) -> int:
    """``decode/…`` and ``rows/…`` at 1 to 8 rows, ``state/…``, and on a program that drafts ``drafts/…``."""
    seconds: dict[int, float] = {}
    room = Shape(context, max(ROW_COUNTS), 1 + N_DRAFTS, rounds).room
    parts = [_aggregate(context, rounds, options.seed, seconds), recurrence]
    return _report([Job(options, room, parts, drafting=_drafting(options, context, rounds, seconds))], output)


def bench_offload(options: BenchOptions, cases: Sequence[OffloadCase], output: Output) -> int:
    """``offload/…``; the exit code."""
    return _report([Job(options, Room(), [], offloads=cases)], output)


def bench_load(options: BenchOptions, output: Output) -> int:
    """``load/…``; the exit code."""
    return _report([Job(options, Room(), [], loads=True)], output)


def bench_all(every: Sequence[BenchOptions], contexts: Sequence[int], rounds: int, output: Output) -> int:
    """Every number of every artifact, in one record; the exit code."""
    return _report([_everything(options, contexts, rounds) for options in every], output)


def _everything(options: BenchOptions, contexts: Sequence[int], rounds: int) -> Job:
    """On one program but for drafting, streaming and loading."""
    first, *others = (Shape(context, rounds=rounds) for context in sorted(contexts))
    wide, prompt = _widest(first.context, rounds), Prompt(first.context)
    late = [LATE_CHUNK] if max(contexts) >= LATE_CHUNK.start + LATE_CHUNK.n_tokens else []
    shapes = (first, *others, wide, Shape(first.context, max(ROW_COUNTS), rounds=rounds))
    seconds: dict[int, float] = {}
    return Job(
        options,
        _room([*(shape.room for shape in shapes), prompt.room, *(chunk.room for chunk in late)]),
        parts=[
            _aggregate(first.context, rounds, options.seed, seconds),
            _columns(first.context, rounds, options.seed),
            ops,
            moe,
            _prefill(prompt, options.seed),
            *(_late(chunk, options.seed) for chunk in late),
            *(_decode(shape, options.seed) for shape in others),
            recurrence,
        ],
        prompts=prompt_variants(options, prompt),
        drafting=_drafting(options, first.context, rounds, seconds),
        offloads=offload_cases(first.context, rounds),
        loads=True,
    )


def _decode(shape: Shape, seed: int) -> Part:
    return lambda run: decode(run, shape, seed)


def _aggregate(context: int, rounds: int, seed: int, seconds: dict[int, float]) -> Part:
    return lambda run: aggregate(run, context, rounds, seed, seconds)


def _drafting(options: BenchOptions, context: int, rounds: int, seconds: dict[int, float]) -> Variant:
    """A program that drafts, its room, and its rounds; ``seconds`` of plain ones are there by then."""
    room = Shape(context, max(ROWS), 1 + N_DRAFTS, rounds).room
    parts: list[Part] = [lambda run: drafts(run, context, rounds, options.seed, seconds)]
    return replace(options, max_drafts=N_DRAFTS), room, parts


def prompt_variants(options: BenchOptions, prompt: Prompt) -> list[Variant]:
    """Programs of a card whose prompts multiply the artifact's formats by other activations; they name themselves."""
    if options.backend != "cuda":
        return []
    with Artifact.open(options.path) as artifact:
        kinds = {NUMERIC_FORMATS[e.format].kind for e in artifact.directory.objects if isinstance(e, TensorEntry)}
    choices = []
    if "nvfp4" in kinds:
        choices += [replace(options, nvfp4_activations=rows) for rows in NVFP4_ROWS]
    if "grouped" in kinds:
        choices.append(replace(options, prefill_activations="int8"))
    return [(chosen, prompt.room, [_prefill(prompt, options.seed)]) for chosen in choices]


def _columns(context: int, rounds: int, seed: int) -> Part:
    return lambda run: columns(run, context, rounds, seed)


def _prefill(prompt: Prompt, seed: int) -> Part:
    return lambda run: [prefill(run, prompt, seed)]


def _late(chunk: LateChunk, seed: int) -> Part:
    return lambda run: filter(None, [attention(run, chunk, seed)])


def _widest(context: int, rounds: int) -> Shape:
    """The largest of the rounds that ``columns`` times."""
    return Shape(context, max(rows for rows, _ in COLUMN_SHAPES), max(n for _, n in COLUMN_SHAPES), rounds)


def _room(rooms: Iterable[Room]) -> Room:
    """Enough for all of them."""
    total = Room()
    for room in rooms:
        total = total.including(room)
    return total


class _Recorder:
    """Results so far: each goes to stderr and into the record's file as soon as it is there."""

    def __init__(self, device: str, limits: Limits, folder: Path | None) -> None:
        self.record = Record(device, limits, (), current_commit())
        self._path = None if folder is None else self.record.write(folder)
        say("limits " + ", ".join(f"{name} {value}" for name, value in limits.to_json().items()))

    def add(self, measure: Callable[[], Iterable[Result]]) -> None:
        """Take results until they end; an error of ours ends them too, and makes the record bad."""
        try:
            for result in measure():
                self._add(result)
        except NinferError as error:
            self._add(Result("check/stopped", 0.0, "good", problem=str(error)))

    def note(self, text: str) -> None:
        """Add a remark."""
        self._change(replace(self.record, notes=(*self.record.notes, text)))

    def _add(self, result: Result) -> None:
        share = result.share(self.record.limits)
        tail = "" if share is None else f", {share:.1%} of {result.limit}"
        wrong = f" WRONG {result.problem}" if result.problem else ""
        say(f"{result.id}: {result.value:,.5g} {result.unit}{tail}{wrong}")
        self._change(replace(self.record, results=(*self.record.results, result)))

    def _change(self, record: Record) -> None:
        self.record = record
        if self._path is not None:
            record.replace(self._path)


def _measured(jobs: Sequence[Job], folder: Path | None) -> Record:
    """All jobs, one after the other; the roofs are measured beside the first one's program, on the same device."""
    recorder: _Recorder | None = None
    for job in jobs:
        with running(job.options, job.room) as run:
            say(f"started {run.identity} in {run.create_seconds:.1f} s")
            if recorder is None:
                recorder = _recorder(run, folder)
            recorder.note(f"{run.identity}: backend {job.options.backend}, {run.kv_dtype} KV")
            recorder.add(partial(_check, run, min(256, job.room.context // 2), job.options.seed))
            for part in job.parts:
                recorder.add(partial(part, run))
            forces = isinstance(run.program, ForcesAcceptance)
        drafts = forces and has_draft_layer(job.options.path)
        variants = [*job.prompts, *([job.drafting] if job.drafting is not None and drafts else [])]
        for options, room, parts in variants:
            with running(options, room) as run:
                for part in parts:
                    recorder.add(partial(part, run))
        if job.offloads and drafts:
            recorder.add(partial(offload, job.options, job.offloads))
        if job.loads:
            recorder.add(partial(load, job.options))
    assert recorder is not None
    return recorder.record


def _recorder(run: Running, folder: Path | None) -> _Recorder:
    """A record of the device that ``run`` is on, with its roofs."""
    device: Device | None = getattr(run.program, "device", None)
    if device is None:
        return _Recorder(platform.machine(), host_limits(), folder)
    return _Recorder(device.name.partition("\0")[0].strip(), device_limits(device), folder)


def _check(run: Running, context: int, seed: int) -> list[Result]:
    """``check/…``: 1 when the raw logits of one round are finite numbers that differ."""
    wrong = finite_logits(run, context, seed)
    return [Result(f"check/{run.identity}/logits", float(not wrong), "good", check="finite logits", problem=wrong)]


def _report(jobs: Sequence[Job], output: Output) -> int:
    """Measure, print and draw; 1 when an output check failed."""
    record = _measured(jobs, output.folder)
    if output.plot is not None:
        plot_roofline(record, output.plot)
    if output.as_json:
        sys.stdout.write(json.dumps(record.to_json(), indent=2) + "\n")
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160).print(render(record))
    return 0 if record.is_good else 1
