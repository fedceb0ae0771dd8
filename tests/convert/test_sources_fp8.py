"""FP8 sources: codes times the right scale in every documented layout, float32 into the encoders, refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_convert.families import ObjectSource
from ninfer_convert.pipeline import build
from ninfer_convert.plan import ConversionPlan, Problem
from ninfer_convert.sources.adapters import open_checkpoint
from ninfer_convert.sources.fp8 import E8M0
from ninfer_convert.sources.fp8_scales import declared_blocks, scale_grid
from ninfer_convert.sources.refusal import BadGroup
from ninfer_format import Artifact, SourceError, TensorEntry, encode_tensor
from tests.convert.fp8 import E4M3, SCALE_TYPES, Floats, Granularity, meaning, random_fp8, spread, to_fp8
from tests.convert.tiny import INDEX, TinyCheckpoint, tiny_checkpoint, unfuse_experts, write_safetensors

PlanOf = Callable[..., ConversionPlan]
LAYERS = "model.language_model.layers."
DOWN = f"{LAYERS}1.mlp.down_proj.weight"
MATRICES = ("proj.weight", "proj_a.weight", "proj_b.weight", "proj_qkv.weight", "proj_z.weight")


@pytest.fixture
def rng(fresh_seed: int) -> np.random.Generator:
    """Drawn anew each run; the seed is printed."""
    return np.random.default_rng(fresh_seed)


def matrices(checkpoint: TinyCheckpoint) -> list[str]:
    """What a block-FP8 checkpoint quantizes: the decoder's matrices, not norms, embedding, head, vision or MTP."""
    return [n for n in checkpoint.tensors if n.startswith(LAYERS) and (n.endswith(MATRICES) or ".experts." in n)]


def only(plan: ConversionPlan) -> Problem:
    assert len(plan.problems) == 1, "\n".join(map(str, plan.problems))
    return plan.problems[0]


