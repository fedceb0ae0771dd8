"""Programs on a card beside the float32 reference: trained tiny models, and decoder blocks of full size."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from ninfer_runtime.config import KvDtype, SamplingParams
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import parse_conversation
from tests.runtime.artifacts import ROOT

PAGES_PER_ROW = 8
LIMITS = ProgramLimits(
    max_rows=8, max_context=64 * PAGES_PER_ROW, n_pages=8 * PAGES_PER_ROW, n_slots=8, prefill_chunk=512, logits_rows=512
)
MOST_OF_RANGE = 0.01
CLOSE = 0.02
"""Router logits nearer than this part of their spread are no decision: BF16 inputs move them by as much."""
GREEDY = SamplingParams.greedy()
SLICE_LAYERS = int(os.environ.get("NINFER_SLICE_LAYERS", "4"))
"""Of the full-size models whose blocks are compared: three recurrent, one attention; 64 are all of a 27B."""
SLICE_LIMITS = ProgramLimits(max_context=4096, n_pages=64, prefill_chunk=1024, logits_rows=1)


def trained_prompts(model: BoundModel) -> list[Int32s]:
    """One question of every kind that the model was trained on."""
    sys.path.insert(0, str(ROOT / "tests" / "oracle"))
    score_tasks = import_module("scripts.score_tasks")
    frontend, out = Frontend.open(model.artifact), []
    for question in score_tasks.questions(1):
        conversation = parse_conversation([{"role": "user", "content": question.text}], question.tools)
        out.append(np.array(frontend.prompt(conversation, thinking=question.thinking).token_ids, np.int32))
    return out


def cuda_program(model: BoundModel, kv_dtype: KvDtype, limits: ProgramLimits = LIMITS) -> CudaProgram:
    backend = CudaBackend()
    options = ProgramOptions(device="cuda", dtype="bfloat16", kv_dtype=kv_dtype)
    return backend.create(model, backend.plan_memory(model, limits, options))


def reference_program(model: BoundModel) -> Program:
    backend = ReferenceBackend()
    options = ProgramOptions(dtype="float32", weight_budget=1 << 30)
    return backend.create(model, backend.plan_memory(model, replace(LIMITS, max_rows=1), options))


def pages_of(slot: int) -> Int32s:
    return np.arange(slot, 8 * PAGES_PER_ROW, 8, dtype=np.int32)


def fed(program: Program, ids: Int32s, slot: int = 0) -> Float32s:
    program.reset(slot)
    return program.prefill(PrefillChunk(slot, ids, 0, pages_of(slot), logits="all")).logits


def greedy(
    program: Program, prompts: Sequence[Int32s], n_new: int, sampling: SamplingParams = GREEDY
) -> NDArray[np.int32]:
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


@dataclass(frozen=True)
class Comparison:
    """Mean KL of logits in nats; greedy tokens: how many, how many the reference decides, how many of these differ."""

    mean_kl: float
    compared: int
    decided: int
    differing: int


def comparison(program: Program, reference: Program, prompts: Sequence[Int32s], n_new: int, n_ids: int) -> Comparison:
    """Greedy answers of ``program``, and its logits over them, beside the reference's; the first ``n_ids`` ids."""
    divergences, differing, compared, above = [], 0, 0, 0
    for ids in prompts:
        tokens = greedy(program, [ids], n_new)[0]
        whole = np.concatenate([ids, tokens])
        expected, found = fed(reference, whole)[:, :n_ids].astype(np.float64), fed(program, whole)[:, :n_ids]
        logs = [rows - np.logaddexp.reduce(rows, -1, keepdims=True) for rows in (expected, found.astype(np.float64))]
        divergences.append((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean())
        steps = slice(len(ids) - 1, len(whole) - 1)
        largest = np.abs(expected[steps] - found[steps]).max(-1)
        bounds = np.minimum(2 * largest, MOST_OF_RANGE * np.ptp(expected[steps]))
        top = np.sort(expected[steps], axis=-1)[:, -2:]
        decided = top[:, 1] - top[:, 0] > bounds
        differing += int((expected[steps].argmax(-1) != tokens)[decided].sum())
        compared, above = compared + len(tokens), above + int(decided.sum())
    return Comparison(float(np.mean(divergences)), compared, above, differing)


def synthesize(identity: str, path: Path) -> None:
    """The first layers of a model of full size with random weights: three recurrent, one attention."""
    code = "from ninfer_runtime.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", "synth", identity, str(path), "--layers", str(SLICE_LAYERS)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def block_errors(model: BoundModel, n_tokens: int = 64) -> list[tuple[float, float, float]]:
    """Of every block, fed with the reference's input of up to 64 tokens: error relative to what the block changes, of
    all tokens and of those whose last expert leads the next one by more than ``CLOSE``; the share of these."""
    import torch

    from ninfer_runtime.backends.reference import attention as reference_attention
    from ninfer_runtime.backends.reference import gdn as reference_gdn
    from ninfer_runtime.backends.reference.forward import feed_forward
    from ninfer_runtime.backends.reference.linear import linear_float32
    from ninfer_runtime.backends.reference.norm import rms_norm
    from ninfer_runtime.backends.reference.rope import rope_tables
    from ninfer_runtime.models.moe import MoeWeights
    from ninfer_runtime.models.qwen3_5 import AttentionWeights

    spec, hidden = model.spec, model.spec.text.hidden
    backend = ReferenceBackend()
    options = ProgramOptions(device="cuda", dtype="float32", weight_budget=24 << 30)
    limits = replace(SLICE_LIMITS, max_context=64, n_pages=1, prefill_chunk=64)
    reference: Any = backend.create(model, backend.plan_memory(model, limits, options))
    program = cuda_program(model, "bf16", SLICE_LIMITS)
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
            h = rms_norm(x, weights.vector(w.post_attention_norm), spec.norm_eps)
            decided = np.ones(n_tokens, np.bool_)
            if isinstance(w.ffn, MoeWeights):
                logits = linear_float32(h, weights, w.ffn.router)
                best = logits.topk(spec.text.experts_per_token + 1, dim=-1).values
                decided = (best[:, -2] - best[:, -1] > CLOSE * logits.std(dim=-1)).cpu().numpy()
            x = x + feed_forward(h, weights, w.ffn, model)
            expected = x.float().cpu().numpy()
            a = program._regions.activations.x
            program.device.upload(a, given)
            program._prompt_pass.layer(program.stream, layer, 0, 0, n_tokens)
            found = np.empty((n_tokens, hidden), np.float32)
            program.device.synchronize()
            program.device.download(a, found)
            wrong, change = found - expected, expected - given
            of_all, of_decided = (
                float(np.linalg.norm(wrong[rows]) / np.linalg.norm(change[rows])) for rows in (slice(None), decided)
            )
            errors.append((of_all, of_decided, float(decided.mean())))
    program.close()
    return errors
