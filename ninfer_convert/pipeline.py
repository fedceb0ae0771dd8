"""``build``: from a plan without problems to a published artifact, or to something that resumes.

The artifact appears under its final name only when complete and synced; its report follows at once. Until then there
are a temporary file and a journal beside it. Specification: ``specs/conversion.md`` and ``specs/convert-cli.md``.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from ninfer_convert.assembly import SYNC_BYTES, SYNC_SECONDS, Assembly
from ninfer_convert.events import BuildObserver
from ninfer_convert.families import ObjectSource
from ninfer_convert.fingerprint import differences, fingerprint_of
from ninfer_convert.journal import Finished, Journal, journal_of
from ninfer_convert.memory import worker_count
from ninfer_convert.output import temporary_of
from ninfer_convert.plan import ConversionPlan, Target
from ninfer_convert.problems import PlanError
from ninfer_convert.report import conversion_report, dump_report, report_of
from ninfer_convert.source_values import check_values
from ninfer_convert.stored_object import StoredObject
from ninfer_convert.workspace import lanes_for
from ninfer_format import SourceError, UsageError
from ninfer_format.command import require_extra
from ninfer_format.errors import DiskFullError, EncodeError
from ninfer_format.prefix import prefix_bytes
from ninfer_format.writer import ArtifactWriter, storage_error, sync_folder

_CHECK_BYTES = 4 << 20
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A finished build."""

    path: Path
    report_path: Path
    file_bytes: int
    source_bytes: int
    """Bytes of source tensors that were read for it, by this run or the ones it continued."""
    n_resumed: int
    """Objects taken over from an earlier run."""
    elapsed_seconds: float
    finished: Mapping[str, Finished]
    """Digest and error of every object, by name."""
    notes: tuple[str, ...]


def build(
    plan: ConversionPlan,
    *,
    progress: Callable[[int], None] = lambda n_bytes: None,
    observer: BuildObserver | None = None,
    sync_bytes: int = SYNC_BYTES,
    sync_seconds: float = SYNC_SECONDS,
    step_lanes: int | None = None,
) -> BuildResult:
    """Write the artifact that ``plan`` describes to ``plan.options.out``, and its report beside it.

    ``progress`` is called with payload bytes as they are written, from another thread, and ``observer`` is told that
    and every object's begin and end. ``step_lanes`` values pass through a worker's encoder at once. PlanError if the
    plan has problems or ``check_values`` finds some, MissingExtraError without torch, UsageError for leftovers or
    devices, SourceError for values that cannot be stored, DiskFullError or StorageError from the file system.
    KeyboardInterrupt and StorageError leave a temporary and a journal that a plan with ``resume`` continues; every
    other error leaves nothing.
    """
    target, out = plan.require(), plan.options.out
    if out is None:
        raise UsageError("a build needs an output file")
    require_extra("torch", "convert")
    _check_device(plan.options.device)
    watch = observer or BuildObserver()
    started = monotonic()
    with _journal(out) as journal, plan.checkpoint, plan.prepacked or nullcontext(), plan.dflash or nullcontext():
        problems, found = check_values(plan)
        if problems:
            raise PlanError(problems)
        writer, notes = _open_writer(plan, target, out, journal)
        resumed = dict(journal.finished)
        try:
            made = _make(plan, target, writer, journal, _Pace(progress, watch, sync_bytes, sync_seconds, step_lanes))
            finished, elapsed = resumed | made, monotonic() - started
            notes = (*plan.notes, *found, *notes)
            document = conversion_report(
                plan,
                finished,
                n_resumed=len(resumed),
                n_workers=worker_count(plan.options.jobs),
                elapsed_seconds=elapsed,
                notes=notes,
            )
            _publish(out, writer, journal, dump_report(document))
        except (SourceError, EncodeError, DiskFullError):
            writer.abort()
            journal.remove()
            raise
        finally:
            writer.abort(keep=True)
    n_bytes = _source_bytes(target)
    return BuildResult(
        out, report_of(out), writer.file_bytes, n_bytes, len(resumed), monotonic() - started, finished, notes
    )


