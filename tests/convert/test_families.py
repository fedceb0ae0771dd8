"""Where rows come from: golden row maps, and every object of small models against an independent fusion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_convert.families.qwen3_5 import SourceMap, object_sources, spelling, tensor_source
from ninfer_convert.plan import ConversionPlan
from ninfer_format import TensorEntry, plan_inventory, published_config
from tests.convert.tiny import TinyCheckpoint, tiny_checkpoint, tiny_dflash, unfuse_experts

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "row_maps.json").read_text())["maps"]
PlanOf = Callable[..., ConversionPlan]
Words = NDArray[Any]


def expanded(runs: list[list[Any]]) -> list[list[Any]]:
    """Golden runs with neighbours joined: [stored begin, stored end, tensor, source begin]."""
    joined: list[list[Any]] = []
    for begin, end, tensor, source in runs:
        last = joined[-1] if joined else None
        if last is not None and last[2] == tensor and last[3] + last[1] - last[0] == source:
            last[1] = end
        else:
            joined.append([begin, end, tensor, source])
    return joined


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{c['identity'][:12]}:{c['object']}" for c in GOLDEN])
def test_golden_row_map(case: dict[str, Any]) -> None:
    for identity in case["identity"].split(" and "):
        inventory, config = plan_inventory(identity), published_config(identity)
        entry = next(e for e in inventory.tensors if e.name == case["object"])
        role, layer = inventory.roles[entry.name]
        source = tensor_source(config.geometry, spelling((), tied=False), (), entry, role, layer, SourceMap())
        suffix = "" if identity != "qwen3.6-27b/nvfp4" else ".weight"
        row, runs = 0, []
        for run in source.runs:
            runs.append([row, row + run.count, run.tensor.removesuffix(suffix), run.begin])
            row += run.count
        assert runs == expanded(case["runs"])
        assert row == entry.shape[0]


@pytest.mark.parametrize(
    ("identity", "n_base", "n_dflash"),
    [("qwen3.6-27b/groupwise-int", 1199, 0), ("qwen3.8-27b/groupwise-int", 1199, 0),
     ("qwen3.6-35b-a3b/groupwise-int", 1045, 69)],
)  # fmt: skip
def test_published_models_use_as_many_tensors_as_their_checkpoints_hold(
    identity: str, n_base: int, n_dflash: int
) -> None:
    found = object_sources(published_config(identity), plan_inventory(identity), (), spelling((), tied=False))
    assert (len(found.shapes["base"]), len(found.shapes["dflash"])) == (n_base, n_dflash)


def fused_words(plan: ConversionPlan) -> dict[str, Words]:
    """Every tensor object as the fused BF16 words that the plan's runs give, shaped like the stored object."""
    target = plan.require()
    words = {}
    for entry, source in zip(target.inventory.objects, target.sources, strict=True):
        if not isinstance(entry, TensorEntry) or not source.runs:
            continue
        checkpoint = plan.checkpoint_of(source)
        rows = [checkpoint.read_words(r.tensor, r.begin, r.count, row_width=source.row_width) for r in source.runs]
        matrix = np.concatenate(rows)
        assert len(matrix) == source.n_rows
        if source.transform == "conv_transpose":
            matrix = matrix.T
        if source.transform == "draft_rows":
            assert target.draft_ids is not None
            matrix = matrix[target.draft_ids]
        words[entry.name] = matrix.reshape(entry.shape)
    return words


