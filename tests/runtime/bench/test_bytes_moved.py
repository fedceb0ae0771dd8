"""Bytes and operations of a round against the published tables of the models."""

from __future__ import annotations

import pytest

from ninfer_format.directory import Entry
from ninfer_format.errors import UsageError
from ninfer_format.inventory import plan_inventory
from ninfer_format.model_geometry import TextGeometry
from ninfer_format.recipes import published_geometry
from ninfer_runtime.backends.cuda.planned import planned_model
from ninfer_runtime.bench import bytes_moved

DENSE = "qwen3.6-27b/groupwise-int"
DENSE_TEXT = published_geometry(DENSE).text
DENSE_OBJECTS = plan_inventory(DENSE).objects
MOE = "qwen3.6-35b-a3b/groupwise-int"
MOE_TEXT = published_geometry(MOE).text
MOE_OBJECTS = plan_inventory(MOE).objects


@pytest.mark.parametrize(
    ("identity", "megabytes"),
    [
        ("qwen3.6-27b/groupwise-int", 15_380),
        ("qwen3.6-27b/nvfp4", 15_851),
        ("qwen3.8-27b/groupwise-int", 15_737),
        ("qwen3.6-35b-a3b/groupwise-int", 2_520),
    ],
)
def test_weights_of_one_token(identity: str, megabytes: int) -> None:
    text = published_geometry(identity).text
    assert bytes_moved.weight_bytes(plan_inventory(identity).objects, text) / 1e6 == pytest.approx(megabytes, rel=2e-3)


def test_weights_of_one_token_in_w8_are_a_byte_and_a_sixteenth_each() -> None:
    objects = planned_model("qwen3.6-27b/w8").artifact.objects
    gates = 48 * 2 * 48 * 5120  # a and b stay BF16
    weights = bytes_moved.matrix_flops(DENSE_OBJECTS, DENSE_TEXT, head=True) // 2 - gates
    assert bytes_moved.weight_bytes(objects, DENSE_TEXT) == pytest.approx(weights * 17 / 16 + 2 * gates, rel=1e-6)


def test_launches_of_the_dense_model_read_what_their_matrices_hold() -> None:
    found = {kind: (len(sizes), round(sizes[0] / 1e6, 1)) for kind, sizes in launch_bytes().items()}
    assert found == {
        "attention/input": (16, 43.6),
        "attention/output": (16, 20.6),
        "gdn/input": (48, 53.4),
        "gdn/output": (48, 20.6),
        "mlp/gate_up": (64, 94.7),
        "mlp/down": (64, 58.5),
        "head": (1, 993.3),
    }
    assert sum(map(sum, launch_bytes().values())) == bytes_moved.weight_bytes(DENSE_OBJECTS, DENSE_TEXT)


def launch_bytes() -> dict[str, tuple[int, ...]]:
    return bytes_moved.launch_bytes(DENSE_OBJECTS)


@pytest.mark.parametrize(("text", "megabytes"), [(DENSE_TEXT, 302), (MOE_TEXT, 126)])
def test_recurrent_state_is_read_and_written_once(text: TextGeometry, megabytes: int) -> None:
    assert round(2 * bytes_moved.state_bytes(text) / 1e6) == megabytes


@pytest.mark.parametrize(
    ("text", "kv_dtype", "n_bytes"),
    [
        (DENSE_TEXT, "bf16", 65_536),
        (DENSE_TEXT, "int8", 33_792),
        (DENSE_TEXT, "fp6", 25_600),
        (MOE_TEXT, "bf16", 20_480),
        (MOE_TEXT, "int8", 10_560),
    ],
)
def test_keys_and_values_of_one_token(text: TextGeometry, kv_dtype: str, n_bytes: int) -> None:
    assert bytes_moved.kv_bytes_per_token(text, kv_dtype) == n_bytes


def test_unknown_kv_type_is_refused() -> None:
    with pytest.raises(UsageError, match="fp4"):
        bytes_moved.kv_bytes_per_token(DENSE_TEXT, "fp4")


def test_drafts_read_the_layer_and_the_head_of_the_published_model() -> None:
    head = next(entry for entry in DENSE_OBJECTS if entry.name == bytes_moved.HEAD)
    # 451 MB in W8 for the dense 27B; its norms are no matrices.
    assert bytes_moved.draft_bytes(DENSE_OBJECTS) - head.n_bytes == pytest.approx(451e6, rel=2e-3)


def test_recurrence_moves_its_matrices_and_a_little_of_what_drives_them() -> None:
    matrices = 2 * bytes_moved.state_bytes(DENSE_TEXT)
    assert matrices < bytes_moved.recurrence_bytes(DENSE_TEXT, 3, 4) < 1.07 * matrices


@pytest.mark.parametrize(("context", "rate"), [(7_680, 112.4), (64_512, 100.3), (130_048, 89.3), (260_096, 73.2)])
def test_decode_limits_of_the_dense_model_at_1792_gbps(context: int, rate: float) -> None:
    moved = bytes_moved.round_bytes(DENSE_OBJECTS, DENSE_TEXT, [context], "int8")
    assert 1792e9 / moved.total == pytest.approx(rate, rel=2e-3)


def test_rows_share_weights_and_nothing_else() -> None:
    one = bytes_moved.round_bytes(DENSE_OBJECTS, DENSE_TEXT, [1000], "int8")
    many = bytes_moved.round_bytes(DENSE_OBJECTS, DENSE_TEXT, [1000] * 8, "int8", 32)
    assert many.weights == one.weights
    assert (many.states, many.keys_values) == (8 * one.states, 8 * one.keys_values)
    read = bytes_moved.round_bytes(DENSE_OBJECTS, DENSE_TEXT, [1000], "int8", state_writes=0)
    assert (read.states, one.states) == (bytes_moved.state_bytes(DENSE_TEXT), 2 * read.states)


@pytest.mark.parametrize(("n_columns", "experts"), [(4, 30), (8, 57), (16, 102), (32, 163), (64, 222)])
def test_distinct_experts_of_independent_tokens(n_columns: int, experts: int) -> None:
    assert bytes_moved.distinct_experts(MOE_TEXT, n_columns) == pytest.approx(experts, abs=1)


@pytest.mark.parametrize(
    ("objects", "text", "with_head", "without"),
    [(DENSE_OBJECTS, DENSE_TEXT, 51.2, 48.7), (MOE_OBJECTS, MOE_TEXT, 5.9, 4.9)],
)
def test_operations_of_one_token(
    objects: tuple[Entry, ...], text: TextGeometry, with_head: float, without: float
) -> None:
    assert bytes_moved.matrix_flops(objects, text, head=True) / 1e9 == pytest.approx(with_head, abs=0.06)
    assert bytes_moved.matrix_flops(objects, text, head=False) / 1e9 == pytest.approx(without, abs=0.06)


def test_causal_attention_grows_by_the_published_operations_per_position() -> None:
    assert bytes_moved.attention_flops(DENSE_TEXT, 0, 1) == 393_216
    assert bytes_moved.attention_flops(DENSE_TEXT, 10, 3) == 393_216 * (11 + 12 + 13)


def test_a_prompt_is_its_tokens_one_by_one() -> None:
    token = bytes_moved.matrix_flops(DENSE_OBJECTS, DENSE_TEXT, head=False)
    total = bytes_moved.prefill_flops(DENSE_OBJECTS, DENSE_TEXT, 5)
    assert total == 5 * token + sum(bytes_moved.attention_flops(DENSE_TEXT, i, 1) for i in range(5))
