"""Prompts over quantized rows: the whole program on the emulator, with the FP4 product and its twin, and with bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_format import Artifact
from ninfer_format.activation_stats import ActivationStats, dump_activation_stats
from ninfer_format.numeric.nvfp4_activations import quantize_rows
from ninfer_runtime.backends.base import Int32s, PrefillChunk, ProgramOptions
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.ops.quantize_rows import form_for
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.backends.cuda.prompt_products import prompt_rows
from ninfer_runtime.backends.reference import ReferenceBackend
from ninfer_runtime.backends.reference.activations import Kind
from ninfer_runtime.backends.reference.attention import AttentionRow, attention
from ninfer_runtime.backends.reference.forward import add_feed_forward
from ninfer_runtime.backends.reference.gdn import GdnRow, gdn
from ninfer_runtime.backends.reference.input_statistics import InputStatistics
from ninfer_runtime.backends.reference.norm import rms_norm
from ninfer_runtime.backends.reference.rope import rope_tables
from ninfer_runtime.config import Nvfp4Activations, PrefillActivations
from ninfer_runtime.models.binder import BoundModel, bind
from ninfer_runtime.models.qwen3_5 import AttentionWeights
from tests.emulator.device import EmulatedDevice
from tests.runtime.artifacts import TRAINED
from tests.runtime.conftest import ArtifactOf
from tests.runtime.cuda.fp4_rig import expected_bytes, stored
from tests.runtime.cuda.test_program import LIMITS, PAGES, conversation, fed

N_TOKENS = 64
ARCHS = ("sm_120a", "sm_90a")
WANTED: tuple[Nvfp4Activations, ...] = ("auto", "a4", "a16")
Blocks = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def model(artifact_of: ArtifactOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundModel]:
    """The trained dense model with measured divisors: each covers what its site meets in a conversation."""
    folder = tmp_path_factory.mktemp("calibrated")
    with Artifact.open(artifact_of("dense", "bf16")) as artifact:
        plain, backend = bind(artifact), ReferenceBackend()
        program: Any = backend.create(plain, backend.plan_memory(plain, LIMITS, ProgramOptions(weight_budget=1 << 30)))
        statistics = InputStatistics(artifact.objects.names(), channels=False)
        with program.observing(statistics):
            fed(program, conversation(plain), 256)
        stats = ActivationStats(str(artifact.identity), "float32", 1, 256, (("0" * 64, 1),), statistics.results())
    (folder / "stats.json").write_bytes(dump_activation_stats(stats))
    path = folder / "dense.ninfer"
    build(make_plan(BuildOptions(TRAINED / "dense", path, recipe="nvfp4", activation_stats=folder / "stats.json")))
    with Artifact.open(path) as artifact:
        assert float(artifact.tensor("text/layers/0/mlp/down_projection/input_scale_divisor")) != 1.0
        yield bind(artifact)


def cuda_program(
    model: BoundModel, arch: str, wanted: Nvfp4Activations, rows: PrefillActivations = "bf16"
) -> CudaProgram:
    backend = CudaBackend(EmulatedDevice(n_sms=4, arch=arch))
    options = ProgramOptions(
        device="cuda", dtype="bfloat16", kv_dtype="bf16", nvfp4_activations=wanted, prefill_activations=rows
    )
    return backend.create(model, backend.plan_memory(model, LIMITS, options))


@torch.inference_mode()
def reference_blocks(model: BoundModel, ids: Int32s, kinds: frozenset[Kind]) -> Blocks:
    """What goes into every decoder block and what comes out, float32 [T, hidden]."""
    backend, spec = ReferenceBackend(), model.spec
    options = ProgramOptions(dtype="float32", weight_budget=1 << 30, nvfp4_activations="a4")
    program: Any = backend.create(model, backend.plan_memory(model, LIMITS, options))
    weights, pool = program._weights, program._pool
    x = weights.embed(model.token_embedding, torch.from_numpy(ids.astype(np.int64)))
    rope = rope_tables(torch.arange(len(ids)).repeat(3, 1), spec)
    pages, found, n_attention, n_gdn = torch.from_numpy(PAGES.astype(np.int64)), [], 0, 0
    with weights.activations.active(kinds):
        for w in model.layers:
            given, h = x, rms_norm(x, weights.vector(w.input_norm), spec.norm_eps)
            if isinstance(w.mixer, AttentionWeights):
                row = AttentionRow(0, len(ids), 0, pages)
                x = x + attention(h, weights, w.mixer, spec, n_attention, [row], rope, pool)
                n_attention += 1
            else:
                gdn_row = GdnRow(0, len(ids), program._slots.recurrent[0], None)
                x = x + gdn(h, weights, w.mixer, spec, n_gdn, [gdn_row])
                n_gdn += 1
            x = add_feed_forward(x, weights, w, model)
            found.append((given, x))
    return found


def block_errors(program: CudaProgram, model: BoundModel, ids: Int32s, blocks: Blocks) -> list[float]:
    """Of every block, fed with the reference's input: relative error of what it adds."""
    program.reset(0)
    program.prefill(PrefillChunk(0, ids, 0, PAGES))
    program.reset(0)
    errors, x = [], program._regions.activations.x
    for layer, (given, expected) in enumerate(blocks):
        program.device.upload(x, np.ascontiguousarray(given.numpy()))
        program._prompt_pass.layer(program.stream, layer, 0, 0, len(ids))
        program.device.synchronize()
        found = np.empty((len(ids), model.spec.text.hidden), np.float32)
        program.device.download(x, found)
        change = (expected - given).numpy()
        errors.append(float(np.linalg.norm(found - expected.numpy()) / np.linalg.norm(change)))
    return errors


