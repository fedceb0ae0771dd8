"""The start names every group of matrices, the path it takes and why."""

import pytest

from ninfer_runtime.backends.cuda.arena import ArenaPlan
from ninfer_runtime.backends.cuda.matrix_paths import Fp4Prompts, matrix_paths
from ninfer_runtime.backends.cuda.packing import PackedMatrix
from ninfer_runtime.backends.cuda.planned import planned_model
from ninfer_runtime.backends.cuda.weights import plan_weights


def paths_of(name: str, fp4_prompts: Fp4Prompts = "a16") -> list[str]:
    weights = plan_weights(planned_model(name), ArenaPlan())
    return matrix_paths(weights.matrices, fp4_prompts).split("; ")


def test_groupwise_matrices_of_the_27b_are_all_fast() -> None:
    assert paths_of("qwen3.6-27b/groupwise-int") == [
        "fast: 48 gdn/query_key Q4, 48 gdn/value_z Q5, 48 gdn/a_projection BF16, 48 gdn/b_projection BF16, "
        "48 gdn/output Q5, 64 mlp/gate_up Q4, 64 mlp/down Q5, 16 attention/query_key Q4, 16 attention/gate_value Q5, "
        "16 attention/output Q5, 1 output_head Q6"
    ]


def test_formats_of_one_role_are_groups_of_their_own() -> None:
    fast, prompts = paths_of("qwen3.6-27b/nvfp4")
    assert fast == (
        "fast: 48 gdn/query_key_value_z NVFP4, 48 gdn/a_projection BF16, 48 gdn/b_projection BF16, "
        "47 gdn/output NVFP4, 1 gdn/output BF16, 64 mlp/gate_up NVFP4, 64 mlp/down NVFP4, "
        "6 attention/query_key_gate_value BF16, 10 attention/query_key_gate_value NVFP4, "
        "2 attention/output BF16, 14 attention/output NVFP4, 1 output_head W8"
    )
    assert prompts == "NVFP4 in prompts: fast, with bf16 rows"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("a4", "NVFP4 in prompts: fast, with FP4 rows"),
        ("twin", "NVFP4 in prompts: portable twin with FP4 rows as bf16, the card has no FP4 product"),
    ],
)
def test_what_prompts_multiply_nvfp4_by_is_said(choice: Fp4Prompts, said: str) -> None:
    assert paths_of("tiny/nvfp4", choice)[-1] == said
    assert paths_of("tiny/w8", choice)[-1].startswith("generic")


def test_padded_matrices_are_generic_with_their_shapes() -> None:
    matrices = [PackedMatrix("text/layers/0/mlp/down", "W8G32_F16S", 77, 264), PackedMatrix("mtp/x", "BF16", 16, 128)]
    assert matrix_paths(matrices) == (
        "fast: 1 mtp/x BF16; generic, padded to whole tiles: 1 mlp/down W8 [77, 264] as [80, 384]"
    )
