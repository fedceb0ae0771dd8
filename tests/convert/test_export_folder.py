"""The folder that ``export`` writes: complete or not there, never through a link, never over anything else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ninfer_convert.commands.export import size_in_bytes
from ninfer_convert.export import REPORT
from ninfer_convert.output_folder import OutputFolder
from ninfer_format import DiskFullError, Identity, ModelConfig, UsageError
from ninfer_format.model_geometry import geometry_from_config
from ninfer_format.recipes import recipe_for
from tests.convert.exported import artifact_of, export_to, sparse_artifact
from tests.convert.tiny import text_config, tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
MAIN = "import sys; from ninfer_convert.cli import main; sys.argv[0] = 'ninfer-convert'; main()"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense artifact, the same for every test here."""
    folder = tmp_path_factory.mktemp("artifact")
    return artifact_of(tiny_checkpoint(folder / "tiny-dense").folder, folder / "x.ninfer")


def run(*arguments: object, **named: Any) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, output not a terminal."""
    command = [sys.executable, "-c", named.pop("program", MAIN), *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **named)
    assert "Traceback" not in result.stderr
    return result


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_new_name_and_empty_folder_are_filled(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty", "模型 back"):
        export_to(artifact, tmp_path / name)
        assert (tmp_path / name / REPORT).is_file()
    assert left(tmp_path) == ["empty", "new", "模型 back"]


def test_what_is_in_the_way_is_refused_and_left_alone(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("x")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("none")
    before = left(tmp_path)
    expected = {"file": "is a file", "folder": "other content", "link": "is a link", "dangling": "is a link",
                "none/deep": "no such folder", "..": "name of a new folder"}  # fmt: skip
    for name, message in expected.items():
        for force in (False, True):
            with pytest.raises(UsageError, match=message):
                export_to(artifact, tmp_path / name, force=force)
    assert left(tmp_path) == before
    assert (tmp_path / "folder" / "mine").read_text() == "x"


def test_force_replaces_only_an_earlier_export(artifact: Path, tmp_path: Path) -> None:
    export_to(artifact, tmp_path / "back")
    (tmp_path / "back" / "old").write_text("x")
    with pytest.raises(UsageError, match="--force"):
        export_to(artifact, tmp_path / "back")
    assert (tmp_path / "back" / "old").exists()
    export_to(artifact, tmp_path / "back", force=True)
    assert left(tmp_path) == ["back"]
    assert not (tmp_path / "back" / "old").exists()


def test_what_a_killed_run_left_is_swept(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / ".back.partial" / "dflash").mkdir(parents=True)
    (tmp_path / ".back.partial" / "model.safetensors").write_text("half")
    export_to(artifact, tmp_path / "back")
    assert left(tmp_path) == ["back"]
    assert not (tmp_path / "back" / "dflash").exists()


def test_replacement_killed_between_its_renames_is_undone(artifact: Path, tmp_path: Path) -> None:
    export_to(artifact, tmp_path / "back")
    (tmp_path / "back").rename(tmp_path / ".back.replaced")
    with pytest.raises(UsageError, match="--force"):
        export_to(artifact, tmp_path / "back")
    assert left(tmp_path) == ["back"]


def test_folder_that_another_run_is_writing_is_refused(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / ".back.partial").mkdir()
    descriptor = os.open(tmp_path / ".back.partial", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another run"):
            export_to(artifact, tmp_path / "back")
    finally:
        os.close(descriptor)
    export_to(artifact, tmp_path / "back")


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_full_disk_at_any_system_call_leaves_nothing(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    plain, calls = getattr(os, call), [0]

    def full(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        refused = False
        try:
            export_to(artifact, tmp_path / "back")
        except DiskFullError:
            refused = True
    assert refused == (calls[0] >= at)
    assert left(tmp_path) == ([] if refused else ["back"])


def test_space_is_checked_before_weights_are_written(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match="1,000 free"):
        export_to(artifact, tmp_path / "back")
    assert left(tmp_path) == []


SLOW = """
import sys, time
import ninfer_convert.export as export
plain = export._bf16
def slow(*arguments):
    time.sleep(0.05)
    return plain(*arguments)
