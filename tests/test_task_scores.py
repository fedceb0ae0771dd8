"""The two trained checkpoints still answer their questions after conversion, through the engine, in both recipes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
N_TASKS = 14
# transformers answers all of them; a group of 4-bit weights may turn one greedy choice.
AT_LEAST = {"bf16": N_TASKS, "groupwise-int": N_TASKS - 1}


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_trained_checkpoint_answers_in_bf16_and_groupwise_int(name: str) -> None:
    source = f"examples/tiny/{name}"
    command = [sys.executable, "scripts/score_tasks.py", source, "--per-kind", "1", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    columns = json.loads(run.stdout)["scores"][source]
    print(json.dumps(columns))
    assert set(columns) == set(AT_LEAST)
    for recipe, least in AT_LEAST.items():
        assert len(columns[recipe]) == N_TASKS
        assert sum(columns[recipe].values()) >= least, f"{recipe}: {columns[recipe]}"
