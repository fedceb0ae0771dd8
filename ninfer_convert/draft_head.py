"""Which vocabulary rows the optimized proposal head holds, and in which order (specs/conversion.md, draft head).

Ids are ranked by how often a corpus used them; special tokens are always in. Without a ranking every count is zero
and ids go by number, which for byte-level BPE is merge order.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ninfer_format import Artifact, NinferError, SourceError, UsageError
from ninfer_format.prefix import MAGIC_STEM
from ninfer_format.reader import open_regular

ID_TABLE = "text/draft_head_token_ids"
_COUNT_BYTES = 8
_HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ranking:
    """Where the order comes from: exactly one of ``counts`` [ids] int64 and a finished ``ids`` table [rows] int32."""

    label: str
    """For the report."""
    counts: NDArray[np.int64] | None = None
    ids: NDArray[np.int32] | None = None
    sha256: str | None = None
    """Digest of the counts file, or of the id table's bytes."""


def select_draft_ids(counts: NDArray[np.int64], n_rows: int, forced: Iterable[int]) -> NDArray[np.int32]:
    """The ``n_rows`` distinct ids of the proposal head, in stored order (conversion rule 8.2).

    ``counts`` [addressable ids] int64, none negative. ``forced`` ids outside the range are ignored. Every forced id
    is in the result unless there are more of them than rows; then the most frequent are. Order: descending count;
    among equal counts picked ids by number, then forced ids by number. SourceError if there are fewer ids than rows.
    """
    if not 1 <= n_rows <= counts.size:
        raise SourceError(f"a draft head of {n_rows} rows cannot be chosen from {counts.size} token ids")
    kept = np.array(sorted({i for i in forced if 0 <= i < counts.size}), np.int64)
    if kept.size >= n_rows:
        return _by_count(kept, counts)[:n_rows].astype(np.int32)
    ranked = _by_count(np.arange(counts.size), counts)
    picked = ranked[~np.isin(ranked, kept)][: n_rows - kept.size]
    return _by_count(np.concatenate([picked, kept]), counts).astype(np.int32)


def _by_count(ids: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``ids`` by descending count; equal counts keep their order."""
    return ids[np.argsort(-counts[ids], kind="stable")]


def no_ranking(n_ids: int) -> Ranking:
    """All counts zero: ids go by number."""
    return Ranking("none: ids are ranked by token id (BPE merge order)", counts=np.zeros(n_ids, np.int64))


def load_ranking(path: Path, *, vocab_rows: int, n_ids: int) -> Ranking:
    """Read a ranking: a file of int64 counts, or a .ninfer artifact whose id table is taken over.

    A counts file is little-endian int64, rows of ``vocab_rows`` counts of which the first row's first ``n_ids`` count.
    SourceError if it is neither, or belongs to another vocabulary.
    """
    with open_regular(path) as stream:
        if stream.read(len(MAGIC_STEM)) == MAGIC_STEM:
            return _table_of(path, n_ids)
        row_bytes = vocab_rows * _COUNT_BYTES
        size = stream.seek(0, 2)
        if not size or size % row_bytes:
            raise SourceError(
                f"{path}: {size} bytes are not a positive multiple of {row_bytes} ({vocab_rows} vocabulary rows × "
                f"{_COUNT_BYTES} bytes); give a counts file of this vocabulary or a .ninfer artifact"
            )
        stream.seek(0)
        digest, head = hashlib.sha256(), b""
        while part := stream.read(_HASH_BYTES):
            digest.update(part)
            if len(head) < row_bytes:
                head += part[: row_bytes - len(head)]
    counts = np.frombuffer(head, "<i8").astype(np.int64)
    if counts.min() < 0:
        index = int(np.argmax(counts < 0))
        raise SourceError(f"{path}: count {counts[index]} of id {index} is negative; counts are int64, least 0")
    return Ranking(f"counts file {path.name}", counts=counts[:n_ids], sha256=digest.hexdigest())


def _table_of(path: Path, n_ids: int) -> Ranking:
    with Artifact.open(path) as artifact:
        if ID_TABLE not in artifact.objects.names():
            raise UsageError(f"{path}: this artifact has no {ID_TABLE}; give another one or a counts file")
        ids = np.array(artifact.tensor(ID_TABLE), np.int32)
        label = f"id table of {artifact.identity} ({path.name})"
    if ids.ndim != 1 or ids.size == 0 or ids.min() < 0 or ids.max() >= n_ids:
        raise SourceError(
            f"{path}: its id table reaches from {ids.min(initial=0)} to {ids.max(initial=0)}, the tokenizer has ids "
            f"0 to {n_ids - 1}; it was made for another tokenizer"
        )
    if np.unique(ids).size != ids.size:
        raise SourceError(f"{path}: its id table names an id twice; verify the artifact with `ninfer-verify check`")
    return Ranking(label, ids=ids, sha256=hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest())


def draft_ids(ranking: Ranking, n_rows: int, forced: Iterable[int]) -> NDArray[np.int32]:
    """The id table [n_rows] int32 that ``ranking`` gives; SourceError if a taken-over table does not fit the model."""
    if ranking.counts is not None:
        return select_draft_ids(ranking.counts, n_rows, forced)
    if ranking.ids is None:
        raise NinferError("a ranking holds neither counts nor ids")
    if ranking.ids.size != n_rows:
        raise SourceError(f"the {ranking.label} has {ranking.ids.size} rows, this model's draft head has {n_rows}")
    if lost := sorted(set(forced) - set(ranking.ids.tolist())):
        raise SourceError(f"the {ranking.label} lacks special token {lost[0]}; it was made for another tokenizer")
    return ranking.ids
