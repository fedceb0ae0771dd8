"""Checking one file at a chosen depth: ``verify`` collects every problem and says what it did not check.

Levels: ``header`` (prefix, JSON, schema), ``structure`` (registries, sizes, geometry, inventory), ``full`` (structure
and SHA-256), ``numeric`` (structure and every payload value rule). Specification: ``specs/verify.md``.
"""

import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Literal, get_args

from ninfer_format.damage import IndexComparison, compare_with_index
from ninfer_format.digests import FileIndex, file_regions, read_index
from ninfer_format.directory import Directory, Entry, Identity, TensorEntry, check_entry, parse_directory
from ninfer_format.errors import ArtifactError, InventoryError, NinferError, UnsupportedError, UsageError, VersionError
from ninfer_format.geometry import Span, check_spans, first_permitted
from ninfer_format.hashing import Progress, first_nonzero, hash_range, parallel, silent
from ninfer_format.inventory import compare_inventory, expected_inventory
from ninfer_format.model_config import ModelConfig, config_of
from ninfer_format.prefix import PREFIX_BYTES, Prefix, read_prefix
from ninfer_format.published import CONFIG_RESOURCE, PUBLISHED, TOKENIZER_IDS, known_digest
from ninfer_format.reader import Artifact, open_regular, read_header

