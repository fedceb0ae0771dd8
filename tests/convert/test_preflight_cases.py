"""What goes wrong with real checkpoints: each case ends in one clear line before anything is written, or just works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import make_sparse_checkpoint
import numpy as np
import pytest

from ninfer_convert.checkpoint import Checkpoint
from ninfer_convert.plan import BuildOptions, ConversionPlan, Problem, make_plan
from tests.convert.tiny import TinyCheckpoint, random_words, tiny_checkpoint, unfuse_experts, write_safetensors

PlanOf = Callable[..., ConversionPlan]
RNG = np.random.default_rng(3)


def only(plan: ConversionPlan) -> Problem:
    """The one problem of ``plan``."""
    assert len(plan.problems) == 1, "\n".join(map(str, plan.problems))
    return plan.problems[0]


def codes(plan: ConversionPlan) -> list[str]:
    return [problem.code for problem in plan.problems]


# Case A1: tied embeddings


@pytest.mark.parametrize("where", ["root", "text_config"])
def test_tied_head_is_made_from_the_embedding(dense: TinyCheckpoint, plan_of: PlanOf, where: str) -> None:
    (dense.config if where == "root" else dense.config["text_config"])["tie_word_embeddings"] = True
    del dense.tensors["lm_head.weight"]
    plan = plan_of(dense.save())
    embedding = "model.language_model.embed_tokens.weight"
    sources = {s.name: s for s in plan.require().sources}
    assert sources["text/output_head"].tensors == sources["text/draft_head"].tensors == (embedding,)
    assert any("tied embeddings" in note for note in plan.notes)


def test_equal_head_beside_a_tied_embedding_is_fine(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    dense.config["tie_word_embeddings"] = True
    dense.tensors["lm_head.weight"] = dense.tensors["model.language_model.embed_tokens.weight"].copy()
    assert any("equals" in note for note in plan_of(dense.save()).notes)
    assert plan_of(dense.folder).problems == ()


@pytest.mark.parametrize("row", [0, 383])
def test_differing_head_beside_a_tied_embedding_is_refused(dense: TinyCheckpoint, plan_of: PlanOf, row: int) -> None:
    dense.config["tie_word_embeddings"] = True
    dense.tensors["lm_head.weight"] = dense.tensors["model.language_model.embed_tokens.weight"].copy()
    dense.tensors["lm_head.weight"][row, 71] ^= 1
    problem = only(plan_of(dense.save()))
    assert problem.code == "tied-head-differs"
    assert f"row {row} differs" in problem.message


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_head_of_another_dtype_beside_a_tied_embedding_is_refused(
    dense: TinyCheckpoint, plan_of: PlanOf, dtype: str
) -> None:
    dense.config["tie_word_embeddings"] = True
    dense.tensors["lm_head.weight"] = np.zeros((384, 72), dtype)
    assert only(plan_of(dense.save())).code == "tied-head-differs"


def test_missing_head_of_an_untied_model_is_refused(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    del dense.tensors["lm_head.weight"]
    problem = only(plan_of(dense.save()))
    assert (problem.code, problem.where) == ("missing-tensor", "lm_head.weight")
    assert "tie_word_embeddings" in problem.advice


# Cases A3, A4, A7: missing shards and parts


def test_missing_mtp_shard_is_one_line_with_a_way_on(tmp_path: Path, plan_of: PlanOf) -> None:
    source = tiny_checkpoint(tmp_path / "c", mtp_file="mtp.safetensors")
    (source.folder / "mtp.safetensors").unlink()
    problem = only(plan_of(source))
    assert problem.where == "mtp.safetensors"
    assert "15 tensors" in problem.message
    assert "--no-mtp" in problem.advice
    assert "mtp.layers" not in str(problem)
    plan = plan_of(source, no_mtp=True)
    assert not any("mtp/" in entry.name for entry in plan.require().inventory.objects)
    assert any("mtp.safetensors is not there" in note for note in plan.notes)


def test_missing_mtp_tensors_are_one_line_with_a_way_on(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    dense.tensors = {n: w for n, w in dense.tensors.items() if not n.startswith("mtp.")}
    problem = only(plan_of(dense.save()))
    assert (problem.code, problem.where) == ("missing-part", "mtp.*")
    assert "--no-mtp" in problem.advice


def test_without_mtp_the_config_does_not_claim_it(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    target = plan_of(dense, no_mtp=True).require()
    assert target.config.text_config["mtp_num_hidden_layers"] == 0
    assert target.config.geometry.text.mtp_layers == 0
    assert not any(name.startswith("mtp/") for name in target.inventory.roles)


def test_missing_vision_tensors_are_one_line_with_a_way_on(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    dense.tensors = {n: w for n, w in dense.tensors.items() if "visual" not in n}
    assert "--no-vision" in only(plan_of(dense.save())).advice
    target = plan_of(dense.folder, no_vision=True).require()
    assert target.config.vision_config is None
    assert "frontend/preprocessor_config.json" not in target.resources


@pytest.mark.parametrize("how_many", [1, 2])
def test_missing_shards_are_listed_by_file(tiny: TinyCheckpoint, plan_of: PlanOf, how_many: int) -> None:
    gone = tiny.shards()[:how_many]
    for file in gone:
        (tiny.folder / file).unlink()
    plan = plan_of(tiny)
    assert [p.where for p in plan.problems] == gone
    assert codes(plan) == ["missing-shard"] * how_many


def test_one_missing_tensor_is_named(tiny: TinyCheckpoint, plan_of: PlanOf) -> None:
    name = "model.language_model.layers.1.linear_attn.dt_bias"
    del tiny.tensors[name]
    assert only(plan_of(tiny.save())).where == name


def test_many_missing_tensors_of_one_kind_are_one_line(tiny: TinyCheckpoint, plan_of: PlanOf) -> None:
    tiny.tensors = {n: w for n, w in tiny.tensors.items() if not n.endswith("A_log")}
    problem = only(plan_of(tiny.save()))
    assert problem.where == "model.language_model.layers.*.linear_attn.A_log"
    assert "3 tensors" in problem.message


# Case A5: quantized sources in general


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [(".weight_packed", "compressed-tensors"), (".qzeros", "GPTQ"), (".qweight", "GPTQ")],
)
def test_quantized_source_is_one_sentence(dense: TinyCheckpoint, plan_of: PlanOf, suffix: str, kind: str) -> None:
    for layer in range(4):
        stem = f"model.language_model.layers.{layer}.mlp.down_proj"
        words = dense.tensors.pop(stem + ".weight")
        dense.tensors[stem + suffix] = words.view(np.uint8)
    problem = only(plan_of(dense.save()))
    assert problem.code == "quantized-source"
    assert kind in problem.message
    assert "4 tensors" in problem.message


def test_what_is_stored_decides_not_what_the_config_lists(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    dense.config["quantization_config"] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    plan = plan_of(dense.save())
    assert plan.problems == ()
    assert any("quantization_config" in note for note in plan.notes)


def test_quantized_part_that_is_left_out_does_not_matter(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    dense.tensors["mtp.layers.0.mlp.down_proj.weight_packed"] = np.zeros((4, 4), np.uint8)
    dense.save()
    assert codes(plan_of(dense)) == ["quantized-source"]
    assert plan_of(dense, no_mtp=True).problems == ()


def test_bf16_mtp_in_a_quantized_list_is_read_as_stored(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    listed = [name for name in dense.tensors if name.startswith("mtp.")]
    dense.config["quantization_config"] = {"quant_method": "compressed-tensors", "ignore": listed}
    plan = plan_of(dense.save())
    assert plan.require().config.geometry.text.mtp_layers == 1


# Cases A9, A10: index and shards


def test_tensor_in_a_shard_but_not_in_the_index(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    real = dense.weight_map.pop("lm_head.weight")
    dense.save_index()
    problem = only(plan_of(dense))
    assert "lm_head.weight" in problem.message
    assert real in problem.message


def test_tensor_in_the_index_twice(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    path = dense.folder / "model.safetensors.index.json"
    other = dense.shards()[1]
    path.write_text(path.read_text().replace('"lm_head.weight"', f'"lm_head.weight": "{other}", "lm_head.weight"'))
    problem = only(plan_of(dense))
    assert all(name in problem.message for name in ("lm_head.weight", other, dense.weight_map["lm_head.weight"]))


def test_index_names_another_shard_than_the_one_that_holds_it(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    real = dense.weight_map["lm_head.weight"]
    indexed = next(file for file in dense.shards() if file != real)
    dense.weight_map["lm_head.weight"] = indexed
    dense.save_index()
    problem = only(plan_of(dense))
    assert all(name in problem.message for name in ("lm_head.weight", indexed, real))


def test_tensor_in_two_shards(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    real = dense.weight_map["lm_head.weight"]
    other = next(file for file in dense.shards() if file != real)
    names = [name for name, file in dense.weight_map.items() if file == other]
    write_safetensors(dense.folder / other, {n: dense.tensors[n] for n in (*names, "lm_head.weight")})
    problem = only(plan_of(dense))
    assert all(name in problem.message for name in ("lm_head.weight", other, real))


def test_tensor_in_the_index_but_in_no_shard(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    indexed = dense.weight_map["lm_head.weight"]
    dense.weight_map["model.language_model.extra.weight"] = indexed
    dense.save_index()
    problem = only(plan_of(dense))
    assert "model.language_model.extra.weight" in problem.message
    assert indexed in problem.message


def test_files_that_the_index_does_not_name_are_reported_and_ignored(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    write_safetensors(dense.folder / "consolidated.safetensors", dense.tensors)
    (dense.folder / "model.safetensors").write_bytes(b"not even safetensors")
    plan = plan_of(dense)
    assert plan.problems == ()
    assert any("consolidated.safetensors, model.safetensors" in note for note in plan.notes)


# Case A11: expert banks (identical rows: test_families.py)


@pytest.mark.parametrize("missing", ["model.language_model.layers.2.mlp.experts.3.up_proj.weight",
                                     "mtp.layers.0.mlp.experts.0.down_proj.weight"])  # fmt: skip
def test_missing_expert_matrix_is_named(moe: TinyCheckpoint, plan_of: PlanOf, missing: str) -> None:
    unfuse_experts(moe.tensors)
    del moe.tensors[missing]
    assert only(plan_of(moe.save())).where == missing


def test_transposed_expert_bank_is_refused(moe: TinyCheckpoint, plan_of: PlanOf) -> None:
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    moe.tensors[name] = np.ascontiguousarray(moe.tensors[name].transpose(0, 2, 1))
    problem = only(plan_of(moe.save()))
    assert (problem.code, problem.where) == ("wrong-shape", "model.language_model.layers.*.mlp.experts.gate_up_proj")
    assert "transposed" in problem.advice


def test_bank_stored_both_ways_is_refused(moe: TinyCheckpoint, plan_of: PlanOf) -> None:
    fused = dict(moe.tensors)
    unfuse_experts(moe.tensors, only="layers.1.")
    moe.tensors |= {n: w for n, w in fused.items() if "layers.1." in n and ".experts." in n}
    assert set(codes(plan_of(moe.save()))) == {"unused-tensor"}


# Case A22: dtype policy (values are scanned when they are read)


@pytest.mark.parametrize(("dtype", "label"), [("float16", "F16"), ("float32", "F32")])
def test_other_floats_are_rounded_and_reported(dense: TinyCheckpoint, plan_of: PlanOf, dtype: str, label: str) -> None:
    for name in ("lm_head.weight", "model.language_model.layers.0.linear_attn.A_log"):
        dense.tensors[name] = np.ones(dense.tensors[name].shape, dtype)
    plan = plan_of(dense.save())
    assert plan.problems == ()
    assert any(f"2 {label} tensors are rounded to BF16" in note for note in plan.notes)


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_other_dtypes_are_refused_by_name(dense: TinyCheckpoint, plan_of: PlanOf, dtype: str) -> None:
    dense.tensors["lm_head.weight"] = np.ones((384, 72), dtype)
    problem = only(plan_of(dense.save()))
    assert (problem.code, problem.where) == ("wrong-dtype", "lm_head.weight")


# Case A25: disk space


def test_too_little_disk_space_is_found_before_writing(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = plan_of(dense).disk_bytes
    assert needed > plan_of(dense).output_bytes
    usage = type("usage", (), {"free": needed - 1})
    monkeypatch.setattr("ninfer_convert.output.shutil.disk_usage", lambda _: usage)
    problem = only(plan_of(dense, out=tmp_path / "o.ninfer"))
    assert problem.code == "disk-space"
    assert f"{needed:,}" in problem.message
    assert f"{needed - 1:,}" in problem.message
    (tmp_path / ".o.ninfer.partial").write_bytes(b"x" * 65536)
    assert plan_of(dense, out=tmp_path / "o.ninfer").problems == ()


# Cases A27, A28: files that are not what they should be


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4294967296\n", "lfs-pointer",
      "git lfs pull"),
     (b"<!DOCTYPE html>\n<html><body>403</body></html>", "not-safetensors", "error page"),
     (b"\n\n  <html>" + b" " * 60_000, "not-safetensors", "error page"),
     (b'{"error": "Repository not found"}', "not-safetensors", "error reply"),
     (b"", "empty-file", "download the file again"),
     (b"abc", "truncated-file", "download the file again")],
    ids=["lfs", "html", "html-indented", "json", "empty", "3-bytes"],
)  # fmt: skip
def test_file_that_is_no_safetensors_is_told_by_kind(
    dense: TinyCheckpoint, plan_of: PlanOf, content: bytes, code: str, words: str
) -> None:
    file = dense.shards()[1]
    (dense.folder / file).write_bytes(content)
    problem = only(plan_of(dense))
    assert (problem.code, problem.where) == (code, file)
    assert words in problem.advice


@pytest.mark.parametrize("part", [0.9, 0.0001])
def test_truncated_shard_is_found_by_size(dense: TinyCheckpoint, plan_of: PlanOf, part: float) -> None:
    file = dense.folder / dense.shards()[-1]
    n_bytes = file.stat().st_size
    os.truncate(file, int(n_bytes * part))
    problem = only(plan_of(dense))
    assert (problem.code, problem.where) == ("truncated-file", file.name)
    assert str(int(n_bytes * part)) in problem.message


# Cases A31, A32: frontend files

NEEDED_BY = {
    "tokenizer.json": "text",
    "tokenizer_config.json": "special tokens",
    "chat_template.jinja": "chat",
    "generation_config.json": "stop",
    "preprocessor_config.json": "image",
    "video_preprocessor_config.json": "video",
}


@pytest.mark.parametrize("file", NEEDED_BY)
def test_missing_frontend_file_is_named_with_what_needs_it(dense: TinyCheckpoint, plan_of: PlanOf, file: str) -> None:
    (dense.folder / file).unlink()
    problem = only(plan_of(dense))
    assert (problem.code, problem.where) == ("missing-frontend", file)
    assert NEEDED_BY[file] in problem.message
    assert ("--no-vision" in problem.advice) == ("preprocessor" in file)
    assert plan_of(dense, no_vision=True).problems == (() if "preprocessor" in file else (problem,))


@pytest.mark.parametrize("file", NEEDED_BY)
@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"\xff\xfe"])
def test_unusable_frontend_file_is_named(dense: TinyCheckpoint, plan_of: PlanOf, file: str, content: bytes) -> None:
    (dense.folder / file).write_bytes(content)
    assert only(plan_of(dense)).where == file


def test_template_is_the_checkpoints_own_and_its_digest_is_recorded(tmp_path: Path, plan_of: PlanOf) -> None:
    digests = set()
    for version in ("old", "new"):
        source = tiny_checkpoint(tmp_path / version)
        (source.folder / "chat_template.jinja").write_text(f"{version} template")
        plan = plan_of(source)
        assert plan.require().resources["frontend/chat_template.jinja"] == f"{version} template".encode()
        assert any("differs from the chat_template member" in note for note in plan.notes)
        digests.add(plan.digests["frontend/chat_template.jinja"])
    assert len(digests) == 2


@pytest.mark.parametrize("stops", [None, [], "x", [302, 330], -1, True])
def test_impossible_stop_ids_are_refused(dense: TinyCheckpoint, plan_of: PlanOf, stops: object) -> None:
    (dense.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert only(plan_of(dense)).where == "generation_config.json"


def test_tokenizer_larger_than_the_embedding_is_refused(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    document = json.loads(dense.frontend["tokenizer.json"])
    document["model"]["vocab"]["one too many"] = 384
    (dense.folder / "tokenizer.json").write_text(json.dumps(document))
    problem = only(plan_of(dense))
    assert problem.code == "tokenizer-too-large"
    assert "385 ids, the embedding 384 rows" in problem.message


# Cases A34, A35: large files, bounded memory


def test_rows_beyond_4_gib_are_read_at_64_bit_offsets(tmp_path: Path) -> None:
    expected = random_words((3, 1000), RNG)
    hole = (5 << 30) + 2
    header = {"big": {"dtype": "BF16", "shape": [hole // 2], "data_offsets": [0, hole]},
              "small": {"dtype": "BF16", "shape": [3, 1000], "data_offsets": [hole, hole + 6000]}}  # fmt: skip
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.seek(8 + len(text) + hole)
        stream.write(expected.tobytes())
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read_words("small"), expected)
        assert not checkpoint.read_words("big", (1 << 31) + 5, 4, row_width=1).any()


def test_full_geometry_is_planned_in_seconds_and_little_memory(tmp_path: Path) -> None:
    make_sparse_checkpoint.main(tmp_path / "full")
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from pathlib import Path; from ninfer_convert.plan import BuildOptions, make_plan\n"
        "plan = make_plan(BuildOptions(Path(sys.argv[1]), jobs=2))\n"
        "assert not plan.problems, plan.problems\n"
        "assert 'torch' not in sys.modules\n"
        "print(plan.memory_bytes, max(e.n_bytes for e in plan.target.inventory.tensors))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "full"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    memory, largest = map(int, done.stdout.split())
    assert largest < memory < 3 * largest


def test_folder_without_a_config_still_reports_its_shards(dense: TinyCheckpoint) -> None:
    (dense.folder / "config.json").unlink()
    (dense.folder / dense.shards()[0]).unlink()
    plan = make_plan(BuildOptions(dense.folder))
    assert [problem.where for problem in plan.problems] == ["config.json", dense.shards()[0]]
    assert plan.target is None
