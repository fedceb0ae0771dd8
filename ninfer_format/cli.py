"""The command ``ninfer-verify``: check, index, show, sums, inventory, migrate (specs/verify.md).

Each function parses, calls one library function, prints what it returns, and returns its exit code.
"""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from ninfer_format.command import progress_bytes, run_cli
from ninfer_format.errors import InventoryError, NinferError, StorageError, UsageError

if TYPE_CHECKING:
    from ninfer_format.verifier import Level, Problem, Report

CHECK_SCHEMA = "ninfer.check/1"
INDEX_REPORT_SCHEMA = "ninfer.index-report/1"
SUMS_SCHEMA = "ninfer.sums/1"
INVENTORY_SCHEMA = "ninfer.inventory/1"
MIGRATE_SCHEMA = "ninfer.migrate/1"
_SHOWN_PROBLEMS = 20
_SEVERITY = (3, 2, 1, 4)  # several files: the first of these that any of them has

app = typer.Typer(
    name="ninfer-verify",
    help="Check, index, show and migrate .ninfer files.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", show_default=False)]
OneFile = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Threads; all cores by default.")]

T = TypeVar("T")


def printable(text: object) -> str:
    """Text for a terminal: control characters and undecodable bytes of file names become escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))


def _worst(codes: Sequence[int]) -> int:
    return next((code for code in _SEVERITY if code in codes), 0)


def _each(paths: Sequence[Path], work: Callable[[Path], T]) -> Iterator[tuple[Path, T | NinferError]]:
    """``work`` on every file, one result at a time; a file that cannot be read does not stop the others."""
    for path in paths:
        try:
            result: T | NinferError = work(path)
        except NinferError as error:
            result = error
        except OSError as error:
            result = StorageError(f"{path}: {error.strerror or error}")
        yield path, result


# --- check ----------------------------------------------------------------------------------------------------------


def _level(level: str | None, *, full: bool) -> "Level":
    from ninfer_format.verifier import LEVELS

    if level is None:
        return "full" if full else "structure"
    for known in LEVELS:
        if level == known:
            if full and known != "full":
                raise UsageError(f"--level {level} cannot go with an option that hashes the file; run them one by one")
            return known
    raise UsageError(f"--level {level} is not one of {', '.join(LEVELS)}")


def _index_for(path: Path, index: Path | None, *, wanted: bool, required: bool) -> Path | None:
    """The index to use: the named one, else FILE.idx where it is wanted and exists."""
    from ninfer_format.digests import index_path

    if index is not None or not wanted:
        return index
    beside = index_path(path)
    if required and not beside.exists():
        raise UsageError(f"{path}: --partial needs an index, and there is no {beside.name}; name one with --index")
    return beside if beside.exists() else None


def _problem_text(problem: "Problem") -> str:
    where = "" if problem.byte_range is None else f" (file bytes {problem.byte_range[0]} to {problem.byte_range[1]})"
    text = printable(problem.message)
    return f"[{problem.code}] {text}{'' if 'file bytes' in text else where}"


def _report_text(report: "Report") -> str:
    lines = [f"{printable(report.path)}: {'OK' if report.ok else 'FAILED'}"]
    rows: list[tuple[str, str]] = [("problem", _problem_text(p)) for p in report.problems[:_SHOWN_PROBLEMS]]
    if len(report.problems) > _SHOWN_PROBLEMS:
        rows.append(("problem", f"and {len(report.problems) - _SHOWN_PROBLEMS} more; --json lists all"))
    if report.identity is not None:
        rows.append(("identity", printable(report.identity)))
    rows.append(("size", f"{report.file_bytes:,} bytes"))
    label = f" ({report.known_as}, verified)" if report.known_as and report.ok else ""
    if report.sha256 is not None:
        rows.append(("sha256", report.sha256 + label))
    elif report.recorded_sha256 is not None:
        rows.append(("sha256", f"{report.recorded_sha256}{label}, recorded in the index"))
    rows.append(("checked", ", ".join(report.checked) or "nothing"))
    rows.append(("not checked", ", ".join(report.not_checked) or "nothing left"))
    return "\n".join([*lines, *(f"  {name:<12} {printable(text)}" for name, text in rows)])


def _report_json(path: Path, report: "Report | NinferError") -> dict[str, Any]:
    if isinstance(report, NinferError):
        name = type(report).__name__.removesuffix("Error").lower()
        problem = {"code": name, "message": str(report), "object": None, "bytes": None}
        return {"path": str(path), "ok": False, "exit_code": report.exit_code, "problems": [problem]}
    return {
        "path": str(path),
        "ok": report.ok,
        "exit_code": report.exit_code,
        "level": report.level,
        "identity": str(report.identity) if report.identity else None,
        "file_bytes": report.file_bytes,
        "sha256": report.sha256,
        "recorded_sha256": report.recorded_sha256,
        "known_as": report.known_as,
        "checked": list(report.checked),
        "not_checked": list(report.not_checked),
        "problems": [
            {"code": p.code, "message": p.message, "object": p.object, "bytes": list(p.byte_range or ()) or None}
            for p in report.problems
        ],
    }


@app.command()
def check(
    files: Files,
    level: Annotated[
        str | None, typer.Option(help="header, structure (default), full or numeric.", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Same as --level full: hash every byte.")] = False,
    sums: Annotated[
        Path | None, typer.Option(metavar="SHA256SUMS", help="Hash and compare with this list of sha256sum.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also refuse stray bytes, loose packing and look-alike names.")
    ] = False,
    index: Annotated[Path | None, typer.Option(metavar="PATH", help="Use this index instead of FILE.idx.")] = None,
    no_index: Annotated[
        bool, typer.Option("--no-index", help="Ignore FILE.idx: hash the whole file in one pass.")
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Check the chunks that an unfinished download already has.")
    ] = False,
    jobs: Jobs = None,
    as_json: Json = False,
) -> int:
    """Check files; says what was and what was not checked.

    Exit code 0: good. 1: something is wrong. 3: reading failed. 4: a version or format this release does not support.
    """
    from ninfer_format.sums import digest_for, read_sums
    from ninfer_format.verifier import verify

    if no_index and (index is not None or partial):
        raise UsageError("--no-index cannot go with --index or --partial")
    if partial and (sums is not None or full or level is not None or strict):
        raise UsageError("--partial checks downloaded chunks only; leave out --sums, --full, --level and --strict")
    if index is not None and len(files) > 1:
        raise UsageError("--index names the index of one file; check the files one by one")
    chosen = _level(level, full=full or sums is not None or index is not None)
    entries = read_sums(sums) if sums is not None else []

    def one(path: Path) -> "Report":
        return verify(
            path,
            chosen,
            strict=strict,
            index=_index_for(path, index, wanted=(chosen == "full" or partial) and not no_index, required=partial),
            partial=partial,
            expected_sha256=digest_for(path, entries, sums) if sums is not None else None,
            jobs=jobs,
            progress=progress_bytes,
        )

    reports: list[dict[str, Any]] = []
    codes: list[int] = []
    for path, result in _each(files, one):
        codes.append(result.exit_code)
        if as_json:
            reports.append(_report_json(path, result))
        elif isinstance(result, NinferError):
            typer.echo(f"{printable(path)}: FAILED\n  problem      {printable(result)}")
        else:
            typer.echo(_report_text(result))
    code = _worst(codes)
    if as_json:
        _print_json({"schema": CHECK_SCHEMA, "ok": code == 0, "files": reports})
    return code


# --- index, sums ----------------------------------------------------------------------------------------------------


@app.command("index")
def make_index(
    file: OneFile,
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="Write here instead of FILE.idx.")] = None,
    jobs: Jobs = None,
    as_json: Json = False,
) -> int:
    """Write FILE.idx: digests of the file, its objects and its chunks, for parallel and partial checks."""
    from ninfer_format.digests import build_index, index_path, write_index

    index = build_index(file, jobs=jobs, progress=progress_bytes)
    target = out or index_path(file)
    if target.exists() and target.samefile(file):
        raise UsageError(f"{target}: is the file itself; choose another name for the index")
    size = write_index(index, target)
    if as_json:
        _print_json(
            {
                "schema": INDEX_REPORT_SCHEMA,
                "path": str(file),
                "index": str(target),
                "index_bytes": size,
                "file_bytes": index.file_bytes,
                "sha256": index.sha256.hex(),
                "directory_sha256": index.directory_sha256.hex(),
                "chunks": len(index.chunk_sha256),
                "objects": index.object_sha256(),
            }
        )
        return 0
    typer.echo(
        f"{printable(target)}: {size:,} bytes for a file of {index.file_bytes:,} bytes, "
        f"{len(index.chunk_sha256)} chunks, {len(index.directory.objects)} objects\nsha256 {index.sha256.hex()}"
    )
    return 0


@app.command()
def sums(files: Files, jobs: Jobs = None, as_json: Json = False) -> int:
    """Print SHA-256 lines as sha256sum does, fit for --sums and for sha256sum -c."""
    from ninfer_format.hashing import parallel, sha256_file
    from ninfer_format.sums import sums_line

    stop = threading.Event()
    with progress_bytes(sum(path.stat().st_size for path in files if path.is_file()), "sha256") as advance:

        def tick(n_bytes: int) -> None:
            if stop.is_set():
                raise UsageError("interrupted")
            advance(n_bytes)

        def one(path: Path) -> str | NinferError:
            hashed = _each([path], lambda path: sha256_file(path, lambda total, what: nullcontext(tick)))
            return next(hashed)[1]

        results = list(parallel(one, files, jobs, stop))
    code = _worst([result.exit_code for result in results if isinstance(result, NinferError)])
    if as_json:
        rows = [
            {"path": str(path), "sha256": None, "error": str(result)}
            if isinstance(result, NinferError)
            else {"path": str(path), "sha256": result}
            for path, result in zip(files, results, strict=True)
        ]
        _print_json({"schema": SUMS_SCHEMA, "files": rows})
        return code
    for path, result in zip(files, results, strict=True):
        if isinstance(result, NinferError):
            typer.echo(f"error: {printable(result)}", err=True)
        else:
            typer.echo(sums_line(result, path), nl=False)
    return code


# --- show, inventory ------------------------------------------------------------------------------------------------


def _can_draw() -> bool:
    try:
        "█▏×".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return os.environ.get("TERM") != "dumb"


@app.command()
def show(
    file: OneFile,
    objects: Annotated[bool, typer.Option("--objects", help="Also list every object.")] = False,
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option(metavar="OUT", help="Write a treemap as one HTML page.")] = None,
) -> int:
    """Show identity, sizes by component and format, and where the bytes are."""
    from ninfer_format.reader import Artifact
    from ninfer_format.show import overview, render, to_json

    with Artifact.open(file) as artifact:
        shown = overview(artifact)
    if html is not None:
        from ninfer_format.treemap import html_page
        from ninfer_format.writer import write_atomically

        if html.exists() and html.samefile(file):
            raise UsageError(f"{html}: is the artifact itself; choose another name for the page")
        write_atomically(html, html_page(shown).encode())
    if as_json:
        _print_json(to_json(shown, with_objects=objects))
        return 0
    width = shutil.get_terminal_size((100, 24)).columns
    text = render(shown, width=width, ascii_only=not _can_draw(), with_objects=objects)
    typer.echo("\n".join(printable(line) for line in text.split("\n")))
    if html is not None:
        typer.echo(f"treemap written to {printable(html)}")
    return 0


@app.command()
def inventory(
    identity: Annotated[str, typer.Argument(metavar="IDENTITY", help="e.g. qwen3.6-27b/groupwise-int")],
    objects: Annotated[
        bool, typer.Option("--objects/--no-objects", help="List the objects in order, or only the totals.")
    ] = True,
    as_json: Json = False,
) -> int:
    """Print the planned contents of a published artifact: objects in order, file bytes, directory digest."""
    from ninfer_format.directory import entry_members
    from ninfer_format.inventory import plan_inventory
    from ninfer_format.published import published
    from ninfer_format.show import format_of

    try:
        row = published(identity)
    except InventoryError as error:
        raise UsageError(str(error)) from None
    planned = plan_inventory(row.identity)
    version_1 = None
    if row.v1 is not None:
        text = planned.directory_v1_json
        version_1 = {"json_bytes": len(text), "directory_sha256": planned.directory_v1_sha256}
    if as_json:
        document: dict[str, Any] = {
            "schema": INVENTORY_SCHEMA,
            "identity": str(row.identity),
            "file_name": row.file_name,
            "file_bytes": planned.file_bytes,
            "payload_offset": planned.payload_offset,
            "payload_bytes": planned.payload_bytes,
            "json_bytes": len(planned.directory_json),
            "directory_sha256": planned.directory_sha256,
            "version_1": version_1,
        }
        if objects:
            document["objects"] = [entry_members(entry) for entry in planned.objects]
        _print_json(document)
        return 0
    if objects:
        lines = []
        for entry in planned.objects:
            shape = "x".join(map(str, getattr(entry, "shape", ()))) or "-"
            lines.append(f"{entry.offset:>14} {entry.n_bytes:>13} {format_of(entry):<12} {shape:<16} {entry.name}")
        typer.echo("\n".join([f"{'offset':>14} {'bytes':>13} {'format':<12} {'shape':<16} name", *lines]))
    typer.echo(
        f"identity         {row.identity} ({row.file_name})\n"
        f"objects          {len(planned.objects)}: {len(planned.tensors)} tensors, {len(planned.resources)} resources\n"
        f"file bytes       {planned.file_bytes:,}\n"
        f"payload offset   {planned.payload_offset:,}\n"
        f"directory        {len(planned.directory_json):,} bytes, sha256 {planned.directory_sha256}"
    )
    if version_1 is not None:
        typer.echo(f"version 1        {version_1['json_bytes']:,} bytes, sha256 {version_1['directory_sha256']}")
    return 0


# --- migrate --------------------------------------------------------------------------------------------------------


@app.command()
def migrate(
    file: OneFile,
    identity: Annotated[
        str | None, typer.Option(metavar="M/W", help="What a version-1 file that was never published becomes.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Make every check, change nothing.")] = False,
    copy: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write a new file; needed where the header has no room.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Turn a version-1 file into version 2, in place (crash-safe) or as a copy.

    A valid version-2 file is left alone (exit code 0); version 3 and later end with 4.
    """
    from ninfer_format.migration import migrate as run

    done = run(file, identity=identity, dry_run=dry_run, copy=copy, progress=progress_bytes)
    if as_json:
        _print_json(
            {
                "schema": MIGRATE_SCHEMA,
                "path": str(done.path),
                "output": str(done.output),
                "action": done.action,
                "identity": str(done.identity),
                "payload_offset": done.payload_offset,
                "file_bytes": done.file_bytes,
                "version_1_sha256": done.sha256_v1,
                "notes": list(done.notes),
            }
        )
        return 0
    where = f" to {printable(done.output)}" if done.output != done.path else ""
    typer.echo(f"{printable(done.path)}: {done.action}{where} ({printable(done.identity)}, {done.file_bytes:,} bytes)")
    for note in done.notes:
        typer.echo(f"  {printable(note)}")
    return 0


def main() -> NoReturn:
    """Entry point of ``ninfer-verify``."""
    run_cli(app)