Level = Literal["header", "structure", "full", "numeric"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: a stable ``code``, a sentence, and where known the object and file bytes [begin, end).

    ``object`` may also be ``header``, ``padding`` or ``trailing``.
    """

    code: str
    message: str
    object: str | None = None
    byte_range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of ``verify``.

    ``checked`` and ``not_checked`` are short phrases. ``sha256`` (hex) is set when the whole file was hashed,
    ``recorded_sha256`` when an index proved its chunks; ``known_as`` labels a published artifact by either of them.
    """

    path: Path
    level: Level
    problems: tuple[Problem, ...]
    checked: tuple[str, ...]
    not_checked: tuple[str, ...]
    identity: Identity | None
    file_bytes: int
    sha256: str | None
    recorded_sha256: str | None
    known_as: str | None

    @property
    def ok(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.problems

    @property
    def exit_code(self) -> int:
        """0 good, 1 something is wrong, 4 when all that is wrong is that this release does not support it."""
        if self.ok:
            return 0
        return 4 if all(problem.code in _UNSUPPORTED for problem in self.problems) else 1


_UNSUPPORTED = ("version", "registry", "unsupported")


def _code(error: NinferError) -> str:
    return type(error).__name__.removesuffix("Error").lower()


def _problem(error: NinferError, where: str | None = None, byte_range: tuple[int, int] | None = None) -> Problem:
    return Problem(_code(error), str(error), where, byte_range)


@dataclass(slots=True)
class _Check:
    """A check in progress."""

    path: Path
    stream: BinaryIO
    file_bytes: int
    strict: bool
    jobs: int | None
    progress: Progress
    problems: list[Problem] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    prefix: Prefix | None = None
    directory: Directory | None = None
    config: ModelConfig | None = None

    @property
    def payload_offset(self) -> int:
        return self.prefix.payload_offset if self.prefix else 0

    def file_range(self, entry: Entry) -> tuple[int, int]:
        begin = self.payload_offset + entry.offset
        return begin, begin + entry.n_bytes


def _check_header(check: _Check) -> None:
    try:
        check.stream.seek(0)
        check.prefix = read_prefix(check.stream.read(PREFIX_BYTES), check.file_bytes)
        if check.prefix.version == 1:
            raise VersionError("container version 1; run `ninfer-verify migrate` on it once")
        text = read_header(check.stream)[1]
        check.directory = parse_directory(text)
        check.checked.append("header")
    except (ArtifactError, UnsupportedError) as error:
        check.problems.append(_problem(error, "header"))


def _check_objects(check: _Check, directory: Directory) -> None:
    """Registries, signatures, sizes and spans, every problem of every object."""
    payload_bytes = check.file_bytes - check.payload_offset
    sound: list[Entry] = []
    for entry in directory.objects:
        try:
            check_entry(entry)
            sound.append(entry)
        except (ArtifactError, UnsupportedError) as error:
            check.problems.append(_problem(error, entry.name))
    before: tuple[Span, ...] = ()
    for entry in sound:
        span = Span(entry.name, entry.offset, entry.n_bytes, entry.alignment)
        try:
            check_spans((*before, span), payload_bytes)
            before = (span,)
        except ArtifactError as error:
            check.problems.append(_problem(error, entry.name, check.file_range(entry)))


def _check_inventory(check: _Check, artifact: Artifact) -> None:
    """The objects against the identity's or the config's inventory, where there is one."""
    identity, is_published = artifact.identity, artifact.identity in PUBLISHED
    if not is_published and CONFIG_RESOURCE not in artifact.objects.names():
        check.not_checked.append(
            f"inventory (identity {identity} is not a published one and there is no {CONFIG_RESOURCE})"
        )
        return
    try:
        check.config = config_of(artifact)
        expected = expected_inventory(artifact.directory, check.config)
    except InventoryError as error:
        check.problems.append(_problem(error, CONFIG_RESOURCE if not is_published else None))
        return
    for message in compare_inventory(expected, artifact.directory, packed=is_published or check.strict):
        check.problems.append(Problem("inventory", message))
    end = check.file_range(artifact.objects[-1])[1]
    if is_published and end < check.file_bytes and not check.strict:
        check.problems.append(
            Problem(
                "trailing",
                f"{check.file_bytes - end} bytes follow the last object; {identity} ends with it",
                "trailing",
                (end, check.file_bytes),
            )
        )
    check.checked.append("inventory")


def _check_strict(check: _Check, directory: Directory) -> None:
    """What a careful writer never leaves behind: stray bytes, loose packing, names that look alike."""
    assert check.prefix is not None
    descriptor, cursor = check.stream.fileno(), 0
    for entry in directory.objects:
        if entry.offset != (packed := first_permitted(cursor, entry.alignment)):
            message = f"object {entry.name!r} is at payload offset {entry.offset}, the first permitted is {packed}"
            check.problems.append(Problem("packing", message, entry.name, check.file_range(entry)))
        cursor = entry.offset + entry.n_bytes
    for region in file_regions(directory.objects, check.prefix.json_bytes, check.file_bytes):
        where = (region.begin, region.end)
        if region.kind == "trailing":
            message = f"{region.end - region.begin} bytes follow the last object"
            check.problems.append(Problem("trailing", message, "trailing", where))
        elif region.kind == "padding" and (at := first_nonzero(descriptor, *where)) is not None:
            message = f"padding at bytes {region.begin} to {region.end} is not zero, first at byte {at}"
            check.problems.append(Problem("padding", message, "padding", where))
    check.problems += _lookalikes(directory.objects)
    check.checked.append("padding, packing and look-alike names")


def _lookalikes(objects: Sequence[Entry]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for entry in objects:
        other = first.setdefault(unicodedata.normalize("NFKC", entry.name).casefold(), entry.name)
        if other != entry.name:
            message = f"objects {other!r} and {entry.name!r} differ only in case or Unicode normal form"
            yield Problem("name", message, entry.name)


def _check_values(check: _Check, artifact: Artifact) -> None:
    """Every payload value rule of every tensor, several objects at a time."""
    from ninfer_format.payload_rules import scan_payload

    vocabulary: int | None = None
    if artifact.identity in PUBLISHED:
        vocabulary = TOKENIZER_IDS
    elif check.config is not None:
        vocabulary = check.config.geometry.text.vocab_rows
    tensors = [entry for entry in artifact.objects if isinstance(entry, TensorEntry)]
    with check.progress(sum(entry.n_bytes for entry in tensors), "payload values") as advance:

        def scan(entry: TensorEntry) -> tuple[TensorEntry, list[str]]:
            payload = artifact.payload(entry.name)
            found = scan_payload(
                entry.name, entry.format, entry.layout, entry.shape, payload, strict=check.strict, vocabulary=vocabulary
            )
            advance(entry.n_bytes)
            return entry, found

        for entry, messages in parallel(scan, tensors, check.jobs):
            check.problems += (Problem("payload", m, entry.name, check.file_range(entry)) for m in messages)
    check.checked.append("payload values")


def _check_index(check: _Check, index: FileIndex, partial: bool) -> IndexComparison | None:
    """The chunks of the file against its index; None when the index belongs to another file."""
    if check.file_bytes > index.file_bytes or (check.file_bytes < index.file_bytes and not partial):
        hint = "; use --partial for an unfinished download" if check.file_bytes < index.file_bytes else ""
        message = (
            f"the index describes a file of {index.file_bytes} bytes, this one has {check.file_bytes}: one of them is "
            f"incomplete or outdated{hint}"
        )
        check.problems.append(Problem("index", message))
        return None
    found = compare_with_index(check.stream.fileno(), check.file_bytes, index, jobs=check.jobs, progress=check.progress)
    damaged = {d.region.name for d in found.damage if d.region.kind == "object"}
    n_objects = len(index.directory.objects)
    if len(damaged) > max(2, n_objects // 2):
        message = (
            f"{len(damaged)} of {n_objects} objects differ from the index: it was made for another "
            f"file ({index.directory.identity}, directory SHA-256 {index.directory_sha256.hex()}) or before a change; "
            "if you trust the file, make a new index"
        )
        check.problems.append(Problem("index", message))
        return None
    for damage in found.damage:
        region = damage.region
        what = f"object {region.name!r}" if region.kind == "object" else f"the {region.kind}"
        message = f"{what} differs from the index within file bytes {damage.begin} to {damage.end}"
        check.problems.append(Problem("digest", message, region.name, (damage.begin, damage.end)))
    what = "every chunk and object" if found.n_compared == found.n_chunks else "chunks"
    check.checked.append(f"{what} by index ({found.n_compared} of {found.n_chunks} chunks)")
    return found


_UNCHECKED_BYTES = "payload bytes (--full)"
_UNCHECKED_AFTER: Mapping[Level, tuple[str, ...]] = MappingProxyType(
    {
        "header": ("sizes, geometry and inventory (--level structure)", _UNCHECKED_BYTES),
        "structure": (_UNCHECKED_BYTES, "payload values (--level numeric)"),
        "full": ("payload values (--level numeric)",),
        "numeric": (_UNCHECKED_BYTES,),
    }
)
_UNCHECKED_UNLESS_STRICT = "padding and packing (--strict)"


def _check_contents(check: _Check, directory: Directory, level: Level) -> None:
    """Everything behind the header except digests."""
    n_before = len(check.problems)
    _check_objects(check, directory)
    if len(check.problems) > n_before:
        check.not_checked.append("inventory, padding and payloads (the geometry is wrong)")
        return
    check.checked.append("geometry")
    with Artifact.open(check.path) as artifact:
        _check_inventory(check, artifact)
        if check.strict:
            _check_strict(check, directory)
        if level == "numeric":
            _check_values(check, artifact)


def verify(
    path: str | os.PathLike[str],
    level: Level = "structure",
    *,
    strict: bool = False,
    index: str | os.PathLike[str] | None = None,
    partial: bool = False,
    expected_sha256: str | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Report:
    """Check one file and report every problem found; the file itself never makes this raise.

    ``level`` "full" hashes the whole file on one core, or with ``index`` (an index file) its chunks on ``jobs``
    threads. ``expected_sha256`` (hex) is what the whole file must hash to; it makes the level at least "full", and an
    index then locates a mismatch. ``partial`` checks an unfinished download: only the indexed chunks that are wholly
    there. ``strict`` also refuses padding with content, loose packing, trailing bytes and look-alike names.

    Raises UsageError when there is no such file, DigestError when the index is damaged, StorageError when reading
    fails.
    """
    if level not in LEVELS:
        raise UsageError(f"level {level!r} is not one of {', '.join(LEVELS)}")
    if partial and index is None:
        raise UsageError("a partial file can only be checked against an index")
    if expected_sha256 is not None and level in ("header", "structure"):
        level = "full"
    known_index = read_index(index) if index is not None else None
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        check = _Check(Path(path), stream, size, strict, jobs, progress)
        sha256: str | None = None
        recorded: str | None = None
        if partial and known_index is not None:
            _check_index(check, known_index, partial=True)
            check.not_checked.append("structure and everything else (--partial looks at downloaded chunks only)")
        else:
            _check_header(check)
            if check.directory is None:
                check.not_checked.append("everything behind the header")
            else:
                if level != "header":
                    _check_contents(check, check.directory, level)
                check.not_checked += _UNCHECKED_AFTER[level]
                if not strict and level != "header":
                    check.not_checked.append(_UNCHECKED_UNLESS_STRICT)
            if level == "full" or expected_sha256 is not None:
                check.not_checked = [text for text in check.not_checked if text != _UNCHECKED_BYTES]
                sha256, recorded = _check_digests(check, known_index, expected_sha256)
                if sha256 is None:
                    check.not_checked.append("SHA-256 of the whole file, which the index only records (--no-index)")
    digest = sha256 or recorded
    return Report(
        check.path,
        level,
        tuple(check.problems),
        tuple(check.checked),
        tuple(check.not_checked),
        check.directory.identity if check.directory else None,
        size,
        sha256,
        recorded,
        known_digest(digest) if digest else None,
    )


def _check_digests(check: _Check, index: FileIndex | None, expected: str | None) -> tuple[str | None, str | None]:
    """(computed, recorded) SHA-256 of the whole file in hex, each where it applies."""
    sha256: str | None = None
    if expected is not None or index is None:
        with check.progress(check.file_bytes, "sha256") as advance:
            sha256 = hash_range(check.stream.fileno(), 0, check.file_bytes, advance=advance).hex()
        check.checked.append("SHA-256 of the whole file")
    matches = expected is None or sha256 == expected.lower()
    if not matches:
        check.problems.append(Problem("digest", f"the file has SHA-256 {sha256}, expected {expected}"))
    if index is None or (sha256 is not None and matches and sha256 == index.sha256.hex()):
        return sha256, None
    found = _check_index(check, index, partial=False)
    proven = found is not None and not found.damage
    return sha256, index.sha256.hex() if proven and sha256 is None else None