def finish_published(out: Path) -> bool:
    """Complete a build that was killed after its artifact got its final name; False if there is no such build.

    Nothing is left to do then but to publish the report and remove the journal.
    """
    path = journal_of(out)
    if not path.is_file() or not out.is_file() or temporary_of(out).exists():
        return False
    journal = Journal.open(path)
    try:
        if journal.published != _file_facts(os.stat(out, follow_symlinks=False)):
            return False
        with suppress(FileNotFoundError):
            os.replace(_staged_report(out), report_of(out))
        sync_folder(out.parent)
        journal.remove()
        return True
    finally:
        journal.close()


@dataclass(frozen=True, slots=True)
class _Pace:
    progress: Callable[[int], None]
    observer: BuildObserver
    sync_bytes: int
    sync_seconds: float
    step_lanes: int | None


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device; use --device cpu, which gives the same bytes")


@contextmanager
def _journal(out: Path) -> Iterator[Journal]:
    """The open journal of ``out``; removed again if the block fails before it was started."""
    journal = Journal.open(journal_of(out))
    try:
        yield journal
    except BaseException:
        if journal.fingerprint is None:
            journal.remove()
        raise
    finally:
        journal.close()


def _open_writer(
    plan: ConversionPlan, target: Target, out: Path, journal: Journal
) -> tuple[ArtifactWriter, tuple[str, ...]]:
    """A writer, and notes on how it came about; ``journal.finished`` are the objects that need not be made again."""
    options, temporary = plan.options, temporary_of(out)
    fingerprint, notes = fingerprint_of(plan), tuple[str, ...]()
    if temporary.exists() or journal.fingerprint is not None:
        if options.resume:
            writer, notes = _resume(target, out, journal, fingerprint, options.force)
            if writer is not None:
                return writer, notes
        elif not options.force:
            held = f"{len(journal.finished)} of {len(target.inventory.objects)} objects"
            raise UsageError(
                f"{temporary}: an unfinished build of this output is there ({held} are done); "
                "continue it with --resume, or start again with --force"
            )
    elif options.resume:
        notes = ("--resume: there was nothing to resume",)
    try:
        temporary.unlink(missing_ok=True)
        writer = ArtifactWriter(out, target.inventory.directory, overwrite=options.force)
        try:
            journal.start(fingerprint)
        except BaseException:
            writer.abort()
            raise
    except OSError as error:
        journal.remove()
        raise storage_error(error, temporary, "removing") from None
    except BaseException:
        journal.remove()
        raise
    return writer, notes


def _resume(
    target: Target, out: Path, journal: Journal, fingerprint: Mapping[str, Any], force: bool
) -> tuple[ArtifactWriter | None, tuple[str, ...]]:
    """A writer on the temporary of an earlier run, its finished objects verified; None if there is nothing to keep."""
    if journal.fingerprint is None:
        return None, ("--resume: the unfinished build had not finished any object; started from the beginning",)
    if changes := differences(journal.fingerprint, fingerprint):
        raise UsageError(
            f"{journal.path}: cannot resume, because {'; '.join(changes)}; undo the change, or start again with --force"
        )
    if not _header_is_planned(temporary_of(out), target):
        return None, ("--resume: the temporary file is gone or damaged; started from the beginning",)
    writer = ArtifactWriter(out, target.inventory.directory, overwrite=force, resume=True)
    damaged = _damaged(writer, target, journal.finished)
    notes = []
    if damaged:
        journal.drop(damaged)
        notes.append(f"--resume: {len(damaged)} finished objects were damaged in the temporary file and made again")
    for name in journal.finished:
        writer.mark_written(name)
    notes.append(f"resumed: {len(journal.finished)} of {len(target.inventory.objects)} objects taken over, verified")
    return writer, tuple(notes)


def _header_is_planned(temporary: Path, target: Target) -> bool:
    """Whether the temporary has the planned size and begins with the planned header."""
    inventory = target.inventory
    header = prefix_bytes(2, len(inventory.directory_json)) + inventory.directory_json
    try:
        with open(temporary, "rb") as stream:
            return os.fstat(stream.fileno()).st_size == inventory.file_bytes and stream.read(len(header)) == header
    except OSError:
        return False


