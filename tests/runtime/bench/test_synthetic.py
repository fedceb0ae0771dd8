"""Synthetic artifacts: exact structure, legal words, plausible values, equal for equal seeds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ninfer_format import Artifact, verify
from ninfer_format.errors import UsageError
from ninfer_format.payload_rules import scan_payload
from ninfer_format.prefix import prefix_bytes
from ninfer_format.published import PUBLISHED, TOKENIZER_IDS
from ninfer_runtime.bench.frontend import ADDED_TOKENS, FEWEST_IDS, frontend_resources
from ninfer_runtime.bench.synthetic import plan_synthetic, write_synthetic
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.models.binder import bind
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import Conversation
from tests.runtime.artifacts import TRAINED

TINY = TRAINED / "dense" / "config.json"
TINY_MOE = TRAINED / "moe" / "config.json"


def sparse(identity: str, path: Path) -> Path:
    """A file with the header and resources of a synthetic artifact, and holes where the weights would be."""
    plan = plan_synthetic(identity)
    inventory = plan.inventory
    with open(path, "wb") as stream:
        stream.write(prefix_bytes(2, len(inventory.directory_json)) + inventory.directory_json)
        for entry in inventory.resources:
            stream.seek(inventory.payload_offset + entry.offset)
            stream.write(plan.resources[entry.name])
        stream.truncate(inventory.file_bytes)
    return path


@pytest.mark.parametrize("identity", list(map(str, PUBLISHED)))
def test_a_published_identity_is_exact_in_size_and_directory(identity: str) -> None:
    row = next(row for row in PUBLISHED.values() if str(row.identity) == identity)
    plan = plan_synthetic(identity)
    assert plan.inventory.file_bytes == row.file_bytes
    assert plan.inventory.directory_sha256 == row.directory_sha256
    assert {name: len(content) for name, content in plan.resources.items()} == {
        name: resource.n_bytes for name, resource in row.resources.items()
    }


@pytest.mark.parametrize("identity", ["qwen3.6-27b/groupwise-int", "qwen3.8-27b/groupwise-int"])
def test_a_published_identity_binds_and_its_frontend_opens(identity: str, tmp_path: Path) -> None:
    with Artifact.open(sparse(identity, tmp_path / "sparse.ninfer")) as artifact:
        assert bind(artifact).spec.n_addressable == TOKENIZER_IDS
        frontend = Frontend.open(artifact)
        prompt = frontend.prompt(Conversation.of_prompt("Good morning"))
        assert frontend.tokenizer.decode(prompt.token_ids) == prompt.text
        assert prompt.starts_inside


@pytest.mark.parametrize("recipe", ["groupwise-int", "bf16", "w8", "nvfp4"])
@pytest.mark.parametrize("config", [TINY, TINY_MOE], ids=["dense", "moe"])
def test_every_word_is_legal_and_finite(config: Path, recipe: str, tmp_path: Path, fresh_seed: int) -> None:
    path = tmp_path / "synthetic.ninfer"
    plan = plan_synthetic(f"tiny/{recipe}", config=config)
    report = write_synthetic(plan, path, seed=fresh_seed, jobs=2)
    assert report.file_bytes == path.stat().st_size == plan.inventory.file_bytes
    with Artifact.open(path) as artifact:
        for entry in plan.inventory.tensors:
            payload = artifact.payload(entry.name)
            vocabulary = plan.n_addressable
            found = scan_payload(
                entry.name, entry.format, entry.layout, entry.shape, payload, strict=True, vocabulary=vocabulary
            )
            assert found == []
        bind(artifact)
        Frontend.open(artifact)


def test_the_verifier_accepts_it(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.ninfer"
    write_synthetic(plan_synthetic("tiny/groupwise-int", config=TINY), path)
    assert verify(path, level="numeric", strict=True).ok


def test_equal_seeds_give_equal_files_and_others_do_not(tmp_path: Path, fresh_seed: int) -> None:
    plan = plan_synthetic("tiny/groupwise-int", config=TINY)
    contents = []
    for n, (seed, jobs) in enumerate([(fresh_seed, 1), (fresh_seed, 3), (fresh_seed + 1, 1)]):
        path = tmp_path / f"{n}.ninfer"
        write_synthetic(plan, path, seed=seed, jobs=jobs)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]


@pytest.mark.parametrize("recipe", ["groupwise-int", "nvfp4"])
def test_weights_have_the_spread_of_their_role_and_rows_differ(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "synthetic.ninfer"
    plan = plan_synthetic(f"tiny/{recipe}", config=TINY)
    write_synthetic(plan, path)
    k = plan.config.geometry.text.hidden
    with Artifact.open(path) as artifact:
        for name, gain in (("text/layers/0/mlp/gate_up", 1.0), ("text/layers/0/gdn/output", 0.5)):
            matrix = artifact.tensor(name)
            assert matrix.std() * np.sqrt(matrix.shape[1]) == pytest.approx(gain, rel=0.1)
            assert abs(matrix.mean()) < 0.05 * matrix.std()
            assert len(np.unique(matrix, axis=0)) == len(matrix)
        assert artifact.tensor("text/token_embedding").shape[1] == k
        assert abs(artifact.tensor("text/final_norm").mean()) < 0.1


def test_fewer_layers_make_a_custom_artifact_of_the_same_widths() -> None:
    whole, short = plan_synthetic("qwen3.6-27b/nvfp4"), plan_synthetic("qwen3.6-27b/nvfp4", n_layers=5)
    assert str(short.inventory.identity) == "qwen3.6-27b-5l/nvfp4"
    assert short.config.geometry.text.layer_kinds == whole.config.geometry.text.layer_kinds[:5]
    shapes = {entry.name: (entry.shape, entry.format) for entry in whole.inventory.tensors}
    assert all(shapes[entry.name] == (entry.shape, entry.format) for entry in short.inventory.tensors)


@pytest.mark.parametrize(
    ("identity", "options", "message"),
    [
        ("qwen3.6-27b/nope", {}, "not a recipe"),
        ("nobody/w8", {}, "not a published model"),
        ("qwen3.6-27b/w8", {"n_layers": 65}, "expected 1 to 64"),
        ("tiny/w8", {"config": Path("absent.json")}, "no such file"),
    ],
)
def test_what_cannot_be_imitated_is_refused(identity: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_synthetic(identity, **options)  # type: ignore[arg-type]


def test_a_vocabulary_without_room_for_the_added_tokens_is_refused() -> None:
    assert len(ADDED_TOKENS) + 256 == FEWEST_IDS
    frontend_resources(FEWEST_IDS)
    with pytest.raises(UsageError, match="too small"):
        frontend_resources(FEWEST_IDS - 1)


def test_activations_stay_finite_and_of_usual_size_through_64_layers(tmp_path: Path, fresh_seed: int) -> None:
    document = json.loads(TINY.read_text())
    text = document["text_config"]
    text |= {"num_hidden_layers": 64, "layer_types": text["layer_types"] * 16}
    config, path = tmp_path / "config.json", tmp_path / "deep.ninfer"
    config.write_text(json.dumps(document))
    write_synthetic(plan_synthetic("deep/groupwise-int", config=config), path, seed=fresh_seed)
    options = EngineConfig(dtype="bfloat16", max_context=256)
    with Engine.open(path, options) as engine:
        ids = np.random.default_rng(fresh_seed).integers(0, engine.model.spec.n_addressable, 100)
        logits = engine.teacher_forced_logits(ids.tolist())
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std(axis=1).mean() < 20
    assert len(set(logits[:, : engine.model.spec.n_addressable].argmax(axis=1))) > 20, "the token decides the answer"
