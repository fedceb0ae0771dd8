"""``ninfer-convert set-template``: a copy of an artifact with another chat template."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ninfer_format.command import progress_bytes

if TYPE_CHECKING:
    from ninfer_convert.edit import Edit

In = Annotated[Path, typer.Argument(metavar="IN", show_default=False, help="The .ninfer file to read.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="The .ninfer file to write.")]
Template = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="The Jinja chat template.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output, which may be IN itself.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="set-template")(set_template)


def set_template(
    source: In, out: Out, file: Template, force: Force = False, as_json: Json = False, quiet: Quiet = False
) -> int:
    """Write OUT: the artifact IN with FILE as its chat template; weights are copied byte for byte."""
    from ninfer_convert.edit import plan_template
    from ninfer_format import Artifact

    with Artifact.open(source) as artifact:
        return write_edit(plan_template(artifact, file), out, force=force, as_json=as_json, quiet=quiet)


def write_edit(edit: "Edit", out: Path, *, force: bool, as_json: bool, quiet: bool) -> int:
    """Apply ``edit`` and say what it did."""
    from ninfer_convert.edit import apply, report_of

    with progress_bytes(edit.payload_bytes, "copying", quiet=quiet or as_json) as advance:
        n_bytes = apply(edit, out, force=force, progress=advance)
    report = report_of(edit, out, n_bytes)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    elif not quiet:
        typer.echo(f"{out}: {edit.identity}, {n_bytes:,} bytes")
        for row in report["changed"]:
            done = "left out" if row["bytes"] is None else f"{row['bytes']:,} bytes, sha256 {row['sha256']}"
            typer.echo(f"changed    {row['name']}: {done}")
        for note in edit.notes:
            typer.echo(f"note       {note}")
    return 0
