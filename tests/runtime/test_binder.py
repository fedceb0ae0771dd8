"""Binding: every part of every recipe has a name, and what does not fit is refused with what was found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ninfer_format import (
    Artifact,
    ArtifactError,
    ArtifactWriter,
    Identity,
    Inventory,
    InventoryError,
    ModelConfig,
    TensorEntry,
    UnsupportedError,
    plan_inventory,
    published_config,
)
from ninfer_format.published import PUBLISHED
from ninfer_format.recipes import recipe_for
from ninfer_format.roles import row_views
from ninfer_runtime.models import binder
from ninfer_runtime.models.binder import BoundModel, bind
from ninfer_runtime.models.moe import MoeWeights
from ninfer_runtime.models.qwen3_5 import AttentionWeights, GdnWeights, MlpWeights
from ninfer_runtime.models.spec import model_spec
from ninfer_runtime.models.views import View
from ninfer_runtime.models.vocabulary import addressable_ids
from tests.runtime.conftest import ArtifactOf

TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 5}]}
TOKENIZER_CONFIG: dict[str, Any] = {"added_tokens_decoder": {"7": {}}}


@dataclass
class FakeArtifact:
    """A directory without payloads: all that binding reads of weights."""

    inventory: Inventory
    config_json: bytes
    path: Path = Path("fake.ninfer")

    @property
    def identity(self) -> Identity:
        return self.inventory.identity

    @property
    def directory(self) -> Any:
        return self.inventory.directory

    @property
    def objects(self) -> Any:
        from ninfer_format.reader import Objects

        return Objects(self.inventory.objects)

    def payload(self, name: str) -> memoryview:
        return memoryview(self.config_json)


def bind_inventory(monkeypatch: pytest.MonkeyPatch, inventory: Inventory, config: ModelConfig) -> BoundModel:
    monkeypatch.setattr(binder, "addressable_ids", lambda artifact, rows: rows - 1)
    return bind(cast(Artifact, FakeArtifact(inventory, config.to_json())))


def views_of(weights: Any) -> dict[str, View]:
    out: dict[str, View] = {}
    for name in type(weights).__slots__:
        value = getattr(weights, name)
        out |= {name: value} if isinstance(value, View) else {f"{name}.{k}": v for k, v in views_of(value).items()}
    return out


def check_views(model: BoundModel) -> None:
    """Every view has the rows its meaning needs, and all views together cover all rows of all text objects."""
    t = model.spec.text
    q, kv = t.n_heads * t.head_dim, t.n_kv_heads * t.head_dim
    key, value = t.gdn_key_heads * t.gdn_key_dim, t.gdn_value_heads * t.gdn_value_dim
    attention = {
        "query": q,
        "key": kv,
        "gate": q,
        "value": kv,
        "query_norm": t.head_dim,
        "key_norm": t.head_dim,
        "output": t.hidden,
    }
    gdn = {"query": key, "key": key, "value": value, "z": value, "a": t.gdn_value_heads, "b": t.gdn_value_heads}
    gdn |= {
        "a_log": t.gdn_value_heads,
        "dt_bias": t.gdn_value_heads,
        "convolution": t.conv_taps,
        "norm": t.gdn_value_dim,
    }
    gdn |= {"output": t.hidden}
    mlp = {"gate": t.mlp_width, "up": t.mlp_width, "down": t.hidden}
    moe = {"router": t.n_experts, "shared_gate": 1, "routed_gate_up": 2 * t.n_experts * t.expert_width}
    moe |= {"routed_down": t.n_experts * t.hidden, "shared.gate": t.shared_width, "shared.up": t.shared_width}
    moe |= {"shared.down": t.hidden}
    sizes = {AttentionWeights: attention, GdnWeights: gdn, MlpWeights: mlp, MoeWeights: moe}
    covered: dict[str, int] = {}
    for layer in (*model.layers, *((model.mtp.layer,) if model.mtp else ())):
        for part in (layer.mixer, layer.ffn):
            views = views_of(part)
            assert {name: view.n_rows for name, view in views.items()} == sizes[type(part)]
            for view in views.values():
                covered[view.name] = covered.get(view.name, 0) + view.n_rows
    for name, n_rows in covered.items():
        entry = model.artifact.objects[name]
        assert isinstance(entry, TensorEntry)
        assert entry.shape[0] == n_rows, f"the views of {name} cover {n_rows} of {entry.shape[0]} rows"


@pytest.mark.parametrize("identity", [str(identity) for identity in PUBLISHED])
def test_published_identity_binds_every_row_once(identity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = published_config(identity)
    model = bind_inventory(monkeypatch, plan_inventory(identity), config)
    check_views(model)
    spec = model.spec
    assert [kind for kind in spec.text.layer_kinds if kind == "attention"] == ["attention"] * (spec.text.n_layers // 4)
    assert spec.attention_layers[:2] == (3, 7)
    assert (spec.rotary_dim, spec.rope_theta, spec.norm_eps) == (64, 1e7, 1e-6)
    assert [spec.rope_axes.count(axis) for axis in range(3)] == [11, 11, 10]
    assert model.mtp is not None
    assert isinstance(model.layers[0].ffn, MoeWeights) == ("35b" in identity)


@pytest.mark.parametrize("recipe", ["bf16", "w8", "nvfp4", "groupwise-int"])
def test_every_recipe_of_another_size_binds(model: BoundModel, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(model.config, recipe=recipe_for(model.config.geometry, recipe))
    resources = {"model/config.json": len(config.to_json())}
    inventory = plan_inventory(config.geometry, config.recipe, resources=resources)
    bound = bind_inventory(monkeypatch, inventory, config)
    check_views(bound)
    assert any(row_views(config.geometry, role) for role in config.recipe.roles)


def _set(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return dict(config) | {head: _set(config[head], rest, value) if rest else value}


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("rms_norm_eps", 0, "rms_norm_eps is 0, expected a number above 0"),
        ("rms_norm_eps", True, "rms_norm_eps is True"),
        ("hidden_act", "gelu", "hidden_act is 'gelu', expected 'silu'"),
        ("mamba_ssm_dtype", "bfloat16", "mamba_ssm_dtype is 'bfloat16'"),
        ("rope_parameters", [], "rope_theta is None"),
        ("rope_parameters", 3, "rope_parameters is 3, expected an object"),
        ("rope_parameters.rope_type", "yarn", "rope_parameters.rope_type is 'yarn', expected 'default'"),
        ("rope_parameters.rope_theta", -1, "rope_theta is -1"),
        ("rope_parameters.partial_rotary_factor", 1.5, "partial_rotary_factor is 1.5"),
        ("rope_parameters.partial_rotary_factor", 1 / 256, "rotates 1 of 256 dims"),
        ("rope_parameters.mrope_section", [11, 11], "mrope_section is"),
        ("rope_parameters.mrope_section", [10, 11, 10], "adds up to 31, expected 32 pairs"),
        ("rope_parameters.mrope_interleaved", False, "mrope_interleaved is False"),
        ("max_position_embeddings", "long", "max_position_embeddings is 'long'"),
        ("norm_topk_prob", False, "norm_topk_prob is False"),
    ],
)
def test_hyperparameter_of_another_model_is_refused_by_name(
    dense: BoundModel, path: str, value: Any, message: str
) -> None:
    text_config = _set(dense.config.text_config, path, value)
    with pytest.raises(UnsupportedError) as refused:
        model_spec("qwen3_5", dense.spec.text, text_config, 10)
    assert message in str(refused.value)
    assert model_spec("qwen3_5", dense.spec.text, dense.config.text_config, 10).n_addressable == 10


@pytest.mark.parametrize(
    "section, height, width",
    [
        ([11, 11, 10], range(1, 32, 3), range(2, 30, 3)),
        ([20, 8, 4], range(1, 24, 3), range(2, 12, 3)),
        ([32, 0, 0], (), ()),
    ],
)
def test_sections_interleave_until_they_are_used_up(dense: BoundModel, section: Any, height: Any, width: Any) -> None:
    text_config = _set(dense.config.text_config, "rope_parameters.mrope_section", section)
    axes = model_spec("qwen3_5", dense.spec.text, text_config, 10).rope_axes
    assert [i for i in range(32) if axes[i] == 1] == list(height)
    assert [i for i in range(32) if axes[i] == 2] == list(width)


def test_all_wrong_hyperparameters_are_listed_at_once(dense: BoundModel) -> None:
    text_config = dict(dense.config.text_config) | {"hidden_act": "relu", "rms_norm_eps": 2}
    with pytest.raises(UnsupportedError, match=r"hidden_act .*; rms_norm_eps"):
        model_spec("qwen3_5", dense.spec.text, text_config, 10)


def test_artifact_with_other_objects_is_refused_by_name(artifact_of: ArtifactOf, tmp_path: Path) -> None:
    path = tmp_path / "other.ninfer"
    with Artifact.open(artifact_of("dense", "bf16")) as artifact:
        gone = "text/layers/1/gdn/norm"
        objects = tuple(entry for entry in artifact.objects if entry.name != gone)
        with ArtifactWriter(path, replace(artifact.directory, objects=objects)) as writer:
            for entry in objects:
                writer.write(entry.name, artifact.payload(entry.name))
            writer.commit()
    with Artifact.open(path) as other, pytest.raises(InventoryError, match=f"object '{gone}' is missing"):
        bind(other)


def _tokenizer_artifact(tokenizer: Any, config: Any) -> Artifact:
    payloads = {"frontend/tokenizer.json": tokenizer, "frontend/tokenizer_config.json": config}
    texts = {
        name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in payloads.items()
    }
    texts = {name: text for name, text in texts.items() if text}
    objects = SimpleNamespace(names=lambda: tuple(texts))
    return cast(Artifact, SimpleNamespace(path="x.ninfer", objects=objects, payload=lambda name: texts[name]))


def test_addressable_ids_count_both_tokenizer_files() -> None:
    assert addressable_ids(_tokenizer_artifact(TOKENIZER, TOKENIZER_CONFIG), 8) == 8
    assert addressable_ids(_tokenizer_artifact(TOKENIZER, {}), 8) == 6
    assert addressable_ids(_tokenizer_artifact({"model": {"vocab": {"a": 0}}}, {}), 8) == 1


@pytest.mark.parametrize(
    "tokenizer, config, message",
    [
        (b"", TOKENIZER_CONFIG, "no resource 'frontend/tokenizer.json'"),
        (b"{", TOKENIZER_CONFIG, "is not JSON"),
        ([], TOKENIZER_CONFIG, "holds list, expected an object"),
        ({"model": {}}, TOKENIZER_CONFIG, "has no readable vocabulary"),
        ({"model": {"vocab": {}}}, {}, "has no readable vocabulary"),
        (TOKENIZER, {"added_tokens_decoder": {"x": {}}}, "has no readable vocabulary"),
        (TOKENIZER, {"added_tokens_decoder": {"8": {}}}, "ids up to 8, the head has 8 rows"),
    ],
)
def test_unreadable_or_too_large_vocabulary_is_refused(tokenizer: Any, config: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        addressable_ids(_tokenizer_artifact(tokenizer, config), 8)