def one_matrix(folder: Path, tensors: dict[str, Any], block: Any = (128, 128)) -> Path:
    """A folder with nothing but these tensors and a config."""
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    config = {"quantization_config": {"weight_block_size": list(block)}} if block else {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fused(source: ObjectSource, values: dict[str, Floats], ids: NDArray[np.int32] | None) -> Floats:
    """The object's matrix, gathered from float32 values in memory."""
    rows = [values[r.tensor].reshape(-1, source.row_width)[r.begin : r.begin + r.count] for r in source.runs]
    matrix: Floats = np.concatenate(rows)
    if source.transform == "draft_rows":
        assert ids is not None
        return matrix[ids]
    return matrix.T if source.transform == "conv_transpose" else matrix


# Values


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
@pytest.mark.parametrize("part", ["weight_scale_inv", "weight_scale"])
def test_every_value_is_code_times_scale(
    tmp_path: Path, rng: np.random.Generator, granularity: Granularity, scale_type: str, part: str
) -> None:
    """Case A14: 1000 × 576 in blocks of 128 × 128 has 8 × 5 scales, the last row and column of blocks cut."""
    codes, scales, values = random_fp8(rng, (1000, 576), granularity, scale_type, (128, 128))
    if granularity == "block":
        assert scales.shape == (8, 5)
    with open_checkpoint(one_matrix(tmp_path / "m", {"x.weight": codes, f"x.{part}": scales})) as checkpoint:
        assert checkpoint.faults == ()
        for begin, count in ((0, 1000), (0, 1), (127, 2), (130, 700), (999, 1)):
            found = checkpoint.read_floats("x.weight", begin, count)
            assert np.array_equal(found, values[begin : begin + count])
        assert np.array_equal(checkpoint.read_words("x.weight"), values.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_declared_block_size_decides_where_shapes_do_not(tmp_path: Path, rng: np.random.Generator) -> None:
    """Case A14: 1000 rows give 8 scale rows with blocks of 125 to 142; only the config knows which."""
    codes, scales, _ = random_fp8(rng, (1000, 576), "block", "F32", (128, 128))
    for block in ((128, 128), (125, 116), (142, 143)):
        assert scales.shape == (-(-1000 // block[0]), -(-576 // block[1]))
        folder = one_matrix(tmp_path / "m", {"x.weight": codes, "x.weight_scale_inv": scales}, block)
        with open_checkpoint(folder) as checkpoint:
            expected = codes.astype(np.float32) * spread(scales, 1000, 576, block)
            assert np.array_equal(checkpoint.read_floats("x.weight"), expected)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("block", [(128, 128), None])
def test_a_single_scale_is_no_block_grid(tmp_path: Path, rng: np.random.Generator, shape: Any, block: Any) -> None:
    """Case A15."""
    codes, _, _ = random_fp8(rng, (300, 200), "tensor", "F32", (1, 1))
    scale = np.full(shape, 0.37, np.float32)
    folder = one_matrix(tmp_path / "m", {"x.weight": codes, "x.weight_scale_inv": scale}, block)
    with open_checkpoint(folder) as checkpoint:
        assert np.array_equal(checkpoint.read_floats("x.weight"), codes.astype(np.float32) * np.float32(0.37))
        assert "per tensor" in checkpoint.tensors["x.weight"].kind


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_objects_are_encoded_from_float32_and_only_bf16_ones_rounded(
    tmp_path: Path, plan_of: PlanOf, rng: np.random.Generator, granularity: Granularity
) -> None:
    """Fused query, key, value, gate and up rows keep their own scales; MTP and vision stay BF16 (A5)."""
    for moe in (False, True):
        checkpoint = tiny_checkpoint(tmp_path / f"{moe}", moe=moe)
        values = meaning(checkpoint, to_fp8(checkpoint, matrices(checkpoint), rng, granularity))
        for recipe in ("groupwise-int", "bf16"):
            plan = plan_of(checkpoint.save(), out=tmp_path / "x.ninfer", recipe=recipe, force=True)
            target = plan.require()
            with Artifact.open(build(plan, step_lanes=1024).path) as artifact:
                for entry, source in zip(target.inventory.objects, target.sources, strict=True):
                    if isinstance(entry, TensorEntry) and source.runs:
                        matrix = fused(source, values, target.draft_ids).reshape(entry.shape)
                        expected = encode_tensor(np.ascontiguousarray(matrix), entry.format, entry.layout)
                        assert bytes(artifact.payload(entry.name)) == expected, entry.name


def test_experts_fused_and_apart_give_the_same_bytes(tmp_path: Path, plan_of: PlanOf, rng: np.random.Generator) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "moe", moe=True)
    to_fp8(checkpoint, [n for n in matrices(checkpoint) if ".experts." in n], rng, block=(20, 24))
    plan = plan_of(checkpoint.save(), out=tmp_path / "x.ninfer")
    built = build(plan, step_lanes=1024).path.read_bytes()
    tensors = checkpoint.tensors
    scales = {n.removesuffix("_scale_inv"): tensors.pop(n) for n in list(tensors) if n.endswith("_scale_inv")}
    assert len(scales) == 8
    unfuse_experts(tensors)
    unfuse_experts(scales)
    tensors |= {n.removesuffix("weight") + "weight_scale_inv": s for n, s in scales.items()}
    again = plan_of(checkpoint.save(), out=tmp_path / "x.ninfer", force=True)
    assert build(again, step_lanes=1024).path.read_bytes() == built


@pytest.mark.parametrize(("granularity", "shape"), [("expert", (5,)), ("expert", (5, 1, 1)), ("row", (5, 80))])
def test_bank_scales_per_expert_and_per_row(
    tmp_path: Path, rng: np.random.Generator, granularity: str, shape: tuple[int, ...]
) -> None:
    codes, _, _ = random_fp8(rng, (5, 80, 72), "tensor", "F32", (1, 1))
    scales = rng.uniform(0.1, 9, shape).astype(np.float32)
    folder = one_matrix(tmp_path / "m", {"l.experts.gate_up_proj": codes, "l.experts.gate_up_proj_scale_inv": scales})
    with open_checkpoint(folder) as checkpoint:
        expected = codes.astype(np.float32) * scales.reshape(5, 80 if granularity == "row" else 1, 1)
        assert np.array_equal(checkpoint.read_floats("l.experts.gate_up_proj"), expected.reshape(-1, 72))
        assert f"per {granularity}" in checkpoint.tensors["l.experts.gate_up_proj"].kind


def test_blocks_of_a_fused_bank_may_begin_anew_at_the_up_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    """40 gate and 40 up rows in blocks of 16: 3 + 3 scales apart, 5 over both; the shapes differ, so it is stated."""
    codes, _, _ = random_fp8(rng, (2, 80, 72), "tensor", "F32", (1, 1))
    for rows in (5, 6):
        scales = rng.uniform(0.1, 9, (2, rows, 3)).astype(np.float32)
        tensors = {"l.experts.gate_up_proj": codes, "l.experts.gate_up_proj_scale_inv": scales}
        with open_checkpoint(one_matrix(tmp_path / "m", tensors, (16, 24))) as checkpoint:
            found = checkpoint.read_floats("l.experts.gate_up_proj").reshape(2, 80, 72)
        whole = spread(scales, 80, 72, (16, 24))
        apart = [spread(part, 40, 72, (16, 24)) for part in (scales[:, :3], scales[:, 3:])]
        expected = whole if rows == 5 else np.concatenate(apart, axis=1)
        assert np.array_equal(found, codes.astype(np.float32) * expected)


def test_bank_blocks_that_can_be_read_in_two_ways_are_refused() -> None:
    """2 × 100 rows in blocks of 128 give 2 scale rows either way, over different rows."""
    with pytest.raises(BadGroup, match="gate and up apart") as refused:
        scale_grid("l.experts.gate_up_proj", (4, 200, 128), (4, 2, 1), ((128, 128),))
    assert refused.value.code == "ambiguous-scale"
    assert scale_grid("l.experts.down_proj", (4, 200, 128), (4, 2, 1), ((128, 128),)).part_rows == 200


def test_e8m0_words_are_powers_of_two() -> None:
    assert np.array_equal(E8M0, np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32), True)


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        ({"quantization_config": {"weight_block_size": [128, 64]}}, ((128, 64),)),
        ({"text_config": {"quantization_config": {"weight_block_size": [8, 8]}}}, ((8, 8),)),
        ({"quantization_config": {"config_groups": {
            "group_0": {"weights": {"strategy": "block", "block_structure": [128, 128]}},
            "group_1": {"weights": {"strategy": "block", "block_structure": "64x32"}},
            "group_2": {"weights": {"strategy": "channel", "block_structure": None}},
            "group_3": {"weights": {"strategy": "group", "group_size": 32}}}}}, ((128, 128), (64, 32), (1, 32))),
        ({"quantization_config": {"weight_block_size": None}}, ()),
        ({"quantization_config": {"weight_block_size": [128]}}, ()),
        ({"quantization_config": {"weight_block_size": [128, 0]}}, ()),
        ({"quantization_config": {"weight_block_size": [True, 1.0]}}, ()),
        ({"quantization_config": {"config_groups": {
            "group_0": {"weights": {"strategy": "block", "block_structure": "axb"}}, "group_1": None}}}, ()),
        ({"quantization_config": ["fp8"]}, ()),
        (None, ()),
    ],
)  # fmt: skip
def test_block_sizes_that_a_config_declares(config: Any, blocks: Any) -> None:
    assert declared_blocks(config) == blocks


