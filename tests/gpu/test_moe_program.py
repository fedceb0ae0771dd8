"""Mixtures of experts on a card: answers and logits of the trained tiny model, blocks of the 35B's size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from ninfer_format import Artifact
from ninfer_runtime.models.binder import BoundModel, bind
from tests.gpu.program_rig import (
    block_errors,
    comparison,
    cuda_program,
    reference_program,
    synthesize,
    trained_prompts,
)
from tests.runtime.artifacts import TRAINED, convert

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

N_NEW = 48
LARGEST_ERROR = 0.01
MOST_UNDECIDED = 0.5
"""Random weights leave the logits of a token's eighth and ninth expert close; the error above leaves those out."""
SWAPPED_OF_64 = 0.03
"""Error of 64 tokens of which a few swapped such experts; of fewer tokens one swap weighs more."""


@pytest.fixture(scope="module", params=["groupwise-int", "w8", "bf16", "nvfp4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundModel]:
    path = tmp_path_factory.mktemp("moe") / f"{request.param}.ninfer"
    convert(TRAINED / "moe", path, request.param)
    with Artifact.open(path) as artifact:
        yield bind(artifact)


def test_logits_and_greedy_tokens_are_those_of_the_float32_reference(model: BoundModel) -> None:
    program = cuda_program(model, "bf16")
    found = comparison(program, reference_program(model), trained_prompts(model)[::3], N_NEW, model.spec.n_addressable)
    print(json.dumps({"recipe": str(model.artifact.identity), **asdict(found)}))
    assert found.mean_kl <= 3e-3
    assert found.differing == 0
    assert found.decided >= 0.9 * found.compared
    program.close()


@pytest.mark.parametrize("n_tokens", [8, 64])
def test_blocks_of_the_35b_fed_with_the_references_input(n_tokens: int, tmp_path: Path) -> None:
    """Eight tokens take the launches of rounds, 64 those of prompt chunks."""
    path = tmp_path / "slice.ninfer"
    synthesize("qwen3.6-35b-a3b/groupwise-int", path)
    with Artifact.open(path) as artifact:
        errors = block_errors(bind(artifact), n_tokens)
    print(json.dumps({"tokens": n_tokens, "relative_error_of_each_block": errors}))
    assert max(of_all for of_all, _, _ in errors) <= SWAPPED_OF_64 * (64 / n_tokens) ** 0.5
    assert max(of_decided for _, of_decided, _ in errors) <= LARGEST_ERROR
    assert min(decided for _, _, decided in errors) >= 1 - MOST_UNDECIDED
    path.unlink()
