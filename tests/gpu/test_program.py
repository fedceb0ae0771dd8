"""The CUDA program on a card: numerics of the trained tiny model, and decoder blocks of the 27B's size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_format import Artifact
from ninfer_runtime.backends.base import (
    Float32s,
    Int32s,
    PrefillChunk,
    Program,
    ProgramLimits,
    ProgramOptions,
    Round,
    page_table,
)
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.backends.reference import ReferenceBackend
from ninfer_runtime.backends.reference.forward import feed_forward
from ninfer_runtime.config import KvDtype, SamplingParams
from ninfer_runtime.models.binder import BoundModel, bind
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import parse_conversation
from tests.runtime.artifacts import ROOT, TRAINED, convert

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
sys.path.insert(0, str(ROOT / "tests" / "oracle"))

PAGES_PER_ROW = 8
LIMITS = ProgramLimits(
    max_rows=8, max_context=64 * PAGES_PER_ROW, n_pages=8 * PAGES_PER_ROW, n_slots=8, prefill_chunk=512, logits_rows=512
)
N_NEW = 128
MOST_OF_RANGE = 0.01
GREEDY = SamplingParams.greedy()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundModel]:
    path = tmp_path_factory.mktemp("gpu") / "dense.ninfer"
    convert(TRAINED / "dense", path, "groupwise-int")
    with Artifact.open(path) as artifact:
        yield bind(artifact)


@pytest.fixture(scope="module")
def prompts(dense: BoundModel) -> list[Int32s]:
    """One question of every kind that the model was trained on."""
    score_tasks = import_module("scripts.score_tasks")
    frontend, out = Frontend.open(dense.artifact), []
    for question in score_tasks.questions(1):
        conversation = parse_conversation([{"role": "user", "content": question.text}], question.tools)
        out.append(np.array(frontend.prompt(conversation, thinking=question.thinking).token_ids, np.int32))
    return out


def cuda_program(model: BoundModel, kv_dtype: KvDtype) -> CudaProgram:
    backend = CudaBackend()
    options = ProgramOptions(device="cuda", dtype="bfloat16", kv_dtype=kv_dtype)
    return backend.create(model, backend.plan_memory(model, LIMITS, options))


@pytest.fixture(scope="module")
def reference(dense: BoundModel) -> Program:
    backend = ReferenceBackend()
    options = ProgramOptions(dtype="float32", weight_budget=1 << 30)
    return backend.create(dense, backend.plan_memory(dense, replace(LIMITS, max_rows=1), options))


def pages_of(slot: int) -> Int32s:
    return np.arange(slot, 8 * PAGES_PER_ROW, 8, dtype=np.int32)


def fed(program: Program, ids: Int32s, slot: int = 0) -> Float32s:
    program.reset(slot)
    return program.prefill(PrefillChunk(slot, ids, 0, pages_of(slot), logits="all")).logits


def greedy(program: Program, prompts: list[Int32s], n_new: int, sampling: SamplingParams = GREEDY) -> NDArray[np.int32]:
    """Tokens [rows, n_new] of prompts that run together, one slot each."""
    rows = len(prompts)
    first = []
    for slot, ids in enumerate(prompts):
        program.reset(slot)
        first.append(program.prefill(PrefillChunk(slot, ids, 0, pages_of(slot), sampling=sampling)).token_id)
    tokens = [np.array(first, np.int32)]
    while len(tokens) < n_new:
        round_ = Round(
            slots=np.arange(rows, dtype=np.int32),
            token_ids=tokens[-1][:, None].copy(),
            n_columns=np.ones(rows, np.int32),
            starts=np.array([program.length(slot) for slot in range(rows)], np.int32),
            rope_deltas=np.zeros(rows, np.int32),
            pages=page_table([pages_of(slot).tolist() for slot in range(rows)], PAGES_PER_ROW),
            sampling=(sampling,) * rows,
            stop_ids=(frozenset(),) * rows,
            budget=np.full(rows, 1000, np.int32),
        )
        ticket = program.launch(round_)
        tokens.append(program.read(ticket).token_ids[:, 0].copy())
        program.commit(ticket)
    return np.stack(tokens, axis=1)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bf16", 1e-3), ("int8", 3e-3), ("fp6", 3e-3)])
def test_logits_and_greedy_tokens_are_those_of_the_float32_reference(
    dense: BoundModel, prompts: list[Int32s], reference: Program, kv_dtype: KvDtype, bound: float
) -> None:
    program, n = cuda_program(dense, kv_dtype), dense.spec.n_addressable
    divergences, differing, compared, above = [], 0, 0, 0
    for ids in prompts[::2]:
        tokens = greedy(program, [ids], N_NEW)[0]
        whole = np.concatenate([ids, tokens])
        expected, found = fed(reference, whole)[:, :n].astype(np.float64), fed(program, whole)[:, :n]
        logs = [rows - np.logaddexp.reduce(rows, -1, keepdims=True) for rows in (expected, found.astype(np.float64))]
        divergences.append((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean())
        steps = slice(len(ids) - 1, len(whole) - 1)
        largest = np.abs(expected[steps] - found[steps]).max(-1)
        bounds = np.minimum(2 * largest, MOST_OF_RANGE * np.ptp(expected[steps]))
        top = np.sort(expected[steps], axis=-1)[:, -2:]
        decided = top[:, 1] - top[:, 0] > bounds
        differing += int((expected[steps].argmax(-1) != tokens)[decided].sum())
        compared, above = compared + len(tokens), above + int(decided.sum())
    print(json.dumps({"kv": kv_dtype, "mean_kl": float(np.mean(divergences)), "compared": compared, "decided": above}))
    assert np.mean(divergences) <= bound
    assert differing == 0
    assert above >= 0.9 * compared
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
    scores = []
    for backend in ("reference", "cuda"):
        command = [sys.executable, "scripts/score_tasks.py", str(dense.artifact.path), "--per-kind", "2", "--json"]
        run = subprocess.run([*command, "--backend", backend], cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        scores.append(next(iter(json.loads(run.stdout)["scores"].values())))
    print(json.dumps(scores))
    assert scores[0] == scores[1]


# ---- decoder blocks of the 27B's size -------------------------------------------------------------

N_LAYERS = 4
SLICE_LIMITS = ProgramLimits(max_context=4096, n_pages=64, prefill_chunk=1024, logits_rows=1)


@pytest.fixture(scope="module")
def slice_of_27b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundModel]:
    """The first four layers: three recurrent, one attention."""
    path = tmp_path_factory.mktemp("slice") / "slice.ninfer"
    code = "from ninfer_runtime.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", "synth", "qwen3.6-27b/groupwise-int", str(path)]
    subprocess.run([*command, "--layers", str(N_LAYERS)], cwd=ROOT, check=True, capture_output=True)
    with Artifact.open(path) as artifact:
        yield bind(artifact)


def slice_program(model: BoundModel) -> CudaProgram:
    backend = CudaBackend()
    options = ProgramOptions(device="cuda", dtype="bfloat16", kv_dtype="bf16")
    return backend.create(model, backend.plan_memory(model, SLICE_LIMITS, options))


def test_every_block_fed_with_the_references_input_is_within_one_percent(slice_of_27b: BoundModel) -> None:
    import torch

    from ninfer_runtime.backends.reference import attention as reference_attention
    from ninfer_runtime.backends.reference import gdn as reference_gdn
    from ninfer_runtime.backends.reference.norm import rms_norm
    from ninfer_runtime.backends.reference.rope import rope_tables
    from ninfer_runtime.models.qwen3_5 import AttentionWeights

    model, n_tokens = slice_of_27b, 64
    spec, hidden = model.spec, model.spec.text.hidden
    backend = ReferenceBackend()
    options = ProgramOptions(device="cuda", dtype="float32", weight_budget=24 << 30)
    limits = replace(SLICE_LIMITS, max_context=64, n_pages=1, prefill_chunk=64)
    reference: Any = backend.create(model, backend.plan_memory(model, limits, options))
    program = slice_program(model)
    ids = np.random.default_rng(3).integers(0, spec.n_addressable, n_tokens).astype(np.int32)
    pages = np.zeros(1, np.int32)
    program.prefill(PrefillChunk(0, ids, 0, pages))
    program.reset(0)
    weights, pool, errors = reference._weights, reference._pool, []
    with torch.inference_mode():
        x = weights.embed(model.token_embedding, torch.from_numpy(ids.astype(np.int64)).cuda())
        positions = torch.arange(n_tokens, device="cuda").repeat(3, 1)
        rope, n_attention, n_gdn = rope_tables(positions, spec), 0, 0
        recurrent = reference._slots.recurrent[0]
        for layer, w in enumerate(model.layers):
            given = x.float().cpu().numpy()
            h = rms_norm(x, weights.vector(w.input_norm), spec.norm_eps)
            if isinstance(w.mixer, AttentionWeights):
                row = reference_attention.AttentionRow(0, n_tokens, 0, torch.zeros(1, dtype=torch.int64, device="cuda"))
                x = x + reference_attention.attention(h, weights, w.mixer, spec, n_attention, [row], rope, pool)
                n_attention += 1
            else:
                gdn_row = reference_gdn.GdnRow(0, n_tokens, recurrent, None)
                x = x + reference_gdn.gdn(h, weights, w.mixer, spec, n_gdn, [gdn_row])
                n_gdn += 1
            x = x + feed_forward(
                rms_norm(x, weights.vector(w.post_attention_norm), spec.norm_eps), weights, w.ffn, model
            )
            expected = x.float().cpu().numpy()
            a = program._regions.activations.x
            program.device.upload(a, given)
            program._prompt_pass.layer(program.stream, layer, 0, 0, n_tokens)
            found = np.empty((n_tokens, hidden), np.float32)
            program.device.synchronize()
            program.device.download(a, found)
            change = expected - given
            errors.append(float(np.linalg.norm(found - expected) / np.linalg.norm(change)))
    print(json.dumps({"relative_error_of_each_block": errors}))
    assert max(errors) <= 0.01
    program.close()


def test_prompt_of_4096_tokens_is_the_same_in_chunks_of_1024_and_of_64(slice_of_27b: BoundModel) -> None:
    program = slice_program(slice_of_27b)
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
