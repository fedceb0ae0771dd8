"""``ninfer-convert export``: an artifact back to a checkpoint folder."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ninfer_format.command import progress_bytes
from ninfer_format.errors import UsageError

if TYPE_CHECKING:
    from ninfer_convert.export import ExportPlan, ExportResult

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([A-Za-z]*)")

File = Annotated[Path, typer.Argument(metavar="ARTIFACT", show_default=False, help="The .ninfer file to read.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="The folder to write.")]
DtypeOption = Annotated[
    Literal["bfloat16", "float32"],
    typer.Option("--dtype", help="Of the weights; float32 keeps decoded values exactly, at twice the size."),
]
ShardSize = Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="Most data in one file, e.g. 5GB, 500MB.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a folder that an earlier export has written.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Worker threads; 0 = one per CPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="export")(export)


def export(
    artifact: File,
    folder: Folder,
    dtype: DtypeOption = "bfloat16",
    shard_size: ShardSize = "5GB",
    force: Force = False,
    jobs: Jobs = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Write ARTIFACT as a checkpoint folder that Hugging Face libraries load; DIR appears only when it is complete."""
    from ninfer_convert.export import ExportOptions, plan_export
    from ninfer_convert.export import export as write_folder
    from ninfer_format import Artifact

    options = ExportOptions(folder, dtype, size_in_bytes(shard_size), force, jobs)
    with Artifact.open(artifact) as opened:
        planned = plan_export(opened, options)
        with progress_bytes(planned.weight_bytes, "exporting", quiet=quiet or as_json) as advance:
            result = write_folder(planned, progress=advance)
        if as_json:
            typer.echo(json.dumps(_document(planned, result), indent=2))
        elif not quiet:
            typer.echo(_text(planned, result))
    return 0


def size_in_bytes(text: str) -> int:
    """``5GB`` → 5000000000; UsageError for anything that is not a positive size."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS or int(match[1]) == 0:
        raise UsageError(f"--shard-size {text}: expected a positive size like 5GB, 500MB or 4GiB")
    return int(match[1]) * _UNITS[unit]


def _document(planned: "ExportPlan", result: "ExportResult") -> dict[str, Any]:
    from ninfer_convert.export import report_of

    return {**report_of(planned), "path": str(result.path), "elapsed_seconds": round(result.elapsed_seconds, 3)}


def _text(planned: "ExportPlan", result: "ExportResult") -> str:
    rate = planned.weight_bytes / 1e6 / max(result.elapsed_seconds, 1e-9)
    return "\n".join(
        [
            f"{result.path}: {result.n_tensors} tensors in {len(result.files)} files, {result.output_bytes:,} bytes",
            f"time       {result.elapsed_seconds:.1f} s, {rate:,.0f} MB/s",
            *(f"note       {note}" for note in result.notes),
        ]
    )
