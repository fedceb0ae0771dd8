"""The proposal head's rows: golden selections, ranking files, tables taken over from an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_convert.draft_head import ID_TABLE, draft_ids, load_ranking, no_ranking, select_draft_ids
from ninfer_format import ArtifactWriter, Directory, Identity, NinferError, SourceError, TensorEntry, UsageError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "index.json").read_text())["draft_shortlist"]


@pytest.mark.parametrize("case", GOLDEN, ids=range(len(GOLDEN)))
def test_golden_selection(case: dict[str, Any]) -> None:
    selected = select_draft_ids(np.array(case["counts"], np.int64), case["n"], case["forced"])
    assert selected.dtype == np.int32
    assert selected.tolist() == case["selected"]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_selection_is_as_long_as_asked_distinct_and_holds_the_forced_ids(
    counts: list[int], data: st.DataObject
) -> None:
    n_rows = data.draw(st.integers(1, len(counts)))
    forced = data.draw(st.sets(st.integers(-2, len(counts) + 2)))
    ids = select_draft_ids(np.array(counts, np.int64), n_rows, forced).tolist()
    usable = {i for i in forced if 0 <= i < len(counts)}
    assert len(ids) == len(set(ids)) == n_rows
    assert set(ids) >= usable or (set(ids) < usable and len(usable) > n_rows)
    assert [counts[i] for i in ids] == sorted((counts[i] for i in ids), reverse=True)
    left_out = [counts[i] for i in range(len(counts)) if i not in ids and i not in usable]
    assert max(left_out, default=0) <= min((counts[i] for i in ids if i not in usable), default=3)


def test_without_a_ranking_ids_go_by_number_after_the_forced_rule() -> None:
    assert draft_ids(no_ranking(10), 5, {7, 2}).tolist() == [0, 1, 3, 2, 7]
    assert "ranked by token id" in no_ranking(10).label


@pytest.mark.parametrize("n_rows", [0, 11])
def test_impossible_row_count_is_refused(n_rows: int) -> None:
    with pytest.raises(SourceError, match="cannot be chosen from 10 token ids"):
        select_draft_ids(np.zeros(10, np.int64), n_rows, ())


def test_counts_file_uses_the_first_row_and_no_padding_rows(tmp_path: Path) -> None:
    counts = np.arange(24, dtype="<i8").reshape(2, 12)
    (tmp_path / "r.i64").write_bytes(counts.tobytes())
    ranking = load_ranking(tmp_path / "r.i64", vocab_rows=12, n_ids=10)
    assert ranking.counts is not None
    assert ranking.counts.tolist() == list(range(10))
    assert draft_ids(ranking, 3, {0}).tolist() == [9, 8, 0]
    assert ranking.sha256 is not None


@pytest.mark.parametrize("n_bytes", [0, 1, 8 * 12 - 8, 8 * 12 + 8])
def test_counts_file_of_another_size_is_refused(tmp_path: Path, n_bytes: int) -> None:
    (tmp_path / "r.i64").write_bytes(b"\0" * n_bytes)
    with pytest.raises(SourceError, match=f"{n_bytes} bytes are not a positive multiple of 96"):
        load_ranking(tmp_path / "r.i64", vocab_rows=12, n_ids=10)


def test_negative_count_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.i64").write_bytes(np.array([1, 2, -3, 4], "<i8").tobytes())
    with pytest.raises(SourceError, match="count -3 of id 2"):
        load_ranking(tmp_path / "r.i64", vocab_rows=4, n_ids=4)


def test_missing_ranking_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_ranking(tmp_path / "none", vocab_rows=4, n_ids=4)


def artifact(path: Path, name: str, ids: list[int]) -> Path:
    payload = np.array(ids, "<i4").tobytes()
    entry = TensorEntry(name, (len(ids),), "I32", "contiguous-le-v1", 0, len(payload))
    with ArtifactWriter(path, Directory(Identity("m", "w"), (entry,))) as writer:
        writer.write(name, payload)
        writer.commit()
    return path


def test_id_table_of_an_artifact_is_taken_over(tmp_path: Path) -> None:
    ranking = load_ranking(artifact(tmp_path / "a.ninfer", ID_TABLE, [5, 1, 9]), vocab_rows=12, n_ids=10)
    assert draft_ids(ranking, 3, {9}).tolist() == [5, 1, 9]
    assert "m/w" in ranking.label


@pytest.mark.parametrize(
    ("ids", "n_rows", "forced", "expected"),
    [([5, 1, 10], 3, (), "has ids 0 to 9"), ([5, -1, 3], 3, (), "from -1"), ([5, 1, 5], 3, (), "names an id twice"),
     ([5, 1, 3], 2, (), "has 3 rows"), ([5, 1, 3], 3, (2,), "lacks special token 2")],
)  # fmt: skip
def test_id_table_of_another_model_is_refused(
    tmp_path: Path, ids: list[int], n_rows: int, forced: tuple[int, ...], expected: str
) -> None:
    path = artifact(tmp_path / "a.ninfer", ID_TABLE, ids)
    with pytest.raises(SourceError, match=expected):
        draft_ids(load_ranking(path, vocab_rows=12, n_ids=10), n_rows, forced)


def test_artifact_without_a_table_is_refused(tmp_path: Path) -> None:
    path = artifact(tmp_path / "a.ninfer", "other", [1])
    with pytest.raises(NinferError, match="has no text/draft_head_token_ids"):
        load_ranking(path, vocab_rows=12, n_ids=10)
