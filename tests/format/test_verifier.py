"""``verify``: what each level finds, what it says it did not check, and what its exit code is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ninfer_format import verify
from ninfer_format.digests import CHUNK_BYTES, build_index, index_path, write_index
from ninfer_format.directory import Directory, Identity, ResourceEntry, TensorEntry, canonical_json
from ninfer_format.errors import DigestError, UsageError
from ninfer_format.inventory import plan_inventory
from ninfer_format.prefix import prefix_bytes
from ninfer_format.published import PUBLISHED
from ninfer_format.verifier import LEVELS, Report
from tests.format.samples import (
    CHUNKY,
    GOLDEN,
    custom_inventory,
    flipped,
    golden_cases,
    packed,
    tensor,
    write_artifact,
    write_custom,
)

TINY = GOLDEN / "tiny_v2.ninfer"


def codes(report: Report) -> set[str]:
    return {problem.code for problem in report.problems}


@pytest.fixture(scope="module")
def chunky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_artifact(tmp_path_factory.mktemp("chunky") / "chunky.ninfer", CHUNKY, seed=3)
    write_index(build_index(path), index_path(path))
    return path


@pytest.mark.parametrize("level", LEVELS)
def test_golden_is_good_at_every_level(level: str) -> None:
    report = verify(TINY, level, strict=True)  # type: ignore[arg-type]
    assert (report.ok, report.exit_code, report.problems) == (True, 0, ())
    assert report.identity == Identity("test-model", "test-weights")
    assert report.file_bytes == 12_548
    assert (report.sha256 is not None) == (level == "full")


def test_each_level_says_what_it_did_not_check() -> None:
    unchecked: dict[str, str] = {level: " | ".join(verify(TINY, level).not_checked) for level in LEVELS}
    assert "geometry" in unchecked["header"]
    assert "inventory (identity test-model/test-weights" in unchecked["structure"]
    for level in ("header", "structure", "numeric"):
        assert "payload bytes (--full)" in unchecked[level]
    for level in ("structure", "full"):
        assert "payload values (--level numeric)" in unchecked[level]
    assert "payload bytes" not in unchecked["full"]
    for level in ("structure", "full", "numeric"):
        assert "padding and packing (--strict)" in unchecked[level]
    assert "padding" not in " ".join(verify(TINY, "structure", strict=True).not_checked)


def test_full_gives_the_digest_and_compares_it_with_an_expected_one() -> None:
    digest = hashlib.sha256(TINY.read_bytes()).hexdigest()
    assert verify(TINY, "full").sha256 == digest
    assert verify(TINY, "full", expected_sha256=digest.upper()).ok
    bad = verify(TINY, "structure", expected_sha256="0" * 64)
    assert (codes(bad), bad.exit_code, bad.sha256, bad.level) == ({"digest"}, 1, digest, "full")
    both = verify(TINY, "numeric", expected_sha256=digest)
    assert (both.ok, both.level) == (True, "numeric")
    assert {"payload values", "SHA-256 of the whole file"} <= set(both.checked)
    assert not any("payload" in text for text in both.not_checked)


def test_published_artifact_is_named_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    from ninfer_format import verifier

    digest = hashlib.sha256(TINY.read_bytes()).hexdigest()
    monkeypatch.setattr(verifier, "known_digest", {digest: "the tiny one"}.get)
    assert verify(TINY, "full").known_as == "the tiny one"
    assert verify(TINY, "structure").known_as is None


def test_version_1_and_later_ones_are_unsupported(tmp_path: Path) -> None:
    report = verify(GOLDEN / "tiny_v1.ninfer")
    assert (codes(report), report.exit_code) == ({"version"}, 4)
    assert "ninfer-verify migrate" in report.problems[0].message
    for version in (0, 3, 9):
        path = tmp_path / "v.ninfer"
        path.write_bytes(prefix_bytes(version, 1351) + TINY.read_bytes()[16:])
        assert verify(path, "full").exit_code == 4


def test_level_must_be_one_of_four_and_partial_needs_an_index() -> None:
    with pytest.raises(UsageError, match="header, structure, full, numeric"):
        verify(TINY, "deep")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="index"):
        verify(TINY, partial=True)
    with pytest.raises(UsageError, match="no such file"):
        verify(TINY.with_name("absent"))


# --- many problems at once ------------------------------------------------------------------------------------------


def write_lying(path: Path, directory: Directory, file_bytes: int) -> Path:
    text = canonical_json(directory)
    path.write_bytes(prefix_bytes(2, len(text)) + text)
    os.truncate(path, file_bytes)
    return path


def test_every_wrong_object_is_reported(tmp_path: Path) -> None:
    good = packed([tensor(f"t{i}", (64,), "FP32", 0) for i in range(8)])
    lies = list(good)
    lies[1] = replace(good[1], n_bytes=255)
    lies[3] = replace(good[3], offset=good[3].offset + 4)
    lies[5] = replace(good[5], offset=good[4].offset)
    lies[7] = replace(good[7], offset=1 << 40)
    report = verify(write_lying(tmp_path / "a", Directory(Identity("m", "w"), tuple(lies)), 4096 + 8 * 256))
    assert [p.object for p in report.problems] == ["t1", "t3", "t5", "t7"]
    assert [p.code for p in report.problems] == ["signature", "geometry", "geometry", "truncated"]
    assert "'t4'" in report.problems[2].message
    assert report.problems[3].byte_range == (4096 + (1 << 40), 4096 + (1 << 40) + 256)
    assert report.exit_code == 1


def test_unknown_names_alone_are_unsupported_but_not_beside_damage(tmp_path: Path) -> None:
    good = packed([tensor(f"t{i}", (64,), "FP32", 0) for i in range(3)])
    assert isinstance(good[0], TensorEntry)
    unknown = replace(good[0], format="FP8")
    report = verify(write_lying(tmp_path / "a", Directory(Identity("m", "w"), (unknown, *good[1:])), 4096 + 768))
    assert (codes(report), report.exit_code) == ({"registry"}, 4)
    report = verify(write_lying(tmp_path / "b", Directory(Identity("m", "w"), (unknown, *good[1:])), 4096 + 767))
    assert (codes(report), report.exit_code) == ({"registry", "truncated"}, 1)


def test_header_level_accepts_what_only_the_structure_shows(tmp_path: Path) -> None:
    objects = (replace(tensor("t", (64,), "FP32", 0), offset=3),)
    path = write_lying(tmp_path / "a", Directory(Identity("m", "w"), objects), 4096 + 300)
    assert verify(path, "header").ok
    assert codes(verify(path)) == {"geometry"}


# --- inventory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", [str(identity) for identity in PUBLISHED])
def test_published_identity_is_compared_with_its_inventory(identity: str, tmp_path: Path) -> None:
    planned = plan_inventory(identity)
    path = write_lying(tmp_path / "a", planned.directory, planned.file_bytes)
    report = verify(path)
    assert report.ok
    assert "inventory" in report.checked
    less = Directory(planned.identity, planned.objects[:-1])
    report = verify(write_lying(tmp_path / "b", less, planned.file_bytes))
    assert codes(report) == {"inventory", "trailing"}
    assert planned.objects[-1].name in report.problems[0].message
    with open(path, "ab") as stream:
        stream.write(b"\0")
    assert codes(verify(path)) == {"trailing"}


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_custom_artifact_is_compared_with_its_own_config(name: str, tmp_path: Path) -> None:
    planned, config = custom_inventory(name)
    path = write_custom(tmp_path / "a", planned.directory, config)
    for strict in (False, True):
        report = verify(path, strict=strict)
        assert report.ok, report.problems
        assert "inventory" in report.checked
    victim = planned.objects[10]
    less = Directory(planned.identity, tuple(e for e in planned.objects if e is not victim))
    report = verify(write_custom(tmp_path / "b", less, config))
    assert codes(report) == {"inventory"}
    assert victim.name in report.problems[0].message
    assert "packing" in codes(verify(tmp_path / "b", strict=True))


def test_custom_artifact_with_a_broken_config_is_refused(tmp_path: Path) -> None:
    planned, config = custom_inventory()
    report = verify(write_custom(tmp_path / "a", planned.directory, b" " * len(config)))
    assert (codes(report), report.problems[0].object) == ({"inventory"}, "model/config.json")


def test_custom_draft_ids_are_held_below_the_vocabulary(tmp_path: Path) -> None:
    planned, config = custom_inventory()
    path = write_custom(tmp_path / "a", planned.directory, config)
    ids = next(e for e in planned.objects if e.name == "text/draft_head_token_ids")
    begin = planned.payload_offset + ids.offset
    good = b"".join(i.to_bytes(4, "little") for i in range(ids.n_bytes // 4))
    for content, ok in ((good, True), (good[:-4] + (623 + 17).to_bytes(4, "little"), False)):
        with open(path, "r+b") as stream:
            stream.seek(begin)
            stream.write(content)
        assert verify(path, "numeric").ok == ok


# --- strict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, code",
    [
        ("ok-gap", "packing"),
        ("ok-trailing", "trailing"),
        ("ok-dirty-padding", "padding"),
    ],
)
def test_strict_refuses_what_a_generic_reader_accepts(case: str, code: str) -> None:
    path = GOLDEN / "malformed" / f"{case}.ninfer"
    assert verify(path).ok
    report = verify(path, strict=True)
    assert code in codes(report)
    assert report.exit_code == 1


def test_strict_names_the_first_stray_byte_of_a_gap(tmp_path: Path) -> None:
    directory = Directory(
        Identity("m", "w"),
        packed([ResourceEntry("r", "raw-bytes-v1", 0, 3), tensor("t", (3,), "FP32", 0)]),
    )
    path = write_artifact(tmp_path / "a", directory)
    assert verify(path, strict=True).ok
    bad = flipped(path, tmp_path / "b", 4096 + 100)
    assert verify(bad).ok
    (problem,) = verify(bad, strict=True).problems
    assert (problem.code, problem.object, problem.byte_range) == ("padding", "padding", (4099, 4352))
    assert "4196" in problem.message


@pytest.mark.parametrize("other", ["Text/Norm", "TEXT/NORM", "text/norm\u0301", "text/n\u00f6rm"])
def test_strict_refuses_names_that_look_alike(other: str, tmp_path: Path) -> None:
    first = {"text/norm\u0301": "text/nor\u1e3f", "text/n\u00f6rm": "text/no\u0308rm"}.get(other, "text/norm")
    objects = packed([tensor(name, (3,), "FP32", 0) for name in (first, other)])
    path = write_artifact(tmp_path / "a", Directory(Identity("m", "w"), objects))
    assert verify(path).ok
    (problem,) = verify(path, strict=True).problems
    assert (problem.code, problem.object) == ("name", other)
    assert repr(first) in problem.message


def test_strict_accepts_names_that_are_only_similar(tmp_path: Path) -> None:
    objects = packed([tensor(name, (3,), "FP32", 0) for name in ("text/norm", "text/norms", "text/n\u00f6rm")])
    assert verify(write_artifact(tmp_path / "a", Directory(Identity("m", "w"), objects)), strict=True).ok


# --- payload values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden_cases("payload_level"), ids=lambda case: case["id"])
def test_payload_edit_is_found_by_the_numeric_level_only(case: dict[str, object], tmp_path: Path) -> None:
    recipe = case["recipe"]
    assert isinstance(recipe, dict)
    content = bytearray((GOLDEN / recipe["base"]).read_bytes())
    for position, value in recipe["set_bytes"]:
        content[position] = int(value, 16)
    path = tmp_path / "a.ninfer"
    path.write_bytes(content)
    assert hashlib.sha256(content).hexdigest() == case["result_sha256"]
    assert verify(path, "full").ok
    report = verify(path, "numeric")
    assert codes(report) == {"payload"}
    assert {problem.object for problem in report.problems} == {case["object"]}
    assert report.exit_code == 1
    begin, end = report.problems[0].byte_range or (0, 0)
    assert all(begin <= position < end for position, _ in recipe["set_bytes"])


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_numeric_result_does_not_depend_on_the_number_of_threads(jobs: int, tmp_path: Path) -> None:
    planned, config = custom_inventory("moe")
    path = write_custom(tmp_path / "a", planned.directory, config)
    with open(path, "r+b") as stream:
        for entry in planned.objects:
            if isinstance(entry, TensorEntry) and entry.format.startswith("Q"):
                stream.seek(planned.payload_offset + entry.offset + entry.n_bytes - 1)
                stream.write(b"\xff")
    report, alone = verify(path, "numeric", jobs=jobs), verify(path, "numeric", jobs=1)
    assert report.problems == alone.problems
    assert len(report.problems) > 10


# --- with an index --------------------------------------------------------------------------------------------------


def test_index_proves_chunks_and_objects_and_only_records_the_file_digest(chunky: Path) -> None:
    report = verify(chunky, "full", index=index_path(chunky))
    assert report.ok
    assert report.sha256 is None
    assert report.recorded_sha256 == hashlib.sha256(chunky.read_bytes()).hexdigest()
    assert "every chunk and object by index (4 of 4 chunks)" in report.checked
    assert any("only records" in text for text in report.not_checked)


def test_index_names_the_damaged_object_and_bytes(chunky: Path, tmp_path: Path) -> None:
    bad = flipped(chunky, tmp_path / "bad", 3 * CHUNK_BYTES + 5)
    (problem,) = verify(bad, "full", index=index_path(chunky)).problems
    assert (problem.code, problem.object) == ("digest", "text/big")
    begin, end = problem.byte_range or (0, 0)
    assert begin <= 3 * CHUNK_BYTES + 5 < end


def test_expected_digest_that_differs_is_located_with_the_index(chunky: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(chunky.read_bytes()).hexdigest()
    bad = flipped(chunky, tmp_path / "bad", 4096 + 5)
    report = verify(bad, expected_sha256=digest, index=index_path(chunky))
    assert [p.object for p in report.problems] == [None, "frontend/note"]
    assert report.sha256 == hashlib.sha256(bad.read_bytes()).hexdigest()
    assert report.recorded_sha256 is None
    good = verify(chunky, expected_sha256=digest, index=index_path(chunky))
    assert (good.ok, good.sha256) == (True, digest)


def test_damaged_header_is_located_even_when_it_no_longer_parses(chunky: Path, tmp_path: Path) -> None:
    for position in (0, 9, 20):
        report = verify(flipped(chunky, tmp_path / "bad", position), "full", index=index_path(chunky))
        assert "header" in {p.object for p in report.problems}
        assert "digest" in codes(report)


def test_index_of_another_size_is_stale_and_of_another_file_foreign(chunky: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    longer.write_bytes(chunky.read_bytes() + b"x")
    shorter = tmp_path / "shorter"
    shorter.write_bytes(chunky.read_bytes()[:-1])
    other = write_artifact(tmp_path / "other", CHUNKY, seed=4)
    for path, message in ((longer, "outdated"), (shorter, "--partial"), (other, "another file")):
        report = verify(path, "full", index=index_path(chunky))
        assert "index" in codes(report)
        assert message in next(p for p in report.problems if p.code == "index").message
        assert report.exit_code == 1
        assert report.recorded_sha256 is None


def test_damaged_index_is_an_error_of_the_index(chunky: Path, tmp_path: Path) -> None:
    bad = flipped(index_path(chunky), tmp_path / "bad.idx", 100)
    with pytest.raises(DigestError, match=r"bad\.idx"):
        verify(chunky, "full", index=bad)


def test_partial_check_counts_chunks_and_looks_at_nothing_else(chunky: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    for cut, count in ((0, 0), (CHUNK_BYTES, 1), (3 * CHUNK_BYTES - 1, 2), (chunky.stat().st_size, 4)):
        part.write_bytes(chunky.read_bytes()[:cut])
        report = verify(part, index=index_path(chunky), partial=True)
        assert report.ok
        assert any(f"({count} of 4 chunks)" in text for text in report.checked)
        assert report.not_checked
    part.write_bytes(chunky.read_bytes() + b"x")
    assert codes(verify(part, index=index_path(chunky), partial=True)) == {"index"}
