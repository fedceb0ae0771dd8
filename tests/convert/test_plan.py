"""Plans: identities, recipes, exact figures, the JSON document, and the text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_sparse_checkpoint
import numpy as np
import pytest

from ninfer_convert.config_check import config_differences
from ninfer_convert.families.checks import check_sources
from ninfer_convert.memory import peak_memory
from ninfer_convert.plan import ConversionPlan, PlanError
from ninfer_convert.plan_view import render, to_json
from ninfer_format import Identity, published_config
from ninfer_format.published import PUBLISHED, PublishedResource, published_sections
from tests.convert.tiny import (
    TinyCheckpoint,
    dflash_shapes,
    shapes_of,
    tiny_checkpoint,
    tiny_dflash,
    write_sparse,
)

PlanOf = Callable[..., ConversionPlan]
DENSE = Identity("qwen3.6-27b", "groupwise-int")
NEWER = Identity("qwen3.8-27b", "groupwise-int")
MOE = Identity("qwen3.6-35b-a3b", "groupwise-int")
NVFP4 = Identity("qwen3.6-27b", "nvfp4")


def full_config(identity: Identity) -> dict[str, Any]:
    """config.json of a published model."""
    sections = published_sections(identity)
    kind = "Qwen3_5Moe" if identity == MOE else "Qwen3_5"
    tokens = {"image": "image_token_id", "video": "video_token_id", "vision_start": "vision_start_token_id"}
    tokens |= {"vision_end": "vision_end_token_id"}
    return {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if identity == MOE else "qwen3_5",
        "language_model_only": False,
        "tie_word_embeddings": False,
        "text_config": sections["text_config"],
        "vision_config": sections["vision_config"],
    } | {member: sections["token_ids"][key] for key, member in tokens.items()}


def full_checkpoint(folder: Path, identity: Identity) -> dict[str, Path]:
    """A published model's folder (and companion) made of holes, frontend files of the published sizes."""
    make_sparse_checkpoint.main(folder)
    for name, resource in PUBLISHED[identity].resources.items():
        path = folder / name.removeprefix("frontend/")
        content = path.read_bytes().rstrip()
        path.write_bytes(content[: resource.n_bytes] + b" " * (resource.n_bytes - len(content)))
    if identity != MOE:
        return {"source": folder}
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    config = full_config(identity)
    (folder / "config.json").write_text(json.dumps(config))
    write_sparse(folder / "model.safetensors", shapes_of(config))
    companion = folder.parent / "dflash"
    companion.mkdir()
    dflash = published_sections(identity)["dflash"]
    (companion / "config.json").write_text(json.dumps(dflash))
    write_sparse(companion / "model.safetensors", dflash_shapes(dflash))
    return {"source": folder, "dflash": companion}


@pytest.fixture(scope="module")
def full_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_checkpoint(tmp_path_factory.mktemp("full") / "model", DENSE)["source"]


@pytest.mark.parametrize("identity", [DENSE, NEWER, MOE], ids=str)
def test_published_identity_gives_its_exact_file(tmp_path: Path, plan_of: PlanOf, identity: Identity) -> None:
    paths = full_checkpoint(tmp_path / "model", identity)
    plan = plan_of(paths.pop("source"), identity=identity, **paths)
    target, row = plan.require(), PUBLISHED[identity]
    assert plan.output_bytes == row.file_bytes
    assert target.inventory.directory_sha256 == row.directory_sha256
    assert target.config == published_config(identity)
    assert target.draft_ids is not None
    assert target.draft_ids.size == 131072
    assert "model/config.json" not in target.resources


def test_published_identity_needs_to_be_asked_for(full_dense: Path, plan_of: PlanOf) -> None:
    target = plan_of(full_dense).require()
    assert (str(target.identity), target.published) == ("model/groupwise-int", False)
    assert "model/config.json" in target.resources