def first_rows(program: CudaProgram, model: BoundModel, ids: Int32s, given: torch.Tensor) -> NDArray[np.uint8]:
    """Bytes of the quantized rows that the first block's mixer multiplies."""
    matrices, kept = program._prompt_pass._matrices, []
    inputs, hidden = matrices.inputs, model.spec.text.hidden

    def looking(stream: Any, layer: int, n_tokens: int) -> None:
        kept.append(stored(program.device, program._regions.quantized, n_tokens, hidden, form_for(program.device.arch)))
        inputs(stream, layer, n_tokens)

    program.device.upload(program._regions.activations.x, np.ascontiguousarray(given.numpy()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrices, "inputs", looking)
        program._prompt_pass.layer(program.stream, 0, 0, 0, len(ids))
    return kept[0]


def test_every_block_is_that_of_the_reference_over_the_same_rows(model: BoundModel) -> None:
    """Codes on an edge may fall to either side, and then a block's sums are apart: but they are far nearer to the
    reference over quantized rows than to the one over rows as they are. Rows are equal where what they are of is."""
    ids = conversation(model)[:N_TOKENS]
    a4, a16 = reference_blocks(model, ids, frozenset({"nvfp4"})), reference_blocks(model, ids, frozenset())
    norm = torch.from_numpy(model.artifact.tensor("text/layers/0/input_norm"))
    normed = rms_norm(a4[0][0], norm, model.spec.norm_eps).bfloat16().float().numpy()
    divisor = np.float32(model.artifact.tensor("text/layers/0/gdn/input_projection/input_scale_divisor"))
    found = {}
    for arch in ARCHS:
        program = cuda_program(model, arch, "a4")
        errors = np.array(block_errors(program, model, ids, a4))
        assert (errors <= 0.05).all()
        assert (errors <= 0.75 * np.array(block_errors(program, model, ids, a16))).all()
        rows = expected_bytes(quantize_rows(normed, divisor), form_for(arch))
        assert (first_rows(program, model, ids, a4[0][0]) != rows).mean() <= 1e-3
        found[arch] = errors
        program.close()
    np.testing.assert_allclose(found["sm_120a"], found["sm_90a"], rtol=1e-3)


def test_chunks_as_short_as_a_round_take_rows_as_they_are(model: BoundModel) -> None:
    ids = conversation(model)[:24]
    a4, a16 = (cuda_program(model, "sm_90a", wanted) for wanted in ("a4", "a16"))
    assert np.array_equal(fed(a4, ids, 8), fed(a16, ids, 8))
    assert not np.array_equal(fed(a4, ids, 24), fed(a16, ids, 24))
    assert dict(a4.notes)["matrices"].endswith("portable twin with FP4 rows as bf16, the card has no FP4 product")
    assert dict(a16.notes)["matrices"].endswith("fast, with bf16 rows")


def test_what_the_option_means_on_a_card() -> None:
    meant = {
        (wanted, arch): prompt_rows(ProgramOptions(nvfp4_activations=wanted), arch).fp4
        for wanted in WANTED
        for arch in ARCHS
    }
    assert meant == {
        ("auto", "sm_120a"): "a4",
        ("auto", "sm_90a"): "a16",
        ("a4", "sm_120a"): "a4",
        ("a4", "sm_90a"): "twin",
        ("a16", "sm_120a"): "a16",
        ("a16", "sm_90a"): "a16",
    }


@pytest.mark.parametrize("recipe", ["groupwise-int", "w8"])
def test_bytes_are_those_of_the_reference(artifact_of: ArtifactOf, recipe: str) -> None:
    """Blocks over signed bytes: nearer to the reference over the same bytes than to the one over rows as they are."""
    with Artifact.open(artifact_of("dense", recipe)) as artifact:
        model = bind(artifact)
        ids = conversation(model)[:N_TOKENS]
        of_bytes, plain = reference_blocks(model, ids, frozenset({"int8"})), reference_blocks(model, ids, frozenset())
        program = cuda_program(model, "sm_90a", "auto", "int8")
        errors = np.array(block_errors(program, model, ids, of_bytes))
        assert (errors <= 0.01).all()
        assert (errors <= 0.7 * np.array(block_errors(program, model, ids, plain))).all()
        assert "with INT8 rows" in dict(program.notes)["matrices"]
        program.close()
