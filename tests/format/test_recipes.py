"""Recipes: the built-in four, the published deviations, and what a stored recipe may not say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ninfer_format.errors import InventoryError
from ninfer_format.formats import check_signature, layout_for
from ninfer_format.inventory import plan_inventory
from ninfer_format.recipes import (
    Q4,
    Q5,
    Q6,
    RECIPE_NAMES,
    W8,
    Recipe,
    check_recipe,
    published_geometry,
    published_recipe,
    recipe_for,
)
from ninfer_format.roles import ROLES, role_named, role_of, role_shape
from tests.format.geometries import tiny_config

DENSE, NVFP4, MOE = "qwen3.6-27b/groupwise-int", "qwen3.6-27b/nvfp4", "qwen3.6-35b-a3b/groupwise-int"


@pytest.mark.parametrize("model", [DENSE, MOE])
def test_recipes_without_nvfp4_keep_names_and_order_of_groupwise_int(model: str) -> None:
    geometry = published_geometry(model)
    names = [e.name for e in plan_inventory(geometry, recipe_for(geometry, "groupwise-int")).objects]
    for recipe in ("bf16", "w8"):
        assert [e.name for e in plan_inventory(geometry, recipe_for(geometry, recipe)).objects] == names


@pytest.mark.parametrize("model", [DENSE, MOE])
@pytest.mark.parametrize(("recipe", "format"), [("bf16", "BF16"), ("w8", W8)])
def test_one_format_recipes_give_every_quantized_matrix_that_format(model: str, recipe: str, format: str) -> None:
    geometry = published_geometry(model)
    groupwise = dict(recipe_for(geometry, "groupwise-int").formats)
    for role, stored in recipe_for(geometry, recipe).formats:
        assert stored == (format if ROLES[role].is_matrix else groupwise[role])


def test_custom_groupwise_int_of_the_dense_model_is_the_published_one() -> None:
    assert recipe_for(published_geometry(DENSE), "groupwise-int") == published_recipe(DENSE)


def test_custom_groupwise_int_of_the_moe_has_all_routed_down_q5() -> None:
    custom, exact = recipe_for(published_geometry(MOE), "groupwise-int"), published_recipe(MOE)
    assert custom.formats == exact.formats
    assert not custom.exceptions
    assert dict(exact.exceptions) == {f"text/layers/{n}/moe/routed_down": Q6 for n in (34, 38, 39)}


def test_qwen3_8_stores_embedding_and_head_as_w8() -> None:
    before, after = dict(published_recipe(DENSE).formats), dict(published_recipe("qwen3.8-27b/groupwise-int").formats)
    changed = {role: (before[role], after[role]) for role in before if before[role] != after[role]}
    assert changed == {"text/token_embedding": (Q6, W8), "text/output_head": (Q6, W8)}


def test_published_nvfp4_formats_per_layer() -> None:
    recipe = published_recipe(NVFP4)
    inputs = "text/layers/*/attention/query_key_gate_value"
    assert {n: recipe.format_of(inputs, n) for n in range(3, 64, 4)} == {
        n: "BF16" if n <= 23 else "NVFP4" for n in range(3, 64, 4)
    }
    assert recipe.format_of("text/layers/*/gdn/output", 4) == "BF16"
    assert recipe.format_of("text/layers/*/gdn/output", 5) == "NVFP4"
    with pytest.raises(InventoryError, match="has no role"):
        recipe.format_of("text/layers/*/attention/query_key", 3)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_nvfp4_falls_back_to_w8_exactly_where_the_shape_does_not_fit(model: str) -> None:
    config = tiny_config(model)
    narrow = replace(config.geometry, text=replace(config.geometry.text, hidden=160), vision=None)
    recipe = recipe_for(narrow, "nvfp4")
    formats: Counter[str] = Counter()
    for role, format in recipe.formats:
        if "NVFP4" in ROLES[role].formats:
            rows, columns = role_shape(narrow, role)
            assert format == ("NVFP4" if rows % 128 == 0 and columns % 64 == 0 else W8), role
            formats[format] += 1
    assert formats[W8]  # hidden 160 is no multiple of 64
    inventory = plan_inventory(narrow, recipe)
    for entry in inventory.tensors:
        check_signature(entry.format, layout_for(entry.format), entry.shape)


def test_nvfp4_of_the_moe_keeps_its_names_and_adds_only_divisors() -> None:
    geometry = published_geometry(MOE)
    recipe = recipe_for(geometry, "nvfp4")
    plain = [role for role in recipe.roles if ROLES[role].divisor_of is None]
    assert plain == list(recipe_for(geometry, "groupwise-int").roles)
    assert recipe.format_of("text/layers/*/moe/routed_down", 0) == "NVFP4"
    assert recipe.format_of("mtp/layer/moe/routed_down") == W8
    assert recipe.format_of("text/draft_head") == Q4


def test_unknown_recipe_name_lists_the_known_ones() -> None:
    with pytest.raises(InventoryError, match=", ".join(RECIPE_NAMES)):
        recipe_for(published_geometry(DENSE), "int4")


@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_built_in_recipe_passes_its_own_check(model: str, name: str) -> None:
    config = tiny_config(model, name)
    assert check_recipe(config.geometry, config.recipe) == []


def changed(recipe: Recipe, role: str, format: str) -> Recipe:
    return replace(recipe, formats=tuple((dict(recipe.formats) | {role: format}).items()))


BAD_RECIPES = {
    "dropped role": (lambda r: replace(r, formats=r.formats[:-1]), "is the end, expected 'vision/merger/norm/bias'"),
    "role twice": (lambda r: replace(r, formats=(*r.formats, r.formats[-1])), "after its last role"),
    "swapped roles": (lambda r: replace(r, formats=(r.formats[1], r.formats[0], *r.formats[2:])), "role 0"),
    "role of another model": (
        lambda r: replace(r, formats=(*r.formats, ("text/layers/*/moe/routed_down", Q5))),
        "after its last role",
    ),
    "unknown role": (lambda r: replace(r, formats=(*r.formats, ("text/bias", "BF16"))), "is not a role"),
    "unknown format": (lambda r: changed(r, "text/draft_head", "Q3"), "unknown format 'Q3'"),
    "norm quantized": (lambda r: changed(r, "text/final_norm", W8), "stored as W8G32_F16S, expected BF16"),
    "ids as floats": (lambda r: changed(r, "text/draft_head_token_ids", "BF16"), "expected I32"),
    "nvfp4 without divisor": (lambda r: changed(r, "text/layers/*/mlp/down", "NVFP4"), "directly after each matrix"),
    "nvfp4 where none is known": (lambda r: changed(r, "text/draft_head", "NVFP4"), "stored as NVFP4, expected"),
    "exception of a missing layer": (
        lambda r: replace(r, exceptions={"text/layers/4/mlp/down": W8}),
        "names no object",
    ),
    "exception of another mixer": (
        lambda r: replace(r, exceptions={"text/layers/3/gdn/output": W8}),
        "names no object",
    ),
    "exception with a padded number": (
        lambda r: replace(r, exceptions={"text/layers/01/mlp/down": W8}),
        "names no object",
    ),
    "idle exception": (lambda r: replace(r, exceptions={"text/layers/1/mlp/down": Q5}), "repeats the format"),
    "exception for a norm": (lambda r: replace(r, exceptions={"text/layers/1/input_norm": W8}), "expected BF16"),
    "nvfp4 exception without divisor": (
        lambda r: replace(r, exceptions={"text/layers/1/mlp/down": "NVFP4"}),
        "directly after each matrix",
    ),
}


@pytest.mark.parametrize("what", BAD_RECIPES)
def test_recipe_that_lies_is_refused(what: str) -> None:
    change, message = BAD_RECIPES[what]
    config = tiny_config("dense")
    recipe = change(config.recipe)
    assert any(message in problem for problem in check_recipe(config.geometry, recipe)), what
    with pytest.raises(InventoryError, match="does not fit the model"):
        plan_inventory(config.geometry, recipe)


def test_exceptions_are_honoured_next_to_their_neighbours() -> None:
    config = tiny_config("dense")
    recipe = replace(config.recipe, exceptions={"text/layers/2/mlp/down": "BF16"})
    by_name = {e.name: e.format for e in plan_inventory(config.geometry, recipe).tensors}
    assert [by_name[f"text/layers/{n}/mlp/down"] for n in range(4)] == [Q5, Q5, "BF16", Q5]


def test_names_map_to_roles_only_with_plain_layer_numbers() -> None:
    assert role_of("text/layers/12/mlp/down") == ("text/layers/*/mlp/down", 12)
    assert role_of("text/output_head") == ("text/output_head", None)
    for name in ("text/layers/01/mlp/down", "text/layers/-1/mlp/down", "text/layers/١/mlp/down", "text/layers//x"):
        assert role_of(name) == (name, None)
    with pytest.raises(InventoryError, match="not a role"):
        role_named("text/layers/0/mlp/down")
