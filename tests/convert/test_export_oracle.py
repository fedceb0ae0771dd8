"""An exported folder in transformers, beside the reference runtime on the artifact; and built again.

Random checkpoints of both architectures, seeds drawn each run.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import make_tiny_checkpoint
import numpy as np
import oracle_logits
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ninfer_convert.hf_config import checkpoint_config
from ninfer_format import Artifact, Identity, TensorEntry, pack_tensor
from ninfer_format.formats import NUMERIC_FORMATS
from ninfer_format.model_config import published_config
from ninfer_format.published import PUBLISHED
from ninfer_runtime import Engine, EngineConfig
from tests.convert.exported import artifact_of, export_to, with_payloads
from tests.runtime.routing import clear_prompt

BOUND = 2e-4
"""Largest difference of logits, as a share of their range."""
MEDIAN_BOUND = 5e-3
"""Median difference where decoded values are rounded to BF16 (5e-4 is usual): in a sparse model the rounding swaps some
experts, and the logits after that are others."""
N_PROMPT = 48
ArtifactOf = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ArtifactOf:
    """``made("dense" | "moe", recipe)``: artifact and companion of a random checkpoint of this run."""
    seed = int.from_bytes(np.random.default_rng().bytes(3), "little")
    print(f"checkpoint seed {seed}")
    folder = tmp_path_factory.mktemp("export-oracle")

    @cache
    def checkpoint(kind: str) -> tuple[Path, Path]:
        source, companion = folder / kind, folder / f"{kind}-dflash"
        make_tiny_checkpoint.build(source, moe=kind == "moe", seed=seed, dflash=companion)
        return source, companion

    @cache
    def artifact(kind: str, recipe: str) -> tuple[Path, Path]:
        source, companion = checkpoint(kind)
        return artifact_of(source, folder / f"{kind}-{recipe}.ninfer", recipe=recipe, dflash=companion), companion

    return artifact


CASES = (
    ("bf16", "bfloat16"), ("groupwise-int", "float32"), ("nvfp4", "float32"), ("groupwise-int", "bfloat16"),
    ("nvfp4", "bfloat16"),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("recipe", "dtype"), CASES)
@torch.inference_mode()
def test_transformers_on_the_export_gives_the_logits_of_the_artifact(
    made: ArtifactOf, tmp_path: Path, fresh_seed: int, kind: str, recipe: str, dtype: str
) -> None:
    torch.set_num_threads(1)
    artifact, _ = made(kind, recipe)
    export_to(artifact, tmp_path / "back", dtype=dtype, shard_bytes=4_000_000)
    with Engine.open(artifact, EngineConfig(max_context=128, prefill_chunk=128)) as engine:
        n_ids = engine.model.spec.n_addressable
        ids = clear_prompt(fresh_seed, N_PROMPT, n_ids, engine.teacher_forced_logits)
        found = engine.teacher_forced_logits(ids)
    logits = oracle_logits.Reference(tmp_path / "back", torch.float32).forward(ids)[0].numpy()
    shares = np.abs(found - logits) / (logits.max() - logits.min())
    print(f"{kind} {recipe} in {dtype}: max {shares.max():.1e}, mean {shares.mean():.1e} of the range")
    if recipe == "bf16" or dtype == "float32":
        assert shares.max() <= BOUND
    assert np.median(shares) <= MEDIAN_BOUND


def loaded(folder: Path) -> Any:
    """The class that ``config.json`` names, loaded in float32; every parameter must come from the folder."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("variant", ["whole", "text only", "tied"])
@torch.inference_mode()
def test_every_parameter_is_found_by_the_class_that_the_config_names(
    made: ArtifactOf, tmp_path: Path, fresh_seed: int, kind: str, variant: str
) -> None:
    torch.set_num_threads(1)
    artifact, _ = made(kind, "w8")
    if variant == "text only":
        artifact = artifact_of(artifact.parent / kind, tmp_path / "x.ninfer", recipe="w8", no_vision=True, no_mtp=True)
    elif variant == "tied":
        artifact = artifact_of(tied_copy(artifact.parent / kind, tmp_path / "tied"), tmp_path / "x.ninfer", recipe="w8")
    export_to(artifact, tmp_path / "back", dtype="float32")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert config.tie_word_embeddings is (variant == "tied")
    model = loaded(tmp_path / "back")
    assert type(model).__name__.endswith("ForCausalLM" if variant == "text only" else "ForConditionalGeneration")
    with Engine.open(artifact, EngineConfig(max_context=128, prefill_chunk=128)) as engine:
        n_ids = engine.model.spec.n_addressable
        ids = clear_prompt(fresh_seed, N_PROMPT, n_ids, engine.teacher_forced_logits)
        found = engine.teacher_forced_logits(ids)
    logits = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(found - logits).max() <= BOUND * (logits.max() - logits.min())


