"""GGUF sources: frontend files, where the output may lie, what is refused by name, and the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_convert.check import CheckOptions, check
from ninfer_convert.cli import app
from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, ConversionPlan, Problem, make_plan
from ninfer_format import MissingExtraError, SourceError, UsageError
from tests.convert.gguf_files import encode, matrices_as, of_checkpoint, plan_gguf, wide
from tests.convert.tiny import TinyCheckpoint, tiny_checkpoint

LAYERS = "model.language_model.layers."
DOWN = "blk.1.ffn_down.weight"


def only(plan: ConversionPlan) -> Problem:
    assert len(plan.problems) == 1, "\n".join(map(str, plan.problems))
    return plan.problems[0]


# Frontend files


def test_frontend_folder_is_required_and_the_message_says_why(tmp_path: Path) -> None:
    of_checkpoint(tmp_path / "m.gguf", wide(tmp_path / "c"))
    with pytest.raises(UsageError, match="--frontend DIR") as refused:
        make_plan(BuildOptions(tmp_path / "m.gguf"))
    assert "byte for byte" in str(refused.value)


def test_base_does_not_go_beside_a_gguf_file(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint)
    with pytest.raises(UsageError, match="--base"):
        plan_gguf(tmp_path / "m.gguf", checkpoint, base=checkpoint.folder)


def test_frontend_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint)
    path = checkpoint.folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"t17": 17', '"other": 17'))
    problem = only(plan_gguf(tmp_path / "m.gguf", checkpoint))
    assert (problem.code, problem.where) == ("frontend-differs", "tokenizer.json")
    assert "id 17 is 'other', in the GGUF file it is 't17'" in problem.message


def test_differing_added_token_and_template_are_notes(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint)
    assert not any("template" in note or "added" in note for note in plan_gguf(tmp_path / "m.gguf", checkpoint).notes)
    (checkpoint.folder / "chat_template.jinja").write_text("{{ messages }}")
    path = checkpoint.folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|t329|>", "<|end|>"))
    plan = plan_gguf(tmp_path / "m.gguf", checkpoint)
    assert plan.problems == ()
    assert any("another chat template" in note for note in plan.notes)
    assert any("id 329 is '<|end|>'" in note for note in plan.notes)


def test_frontend_folder_also_serves_a_safetensors_checkpoint(dense: TinyCheckpoint, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "frontend")
    (dense.folder / "chat_template.jinja").unlink()
    (other.folder / "chat_template.jinja").write_text("{{ messages }} of the other folder")
    plan = make_plan(BuildOptions(dense.folder, frontend=other.folder))
    assert plan.require().resources["frontend/chat_template.jinja"].endswith(b"of the other folder")


# Where the output may lie


def test_output_beside_the_file_is_fine_and_over_it_is_not(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint)
    assert plan_gguf(tmp_path / "m.gguf", checkpoint, out=tmp_path / "m.ninfer").problems == ()
    with pytest.raises(UsageError, match="the output is the GGUF file"):
        plan_gguf(tmp_path / "m.gguf", checkpoint, out=tmp_path / "m.gguf", force=True)
    inside = plan_gguf(tmp_path / "m.gguf", checkpoint, out=checkpoint.folder / "m.ninfer")
    assert only(inside).code == "output-in-source"


def test_output_in_the_hub_cache_of_the_file_is_refused(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    snapshot = tmp_path / "hub" / "models--o--m-GGUF" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    of_checkpoint(snapshot.parents[1] / "blobs" / "f00d", checkpoint)
    (snapshot / "m.gguf").symlink_to("../../blobs/f00d")
    for out in (snapshot / "m.ninfer", snapshot.parents[1] / "blobs" / "m.ninfer"):
        assert only(plan_gguf(snapshot / "m.gguf", checkpoint, out=out)).code == "output-in-source"


# Refusals


def test_missing_package_is_one_line_naming_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"ninfer\[gguf\]"):
        plan_gguf(tmp_path / "m.gguf", checkpoint)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architecture": "llama"}, "'llama'"),
        ({"architecture": "qwen3next"}, "'qwen3next'"),
        ({"embedding_length": None}, "qwen35.embedding_length is missing"),
        ({"full_attention_interval": 3}, "layer 2 linear_attention"),
        ({"ssm__group_count": 3}, "a multiple of ssm.group_count (3)"),
        ({"ssm__inner_size": 255}, "a multiple of ssm.time_step_rank (8)"),
        ({"attention__value_length": 32}, "attention.key_length (64)"),
        ({"rope__dimension_sections": [4, 2]}, "three counts"),
        ({"rope__dimension_sections": [4, 2, 1, 1]}, "three counts"),
        ({"rope__scaling.type": "yarn"}, "stretched positions"),
        ({"extra": {"general.quantization_version": 1}}, "general.quantization_version is 1"),
        ({"rope__freq_base": 0.0}, "a positive number"),
        ({"attention__head_count_kv": [2, 2, 2, 0, 2]}, "every attention layer"),
        ({"block_count": 4_000_000_000}, "at most the number of stored tensors"),
    ],
)
def test_metadata_that_describes_no_such_model_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint, **change)
    problems = plan_gguf(tmp_path / "m.gguf", checkpoint).problems
    assert {p.code for p in problems} <= {"bad-config", "unsupported-architecture"}
    assert any(says in p.message for p in problems), problems
    assert all(p.where == "m.gguf" for p in problems)


def _other_type(tensors: dict[str, Any]) -> None:
    rows, width = tensors[DOWN].shape
    tensors[DOWN] = np.zeros((rows, width // 256 * 84), np.uint8), "Q2_K"


def _unknown(tensors: dict[str, Any]) -> None:
    tensors["blk.1.ffn_down.scale"] = np.ones(1, np.float32)
    tensors["blk.2.ffn_down.scale"] = np.ones(1, np.float32)


def _missing(tensors: dict[str, Any]) -> None:
    del tensors[DOWN]


def _transposed(tensors: dict[str, Any]) -> None:
    tensors[DOWN] = np.ascontiguousarray(tensors[DOWN].T)


def _other_heads(tensors: dict[str, Any]) -> None:
    tensors["blk.0.ssm_out.weight"] = np.zeros((256, 288), np.float32)


@pytest.mark.parametrize(
    ("change", "code", "where", "says"),
    [
        (_other_type, "unsupported-type", f"{LAYERS}1.mlp.down_proj.weight", "Q2_K"),
        (_unknown, "unused-tensor", "m.gguf", "2 tensors 'blk.*.ffn_down.scale'"),
        (_missing, "missing-tensor", f"{LAYERS}1.mlp.down_proj.weight", "[256, 512]"),
        (_transposed, "wrong-shape", f"{LAYERS}*.mlp.down_proj.weight", "[512, 256]"),
        (_other_heads, "wrong-shape", f"{LAYERS}*.linear_attn.out_proj.weight", "[256, 288]"),
    ],
)
def test_tensors_that_make_no_such_model_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], code: str, where: str, says: str
) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint, change=change)
    problem = only(plan_gguf(tmp_path / "m.gguf", checkpoint))
    assert (problem.code, problem.where) == (code, where)
    assert says in problem.message


def _twice(tensors: dict[str, Any]) -> None:
    gate, up = (tensors[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    tensors["blk.1.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)


def _half(tensors: dict[str, Any]) -> None:
    del tensors["blk.1.ffn_up_exps.weight"]


@pytest.mark.parametrize(
    ("change", "codes"), [(_twice, {"stored-twice"}), (_half, {"unused-tensor", "missing-tensor"})]
)
def test_expert_banks_are_stored_once_and_whole(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], codes: set[str]
) -> None:
    checkpoint = wide(tmp_path / "c", moe=True)
    of_checkpoint(tmp_path / "m.gguf", checkpoint, change=change)
    problems = plan_gguf(tmp_path / "m.gguf", checkpoint).problems
    assert {p.code for p in problems} == codes
    assert any("gate" in f"{p.where} {p.message}" for p in problems)


def test_nan_in_a_block_scale_is_refused_with_the_index(tmp_path: Path) -> None:
    """Cases A22, A23."""

    def spoil(tensors: dict[str, Any]) -> None:
        blocks, kind = encode(tensors[DOWN], "Q8_0")
        blocks[3, 34:36] = np.array([np.nan], np.float16).view(np.uint8)  # second block of row 3
        tensors[DOWN] = blocks, kind

    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint, change=spoil)
    for recipe in ("groupwise-int", "bf16"):
        plan = plan_gguf(tmp_path / "m.gguf", checkpoint, out=tmp_path / "x.ninfer", recipe=recipe)
        with pytest.raises(SourceError, match=r"down_proj.weight' holds nan at index \[3, 32\]"):
            build(plan)


def test_decay_that_is_no_negative_exponential_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["blk.2.ssm_a"][1] = 0.25  # tiled: key head 1, value 0, which is head 4 of the checkpoint

    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint, change=spoil)
    plan = plan_gguf(tmp_path / "m.gguf", checkpoint, out=tmp_path / "x.ninfer")
    with pytest.raises(SourceError, match=r"blk.2.ssm_a' holds 0.25 at index \[4\]"):
        build(plan)


def test_changed_file_ends_the_build(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint)
    plan = plan_gguf(tmp_path / "m.gguf", checkpoint, out=tmp_path / "x.ninfer")
    with open(tmp_path / "m.gguf", "ab") as stream:
        stream.write(b"x")
    with pytest.raises(SourceError, match="has changed since the plan"):
        build(plan)


def test_commands_take_a_gguf_file_and_its_frontend(tmp_path: Path) -> None:
    checkpoint = wide(tmp_path / "c")
    of_checkpoint(tmp_path / "m.gguf", checkpoint, matrices_as("Q5_K"))
    source, frontend = str(tmp_path / "m.gguf"), ["--frontend", str(checkpoint.folder)]
    assert app(["plan", source, *frontend, "--json"], standalone_mode=False) == 0
    assert app(["build", source, str(tmp_path / "x.ninfer"), *frontend, "-q"], standalone_mode=False) == 0
    assert app(["check", str(tmp_path / "x.ninfer"), "--source", source, *frontend, "-q"], standalone_mode=False) == 0
    options = CheckOptions(tmp_path / "x.ninfer", tmp_path / "m.gguf", frontend=checkpoint.folder, everything=True)
    assert check(options).equal
