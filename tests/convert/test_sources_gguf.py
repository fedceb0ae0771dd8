"""GGUF sources: llama.cpp's layout undone, rows decoded as the package does, refusals by name, and answers."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import MODEL_ARCH, MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, ConversionPlan, Problem, make_plan
from ninfer_convert.sources.gguf import TYPES, open_gguf
from ninfer_convert.sources.gguf_names import DRAFT, GATE, LAYER, TOP, UP, Heads
from ninfer_format import Artifact, Identity, TensorEntry, encode_tensor
from ninfer_format.inventory import plan_inventory
from ninfer_format.model_config import published_config
from tests.convert.fp8 import floats
from tests.convert.gguf_files import (
    encode,
    gguf_shapes,
    gguf_tensors,
    matrices_as,
    of_checkpoint,
    plan_gguf,
    wide,
    write_sparse_gguf,
)
from tests.convert.tiny import TinyCheckpoint, shapes_of

TEXT = "model.language_model."
LAYERS = f"{TEXT}layers."


def only(plan: ConversionPlan) -> Problem:
    assert len(plan.problems) == 1, "\n".join(map(str, plan.problems))
    return plan.problems[0]


# Names and layout


@pytest.mark.parametrize("architecture", [MODEL_ARCH.QWEN35, MODEL_ARCH.QWEN35MOE])
def test_every_tensor_of_the_architecture_is_known_under_the_packages_name(architecture: MODEL_ARCH) -> None:
    layer = {re.sub(r"\.(weight|bias)$", "", name) for name in (*LAYER, GATE, UP)}
    top = {name.removesuffix(".weight") for name in TOP}
    theirs = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[architecture]}
    assert {name.removeprefix("blk.{bid}.") for name in theirs if name.startswith("blk")} <= layer
    assert {name for name in theirs if not name.startswith("blk")} == top


def test_draft_layer_has_the_packages_names() -> None:
    draft = (MODEL_TENSOR.NEXTN_EH_PROJ, MODEL_TENSOR.NEXTN_ENORM, MODEL_TENSOR.NEXTN_HNORM)
    names = {TENSOR_NAMES[t] for t in (*draft, MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM)}
    assert {f"blk.{{bid}}.{name.removesuffix('.weight')}" for name in DRAFT} == names


def test_value_heads_are_grouped_again() -> None:
    """Two key heads with three value heads each: k0v0 k1v0 k0v1 k1v1 k0v2 k1v2 becomes k0v0 k0v1 k0v2 k1v0 …"""
    assert Heads(4, 2, 6, 16, 2).grouped(1).tolist() == [0, 2, 4, 1, 3, 5]
    assert Heads(4, 2, 6, 16, 2).grouped(2).tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4, 8])
def test_float_file_gives_the_words_it_was_made_of(
    tmp_path: Path, fresh_seed: int, moe: bool, fused: bool, key_heads: int
) -> None:
    """Norms plus one, -exp(A_log) and every permutation, undone to the bit."""
    checkpoint = wide(tmp_path / "c", moe=moe, seed=fresh_seed, key_heads=key_heads)
    of_checkpoint(tmp_path / "m.gguf", checkpoint, fused=fused)
    with open_gguf(tmp_path / "m.gguf").checkpoint as source:
        assert source.problems == ()
        assert source.faults == ()
        assert source.tensors.keys() == checkpoint.tensors.keys()
        for name, words in checkpoint.tensors.items():
            assert source.tensors[name].shape == words.shape
            assert np.array_equal(source.read_words(name), words.reshape(-1, words.shape[-1])), name


def test_tiny_norm_weights_come_back_within_the_float32_of_one_plus_them(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    name = f"{TEXT}norm.weight"
    values = np.geomspace(2.0**-30, 1, 256).astype(np.float32)
    checkpoint.tensors[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    of_checkpoint(tmp_path / "m.gguf", checkpoint)
    with open_gguf(tmp_path / "m.gguf").checkpoint as source:
        found, expected = source.read_floats(name).reshape(-1), floats(checkpoint.tensors[name])
        assert np.abs(found - expected).max() <= 2.0**-24
        exact = expected >= 2.0**-16
        assert np.array_equal(source.read_words(name)[0, exact], checkpoint.tensors[name][exact])


@pytest.mark.parametrize("moe", [False, True])
def test_transformers_reads_the_same_values(tmp_path: Path, fresh_seed: int, moe: bool) -> None:
    """An independent reader of llama.cpp's layout, and of its metadata."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    checkpoint = wide(tmp_path / "c", moe=moe, seed=fresh_seed)
    of_checkpoint(tmp_path / "m.gguf", checkpoint, matrices_as("BF16"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    with open_gguf(tmp_path / "m.gguf").checkpoint as source:
        assert source.config is not None
        for member, value in source.config["text_config"].items():
            if member in model.config.to_dict() and member not in ("dtype", "rope_parameters", "rms_norm_eps"):
                assert model.config.to_dict()[member] == value, member
        assert np.float32(source.config["text_config"]["rms_norm_eps"]) == np.float32(model.config.rms_norm_eps)
        assert model.config.rope_parameters.items() <= source.config["text_config"]["rope_parameters"].items()
        for name, values in model.state_dict().items():
            ours = source.read_floats(name.replace("model.", TEXT, 1)).reshape(values.shape)
            assert np.abs(ours - values.numpy()).max() <= 2e-7, name


def test_config_is_the_checkpoints(tmp_path: Path) -> None:
    for moe in (False, True):
        checkpoint = wide(tmp_path / f"{moe}", moe=moe)
        of_checkpoint(tmp_path / "m.gguf", checkpoint)
        config = open_gguf(tmp_path / "m.gguf").checkpoint.config
        assert config is not None
        text = checkpoint.config["text_config"]
        found = config["text_config"]
        assert {key: found[key] for key in text if key != "rope_parameters"} == {
            key: text[key] for key in text if key != "rope_parameters"
        }
        assert text["rope_parameters"].items() <= found["rope_parameters"].items()
        assert config["architectures"] == [f"Qwen3_5{'Moe' if moe else ''}ForCausalLM"]


def test_key_value_heads_may_be_listed_per_layer(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint, attention__head_count_kv=[0, 0, 0, 2, 2])
    assert plan_gguf(tmp_path / "m.gguf", checkpoint).require().config.geometry.text.n_kv_heads == 2


# Values


@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_what_the_package_decodes(tmp_path: Path, fresh_seed: int, kind: str) -> None:
    """Laid out forwards again, every quantized value is the package's, from whatever rows are read."""
    checkpoint = wide(tmp_path / "c", moe=True, seed=fresh_seed)
    decoded = of_checkpoint(tmp_path / "m.gguf", checkpoint, matrices_as(kind))
    with open_gguf(tmp_path / "m.gguf").checkpoint as source:
        values = {n: source.read_floats(n).reshape(t.shape) for n, t in source.tensors.items()}
        again = gguf_tensors(checkpoint.config, values)
        assert again.keys() == decoded.keys()
        for name, (stored, expected) in decoded.items():
            if stored == "F32":
                np.testing.assert_allclose(again[name], expected, rtol=2e-7, atol=6e-8)
            else:
                assert np.array_equal(again[name], expected.reshape(again[name].shape)), name
        rng = np.random.default_rng(fresh_seed)
        for name in (f"{LAYERS}0.linear_attn.in_proj_qkv.weight", f"{LAYERS}2.mlp.experts.gate_up_proj"):
            rows = values[name].reshape(-1, values[name].shape[-1])
            for _ in range(8):
                begin, end = sorted(rng.choice(len(rows) + 1, 2, replace=False).tolist())
                assert np.array_equal(source.read_floats(name, begin, end - begin), rows[begin:end])


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "BF16"])
@pytest.mark.parametrize("recipe", ["groupwise-int", "bf16"])
@pytest.mark.parametrize("moe", [False, True])
def test_objects_are_encoded_from_the_decoded_float32(tmp_path: Path, kind: str, recipe: str, moe: bool) -> None:
    checkpoint = wide(tmp_path / "c", moe=moe)
    of_checkpoint(tmp_path / "m.gguf", checkpoint, matrices_as(kind))
    plan = plan_gguf(tmp_path / "m.gguf", checkpoint, out=tmp_path / "x.ninfer", recipe=recipe)
    target = plan.require()
    with Artifact.open(build(plan, step_lanes=2048).path) as artifact, plan.checkpoint as source:
        for entry, made in zip(target.inventory.objects, target.sources, strict=True):
            if not isinstance(entry, TensorEntry) or not made.runs:
                continue
            rows = [source.read_floats(r.tensor, r.begin, r.count, row_width=made.row_width) for r in made.runs]
            matrix = np.concatenate(rows)
            if made.transform == "draft_rows":
                assert target.draft_ids is not None
                matrix = matrix[target.draft_ids]
            elif made.transform == "conv_transpose":
                matrix = np.ascontiguousarray(matrix.T)
            elif made.transform == "widen":
                matrix = source.read_words(made.tensors[0]).astype(np.uint32).__lshift__(16).view(np.float32)
            expected = encode_tensor(matrix.reshape(entry.shape), entry.format, entry.layout)
            assert bytes(artifact.payload(entry.name)) == expected, entry.name


