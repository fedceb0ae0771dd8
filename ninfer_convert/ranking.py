"""``rank``: how often a corpus uses every token, as the counts file that ``--ranking`` reads.

Row 0 has the totals; with several texts, one row per text follows. Specification: ``specs/conversion.md``.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.corpus import Corpus
from ninfer_convert.draft_head import select_draft_ids
from ninfer_convert.locate import locate
from ninfer_convert.problems import Problem
from ninfer_convert.resources import PREFIX, token_ids
from ninfer_format import Artifact, ArtifactError, SourceError, UsageError, config_of
from ninfer_format.command import require_extra
from ninfer_format.model_geometry import MAX_VOCABULARY, draft_head_rows
from ninfer_format.prefix import MAGIC_STEM
from ninfer_format.reader import open_regular

SCHEMA = "ninfer.rank/1"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_BATCH_CHARACTERS = 1 << 21
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and the numbers of its model that a ranking needs."""

    encoder: Any
    """``tokenizers.Tokenizer``."""
    vocab_rows: int
    """Rows of the embedding, and counts per row of the ranking."""
    n_ids: int
    """Addressable ids."""
    forced: tuple[int, ...]
    """Special tokens, which a draft head always has."""

    @property
    def draft_rows(self) -> int:
        """Rows of the draft head of this model."""
        return draft_head_rows(self.n_ids)


def load_vocabulary(source: Path, vocab_rows: int | None = None) -> Vocabulary:
    """The vocabulary of a checkpoint folder, a Hub name or an artifact; ``vocab_rows`` where no config says it.

    UsageError or SourceError for what is missing, ArtifactError for an artifact without tokenizer.
    """
    tokenizers = require_extra("tokenizers", "convert")
    files, rows = _artifact_files(source) if _is_artifact(source) else _folder_files(source)
    rows = vocab_rows or rows
    if rows is None:
        raise UsageError(f"{source}: no config.json says how many rows the vocabulary has; pass --vocab-rows")
    documents = {name: _object(source, name, content) for name, content in files.items()}
    problems: list[Problem] = []
    n_ids, forced = token_ids(documents[TOKENIZER], documents[TOKENIZER_CONFIG], problems)
    if problems:
        raise SourceError(f"{source}: {problems[0]}")
    if not n_ids <= rows <= MAX_VOCABULARY:
        raise SourceError(
            f"{source}: the tokenizer has {n_ids} ids, the vocabulary {rows} rows; use files of one model"
        )
    try:
        encoder = tokenizers.Tokenizer.from_buffer(files[TOKENIZER])
    except Exception as error:  # the library raises plain Exception
        raise SourceError(f"{source}: {TOKENIZER} is not a tokenizer: {error}") from None
    encoder.no_truncation()
    encoder.no_padding()
    _add_missing(tokenizers, encoder, documents[TOKENIZER_CONFIG])
    return Vocabulary(encoder, rows, n_ids, forced)


def _is_artifact(source: Path) -> bool:
    if not source.is_file():
        return False
    with open_regular(source) as stream:
        return stream.read(len(MAGIC_STEM)) == MAGIC_STEM


def _artifact_files(source: Path) -> tuple[dict[str, bytes], int | None]:
    with Artifact.open(source) as artifact:
        held = artifact.objects.names()
        if missing := [name for name in (TOKENIZER, TOKENIZER_CONFIG) if PREFIX + name not in held]:
            raise ArtifactError(f"{source}: has no {PREFIX}{missing[0]}; it is no model artifact")
        files = {name: bytes(artifact.payload(PREFIX + name)) for name in (TOKENIZER, TOKENIZER_CONFIG)}
        return files, config_of(artifact).geometry.text.vocab_rows


def _folder_files(source: Path) -> tuple[dict[str, bytes], int | None]:
    folder = locate(source, "files").folder
    files = {}
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        if not (folder / name).is_file():
            raise UsageError(f"{folder}: has no {name}; give the folder of a tokenizer, or a .ninfer artifact")
        files[name] = (folder / name).read_bytes()
    path = folder / "config.json"
    config = _object(path.parent, path.name, path.read_bytes()) if path.is_file() else {}
    text = config.get("text_config", config)
    rows = text.get("vocab_size") if isinstance(text, dict) else None
    return files, rows if type(rows) is int and rows > 0 else None


