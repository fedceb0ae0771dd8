"""`ninfer-convert`: what it prints, where, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ninfer_convert.output import temporary_of
from ninfer_format import Artifact
from tests.convert.tiny import TinyCheckpoint

ROOT = Path(__file__).resolve().parents[2]
MAIN = "import sys; from ninfer_convert.cli import main; sys.argv[0] = 'ninfer-convert'; main()"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; " + MAIN


def run(*arguments: object, program: str = MAIN) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, output not a terminal."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    return result


def document(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON document on stdout, or the last of the JSON lines."""
    text = result.stdout if result.stdout.startswith("{\n") else result.stdout.splitlines()[-1]
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def test_plan_prints_figures_and_every_object_and_writes_nothing(dense: TinyCheckpoint, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = run("plan", dense.folder)
    assert result.returncode == 0
    for part in ("memory", "disk", "text/layers/3/attention/query_key", "q_proj", "no problems found"):
        assert part in result.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_plan_and_build_agree_and_work_with_json(moe: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    planned = document(run("plan", moe.folder, "--json", "--recipe", "w8", "--no-vision"))
    assert planned["schema"] == "ninfer.plan/1"
    result = run("build", moe.folder, out, "--json", "--recipe", "w8", "--no-vision", "--jobs", 2)
    assert result.returncode == 0, result.stderr
    built = document(result)
    assert built["schema"] == "ninfer.build/1"
    assert built["bytes"] == out.stat().st_size == planned["output_bytes"]
    assert built["directory_sha256"] == planned["directory_sha256"]
    assert built["memory_bytes"] > 0
    assert built["already_complete"] is False
    assert Path(built["report"]).is_file()
    with Artifact.open(out) as artifact:
        assert str(artifact.identity) == built["identity"] == "tiny-moe/w8"
        assert len(artifact.objects) == built["objects"]


def test_build_sums_up_on_stdout_and_is_silent_with_quiet(dense: TinyCheckpoint, tmp_path: Path) -> None:
    loud = run("build", dense.folder, tmp_path / "x.ninfer")
    assert loud.returncode == 0
    for part in ("tiny-dense/groupwise-int", "MB/s", "conversion.json", "ranked by token id"):
        assert part in loud.stdout
    assert loud.stderr == ""
    quiet = run("build", dense.folder, tmp_path / "y.ninfer", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_problems_are_listed_on_stderr_and_exit_1(dense: TinyCheckpoint, tmp_path: Path) -> None:
    (dense.folder / dense.shards()[1]).unlink()
    (dense.folder / "chat_template.jinja").unlink()
    result = run("build", dense.folder, tmp_path / "x.ninfer")
    assert result.returncode == 1
    assert dense.shards()[1] in result.stderr
    assert "chat_template.jinja" in result.stderr
    assert not (tmp_path / "x.ninfer").exists()
    assert run("plan", dense.folder).returncode == 1


def test_bad_value_exits_1_with_one_line(dense: TinyCheckpoint, tmp_path: Path) -> None:
    dense.tensors["lm_head.weight"][1, 2] = 0x7FC0
    dense.save()
    result = run("build", dense.folder, tmp_path / "x.ninfer")
    assert result.returncode == 1
    assert result.stderr.startswith("error: tensor 'lm_head.weight' holds nan at index [1, 2]")
    assert result.stderr.count("\n") == 1


def test_existing_output_is_refused_with_exit_2_and_replaced_with_force(dense: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    out.write_bytes(b"old")
    result = run("build", dense.folder, out)
    assert result.returncode == 2
    assert "--force" in result.stderr
    assert out.read_bytes() == b"old"
    assert run("build", dense.folder, out, "--force").returncode == 0
    with Artifact.open(out):
        pass


def test_leftover_is_refused_with_exit_2(dense: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    temporary_of(out).write_bytes(b"")
    result = run("build", dense.folder, out)
    assert result.returncode == 2
    assert "--resume" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",),
        ("build", "{folder}"),
        ("build", "{folder}", "{tmp}/x.ninfer", "--recipe", "q3"),
        ("plan", "{folder}", "--identity", "no-slash"),
        ("plan", "{folder}", "--device", "tpu"),
        ("plan", "{folder}", "--jobs", "-1"),
        ("plan", "{tmp}/absent"),
        ("build", "{folder}", "{tmp}/absent/x.ninfer"),
        ("build", "{folder}", "{tmp}"),
        ("build", "{folder}", "{folder}/x.ninfer"),
        ("frobnicate",),
    ],
    ids=" ".join,
)
def test_usage_errors_exit_2_and_say_what_was_wrong(
    dense: TinyCheckpoint, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = run(*(a.format(folder=dense.folder, tmp=tmp_path) for a in arguments))
    assert result.returncode == 2
    assert result.stderr
    assert result.stdout == ""


def test_missing_torch_is_one_line_naming_the_extra(dense: TinyCheckpoint, tmp_path: Path) -> None:
    result = run("build", dense.folder, tmp_path / "x.ninfer", program=WITHOUT_TORCH)
    assert result.returncode == 2
    assert "ninfer[convert]" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir() if "ninfer" in p.name] == []


def test_plan_needs_no_torch(dense: TinyCheckpoint) -> None:
    assert run("plan", dense.folder, program=WITHOUT_TORCH).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_exits_2_and_names_the_way_on(dense: TinyCheckpoint, tmp_path: Path) -> None:
    result = run("build", dense.folder, tmp_path / "x.ninfer", "--device", "cuda")
    assert result.returncode == 2
    assert "--device cpu" in result.stderr
    assert [p.name for p in tmp_path.iterdir() if "ninfer" in p.name] == []


def test_resume_of_a_complete_output_that_lacks_nothing_but_its_last_step_exits_0(
    dense: TinyCheckpoint, tmp_path: Path
) -> None:
    out, plain = tmp_path / "x.ninfer", "raise SystemExit(9)"
    dying = MAIN.replace(
        "main()", f"import ninfer_convert.pipeline as p; p.sync_folder = lambda f: exec({plain!r}); main()"
    )
    assert run("build", dense.folder, out, program=dying).returncode == 9
    assert out.exists()
    result = run("build", dense.folder, out, "--resume")
    assert (result.returncode, result.stdout) == (0, f"{out}: was already complete\n")
    again = run("build", dense.folder, out, "--resume")
    assert again.returncode == 2
