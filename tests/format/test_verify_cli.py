"""The command ``ninfer-verify`` as users and scripts see it: text, JSON, exit codes, pipes, signals, terminals."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer_format.inventory import plan_inventory
from ninfer_format.sums import parse_sums, sums_line
from tests.format.samples import (
    CHUNKY,
    GOLDEN,
    INDEX,
    custom_inventory,
    flipped,
    ninfer_verify,
    write_artifact,
    write_custom,
)

TINY = GOLDEN / "tiny_v2.ninfer"
V1 = GOLDEN / "tiny_v1.ninfer"
COMMAND = [sys.executable, "-c", "from ninfer_format.cli import main; main()"]
ANSI = re.compile(r"\x1b")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "a.ninfer"
    path.write_bytes(TINY.read_bytes())
    return path


# --- check ----------------------------------------------------------------------------------------------------------


def test_check_prints_one_verdict_per_file_and_what_it_left_out(tiny: Path) -> None:
    ran = ninfer_verify("check", tiny)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"{tiny}: OK"
    assert "identity     test-model/test-weights" in ran.out
    (left_out,) = (line for line in lines if line.startswith("  not checked  "))
    for words in ("inventory", "payload bytes (--full)", "payload values (--level numeric)", "padding", "--strict"):
        assert words in left_out


def test_check_full_and_level_full_are_the_same(tiny: Path) -> None:
    first, second = ninfer_verify("check", "--full", tiny), ninfer_verify("check", "--level", "full", tiny)
    assert first == second
    assert hashlib.sha256(tiny.read_bytes()).hexdigest() in first.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("check",),
        ("check", "--level", "deep", "FILE"),
        ("check", "--full", "--level", "numeric", "FILE"),
        ("check", "--jobs", "0", "FILE"),
        ("check", "--no-index", "--partial", "FILE"),
        ("check", "--partial", "--strict", "FILE"),
        ("check", "--partial", "FILE"),
        ("check", "--index", "FILE", "FILE", "FILE"),
        ("check", "--unknown", "FILE"),
        ("check", "--sums", "no-such-file", "FILE"),
        ("check", "no-such-file"),
        ("check", "."),
        ("index",),
        ("index", "no-such-file"),
        ("index", "--out", "FILE", "FILE"),
        ("show", "--html", "FILE", "FILE"),
        ("sums",),
        ("sums", "no-such-file"),
        ("inventory",),
        ("inventory", "qwen3.6-27b"),
        ("inventory", "no/such"),
        ("migrate",),
        ("migrate", "--identity", "one-part", "FILE"),
        ("unknown",),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_wrong_arguments_end_with_2_and_no_traceback(arguments: tuple[str, ...], tiny: Path) -> None:
    before = tiny.read_bytes()
    ran = ninfer_verify(*(str(tiny) if a == "FILE" else a for a in arguments))
    assert ran.code == 2
    assert "Traceback" not in ran.out + ran.err
    assert ran.out or ran.err
    assert tiny.read_bytes() == before


def test_exit_code_of_several_files_is_the_gravest(tiny: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.ninfer"
    bad.write_bytes(b"nothing")
    absent = tmp_path / "absent.ninfer"
    for files, code in (
        ([tiny, V1], 4), ([V1, bad, tiny], 1), ([tiny, bad], 1), ([tiny, absent, bad, V1], 2), ([tiny, tiny], 0),
    ):  # fmt: skip
        ran = ninfer_verify("check", *files)
        assert ran.code == code
        verdicts = [line for line in ran.out.splitlines() if re.search(r": (OK|FAILED)$", line)]
        assert len(verdicts) == len(files)
        assert [line.endswith("OK") for line in verdicts] == [file == tiny for file in files]


def test_unreadable_file_ends_with_3(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    ran = ninfer_verify("check", "--full", tiny)
    assert ran.code == 3
    assert "Input/output error" in ran.out
    assert f"{tiny}: FAILED" in ran.out


def test_check_json_is_a_versioned_document(tiny: Path, tmp_path: Path) -> None:
    ran = ninfer_verify("check", "--json", "--full", tiny, V1, tmp_path / "absent")
    assert (ran.code, ran.json["schema"], ran.json["ok"]) == (2, "ninfer.check/1", False)
    good, old, absent = ran.json["files"]
    assert (good["ok"], good["exit_code"], good["identity"]) == (True, 0, "test-model/test-weights")
    assert good["sha256"] == hashlib.sha256(tiny.read_bytes()).hexdigest()
    assert good["problems"] == []
    assert (old["ok"], old["exit_code"], old["problems"][0]["code"]) == (False, 4, "version")
    assert (absent["ok"], absent["exit_code"], absent["problems"][0]["code"]) == (False, 2, "usage")
    for report in (good, old):
        assert set(report) == {
            "path", "ok", "exit_code", "level", "identity", "file_bytes", "sha256", "recorded_sha256", "known_as",
            "checked", "not_checked", "problems",
        }  # fmt: skip


def test_long_problem_lists_are_cut_in_text_and_whole_in_json(tmp_path: Path) -> None:
    planned, config = custom_inventory()
    path = write_custom(tmp_path / "a", planned.directory, config)
    os.truncate(path, planned.payload_offset + 100)
    ran = ninfer_verify("check", path)
    assert ran.out.count("  problem ") == 21
    assert "more; --json lists all" in ran.out
    assert len(ninfer_verify("check", "--json", path).json["files"][0]["problems"]) > 50


# --- sums -----------------------------------------------------------------------------------------------------------

ODD_NAMES = [
    b"plain",
    b"with space",
    b"back\\slash",
    b"line\nbreak",
    b"return\rhere",
    b"\xff\xfe",
    b"  lead",
    b"*star",
    b"\\n",
]


def test_sums_prints_what_sha256sum_prints_and_reads_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ODD_NAMES:
        Path(os.fsdecode(name)).write_bytes(TINY.read_bytes() + name)
    files = [os.fsdecode(name) for name in ODD_NAMES]
    ours = subprocess.run([*COMMAND, "sums", *files], capture_output=True, check=True)
    theirs = subprocess.run(["sha256sum", "--", *files], capture_output=True, check=True)
    assert ours.stdout == theirs.stdout
    assert ours.stderr == b""
    assert subprocess.run(["sha256sum", "-c", "--status"], input=ours.stdout, check=False).returncode == 0
    Path("SHA256SUMS").write_bytes(ours.stdout)
    assert ninfer_verify("check", "--sums", "SHA256SUMS", *files).code == 0
    assert [name for name, _ in parse_sums(ours.stdout)] == ODD_NAMES


def test_sums_file_is_read_in_every_spelling_and_matched_by_base_name(tiny: Path) -> None:
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    sums = tiny.with_name("SUMS")
    for line in (
        f"{digest}  a.ninfer\n",
        f"{digest} *a.ninfer\n",
        f"{digest.upper()}  some/dir/a.ninfer",
        f"{digest}  a.ninfer\r\n",
        f"SHA256 (a.ninfer) = {digest}\n",
        f"# comment\n\n{'0' * 64}  b.ninfer\n{digest}  a.ninfer\n",
    ):
        sums.write_text(line, newline="")
        assert ninfer_verify("check", "--sums", sums, tiny).code == 0, line
    sums.write_text(f"{'0' * 64}  a.ninfer\n")
    ran = ninfer_verify("check", "--sums", sums, tiny)
    assert (ran.code, "0" * 64 in ran.out, digest in ran.out) == (1, True, True)


@pytest.mark.parametrize(
    "text",
    ["", "{digest}  b.ninfer\n", "{digest}  a.ninfer\n" + "0" * 64 + "  a.ninfer\n", "{digest} a.ninfer\n", "hello\n"],
)
def test_sums_file_without_one_clear_entry_is_an_error(text: str, tiny: Path) -> None:
    sums = tiny.with_name("SUMS")
    sums.write_text(text.format(digest=hashlib.sha256(tiny.read_bytes()).hexdigest()))
    ran = ninfer_verify("check", "--sums", sums, tiny)
    assert ran.code == 2
    assert str(sums) in ran.out + ran.err


def test_sums_line_escapes_are_those_of_the_specification() -> None:
    assert sums_line("ab", "a\\b\nc") == b"\\ab  a\\\\b\\nc\n"


def test_sums_of_several_files_reports_the_missing_one_and_prints_the_rest(tiny: Path) -> None:
    ran = ninfer_verify("sums", tiny, "absent", tiny)
    assert ran.code == 2
    assert ran.out.count(str(tiny)) == 2
    assert ran.err.startswith("error: absent")
    document = ninfer_verify("sums", "--json", tiny).json
    assert document["schema"] == "ninfer.sums/1"
    assert document["files"][0]["sha256"] == hashlib.sha256(tiny.read_bytes()).hexdigest()


# --- index ----------------------------------------------------------------------------------------------------------


def test_index_is_written_used_and_ignored_on_request(tiny: Path) -> None:
    ran = ninfer_verify("index", tiny)
    assert ran.code == 0
    assert f"{tiny}.idx" in ran.out
    used = ninfer_verify("check", "--full", tiny)
    assert used.code == 0
    assert "by index (1 of 1 chunks)" in used.out
    assert "recorded in the index" in used.out
    for options in (("--no-index",), ("--sums", tiny.with_name("S"))):
        tiny.with_name("S").write_text(ninfer_verify("sums", tiny).out)
        ran = ninfer_verify("check", "--full", *options, tiny)
        assert "SHA-256 of the whole file" in ran.out
        assert "by index" not in ran.out
    assert "by index" not in ninfer_verify("check", tiny).out


def test_stale_index_fails_clearly_and_a_new_one_helps(tiny: Path) -> None:
    ninfer_verify("index", tiny)
    tiny.write_bytes(tiny.read_bytes() + b"grown")
    ran = ninfer_verify("check", "--full", tiny)
    assert (ran.code, "[index]" in ran.out) == (1, True)
    assert ninfer_verify("index", tiny).code == 0
    assert ninfer_verify("check", "--full", tiny).code == 0


def test_partial_download_is_checked_against_a_named_index(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "a.ninfer", CHUNKY)
    ninfer_verify("index", path, "--out", tmp_path / "published.idx")
    part = tmp_path / "a.ninfer.part"
    part.write_bytes(path.read_bytes()[: 20 << 20])
    ran = ninfer_verify("check", "--partial", "--index", tmp_path / "published.idx", part)
    assert ran.code == 0
    assert "(2 of 4 chunks)" in ran.out
    flipped(part, part, 9 << 20)
    ran = ninfer_verify("check", "--partial", "--index", tmp_path / "published.idx", part)
    assert (ran.code, "'text/big'" in ran.out) == (1, True)


def test_index_json_names_every_object_digest(tiny: Path) -> None:
    document = ninfer_verify("index", "--json", tiny).json
    (golden,) = (case for case in INDEX["containers"] if case["file"] == "tiny_v2.ninfer")
    assert document["schema"] == "ninfer.index-report/1"
    assert document["objects"] == golden["payload_sha256"]
    assert (document["sha256"], document["directory_sha256"]) == (golden["sha256"], golden["directory_sha256"])


def test_index_of_version_1_is_unsupported(tmp_path: Path) -> None:
    ran = ninfer_verify("index", V1)
    assert (ran.code, "migrate" in ran.err) == (4, True)
    assert not V1.with_name("tiny_v1.ninfer.idx").exists()


# --- inventory ------------------------------------------------------------------------------------------------------

PUBLISHED_FACTS = {
    "qwen3.6-27b/groupwise-int": ("17,495,365,888", "0abb85fde318b5980c126f9c44a5bae09e852034de79ea269bd09693aa34e7f7"),
    "qwen3.6-27b/nvfp4": ("18,324,064,000", "50677ebddbeb17566a1c7837a122872fada8244f54d4d7b78ee95d7b567033ff"),
    "qwen3.8-27b/groupwise-int": ("18,210,531,328", "45912dd83c71a1b3b3b644c15ce3ef83b0b60d77cd7c82a39b21d9ba6267d742"),
    "qwen3.6-35b-a3b/groupwise-int": (
        "22,783,246,080",
        "4c65958b2a56b372481be2f333fa3837ac996ed4f067430de499657da0a083be",
    ),
}
V1_DIGESTS = {
    "qwen3.6-27b/groupwise-int": "df352a3e3b8555f15fd00d143be213b9e5ff6fb910a1c2390f0785f9a1e2d386",
    "qwen3.6-35b-a3b/groupwise-int": "0155278f7e050a4a5c39a697557ea9e2532d44dfc054fd41b496f8b37966732e",
}


@pytest.mark.parametrize("identity", PUBLISHED_FACTS)
def test_inventory_prints_bytes_digests_and_objects_in_order(identity: str) -> None:
    file_bytes, digest = PUBLISHED_FACTS[identity]
    ran = ninfer_verify("inventory", identity)
    assert ran.code == 0
    assert f"file bytes       {file_bytes}\n" in ran.out
    assert f"sha256 {digest}\n" in ran.out
    assert ("version 1" in ran.out) == (identity in V1_DIGESTS)
    assert V1_DIGESTS.get(identity, "") in ran.out
    golden = json.loads((GOLDEN / "inventory" / f"{identity.replace('/', '--')}.json").read_text())
    names = [entry["name"] for entry in golden["objects"]]
    assert [line.split()[-1] for line in ran.out.splitlines()[1 : len(names) + 1]] == names
    assert len(ninfer_verify("inventory", identity, "--no-objects").out.splitlines()) < 8


def test_inventory_json_is_the_plan() -> None:
    document = ninfer_verify("inventory", "--json", "qwen3.6-27b/groupwise-int").json
    planned = plan_inventory("qwen3.6-27b/groupwise-int")
    assert document["schema"] == "ninfer.inventory/1"
    assert document["file_bytes"] == planned.file_bytes == 17_495_365_888
    assert document["version_1"]["json_bytes"] == 174_176
    text = json.dumps(
        {"identity": {"model_id": "qwen3.6-27b", "weights_id": "groupwise-int"}, "objects": document["objects"]},
        separators=(",", ":"),
    )
    assert hashlib.sha256(text.encode()).hexdigest() == document["directory_sha256"]


# --- migrate --------------------------------------------------------------------------------------------------------


def test_migrate_three_times_and_a_version_3_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    path.write_bytes(V1.read_bytes())
    options = ("--identity", "test-model/groupwise-int")
    ran = ninfer_verify("migrate", path)
    assert (ran.code, "--identity test-model/WEIGHTS" in ran.err) == (1, True)
    ran = ninfer_verify("migrate", "--dry-run", *options, path)
    assert (ran.code, "would migrate" in ran.out, path.read_bytes() == V1.read_bytes()) == (0, True, True)
    ran = ninfer_verify("migrate", *options, path)
    assert (ran.code, ": migrated (test-model/groupwise-int" in ran.out) == (0, True)
    assert path.read_bytes() == (GOLDEN / "tiny_v1_migrated.ninfer").read_bytes()
    ran = ninfer_verify("migrate", path)
    assert (ran.code, "already version 2" in ran.out) == (0, True)
    path.write_bytes(b"NINFER\0\x03" + path.read_bytes()[8:])
    ran = ninfer_verify("migrate", path)
    assert (ran.code, ran.err.count("\n"), "version 3" in ran.err, "newer" in ran.err) == (4, 1, True, True)


def test_migrate_json_and_copy(tmp_path: Path) -> None:
    out = tmp_path / "out.ninfer"
    ran = ninfer_verify("migrate", "--json", "--copy", out, "--identity", "test-model/groupwise-int", V1)
    assert (ran.code, ran.json["schema"], ran.json["action"]) == (0, "ninfer.migrate/1", "copied")
    assert out.read_bytes() == (GOLDEN / "tiny_v1_migrated.ninfer").read_bytes()


def test_help_names_every_command() -> None:
    ran = ninfer_verify("--help")
    assert ran.code == 0
    for command in ("check", "index", "show", "sums", "inventory", "migrate"):
        assert command in ran.out
        assert ninfer_verify(command, "--help").code == 0
