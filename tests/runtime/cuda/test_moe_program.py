"""The whole CUDA program over the trained tiny mixture of experts, on the emulator, in every recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ninfer_format import Artifact
from ninfer_runtime.backends.base import ProgramOptions
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.backends.reference import moe
from ninfer_runtime.models.binder import BoundModel, bind
from tests.emulator.device import EmulatedDevice
from tests.runtime import speaking
from tests.runtime.conftest import ArtifactOf
from tests.runtime.cuda.test_program import conversation, cuda_program, divergence, fed, reference_logits
from tests.runtime.programs import LIMITS, Row, round_of
from tests.runtime.speaking import proposing, questions

RECIPES = ("groupwise-int", "w8", "bf16", "nvfp4")
MAX_DRAFTS = 4
MARGIN = 0.05
"""Router logits nearer to each other than this may change places: activations are bfloat16."""

speak: Any = speaking.speak
opened: Any = speaking.opened


@pytest.fixture(scope="module", params=RECIPES)
def moe_model(request: pytest.FixtureRequest, artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    with Artifact.open(artifact_of("moe", request.param)) as artifact:
        yield bind(artifact)


def drafting(model: BoundModel) -> CudaProgram:
    limits = replace(LIMITS, max_columns=MAX_DRAFTS + 1, max_drafts=MAX_DRAFTS, device_snapshots=0, host_snapshots=0)
    options = ProgramOptions(device="cuda", dtype="bfloat16", proposer="mtp")
    backend = CudaBackend(EmulatedDevice(n_sms=4))
    return backend.create(model, backend.plan_memory(model, limits, options))


def test_logits_stay_within_the_bound_of_the_float32_reference(moe_model: BoundModel) -> None:
    ids = conversation(moe_model)
    expected = reference_logits(moe_model, ids)
    program = cuda_program(moe_model)
    for chunk in (256, 40, 5):
        assert divergence(expected, fed(program, ids, chunk), moe_model.spec.n_addressable) <= 1e-3


@pytest.mark.parametrize("recipe", ["groupwise-int", pytest.param("bf16", marks=pytest.mark.slow)])
def test_drafts_give_the_tokens_of_the_reference_and_of_stepping(artifact_of: ArtifactOf, recipe: str) -> None:
    """Greedy; the draft layer has experts of its own."""
    with Artifact.open(artifact_of("moe", recipe)) as artifact:
        model = bind(artifact)
        prompt, program = questions(model, 7, 1)[0], drafting(model)
        told = speak(proposing(model, max_drafts=MAX_DRAFTS), prompt, 12, n_drafts=MAX_DRAFTS)
        assert sum(accepted for _, accepted in told.rounds) > 0
        for how in ({"n_drafts": MAX_DRAFTS}, {"n_drafts": MAX_DRAFTS, "one_ahead": True}):
            spoken = speak(program, prompt, 12, **how)
            assert (spoken.tokens, spoken.rounds) == (told.tokens, told.rounds)
        assert speak(program, prompt, 12).tokens == told.tokens


def test_rounds_are_routed_as_the_reference_unless_logits_are_near(
    artifact_of: ArtifactOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of three columns: nine tokens, two tiles of eight."""
    seen: list[torch.Tensor] = []
    route = moe.route

    def noting(logits: torch.Tensor, experts_per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(logits)
        return route(logits, experts_per_token)

    with Artifact.open(artifact_of("moe", "bf16")) as artifact:
        model = bind(artifact)
        n_layers, k = len(model.layers), model.spec.text.experts_per_token
        program: Any = drafting(model)
        reference = proposing(model, max_drafts=0)
        inputs = np.random.default_rng(3).integers(0, model.spec.n_addressable, (3, 3)).tolist()
        for slot, prompt in enumerate(questions(model, 7, 3)):
            opened(program, prompt, slot=slot)
            opened(reference, prompt, slot=slot)
        rows = [Row(slot, of_slot) for slot, of_slot in enumerate(inputs)]
        program.read(program.launch(round_of(program, *rows)))
        monkeypatch.setattr(moe, "route", noting)
        reference.read(reference.launch(round_of(reference, *rows)))
        found = program.bench_routing(9)
        assert [len(logits) for logits in seen] == [9] * n_layers
        ranked = torch.stack(seen).sort(dim=-1, descending=True)
        clear = (ranked.values[..., k - 1] - ranked.values[..., k] > MARGIN).numpy()
        assert clear.mean() > 0.5
        expected = np.sort(ranked.indices[..., :k].numpy(), axis=-1)
        assert np.array_equal(np.sort(found, axis=-1)[clear], expected[clear])