def tied_copy(source: Path, folder: Path) -> Path:
    """The checkpoint with its head tied to the embedding and no head of its own."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"].pop("lm_head.weight")
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    if not tensors:
        file.unlink()
    else:
        save_file(tensors, file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("identity", PUBLISHED, ids=str)
def test_config_of_a_published_identity_is_what_transformers_reads(tmp_path: Path, identity: Identity) -> None:
    published = published_config(identity)
    document = checkpoint_config(published, dtype="bfloat16", tied=False)
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == document["architectures"]
    assert config.dtype == torch.bfloat16
    text = config.get_text_config()
    for key, value in published.text_config.items():
        if key in ("rope_parameters", "full_attention_interval", "mamba_ssm_dtype") or key.startswith("mtp_"):
            continue
        assert getattr(text, key, value) == value, key
    assert text.rope_parameters["rope_theta"] == published.text_config["rope_parameters"]["rope_theta"]
    assert (config.vision_config.depth, config.image_token_id) == (27, 248_056)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("recipe", ["groupwise-int", "w8", "nvfp4"])
def test_build_of_the_export_gives_every_object_again(
    made: ArtifactOf, tmp_path: Path, kind: str, recipe: str, dtype: str
) -> None:
    """All but the proposal head: its rows come from the head, which is known here only in the head's own format.

    The largest value of a group was a BF16 word w, and its scale is fp16(w / qmax). The largest decoded value,
    qmax times that, is within 2^-11 of w, so BF16 rounding gives w again, and with it scale and codes. NVFP4 values are
    products of two short words over one divisor, and the steps of its words are far wider than those of BF16. No global
    scale is met twice: what comes back is plain (case A20).
    """
    artifact, _ = made(kind, recipe)
    export_to(artifact, tmp_path / "back", dtype=dtype)
    again = artifact_of(
        tmp_path / "back", tmp_path / "y.ninfer", recipe=recipe, dflash=tmp_path / "back" / "dflash", ranking=artifact
    )
    with Artifact.open(artifact) as first, Artifact.open(again) as second:
        assert first.objects.names() == second.objects.names()
        differing = [n for n in first.objects.names() if first.payload(n) != second.payload(n)]
    expected = {"model/config.json"} if recipe == "w8" else {"model/config.json", "text/draft_head"}
    assert set(differing) <= expected


def test_scales_that_no_bf16_value_gave_are_not_always_met_again(
    made: ArtifactOf, tmp_path: Path, fresh_seed: int
) -> None:
    """Under arbitrary scale words a group's largest value is no BF16 word, and rounding it moves the scale.

    A BF16 step is eight binary16 steps, so by up to half of that and one more; a few codes of the widest format, whose
    own steps are as fine as the rounding, follow. So it is with scales that ``--method mse`` searched and with those of
    sources that were not BF16. The shares are printed.
    """
    artifact, _ = made("dense", "groupwise-int")
    rng = np.random.default_rng(fresh_seed)
    with Artifact.open(artifact) as opened:
        quantized = [e for e in opened.objects if isinstance(e, TensorEntry) and is_grouped(e)]
        payloads = {entry.name: with_random_scales(opened, entry, rng) for entry in quantized}
    changed = with_payloads(artifact, tmp_path / "x.ninfer", payloads)
    export_to(changed, tmp_path / "back")
    again = artifact_of(tmp_path / "back", tmp_path / "y.ninfer", dflash=tmp_path / "back" / "dflash", ranking=changed)
    counts: Counter[str] = Counter()
    with Artifact.open(changed) as first, Artifact.open(again) as second:
        for entry in quantized:
            if entry.name == "text/draft_head":
                continue
            (codes, scales, _), (new_codes, new_scales, _) = first.words(entry.name), second.words(entry.name)
            assert scales is not None
            assert new_scales is not None
            steps = np.abs(scales.astype(int) - new_scales.astype(int))
            counts["codes"] += codes.size
            counts["other codes"] += int((codes != new_codes).sum())
            counts["groups"] += scales.size
            counts["other scales"] += int((steps > 0).sum())
            counts["largest step"] = max(counts["largest step"], int(steps.max()))
    print(dict(counts))
    assert 0 < counts["other scales"] < counts["groups"]
    assert counts["largest step"] <= 5
    assert counts["other codes"] < 0.01 * counts["codes"]


def is_grouped(entry: TensorEntry) -> bool:
    return NUMERIC_FORMATS[entry.format].kind == "grouped"


def with_random_scales(opened: Artifact, entry: TensorEntry, rng: np.random.Generator) -> bytes:
    """The object's payload with the same codes under random normal scale words (zero scales stay)."""
    codes, scales, _ = opened.words(entry.name)
    assert scales is not None
    random = rng.integers(0x0800, 0x3000, scales.shape).astype(np.uint16)  # 2^-13 to 2^-3
    return pack_tensor(codes, np.where(scales == 0, scales, random), None, entry.format, entry.layout)
