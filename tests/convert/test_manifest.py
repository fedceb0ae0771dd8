"""What is published with an artifact: a manifest of facts, sums that check, nothing private, nothing overwritten."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ninfer_convert import publish as publish_module
from ninfer_convert.card import FILE_NAME as CARD
from ninfer_convert.manifest import FILE_NAME as MANIFEST
from ninfer_convert.publish import SUMS, publish
from ninfer_convert.report import report_of
from ninfer_convert.source_facts import licence_of, source_facts
from ninfer_format import Artifact, DigestError, StorageError, UsageError
from ninfer_format.model_config import config_of
from ninfer_format.sums import digest_for, read_sums
from ninfer_format.writer import write_atomically
from tests.convert.published import built
from tests.convert.test_convert_cli import document, run
from tests.convert.tiny import TinyCheckpoint, tiny_dflash

SIDE_FILES = (CARD, MANIFEST, SUMS)
NAMED = "---\nlicense: \"other\"  # why\nlicense_name: 'my licence'\nlicense_link: LICENSE # x\n---\n"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def manifest_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return content


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    folder.mkdir()
    return folder / "model.ninfer"


def test_manifest_states_the_facts_of_the_file(tiny: TinyCheckpoint, out: Path) -> None:
    report = built(tiny.folder, out)
    written = publish(out)
    assert written.files == tuple(out.parent / name for name in SIDE_FILES)
    assert written.sha256 == sha256(out)
    manifest = manifest_of(out.parent)
    assert (manifest["schema"], manifest["schema_version"]) == ("ninfer.artifact-manifest", 1)
    facts, inventory = manifest["artifact"], manifest["inventory"]
    with Artifact.open(out) as artifact:
        assert f"{facts['model_id']}/{facts['weights_id']}" == str(artifact.identity)
        assert facts["payload_offset"] == artifact.payload_offset
        assert (facts["file"], facts["bytes"], facts["sha256"]) == (out.name, artifact.file_bytes, sha256(out))
        assert (facts["published_contract"], facts["published_artifact"]) == (False, None)
        assert inventory["objects"] == len(artifact.objects)
        assert inventory["object_bytes"] == sum(entry.n_bytes for entry in artifact.objects)
        assert sum(f["bytes"] for f in inventory["formats"].values()) == inventory["tensor_bytes"]
        header = out.read_bytes()[16 : 16 + facts["directory_bytes"]]
        assert hashlib.sha256(header).hexdigest() == facts["directory_sha256"]
        recipe = config_of(artifact).recipe
        assert manifest["conversion"]["recipe"]["formats"] == dict(recipe.formats)
        for name, digest in manifest["frontend_sha256"].items():
            assert hashlib.sha256(artifact.payload(name)).hexdigest() == digest
    (source,) = manifest["sources"]
    assert source["name"] == tiny.folder.name
    assert source["config_sha256"] == sha256(tiny.folder / "config.json")
    assert [file["file"] for file in source["files"]] == tiny.shards()
    for file in source["files"]:
        content = (tiny.folder / file["file"]).read_bytes()
        length = int.from_bytes(content[:8], "little")
        assert file["header_sha256"] in {hashlib.sha256(content[a : 8 + length]).hexdigest() for a in (0, 8)}
    assert manifest["conversion"]["draft_head"] == report["draft_head"]
    assert manifest["runtime"]["minimum_version"] == "0.1.0"


def test_companion_ranking_and_recipe_are_listed(moe: TinyCheckpoint, out: Path, tmp_path: Path) -> None:
    counts = tmp_path / "counts.i64"
    counts.write_bytes(bytes(384 * 8))
    built(moe.folder, out, dflash=tiny_dflash(tmp_path / "companion"), ranking=counts, recipe="w8", no_vision=True)
    publish(out)
    manifest = manifest_of(out.parent)
    assert [source["role"] for source in manifest["sources"]] == ["source", "dflash"]
    assert manifest["conversion"]["draft_head"]["ranking_sha256"] == sha256(counts)
    options = manifest["conversion"]["options"]
    assert (options["no_vision"], options["no_mtp"]) == (True, False)
    assert not {"source", "dflash", "ranking", "device"} & options.keys()


def test_nothing_private_and_nothing_by_chance_is_published(
    dense: TinyCheckpoint, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(dense.folder, out, jobs=1)
    publish(out)
    first = {name: (out.parent / name).read_bytes() for name in SIDE_FILES}
    assert all(str(tmp_path).encode() not in content for content in first.values())
    elsewhere = tmp_path / "other place" / dense.folder.name
    shutil.copytree(dense.folder, elsewhere)
    again = tmp_path / "again" / out.name
    again.parent.mkdir()

    def fail(*arguments: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr("ninfer_convert.pipeline._publish", fail)
    with pytest.raises(StorageError):
        built(elsewhere, again, jobs=2)
    monkeypatch.undo()
    report = built(elsewhere, again, jobs=3, resume=True)
    assert report["resumed_objects"] > 0
    publish(again)
    assert {name: (again.parent / name).read_bytes() for name in SIDE_FILES} == first


def test_sums_check_with_the_usual_tools_and_keep_other_lines(dense: TinyCheckpoint, out: Path) -> None:
    built(dense.folder, out)
    sums, other = out.parent / SUMS, out.parent / "README.md"
    other.write_text("hello\n")
    sums.write_text(f"# mine\n{sha256(other)}  README.md\n{'0' * 64} *{out.name}\n")
    publish(out)
    entries = read_sums(sums)
    assert [os.fsdecode(name) for name, _ in entries] == ["README.md", out.name, MANIFEST]
    assert digest_for(out, entries, sums) == sha256(out)
    if tool := shutil.which("sha256sum"):
        checked = subprocess.run([tool, "-c", SUMS], cwd=out.parent, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


# --- what is in the way -----------------------------------------------------------------------------------------------


def test_publishing_again_changes_nothing_and_needs_no_force(dense: TinyCheckpoint, out: Path) -> None:
    built(dense.folder, out)
    publish(out)
    before = {name: (out.parent / name).read_bytes() for name in SIDE_FILES}
    publish(out)
    assert {name: (out.parent / name).read_bytes() for name in SIDE_FILES} == before


def test_edited_card_and_foreign_manifest_are_kept_unless_forced(dense: TinyCheckpoint, out: Path) -> None:
    built(dense.folder, out)
    publish(out)
    card = out.parent / CARD
    card.write_text("my own words")
    with pytest.raises(UsageError, match="edited"):
        publish(out)
    assert card.read_text() == "my own words"
    card.unlink()
    for foreign in ("{}", "[", json.dumps({"schema": "ninfer.artifact-manifest", "artifact": {"file": "b.ninfer"}})):
        (out.parent / MANIFEST).write_text(foreign)
        with pytest.raises(UsageError, match="another artifact"):
            publish(out)
        assert (out.parent / MANIFEST).read_text() == foreign
    publish(out, force=True)
    assert manifest_of(out.parent)["artifact"]["file"] == out.name


def test_report_of_another_artifact_is_refused(dense: TinyCheckpoint, out: Path, tmp_path: Path) -> None:
    built(dense.folder, out)
    built(dense.folder, tmp_path / "w8.ninfer", recipe="w8")
    own = report_of(out).read_bytes()
    shutil.copy(report_of(tmp_path / "w8.ninfer"), report_of(out))
    with pytest.raises(DigestError, match="is not the report of"):
        publish(out)
    report_of(out).write_bytes(own)
    content = bytearray(out.read_bytes())
    content[-1] ^= 1
    out.write_bytes(content)
    with pytest.raises(DigestError, match="is not the report of"):
        publish(out)
    assert run("publish", out).returncode == 1
    assert not any((out.parent / name).exists() for name in SIDE_FILES)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"schema": "ninfer.conversion/1"}', b'{"schema": "other/1"}'])
def test_missing_or_wrong_report_is_usage(content: bytes | None, dense: TinyCheckpoint, out: Path) -> None:
    built(dense.folder, out)
    report_of(out).unlink()
    if content is not None:
        report_of(out).write_bytes(content)
    result = run("publish", out)
    assert result.returncode == 2
    assert "conversion.json" in result.stderr


def test_failure_between_the_files_leaves_no_sums(
    dense: TinyCheckpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(dense.folder, out)

    def failing(path: Path, content: bytes) -> None:
        if path.name == MANIFEST:
            raise StorageError("no space left")
        write_atomically(path, content)

    monkeypatch.setattr(publish_module, "write_atomically", failing)
    with pytest.raises(StorageError):
        publish(out)
    assert sorted(path.name for path in out.parent.iterdir()) == sorted([CARD, out.name, report_of(out).name])


# --- the commands -----------------------------------------------------------------------------------------------------


def test_build_publishes_on_request(dense: TinyCheckpoint, out: Path) -> None:
    result = run("build", dense.folder, out, "--publish", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    done = document(result)
    assert done["sha256"] == sha256(out)
    assert done["side_files"] == [str(out.parent / name) for name in SIDE_FILES]
    assert run("publish", out, "--json").returncode == 0
    text = run("publish", out)
    assert done["sha256"] in text.stdout
    assert str(out.parent / CARD) in text.stdout


def test_build_refuses_before_it_starts(dense: TinyCheckpoint, out: Path) -> None:
    (out.parent / CARD).write_text("mine")
    result = run("build", dense.folder, out, "--publish")
    assert result.returncode == 2
    assert CARD in result.stderr
    assert sorted(path.name for path in out.parent.iterdir()) == [CARD]
    assert run("build", dense.folder, out, "--publish", "--force", "--quiet").returncode == 0
    assert (out.parent / CARD).read_text() != "mine"


# --- sources ----------------------------------------------------------------------------------------------------------


def test_hub_snapshot_gives_repository_revision_and_content_digests(
    dense: TinyCheckpoint, out: Path, tmp_path: Path
) -> None:
    root, commit = tmp_path / "models--org--My-Model", "0123456789abcdef0123456789abcdef01234567"
    snapshot, blobs = root / "snapshots" / commit, root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in dense.folder.iterdir():
        name = sha256(file) if file.suffix == ".safetensors" else hashlib.sha1(file.read_bytes()).hexdigest()
        shutil.copy(file, blobs / name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / name)
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    built(snapshot, out)
    publish(out)
    (source,) = manifest_of(out.parent)["sources"]
    assert (source["repository"], source["revision"], source["name"]) == ("org/My-Model", commit, "My-Model")
    assert [file["sha256"] for file in source["files"]] == [sha256(dense.folder / name) for name in dense.shards()]
    assert source["licence"]["id"] == "apache-2.0"
    card = (out.parent / CARD).read_text()
    assert f"ninfer-convert build org/My-Model@{commit} model.ninfer" in card
    assert 'base_model: "org/My-Model"' in card


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlicense: mit\n---\ntext", ("mit", None, None)),
        (NAMED, ("other", "my licence", "LICENSE")),
        ("---\ntags:\n- a\nlicense:\n- mit\n- apache-2.0\n---\n", ("mit, apache-2.0", None, None)),
        ("---\nlicense: [mit]\n---\n", ("mit", None, None)),
        ("---\r\nlicense: mit\r\n---\r\n", ("mit", None, None)),
        ("---\nlicense: mit\n", None),
        ("license: mit\n", None),
        ("---\nx: 1\n---\nlicense: mit\n", None),
        ("\xff---", None),
        ("", None),
    ],
)  # fmt: skip
def test_licence_of_a_readme(readme: str, expected: tuple[str | None, ...] | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(readme.encode("latin-1"))
    found = licence_of(tmp_path)
    assert (None if found is None else (found["id"], found["name"], found["link"])) == expected


def test_licence_files_are_named_with_title_and_digest(tmp_path: Path) -> None:
    (tmp_path / "LICENSE.txt").write_text("\n   Apache License\nVersion 2.0\n")
    (tmp_path / "licensed_to.py").write_text("no")
    found = licence_of(tmp_path)
    assert found is not None
    (file,) = found["files"]
    assert (file["file"], file["title"]) == ("LICENSE.txt", "Apache License")
    assert file["sha256"] == sha256(tmp_path / "LICENSE.txt")
    facts = source_facts(tmp_path)
    assert (facts["repository"], facts["revision"], facts["config_sha256"]) == (None, None, None)
