"""The whole CUDA program on the emulator, over the trained tiny model: close to the reference, and true to the seam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ninfer_format import Artifact
from ninfer_format.errors import UsageError
from ninfer_runtime.backends.base import Float32s, Int32s, PrefillChunk, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.device import DeviceError
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.backends.reference import ReferenceBackend
from ninfer_runtime.config import KvDtype
from ninfer_runtime.models.binder import BoundModel, bind
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import parse_conversation
from tests.emulator.device import EmulatedDevice
from tests.runtime.conftest import ArtifactOf

PAGES = np.array([5, 1, 7, 2, 0, 6, 3, 4], np.int32)
LIMITS = ProgramLimits(max_context=512, n_pages=8, n_slots=1, prefill_chunk=256, logits_rows=256)
QUESTIONS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is 17 + 15?", "17 + 15 = 32."),
)


@pytest.fixture(scope="module", params=["groupwise-int", "w8", "bf16", "nvfp4"])
def dense_model(request: pytest.FixtureRequest, artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    with Artifact.open(artifact_of("dense", request.param)) as artifact:
        yield bind(artifact)


def cuda_program(
    model: BoundModel, kv_dtype: KvDtype = "bf16", limits: ProgramLimits = LIMITS, *, rotation: bool = True
) -> CudaProgram:
    backend = CudaBackend(EmulatedDevice(n_sms=4))
    options = ProgramOptions(device="cuda", dtype="bfloat16", kv_dtype=kv_dtype, kv_rotation=rotation)
    return backend.create(model, backend.plan_memory(model, limits, options))


def conversation(model: BoundModel) -> Int32s:
    """A conversation of the kind the model was trained on."""
    frontend, messages = Frontend.open(model.artifact), []
    for question, answer in QUESTIONS:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": "What is 21 + 4?"})
    prompt = frontend.prompt(parse_conversation(messages, []), thinking=False)
    return np.array(prompt.token_ids, np.int32)


def reference_logits(model: BoundModel, ids: Int32s) -> Float32s:
    backend = ReferenceBackend()
    plan = backend.plan_memory(model, LIMITS, ProgramOptions(dtype="float32", weight_budget=1 << 30))
    return fed(backend.create(model, plan), ids, LIMITS.prefill_chunk)


def fed(program: Any, ids: Int32s, chunk: int) -> Float32s:
    program.reset(0)
    parts = []
    for start in range(0, len(ids), chunk):
        part = PrefillChunk(0, ids[start : start + chunk], start, PAGES, logits="all")
        parts.append(program.prefill(part).logits)
    return np.concatenate(parts)


def divergence(expected: Float32s, found: Float32s, n_addressable: int) -> float:
    """Mean KL(expected ‖ found) in nats over the addressable ids."""
    logs = []
    for logits in (expected, found):
        rows = logits[:, :n_addressable].astype(np.float64)
        logs.append(rows - np.logaddexp.reduce(rows, -1, keepdims=True))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean())


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bf16", 1e-3), ("int8", 3e-3), ("fp6", 3e-3)])
def test_logits_stay_within_the_bound_of_the_float32_reference(
    dense_model: BoundModel, kv_dtype: KvDtype, bound: float
) -> None:
    ids = conversation(dense_model)
    expected = reference_logits(dense_model, ids)
    program = cuda_program(dense_model, kv_dtype)
    for chunk in (256, 40, 5):
        assert divergence(expected, fed(program, ids, chunk), dense_model.spec.n_addressable) <= bound


@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 3e-3), ("fp6", 1e-2)])
def test_logits_without_rotation_stay_within_theirs(artifact_of: ArtifactOf, kv_dtype: KvDtype, bound: float) -> None:
    with Artifact.open(artifact_of("dense", "bf16")) as artifact:
        model = bind(artifact)
        ids = conversation(model)
        found = fed(cuda_program(model, kv_dtype, rotation=False), ids, 40)
        assert divergence(reference_logits(model, ids), found, model.spec.n_addressable) <= bound


def test_two_runs_have_the_same_bits(dense_model: BoundModel, fresh_seed: int) -> None:
    ids = np.random.default_rng(fresh_seed).integers(0, dense_model.spec.n_addressable, 150).astype(np.int32)
    program = cuda_program(dense_model)
    assert np.array_equal(fed(program, ids, 100), fed(program, ids, 100))


def test_options_without_kernels_are_refused(artifact_of: ArtifactOf) -> None:
    backend = CudaBackend(EmulatedDevice(n_sms=4))
    with Artifact.open(artifact_of("dense", "bf16")) as artifact, pytest.raises(UsageError, match="float32"):
        backend.plan_memory(bind(artifact), LIMITS, ProgramOptions(device="cuda", dtype="float32"))


def test_start_that_fails_gives_the_memory_back(dense_model: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(n_sms=4)
    backend = CudaBackend(device)
    plan = backend.plan_memory(dense_model, LIMITS, ProgramOptions(device="cuda", dtype="bfloat16"))
    free = device.free_bytes()

    def fails(*given: object) -> None:
        raise DeviceError("the file ended early")

    monkeypatch.setattr("ninfer_runtime.backends.cuda.program.load_weights", fails)
    with pytest.raises(DeviceError, match="ended early"):
        backend.create(dense_model, plan)
    assert device.free_bytes() == free
