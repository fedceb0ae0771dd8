"""``set-template`` and ``set-id``: only what was asked for changes, and a published name has to be earned."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_convert.edit import TEMPLATE, TOKENIZER_CONFIG, apply, plan_identity, plan_template
from ninfer_convert.json_member import replace_member
from ninfer_format import (
    Artifact,
    ArtifactError,
    DiskFullError,
    Identity,
    InventoryError,
    ModelConfig,
    UsageError,
    plan_inventory,
)
from ninfer_format.inventory import expected_inventory
from ninfer_format.model_config import config_of, published_config
from ninfer_format.published import CONFIG_RESOURCE, PUBLISHED, TOKENIZER_IDS, published
from ninfer_format.recipes import recipe_for
from tests.convert.exported import artifact_of, sparse_artifact
from tests.convert.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
MAIN = "import sys; from ninfer_convert.cli import main; sys.argv[0] = 'ninfer-convert'; main()"
JINJA = "{% for m in messages %}«{{ m.content }}»\n{% if loop.first %}{% continue %}{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense artifact, the same for every test here."""
    folder = tmp_path_factory.mktemp("artifact")
    return artifact_of(tiny_checkpoint(folder / "tiny-dense").folder, folder / "x.ninfer")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    return result


def payloads(path: Path) -> dict[str, bytes]:
    """Every object's bytes; the file's directory must be what its config calls for, packed."""
    with Artifact.open(path) as opened:
        expected = expected_inventory(opened.directory, config_of(opened))
        assert opened.directory == expected.directory
        return {name: bytes(opened.payload(name)) for name in opened.objects.names()}


def written(file: Path, text: str | bytes) -> Path:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def set_template(source: Path, out: Path, file: Path, **options: Any) -> tuple[str, ...]:
    with Artifact.open(source) as opened:
        edit = plan_template(opened, file)
        apply(edit, out, **options)
        return edit.notes


def set_id(source: Path, out: Path, identity: str, **options: Any) -> tuple[str, ...]:
    with Artifact.open(source) as opened:
        edit = plan_identity(opened, Identity.parse(identity))
        apply(edit, out, **options)
        return edit.notes


# --- set-template ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [JINJA, "x", "é" * 5000, "{{ bos_token }}\r\n"])
def test_template_is_replaced_in_both_places_and_nothing_else_changes(
    artifact: Path, tmp_path: Path, template: str
) -> None:
    notes = set_template(artifact, tmp_path / "y.ninfer", written(tmp_path / "t.jinja", template))
    before, after = payloads(artifact), payloads(tmp_path / "y.ninfer")
    assert after[TEMPLATE] == template.encode()
    config = json.loads(after[TOKENIZER_CONFIG])
    assert config == json.loads(before[TOKENIZER_CONFIG]) | {"chat_template": template}
    assert {n for n in before if before[n] != after[n]} == {TEMPLATE, TOKENIZER_CONFIG}
    assert before.keys() == after.keys()
    assert any("syntax is Jinja's" in note for note in notes)
    with Artifact.open(artifact) as a, Artifact.open(tmp_path / "y.ninfer") as b:
        assert a.identity == b.identity


def test_first_template_set_again_gives_the_first_file_again(artifact: Path, tmp_path: Path) -> None:
    set_template(artifact, tmp_path / "y.ninfer", written(tmp_path / "t.jinja", JINJA))
    with Artifact.open(artifact) as opened:
        first = written(tmp_path / "first.jinja", bytes(opened.payload(TEMPLATE)))
    set_template(tmp_path / "y.ninfer", tmp_path / "z.ninfer", first)
    assert (tmp_path / "z.ninfer").read_bytes() == artifact.read_bytes()


