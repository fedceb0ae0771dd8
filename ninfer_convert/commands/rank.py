"""``ninfer-convert rank``: the ranking of a draft head from a corpus."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ninfer_format.command import progress_bytes
from ninfer_format.errors import UsageError

if TYPE_CHECKING:
    from ninfer_convert.ranking import RankedCorpus

Texts = Annotated[
    list[Path], typer.Argument(metavar="TEXT...", show_default=False, help='UTF-8 text, or .jsonl with "text" members.')
]
Tokenizer = Annotated[
    Path,
    typer.Option("--tokenizer", metavar="DIR|ARTIFACT", show_default=False, help="Whose tokenizer to use."),
]
Out = Annotated[Path, typer.Option("--out", metavar="COUNTS", show_default=False, help="The counts file to write.")]
VocabRows = Annotated[
    int | None, typer.Option("--vocab-rows", metavar="N", min=1, help="Rows of the vocabulary, if no config says it.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Threads; 0 = one per CPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="rank")(rank)


def rank(
    texts: Texts,
    tokenizer: Tokenizer,
    out: Out,
    vocab_rows: VocabRows = None,
    force: Force = False,
    jobs: Jobs = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Count the tokens of TEXT... for `build --ranking`: totals, then (of several texts) one row per text."""
    from ninfer_convert.ranking import load_vocabulary, use_threads
    from ninfer_convert.ranking import rank as count
    from ninfer_format.writer import write_atomically

    _check_output(out, force=force)
    sizes = [_size(path) for path in texts]
    use_threads(jobs)
    started = monotonic()
    vocabulary = load_vocabulary(tokenizer, vocab_rows)
    with progress_bytes(sum(sizes), "counting", quiet=quiet or as_json) as advance:
        ranked = count(texts, vocabulary, progress=advance)
    content = ranked.table.astype("<i8").tobytes()
    write_atomically(out, content)
    report = document(ranked, out, content, monotonic() - started)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    elif not quiet:
        typer.echo("\n".join(_lines(report)))
    return 0


def _check_output(out: Path, *, force: bool) -> None:
    if out.is_symlink() or (out.exists() and not out.is_file()):
        raise UsageError(f"{out}: is a link or not a regular file; choose another output name")
    if out.exists() and not force:
        raise UsageError(f"{out}: exists; choose another name, or pass --force to replace it")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder for the output; create it")


def _size(path: Path) -> int:
    if not path.is_file():
        raise UsageError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    return path.stat().st_size


def document(ranked: "RankedCorpus", out: Path, content: bytes, elapsed_seconds: float) -> dict[str, Any]:
    """The JSON document: what was counted and how much of it the most frequent ids cover."""
    from ninfer_convert.ranking import SCHEMA

    vocabulary, (whole, *shares) = ranked.vocabulary, ranked.draft_head_shares()
    return {
        "schema": SCHEMA,
        "path": str(out),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "vocab_rows": vocabulary.vocab_rows,
        "token_ids": vocabulary.n_ids,
        "tokens": ranked.n_tokens,
        "distinct": int((ranked.totals > 0).sum()),
        "coverage": [{"ids": n, "share": share} for n, share in ranked.coverage()],
        "draft_head": {"rows": vocabulary.draft_rows, "special": len(vocabulary.forced), "share": whole},
        "texts": [
            {
                "name": stratum.name,
                "bytes": stratum.n_bytes,
                "tokens": int(stratum.counts.sum()),
                "distinct": int((stratum.counts > 0).sum()),
                "draft_head_share": share,
                "cuts_inside_words": stratum.n_hard_cuts,
            }
            for stratum, share in zip(ranked.strata, shares, strict=True)
        ],
        "elapsed_seconds": round(elapsed_seconds, 3),
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    n_bytes = sum(text["bytes"] for text in report["texts"])
    rows = 1 + (len(report["texts"]) if len(report["texts"]) > 1 else 0)
    yield f"{report['path']}: {rows} rows of {report['vocab_rows']} counts, {report['bytes']:,} bytes"
    rate = n_bytes / 1e6 / max(report["elapsed_seconds"], 1e-9)
    distinct = f"{report['tokens']:,} tokens ({report['distinct']:,} distinct)"
    yield f"counted    {distinct} in {n_bytes:,} bytes, {rate:.1f} MB/s"
    yield "covered    by the most frequent ids: " + ", ".join(
        f"{row['ids']:,} {100 * row['share']:.2f} %" for row in report["coverage"]
    )
    head = report["draft_head"]
    yield f"draft head {head['rows']:,} rows with {head['special']} special ones cover {100 * head['share']:.3f} %"
    for text in report["texts"]:
        cuts = f", cut inside words at {text['cuts_inside_words']} places" if text["cuts_inside_words"] else ""
        yield f"  {text['name']}: {text['tokens']:,} tokens, {100 * text['draft_head_share']:.3f} %{cuts}"
