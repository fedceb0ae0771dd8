"""Mixed recipes from TOML files: what rules match, what is stored, and one clear sentence per mistake."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan
from ninfer_convert.recipe_file import RecipeFile, read_recipe_file, recipe_option, resolve
from ninfer_format import Artifact, Identity, NinferError, Recipe, TensorEntry, UsageError, encode_tensor, verify
from ninfer_format.activation_stats import site_of
from ninfer_format.model_config import config_of
from ninfer_format.model_geometry import ModelGeometry, geometry_from_config
from ninfer_format.numeric.direct import widen_bf16
from ninfer_format.published import CONFIG_RESOURCE
from ninfer_format.recipes import check_recipe, published_geometry, recipe_for
from tests.convert.tiny import VISION_CONFIG, TinyCheckpoint, text_config

PlanOf = Callable[..., ConversionPlan]
ROOT = Path(__file__).resolve().parents[2]
Q4, Q5, Q6, W8 = "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[..., RecipeFile]:
    """``recipe_file({pattern: format}, key=value)``: a written and read file."""

    def made(rules: dict[str, str], **members: Any) -> RecipeFile:
        path = tmp_path / "mixed.toml"
        head = "".join(f"{key} = {json.dumps(value)}\n" for key, value in ({"name": "mix"} | members).items())
        lines = "".join(f"{json.dumps(pattern)} = {json.dumps(format)}\n" for pattern, format in rules.items())
        path.write_text(f"{head}\n[formats]\n{lines}")
        return read_recipe_file(path)

    return made


def geometry(*, moe: bool = False) -> ModelGeometry:
    return geometry_from_config(text_config(moe=moe), VISION_CONFIG, None, 128)


def resolved(file: RecipeFile, model: ModelGeometry | None = None) -> Recipe:
    recipe, problems = resolve(file, model or geometry())
    assert problems == []
    assert check_recipe(model or geometry(), recipe) == []
    return recipe


def problem(file: RecipeFile, model: ModelGeometry | None = None) -> str:
    """The one problem of a file."""
    (found,) = resolve(file, model or geometry())[1]
    return found


# --- matching ---------------------------------------------------------------------------------------------------------


def test_a_role_changes_on_every_layer_and_nothing_else_does(recipe_file: Callable[..., RecipeFile]) -> None:
    recipe = resolved(recipe_file({"text/layers/*/mlp/down": "Q6"}))
    base = recipe_for(geometry(), "groupwise-int")
    assert recipe.exceptions == {}
    assert {new for old, new in zip(base.formats, recipe.formats, strict=True) if old != new} == {
        ("text/layers/*/mlp/down", Q6)
    }
    assert recipe.name == "mix"


def test_layers_become_exceptions_and_later_rules_win(recipe_file: Callable[..., RecipeFile]) -> None:
    rules = {"text/layers/*/mlp/*": "W8", "text/layers/1-2/mlp/down": "Q6", "text/layers/2/mlp/**": "BF16"}
    recipe = resolved(recipe_file(rules))
    assert recipe.format_of("text/layers/*/mlp/gate_up", 1) == W8
    assert [recipe.format_of("text/layers/*/mlp/down", layer) for layer in range(4)] == [W8, Q6, "BF16", W8]
    assert recipe.format_of("text/layers/*/mlp/gate_up", 2) == "BF16"
    assert dict(recipe.exceptions) == {
        "text/layers/2/mlp/gate_up": "BF16",
        "text/layers/1/mlp/down": Q6,
        "text/layers/2/mlp/down": "BF16",
    }


def test_the_format_most_layers_have_is_the_roles(recipe_file: Callable[..., RecipeFile]) -> None:
    recipe = resolved(recipe_file({"text/layers/0-2/mlp/down": "W8"}))
    assert dict(recipe.formats)["text/layers/*/mlp/down"] == W8
    assert dict(recipe.exceptions) == {"text/layers/3/mlp/down": Q5}
    assert resolved(recipe_file({"text/layers/0,1,2,3/mlp/down": "W8"})).exceptions == {}


@pytest.mark.parametrize(
    ("pattern", "matrices"),
    [
        ("**", 23 + 5 + 11),
        ("text/**", 3 + 3 + 9 + 8),
        ("text/layers/*/{attention,gdn}/*", 4 * 3),
        ("text/layers/*/{attention/output,mlp/down}", 1 + 4),
        ("text/layers/3/**", 5),
        ("text/layers/0-3/attention/output", 1),
        ("text/layers/*/gdn/query_?ey", 3),
        ("text/layers/*/**/output", 4),
        ("{mtp,vision}/**", 5 + 11),
        ("text/*_head", 2),
    ],
)
def test_wildcards_match_matrices_only(pattern: str, matrices: int, recipe_file: Callable[..., RecipeFile]) -> None:
    model = geometry()
    recipe = resolved(recipe_file({pattern: "BF16"}, base="w8"))
    chosen = recipe_for(model, "w8")
    changed = sum(
        recipe.format_of(role, layer) == "BF16"
        for role, format in chosen.formats
        if format == W8
        for layer in layers_of(role)
    )
    assert changed == matrices


def layers_of(role: str) -> list[int | None]:
    if not role.startswith(("text/layers", "vision/layers")):
        return [None]
    if role.startswith("vision"):
        return [0, 1]
    return [3] if "/attention/" in role else [0, 1, 2] if "/gdn/" in role else [0, 1, 2, 3]


def test_fused_naming_and_nvfp4_get_their_divisors(recipe_file: Callable[..., RecipeFile]) -> None:
    model = published_geometry("qwen3.6-27b/groupwise-int")
    rules = {"text/layers/*/gdn/query_key_value_z": "NVFP4", "text/layers/3,7/attention/output": "NVFP4"}
    recipe = resolved(recipe_file(rules, fused=True), model)
    roles = recipe.roles
    at = roles.index("text/layers/*/gdn/query_key_value_z")
    assert roles[at + 1] == "text/layers/*/gdn/input_projection/input_scale_divisor"
    assert "text/layers/*/attention/output_projection/input_scale_divisor" in roles
    assert recipe.format_of("text/layers/*/attention/query_key_gate_value") == W8
    whole = resolved(recipe_file({"text/layers/*/mlp/down": "W8"}, base="nvfp4"), model)
    assert whole.format_of("text/layers/*/gdn/output") == "NVFP4"
    assert whole.format_of("text/layers/*/mlp/down") == W8
    assert "text/layers/*/mlp/down_projection/input_scale_divisor" not in whole.roles


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "members", "words"),
    [
        ({"text/layers/*/mlp/dwn": "Q6"}, {}, ["matches nothing", "did you mean 'text/layers/*/mlp/down'"]),
        ({"text/layers/2/mlp/dwn": "Q6"}, {}, ["matches nothing", "did you mean 'text/layers/*/mlp/down'"]),
        ({"text/layers/9/mlp/down": "Q6"}, {}, ["matches nothing on these layers"]),
        ({"text/layers/2,9/mlp/down": "Q6"}, {}, ["layer 9 does not exist", "the last one is 3"]),
        ({"text/layers/0-9/mlp/down": "Q6"}, {}, ["layer 9 does not exist"]),
        ({"text/layers/0,3/attention/output": "Q6"}, {}, ["nothing on layer 0 matches"]),
        ({"text/layers/*/moe/routed_down": "Q6"}, {}, ["this model has no 'text/layers/*/moe/routed_down'"]),
        ({"dflash/**": "Q6"}, {}, ["this model has no 'dflash/feature_projection'"]),
        ({"text/layers/*/attention/query_key_gate_value": "W8"}, {}, ["needs fused = true"]),
        ({"text/layers/*/attention/query_key": "W8"}, {"fused": True}, ["needs fused = false"]),
        ({"text/final_norm": "W8"}, {}, ["names no matrix", "always BF16"]),
        ({"text/layers/*/*_norm": "W8"}, {}, ["names no matrix", "'text/layers/*/input_norm' is always BF16"]),
        ({"text/draft_head_token_ids": "W8"}, {}, ["always I32"]),
        ({"text/output_head": "NVFP4"}, {}, ["'text/output_head' can be BF16, Q4G64_F16S"]),
        ({"mtp/layer/mlp/down": "FP32"}, {}, ["can be BF16"]),
        ({"text/layers/*/mlp/down": "NVFP4"}, {}, ["[72, 136] needs rows % 128 = 0"]),
    ],
)
def test_a_rule_that_cannot_be_is_named(
    rules: dict[str, str], members: dict[str, Any], words: list[str], recipe_file: Callable[..., RecipeFile]
) -> None:
    found = problem(recipe_file(rules, **members))
    assert next(iter(rules)) in found
    assert all(word in found for word in words), found


def test_every_wrong_rule_is_reported_at_once(recipe_file: Callable[..., RecipeFile]) -> None:
    file = recipe_file({"text/nothing": "Q4", "text/layers/*/mlp/down": "Q5", "text/final_norm": "Q6"})
    assert len(resolve(file, geometry())[1]) == 2


def test_a_mixture_of_experts_is_always_fused(recipe_file: Callable[..., RecipeFile]) -> None:
    rules = {"text/layers/*/moe/routed_down": "Q6"}
    assert "always stored fused" in problem(recipe_file(rules, fused=False), geometry(moe=True))
    assert resolved(recipe_file(rules), geometry(moe=True)).format_of("text/layers/*/moe/routed_down") == Q6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["name is missing", "no table [formats]"]),
        ("name = 3\n[formats]\na = 'Q4'", ["name is 3"]),
        ("name = 'a/b'\n[formats]\na = 'Q4'", ["name is 'a/b'"]),
        ("name = 'w8'\n[formats]\na = 'Q4'", ["built-in recipe"]),
        ("name = 'x'\nbase = 'groupwise'\n[formats]\na = 'Q4'", ["did you mean 'groupwise-int'"]),
        ("name = 'x'\nfused = 'yes'\n[formats]\na = 'Q4'", ["fused is not true or false"]),
        ("name = 'x'\nformat = 1\n[formats]\na = 'Q4'", ["unknown member 'format'", "did you mean 'formats'"]),
        ("name = 'x'\n[formats]\na = 'Q7'", ["unknown format 'Q7'", "Q4G64_F16S (Q4)", "NVFP4"]),
        ("name = 'x'\n[formats]\na = 'Q4G64'", ["unknown format 'Q4G64'", "did you mean 'Q4G64_F16S'"]),
        ("name = 'x'\n[formats]\na = 4", ["unknown format 4"]),
        ("name = 'x'\n[formats]\n'a//b' = 'Q4'", ["empty part"]),
        ("name = 'x'\n[formats]\n'a/{b' = 'Q4'", ["not closed"]),
        ("name = 'x'\n[formats]\n'a/}b{' = 'Q4'", ["braces"]),
        ("name = 'x'\n[formats]\n'text/layers/3-1/x' = 'Q4'", ["backwards"]),
        ("name = 'x'\n[formats]\n'model.layers' = 'Q4'", ["not a pattern"]),
        ("name = 'x'\n[formats]\na = 'Q4'\na = 'Q5'", ["is not TOML"]),
        ("name = ", ["is not TOML"]),
    ],
)
def test_wrong_files_are_refused_with_every_reason(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read_recipe_file(path)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_option_values_are_names_or_files(tmp_path: Path) -> None:
    assert recipe_option(None) is None
    assert recipe_option("w8") == "w8"
    for absent in ("mixed.toml", str(tmp_path / "mixed")):
        with pytest.raises(UsageError, match="no such file"):
            recipe_option(absent)
    with pytest.raises(NinferError, match="cannot be read"):
        recipe_option(str(tmp_path))


# --- the artifact -----------------------------------------------------------------------------------------------------


def test_recipe_is_stored_in_the_config_and_names_the_weights(
    dense: TinyCheckpoint, recipe_file: Callable[..., RecipeFile], tmp_path: Path
) -> None:
    file = recipe_file({"text/layers/*/mlp/down": "Q6", "text/layers/1/**": "W8"}, description="a test")
    plan = make_plan(BuildOptions(dense.folder, tmp_path / "mix.ninfer", recipe=file))
    assert plan.problems == ()
    out = build(plan).path
    assert verify(out, level="numeric").ok
    with Artifact.open(out) as artifact:
        assert artifact.identity == Identity("tiny-dense", "mix")
        stored = json.loads(bytes(artifact.payload(CONFIG_RESOURCE)))["recipe"]
        recipe = config_of(artifact).recipe
        assert recipe == plan.require().config.recipe
        assert stored == dict(recipe.formats) | dict(recipe.exceptions)
        assert stored["text/layers/1/mlp/down"] == W8
        for layer in range(4):
            name = f"text/layers/{layer}/mlp/down"
            entry = artifact.objects[name]
            assert isinstance(entry, TensorEntry)
            assert entry.format == (W8 if layer == 1 else Q6)
            source = widen_bf16(dense.tensors[f"model.language_model.layers.{layer}.mlp.down_proj.weight"])
            expected = encode_tensor(source.astype(np.float32), entry.format, entry.layout)
            assert bytes(artifact.payload(name)) == expected
    report = json.loads((tmp_path / "mix.ninfer.conversion.json").read_text())["recipe"]
    assert (report["name"], report["exceptions"]) == ("mix", dict(recipe.exceptions))
    assert report["file"] == {
        "sha256": file.sha256,
        "base": "groupwise-int",
        "description": "a test",
        "rules": {"text/layers/*/mlp/down": Q6, "text/layers/1/**": W8},
    }
    assert file.sha256 == hashlib.sha256((tmp_path / "mixed.toml").read_bytes()).hexdigest()


@pytest.mark.parametrize("method", ["max", "mse"])
def test_nvfp4_in_a_mixed_recipe_has_the_words_of_the_built_in_one(
    method: str, recipe_file: Callable[..., RecipeFile], tmp_path: Path
) -> None:
    source = ROOT / "examples" / "tiny" / "dense"
    file = recipe_file({"text/layers/*/mlp/*": "NVFP4", "text/layers/2/mlp/down": "Q6"}, base="w8", fused=True)
    for name, recipe in (("mixed", file), ("pure", "nvfp4")):
        plan = make_plan(BuildOptions(source, tmp_path / f"{name}.ninfer", recipe=recipe, method=method))
        assert plan.problems == ()
        build(plan)
    with Artifact.open(tmp_path / "mixed.ninfer") as mixed, Artifact.open(tmp_path / "pure.ninfer") as pure:
        packed = [e.name for e in mixed.objects if isinstance(e, TensorEntry) and e.format == "NVFP4"]
        assert len(packed) == 7
        scalars = [site_of(name) or "" for name in packed]
        assert all(name.endswith("/input_scale_divisor") for name in scalars)
        for name in (*packed, *scalars):
            assert bytes(mixed.payload(name)) == bytes(pure.payload(name)), name
        assert "text/layers/2/mlp/down_projection/input_scale_divisor" not in mixed.objects.names()
    assert verify(tmp_path / "mixed.ninfer", level="numeric").ok


def test_problems_of_a_recipe_are_problems_of_the_plan(
    dense: TinyCheckpoint, recipe_file: Callable[..., RecipeFile], plan_of: PlanOf
) -> None:
    plan = plan_of(dense, recipe=recipe_file({"text/layers/*/mlp/dwn": "Q6"}))
    (found,) = plan.problems
    assert (found.code, found.where) == ("bad-recipe", "--recipe")
    assert "did you mean" in found.message
    refused = plan_of(dense, recipe=recipe_file({"text/output_head": "W8"}), identity=Identity("tiny", "other"))
    assert [p.code for p in refused.problems] == ["identity-refused"]


def test_w8_stores_every_matrix_near_losslessly(tiny: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    result = build(plan_of(tiny, recipe="w8", out=tmp_path / "w8.ninfer"))
    with Artifact.open(result.path) as artifact:
        formats = {entry.format for entry in artifact.objects if isinstance(entry, TensorEntry) and entry.shape[1:]}
        kept = {e.name for e in artifact.objects if isinstance(e, TensorEntry) and e.format == "BF16" and e.shape[1:]}
    assert formats == {W8, "BF16"}
    assert all(any(part in name for part in ("convolution", "projection", "router", "position")) for name in kept)
    errors = [record.error["relative"] for record in result.finished.values() if record.error]
    assert len(errors) > 20
    assert max(errors) < 0.006


@pytest.mark.parametrize(
    ("example", "kind"), [("dense-quality", "dense"), ("dense-nvfp4", "dense"), ("moe-quality", "moe")]
)
def test_example_recipes_convert_the_tiny_models(example: str, kind: str, tmp_path: Path) -> None:
    file = read_recipe_file(ROOT / "examples" / "recipes" / f"{example}.toml")
    plan = make_plan(BuildOptions(ROOT / "examples" / "tiny" / kind, tmp_path / "x.ninfer", recipe=file))
    assert plan.problems == ()
    build(plan)
    assert verify(tmp_path / "x.ninfer").ok


@pytest.mark.parametrize(
    ("example", "identity"),
    [
        ("dense-quality", "qwen3.6-27b/groupwise-int"),
        ("dense-nvfp4", "qwen3.6-27b/nvfp4"),
        ("moe-quality", "qwen3.6-35b-a3b/groupwise-int"),
    ],
)
def test_example_recipes_fit_the_published_geometries(example: str, identity: str) -> None:
    resolved(read_recipe_file(ROOT / "examples" / "recipes" / f"{example}.toml"), published_geometry(identity))