# What is said


def test_plan_and_report_say_how_tensors_were_stored(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, rng: np.random.Generator
) -> None:
    names = matrices(dense)
    to_fp8(dense, names, rng)
    plan = plan_of(dense.save(), out=tmp_path / "x.ninfer")
    note = next(note for note in plan.notes if "FP8" in note)
    assert f"{len(names)} tensors" in note
    assert "F32 scales per block of 16 × 24" in note
    assert "float32" in note
    assert "BF16" in note


def test_activation_scales_are_accounted_for_and_not_applied(
    dense: TinyCheckpoint, plan_of: PlanOf, rng: np.random.Generator
) -> None:
    values = to_fp8(dense, [DOWN], rng, "tensor", part="weight_scale")[DOWN]
    for part in ("input_scale", "input_scale_ub", "activation_scale"):
        dense.tensors[DOWN.removesuffix("weight") + part] = np.full(1, 3, np.float32)
    plan = plan_of(dense.save())
    assert plan.problems == ()
    assert any("activation scales" in note for note in plan.notes)
    with plan.checkpoint as checkpoint:
        assert np.array_equal(checkpoint.read_floats(DOWN), values)


def test_published_identity_refuses_fp8(dense: TinyCheckpoint, plan_of: PlanOf, rng: np.random.Generator) -> None:
    from ninfer_convert.families.checks import SourceRules, check_sources

    to_fp8(dense, [DOWN], rng)
    with plan_of(dense.save()).checkpoint as checkpoint:
        problems: list[Problem] = []
        shape = checkpoint.tensors[DOWN].shape
        check_sources(checkpoint, {DOWN: shape}, (), SourceRules(True, False, (), ()), problems, [])
    assert [p.code for p in problems] == ["wrong-dtype"]
    assert "F8_E4M3" in problems[0].message


