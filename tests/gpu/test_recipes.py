"""Dense models in every recipe on a card: answers and logits of the trained tiny model, blocks of the 27B's size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from ninfer_format import Artifact
from ninfer_runtime.config import KvDtype
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


@pytest.fixture(scope="module", params=["nvfp4", "w8", "bf16"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundModel]:
    path = tmp_path_factory.mktemp("recipes") / f"{request.param}.ninfer"
    convert(TRAINED / "dense", path, request.param)
    with Artifact.open(path) as artifact:
        yield bind(artifact)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bf16", 1e-3), ("int8", 3e-3)])
def test_logits_and_greedy_tokens_are_those_of_the_float32_reference(
    dense: BoundModel, kv_dtype: KvDtype, bound: float
) -> None:
    program = cuda_program(dense, kv_dtype)
    prompts = trained_prompts(dense)[::3]
    found = comparison(program, reference_program(dense), prompts, N_NEW, dense.spec.n_addressable)
    print(json.dumps({"recipe": str(dense.artifact.identity), "kv": kv_dtype, **asdict(found)}))
    assert found.mean_kl <= bound
    assert found.differing == 0
    assert found.decided >= 0.9 * found.compared
    program.close()


@pytest.mark.parametrize("identity", ["qwen3.6-27b/nvfp4", "qwen3.8-27b/groupwise-int", "qwen3.6-27b/w8"])
def test_every_block_fed_with_the_references_input_is_within_one_percent(identity: str, tmp_path: Path) -> None:
    path = tmp_path / "slice.ninfer"
    synthesize(identity, path)
    with Artifact.open(path) as artifact:
        errors = block_errors(bind(artifact))
    print(json.dumps({"identity": identity, "relative_error_of_each_block": [of_all for of_all, _, _ in errors]}))
    assert max(of_all for of_all, _, _ in errors) <= 0.01
    path.unlink()