@pytest.mark.parametrize("member", [None, [{"name": "default", "template": "x"}]])
def test_tokenizer_config_without_a_text_to_replace_stays(tmp_path: Path, member: object) -> None:
    source = tiny_checkpoint(tmp_path / "tiny")
    config = json.loads(source.frontend["tokenizer_config.json"])
    del config["chat_template"]
    if member is not None:
        config["chat_template"] = member
    source.frontend["tokenizer_config.json"] = json.dumps(config).encode()
    source.save()
    made = artifact_of(source.folder, tmp_path / "x.ninfer")
    notes = set_template(made, tmp_path / "y.ninfer", written(tmp_path / "t.jinja", JINJA))
    after = payloads(tmp_path / "y.ninfer")
    assert after[TOKENIZER_CONFIG] == source.frontend["tokenizer_config.json"]
    assert after[TEMPLATE] == JINJA.encode()
    assert any("stays as it is" in note for note in notes)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"\xff{{ x }}", "not UTF-8"), (b"{% for %}", "line 1 is no Jinja"),
     (b"a\n{% if x %}b", "line 2 is no Jinja"), (b"version https://git-lfs.github.com/spec/v1", "LFS pointer"),
     (b"x" * ((1 << 20) + 1), "no chat template needs")],
)  # fmt: skip
def test_file_that_is_no_template_is_refused(artifact: Path, tmp_path: Path, content: bytes, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        set_template(artifact, tmp_path / "y.ninfer", written(tmp_path / "t.jinja", content))
    assert not (tmp_path / "y.ninfer").exists()


def test_container_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no model artifact"):
        set_template(GOLDEN / "tiny_v2.ninfer", tmp_path / "y.ninfer", written(tmp_path / "t.jinja", JINJA))


@settings(deadline=None)
@given(
    before=st.dictionaries(
        st.text(max_size=4), st.text() | st.integers() | st.lists(st.text(), max_size=2), max_size=4
    ),
    value=st.text(),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
)
def test_one_member_is_replaced_and_every_other_byte_stays(
    before: dict[str, Any], value: str, indent: int | None, ascii_only: bool
) -> None:
    document = before | {"chat_template": 'old {"chat_template": 1} ü'} | {"last": 1}
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    changed = replace_member(text, "chat_template", value)
    assert json.loads(changed) == document | {"chat_template": value}
    old = json.dumps(document["chat_template"], ensure_ascii=ascii_only)
    head, _, tail = text.rpartition(old)
    assert changed.startswith(head)
    assert changed.endswith(tail)


# --- set-id ---------------------------------------------------------------------------------------------------------


def test_custom_identity_changes_the_directory_alone(artifact: Path, tmp_path: Path) -> None:
    set_id(artifact, tmp_path / "y.ninfer", "my-model/groupwise-int")
    assert payloads(artifact) == payloads(tmp_path / "y.ninfer")
    with Artifact.open(tmp_path / "y.ninfer") as opened:
        assert str(opened.identity) == "my-model/groupwise-int"
    set_id(tmp_path / "y.ninfer", tmp_path / "z.ninfer", "tiny-dense/groupwise-int")
    assert (tmp_path / "z.ninfer").read_bytes() == artifact.read_bytes()


def test_weights_id_may_be_a_new_name_but_not_another_recipes(artifact: Path, tmp_path: Path) -> None:
    set_id(artifact, tmp_path / "y.ninfer", "my-model/my-mix")
    for other in ("w8", "bf16", "nvfp4"):
        with pytest.raises(UsageError, match=f"'{other}' names a recipe that this artifact does not have"):
            set_id(artifact, tmp_path / "z.ninfer", f"my-model/{other}")


@pytest.mark.parametrize("identity", ["a b/w8", "a/w 8", "ä/b", "/b", "a/", "a", "a/b/c", "-a/b"])
def test_ids_of_other_characters_are_refused(artifact: Path, tmp_path: Path, identity: str) -> None:
    with pytest.raises(UsageError):
        set_id(artifact, tmp_path / "y.ninfer", identity)


@pytest.mark.parametrize("identity", PUBLISHED, ids=str)
def test_published_identity_is_refused_with_reasons(artifact: Path, tmp_path: Path, identity: Identity) -> None:
    with pytest.raises(InventoryError, match=f"is not {identity}: .*more"):
        set_id(artifact, tmp_path / "y.ninfer", str(identity))
    assert not (tmp_path / "y.ninfer").exists()


def test_container_that_holds_no_model_gets_no_model_identity(tmp_path: Path) -> None:
    with pytest.raises(InventoryError):
        set_id(GOLDEN / "tiny_v2.ninfer", tmp_path / "y.ninfer", "a/b")


def published_frontend(identity: Identity, n_ids: int = TOKENIZER_IDS) -> dict[str, bytes]:
    """Six files of the published sizes; their content is made up, but the tokenizer has ``n_ids`` ids."""
    files = {name: b" " * resource.n_bytes for name, resource in published(identity).resources.items()}
    texts = {"frontend/tokenizer.json": {"model": {"vocab": {"a": 0, "b": n_ids - 1}}}, TOKENIZER_CONFIG: {}}
    return files | {name: json.dumps(text).encode().ljust(len(files[name])) for name, text in texts.items()}


@pytest.mark.parametrize("identity", PUBLISHED, ids=str)
def test_artifact_with_the_published_objects_and_config_may_have_the_published_name(
    tmp_path: Path, identity: Identity
) -> None:
    """The new directory is the published one to the byte, and the way back adds the config resource again."""
    config, files = published_config(identity), published_frontend(identity)
    custom = Identity("mine", "my-mix")
    made = sparse_artifact(tmp_path / "x.ninfer", config, custom, files)
    with Artifact.open(made) as opened:
        edit = plan_identity(opened, identity)
        assert edit.changes == {CONFIG_RESOURCE: None}
        inventory = plan_inventory(identity, resources={name: len(content) for name, content in files.items()})
        assert edit.directory == inventory.directory
        assert inventory.directory_sha256 == published(identity).directory_sha256
        assert any("0 of 6 frontend files have the digests" in note for note in edit.notes)
    back = sparse_artifact(tmp_path / "y.ninfer", config, identity, files)
    with Artifact.open(back) as opened, Artifact.open(made) as original:
        edit = plan_identity(opened, custom)
        assert edit.directory == original.directory
        assert edit.changes == {CONFIG_RESOURCE: bytes(original.payload(CONFIG_RESOURCE))}


def test_published_name_needs_the_published_config_and_tokenizer_too(tmp_path: Path) -> None:
    identity = Identity("qwen3.6-27b", "groupwise-int")
    config = published_config(identity)
    other = ModelConfig(
        {**config.text_config, "rms_norm_eps": 1e-5}, config.vision_config, config.token_ids, None, config.recipe,
        config.draft_head_rows,
    )  # fmt: skip
    made = sparse_artifact(tmp_path / "x.ninfer", other, Identity("mine", "mix"), published_frontend(identity))
    with Artifact.open(made) as opened, pytest.raises(InventoryError, match="rms_norm_eps is 1e-05"):
        plan_identity(opened, identity)
    files = published_frontend(identity, TOKENIZER_IDS - 1)
    made = sparse_artifact(tmp_path / "y.ninfer", config, Identity("mine", "mix"), files)
    with Artifact.open(made) as opened, pytest.raises(InventoryError, match=r"has 248076 ids, .* requires 248077"):
        plan_identity(opened, identity)


def test_published_recipe_under_another_model_id_keeps_its_name(tmp_path: Path) -> None:
    """The 35B's recipe deviates from the built-in one of the same name on three layers."""
    identity = Identity("qwen3.6-35b-a3b", "groupwise-int")
    config = published_config(identity)
    assert recipe_for(config.geometry, "groupwise-int").exceptions != config.recipe.exceptions
    made = sparse_artifact(tmp_path / "x.ninfer", config, identity, published_frontend(identity))
    with Artifact.open(made) as opened:
        edit = plan_identity(opened, Identity("mine", "groupwise-int"))
        assert edit.identity == Identity("mine", "groupwise-int")


def test_template_of_a_published_identity_is_noted_and_keeps_the_name(tmp_path: Path) -> None:
    identity = Identity("qwen3.8-27b", "groupwise-int")
    made = sparse_artifact(tmp_path / "x.ninfer", published_config(identity), identity, published_frontend(identity))
    with Artifact.open(made) as opened:
        edit = plan_template(opened, written(tmp_path / "t.jinja", JINJA))
        assert edit.identity == identity
        assert any("frontend files have the digests" in note and "chat_template.jinja" in note for note in edit.notes)
        assert expected_inventory(edit.directory, config_of(opened)).directory == edit.directory


# --- writing --------------------------------------------------------------------------------------------------------


def test_output_in_the_way_is_refused_and_force_may_replace_the_input_itself(artifact: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copy(artifact, tmp_path / "mine.ninfer"))
    (tmp_path / "link.ninfer").symlink_to("mine.ninfer")
    for out in (mine, tmp_path / "link.ninfer"):
        with pytest.raises(UsageError):
            set_id(mine, out, "a/b")
    with pytest.raises(UsageError, match="link"):
        set_id(mine, tmp_path / "link.ninfer", "a/b", force=True)
    with pytest.raises(UsageError, match="no such folder"):
        set_id(mine, tmp_path / "none" / "x.ninfer", "a/b")
    assert mine.read_bytes() == artifact.read_bytes()
    set_id(mine, mine, "a/b", force=True)
    with Artifact.open(mine) as opened:
        assert str(opened.identity) == "a/b"
    assert payloads(mine) == payloads(artifact)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.ninfer", "mine.ninfer"]


def test_leftover_of_a_killed_edit_is_swept_and_a_running_one_respected(artifact: Path, tmp_path: Path) -> None:
    leftover = written(tmp_path / ".y.ninfer.edit", "half")
    with open(leftover, "rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another run"):
            set_id(artifact, tmp_path / "y.ninfer", "a/b")
    set_id(artifact, tmp_path / "y.ninfer", "a/b")
    assert [path.name for path in tmp_path.iterdir()] == ["y.ninfer"]


@pytest.mark.parametrize("at", [1, 3, 50])
def test_full_disk_leaves_nothing(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    plain, calls = os.pwrite, [0]

    def full(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError):
        set_id(artifact, tmp_path / "y.ninfer", "a/b")
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_first(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match="1,000 free"):
        set_id(artifact, tmp_path / "y.ninfer", "a/b")


def test_commands_print_what_changed(artifact: Path, tmp_path: Path) -> None:
    template = written(tmp_path / "t.jinja", JINJA)
    loud = run("set-template", artifact, tmp_path / "a.ninfer", template)
    assert (loud.returncode, loud.stderr) == (0, "")
    assert hashlib.sha256(JINJA.encode()).hexdigest() in loud.stdout
    document = json.loads(run("set-id", artifact, tmp_path / "b.ninfer", "my/mix", "--json").stdout)
    assert document["schema"] == "ninfer.edit/1"
    assert (document["identity"], document["former_identity"]) == ("my/mix", "tiny-dense/groupwise-int")
    assert document["bytes"] == (tmp_path / "b.ninfer").stat().st_size
    quiet = run("set-id", artifact, tmp_path / "c.ninfer", "my/mix", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert (tmp_path / "c.ninfer").read_bytes() == (tmp_path / "b.ninfer").read_bytes()


def test_exit_codes(artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.ninfer"
    cases: dict[tuple[object, ...], int] = {
        ("set-id", artifact, out, "nonsense"): 2, ("set-id", artifact, artifact, "a/b"): 2,
        ("set-id", artifact, out, "qwen3.6-27b/nvfp4"): 1, ("set-id", GOLDEN / "tiny_v1.ninfer", out, "a/b"): 4,
        ("set-template", artifact, out, tmp_path / "none"): 2, ("set-template", tmp_path / "none", out, ROOT): 2,
    }  # fmt: skip
    for arguments, code in cases.items():
        result = run(*arguments)
        assert result.returncode == code, (arguments, result.stderr)
        assert result.stderr.startswith("error: ")
    assert not out.exists()
