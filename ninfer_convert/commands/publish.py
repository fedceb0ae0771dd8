"""``ninfer-convert publish``: card, manifest and checksums beside a finished artifact, and pictures of its report."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ninfer_format.command import progress_bytes

File = Annotated[Path, typer.Argument(metavar="ARTIFACT", show_default=False, help="A .ninfer file with its report.")]
Plots = Annotated[Path | None, typer.Option("--plots", metavar="DIR", help="Also draw the report into this folder.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a model card or a manifest that is there.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Hashing threads; 0 = one per CPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="publish")(publish)


def publish(
    artifact: File,
    plots: Plots = None,
    force: Force = False,
    jobs: Jobs = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Write MODEL_CARD.md, artifact-manifest.json and SHA256SUMS beside ARTIFACT, from the report of its build."""
    from ninfer_convert.plots import check_folder, draw
    from ninfer_convert.publish import publish as write_files
    from ninfer_convert.report import report_of
    from ninfer_convert.summaries import read_report

    if plots is not None:
        check_folder(plots)
    report = read_report(report_of(artifact))

    def hashing(total: int, description: str) -> Any:
        return progress_bytes(total, "hashing", quiet=quiet or as_json)

    written = write_files(artifact, report=report, force=force, jobs=jobs or None, progress=hashing)
    drawn = draw(report, plots) if plots is not None else ()
    files = [str(path) for path in (*written.files, *drawn)]
    if as_json:
        document = {"schema": "ninfer.publish/1", "path": str(artifact), "sha256": written.sha256, "files": files}
        typer.echo(json.dumps(document, indent=2))
    elif not quiet:
        typer.echo("\n".join([f"{artifact}: sha256 {written.sha256}", *(f"wrote      {file}" for file in files)]))
    return 0
