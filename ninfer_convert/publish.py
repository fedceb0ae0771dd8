"""What goes with an artifact when it is published: ``MODEL_CARD.md``, ``artifact-manifest.json`` and ``SHA256SUMS``.

Each is written atomically, SHA256SUMS last. Specification: ``specs/publishing.md``.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.card import FILE_NAME as CARD
from ninfer_convert.card import model_card
from ninfer_convert.manifest import FILE_NAME as MANIFEST
from ninfer_convert.manifest import SCHEMA, ArtifactFacts, artifact_manifest
from ninfer_convert.report import report_of
from ninfer_convert.summaries import Report, dump, read_report
from ninfer_format.digests import FileIndex, build_index
from ninfer_format.errors import DigestError, UsageError
from ninfer_format.hashing import Progress, silent
from ninfer_format.published import known_digest
from ninfer_format.sums import read_sums, sums_line
from ninfer_format.writer import write_atomically

SUMS = "SHA256SUMS"


@dataclass(frozen=True, slots=True)
class Publication:
    """What was written: paths, and the digest of the artifact."""

    files: tuple[Path, ...]
    sha256: str


def check_free(artifact: Path, *, card: bytes | None = None, force: bool = False) -> None:
    """UsageError if the folder already has another card, or the manifest of another artifact, unless ``force``.

    ``card`` is what will be written, None while that is not known.
    """
    folder, path = artifact.parent, artifact.parent / CARD
    if force:
        return
    if os.path.lexists(path) and (card is None or not path.is_file() or path.read_bytes() != card):
        raise UsageError(f"{path}: exists and may have been edited; move it away, or pass --force to replace it")
    manifest = folder / MANIFEST
    if os.path.lexists(manifest) and _artifact_named(manifest) != artifact.name:
        raise UsageError(
            f"{manifest}: belongs to another artifact; give every artifact a folder of its own, or pass --force"
        )


def _artifact_named(manifest: Path) -> str | None:
    """The artifact that a manifest is about; None if it is no manifest of ours."""
    with suppress(OSError, ValueError, RecursionError):
        document = json.loads(manifest.read_bytes())
        if isinstance(document, dict) and document.get("schema") == SCHEMA and isinstance(document["artifact"], dict):
            name = document["artifact"].get("file")
            return name if isinstance(name, str) else None
    return None


def publish(
    artifact: Path,
    *,
    report: Report | None = None,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Publication:
    """Hash a finished artifact and write its side files beside it.

    ``report`` is the one beside the artifact unless given. DigestError if it is another artifact's, UsageError for
    files in the way, StorageError from the file system.
    """
    report = report if report is not None else read_report(report_of(artifact))
    index = build_index(artifact, jobs=jobs, progress=progress)
    _check_same(artifact, index, report)
    sha256 = index.sha256.hex()
    facts = ArtifactFacts(artifact.name, index.file_bytes, sha256, len(index.directory_text), known_digest(sha256))
    manifest, card = dump(artifact_manifest(report, facts)), model_card(report, facts).encode()
    check_free(artifact, card=card, force=force)
    folder = artifact.parent
    write_atomically(folder / CARD, card)
    write_atomically(folder / MANIFEST, manifest)
    lines = {artifact.name: sha256, MANIFEST: hashlib.sha256(manifest).hexdigest()}
    write_atomically(folder / SUMS, _merged_sums(folder / SUMS, lines))
    return Publication((folder / CARD, folder / MANIFEST, folder / SUMS), sha256)


def _check_same(artifact: Path, index: FileIndex, report: Report) -> None:
    """The report's objects are the file's, by name and digest."""
    found = index.object_sha256()
    recorded = {record["name"]: record["sha256"] for record in report["objects"]}
    if found == recorded:
        return
    different = next(name for name in (*found, *recorded) if found.get(name) != recorded.get(name))
    raise DigestError(
        f"{report_of(artifact)}: is not the report of {artifact}, or one of the two was changed: object {different!r} "
        "differs; build the artifact again"
    )


def _merged_sums(path: Path, lines: Mapping[str, str]) -> bytes:
    """The lines of an existing file that are about other names, then ``lines``."""
    names = {os.fsencode(name) for name in lines}
    kept = [(name, digest) for name, digest in read_sums(path) if name not in names] if path.is_file() else []
    listed = [*((os.fsdecode(name), digest) for name, digest in kept), *lines.items()]
    return b"".join(sums_line(digest, name) for name, digest in listed)
