"""The example workflow is valid for GitHub, and its steps, run here on the tiny checkpoint, give a whole release."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ninfer_format import verify
from ninfer_format.sums import read_sums

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "ci"
WORKFLOW = FOLDER / "publish.yml"
STUB = '#!/bin/sh\nprintf "%s\\n" "$0" "$@" "HF_TOKEN=$HF_TOKEN" >> "$CALLS"\n'
"""Stands in for commands that would reach the network; notes what they were asked to do."""


def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(WORKFLOW.read_text())
    return loaded


@dataclass(frozen=True)
class Runner:
    """As much of GitHub's runner as the workflow uses: expressions, environment, bash with its flags."""

    workspace: Path
    inputs: dict[str, str]
    secrets: dict[str, str]

    def value(self, text: str) -> str:
        """``text`` with its expressions replaced."""

        def replaced(match: re.Match[str]) -> str:
            context, _, name = match[1].partition(".")
            return {"inputs": self.inputs, "secrets": self.secrets}[context][name]

        return re.sub(r"\$\{\{ *((?:inputs|secrets)\.\w+) *\}\}", replaced, text)

    def wanted(self, step: dict[str, Any]) -> bool:
        """Whether the condition of a step holds; only ``inputs.x != ''`` is known here."""
        if "if" not in step:
            return True
        match = re.fullmatch(r"\$\{\{ inputs\.(\w+) != '' \}\}", step["if"])
        assert match is not None, step["if"]
        return self.inputs[match[1]] != ""

    def run(self, step: dict[str, Any], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """One ``run`` step as ``shell: bash`` runs it."""
        script = self.workspace.parent / "step.sh"
        script.write_text(step["run"])
        own = {name: self.value(value) for name, value in step.get("env", {}).items()}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.workspace,
            env={**os.environ, **env, **own},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """A checkout with the tiny checkpoint, and the workflow's own defaults as inputs."""
    workspace = tmp_path / "workspace"
    shutil.copytree(ROOT / "examples" / "tiny" / "dense", workspace / "examples" / "tiny" / "dense")
    inputs = workflow()["on"]["workflow_dispatch"]["inputs"]
    return Runner(workspace, {name: value["default"] for name, value in inputs.items()}, {"HF_TOKEN": ""})


def environment(runner: Runner) -> dict[str, str]:
    """The workflow's variables and what the runner adds; stubs stand before this environment's commands."""
    stubs = runner.workspace.parent / "stubs"
    stubs.mkdir()
    for name in ("pip", "hf"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    path = os.pathsep.join((str(stubs), str(Path(sys.executable).parent), os.environ["PATH"]))
    own = {name: runner.value(value) for name, value in workflow()["env"].items()}
    github = {"GITHUB_STEP_SUMMARY": str(runner.workspace.parent / "summary.md"), "CI": "true"}
    return {"PATH": path, "PYTHONPATH": str(ROOT), "CALLS": str(runner.workspace.parent / "calls.txt"), **own, **github}


def run_job(runner: Runner) -> dict[str, subprocess.CompletedProcess[str]]:
    """Every wanted ``run`` step in order, up to the first that fails; by name."""
    env, done = environment(runner), dict[str, subprocess.CompletedProcess[str]]()
    for step in workflow()["jobs"]["publish"]["steps"]:
        if "run" in step and runner.wanted(step):
            done[step["name"]] = result = runner.run(step, env)
            if result.returncode:
                break
    return done


def test_github_accepts_the_workflow() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_schema_check_would_notice_a_mistake(tmp_path: Path) -> None:
    broken = tmp_path / "publish.yml"
    broken.write_text(WORKFLOW.read_text().replace("runs-on:", "runs_on:"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(broken)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_no_expression_becomes_part_of_a_script_and_rights_are_few() -> None:
    document = workflow()
    assert document["permissions"] == {"contents": "read"}
    for step in document["jobs"]["publish"]["steps"]:
        assert "${{" not in step.get("run", "")
        assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


def test_steps_convert_verify_generate_and_publish(runner: Runner) -> None:
    runner.inputs["hub_repository"] = "org/tiny"
    runner.secrets["HF_TOKEN"] = "a-token"
    done = run_job(runner)
    names = ["Install", "Plan", "Convert", "Verify", "Generate", "Publish"]
    assert list(done) == names, {name: result.stderr for name, result in done.items()}
    assert all(result.returncode == 0 for result in done.values()), done[list(done)[-1]].stderr
    release = runner.workspace / "release"
    artifact = release / "tiny-dense.ninfer"
    assert verify(artifact, level="full").ok
    assert {path.name for path in release.iterdir()} == {
        "tiny-dense.ninfer", "tiny-dense.ninfer.idx", "tiny-dense.ninfer.conversion.json", "MODEL_CARD.md", "README.md",
        "SHA256SUMS", "artifact-manifest.json",
    }  # fmt: skip
    assert len(read_sums(release / "SHA256SUMS")) == 2
    assert (runner.workspace / "plots" / "index.html").is_file()
    events = [json.loads(line) for line in (runner.workspace / "events.jsonl").read_text().splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("start", "done")
    assert "no problems found" in done["Plan"].stdout
    assert "Paris" in done["Generate"].stdout
    assert (runner.workspace.parent / "summary.md").read_text() == (release / "MODEL_CARD.md").read_text()
    calls = (runner.workspace.parent / "calls.txt").read_text().splitlines()
    assert calls[1:3] == ["install", "ninfer[convert,cpu,plots]"]
    assert calls[5:9] == ["upload", "org/tiny", "release", "."]
    assert calls[-1] == "HF_TOKEN=a-token"


def test_a_wrong_answer_stops_the_run_before_it_publishes(runner: Runner) -> None:
    runner.inputs.update({"hub_repository": "org/tiny", "expected": "Atlantis", "recipe": "w8"})
    done = run_job(runner)
    assert list(done)[-1] == "Generate"
    assert done["Generate"].returncode == 1
    assert "upload" not in (runner.workspace.parent / "calls.txt").read_text()


def test_a_checkpoint_with_problems_stops_the_run_at_the_plan(runner: Runner) -> None:
    (runner.workspace / "examples" / "tiny" / "dense" / "tokenizer.json").unlink()
    done = run_job(runner)
    assert list(done) == ["Install", "Plan"]
    assert done["Plan"].returncode == 1
    assert not (runner.workspace / "release").exists()
