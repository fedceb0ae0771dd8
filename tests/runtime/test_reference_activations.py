"""Prompts over quantized rows in the reference: the oracle's numbers, only where asked for, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ninfer_format import Artifact
from ninfer_format.numeric.nvfp4_activations import quantize_rows
from ninfer_runtime.backends.base import Float32s, PrefillChunk, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.reference import ReferenceBackend
from ninfer_runtime.backends.reference.activations import input_divisor, quantized
from ninfer_runtime.config import Nvfp4Activations
from ninfer_runtime.models.binder import BoundModel, bind
from tests.runtime.conftest import ArtifactOf

LIMITS = ProgramLimits(max_context=128, n_pages=2, n_slots=1, prefill_chunk=128, logits_rows=128)
PAGES = np.arange(2, dtype=np.int32)


def logits(model: BoundModel, activations: Nvfp4Activations, n_tokens: int) -> Float32s:
    options = ProgramOptions(dtype="float32", nvfp4_activations=activations, weight_budget=1 << 30)
    backend = ReferenceBackend()
    program = backend.create(model, backend.plan_memory(model, LIMITS, options))
    ids = np.random.default_rng(5).integers(0, model.spec.n_addressable, n_tokens).astype(np.int32)
    found = program.prefill(PrefillChunk(0, ids, 0, PAGES, logits="all")).logits
    program.close()
    return found


def test_rows_have_the_oracles_numbers(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    scales = 10.0 ** rng.uniform(-6, 4, (64, 1))
    x = torch.from_numpy((rng.standard_normal((64, 96)) * scales).astype(np.float32))
    x[3, :16], x[4, 5], x[5] = 0.0, -0.0, 1e30
    for divisor in (1.0, 37.25, 448.0):
        products = quantize_rows(x.bfloat16().float().numpy(), np.float32(divisor)).products
        assert np.array_equal(quantized(x, divisor).numpy(), products / np.float32(divisor))


def test_only_long_chunks_and_only_when_asked(artifact_of: ArtifactOf) -> None:
    with Artifact.open(artifact_of("dense", "nvfp4")) as artifact:
        model = bind(artifact)
        plain, quantized_rows = logits(model, "a16", 40), logits(model, "a4", 40)
        assert not np.array_equal(plain, quantized_rows)
        assert np.isfinite(quantized_rows).all()
        assert np.array_equal(plain, logits(model, "auto", 40))
        assert np.array_equal(logits(model, "a4", 8), logits(model, "a16", 8))


def test_divisors_are_those_of_the_site(artifact_of: ArtifactOf) -> None:
    with Artifact.open(artifact_of("dense", "nvfp4")) as artifact:
        found = {name: input_divisor(artifact, name) for name in artifact.objects.names() if "/mlp/" in name}
        assert found["text/layers/0/mlp/down"] == float(
            artifact.tensor("text/layers/0/mlp/down_projection/input_scale_divisor")
        )
    with Artifact.open(artifact_of("dense", "w8")) as artifact:
        assert input_divisor(artifact, "text/layers/0/mlp/down") is None
        with pytest.raises(KeyError):
            input_divisor(artifact, "text/layers/0/mlp/up_down")
