"""The whole CUDA program over the trained tiny mixture of experts, on the emulator, in every recipe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ninfer_format import Artifact
from ninfer_runtime.models.binder import BoundModel, bind
from tests.runtime.conftest import ArtifactOf
from tests.runtime.cuda.test_program import conversation, cuda_program, divergence, fed, reference_logits

RECIPES = ("groupwise-int", "w8", "bf16", "nvfp4")


@pytest.fixture(scope="module", params=RECIPES)
def moe_model(request: pytest.FixtureRequest, artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    with Artifact.open(artifact_of("moe", request.param)) as artifact:
        yield bind(artifact)


def test_logits_stay_within_the_bound_of_the_float32_reference(moe_model: BoundModel) -> None:
    ids = conversation(moe_model)
    expected = reference_logits(moe_model, ids)
    program = cuda_program(moe_model)
    for chunk in (256, 40, 5):
        assert divergence(expected, fed(program, ids, chunk), moe_model.spec.n_addressable) <= 1e-3
