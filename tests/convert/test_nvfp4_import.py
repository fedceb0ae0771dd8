"""Prepacked NVFP4 sources: words taken over, what is taken from the base, values for other recipes, every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_convert.nvfp4_rescale import common_divisor, rescaled_words
from ninfer_convert.pipeline import BuildResult, build
from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan
from ninfer_convert.plan_view import to_json
from ninfer_convert.problems import PlanError, Problem
from ninfer_convert.report import report_of
from ninfer_format import Artifact, SourceError, TensorEntry, encode_tensor
from ninfer_format.numeric.direct import widen_bf16
from ninfer_format.numeric.nvfp4 import E4M3FN
from tests.convert.nvfp4 import LAYERS, Matrix, Pair, Tool, nvfp4_pair, random_matrix
from tests.convert.tiny import Words, unfuse_experts

ATTENTION, HEADS, HEAD_DIM = 7, 6, 64
Floats = NDArray[np.float32]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return nvfp4_pair(tmp_path)


def plan_pair(pair: Pair, **options: Any) -> ConversionPlan:
    return make_plan(BuildOptions(pair.source.folder, base=pair.base.folder, **options))


def built(pair: Pair, tmp_path: Path, **options: Any) -> BuildResult:
    return build(plan_pair(pair, out=tmp_path / "x.ninfer", **options), step_lanes=2048)


def rows_of(parts: list[Any]) -> Any:
    return np.concatenate(parts)


def fused(name: str, layer: int, part: Callable[[str], Any]) -> Any:
    """Rows of the object ``name`` on ``layer``, from ``part(stem)`` of each source linear; fused by hand."""
    stem = f"{LAYERS}{layer}."
    if name == "attention/query_key_gate_value":
        q = part(stem + "self_attn.q_proj")
        heads = q.reshape(HEADS, 2, HEAD_DIM, q.shape[1])
        query, gate = (heads[:, i].reshape(HEADS * HEAD_DIM, -1) for i in (0, 1))
        return rows_of([query, part(stem + "self_attn.k_proj"), gate, part(stem + "self_attn.v_proj")])
    if name == "gdn/query_key_value_z":
        return rows_of([part(stem + "linear_attn.in_proj_qkv"), part(stem + "linear_attn.in_proj_z")])
    if name == "mlp/gate_up":
        return rows_of([part(stem + "mlp.gate_proj"), part(stem + "mlp.up_proj")])
    single = {"attention/output": "self_attn.o_proj", "gdn/output": "linear_attn.out_proj", "mlp/down": "mlp.down_proj"}
    return part(stem + single[name])


FIRST = {
    "attention/query_key_gate_value": "self_attn.q_proj", "attention/output": "self_attn.o_proj",
    "gdn/query_key_value_z": "linear_attn.in_proj_qkv", "gdn/output": "linear_attn.out_proj",
    "mlp/gate_up": "mlp.gate_proj", "mlp/down": "mlp.down_proj",
}  # fmt: skip
SITES = {
    "attention/query_key_gate_value": "attention/input_projection", "attention/output": "attention/output_projection",
    "gdn/query_key_value_z": "gdn/input_projection", "gdn/output": "gdn/output_projection",
    "mlp/gate_up": "mlp/gate_up_projection", "mlp/down": "mlp/down_projection",
}  # fmt: skip
KEPT_OBJECTS = {"text/layers/3/attention/query_key_gate_value", "text/layers/3/attention/output",
                "text/layers/4/gdn/output"}  # fmt: skip


def decoder_objects(n_layers: int = 8) -> list[tuple[int, str]]:
    return [
        (layer, name)
        for layer in range(n_layers)
        for name in FIRST
        if name.startswith(("mlp/", "attention/" if layer % 4 == 3 else "gdn/"))
    ]


def test_words_are_those_of_the_source_and_the_rest_is_the_base_s(tmp_path: Path, fresh_seed: int) -> None:
    pair = nvfp4_pair(tmp_path, seed=fresh_seed)
    result = built(pair, tmp_path)
    n_words = 0
    with Artifact.open(result.path) as artifact:
        for layer, name in decoder_objects():
            full = f"text/layers/{layer}/{name}"
            entry = artifact.objects[full]
            assert isinstance(entry, TensorEntry)
            if full in KEPT_OBJECTS:
                expected = fused(name, layer, lambda stem: pair.base.tensors[stem + ".weight"])
                assert entry.format == "BF16"
                assert np.array_equal(artifact.words(full).codes, expected)
                continue
            words, first = artifact.words(full), pair.matrices[f"{LAYERS}{layer}.{FIRST[name]}"]
            assert np.array_equal(words.codes, fused(name, layer, lambda stem: pair.matrices[stem].codes)), full
            assert words.scales is not None
            assert np.array_equal(words.scales, fused(name, layer, lambda stem: pair.matrices[stem].scales)), full
            assert words.divisor == first.divisor
            scalar = f"text/layers/{layer}/{SITES[name]}/input_scale_divisor"
            assert artifact.tensor(scalar).tobytes() == first.input_divisor.tobytes()
            n_words += 1
        embedding = widen_bf16(pair.base.tensors["model.language_model.embed_tokens.weight"])
        payload = bytes(artifact.payload("text/token_embedding"))
        assert payload == encode_tensor(embedding, "W8G32_F16S", "row-split-k128-v1")
        scalars = [n for n in artifact.objects.names() if n.endswith("input_scale_divisor")]
        assert len(scalars) == n_words == len(decoder_objects()) - len(KEPT_OBJECTS)
    assert any("equal" in note for note in result.notes)


def test_report_and_plan_tell_the_two_folders_apart(pair: Pair, tmp_path: Path) -> None:
    result = built(pair, tmp_path)
    report, plan = json.loads(report_of(result.path).read_text()), to_json(plan_pair(pair))
    for document in (report, plan):
        assert document["source"]["folder"] == str(pair.source.folder)
        assert document["base"]["folder"] == str(pair.base.folder)
    assert report["arguments"]["base"] == str(pair.base.folder)
    records = {record["name"]: record for record in report["objects"]}
    assert records["text/layers/2/mlp/down"]["origin"] == "packed"
    assert "error" not in records["text/layers/2/mlp/down"]
    assert records["text/token_embedding"]["origin"] == "base"


def test_bytes_do_not_depend_on_workers_or_steps(pair: Pair, tmp_path: Path) -> None:
    contents = []
    for jobs, step in ((1, None), (3, 512)):
        plan = plan_pair(pair, out=tmp_path / "x.ninfer", jobs=jobs, force=True)
        contents.append(build(plan, step_lanes=step).path.read_bytes())
    assert contents[0] == contents[1]


def test_one_folder_is_enough_for_a_custom_artifact(pair: Pair, tmp_path: Path) -> None:
    beside = built(pair, tmp_path, model_id="same").path.read_bytes()
    pair.source.frontend = pair.base.frontend
    pair.source.save()
    options = BuildOptions(pair.source.folder, out=tmp_path / "alone.ninfer", model_id="same")
    assert build(make_plan(options)).path.read_bytes() == beside


def test_recipe_follows_what_is_stored(pair: Pair) -> None:
    recipe = plan_pair(pair).require().config.recipe
    assert dict(recipe.exceptions) == dict.fromkeys(KEPT_OBJECTS, "BF16")


def test_role_that_is_packed_nowhere_has_no_divisors(tmp_path: Path) -> None:
    kept = tuple(f"{layer}.linear_attn.out_proj" for layer in range(8))
    recipe = plan_pair(nvfp4_pair(tmp_path, kept=kept)).require().config.recipe
    assert recipe.format_of("text/layers/*/gdn/output") == "BF16"
    assert "text/layers/*/gdn/output_projection/input_scale_divisor" not in recipe.roles


def test_fused_matrix_that_is_packed_only_in_part_is_kept_in_bf16(tmp_path: Path) -> None:
    plan = plan_pair(nvfp4_pair(tmp_path, kept=("2.mlp.up_proj",)))
    assert plan.problems == ()
    assert plan.require().config.recipe.exceptions["text/layers/2/mlp/gate_up"] == "BF16"
    assert any("only in part" in note and "text/layers/2/mlp/gate_up" in note for note in plan.notes)


@pytest.mark.parametrize("tool", ["compressed-tensors", "modelopt"])
def test_other_recipes_encode_the_exact_values(tmp_path: Path, tool: Tool) -> None:
    pair = nvfp4_pair(tmp_path, tool=tool)
    pair.source.frontend = pair.base.frontend
    pair.source.save()
    options: dict[str, Any] = {"out": tmp_path / "x.ninfer", "force": True}
    values = pair.matrices[f"{LAYERS}5.mlp.down_proj"].values()
    if tool == "modelopt":  # multiplies by the stored scale instead of dividing by ours
        matrix = pair.matrices[f"{LAYERS}5.mlp.down_proj"]
        exact = Matrix(matrix.codes, matrix.scales, np.float32(1), np.float32(1)).values()
        values = exact * (np.float32(1) / matrix.divisor)
    for recipe, format in (("w8", "W8G32_F16S"), ("groupwise-int", "Q5G64_F16S"), ("bf16", "BF16")):
        plan = make_plan(BuildOptions(pair.source.folder, recipe=recipe, **options))
        assert any("dequantized" in note for note in plan.notes)
        with Artifact.open(build(plan, step_lanes=1024).path) as artifact:
            entry = artifact.objects["text/layers/5/mlp/down"]
            assert isinstance(entry, TensorEntry)
            assert entry.format == format
            assert bytes(artifact.payload(entry.name)) == encode_tensor(values, format, entry.layout)


# Cases A17, A20: divisors and multipliers


def test_multipliers_decode_within_an_ulp_and_powers_of_two_exactly(tmp_path: Path, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    pair = nvfp4_pair(tmp_path, tool="modelopt")
    for stem, matrix in list(pair.matrices.items()):
        if stem.endswith(("o_proj", "down_proj", "out_proj")):
            divisor = 256.0 if stem.endswith("out_proj") else rng.uniform(1, 3000)
            pair.put(stem, Matrix(matrix.codes, matrix.scales, np.float32(divisor), np.float32(4)))
    with Artifact.open(built(pair.save(), tmp_path).path) as artifact:
        for layer, name in decoder_objects():
            full = f"text/layers/{layer}/{name}"
            if full in KEPT_OBJECTS or name not in ("attention/output", "gdn/output", "mlp/down"):
                continue
            stem = f"{LAYERS}{layer}.{FIRST[name]}"
            matrix, multiplier = pair.matrices[stem], pair.source.tensors[f"{stem}.weight_scale_2"]
            exact = Matrix(matrix.codes, matrix.scales, np.float32(1), np.float32(1)).values() * multiplier
            decoded = artifact.tensor(full)
            if name == "gdn/output":
                assert np.array_equal(decoded, matrix.values()), full
            assert (np.abs(decoded - exact) <= np.spacing(np.maximum(np.abs(decoded), np.abs(exact)))).all(), full
            scalar = artifact.tensor(f"text/layers/{layer}/{SITES[name]}/input_scale_divisor")
            assert scalar == 4


def test_reciprocal_of_any_multiplier_decodes_within_an_ulp(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    products = np.unique(np.outer(np.array([0.5, 1, 1.5, 2, 3, 4, 6], np.float32), E4M3FN[1:127])).astype(np.float32)
    mantissas = np.concatenate(
        [rng.uniform(1, 2, 3000), 1 + rng.integers(0, 64, 64) * 2.0**-23, 2 - 2.0**-23 * np.arange(1, 64)]
    )
    for multiplier in np.ldexp(mantissas, rng.integers(-30, 4, mantissas.size)).astype(np.float32):
        ours, theirs = products / (np.float32(1) / multiplier), products * multiplier
        assert (np.abs(ours - theirs) <= np.spacing(np.maximum(ours, theirs))).all(), multiplier


def test_output_of_the_converter_is_no_source(pair: Pair, tmp_path: Path) -> None:
    out = built(pair, tmp_path).path
    with pytest.raises(SourceError, match=r"already a \.ninfer artifact"):
        make_plan(BuildOptions(out))


def test_global_scales_of_both_kinds_in_one_matrix_are_refused(pair: Pair) -> None:
    pair.source.tensors[f"{STEM}.weight_scale_2"] = np.float32(1) / pair.source.tensors[f"{STEM}.weight_global_scale"]
    problem = only(plan_pair(pair.save()))
    assert (problem.code, problem.where) == ("unconsumed-scale", f"{STEM}.weight")
    assert "weight_scale_2" in problem.message


# Case A18: global scales that differ inside a fused matrix


def differing(
    pair: Pair, layer: int, divisors: tuple[float, float], inputs: tuple[float, float] = (3, 3)
) -> list[Matrix]:
    """Give gate_proj and up_proj of ``layer`` other global scales; their new words."""
    rng, out = np.random.default_rng(5), []
    for name, divisor, input_divisor in zip(("gate_proj", "up_proj"), divisors, inputs, strict=True):
        stem = f"{LAYERS}{layer}.mlp.{name}"
        shape = len(pair.matrices[stem].codes), pair.matrices[stem].codes.shape[1] * 2
        pair.put(stem, random_matrix(rng, shape, divisor, input_divisor, largest=0x70))
        out.append(pair.matrices[stem])
    pair.save()
    return out


@pytest.mark.parametrize("divisors", [(1.0, 1.25), (640.0, 80.0), (100.0, 3000.0)])
def test_differing_global_scales_get_a_common_divisor_within_half_a_step(
    pair: Pair, tmp_path: Path, divisors: tuple[float, float]
) -> None:
    matrices = differing(pair, 2, divisors)
    result = built(pair, tmp_path)
    assert any("global scales differ" in note and "text/layers/2/mlp/gate_up" in note for note in result.notes)
    with Artifact.open(result.path) as artifact:
        words = artifact.words("text/layers/2/mlp/gate_up")
    assert words.divisor in [m.divisor for m in matrices]
    assert words.scales is not None
    assert np.array_equal(words.codes, np.concatenate([m.codes for m in matrices]))
    stored = E4M3FN[words.scales].astype(np.float64) / float(words.divisor or 0)
    exact = np.concatenate([E4M3FN[m.scales].astype(np.float64) / float(m.divisor) for m in matrices])
    finite = E4M3FN[:127].astype(np.float64)
    steps = np.diff(finite, append=2 * finite[-1] - finite[-2])[words.scales] / float(words.divisor or 0)
    assert (np.abs(stored - exact) <= steps * 0.5 * (1 + 1e-12)).all()
    own = next(i for i, m in enumerate(matrices) if m.divisor == words.divisor)
    half = len(words.scales) // 2
    assert np.array_equal(words.scales[own * half : (own + 1) * half], matrices[own].scales)
    figures = result.finished["text/layers/2/mlp/gate_up"].error
    assert figures is not None
    assert 0 < figures["relative"] < 0.06
    assert result.finished["text/layers/1/mlp/gate_up"].error is None


def test_power_of_two_between_global_scales_loses_nothing(pair: Pair, tmp_path: Path) -> None:
    matrices = differing(pair, 0, (64.0, 128.0))
    scales = np.maximum(matrices[0].scales, 0x20)
    matrices[0] = Matrix(matrices[0].codes, scales, matrices[0].divisor, matrices[0].input_divisor)
    pair.put(f"{LAYERS}0.mlp.gate_proj", matrices[0])
    pair.save()
    with Artifact.open(built(pair, tmp_path).path) as artifact:
        decoded = artifact.tensor("text/layers/0/mlp/gate_up")
    assert np.array_equal(decoded, np.concatenate([m.values() for m in matrices]))


def test_common_divisor_prefers_most_rows_and_never_overflows() -> None:
    one, two = np.float32(1), np.float32(2)
    assert common_divisor([one, two], [10, 20], [0x30, 0x30]) == two
    assert common_divisor([one, two], [20, 10], [0x30, 0x30]) == one
    assert common_divisor([one, two], [10, 20], [0x7E, 0x30]) == one  # 448 * 2 is no E4M3 value
    assert common_divisor([one, two], [10, 10], [0x30, 0x30]) == two


def test_rescaled_words_are_the_nearest_ties_to_even(fresh_seed: int) -> None:
    rng, words = np.random.default_rng(fresh_seed), np.arange(127, dtype=np.uint8)
    assert np.array_equal(rescaled_words(np.float32(3), np.float32(3)), words)
    for _ in range(20):
        own, common = (np.float32(x) for x in np.exp(rng.uniform(-3, 3, 2)))
        wanted = E4M3FN[:127].astype(np.float64) * (float(common) / float(own))
        expected = np.minimum(wanted, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(rescaled_words(own, common), expected)
    halved = rescaled_words(np.float32(2), np.float32(1))
    assert halved[:8].tolist() == [0, 0, 1, 2, 2, 2, 3, 4]  # 0.5, 1.5, 2.5, 3.5 steps go to the even word


def test_smallest_of_differing_activation_scales_is_stored(pair: Pair, tmp_path: Path) -> None:
    differing(pair, 2, (64, 64), inputs=(5, 7))
    result = built(pair, tmp_path)
    with Artifact.open(result.path) as artifact:
        assert artifact.tensor("text/layers/2/mlp/gate_up_projection/input_scale_divisor") == 5
    assert any("activation scales differ" in note for note in result.notes)


def test_weight_only_source_gets_divisor_one(pair: Pair, tmp_path: Path) -> None:
    pair.source.tensors = {n: w for n, w in pair.source.tensors.items() if not n.endswith(".input_global_scale")}
    pair.save()
    result = built(pair, tmp_path)
    with Artifact.open(result.path) as artifact:
        assert artifact.tensor("text/layers/2/mlp/down_projection/input_scale_divisor") == 1
    assert any("no activation scale" in note for note in result.notes)


# Case A19: experts


def moe_pair(tmp_path: Path) -> tuple[Pair, list[str]]:
    """A mixture of experts whose routed experts are NVFP4, each matrix with a global scale of its own."""
    pair = nvfp4_pair(tmp_path, moe=True)
    stems = []
    for checkpoint in (pair.base, pair.source):
        unfuse_experts(checkpoint.tensors, only="language_model")
    rng = np.random.default_rng(9)
    for name in [n for n in pair.source.tensors if ".experts." in n and n.startswith(LAYERS)]:
        shape = pair.source.tensors.pop(name).shape
        stems.append(name.removesuffix(".weight"))
        pair.put(stems[-1], random_matrix(rng, shape, float(rng.uniform(200, 2000)), float(rng.uniform(1, 50))))
    return pair.save(), stems


def test_every_expert_keeps_its_own_global_scale(tmp_path: Path) -> None:
    pair, stems = moe_pair(tmp_path)
    with Artifact.open(built(pair, tmp_path).path) as artifact:
        decoded = artifact.tensor("text/layers/1/moe/routed_down")
        gate_up = artifact.tensor("text/layers/1/moe/routed_gate_up")
    values = {s: pair.matrices[s].values() for s in stems if s.startswith(f"{LAYERS}1.")}
    down = np.concatenate([values[f"{LAYERS}1.mlp.experts.{e}.down_proj"] for e in range(5)])
    both = [values[f"{LAYERS}1.mlp.experts.{e}.{p}_proj"] for e in range(5) for p in ("gate", "up")]
    for found, exact in ((decoded, down), (gate_up, np.concatenate(both))):
        # Half an E4M3 step is 1/16 of a normal scale.
        assert np.linalg.norm(found - exact) < 0.04 * np.linalg.norm(exact)
        assert (np.abs(found - exact) <= np.abs(exact) / 16 + np.abs(exact).max() / 1000).all()


def test_expert_without_its_global_scale_is_named(tmp_path: Path) -> None:
    pair, stems = moe_pair(tmp_path)
    del pair.source.tensors[f"{stems[7]}.weight_global_scale"]
    (problem,) = plan_pair(pair.save()).problems
    assert problem.code == "missing-scale"
    assert problem.where == f"{stems[7]}.weight"


# What cannot be taken over


def only(plan: ConversionPlan) -> Problem:
    (problem,) = plan.problems
    return problem


STEM = f"{LAYERS}5.mlp.down_proj"


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_global_scale"])
def test_incomplete_matrix_is_named(pair: Pair, part: str) -> None:
    del pair.source.tensors[f"{STEM}.{part}"]
    problem = only(plan_pair(pair.save()))
    assert problem.code == ("missing-codes" if part == "weight_packed" else "missing-scale")
    assert problem.where == f"{STEM}.weight"
    assert f".{part}" in problem.message


def test_matrix_stored_plain_and_packed_is_refused(pair: Pair) -> None:
    pair.source.tensors[f"{STEM}.weight"] = pair.base.tensors[f"{STEM}.weight"]
    problem = only(plan_pair(pair.save()))
    assert (problem.code, problem.where) == ("stored-twice", f"{STEM}.weight")


def test_part_that_no_adapter_accounts_for_is_refused(pair: Pair) -> None:
    pair.source.tensors[f"{STEM}.weight_zero_point"] = np.ones(1, np.float32)
    problem = only(plan_pair(pair.save()))
    assert (problem.code, problem.where) == ("unconsumed-scale", f"{STEM}.weight")
    assert "weight_zero_point" in problem.message


@pytest.mark.parametrize(
    ("part", "change", "code"),
    [
        ("weight_packed", lambda w: w.view(np.int8), "wrong-shape"),
        ("weight_packed", lambda w: w[:, :-4], "wrong-shape"),
        ("weight_scale", lambda w: w.view(np.uint8), "wrong-dtype"),
        ("weight_scale", lambda w: w[:-1], "wrong-shape"),
        ("weight_global_scale", lambda w: w.astype(np.float16), "wrong-dtype"),
        ("weight_global_scale", lambda w: np.repeat(w, 2), "wrong-shape"),
        ("input_global_scale", lambda w: np.repeat(w, 3), "wrong-shape"),
    ],
)
def test_parts_of_another_shape_or_dtype_are_refused(
    pair: Pair, part: str, change: Callable[[Words], Words], code: str
) -> None:
    pair.source.tensors[f"{STEM}.{part}"] = np.ascontiguousarray(change(pair.source.tensors[f"{STEM}.{part}"]))
    problem = only(plan_pair(pair.save()))
    assert (problem.code, problem.where) == (code, f"{STEM}.weight")
    assert part in problem.message


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
@pytest.mark.parametrize("part", ["weight_global_scale", "input_global_scale"])
def test_illegal_global_scale_is_refused_before_anything_is_written(
    pair: Pair, tmp_path: Path, part: str, value: float
) -> None:
    pair.source.tensors[f"{STEM}.{part}"] = np.array([value], np.float32)
    plan = plan_pair(pair.save(), out=tmp_path / "x.ninfer")
    with pytest.raises(PlanError) as caught:
        build(plan)
    (problem,) = caught.value.problems
    assert problem.code == "bad-global-scale"
    assert f"{STEM}.{part}" in problem.message
    assert list(tmp_path.glob("*.ninfer*")) == list(tmp_path.glob(".*ninfer*")) == []


@pytest.mark.parametrize("word", [0x7F, 0x80, 0xFE])
def test_nan_or_negative_block_scale_ends_the_build_with_its_place(pair: Pair, tmp_path: Path, word: int) -> None:
    pair.matrices[STEM].scales[37, 3] = word
    with pytest.raises(SourceError, match=r"row 37, group 3") as caught:
        built(pair.save(), tmp_path)
    assert f"'{STEM}.weight_scale'" in str(caught.value)
    assert f"{word:#04x}" in str(caught.value)
    assert list(tmp_path.glob("*.ninfer*")) == list(tmp_path.glob(".*ninfer*")) == []


def test_base_that_differs_where_both_are_plain_is_refused(pair: Pair, tmp_path: Path) -> None:
    name = f"{LAYERS}3.self_attn.q_proj.weight"
    pair.base.tensors[name] = pair.base.tensors[name].copy()
    pair.base.tensors[name][100, 7] ^= 1
    with pytest.raises(PlanError) as caught:
        built(pair.save(), tmp_path)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("base-differs", name)
    assert "[100, 7]" in problem.message


def test_base_of_another_shape_is_refused(pair: Pair) -> None:
    pair.base.config["text_config"]["rms_norm_eps"] = 1e-5
    problem = only(plan_pair(pair.save()))
    assert problem.code == "config-disagrees"
    assert "rms_norm_eps" in problem.message


def test_base_beside_a_plain_source_is_refused(pair: Pair) -> None:
    options = BuildOptions(pair.base.folder, base=pair.base.folder)
    assert "base-not-needed" in {p.code for p in make_plan(options).problems}
    assert "base-not-needed" in {p.code for p in plan_pair(pair, recipe="w8").problems}


def test_packed_mtp_is_read_for_the_mtp_recipe(pair: Pair, tmp_path: Path) -> None:
    pair.source.frontend = pair.base.frontend
    shape = pair.source.tensors.pop("mtp.layers.0.mlp.down_proj.weight").shape
    matrix = random_matrix(np.random.default_rng(1), shape, 300.0, 2.0)
    pair.put("mtp.layers.0.mlp.down_proj", matrix)
    pair.save()
    with Artifact.open(build(make_plan(BuildOptions(pair.source.folder, tmp_path / "x.ninfer"))).path) as artifact:
        payload = bytes(artifact.payload("mtp/layer/mlp/down"))
    assert payload == encode_tensor(matrix.values(), "W8G32_F16S", "row-split-k128-v1")