export._bf16 = slow
from ninfer_convert.cli import main
sys.argv[0] = 'ninfer-convert'
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_interrupted_export_has_no_folder_and_the_next_one_succeeds(
    artifact: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-c", SLOW, "export", str(artifact), str(tmp_path / "back"), "--jobs", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / ".back.partial" / "model.safetensors"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 50_000)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert left(tmp_path) == ([".back.partial"] if number == signal.SIGKILL else [])
    export_to(artifact, tmp_path / "back")
    assert left(tmp_path) == ["back"]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


def test_uncommitted_folder_is_removed(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "x", force=False, replaceable="mark") as folder:
        (folder.partial / "a").write_text("x")
    assert left(tmp_path) == []


MEASURED = """
import sys
from pathlib import Path
from ninfer_convert.export import ExportOptions, export, plan_export
from ninfer_format import Artifact
from tests.peak_memory import peak_rss_bytes
with Artifact.open(sys.argv[1]) as opened:
    plan = plan_export(opened, ExportOptions(Path(sys.argv[2]), sys.argv[3], jobs=2))
    before = peak_rss_bytes()
    export(plan)
print(before, peak_rss_bytes(), plan.weight_bytes)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_is_bounded_whatever_the_size_of_a_tensor(tmp_path: Path, dtype: str) -> None:
    """Embedding and head of 100 MB each (200 in float32): no piece of them is larger than a few megabytes."""
    text = text_config(moe=False) | {"hidden_size": 512, "vocab_size": 100_000, "mtp_num_hidden_layers": 0}
    geometry = geometry_from_config(text, None, None, 128)
    config = ModelConfig(text, None, None, None, recipe_for(geometry, "groupwise-int"), 128)
    made = sparse_artifact(tmp_path / "x.ninfer", config, Identity("big", "mix"), {})
    result = run(made, tmp_path / "back", dtype, program=MEASURED)
    assert result.returncode == 0, result.stderr
    before, after, weights = map(int, result.stdout.split())
    print(f"{weights >> 20} MiB of weights, {(after - before) >> 20} MiB of memory more than before")
    assert weights > 200_000_000
    assert after - before < 64 << 20


# --- the command ----------------------------------------------------------------------------------------------------


def test_command_sums_up_says_json_or_nothing(artifact: Path, tmp_path: Path) -> None:
    loud = run("export", artifact, tmp_path / "a")
    assert (loud.returncode, loud.stderr) == (0, "")
    for part in ("tensors in 1 files", "MB/s", "rounded to BF16", "--ranking"):
        assert part in loud.stdout
    document = json.loads(run("export", artifact, tmp_path / "b", "--json", "--dtype", "float32").stdout)
    assert document["schema"] == "ninfer.export/1"
    assert document["path"] == str(tmp_path / "b")
    assert document["dtype"] == "float32"
    quiet = run("export", artifact, tmp_path / "c", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_exit_codes(artifact: Path, tmp_path: Path) -> None:
    cases = {
        ("none.ninfer", "a"): 2, (artifact, tmp_path / "a", "--shard-size", "big"): 2, (artifact, artifact): 2,
        (GOLDEN / "tiny_v1.ninfer", tmp_path / "a"): 4, (GOLDEN / "tiny_v2.ninfer", tmp_path / "a"): 1,
        (ROOT / "README.md", tmp_path / "a"): 1,
    }  # fmt: skip
    for arguments, code in cases.items():
        result = run("export", *arguments)
        assert result.returncode == code, (arguments, result.stderr)
        assert result.stderr.startswith("error: ")
    assert left(tmp_path) == []


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("50 mb", 5 * 10**7), ("4GiB", 4 << 30), ("99", 99)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5 TB", "1.5GB"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard-size"):
        size_in_bytes(text)
