"""``rank``: counts of a corpus as the whole text gives them, whatever its size, and what they cover."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import make_tiny_checkpoint
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_convert.corpus import Corpus
from ninfer_convert.draft_head import draft_ids, load_ranking
from ninfer_convert.ranking import RankedCorpus, Vocabulary, count_text, load_vocabulary, rank
from ninfer_format import SourceError, UsageError
from tests.convert.exported import artifact_of
from tests.convert.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "examples" / "tiny" / "dense"
MAIN = "import sys; from ninfer_convert.cli import main; sys.argv[0] = 'ninfer-convert'; main()"
WITHOUT_TOKENIZERS = "import sys; sys.modules['tokenizers'] = None; " + MAIN


@cache
def trained() -> Vocabulary:
    """That of the trained tiny model: byte-level BPE with the Qwen pre-tokenizer."""
    return load_vocabulary(TRAINED)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return trained()


def sample(seed: int, lines: int = 400) -> str:
    return "".join(make_tiny_checkpoint.sample_text(seed, lines))


def whole(vocabulary: Vocabulary, *texts: str) -> list[int]:
    """Counts of texts that are tokenized in one go."""
    ids = [i for text in texts for i in vocabulary.encoder.encode(text, add_special_tokens=False).ids]
    counts: list[int] = np.bincount(ids, minlength=vocabulary.vocab_rows).tolist()
    return counts


def file(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- pieces ---------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["a", "Word", "don't", "1", "2024", ".", "...", "é", "e\u0301", "模型", "🙂", "x=1;", "\u0301"])
GAPS = st.sampled_from(["", " ", "  ", "\n", "\n\n", " \n", "\r\n", "\n  ", "\t", "\u00a0", "\u2028", "\n\t\n"])


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.tuples(WORDS, GAPS), max_size=60), piece=st.integers(1, 30), limit=st.integers(1, 60))
def test_pieces_tokenize_as_the_whole_text_does(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, str]], piece: int, limit: int
) -> None:
    vocabulary = trained()
    text = "".join(word + gap for word, gap in parts)
    corpus = Corpus(file(tmp_path_factory.getbasetemp() / "pieces.txt", text))
    pieces = list(corpus.pieces(piece, max(piece, limit)))
    assert "".join(pieces) == text
    assert all(pieces)
    if not corpus.n_hard_cuts:
        ids = [i for part in pieces for i in vocabulary.encoder.encode(part, add_special_tokens=False).ids]
        assert ids == vocabulary.encoder.encode(text, add_special_tokens=False).ids


def test_text_without_a_place_to_cut_is_cut_at_the_limit_and_that_is_counted(tmp_path: Path) -> None:
    corpus = Corpus(file(tmp_path / "t.txt", "x" * 1000))
    assert [len(part) for part in corpus.pieces(50, 300)] == [300, 300, 300, 100]
    assert corpus.n_hard_cuts == 3


def test_characters_split_between_blocks_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ninfer_convert.corpus._READ_BYTES", 3)
    text = "aé模🙂\r\nb" * 20
    corpus = Corpus(file(tmp_path / "t.txt", text))
    assert "".join(corpus.pieces(10, 50)) == text
    assert corpus.n_bytes == len(text.encode())


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize(("content", "position"), [(b"abc\xffd", 3), (b"ab\xe6\xa8", 2), (b"\xe6\xa8x", 0)])
def test_bytes_that_are_no_utf8_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, content: bytes, position: int
) -> None:
    monkeypatch.setattr("ninfer_convert.corpus._READ_BYTES", block)
    with pytest.raises(SourceError, match=f"byte {position} is not UTF-8"):
        list(Corpus(file(tmp_path / "t.txt", content)).pieces())


def test_json_lines_are_texts_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ninfer_convert.corpus._READ_BYTES", 7)
    texts = ["one\ntwo", "dreé", "\U0001f642", "x" * 40]
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts)]
    corpus = Corpus(file(tmp_path / "t.jsonl", "\n".join([lines[0], "", lines[1], *lines[2:]])))
    assert list(corpus.pieces()) == texts


@pytest.mark.parametrize("line", ["{}", "[1]", "nonsense", '{"text": 1}', '"text"'])
def test_line_that_is_no_document_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(SourceError, match="line 3 is no JSON object"):
        list(Corpus(file(tmp_path / "t.jsonl", '{"text": "a"}\n\n' + line)).pieces())


# --- counts ---------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_whole_text(vocabulary: Vocabulary, tmp_path: Path, fresh_seed: int) -> None:
    text = sample(fresh_seed, 3000)
    seen: list[int] = []
    stratum = count_text(file(tmp_path / "t.txt", text), vocabulary, progress=seen.append)
    assert stratum.counts.tolist() == whole(vocabulary, text)
    assert stratum.n_hard_cuts == 0
    assert sum(seen) == stratum.n_bytes == len(text.encode())


def test_spelled_out_special_tokens_count_as_such_even_those_of_the_config_alone(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    config = json.loads((TRAINED / "tokenizer_config.json").read_text())
    ids = {entry["content"]: int(token_id) for token_id, entry in config["added_tokens_decoder"].items()}
    listed = json.loads((TRAINED / "tokenizer.json").read_text())["added_tokens"]
    assert ids["<|audio_pad|>"] not in [token["id"] for token in listed]
    text = "<|im_start|>user\nhello<|im_end|>\n<|audio_pad|><|im_end|>"
    counts = count_text(file(tmp_path / "t.txt", text), vocabulary).counts
    assert {name: int(counts[i]) for name, i in ids.items() if counts[i]} == {
        "<|im_start|>": 1, "<|im_end|>": 2, "<|audio_pad|>": 1
    }  # fmt: skip


def test_table_has_totals_first_and_a_row_per_text_if_there_are_several(vocabulary: Vocabulary, tmp_path: Path) -> None:
    texts = [file(tmp_path / f"{i}.txt", sample(i, 50)) for i in range(3)]
    table = rank(texts, vocabulary).table
    assert table.shape == (4, vocabulary.vocab_rows)
    assert (table[0] == table[1:].sum(axis=0)).all()
    assert table[2].tolist() == whole(vocabulary, sample(1, 50))
    assert rank(texts[:1], vocabulary).table.shape == (1, vocabulary.vocab_rows)


def test_coverage_is_the_share_of_the_most_frequent_ids(vocabulary: Vocabulary, tmp_path: Path) -> None:
    ranked = rank([file(tmp_path / "a.txt", sample(1, 500)), file(tmp_path / "b.txt", sample(2, 90))], vocabulary)
    ordered = sorted(ranked.totals.tolist(), reverse=True)
    shares = dict(ranked.coverage())
    assert shares[256] == pytest.approx(sum(ordered[:256]) / sum(ordered))
    assert shares[vocabulary.n_ids] == 1.0
    assert vocabulary.draft_rows in shares
    assert list(shares.values()) == sorted(shares.values())
    head = ranked.draft_head_shares()
    assert len(head) == 3
    assert 0 < head[0] <= shares[vocabulary.draft_rows]
    weights = [int(stratum.counts.sum()) for stratum in ranked.strata]
    assert head[0] == pytest.approx(np.average(head[1:], weights=weights))


def test_corpus_without_a_token_is_refused(vocabulary: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no text"):
        rank([file(tmp_path / "a.txt", ""), file(tmp_path / "b.jsonl", "\n")], vocabulary)


def test_id_beyond_the_vocabulary_is_refused(vocabulary: Vocabulary, tmp_path: Path) -> None:
    small = Vocabulary(vocabulary.encoder, 300, 300, ())
    with pytest.raises(SourceError, match="the vocabulary has 300 rows"):
        count_text(file(tmp_path / "t.txt", sample(0)), small)


def test_memory_does_not_grow_with_the_text(
    vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ninfer_convert.ranking._BATCH_CHARACTERS", 1 << 17)
    peaks = []
    for megabytes in (3, 6):
        path = file(tmp_path / "t.txt", (sample(7, 1000) * (1 + megabytes * 12))[: megabytes << 20])
        tracemalloc.start()
        count_text(path, vocabulary)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0], peaks


# --- where the tokenizer is -----------------------------------------------------------------------------------------


def test_folder_and_artifact_give_the_same_vocabulary(tmp_path: Path) -> None:
    artifact = artifact_of(TRAINED, tmp_path / "x.ninfer", recipe="bf16")
    first, second = load_vocabulary(TRAINED), load_vocabulary(artifact)
    assert (first.vocab_rows, first.n_ids, first.forced) == (second.vocab_rows, second.n_ids, second.forced)
    assert first.encoder.get_vocab() == second.encoder.get_vocab()


def test_folder_of_a_tokenizer_alone_needs_the_number_of_rows(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file(tmp_path / name, (TRAINED / name).read_bytes())
    with pytest.raises(UsageError, match="--vocab-rows"):
        load_vocabulary(tmp_path)
    assert load_vocabulary(tmp_path, 640).vocab_rows == 640
    with pytest.raises(SourceError, match="vocabulary 100 rows"):
        load_vocabulary(tmp_path, 100)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [("tokenizer.json", None, "has no tokenizer.json"), ("tokenizer_config.json", None, "has no tokenizer_config"),
     ("tokenizer.json", b"{", "is not JSON"), ("tokenizer.json", b"{}", "model.vocab"),
     ("tokenizer_config.json", b"[]", "does not hold a JSON object"),
     ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}}', "is not a tokenizer")],
)  # fmt: skip
def test_tokenizer_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, content: bytes | None, expected: str
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny").folder
    (folder / name).unlink()
    if content is not None:
        file(folder / name, content)
    with pytest.raises((SourceError, UsageError), match=expected):
        load_vocabulary(folder)


# --- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: object, program: str = MAIN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, "rank", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    return result


def test_command_writes_a_ranking_that_build_takes(vocabulary: Vocabulary, tmp_path: Path) -> None:
    texts = [file(tmp_path / "a.txt", sample(1)), file(tmp_path / "b.txt", sample(2))]
    out = tmp_path / "counts.i64"
    result = run(*texts, "--tokenizer", TRAINED, "--out", out)
    assert (result.returncode, result.stderr) == (0, "")
    for part in ("3 rows of 640 counts", "draft head", "a.txt", "b.txt", "MB/s"):
        assert part in result.stdout
    assert out.stat().st_size == 3 * 640 * 8
    ranked: RankedCorpus = rank(texts, vocabulary)
    ranking = load_ranking(out, vocab_rows=640, n_ids=vocabulary.n_ids)
    assert ranking.counts is not None
    assert ranking.counts.tolist() == ranked.totals[: vocabulary.n_ids].tolist()
    ids = draft_ids(ranking, vocabulary.draft_rows, vocabulary.forced)
    artifact = artifact_of(TRAINED, tmp_path / "x.ninfer", recipe="bf16", ranking=out)
    taken = load_ranking(artifact, vocab_rows=640, n_ids=vocabulary.n_ids)
    assert taken.ids is not None
    assert taken.ids.tolist() == ids.tolist()
    document: dict[str, Any] = json.loads(
        run(*texts, "--tokenizer", artifact, "--out", tmp_path / "again.i64", "--json").stdout
    )
    assert document["schema"] == "ninfer.rank/1"
    assert document["sha256"] == ranking.sha256
    assert document["tokens"] == ranked.n_tokens == sum(text["tokens"] for text in document["texts"])
    assert (tmp_path / "again.i64").read_bytes() == out.read_bytes()


def test_any_number_of_threads_gives_the_same_counts(tmp_path: Path) -> None:
    text = file(tmp_path / "a.txt", sample(3, 20_000))
    for jobs in (1, 2):
        assert run(text, "--tokenizer", TRAINED, "--out", tmp_path / f"{jobs}", "--jobs", jobs, "-q").returncode == 0
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_exit_codes_and_nothing_left(tmp_path: Path) -> None:
    text, out = file(tmp_path / "a.txt", "hello"), tmp_path / "c.i64"
    there = file(tmp_path / "there", "mine")
    (tmp_path / "link").symlink_to("there")
    bad, old = file(tmp_path / "bad", b"\xff"), ROOT / "tests" / "golden" / "tiny_v1.ninfer"
    cases: dict[tuple[object, ...], int] = {
        (tmp_path / "none", TRAINED, out): 2, (text, ROOT / "tests", out): 2, (text, TRAINED, there): 2,
        (text, TRAINED, tmp_path / "link", "--force"): 2, (bad, TRAINED, out): 1, (tmp_path, TRAINED, out): 2,
        (text, old, out): 4, (text, TRAINED, tmp_path / "no" / "folder"): 2,
    }  # fmt: skip
    for (source, tokenizer, target, *options), code in cases.items():
        result = run(source, "--tokenizer", tokenizer, "--out", target, *options)
        assert result.returncode == code, (source, tokenizer, target, result.stderr)
    missing = run(text, "--tokenizer", TRAINED, "--out", out, program=WITHOUT_TOKENIZERS)
    assert missing.returncode == 2
    assert "ninfer[convert]" in missing.stderr
    assert not out.exists()
    assert there.read_text() == "mine"
    assert run(text, "--tokenizer", TRAINED, "--out", there, "--force", "--quiet").stdout == ""
    assert there.stat().st_size == 640 * 8