def _object(source: Path, name: str, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{source}: {name} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise SourceError(f"{source}: {name} does not hold a JSON object")
    return document


def _add_missing(tokenizers: Any, encoder: Any, config: Mapping[str, Any]) -> None:
    """Give the encoder the added tokens that only ``tokenizer_config.json`` lists, as far as the ids follow on."""
    declared = {int(key): entry for key, entry in config.get("added_tokens_decoder", {}).items()}
    for token_id in sorted(declared):
        entry = declared[token_id]
        content = entry.get("content")
        if encoder.id_to_token(token_id) is None and isinstance(content, str) and token_id == encoder.get_vocab_size():
            token = tokenizers.AddedToken(content, normalized=False, special=entry.get("special") is True)
            encoder.add_special_tokens([token]) if token.special else encoder.add_tokens([token])


@dataclass(frozen=True, slots=True)
class Stratum:
    """The counts of one text."""

    name: str
    counts: Counts
    n_bytes: int
    n_hard_cuts: int


def count_text(
    path: Path, vocabulary: Vocabulary, *, progress: Callable[[int], None] = lambda n_bytes: None
) -> Stratum:
    """Token counts int64 [vocab_rows] of one text; spelled-out special tokens count as such.

    SourceError for what is not text, or a token id beyond the vocabulary.
    """
    corpus, counts, told = Corpus(path), np.zeros(vocabulary.vocab_rows, np.int64), 0
    encode = getattr(vocabulary.encoder, "encode_batch_fast", vocabulary.encoder.encode_batch)
    for batch in _batches(corpus.pieces()):
        ids = np.concatenate([np.array(row.ids, np.int64) for row in encode(batch, add_special_tokens=False)])
        if ids.size and int(ids.max()) >= counts.size:
            raise SourceError(
                f"{path}: the tokenizer gives id {int(ids.max())}, the vocabulary has {counts.size} rows; "
                "use tokenizer and config of one model"
            )
        counts += np.bincount(ids, minlength=counts.size)
        progress(corpus.n_bytes - told)
        told = corpus.n_bytes
    return Stratum(path.name, counts, corpus.n_bytes, corpus.n_hard_cuts)


def _batches(pieces: Iterator[str]) -> Iterator[list[str]]:
    """Pieces in lists of some ``_BATCH_CHARACTERS``, for the library's threads to share."""
    batch: list[str] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def use_threads(jobs: int) -> None:
    """Let the tokenizers library use ``jobs`` threads (0: one per CPU); only before its first work."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if jobs == 1 else "true"
    if jobs:
        os.environ["RAYON_NUM_THREADS"] = str(jobs)


@dataclass(frozen=True, slots=True)
class RankedCorpus:
    """All strata and their sum."""

    vocabulary: Vocabulary
    strata: tuple[Stratum, ...]
    totals: Counts

    @property
    def table(self) -> Counts:
        """What the counts file holds, int64 [rows, vocab_rows]: totals, then the strata if there are several."""
        rows = [stratum.counts for stratum in self.strata] if len(self.strata) > 1 else []
        return np.stack([self.totals, *rows])

    @property
    def n_tokens(self) -> int:
        """Tokens of the whole corpus."""
        return int(self.totals.sum())

    def coverage(self) -> tuple[tuple[int, float], ...]:
        """(n, share of all tokens that the n most frequent ids make up) for powers of two and the draft head's rows."""
        ordered = np.cumsum(np.sort(self.totals)[::-1])
        sizes = {1 << power for power in range(8, 25)} | {self.vocabulary.draft_rows, self.vocabulary.n_ids}
        return tuple((n, float(ordered[n - 1] / ordered[-1])) for n in sorted(sizes) if n <= self.vocabulary.n_ids)

    def draft_head_shares(self) -> tuple[float, ...]:
        """Share of the tokens that the draft head built from this ranking can propose: of all, then of each stratum."""
        vocabulary = self.vocabulary
        ids = select_draft_ids(self.totals[: vocabulary.n_ids], vocabulary.draft_rows, vocabulary.forced)
        rows = [self.totals, *(stratum.counts for stratum in self.strata)]
        return tuple(float(row[ids].sum() / max(int(row.sum()), 1)) for row in rows)


def rank(
    texts: Sequence[Path], vocabulary: Vocabulary, *, progress: Callable[[int], None] = lambda n_bytes: None
) -> RankedCorpus:
    """Count every text; SourceError if there is not one token in all of them."""
    strata = tuple(count_text(path, vocabulary, progress=progress) for path in texts)
    totals = np.zeros(vocabulary.vocab_rows, np.int64)
    for stratum in strata:
        totals += stratum.counts
    if not totals.any():
        raise SourceError(f"{', '.join(map(str, texts))}: no text, so nothing can be ranked")
    return RankedCorpus(vocabulary, strata, totals)
