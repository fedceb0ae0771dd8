"""The CUDA program on a card: numerics of the trained tiny model, and decoder blocks of the 27B's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from ninfer_format import Artifact
from ninfer_runtime.backends.base import Int32s, PrefillChunk, Program
from ninfer_runtime.config import KvDtype, SamplingParams
from ninfer_runtime.models.binder import BoundModel, bind
from tests.gpu.program_rig import (
    MOST_OF_RANGE,
    SLICE_LIMITS,
    block_errors,
    comparison,
    cuda_program,
    fed,
    greedy,
    reference_program,
    synthesize,
    trained_prompts,
)
from tests.runtime.artifacts import ROOT, TRAINED, convert

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

N_NEW = 128


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundModel]:
    path = tmp_path_factory.mktemp("gpu") / "dense.ninfer"
    convert(TRAINED / "dense", path, "groupwise-int")
    with Artifact.open(path) as artifact:
        yield bind(artifact)


@pytest.fixture(scope="module")
def prompts(dense: BoundModel) -> list[Int32s]:
    return trained_prompts(dense)


@pytest.fixture(scope="module")
def reference(dense: BoundModel) -> Program:
    return reference_program(dense)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bf16", 1e-3), ("int8", 3e-3), ("fp6", 3e-3)])
def test_logits_and_greedy_tokens_are_those_of_the_float32_reference(
    dense: BoundModel, prompts: list[Int32s], reference: Program, kv_dtype: KvDtype, bound: float
) -> None:
    program = cuda_program(dense, kv_dtype)
    found = comparison(program, reference, prompts[::2], N_NEW, dense.spec.n_addressable)
    print(json.dumps({"kv": kv_dtype, **asdict(found)}))
    assert found.mean_kl <= bound
    assert found.differing == 0
    assert found.decided >= 0.9 * found.compared
    program.close()


def test_request_alone_and_beside_seven_others_and_again_gives_the_same_tokens(
    dense: BoundModel, prompts: list[Int32s], reference: Program
) -> None:
    program, n, rows = cuda_program(dense, "int8"), dense.spec.n_addressable, prompts[:8]
    together = greedy(program, rows, 64)
    assert np.array_equal(together, greedy(program, rows, 64))
    sampled = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, seed=7)
    assert np.array_equal(greedy(program, rows, 32, sampled), greedy(program, rows, 32, sampled))
    for slot, ids in enumerate(rows):
        alone = greedy(program, [ids], 64)[0]
        differs = np.flatnonzero(alone != together[slot])
        if differs.size:
            at = int(differs[0])
            logits = fed(reference, np.concatenate([ids, alone[:at]]))[-1, :n]
            top = np.sort(logits)[-2:]
            assert top[1] - top[0] <= MOST_OF_RANGE * np.ptp(logits), f"row {slot}, token {at}"
    program.close()


def test_task_scores_equal_those_of_the_reference(dense: BoundModel) -> None:
    scores, environment = [], os.environ | {"PYTHONPATH": str(ROOT)}
    for backend in ("reference", "cuda"):
        command = [sys.executable, "scripts/score_tasks.py", str(dense.artifact.path), "--per-kind", "2", "--json"]
        command = [*command, "--backend", backend]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        scores.append(next(iter(json.loads(run.stdout)["scores"].values())))
    print(json.dumps(scores))
    assert scores[0] == scores[1]


# ---- decoder blocks of the 27B's size -------------------------------------------------------------


@pytest.fixture(scope="module")
def slice_of_27b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundModel]:
    """The first four layers: three recurrent, one attention."""
    path = tmp_path_factory.mktemp("slice") / "slice.ninfer"
    synthesize("qwen3.6-27b/groupwise-int", path)
    with Artifact.open(path) as artifact:
        yield bind(artifact)


def test_every_block_fed_with_the_references_input_is_within_one_percent(slice_of_27b: BoundModel) -> None:
    errors = block_errors(slice_of_27b)
    print(json.dumps({"relative_error_of_each_block": [of_all for of_all, _, _ in errors]}))
    assert max(of_all for of_all, _, _ in errors) <= 0.01


def test_prompt_of_4096_tokens_is_the_same_in_chunks_of_1024_and_of_64(slice_of_27b: BoundModel) -> None:
    program = cuda_program(slice_of_27b, "bf16", SLICE_LIMITS)
    ids = np.random.default_rng(4).integers(0, slice_of_27b.spec.n_addressable, 4096).astype(np.int32)
    pages, hidden = np.arange(64, dtype=np.int32), []
    for chunk in (1024, 64):
        program.reset(0)
        rows = []
        for start in range(0, len(ids), chunk):
            part = PrefillChunk(0, ids[start : start + chunk], start, pages, want_hidden=True)
            rows.append(program.prefill(part).hidden)
        hidden.append(np.concatenate([row for row in rows if row is not None]))
    error = float(np.linalg.norm(hidden[0] - hidden[1]) / np.linalg.norm(hidden[1]))
    print(json.dumps({"relative_difference": error}))
    assert error <= 0.01
    program.close()


def test_memory_that_is_not_there_is_one_clear_line(dense: BoundModel, tmp_path: Path) -> None:
    code = "from ninfer_runtime.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", str(dense.artifact.path), "--prompt", "hi", "--backend", "cuda"]
    run = subprocess.run(
        [*command, "--max-context", "200000000"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert "--max-context" in run.stderr
    assert "Traceback" not in run.stderr