def expected_layer(
    tensors: dict[str, Words], prefix: str, text: dict[str, Any], *, attention: bool
) -> dict[str, Words]:
    """Fusions of one decoder layer, written from the conversion rules without the code under test."""
    t = {name.removeprefix(prefix): words for name, words in tensors.items() if name.startswith(prefix)}
    out = {"input_norm": t["input_layernorm.weight"], "post_attention_norm": t["post_attention_layernorm.weight"]}
    if attention:
        heads, dim = text["num_attention_heads"], text["head_dim"]
        per_head = t["self_attn.q_proj.weight"].reshape(heads, 2, dim, -1)
        query, gate = (per_head[:, i].reshape(heads * dim, -1) for i in (0, 1))
        key, value = t["self_attn.k_proj.weight"], t["self_attn.v_proj.weight"]
        out |= {
            "attention/query_key": np.concatenate([query, key]),
            "attention/gate_value": np.concatenate([gate, value]),
            "attention/query_key_gate_value": np.concatenate([query, key, gate, value]),
            "attention/query_norm": t["self_attn.q_norm.weight"],
            "attention/key_norm": t["self_attn.k_norm.weight"],
            "attention/output": t["self_attn.o_proj.weight"],
        }
    else:
        qkv, z = t["linear_attn.in_proj_qkv.weight"], t["linear_attn.in_proj_z.weight"]
        a, b = t["linear_attn.in_proj_a.weight"], t["linear_attn.in_proj_b.weight"]
        cut = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"]
        out |= {
            "gdn/a_log": t["linear_attn.A_log"],
            "gdn/dt_bias": t["linear_attn.dt_bias"],
            "gdn/convolution": t["linear_attn.conv1d.weight"][:, 0].T,
            "gdn/a_projection": a,
            "gdn/b_projection": b,
            "gdn/a_b_projection": np.concatenate([a, b]),
            "gdn/query_key": qkv[:cut],
            "gdn/value_z": np.concatenate([qkv[cut:], z]),
            "gdn/query_key_value_z": np.concatenate([qkv, z]),
            "gdn/norm": t["linear_attn.norm.weight"],
            "gdn/output": t["linear_attn.out_proj.weight"],
        }
    if "mlp.down_proj.weight" in t:
        out["mlp/gate_up"] = np.concatenate([t["mlp.gate_proj.weight"], t["mlp.up_proj.weight"]])
        out["mlp/down"] = t["mlp.down_proj.weight"]
    else:
        shared = [t[f"mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")]
        gate_up, down = t["mlp.experts.gate_up_proj"], t["mlp.experts.down_proj"]
        out |= {
            "moe/router_shared_gate": np.concatenate([t["mlp.gate.weight"], t["mlp.shared_expert_gate.weight"]]),
            "moe/routed_gate_up": gate_up.reshape(-1, gate_up.shape[-1]),
            "moe/routed_down": down.reshape(-1, down.shape[-1]),
            "moe/shared_gate_up": np.concatenate(shared[:2]),
            "moe/shared_down": shared[2],
        }
    return out


def test_every_decoder_object_holds_the_rows_that_the_rules_say(tiny: TinyCheckpoint, plan_of: PlanOf) -> None:
    plan, text = plan_of(tiny), tiny.config["text_config"]
    words, checked = fused_words(plan), 0
    layers = {f"text/layers/{i}/": (f"model.language_model.layers.{i}.", i == 3) for i in range(4)}
    for stored, (prefix, attention) in (layers | {"mtp/layer/": ("mtp.layers.0.", True)}).items():
        expected = expected_layer(tiny.tensors, prefix, text, attention=attention)
        for name in [n for n in words if n.startswith(stored)]:
            np.testing.assert_array_equal(words[name], expected[name.removeprefix(stored)], err_msg=name)
            checked += 1
    assert checked == sum(name.startswith(("text/layers/", "mtp/layer/")) for name in plan.require().inventory.roles)