def test_bf16_file_and_its_checkpoint_give_the_same_artifact(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "c.gguf", checkpoint, matrices_as("BF16"))
    ours = build(plan_gguf(tmp_path / "c.gguf", checkpoint, out=tmp_path / "a.ninfer")).path
    theirs = build(make_plan(BuildOptions(checkpoint.folder, tmp_path / "b.ninfer"))).path
    with Artifact.open(ours) as a, Artifact.open(theirs) as b:
        different = [e.name for e in a.objects if bytes(a.payload(e.name)) != bytes(b.payload(e.name))]
    assert different == ["model/config.json"]


def test_split_file_is_opened_by_any_part(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    decoded = of_checkpoint(tmp_path / "m.gguf", checkpoint, split_max_tensors=30)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert [p.name for p in parts] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        plan = plan_gguf(part, checkpoint)
        assert plan.problems == ()
        assert len(plan.checkpoint.tensors) == len(decoded)
        assert str(plan.require().identity) == "m/groupwise-int"
    parts[1].unlink()
    problem = only(plan_gguf(parts[0], checkpoint))
    assert problem.code == "missing-shard"
    assert parts[1].name in problem.message
    parts[2].rename(parts[1])
    parts[0].rename(parts[2])
    parts[1].rename(parts[0])
    parts[2].rename(parts[1])
    assert [p.code for p in plan_gguf(parts[0], checkpoint).problems] == ["missing-shard"]


def test_parts_under_swapped_names_are_refused(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint, split_max_tensors=40)
    one, two = sorted(tmp_path.glob("m-*.gguf"))
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    problems = plan_gguf(one, checkpoint).problems
    assert {p.code for p in problems} == {"bad-gguf"}
    assert "part 1 of 2" in problems[0].message


# Models with less


def test_file_without_draft_layer_gives_none(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    checkpoint.config["text_config"]["mtp_num_hidden_layers"] = 0
    checkpoint.tensors = {n: w for n, w in checkpoint.tensors.items() if not n.startswith("mtp.")}
    of_checkpoint(tmp_path / "m.gguf", checkpoint)
    plan = plan_gguf(tmp_path / "m.gguf", checkpoint)
    assert plan.problems == ()
    assert plan.require().config.geometry.text.mtp_layers == 0


def test_draft_layer_can_be_left_out(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint)
    assert plan_gguf(tmp_path / "m.gguf", checkpoint, no_mtp=True).require().config.geometry.text.mtp_layers == 0


def test_file_without_output_matrix_is_tied(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    del checkpoint.tensors["lm_head.weight"]
    of_checkpoint(tmp_path / "m.gguf", checkpoint, matrices_as("Q8_0"))
    plan = plan_gguf(tmp_path / "m.gguf", checkpoint)
    assert plan.problems == ()
    head = next(s for s in plan.require().sources if s.name == "text/output_head")
    assert head.tensors == (f"{TEXT}embed_tokens.weight",)


# What is said


def test_report_and_notes_mark_a_quantized_file(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "Model Q4_K_M.gguf", checkpoint, matrices_as("Q4_K"), extra={"general.license": "mit"})
    plan = plan_gguf(tmp_path / "Model Q4_K_M.gguf", checkpoint, out=tmp_path / "x.ninfer")
    assert any("quantized GGUF file" in note and "rounded before" in note for note in plan.notes)
    assert any("no vision tower" in note for note in plan.notes)
    report = json.loads(build(plan).report_path.read_text())
    assert report["identity"] == "model-q4_k_m/groupwise-int"
    assert any("quantized GGUF file" in note for note in report["notes"])
    assert report["source"]["kinds"]["GGUF Q4_K"] > 20
    assert report["source"]["dtypes"].keys() == {"GGUF F32", "GGUF Q4_K"}
    assert report["source"]["licence"] == {"id": "mit", "name": None, "link": None, "files": []}
    assert report["arguments"]["frontend"] == str(checkpoint.folder)
    assert [shard["file"] for shard in report["source"]["shards"]] == ["Model Q4_K_M.gguf"]


def test_published_identity_is_not_made_of_a_gguf_file(tmp_path: Path) -> None:
    from ninfer_convert.families.checks import SourceRules, check_sources

    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint, matrices_as("BF16"))
    with open_gguf(tmp_path / "m.gguf").checkpoint as source:
        problems: list[Problem] = []
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        check_sources(source, shapes, (), SourceRules(True, False, (), ()), problems, [])
    assert {p.code for p in problems} == {"wrong-dtype"}
    assert any("GGUF BF16" in p.message for p in problems)


def test_package_decodes_the_k_blocks_that_these_tests_write() -> None:
    values = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    for kind, bound in (("Q4_K", 0.1), ("Q5_K", 0.05), ("Q6_K", 0.025)):
        decoded = gguf.quants.dequantize(encode(values, kind)[0], gguf.GGMLQuantizationType[kind])
        assert np.sqrt(np.mean((decoded - values) ** 2)) < bound


# Size


@pytest.mark.parametrize("identity", ["qwen3.6-27b/groupwise-int", "qwen3.6-35b-a3b/groupwise-int"])
def test_full_geometry_gives_the_published_decoder(tmp_path: Path, dense: TinyCheckpoint, identity: str) -> None:
    """From headers alone: every object of the decoder and the MTP layer, in shape."""
    text = dict(published_config(Identity.parse(identity)).text_config)
    config = {"text_config": text | {"max_position_embeddings": 262144}, "vision_config": None}
    shapes = gguf_shapes(config, shapes_of(config))
    write_sparse_gguf(tmp_path / "m.gguf", config, shapes, "Q4_K")
    plan = plan_gguf(tmp_path / "m.gguf", dense)
    assert plan.problems == ()
    inventory = {entry.name: entry.shape for entry in plan.require().inventory.tensors}
    published = {e.name: e.shape for e in plan_inventory(identity).tensors if e.name.startswith(("text/", "mtp/"))}
    assert {name: shape for name, shape in published.items() if "draft_head" not in name} == {
        name: shape for name, shape in inventory.items() if "draft_head" not in name
    }


def test_rows_are_read_in_bounded_memory(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    rows = 1 << 16
    checkpoint.config["text_config"]["vocab_size"] = rows
    for name in ("lm_head.weight", f"{TEXT}embed_tokens.weight"):
        checkpoint.tensors[name] = np.zeros((rows, 256), np.uint16)
    of_checkpoint(tmp_path / "m.gguf", checkpoint, matrices_as("Q4_K"))
    with open_gguf(tmp_path / "m.gguf").checkpoint as source:
        out = np.empty((rows, 256), np.float32)
        source.read_floats("lm_head.weight", 0, 16, out[:16])
        tracemalloc.start()
        try:
            source.read_floats("lm_head.weight", 0, rows, out)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    print(f"peak {peak / 1e6:.1f} MB beside {out.nbytes / 1e6:.0f} MB of values")
    assert peak < 8 << 20