# Where parts lie


def test_scale_in_another_shard_than_its_weight(tmp_path: Path, plan_of: PlanOf, rng: np.random.Generator) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "d", n_shards=1)
    values = to_fp8(checkpoint, matrices(checkpoint), rng)
    tensors = checkpoint.tensors
    checkpoint.tensors = {n: tensors[n] for n in sorted(tensors, key=lambda n: n.endswith("_scale_inv"))}
    checkpoint.n_shards = 3
    checkpoint.save()
    inverse = DOWN.removesuffix("weight") + "weight_scale_inv"
    assert checkpoint.weight_map[DOWN] != checkpoint.weight_map[inverse]
    plan = plan_of(checkpoint)
    assert plan.problems == ()
    with plan.checkpoint as opened:
        assert np.array_equal(opened.read_floats(DOWN), values[DOWN])


def test_missing_shard_of_scales_is_one_line_and_codes_are_not_used(
    dense: TinyCheckpoint, plan_of: PlanOf, rng: np.random.Generator
) -> None:
    to_fp8(dense, matrices(dense), rng)
    dense.save()
    scales = {n: t for n, t in dense.tensors.items() if n.endswith("_scale_inv")}
    dense.weight_map |= dict.fromkeys(scales, "scales.safetensors")
    write_safetensors(dense.folder / "scales.safetensors", scales)
    for file in dense.shards():
        held = {n: dense.tensors[n] for n, f in dense.weight_map.items() if f == file}
        write_safetensors(dense.folder / file, held)
    dense.save_index()
    assert plan_of(dense).problems == ()
    (dense.folder / "scales.safetensors").unlink()
    problem = only(plan_of(dense))
    assert (problem.code, problem.where) == ("missing-shard", "scales.safetensors")
    assert problem.where != INDEX


# Refusals


def test_codes_without_their_scale_are_refused_by_name(
    dense: TinyCheckpoint, plan_of: PlanOf, rng: np.random.Generator
) -> None:
    """Case A13."""
    to_fp8(dense, matrices(dense), rng)
    del dense.tensors[DOWN.removesuffix("weight") + "weight_scale_inv"]
    problem = only(plan_of(dense.save()))
    assert (problem.code, problem.where) == ("missing-scale", DOWN)
    for layer in (0, 2):
        del dense.tensors[f"{LAYERS}{layer}.mlp.down_proj.weight_scale_inv"]
    problem = only(plan_of(dense.save()))
    assert "3 tensors" in problem.message
    assert problem.where == f"{LAYERS}*.mlp.down_proj.weight"


def _without_codes(tensors: dict[str, Any]) -> None:
    del tensors[DOWN]


def _bf16_weight(tensors: dict[str, Any]) -> None:
    tensors[DOWN] = np.zeros(tensors[DOWN].shape, np.uint16)


def _e5m2(tensors: dict[str, Any]) -> None:
    tensors[DOWN] = np.zeros(tensors[DOWN].shape, ml_dtypes.float8_e5m2)


def _integer_scale(tensors: dict[str, Any]) -> None:
    name = DOWN.removesuffix("weight") + "weight_scale_inv"
    tensors[name] = np.zeros(tensors[name].shape, np.uint8)


def _two_scales(tensors: dict[str, Any]) -> None:
    tensors[DOWN.removesuffix("weight") + "weight_scale"] = np.ones(1, np.float32)


def _zero_point(tensors: dict[str, Any]) -> None:
    tensors[DOWN.removesuffix("weight") + "weight_zero_point"] = np.zeros(1, np.int8)


@pytest.mark.parametrize(
    ("spoil", "code", "text"),
    [
        (_without_codes, "missing-codes", "weight_scale_inv"),
        (_bf16_weight, "wrong-dtype", "BF16"),
        (_e5m2, "wrong-dtype", "F8_E5M2"),
        (_integer_scale, "wrong-dtype", "U8"),
        (_two_scales, "stored-twice", "weight_scale"),
        (_zero_point, "unconsumed-scale", "weight_zero_point"),
    ],
)
def test_parts_that_make_no_weight_are_refused_by_name(
    dense: TinyCheckpoint, plan_of: PlanOf, rng: np.random.Generator, spoil: Callable[[Any], None], code: str, text: str
) -> None:
    to_fp8(dense, [DOWN], rng)
    spoil(dense.tensors)
    problem = only(plan_of(dense.save()))
    assert (problem.code, problem.where) == (code, DOWN)
    assert text in problem.message


