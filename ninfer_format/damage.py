"""Comparing a file with its index: which chunks differ, and which object, padding or header the damage is in."""

from dataclasses import dataclass

from ninfer_format.digests import CHUNK_BYTES, FileIndex, Region, chunk_digests
from ninfer_format.errors import DigestError
from ninfer_format.hashing import Progress, hash_range, parallel, silent


@dataclass(frozen=True, slots=True)
class Damage:
    """File bytes [begin, end) of ``region`` that lie in chunks whose digest differs from the index."""

    region: Region
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class IndexComparison:
    """Chunks compared of all chunks in the index, and the damage found, in file order."""

    n_compared: int
    n_chunks: int
    damage: tuple[Damage, ...]


def _runs(chunks: list[int], file_bytes: int) -> list[tuple[int, int]]:
    """Ascending chunk numbers → byte ranges of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        begin, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, file_bytes)
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def _overlaps(region: Region, runs: list[tuple[int, int]]) -> list[Damage]:
    ranges = [(max(begin, region.begin), min(end, region.end)) for begin, end in runs]
    return [Damage(region, begin, end) for begin, end in ranges if begin < end]


def _localise(descriptor: int, file_bytes: int, index: FileIndex, bad: list[int], jobs: int | None) -> list[Damage]:
    """Rehash the regions that touch bad chunks; those whose digest differs are the damaged ones."""
    runs = _runs(bad, file_bytes)
    touched = [(i, found) for i, region in enumerate(index.regions) if (found := _overlaps(region, runs))]
    whole = [(i, found) for i, found in touched if found[0].region.end <= file_bytes]

    def differs(item: tuple[int, list[Damage]]) -> bool:
        region = index.regions[item[0]]
        return hash_range(descriptor, region.begin, region.end) != index.region_sha256[item[0]]

    damage = [
        d for (_, found), is_bad in zip(whole, parallel(differs, whole, jobs), strict=True) if is_bad for d in found
    ]
    if len(whole) < len(touched):
        # The file ends inside the last region, whose digest cannot be formed: blame it for the runs nobody else owns.
        explained = {(begin, end) for begin, end in runs for d in damage if begin <= d.begin < end}
        damage += _overlaps(touched[-1][1][0].region, [run for run in runs if run not in explained])
    if not damage:
        raise DigestError("the index contradicts itself: a chunk differs but no region in it does; make a new index")
    return damage


def compare_with_index(
    descriptor: int, file_bytes: int, index: FileIndex, *, jobs: int | None = None, progress: Progress = silent
) -> IndexComparison:
    """Hash, in parallel, every indexed chunk that lies wholly inside the file's ``file_bytes`` and locate differences.

    A file shorter than the index describes is a partial download: its last, incomplete chunk is left out.
    Raises DigestError when the index contradicts itself and StorageError when reading fails.
    """
    n_chunks = len(index.chunk_sha256)
    complete = file_bytes >= index.file_bytes
    n_compared = n_chunks if complete else file_bytes // CHUNK_BYTES
    n_bytes = index.file_bytes if complete else n_compared * CHUNK_BYTES
    with progress(n_bytes, "chunks") as advance:
        digests = chunk_digests(descriptor, n_bytes, n_compared, jobs, advance)
        bad = [number for number, digest in digests if digest != index.chunk_sha256[number]]
    damage = _localise(descriptor, min(file_bytes, index.file_bytes), index, bad, jobs) if bad else []
    return IndexComparison(n_compared, n_chunks, tuple(damage))
