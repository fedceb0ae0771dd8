"""The command ``ninfer-convert``: plan and build (specs/convert-cli.md).

Each function parses, calls one library function, prints what it returns, and returns its exit code.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from ninfer_convert.commands import check, diff, export, publish, rank, set_id, set_template
from ninfer_format.command import run_cli

if TYPE_CHECKING:
    from ninfer_convert.plan import BuildOptions

app = typer.Typer(
    name="ninfer-convert",
    help="Turn a checkpoint folder into one .ninfer file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Source = Annotated[
    Path,
    typer.Argument(metavar="SOURCE", show_default=False, help="Checkpoint folder, hf://org/name, or a .gguf file."),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="The .ninfer file to write.")]
IdentityText = Annotated[
    str | None,
    typer.Option("--identity", metavar="M/W", help="Published identity that the output must be, or a custom one."),
]
Recipe = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="groupwise-int (default), bf16, w8, nvfp4, or a TOML file of a mixed one."),
]
ModelId = Annotated[str | None, typer.Option("--model-id", metavar="ID", help="Model id of a custom artifact.")]
Dflash = Annotated[Path | None, typer.Option("--dflash", metavar="DIR", help="Folder of the DFlash companion.")]
Base = Annotated[
    Path | None, typer.Option("--base", metavar="DIR", help="BF16 checkpoint beside a SOURCE stored as NVFP4.")
]
MethodName = Annotated[
    Literal["max", "mse", "canonical"],
    typer.Option("--method", help="Scales from largest magnitudes (max, canonical), or searched for (mse)."),
]
Stats = Annotated[
    Path | None, typer.Option("--activation-stats", metavar="FILE", help="What `ninfer-run calibrate` wrote.")
]
FrontendFolder = Annotated[
    Path | None,
    typer.Option("--frontend", metavar="DIR", help="Folder of tokenizer and template; needed beside a GGUF file."),
]
Ranking = Annotated[
    Path | None,
    typer.Option("--ranking", metavar="FILE", help="Token counts, or a .ninfer file whose draft head ids to take."),
]
NoMtp = Annotated[bool, typer.Option("--no-mtp", help="Leave the MTP draft layer out.")]
NoVision = Annotated[bool, typer.Option("--no-vision", help="Leave image and video input out.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to quantize; the bytes are the same.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Worker threads; 0 = one per CPU.")]
Values = Annotated[
    bool, typer.Option("--values", help="Also compare what NVFP4 folder and base both hold, and their global scales.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print events as JSON lines; the last is the result, with --quiet the only one.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output; start an unfinished build again.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an unfinished build of this output.")]
Publish = Annotated[
    bool, typer.Option("--publish", help="Also write MODEL_CARD.md, artifact-manifest.json and SHA256SUMS beside OUT.")
]
Plots = Annotated[Path | None, typer.Option("--plots", metavar="DIR", help="Also draw errors and sizes into DIR.")]
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
    frontend: FrontendFolder = None,
    base: Base = None,
    dflash: Dflash = None,
    ranking: Ranking = None,
    method: MethodName = "max",
    activation_stats: Stats = None,
    no_mtp: NoMtp = False,
    no_vision: NoVision = False,
    device: Device = "cpu",
    jobs: Jobs = 0,
    values: Values = False,
    as_json: Json = False,
) -> int:
    """Show what a build would write and need, and every problem at once; reads headers only."""
    from ninfer_convert.commands.problem_codes import problem_code
    from ninfer_convert.plan import make_plan
    from ninfer_convert.plan_view import render, to_json
    from ninfer_convert.source_values import with_values

    options = _options(
        source,
        identity,
        recipe,
        model_id,
        dflash,
        ranking,
        device,
        jobs,
        frontend=frontend,
        base=base,
        method=method,
        activation_stats=activation_stats,
        no_mtp=no_mtp,
        no_vision=no_vision,
        headers_only=not values,
    )
    planned = make_plan(options)
    if values and not planned.problems and planned.target is not None:
        planned = with_values(planned)
    if as_json:
        _print_json(to_json(planned))
    else:
        typer.echo(render(planned))
    return problem_code(planned)


# --- build ----------------------------------------------------------------------------------------------------------


@app.command()
def build(
    source: Source,
    out: Out,
    identity: IdentityText = None,
    recipe: Recipe = None,
    model_id: ModelId = None,
    frontend: FrontendFolder = None,
    base: Base = None,
    dflash: Dflash = None,
    ranking: Ranking = None,
    method: MethodName = "max",
    activation_stats: Stats = None,
    no_mtp: NoMtp = False,
    no_vision: NoVision = False,
    device: Device = "cpu",
    jobs: Jobs = 0,
    resume: Resume = False,
    force: Force = False,
    with_publish: Publish = False,
    plots: Plots = None,
    as_json: JsonLines = False,
    quiet: Quiet = False,
) -> int:
    """Convert SOURCE and write OUT with its report; OUT appears only when it is complete."""
    from ninfer_convert.commands.build import Extras, Told, run

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
        frontend=frontend,
        base=base,
        method=method,
        activation_stats=activation_stats,
        no_mtp=no_mtp,
        no_vision=no_vision,
        resume=resume,
        force=force,
    )
    return run(options, out, Told(as_json, quiet), Extras(with_publish, plots))


# --- the other commands, a module each -------------------------------------------------------------------------------

for command in (check, diff, export, publish, rank, set_id, set_template):
    command.register(app)


def main() -> NoReturn:
    """Entry point of ``ninfer-convert``."""
    run_cli(app)