@pytest.fixture
def published_frontend(full_dense: Path, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the frontend files of ``full_dense`` are those that were published with the 3.6 model."""
    digests = plan_of(full_dense).digests
    resources = {n: PublishedResource(r.n_bytes, digests[n]) for n, r in PUBLISHED[DENSE].resources.items()}
    rows = {i: replace(row, resources=resources) if i == DENSE else row for i, row in PUBLISHED.items()}
    monkeypatch.setattr("ninfer_convert.identity.PUBLISHED", rows)


@pytest.mark.usefixtures("published_frontend")
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "qwen3.6-27b/groupwise-int"), ({"model_id": "mine"}, "mine/groupwise-int"),
     ({"recipe": "bf16"}, "model/bf16"), ({"no_mtp": True}, "model/groupwise-int"),
     ({"no_vision": True}, "model/groupwise-int")],
)  # fmt: skip
def test_published_frontend_files_give_the_published_identity_unless_the_options_do_not(
    full_dense: Path, plan_of: PlanOf, options: dict[str, Any], expected: str
) -> None:
    target = plan_of(full_dense, **options).require()
    assert str(target.identity) == expected
    assert target.published == (expected == str(DENSE))


@pytest.mark.usefixtures("published_frontend")
def test_published_frontend_files_do_not_make_another_model_published(
    full_dense: Path, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = (full_dense / "config.json").read_text()
    try:
        (full_dense / "config.json").write_text(config.replace('"rope_theta": 10000000', '"rope_theta": 1000000'))
        assert not plan_of(full_dense).require().published
    finally:
        (full_dense / "config.json").write_text(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"no_mtp": True}, "--no-mtp"), ({"no_vision": True}, "--no-vision"), ({"recipe": "bf16"}, "recipe"),
     ({"model_id": "x"}, "model id"), ({"dflash": "companion"}, "no DFlash companion")],
)  # fmt: skip
def test_published_identity_that_the_options_exclude_is_refused(
    full_dense: Path, tmp_path: Path, plan_of: PlanOf, options: dict[str, Any], words: str
) -> None:
    if "dflash" in options:
        options = {"dflash": tiny_dflash(tmp_path / "dflash")}
    problems = [p for p in plan_of(full_dense, identity=DENSE, **options).problems if p.code == "identity-refused"]
    assert len(problems) == 1
    assert words in problems[0].message
    assert "drop" in problems[0].advice


def test_mixture_of_experts_identity_needs_its_companion(tmp_path: Path, plan_of: PlanOf) -> None:
    plan = plan_of(full_checkpoint(tmp_path / "model", MOE)["source"], identity=MOE)
    assert [p.where for p in plan.problems] == ["--dflash"]


def test_published_nvfp4_needs_its_prepacked_source(full_dense: Path, plan_of: PlanOf) -> None:
    (problem,) = plan_of(full_dense, identity=NVFP4).problems
    assert problem.code == "identity-refused"
    assert "--base" in problem.advice


def test_unknown_recipe_is_refused_in_one_line(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    assert [p.code for p in plan_of(dense, recipe="q2").problems] == ["unsupported-recipe"]


@pytest.mark.parametrize("identity", [DENSE, NEWER, MOE], ids=str)
def test_config_check_accepts_the_published_config(identity: Identity) -> None:
    assert config_differences(identity, full_config(identity)) == ()


def leaves(section: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = []
    for key, value in section.items():
        out += leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]
    return out


# Members outside the closed check: free to differ.
FREE_DENSE = {"attn_output_gate", "attention_bias", "attention_dropout", "hidden_act", "rope_type", "mrope_interleaved",
              "partial_rotary_factor", "deepstack_visual_indexes"}  # fmt: skip
FREE_MOE = {"rope_type", "language_model_only"}


@pytest.mark.parametrize("identity", [DENSE, MOE], ids=str)
def test_config_check_names_every_member_that_differs(identity: Identity) -> None:
    free = FREE_MOE if identity == MOE else FREE_DENSE
    for path in leaves(full_config(identity)):
        config = full_config(identity)
        section = config
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = "other"
        found = config_differences(identity, config)
        if path[-1] in free or (path[0] != "text_config" and path[-1] == "model_type" and len(path) > 1):
            assert found == (), path
        elif path == ("text_config", "model_type"):
            assert found == ()
        else:
            assert [p.message.split(" is ")[0] for p in found] == [".".join(path)]
            del section[path[-1]]
            assert "absent" in config_differences(identity, config)[0].message


def test_wrong_config_lists_each_key_once_and_no_tensors(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    plan = plan_of(dense, identity=DENSE)
    differing = [p for p in plan.problems if p.code == "config-differs"]
    assert any("text_config.hidden_size is 72" in p.message and "5120" in p.message for p in differing)
    assert len({p.message for p in differing}) == len(differing) > 15
    assert {p.code for p in plan.problems} == {"config-differs", "identity-refused"}  # the tokenizer's size


def test_published_identity_requires_bf16(full_dense: Path) -> None:
    from ninfer_convert.checkpoint import Checkpoint, TensorRef
    from ninfer_convert.families.checks import SourceRules
    from ninfer_convert.problems import Problem
    from ninfer_convert.sources.adapters import logical_checkpoint

    ref = TensorRef("a", "f", "F16", (1,), 0, 2)
    checkpoint = logical_checkpoint(Checkpoint(full_dense, {}, {"a": ref}, (), {}, frozenset(), (), ()))
    problems: list[Problem] = []
    check_sources(checkpoint, {"a": (1,)}, (), SourceRules(True, False, (), ()), problems, [])
    assert [p.code for p in problems] == ["wrong-dtype"]


EXTRA = "model.language_model.layers.0.mlp.down_proj.bias"


@pytest.mark.parametrize(
    ("name", "fails"),
    [(EXTRA, True), ("mtp.layers.1.mlp.down_proj.weight", True), ("model.visual.blocks.0.attn.extra", True),
     ("lm_head.bias", True), ("model.language_model.layers.4.input_layernorm.weight", False),
     ("model.audio.conv.weight", False), ("model.language_model.layers.3.self_attn.rotary_emb.inv_freq", None)],
)  # fmt: skip
def test_unused_tensors_of_converted_parts_are_errors_others_notes(
    dense: TinyCheckpoint, plan_of: PlanOf, name: str, fails: bool | None
) -> None:
    dense.tensors[name] = np.zeros((3,), np.uint16)
    plan = plan_of(dense.save())
    assert [p.code for p in plan.problems] == (["unused-tensor"] if fails else [])
    assert any(name in note for note in plan.notes) == (fails is False)


def test_published_dense_identity_ignores_extra_tensors(full_dense: Path, plan_of: PlanOf) -> None:
    index = full_dense / "model.safetensors.index.json"
    before, extra = index.read_text(), full_dense / "extra.safetensors"
    write_sparse(extra, {EXTRA: (5120,)})
    document = json.loads(before)
    document["weight_map"][EXTRA] = extra.name
    index.write_text(json.dumps(document))
    try:
        plan = plan_of(full_dense, identity=DENSE)
        assert plan.problems == ()
        assert any(EXTRA in note for note in plan.notes)
    finally:
        index.write_text(before)
        extra.unlink()


def test_published_moe_identity_requires_the_exact_name_set(tmp_path: Path, plan_of: PlanOf) -> None:
    paths = full_checkpoint(tmp_path / "model", MOE)
    source = paths.pop("source")
    write_sparse(source / "model.safetensors", shapes_of(full_config(MOE)) | {"model.audio.weight": (8,)})
    assert [p.code for p in plan_of(source, identity=MOE, **paths).problems] == ["unused-tensor"]


# Custom identities


@pytest.mark.parametrize(
    ("folder", "options", "expected"),
    [("My Model (v2)", {}, "my-model-v2/groupwise-int"), ("模型", {}, "model/groupwise-int"),
     ("x", {"recipe": "bf16"}, "x/bf16"), ("x", {"recipe": "w8"}, "x/w8"),
     ("x", {"model_id": "Mine_1.0"}, "Mine_1.0/groupwise-int"), ("x", {"identity": Identity("a", "bf16")}, "a/bf16"),
     ("Qwen3.6-27B", {}, "qwen3.6-27b-custom/groupwise-int"), ("Qwen3.6-27B", {"recipe": "bf16"}, "qwen3.6-27b/bf16")],
)  # fmt: skip
def test_custom_identity_is_slug_and_recipe(
    tmp_path: Path, plan_of: PlanOf, folder: str, options: dict[str, Any], expected: str
) -> None:
    target = plan_of(tiny_checkpoint(tmp_path / folder), **options).require()
    assert (str(target.identity), target.published) == (expected, False)
    assert target.identity not in PUBLISHED


@pytest.mark.parametrize(
    ("options", "code"),
    [({"model_id": "a/b"}, "bad-model-id"), ({"model_id": "a b"}, "bad-model-id"),
     ({"model_id": "qwen3.6-27b"}, "bad-model-id"), ({"identity": Identity("a", "bf16"), "recipe": "w8"},
      "identity-refused"), ({"identity": Identity("a", "other")}, "unsupported-recipe"),
     ({"identity": Identity("a", "bf16"), "model_id": "b"}, "identity-refused")],
)  # fmt: skip
def test_impossible_custom_identity_is_refused(
    dense: TinyCheckpoint, plan_of: PlanOf, options: dict[str, Any], code: str
) -> None:
    assert code in [p.code for p in plan_of(dense, **options).problems]


def test_moe_without_companion_is_custom_and_says_so(moe: TinyCheckpoint, tmp_path: Path, plan_of: PlanOf) -> None:
    plan = plan_of(moe)
    assert plan.require().config.dflash is None
    assert any("no DFlash companion" in note for note in plan.notes)
    with_companion = plan_of(moe, dflash=tiny_dflash(tmp_path / "dflash")).require()
    assert with_companion.config.geometry.dflash is not None


@pytest.mark.parametrize(("member", "value"), [("vocab_size", 400), ("num_target_layers", 5), ("hidden_size", 80)])
def test_companion_of_another_model_is_refused(
    moe: TinyCheckpoint, tmp_path: Path, plan_of: PlanOf, member: str, value: int
) -> None:
    folder = tiny_dflash(tmp_path / "dflash")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {member: value}))
    problems = plan_of(moe, dflash=folder).problems
    assert [p.code for p in problems] == ["bad-config"]
    assert member in problems[0].message


@pytest.mark.parametrize(
    "change",
    [{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, {"model_type": None, "architectures": None},
     {"model_type": "qwen3_5_moe"}, {"text_config": 3}, {"vision_config": []}, {"image_token_id": None},
     {"video_token_id": "x"}],
)  # fmt: skip
def test_config_of_another_model_is_one_problem(dense: TinyCheckpoint, plan_of: PlanOf, change: dict[str, Any]) -> None:
    dense.config |= change
    dense.save_config()
    assert len(plan_of(dense).problems) == 1


def test_every_wrong_config_member_is_named(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    dense.config["text_config"] |= {"hidden_size": "72", "head_dim": 0, "num_key_value_heads": 3}
    dense.save_config()
    found = "\n".join(p.message for p in plan_of(dense).problems)
    assert all(key in found for key in ("hidden_size", "head_dim", "num_attention_heads"))


# Draft head


def test_draft_ids_hold_the_special_tokens_and_the_ranking_is_named(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    plan = plan_of(dense)
    ids = plan.require().draft_ids
    assert ids is not None
    specials = {i for i in range(300, 330) if i % 3}
    assert ids.size == 256
    assert set(ids.tolist()) == {*range(256 - len(specials)), *specials}
    assert any("ranked by token id (BPE merge order)" in note for note in plan.notes)


def test_counts_file_ranks_the_draft_head(dense: TinyCheckpoint, tmp_path: Path, plan_of: PlanOf) -> None:
    (tmp_path / "r.i64").write_bytes(np.arange(384 * 2, dtype="<i8").tobytes())
    target = plan_of(dense, ranking=tmp_path / "r.i64").require()
    assert target.draft_ids is not None
    assert target.draft_ids.tolist() == list(range(329, 329 - 256, -1))
    assert target.ranking is not None
    assert target.ranking.sha256 is not None


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"NINFER\x00\x01" + b"\0" * 100, b"NINFER\x00\x03" + b"\0" * 100])
def test_unusable_ranking_is_a_problem(dense: TinyCheckpoint, tmp_path: Path, plan_of: PlanOf, content: bytes) -> None:
    (tmp_path / "r").write_bytes(content)
    assert [p.code for p in plan_of(dense, ranking=tmp_path / "r").problems] == ["bad-ranking"]


# Figures and views


def test_figures_follow_from_the_inventory(tiny: TinyCheckpoint, plan_of: PlanOf) -> None:
    for recipe in ("groupwise-int", "bf16", "w8"):
        plan = plan_of(tiny, recipe=recipe)
        inventory = plan.require().inventory
        assert plan.output_bytes == inventory.file_bytes
        assert plan.disk_bytes > plan.output_bytes
        assert plan.memory_bytes == peak_memory(inventory)


def test_memory_bound_grows_with_workers_and_the_two_largest_objects(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    inventory = plan_of(dense).require().inventory
    sizes = sorted((e.n_bytes for e in inventory.tensors), reverse=True)
    one, two = peak_memory(inventory, 1), peak_memory(inventory, 2)
    assert two > one > sum(sizes[:2])
    assert peak_memory(inventory, 1, device="cuda") > one


def test_a_plan_with_problems_cannot_be_built(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    (dense.folder / "tokenizer.json").unlink()
    (dense.folder / dense.shards()[0]).unlink()
    with pytest.raises(PlanError) as caught:
        plan_of(dense).require()
    assert len(caught.value.problems) == 2
    assert all(problem.where in str(caught.value) for problem in caught.value.problems)


def test_json_has_every_object_with_its_sources(tiny: TinyCheckpoint, plan_of: PlanOf) -> None:
    plan = plan_of(tiny)
    document = json.loads(json.dumps(to_json(plan)))
    assert document["schema"] == "ninfer.plan/1"
    assert document["ready"] is True
    assert document["output_bytes"] == plan.output_bytes
    inventory = plan.require().inventory
    assert [(o["name"], o["offset"], o["bytes"]) for o in document["objects"]] == [
        (e.name, e.offset, e.n_bytes) for e in inventory.objects
    ]
    used = {name for o in document["objects"] for name in o.get("sources", ())}
    assert used == tiny.tensors.keys()
    assert set(document["frontend_sha256"]) == {f"frontend/{name}" for name in tiny.frontend}


def test_text_shows_identity_sizes_notes_objects_and_problems(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    plan = plan_of(dense)
    text = render(plan)
    assert "tiny-dense/groupwise-int (custom artifact)" in text
    assert f"{plan.output_bytes:,} B" in text
    assert "text/layers/3/attention/query_key" in text
    assert "self_attn.q_proj.weight + " in text
    assert "no problems found" in text
    (dense.folder / "tokenizer.json").unlink()
    assert "1 problem, nothing can be built:\n  - tokenizer.json: the file is missing" in render(plan_of(dense))


def test_plan_without_a_target_can_be_shown(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    (dense.folder / "config.json").unlink()
    plan = plan_of(dense)
    document = to_json(plan)
    assert document["identity"] is None
    assert document["objects"] == []
    assert document["ready"] is False
    assert "config.json: the file is missing" in render(plan)


def test_planning_imports_no_torch() -> None:
    program = (
        "import sys, ninfer_convert.plan, ninfer_convert.plan_view; print({'torch', 'safetensors'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
