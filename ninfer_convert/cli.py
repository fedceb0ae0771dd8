"""The command ``ninfer-convert``: plan and build (specs/convert-cli.md).

Each function parses, calls one library function, prints what it returns, and returns its exit code.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from ninfer_convert.commands import export
from ninfer_format.command import progress_bytes, run_cli
from ninfer_format.errors import SourceError, StorageError, UsageError

if TYPE_CHECKING:
    from ninfer_convert.pipeline import BuildResult
    from ninfer_convert.plan import BuildOptions, ConversionPlan, Problem

BUILD_SCHEMA = "ninfer.build/1"

app = typer.Typer(
    name="ninfer-convert",
    help="Turn a checkpoint folder into one .ninfer file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", show_default=False, help="Checkpoint folder, or a Hub name in the cache.")
]
Out = Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="The .ninfer file to write.")]
IdentityText = Annotated[
    str | None,
    typer.Option("--identity", metavar="M/W", help="Published identity that the output must be, or a custom one."),
]
Recipe = Annotated[
    str | None, typer.Option(metavar="NAME", help="groupwise-int (default), bf16, w8, or a TOML file of a mixed one.")
]
ModelId = Annotated[str | None, typer.Option("--model-id", metavar="ID", help="Model id of a custom artifact.")]
Dflash = Annotated[Path | None, typer.Option("--dflash", metavar="DIR", help="Folder of the DFlash companion.")]
Ranking = Annotated[
    Path | None,
    typer.Option("--ranking", metavar="FILE", help="Token counts, or a .ninfer file whose draft head ids to take."),
]
NoMtp = Annotated[bool, typer.Option("--no-mtp", help="Leave the MTP draft layer out.")]
NoVision = Annotated[bool, typer.Option("--no-vision", help="Leave image and video input out.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to quantize; the bytes are the same.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Worker threads; 0 = one per CPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output; start an unfinished build again.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an unfinished build of this output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")]


def _options(
    source: Path,
    identity: str | None,
    recipe: str | None,
    model_id: str | None,
    dflash: Path | None,
    ranking: Path | None,
    device: Literal["cpu", "cuda"],
    jobs: int,
    **others: Any,
) -> "BuildOptions":
    from ninfer_convert.plan import BuildOptions
    from ninfer_convert.recipe_file import recipe_option
    from ninfer_format import Identity

    parsed = Identity.parse(identity) if identity is not None else None
    return BuildOptions(
        source,
        identity=parsed,
        recipe=recipe_option(recipe),
        model_id=model_id,
        dflash=dflash,
        ranking=ranking,
        device=device,
        jobs=jobs,
        **others,
    )


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))


# --- plan -----------------------------------------------------------------------------------------------------------


@app.command()
def plan(
    source: Source,
    identity: IdentityText = None,
    recipe: Recipe = None,
    model_id: ModelId = None,
    dflash: Dflash = None,
    ranking: Ranking = None,
    no_mtp: NoMtp = False,
    no_vision: NoVision = False,
    device: Device = "cpu",
    jobs: Jobs = 0,
    as_json: Json = False,
) -> int:
    """Show what a build would write and need, and every problem at once; reads headers only."""
    from ninfer_convert.plan import make_plan
    from ninfer_convert.plan_view import render, to_json

    options = _options(
        source, identity, recipe, model_id, dflash, ranking, device, jobs, no_mtp=no_mtp, no_vision=no_vision
    )
    planned = make_plan(options)
    if as_json:
        _print_json(to_json(planned))
    else:
        typer.echo(render(planned))
    return _problem_code(planned)


# Problems of the output are usage (2) or storage (3), and so are those of an option (2); any of the source gives 1.
_OUTPUT_PROBLEMS = {
    "output-exists": UsageError.exit_code,
    "output-is-link": UsageError.exit_code,
    "output-is-folder": UsageError.exit_code,
    "output-not-a-file": UsageError.exit_code,
    "output-in-source": UsageError.exit_code,
    "no-output-folder": UsageError.exit_code,
    "read-only-output": StorageError.exit_code,
    "disk-space": StorageError.exit_code,
}


def _problem_code(planned: "ConversionPlan") -> int:
    def code_of(problem: "Problem") -> int:
        option = problem.where.startswith("--")
        return _OUTPUT_PROBLEMS.get(problem.code, UsageError.exit_code if option else SourceError.exit_code)

    return min(map(code_of, planned.problems), default=0)


# --- build ----------------------------------------------------------------------------------------------------------


@app.command()
def build(
    source: Source,
    out: Out,
    identity: IdentityText = None,
    recipe: Recipe = None,
    model_id: ModelId = None,
    dflash: Dflash = None,
    ranking: Ranking = None,
    no_mtp: NoMtp = False,
    no_vision: NoVision = False,
    device: Device = "cpu",
    jobs: Jobs = 0,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Convert SOURCE and write OUT with its report; OUT appears only when it is complete."""
    from ninfer_convert.pipeline import build as build_artifact
    from ninfer_convert.pipeline import finish_published
    from ninfer_convert.plan import make_plan
    from ninfer_convert.plan_view import render_problems

    if resume and finish_published(out):
        _print_finished(out, as_json=as_json, quiet=quiet)
        return 0
    options = _options(
        source,
        identity,
        recipe,
        model_id,
        dflash,
        ranking,
        device,
        jobs,
        out=out,
        no_mtp=no_mtp,
        no_vision=no_vision,
        resume=resume,
        force=force,
    )
    planned = make_plan(options)
    if planned.problems or planned.target is None:
        sys.stderr.write("\n".join(render_problems(planned.problems)) + "\n")
        return _problem_code(planned)
    payload_bytes = sum(entry.n_bytes for entry in planned.target.inventory.objects)
    try:
        with progress_bytes(payload_bytes, "building", quiet=quiet) as advance:
            result = build_artifact(planned, progress=advance)
    except (KeyboardInterrupt, StorageError):
        _say_resumable(out)
        raise
    if as_json:
        _print_json(_build_json(planned, result))
    elif not quiet:
        typer.echo(_build_text(planned, result))
    return 0


def _say_resumable(out: Path) -> None:
    from ninfer_convert.journal import journal_of

    if journal_of(out).exists():
        sys.stderr.write(f"{out}: not finished; run the same command with --resume to continue\n")


def _print_finished(out: Path, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        _print_json({"schema": BUILD_SCHEMA, "path": str(out), "bytes": out.stat().st_size, "already_complete": True})
    elif not quiet:
        typer.echo(f"{out}: was already complete")


def _megabytes_per_second(result: "BuildResult") -> float:
    return result.source_bytes / 1e6 / max(result.elapsed_seconds, 1e-9)


def _build_json(planned: "ConversionPlan", result: "BuildResult") -> dict[str, Any]:
    target = planned.require()
    return {
        "schema": BUILD_SCHEMA,
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
        "memory_bytes": planned.memory_bytes,
        "notes": list(result.notes),
        "already_complete": False,
    }


def _build_text(planned: "ConversionPlan", result: "BuildResult") -> str:
    target = planned.require()
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


# --- the other commands, a module each -------------------------------------------------------------------------------

for command in (export,):
    command.register(app)


def main() -> NoReturn:
    """Entry point of ``ninfer-convert``."""
    run_cli(app)
