"""``export``: what comes back equals what went in, in the shape that Hugging Face libraries expect."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_convert.checkpoint import INDEX
from ninfer_convert.config_check import config_differences
from ninfer_convert.export import REPORT, ExportOptions, export, plan_export
from ninfer_convert.hf_config import checkpoint_config
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_format import Artifact, ArtifactError, Identity, InventoryError
from ninfer_format.model_config import published_config
from ninfer_format.published import PUBLISHED, published
from tests.convert.exported import artifact_of, config_of, export_to, sparse_artifact, tensors_of, with_payloads
from tests.convert.tiny import TinyCheckpoint, Words, random_words, tiny_checkpoint, tiny_dflash, unfuse_experts

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def same(found: dict[str, Words], expected: dict[str, Words]) -> bool:
    """Names, shapes, types and words are equal."""
    return found.keys() == expected.keys() and all(
        found[n].dtype == w.dtype and found[n].shape == w.shape and np.array_equal(found[n], w)
        for n, w in expected.items()
    )


def widened(words: Words) -> NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)


def test_every_tensor_and_file_of_a_bf16_artifact_comes_back_as_it_was(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    companion = tiny_dflash(tmp_path / "companion")
    artifact = artifact_of(tiny.folder, tmp_path / "x.ninfer", recipe="bf16", dflash=companion)
    result = export_to(artifact, tmp_path / "back")
    assert same(tensors_of(tmp_path / "back"), tiny.tensors)
    assert same(tensors_of(tmp_path / "back" / "dflash"), tensors_of(companion))
    assert result.n_tensors == len(tiny.tensors) + len(tensors_of(companion))
    for file, content in tiny.frontend.items():
        assert (tmp_path / "back" / file).read_bytes() == content
    found, expected = config_of(tmp_path / "back"), tiny.config
    assert {key: found[key] for key in expected.keys() - {"text_config", "vision_config"}} == {
        key: expected[key] for key in expected.keys() - {"text_config", "vision_config"}
    }
    assert found["text_config"].items() >= expected["text_config"].items()
    assert found["vision_config"] == expected["vision_config"]
    assert found["dtype"] == found["text_config"]["dtype"] == "bfloat16"
    assert config_of(tmp_path / "back" / "dflash").items() >= config_of(companion).items()


def test_experts_stored_one_by_one_come_back_fused_as_in_the_official_checkpoint(
    moe: TinyCheckpoint, tmp_path: Path
) -> None:
    fused = dict(moe.tensors)
    unfuse_experts(moe.tensors)
    moe.save()
    export_to(artifact_of(moe.folder, tmp_path / "x.ninfer", recipe="bf16"), tmp_path / "back")
    assert same(tensors_of(tmp_path / "back"), fused)


def test_without_vision_and_mtp_it_is_a_text_only_checkpoint_that_plans_again(
    tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    artifact = artifact_of(tiny.folder, tmp_path / "x.ninfer", recipe="bf16", no_vision=True, no_mtp=True)
    export_to(artifact, tmp_path / "back")
    tensors, config = tensors_of(tmp_path / "back"), config_of(tmp_path / "back")
    expected = {
        name.replace("model.language_model.", "model."): words
        for name, words in tiny.tensors.items()
        if not name.startswith(("mtp.", "model.visual."))
    }
    assert same(tensors, expected)
    assert config["architectures"][0].endswith("ForCausalLM")
    assert config["model_type"] == tiny.config["text_config"]["model_type"]
    assert "text_config" not in config
    again = artifact_of(tmp_path / "back", tmp_path / "y.ninfer", recipe="bf16", model_id="tiny")
    with Artifact.open(artifact) as a, Artifact.open(again) as b:
        for name in a.objects.names():
            assert name == "model/config.json" or a.payload(name) == b.payload(name)


@pytest.mark.parametrize("recipe", ["groupwise-int", "w8"])
def test_quantized_objects_come_back_as_their_decoded_values(tiny: TinyCheckpoint, tmp_path: Path, recipe: str) -> None:
    artifact = artifact_of(tiny.folder, tmp_path / "x.ninfer", recipe=recipe)
    export_to(artifact, tmp_path / "rounded")
    export_to(artifact, tmp_path / "exact", dtype="float32")
    rounded, exact = tensors_of(tmp_path / "rounded"), tensors_of(tmp_path / "exact")
    assert config_of(tmp_path / "exact")["text_config"]["dtype"] == "float32"
    with Artifact.open(artifact) as opened:
        plan = make_plan(BuildOptions(tiny.folder, recipe=recipe))
        for source in plan.require().sources:
            if source.transform != "rows":
                continue
            rows = opened.tensor(source.name).reshape(-1, source.row_width)
            begin = 0
            for run in source.runs:  # the map of the build, read forwards
                values = exact[run.tensor].reshape(-1, source.row_width)[run.begin : run.begin + run.count]
                assert np.array_equal(values, rows[begin : begin + run.count])
                begin += run.count
    for name, values in exact.items():
        assert values.dtype == np.float32
        nearest = widened(rounded[name])
        assert (np.abs(nearest - values) <= np.abs(values) * 2.0**-8).all()


def test_float32_words_that_bf16_does_not_hold_stay_in_float32(dense: TinyCheckpoint, tmp_path: Path) -> None:
    plain = artifact_of(dense.folder, tmp_path / "x.ninfer", recipe="bf16")
    values = np.array([1.0, 1 / 3, 2.0, 1e-30], "<f4")
    changed = with_payloads(plain, tmp_path / "y.ninfer", {"text/layers/1/gdn/a_log": values.tobytes()})
    result = export_to(changed, tmp_path / "back")
    tensors = tensors_of(tmp_path / "back")
    name = "model.language_model.layers.1.linear_attn.A_log"
    assert tensors[name].dtype == np.float32
    assert np.array_equal(tensors[name], values)
    assert [n for n, words in tensors.items() if words.dtype == np.float32] == [name]
    assert any("1 tensors stay in F32" in note and name in note for note in result.notes)


@pytest.mark.parametrize(("architecture", "tied"), [("dense", True), ("moe", False)])
def test_tied_embeddings_stay_tied_only_where_head_and_embedding_are_stored_alike(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    """groupwise-int stores both in Q6 in the dense model, and in W8 and Q6 in the mixture of experts."""
    source = tiny_checkpoint(tmp_path / "tiny", moe=architecture == "moe")
    del source.tensors["lm_head.weight"]
    source.config["tie_word_embeddings"] = source.config["text_config"]["tie_word_embeddings"] = True
    source.save()
    result = export_to(artifact_of(source.folder, tmp_path / "x.ninfer"), tmp_path / "back")
    config = config_of(tmp_path / "back")
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is tied
    assert ("lm_head.weight" not in tensors_of(tmp_path / "back")) is tied
    assert any("tied its embeddings" in note for note in result.notes) is not tied


def test_shards_are_full_in_order_and_indexed(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    artifact = artifact_of(tiny.folder, tmp_path / "x.ninfer", recipe="bf16")
    limit = 40_000
    export_to(artifact, tmp_path / "many", shard_bytes=limit)
    export_to(artifact, tmp_path / "one")
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert [path.name for path in sorted((tmp_path / "many").glob("*.safetensors"))] == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(words.nbytes for words in tiny.tensors.values())
    assert same(tensors_of(tmp_path / "many"), tiny.tensors)
    sizes = {file: [tiny.tensors[n].nbytes for n, f in index["weight_map"].items() if f == file] for file in files}
    assert all(sum(held) <= limit or len(held) == 1 for held in sizes.values())
    assert sorted(path.name for path in (tmp_path / "one").glob("*.safe*")) == ["model.safetensors"]
    assert not (tmp_path / "one" / INDEX).exists()
    for path in (tmp_path / "many").glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_any_number_of_threads_gives_the_same_bytes(moe: TinyCheckpoint, tmp_path: Path) -> None:
    artifact = artifact_of(moe.folder, tmp_path / "x.ninfer")
    for jobs in (1, 3):
        with Artifact.open(artifact) as opened:
            export(plan_export(opened, ExportOptions(tmp_path / f"{jobs}", jobs=jobs)))
    first, second = (sorted(p for p in (tmp_path / name).iterdir()) for name in ("1", "3"))
    assert [p.name for p in first] == [p.name for p in second]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))


def test_long_tensors_are_written_in_pieces(
    dense: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ninfer_convert.export.PIECE_ELEMENTS", 500)
    artifact = artifact_of(dense.folder, tmp_path / "x.ninfer", recipe="bf16")
    seen: list[int] = []
    with Artifact.open(artifact) as opened:
        plan = plan_export(opened, ExportOptions(tmp_path / "back", jobs=2))
        export(plan, progress=seen.append)
    assert same(tensors_of(tmp_path / "back"), dense.tensors)
    assert max(seen) <= 2 * max(500, max(words.shape[-1] for words in dense.tensors.values()) * 4)
    assert sum(seen) == plan.weight_bytes == sum(words.nbytes for words in dense.tensors.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_value_that_is_no_number_is_refused_with_its_place_and_leaves_nothing(
    dense: TinyCheckpoint, tmp_path: Path, dtype: str
) -> None:
    plain = artifact_of(dense.folder, tmp_path / "x.ninfer", recipe="bf16")
    name = "text/layers/3/attention/query_key"
    with Artifact.open(plain) as opened:
        words = np.frombuffer(bytes(opened.payload(name)), "<u2").reshape(-1, 72).copy()
    words[40, 5] = 0x7FC0  # query row 8 of head 1, which is row 72 of q_proj
    damaged = with_payloads(plain, tmp_path / "y.ninfer", {name: words.tobytes()})
    with pytest.raises(ArtifactError, match=r"layers\.3\.self_attn\.q_proj\.weight is NaN or infinite at \[72, 5\]"):
        export_to(damaged, tmp_path / "back", dtype=dtype)
    assert not [path for path in tmp_path.iterdir() if "back" in path.name]


def test_container_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InventoryError):
        export_to(GOLDEN / "tiny_v2.ninfer", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_report_says_where_the_folder_comes_from_and_build_ignores_it(dense: TinyCheckpoint, tmp_path: Path) -> None:
    artifact = artifact_of(dense.folder, tmp_path / "x.ninfer")
    export_to(artifact, tmp_path / "back")
    report = json.loads((tmp_path / "back" / REPORT).read_text())
    assert report["schema"] == "ninfer.export/1"
    assert report["artifact"] == {
        "file": "x.ninfer", "bytes": artifact.stat().st_size, "identity": "tiny-dense/groupwise-int"
    }  # fmt: skip
    assert report["tensors"] == len(dense.tensors)
    assert any("--ranking" in note for note in report["notes"])
    assert make_plan(BuildOptions(tmp_path / "back")).problems == ()


@pytest.mark.parametrize("identity", PUBLISHED, ids=str)
def test_config_of_a_published_identity_passes_its_own_closed_check(identity: Identity) -> None:
    config = checkpoint_config(published_config(identity), dtype="bfloat16", tied=False)
    assert config_differences(identity, config) == ()


@pytest.mark.parametrize("identity", PUBLISHED, ids=str)
def test_plan_of_a_published_identity_has_every_tensor_of_its_checkpoint(tmp_path: Path, identity: Identity) -> None:
    """1199 tensors of the dense models, 1045 and 69 of the mixture of experts and its companion; headers alone tell."""
    files = {name: b"{}".ljust(resource.n_bytes) for name, resource in published(identity).resources.items()}
    made = sparse_artifact(tmp_path / "x.ninfer", published_config(identity), identity, files)
    with Artifact.open(made) as opened:
        plan = plan_export(opened, ExportOptions(tmp_path / "back"))
    moe = identity.model_id.endswith("a3b")
    assert [len(folder.tensors) for folder in plan.folders] == ([1045, 69] if moe else [1199])
    assert all(tensor.n_bytes for folder in plan.folders for file in folder.files for tensor in file.tensors)
    shape = plan.folders[0].tensors["model.language_model.layers.3.self_attn.q_proj.weight"].shape
    assert shape == ((8192, 2048) if moe else (12288, 5120))
    assert plan.weight_bytes == (72_675_457_760 if moe else 55_562_855_904)


def test_words_of_every_kind_survive(dense: TinyCheckpoint, tmp_path: Path, fresh_seed: int) -> None:
    """Signed zeros, subnormals and the largest finite values are words like any other."""
    rng = np.random.default_rng(fresh_seed)
    for name, words in dense.tensors.items():
        special = rng.choice(np.array([0x8000, 0x0001, 0x807F, 0x7F7F, 0xFF7F], np.uint16), words.shape)
        dense.tensors[name] = np.where(rng.random(words.shape) < 0.2, special, random_words(words.shape, rng))
    dense.save()
    export_to(artifact_of(dense.folder, tmp_path / "x.ninfer", recipe="bf16"), tmp_path / "back")
    assert same(tensors_of(tmp_path / "back"), dense.tensors)
