"""What ``ninfer-convert build`` does with its options: plan, refuse or build, and tell about it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ninfer_convert.commands.problem_codes import problem_code
from ninfer_convert.events import BuildObserver, EventLines
from ninfer_convert.journal import journal_of
from ninfer_convert.pipeline import BuildResult, build, finish_published
from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan
from ninfer_convert.plan_view import render_problems
from ninfer_convert.plots import check_folder, draw
from ninfer_convert.publish import check_free, publish
from ninfer_convert.report import report_of
from ninfer_convert.summaries import read_report
from ninfer_format.command import INTERRUPTED, progress_bytes
from ninfer_format.errors import NinferError, StorageError, UsageError

SCHEMA = "ninfer.build/1"


@dataclass(frozen=True, slots=True)
class Told:
    """How a build reports: events as JSON lines or text, or (``quiet``) only the last line, or nothing."""

    as_json: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Extras:
    """What to write besides artifact and report."""

    publish: bool = False
    plots: Path | None = None

    def check(self, out: Path, options: BuildOptions) -> None:
        """Refuse now what could not be written after a long build. UsageError, MissingExtraError."""
        if self.plots is not None:
            check_folder(self.plots)
            for source in (options.source, options.base, options.dflash):
                if source is not None and source.is_dir() and self.plots.resolve().is_relative_to(source.resolve()):
                    raise UsageError(
                        f"--plots {self.plots}: lies inside the source {source}, which is never written to"
                    )
        if self.publish:
            check_free(out, force=options.force)

    def write(self, out: Path, options: BuildOptions, told: Told) -> dict[str, Any]:
        """Write them; members of the result document, empty if nothing was asked for."""

        def hashing(total: int, description: str) -> AbstractContextManager[Callable[[int], None]]:
            return progress_bytes(total, "hashing", quiet=told.quiet)

        if not self.publish and self.plots is None:
            return {}
        report, members, files = read_report(report_of(out)), dict[str, Any](), list[Path]()
        if self.publish:
            written = publish(out, report=report, force=options.force, jobs=options.jobs or None, progress=hashing)
            members["sha256"], files = written.sha256, [*written.files]
        if self.plots is not None:
            files += draw(report, self.plots)
        return members | {"side_files": [str(path) for path in files]}


def run(options: BuildOptions, out: Path, told: Told, extras: Extras) -> int:
    """Build ``out`` as ``options`` say; the exit code."""
    lines = EventLines(_print_now) if told.as_json else None
    with _failures_told(lines, out):
        extras.check(out, options)
        if options.resume and finish_published(out):
            document = {"schema": SCHEMA, "path": str(out), "bytes": out.stat().st_size, "already_complete": True}
            _tell(lines, document | extras.write(out, options, told), f"{out}: was already complete", told)
            return 0
        plan = make_plan(options)
        if plan.problems or plan.target is None:
            sys.stderr.write("\n".join(render_problems(plan.problems)) + "\n")
            if lines is not None:
                lines.failed("nothing can be built", problem_code(plan), resumable=False, problems=plan.problems)
            return problem_code(plan)
        observer = BuildObserver() if lines is None or told.quiet else lines
        if lines is not None:
            lines.facts = _start_facts(plan)
        payload_bytes = sum(entry.n_bytes for entry in plan.target.inventory.objects)
        with progress_bytes(payload_bytes, "building", quiet=told.quiet) as advance:
            result = build(plan, progress=advance, observer=observer)
        side = extras.write(out, options, told)
        text = "\n".join([_text(plan, result), *(f"wrote      {file}" for file in side.get("side_files", ()))])
        _tell(lines, _document(plan, result) | side, text, told)
    return 0


def _print_now(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def _tell(lines: EventLines | None, document: dict[str, Any], text: str, told: Told) -> None:
    if lines is not None:
        lines.done(document)
    elif not told.quiet:
        typer.echo(text)


@contextmanager
def _failures_told(lines: EventLines | None, out: Path) -> Iterator[None]:
    """On an error of the block say whether it can be resumed, and end the events; the error passes through."""
    try:
        yield
    except (NinferError, OSError, MemoryError, KeyboardInterrupt) as error:
        resumable = journal_of(out).exists()
        if resumable and isinstance(error, KeyboardInterrupt | StorageError | BrokenPipeError):
            sys.stderr.write(f"{out}: not finished; run the same command with --resume to continue\n")
        if lines is not None and not isinstance(error, BrokenPipeError):
            code = StorageError.exit_code
            if isinstance(error, NinferError | KeyboardInterrupt):
                code = error.exit_code if isinstance(error, NinferError) else INTERRUPTED
            lines.failed(str(error) or type(error).__name__, code, resumable=resumable)
        raise


def _start_facts(plan: ConversionPlan) -> dict[str, Any]:
    target, options = plan.require(), plan.options
    return {
        "path": str(options.out),
        "identity": str(target.identity),
        "published": target.published,
        "recipe": target.config.recipe.name,
        "device": options.device,
        "file_bytes": plan.output_bytes,
        "memory_bytes": plan.memory_bytes,
    }


def _megabytes_per_second(result: BuildResult) -> float:
    return result.source_bytes / 1e6 / max(result.elapsed_seconds, 1e-9)


def _document(plan: ConversionPlan, result: BuildResult) -> dict[str, Any]:
    target = plan.require()
    return {
        "schema": SCHEMA,
        "path": str(result.path),
        "report": str(result.report_path),
        "identity": str(target.identity),
        "published": target.published,
        "recipe": target.config.recipe.name,
        "bytes": result.file_bytes,
        "directory_sha256": target.inventory.directory_sha256,
        "objects": len(target.inventory.objects),
        "resumed_objects": result.n_resumed,
        "source_bytes": result.source_bytes,
        "elapsed_seconds": round(result.elapsed_seconds, 3),
        "megabytes_per_second": round(_megabytes_per_second(result), 1),
        "memory_bytes": plan.memory_bytes,
        "notes": list(result.notes),
        "already_complete": False,
    }


def _text(plan: ConversionPlan, result: BuildResult) -> str:
    target = plan.require()
    rate = f"{result.elapsed_seconds:.1f} s, {_megabytes_per_second(result):,.0f} MB/s of source words"
    lines = [
        f"{result.path}: {target.identity}, {len(target.inventory.objects)} objects, {result.file_bytes:,} bytes",
        f"report     {result.report_path}",
        f"time       {rate}",
        *(f"note       {note}" for note in result.notes),
    ]
    worst = max(
        ((record.error["relative"], name) for name, record in result.finished.items() if record.error), default=None
    )
    if worst is not None:
        lines.append(f"error      {worst[0]:.4f} of the weights' norm in the worst matrix, {worst[1]}")
    return "\n".join(lines)
