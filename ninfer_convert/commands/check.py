"""``ninfer-convert check``: whether an artifact is what its checkpoint gives."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ninfer_format.command import progress_bytes

if TYPE_CHECKING:
    from ninfer_convert.check import CheckResult

SCHEMA = "ninfer.check/1"
SHOWN = 40

ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", show_default=False, help="The .ninfer file.")]
Source = Annotated[
    Path, typer.Option("--source", metavar="DIR", show_default=False, help="The checkpoint that it was made from.")
]
FrontendFolder = Annotated[
    Path | None, typer.Option("--frontend", metavar="DIR", help="The folder of frontend files that it was built with.")
]
Base = Annotated[Path | None, typer.Option("--base", metavar="DIR", help="The BF16 checkpoint beside an NVFP4 source.")]
Dflash = Annotated[Path | None, typer.Option("--dflash", metavar="DIR", help="Folder of the DFlash companion.")]
Ranking = Annotated[
    Path | None, typer.Option("--ranking", metavar="FILE", help="Also compare the draft head ids with this ranking's.")
]
MethodName = Annotated[
    Literal["max", "mse", "canonical"] | None,
    typer.Option("--method", help="How it was encoded; by default found out from the first matrices."),
]
Stats = Annotated[
    Path | None, typer.Option("--activation-stats", metavar="FILE", help="The statistics that it was built with.")
]
All = Annotated[bool, typer.Option("--all", help="Compare every row instead of a sample.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to encode; the bytes are the same.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Worker threads; 0 = one per CPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document with every difference.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code says it.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="check")(check)


def check(
    artifact: ArtifactPath,
    source: Source,
    frontend: FrontendFolder = None,
    base: Base = None,
    dflash: Dflash = None,
    ranking: Ranking = None,
    method: MethodName = None,
    activation_stats: Stats = None,
    everything: All = False,
    device: Device = "cpu",
    jobs: Jobs = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Encode the checkpoint again and compare it with ARTIFACT; exit 0 if they agree, 1 if not."""
    from ninfer_convert.check import CheckOptions
    from ninfer_convert.check import check as compare

    options = CheckOptions(
        artifact, source, base, dflash, ranking, method, activation_stats, frontend, everything, device, jobs
    )
    with progress_bytes(artifact.stat().st_size if artifact.is_file() else 0, "checking", quiet=quiet) as advance:
        result = compare(options, progress=advance)
    if as_json:
        typer.echo(json.dumps(document(options.artifact, result), indent=2))
    elif not quiet:
        typer.echo("\n".join(_lines(options.artifact, result)))
    return 0 if result.equal else 1


def document(path: Path, result: "CheckResult") -> dict[str, Any]:
    """The JSON document."""
    return {
        "schema": SCHEMA,
        "path": str(path),
        "equal": result.equal,
        "identity": result.identity,
        "published": result.published,
        "all": result.everything,
        "method": result.method,
        "objects": result.n_objects,
        "compared_bytes": result.compared_bytes,
        "total_bytes": result.total_bytes,
        "mismatches": [asdict(mismatch) for mismatch in result.mismatches],
        "notes": list(result.notes),
    }


def _lines(path: Path, result: "CheckResult") -> Iterator[str]:
    kind = "published contract" if result.published else "custom artifact"
    yield f"{path}: {result.identity} ({kind}), {result.n_objects} objects"
    scope = "everything" if result.everything else "a sample of rows; --all compares everything"
    yield f"compared   {result.compared_bytes:,} of {result.total_bytes:,} bytes, {scope}; method {result.method}"
    for note in result.notes:
        yield f"note       {note}"
    if result.equal:
        yield "equal: this is what the source gives"
        return
    yield f"{len(result.mismatches)} differences:"
    for mismatch in result.mismatches[:SHOWN]:
        yield f"  - {mismatch}"
    if len(result.mismatches) > SHOWN:
        yield f"  and {len(result.mismatches) - SHOWN} more; --json lists all"
    yield "was it built with another --method, --activation-stats or release?"
