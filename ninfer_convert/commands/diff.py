"""``ninfer-convert diff``: how two artifacts differ."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ninfer_format.command import progress_bytes

if TYPE_CHECKING:
    from ninfer_convert.diff import Comparison, Difference, Side

SCHEMA = "ninfer.diff/1"
SHOWN = 40

First = Annotated[Path, typer.Argument(metavar="A", show_default=False, help="A .ninfer file, taken as the truth.")]
Second = Annotated[Path, typer.Argument(metavar="B", show_default=False, help="The .ninfer file to compare with it.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Worker threads; 0 = one per CPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document with every difference.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code says it.")]

_PHRASES = {
    "bytes": "same values, other bytes",
    "format": "same values in another format",
    "values": "other values",
    "content": "other content",
    "shape": "another shape",
    "kind": "a tensor in one, a resource in the other",
    "only-first": "only in A",
    "only-second": "only in B",
}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="diff")(diff)


def diff(first: First, second: Second, jobs: Jobs = 0, as_json: Json = False, quiet: Quiet = False) -> int:
    """Compare the artifacts A and B object by object; exit 0 if they are equal, 1 if not."""
    from ninfer_convert.diff import diff as compare
    from ninfer_format import Artifact

    with Artifact.open(first) as a, Artifact.open(second) as b:
        total = sum(entry.n_bytes for entry in a.objects)
        with progress_bytes(total, "comparing", quiet=quiet or as_json) as advance:
            found = compare(a, b, jobs=jobs, progress=advance)
    if as_json:
        typer.echo(json.dumps(document(found), indent=2, allow_nan=False))
    elif not quiet:
        typer.echo("\n".join(_lines(found)))
    return 0 if found.equal else 1


def document(found: "Difference") -> dict[str, Any]:
    """The JSON document: every object that is not equal, every compared checkpoint tensor."""
    statuses = ("equal", *_PHRASES)
    return {
        "schema": SCHEMA,
        "equal": found.equal,
        "first": _side(found.first),
        "second": _side(found.second),
        "counts": {status: sum(c.status == status for c in found.objects) for status in statuses},
        "objects": [_row(c) for c in found.objects if c.status != "equal"],
        "tensors": [_row(c) for c in found.tensors],
    }


def _side(side: "Side") -> dict[str, Any]:
    return {"path": str(side.path), "identity": str(side.identity), "bytes": side.file_bytes}


def _row(comparison: "Comparison") -> dict[str, Any]:
    """JSON has no infinity: an error that is not finite is null."""
    row = asdict(comparison)
    if comparison.errors is not None:
        row["errors"] = {k: v if math.isfinite(v) else None for k, v in asdict(comparison.errors).items()}
    return row


def _lines(found: "Difference") -> Iterator[str]:
    for label, side in (("A", found.first), ("B", found.second)):
        yield f"{label}  {side.path}: {side.identity}, {side.file_bytes:,} bytes"
    if found.equal:
        yield f"equal: {len(found.objects)} objects, byte for byte"
        return
    if found.first.identity != found.second.identity:
        yield f"identity: {found.first.identity} and {found.second.identity}"
    counts = {status: sum(c.status == status for c in found.objects) for status in ("equal", *_PHRASES)}
    parts = [f"{counts['equal']} equal", *(f"{n} {_PHRASES[s]}" for s, n in counts.items() if n and s != "equal")]
    yield f"{len(found.objects)} objects: " + ", ".join(parts)
    yield from _table("objects", [c for c in found.objects if c.status != "equal"])
    yield from _table("checkpoint tensors in objects of one side alone", found.tensors)


def _table(title: str, rows: Sequence["Comparison"]) -> Iterator[str]:
    """Rows in stored order; of many, those with the largest relative errors."""
    if not rows:
        return
    shown = list(rows)
    if len(rows) > SHOWN:
        worst = sorted(range(len(rows)), key=lambda i: -(e.relative if (e := rows[i].errors) else 0.0))[:SHOWN]
        shown = [rows[i] for i in sorted(worst)]
    yield f"{title}: max, rms and relative error of B"
    for c in shown:
        formats = c.first if c.first == c.second else f"{c.first or '-'} → {c.second or '-'}"
        if c.errors is not None and c.errors.n_different:
            numbers = f"{c.errors.max:9.3g} {c.errors.rms:9.3g} {c.errors.relative:9.3g}"
        else:
            numbers = f"{'=' if c.errors is not None or c.status == 'equal' else '-':>9}" * 3
        phrase = "" if c.status == "values" else _PHRASES.get(c.status, c.status)
        yield f"  {numbers}  {c.name}  {formats}  {phrase}".rstrip()
    if len(rows) > SHOWN:
        yield f"  and {len(rows) - SHOWN} more with smaller errors; --json lists all"