def test_objects_outside_the_layers_are_whole_tensors(tiny: TinyCheckpoint, plan_of: PlanOf) -> None:
    words = fused_words(plan_of(tiny))
    names = {
        "text/token_embedding": "model.language_model.embed_tokens.weight",
        "text/final_norm": "model.language_model.norm.weight",
        "text/output_head": "lm_head.weight",
        "mtp/input_projection": "mtp.fc.weight",
        "mtp/embedding_norm": "mtp.pre_fc_norm_embedding.weight",
        "mtp/hidden_norm": "mtp.pre_fc_norm_hidden.weight",
        "mtp/final_norm": "mtp.norm.weight",
        "vision/patch_embedding": "model.visual.patch_embed.proj.weight",
        "vision/position_embedding": "model.visual.pos_embed.weight",
        "vision/layers/1/attention/qkv": "model.visual.blocks.1.attn.qkv.weight",
        "vision/layers/1/attention/output_bias": "model.visual.blocks.1.attn.proj.bias",
        "vision/layers/0/mlp/fc2": "model.visual.blocks.0.mlp.linear_fc2.weight",
        "vision/layers/0/norm2/bias": "model.visual.blocks.0.norm2.bias",
        "vision/merger/fc1": "model.visual.merger.linear_fc1.weight",
        "vision/merger/fc2_bias": "model.visual.merger.linear_fc2.bias",
        "vision/merger/norm/weight": "model.visual.merger.norm.weight",
    }
    for name, tensor in names.items():
        np.testing.assert_array_equal(words[name].ravel(), tiny.tensors[tensor].ravel(), err_msg=name)


def test_dflash_objects_come_from_the_companion(moe: TinyCheckpoint, tmp_path: Path, plan_of: PlanOf) -> None:
    plan = plan_of(moe, dflash=tiny_dflash(tmp_path / "dflash"))
    words = fused_words(plan)
    assert plan.dflash is not None
    read = plan.dflash.read_words
    qkv = [read(f"layers.1.self_attn.{name}_proj.weight") for name in "qkv"]
    np.testing.assert_array_equal(words["dflash/layers/1/attention/query_key_value"], np.concatenate(qkv))
    np.testing.assert_array_equal(words["dflash/feature_projection"], read("fc.weight"))
    planned = plan.require().inventory.roles
    assert [n for n in words if n.startswith("dflash/")] == [n for n in planned if n.startswith("dflash/")]


@pytest.mark.parametrize("only", ["", "gate_up_proj", "down_proj", "mtp.", "layers.1."])
def test_expert_banks_give_the_same_rows_in_every_layout(tmp_path: Path, plan_of: PlanOf, only: str) -> None:
    fused = tiny_checkpoint(tmp_path / "same-name", moe=True)
    expected = fused_words(plan_of(fused))
    unfuse_experts(fused.tensors, only=only)
    other = TinyCheckpoint(tmp_path / "b" / "same-name", fused.config, fused.tensors, fused.frontend).save()
    plan = plan_of(other)
    found = fused_words(plan)
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        np.testing.assert_array_equal(found[name], words, err_msg=name)
    assert plan.require().inventory.directory_json == plan_of(fused.folder).require().inventory.directory_json


@pytest.mark.parametrize(
    ("renames", "config"),
    [
        ((("model.language_model.", "model."),), "flat"),
        ((("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
          ("model.visual.", "visual.")), "nested"),
    ],
    ids=["text-only", "re-saved"],
)  # fmt: skip
def test_other_spellings_of_the_prefixes_are_understood(
    dense: TinyCheckpoint, plan_of: PlanOf, renames: tuple[tuple[str, str], ...], config: str
) -> None:
    expected = fused_words(plan_of(dense, no_vision=config == "flat"))
    for old, new in renames:
        dense.tensors = {n.replace(old, new, 1) if n.startswith(old) else n: w for n, w in dense.tensors.items()}
    if config == "flat":
        dense.tensors = {n: w for n, w in dense.tensors.items() if not n.startswith("model.visual.")}
        dense.config = dense.config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
    found = fused_words(plan_of(dense.save()))
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        np.testing.assert_array_equal(found[name], words, err_msg=name)


def test_runs_that_continue_each_other_are_joined(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    source = next(s for s in plan_of(dense).require().sources if s.name == "text/layers/0/gdn/query_key")
    assert len(source.runs) == 1