def _damaged(writer: ArtifactWriter, target: Target, finished: Mapping[str, Finished]) -> list[str]:
    """Names of finished objects whose bytes in the temporary do not have the recorded digest."""
    entries = {entry.name: entry for entry in target.inventory.objects}

    def differs(record: Finished) -> bool:
        entry, digest = entries.get(record.name), hashlib.sha256()
        if entry is None:
            return True
        begin, left = writer.payload_offset + entry.offset, entry.n_bytes
        while left:
            part = os.pread(writer.descriptor, min(left, _CHECK_BYTES), begin)
            if not part:
                return True
            digest.update(part)
            begin, left = begin + len(part), left - len(part)
        return digest.hexdigest() != record.sha256

    records = list(finished.values())
    with ThreadPoolExecutor(worker_count(0)) as pool:
        return [record.name for record, wrong in zip(records, pool.map(differs, records), strict=True) if wrong]


def _make(
    plan: ConversionPlan, target: Target, writer: ArtifactWriter, journal: Journal, pace: _Pace
) -> dict[str, Finished]:
    """Make every object that the journal does not have yet; what was made, durable and journaled."""
    from ninfer_convert.quantize.torch_threads import threads_restored

    options, widest = plan.options, max((s.row_width for s in target.sources), default=0)
    lanes = lanes_for(options.device, widest, pace.step_lanes)
    entries = zip(target.inventory.objects, target.sources, strict=True)
    todo = [(e, s) for e, s in entries if e.name not in journal.finished]
    kept = [e for e in target.inventory.objects if e.name in journal.finished]
    pace.observer.started(sum(e.n_bytes for e in target.inventory.objects), len(target.inventory.objects), kept)

    def advanced(n_bytes: int) -> None:
        pace.progress(n_bytes)
        pace.observer.advanced(n_bytes)

    advanced(sum(entry.n_bytes for entry in kept))
    todo.sort(key=lambda pair: _source_position(plan, pair[1]))
    objects = [StoredObject(plan, entry, source, lanes.piece) for entry, source in todo]
    assembly = Assembly(
        objects,
        writer,
        journal,
        n_workers=worker_count(options.jobs),
        lanes=lanes,
        device=options.device,
        progress=advanced,
        observer=pace.observer,
        sync_bytes=pace.sync_bytes,
        sync_seconds=pace.sync_seconds,
    )
    with threads_restored():
        assembly.run()
    return assembly.finished


def _source_position(plan: ConversionPlan, source: ObjectSource) -> tuple[str, str, int]:
    """Key that sorts objects by where their first tensor lies; objects without tensors come first."""
    if not source.runs:
        return "", "", 0
    ref = plan.checkpoint_of(source).tensors[source.runs[0].tensor]
    return source.origin, ref.file, ref.file_offset


def _source_bytes(target: Target) -> int:
    rows = 0
    for source in target.sources:
        n_rows = source.n_rows
        if source.transform == "draft_rows" and target.draft_ids is not None:
            n_rows = int(target.draft_ids.size)
        rows += n_rows * source.row_width * _BF16_BYTES
    return rows


def _publish(out: Path, writer: ArtifactWriter, journal: Journal, report: bytes) -> None:
    """Give artifact and report their final names, in an order that ``finish_published`` can complete."""
    staged = _staged_report(out)
    try:
        with open(staged, "wb") as stream:
            stream.write(report)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise storage_error(error, staged, "writing the report") from None
    try:
        # The record counts only once the temporary is gone, which is when ``commit`` has synced and renamed it.
        journal.add_published(_file_facts(os.fstat(writer.descriptor)))
        writer.commit()
    except DiskFullError:
        staged.unlink(missing_ok=True)
        raise
    try:
        os.replace(staged, report_of(out))
        sync_folder(out.parent)
    except OSError as error:
        raise storage_error(error, report_of(out), "publishing the report") from None
    journal.remove()


def _staged_report(out: Path) -> Path:
    report = report_of(out)
    return report.with_name(f".{report.name}.partial")


def _file_facts(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_size
