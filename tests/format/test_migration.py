"""Version 1 becomes version 2 or stays version 1, whatever stops the migration and whenever."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ninfer_format import migration
from ninfer_format.directory import Directory, DirectoryV1, Identity, TensorEntry, canonical_json, canonical_json_v1
from ninfer_format.errors import (
    ArtifactError,
    DirectoryError,
    DiskFullError,
    MigrationError,
    NinferError,
    StorageError,
    UsageError,
    VersionError,
)
from ninfer_format.header_rewrite import backup_path
from ninfer_format.inventory import plan_inventory
from ninfer_format.migration import KnownV1, migrate
from ninfer_format.prefix import payload_offset_for, prefix_bytes
from ninfer_format.reader import Artifact
from tests.format.samples import GOLDEN, packed, small_v1, tensor, write_artifact, write_v1

IDENTITY = "test-model/groupwise-int"
V1 = (GOLDEN / "tiny_v1.ninfer").read_bytes()
V2 = (GOLDEN / "tiny_v1_migrated.ninfer").read_bytes()


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    path = tmp_path / "a.ninfer"
    path.write_bytes(V1)
    return path


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- what may be migrated -------------------------------------------------------------------------------------------


def test_golden_becomes_the_golden_result_and_a_second_run_does_nothing(v1: Path) -> None:
    done = migrate(v1, identity=IDENTITY)
    assert (done.action, str(done.identity), done.payload_offset, done.file_bytes) == ("migrated", IDENTITY, 4096, 7432)
    assert v1.read_bytes() == V2
    assert names(v1.parent) == ["a.ninfer"]
    before = os.stat(v1).st_mtime_ns
    again = migrate(v1)
    assert again.action == "already version 2"
    assert str(again.identity) == IDENTITY
    assert (v1.read_bytes(), os.stat(v1).st_mtime_ns) == (V2, before)


def test_valid_version_2_of_any_identity_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "b.ninfer"
    path.write_bytes((GOLDEN / "tiny_v2.ninfer").read_bytes())
    assert migrate(path).action == "already version 2"
    assert migrate(path, identity="x/y").action == "already version 2"
    assert path.read_bytes() == (GOLDEN / "tiny_v2.ninfer").read_bytes()


def test_dry_run_makes_the_checks_and_changes_nothing(v1: Path) -> None:
    before = os.stat(v1)
    assert migrate(v1, identity=IDENTITY, dry_run=True).action == "would migrate"
    with pytest.raises(MigrationError):
        migrate(v1, dry_run=True)
    after = os.stat(v1)
    assert (before.st_mtime_ns, before.st_ino, V1) == (after.st_mtime_ns, after.st_ino, v1.read_bytes())
    assert names(v1.parent) == ["a.ninfer"]


def test_file_that_was_never_published_needs_an_identity(v1: Path) -> None:
    with pytest.raises(MigrationError, match="--identity test-model/WEIGHTS"):
        migrate(v1)
    assert v1.read_bytes() == V1


def test_identity_must_keep_the_model_id_and_have_two_parts(v1: Path) -> None:
    with pytest.raises(MigrationError, match=r"'test-model'.*'other'"):
        migrate(v1, identity="other/groupwise-int")
    with pytest.raises(UsageError, match="MODEL/WEIGHTS"):
        migrate(v1, identity="test-model")
    assert v1.read_bytes() == V1


@pytest.mark.parametrize("version", [0, 3, 4, 255])
def test_other_versions_are_unsupported_and_untouched_even_beside_a_backup(v1: Path, version: int) -> None:
    content = prefix_bytes(version, 1041) + V1[16:]
    v1.write_bytes(content)
    for with_backup in (False, True):
        if with_backup:
            backup_path(v1).write_bytes(V1[:4096])
        with pytest.raises(VersionError, match=f"version {version}") as caught:
            migrate(v1, identity=IDENTITY)
        assert caught.value.exit_code == 4
        assert v1.read_bytes() == content
        assert backup_path(v1).exists() == with_backup


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: c[:15],
        lambda c: b"",
        lambda c: c[:-1],
        lambda c: c[:8] + b"\0" * 8 + c[16:],
        lambda c: c[:8] + b"\xff" * 8 + c[16:],
        lambda c: b"ninfer" + c[6:],
        lambda c: c[:16] + b"[" + c[17:],
        lambda c: c.replace(b'"offset":256', b'"offset":257', 1),
        lambda c: c.replace(b'"BF16"', b'"BF17"', 1),
        lambda c: c.replace(b'"model_id"', b'"model_ix"', 1),
        lambda c: c[:7] + b"\x02" + c[8:],
    ],
)
def test_file_that_is_no_valid_version_1_is_refused_and_untouched(v1: Path, spoil: Callable[[bytes], bytes]) -> None:
    content = spoil(V1)
    assert content != V1
    v1.write_bytes(content)
    with pytest.raises(NinferError) as caught:
        migrate(v1, identity=IDENTITY)
    assert caught.value.exit_code in (1, 4)
    assert str(v1) in str(caught.value)
    assert v1.read_bytes() == content
    assert names(v1.parent) == ["a.ninfer"]


def test_version_1_with_nvfp4_is_refused(tmp_path: Path) -> None:
    directory = DirectoryV1("m", packed([tensor("a", (128, 64), "NVFP4", 0)]))
    path = write_v1(tmp_path / "a.ninfer", directory)
    with pytest.raises(DirectoryError, match="NVFP4"):
        migrate(path, identity="m/w")


def test_missing_file_and_folder_are_usage_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError):
            migrate(path)


def test_file_cannot_take_a_published_identity_without_its_objects(tmp_path: Path) -> None:
    path = write_v1(tmp_path / "a.ninfer", small_v1("qwen3.6-27b", 3))
    with pytest.raises(NinferError, match=r"qwen3\.6-27b/groupwise-int"):
        migrate(path, identity="qwen3.6-27b/groupwise-int")


# --- the two published files, by digest -----------------------------------------------------------------------------


def know(monkeypatch: pytest.MonkeyPatch, content: bytes, model_id: str = "test-model") -> None:
    text = content[16 : 16 + int.from_bytes(content[8:16], "little")]
    known = KnownV1(
        Identity(model_id, "groupwise-int"), hashlib.sha256(text).hexdigest(), hashlib.sha256(content).hexdigest()
    )
    monkeypatch.setattr(migration, "known_v1", lambda: {model_id: known})


def test_published_file_is_recognised_by_its_digests(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, V1)
    done = migrate(v1)
    assert (done.action, done.sha256_v1) == ("migrated", hashlib.sha256(V1).hexdigest())
    assert v1.read_bytes() == V2


@pytest.mark.parametrize("position", [4096, 7431, 2000])
def test_one_changed_byte_of_a_published_file_is_refused(
    v1: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    know(monkeypatch, V1)
    content = bytearray(V1)
    content[position] ^= 1
    v1.write_bytes(content)
    for identity in (None, IDENTITY):
        with pytest.raises(MigrationError, match="damaged"):
            migrate(v1, identity=identity)
    assert v1.read_bytes() == content


def test_published_file_cannot_take_another_weights_id(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, V1)
    with pytest.raises(MigrationError, match="cannot become"):
        migrate(v1, identity="test-model/other")
    assert v1.read_bytes() == V1


def test_longer_file_with_a_published_directory_is_refused(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, V1)
    v1.write_bytes(V1 + b"x")
    with pytest.raises(MigrationError, match="damaged"):
        migrate(v1)


def test_the_two_published_files_are_known_with_the_digests_their_inventories_have() -> None:
    known = migration.known_v1()
    assert sorted(known) == ["qwen3.6-27b", "qwen3.6-35b-a3b"]
    for row in known.values():
        assert plan_inventory(row.identity).directory_v1_sha256 == row.directory_sha256
        assert len(row.file_sha256) == 64


@pytest.mark.parametrize("identity", ["qwen3.6-27b/groupwise-int", "qwen3.6-35b-a3b/groupwise-int"])
def test_directories_of_the_published_files_fit_in_place(identity: str, tmp_path: Path) -> None:
    """With --identity (their digests cannot be had without the payloads): sparse files of the full geometry."""
    planned = plan_inventory(identity)
    text = planned.directory_v1_json
    changed = text.replace(b'"model_id"', b' "model_id"', 1)  # another spelling, so that the file digest is not asked
    path = tmp_path / "big.ninfer"
    with open(path, "wb") as stream:
        stream.write(prefix_bytes(1, len(changed)) + changed)
        stream.truncate(planned.file_bytes)
    done = migrate(path, identity=identity)
    assert (done.action, done.payload_offset, done.file_bytes) == (
        "migrated", planned.payload_offset, planned.file_bytes,
    )  # fmt: skip
    with Artifact.open(path) as artifact:
        assert artifact.directory == planned.directory
    with open(path, "rb") as stream:
        header = stream.read(planned.payload_offset)
    assert header == prefix_bytes(2, len(planned.directory_json)) + planned.directory_json + bytes(
        planned.payload_offset - 16 - len(planned.directory_json)
    )


# --- room in the header, and copies ---------------------------------------------------------------------------------


def directory_with_spare(spare: int) -> DirectoryV1:
    """A version-1 directory whose version-2 text leaves ``spare`` bytes of padding (negative: does not fit)."""
    base = DirectoryV1("m", packed([tensor("x", (3,), "BF16", 0)]))
    target = 4096 - 16 - spare - len(canonical_json(Directory(Identity("m", "w"), base.objects))) + 1
    return DirectoryV1("m", packed([tensor("x" * target, (3,), "BF16", 0)]))


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_header_that_just_fits_is_rewritten_in_place(tmp_path: Path, spare: int) -> None:
    directory = directory_with_spare(spare)
    path = write_v1(tmp_path / "a.ninfer", directory)
    payload = path.read_bytes()[4096:]
    assert migrate(path, identity="m/w").payload_offset == 4096
    text = canonical_json(Directory(Identity("m", "w"), directory.objects))
    assert len(text) == 4096 - 16 - spare
    assert path.read_bytes() == prefix_bytes(2, len(text)) + text + bytes(spare) + payload


@pytest.mark.parametrize("spare", [-1, -20, -29])
def test_header_without_room_is_refused_in_place_and_offered_as_a_copy(tmp_path: Path, spare: int) -> None:
    directory = directory_with_spare(spare)
    path = write_v1(tmp_path / "a.ninfer", directory)
    content = path.read_bytes()
    assert payload_offset_for(len(canonical_json_v1(directory))) == 4096
    with pytest.raises(MigrationError, match=r"4096 to 8192.*--copy"):
        migrate(path, identity="m/w")
    assert path.read_bytes() == content
    out = tmp_path / "out.ninfer"
    done = migrate(path, identity="m/w", copy=out)
    assert (done.action, done.output, done.payload_offset) == ("copied", out, 8192)
    assert done.file_bytes == out.stat().st_size
    assert path.read_bytes() == content
    with Artifact.open(out) as artifact:
        assert artifact.directory == Directory(Identity("m", "w"), directory.objects)
    assert out.read_bytes()[8192:] == content[4096:]
    assert names(tmp_path) == ["a.ninfer", "out.ninfer"]


def test_golden_without_room_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    content = (GOLDEN / "v1_no_room.ninfer").read_bytes()
    path.write_bytes(content)
    with pytest.raises(MigrationError, match="4096 to 8192"):
        migrate(path, identity=IDENTITY)
    assert path.read_bytes() == content


def test_roomy_spelling_whose_payload_would_move_down_is_copied(tmp_path: Path) -> None:
    directory = small_v1(n_norms=3)
    text = canonical_json_v1(directory).replace(b",", b"," + b" " * 500)
    path = write_v1(tmp_path / "a.ninfer", directory, text=text)
    with pytest.raises(MigrationError, match="--copy"):
        migrate(path, identity="old-model/w")
    migrate(path, identity="old-model/w", copy=tmp_path / "b.ninfer")
    twin = write_artifact(tmp_path / "c.ninfer", Directory(Identity("old-model", "w"), directory.objects))
    assert (tmp_path / "b.ninfer").read_bytes() == twin.read_bytes()


def test_copy_equals_writing_the_objects_as_version_2(v1: Path) -> None:
    out = v1.with_name("out.ninfer")
    assert migrate(v1, identity=IDENTITY, copy=out, dry_run=True).action == "would copy"
    assert not out.exists()
    migrate(v1, identity=IDENTITY, copy=out)
    assert (v1.read_bytes(), out.read_bytes()) == (V1, V2)


def test_copy_refuses_outputs_that_would_lose_something(v1: Path) -> None:
    folder = v1.parent
    (folder / "there").write_bytes(b"precious")
    (folder / "link").symlink_to("nowhere")
    os.link(v1, folder / "twin")
    for out, message in (
        (v1, "itself"),
        (folder / "twin", "itself"),
        (folder / "there", "exists"),
        (folder / "link", "exists"),
        (folder / "no" / "folder", "no such folder"),
    ):
        with pytest.raises(UsageError, match=message):
            migrate(v1, identity=IDENTITY, copy=out)
    assert (folder / "there").read_bytes() == b"precious"
    assert v1.read_bytes() == V1


def test_copy_sweeps_the_temporary_of_a_killed_copy(v1: Path) -> None:
    out = v1.with_name("out.ninfer")
    out.with_name(".out.ninfer.migrating").write_bytes(b"half")
    migrate(v1, identity=IDENTITY, copy=out)
    assert names(v1.parent) == ["a.ninfer", "out.ninfer"]


def test_copy_to_a_full_disk_leaves_no_output(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError):
        migrate(v1, identity=IDENTITY, copy=v1.with_name("out.ninfer"))
    assert names(v1.parent) == ["a.ninfer"]


# --- links, permissions, other devices, two at once -----------------------------------------------------------------


def test_symbolic_link_is_refused_in_place_and_copied(v1: Path) -> None:
    link = v1.with_name("link.ninfer")
    link.symlink_to(v1.name)
    with pytest.raises(UsageError, match=r"symbolic link to .*a\.ninfer.*--copy"):
        migrate(link, identity=IDENTITY)
    assert link.is_symlink()
    assert v1.read_bytes() == V1
    migrate(link, identity=IDENTITY, copy=v1.with_name("out.ninfer"))
    assert v1.with_name("out.ninfer").read_bytes() == V2
    assert v1.read_bytes() == V1


def test_hard_link_is_refused_in_place_and_copied(v1: Path) -> None:
    twin = v1.with_name("twin.ninfer")
    os.link(v1, twin)
    with pytest.raises(UsageError, match=r"2 names \(hard links\).*--copy"):
        migrate(v1, identity=IDENTITY)
    assert (v1.read_bytes(), twin.read_bytes()) == (V1, V1)
    assert os.stat(v1).st_nlink == 2
    migrate(v1, identity=IDENTITY, copy=v1.with_name("out.ninfer"))
    assert v1.with_name("out.ninfer").read_bytes() == V2


def test_read_only_file_is_refused_in_place_even_for_root(v1: Path) -> None:
    v1.chmod(0o444)
    with pytest.raises(StorageError, match="read-only"):
        migrate(v1, identity=IDENTITY)
    assert v1.read_bytes() == V1
    assert migrate(v1, identity=IDENTITY, copy=v1.with_name("out.ninfer")).action == "copied"


def test_mode_and_inode_survive_the_migration(v1: Path) -> None:
    v1.chmod(0o640)
    before = os.stat(v1)
    migrate(v1, identity=IDENTITY)
    after = os.stat(v1)
    assert (before.st_mode, before.st_ino, before.st_size) == (after.st_mode, after.st_ino, after.st_size)


def test_copy_to_another_device_never_renames_across_it(v1: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == v1.stat().st_dev:
        other = v1.parent  # this machine has one file system: the copy still goes through its own folder
    out = other / f"ninfer-test-{os.getpid()}.ninfer"
    try:
        migrate(v1, identity=IDENTITY, copy=out)
        assert out.read_bytes() == V2
    finally:
        out.unlink(missing_ok=True)


def test_second_migration_at_the_same_time_is_refused(v1: Path) -> None:
    with open(v1, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another migration"):
            migrate(v1, identity=IDENTITY)
    assert migrate(v1, identity=IDENTITY).action == "migrated"


# --- backups that are found -----------------------------------------------------------------------------------------


def torn(at: int) -> bytes:
    """A version-1 file killed while its directory was rewritten: ``at`` bytes of the new text are there."""
    return V1[:16] + V2[16 : 16 + at] + V1[16 + at :]


@pytest.mark.parametrize("at", [3, 30, 500, 1083, 4080])
def test_torn_header_is_restored_from_the_backup_and_migrated(v1: Path, at: int) -> None:
    v1.write_bytes(torn(at))
    with pytest.raises(ArtifactError):
        migrate(v1, identity=IDENTITY)
    backup_path(v1).write_bytes(V1[:4096])
    dry = migrate(v1, identity=IDENTITY, dry_run=True)
    assert (dry.action, v1.read_bytes()) == ("would migrate", torn(at))
    assert backup_path(v1).name in dry.notes[0]
    done = migrate(v1, identity=IDENTITY)
    assert (done.action, v1.read_bytes(), names(v1.parent)) == ("migrated", V2, ["a.ninfer"])
    assert "restored" in done.notes[0]


def test_torn_header_is_restored_even_when_the_file_may_not_be_migrated(v1: Path) -> None:
    v1.write_bytes(torn(500))
    backup_path(v1).write_bytes(V1[:4096])
    with pytest.raises(MigrationError, match="--identity"):
        migrate(v1)
    assert (v1.read_bytes(), names(v1.parent)) == (V1, ["a.ninfer"])


def test_torn_header_with_a_backup_is_copied_without_touching_it(v1: Path) -> None:
    v1.write_bytes(torn(500))
    backup_path(v1).write_bytes(V1[:4096])
    out = v1.with_name("out.ninfer")
    migrate(v1, identity=IDENTITY, copy=out)
    assert (out.read_bytes(), v1.read_bytes()) == (V2, torn(500))
    assert backup_path(v1).exists()


@pytest.mark.parametrize("magic", [b"NINFER\0\x02", b"NINFER\xff\x01", b"\0" * 8])
def test_invalid_version_2_or_spoilt_magic_with_a_backup_is_restored(v1: Path, magic: bytes) -> None:
    v1.write_bytes(magic + V1[8:])
    backup_path(v1).write_bytes(V1[:4096])
    migrate(v1, identity=IDENTITY)
    assert (v1.read_bytes(), names(v1.parent)) == (V2, ["a.ninfer"])


def test_finished_migration_only_loses_its_backup(v1: Path) -> None:
    v1.write_bytes(V2)
    backup_path(v1).write_bytes(V1[:4096])
    assert migrate(v1, dry_run=True).action == "already version 2"
    assert backup_path(v1).exists()
    done = migrate(v1)
    assert (done.action, v1.read_bytes(), names(v1.parent)) == ("already version 2", V2, ["a.ninfer"])


@pytest.mark.parametrize("content", [b"", V1[:15], V1[:4095], V1[:4097], V2[:4096], b"my notes", bytes(4096)])
def test_unusable_backup_is_dropped_beside_a_whole_file_and_kept_beside_a_torn_one(v1: Path, content: bytes) -> None:
    backup_path(v1).write_bytes(content)
    assert migrate(v1, identity=IDENTITY).action == "migrated"
    assert (v1.read_bytes(), names(v1.parent)) == (V2, ["a.ninfer"])
    v1.write_bytes(torn(500))
    backup_path(v1).write_bytes(content)
    with pytest.raises(MigrationError, match="no usable backup"):
        migrate(v1, identity=IDENTITY)
    assert (v1.read_bytes(), backup_path(v1).read_bytes()) == (torn(500), content)
    v1.write_bytes(V2)
    assert "left" in migrate(v1).notes[0]
    assert (v1.read_bytes(), backup_path(v1).read_bytes()) == (V2, content)


def test_backup_is_kept_when_the_file_beside_it_may_not_be_migrated(v1: Path) -> None:
    backup_path(v1).write_bytes(b"short")
    with pytest.raises(MigrationError):
        migrate(v1)
    assert backup_path(v1).read_bytes() == b"short"


def test_backup_of_another_file_never_overwrites_a_valid_one(v1: Path) -> None:
    foreign = V1[:4096].replace(b"test-model", b"best-model")
    backup_path(v1).write_bytes(foreign)
    with pytest.raises(MigrationError, match="header of another one"):
        migrate(v1, identity=IDENTITY)
    assert (v1.read_bytes(), backup_path(v1).read_bytes()) == (V1, foreign)


def test_unfinished_backup_of_a_killed_run_is_swept(v1: Path) -> None:
    unfinished = backup_path(v1).with_name(backup_path(v1).name + ".partial")
    unfinished.write_bytes(V1[:100])
    assert migrate(v1, identity=IDENTITY, dry_run=True).action == "would migrate"
    assert unfinished.exists()
    assert migrate(v1, identity=IDENTITY).action == "migrated"
    assert names(v1.parent) == ["a.ninfer"]


def test_tensor_entries_are_those_of_the_samples() -> None:
    assert isinstance(small_v1().objects[-1], TensorEntry)
    assert len(canonical_json_v1(small_v1())) > 16 << 10