@pytest.mark.parametrize(
    ("shape", "block"),
    [((5, 6), (16, 24)), ((72, 136), (16, 24)), ((1, 136), (16, 24)), ((136,), (16, 24)), ((2,), (16, 24)),
     ((5, 6), None), ((6, 5), (16, 24)), ((1, 5, 6), (16, 24))],
)  # fmt: skip
def test_scale_shapes_that_are_not_known_are_refused(
    dense: TinyCheckpoint, plan_of: PlanOf, rng: np.random.Generator, shape: tuple[int, ...], block: Any
) -> None:
    """Case A15: down_proj is 72 × 136: one, 72 × 1, or 5 × 6 with the declared blocks of 16 × 24, no other scale."""
    to_fp8(dense, [DOWN], rng)
    dense.tensors[DOWN.removesuffix("weight") + "weight_scale_inv"] = np.ones(shape, np.float32)
    dense.config["quantization_config"]["weight_block_size"] = list(block) if block else None
    plan = plan_of(dense.save())
    if (shape, block) == ((5, 6), (16, 24)):
        assert plan.problems == ()
        return
    problem = only(plan)
    assert (problem.code, problem.where) == ("wrong-scale-shape", DOWN)
    assert str(list(shape)) in problem.message
    assert ("5, 6" if block else "declares no block size") in problem.message


BAD_CODES = (
    (DOWN, "groupwise-int", 0x7F),
    (DOWN, "bf16", 0xFF),
    (f"{LAYERS}0.linear_attn.in_proj_a.weight", "w8", 0x7F),
)


@pytest.mark.parametrize(("name", "recipe", "word"), BAD_CODES)
def test_nan_code_is_refused_with_its_index(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, rng: np.random.Generator, name: str, recipe: str, word: int
) -> None:
    to_fp8(dense, [name], rng)
    dense.tensors[name].view(np.uint8)[3, 70] = word
    plan = plan_of(dense.save(), out=tmp_path / "x.ninfer", recipe=recipe)
    with pytest.raises(SourceError, match=r"nan at index \[3, 70\]") as refused:
        build(plan)
    assert name in str(refused.value)
    assert not (tmp_path / "x.ninfer").exists()


@pytest.mark.parametrize(
    ("scale_type", "value"),
    [("F32", np.nan), ("F32", np.inf), ("F32", -0.5), ("BF16", np.inf), ("F8_E8M0", np.nan), ("F8_E4M3", np.nan)],
)
def test_bad_scale_is_refused_with_its_index(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, rng: np.random.Generator, scale_type: str, value: float
) -> None:
    """Case A23."""
    to_fp8(dense, [DOWN], rng, scale_type=scale_type)
    name = DOWN.removesuffix("weight") + "weight_scale_inv"
    dense.tensors[name][4, 2] = value
    with pytest.raises(SourceError, match=r"index \[4, 2\]") as refused:
        build(plan_of(dense.save(), out=tmp_path / "x.ninfer"))
    assert name in str(refused.value)


def test_zero_scale_gives_zeros_and_an_overflowing_product_is_refused(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Case A23."""
    to_fp8(dense, [DOWN], rng)
    name = DOWN.removesuffix("weight") + "weight_scale_inv"
    dense.tensors[name][0, 0] = 0
    plan = plan_of(dense.save(), out=tmp_path / "x.ninfer", recipe="bf16")
    with Artifact.open(build(plan).path) as artifact:
        assert not artifact.tensor("text/layers/1/mlp/down")[:16, :24].any()
    dense.tensors[name][0, 0] = 3e38
    dense.tensors[DOWN][5, 7] = 448
    dense.tensors[DOWN][:5, :24] = 0
    with pytest.raises(SourceError, match=r"index \[5, "):
        build(plan_of(dense.save(), out=tmp_path / "x.ninfer", recipe="bf16", force=True))


def test_codes_are_e4m3fn() -> None:
    assert np.dtype(E4M3).name == "float8_e4m3fn"
