"""Case A6: draft layers keep 8 bits by default, fewer bits are announced, and what they cost is measured."""

import random
from importlib import import_module
from pathlib import Path

import pytest

from ninfer_convert import BuildOptions, build, make_plan
from ninfer_convert.export import ExportOptions, export, plan_export
from ninfer_convert.recipe_file import read_recipe_file
from ninfer_format import NUMERIC_FORMATS, Artifact
from ninfer_format.recipes import RECIPE_NAMES

ROOT = Path(__file__).resolve().parents[2]
DENSE = ROOT / "examples" / "tiny" / "dense"
MTP_RECIPE = 'name = "mtp-{bits}"\nbase = "bf16"\n[formats]\n"mtp/**" = "{bits}"\n'


def recipe_file(folder: Path, bits: str) -> Path:
    path = folder / f"{bits}.toml"
    path.write_text(MTP_RECIPE.format(bits=bits), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a6_built_in_recipes_keep_at_least_8_bits_in_the_draft_layer(name: str) -> None:
    plan = make_plan(BuildOptions(DENSE, recipe=name))
    formats = {e.format for e in plan.require().inventory.tensors if e.name.startswith("mtp/") and len(e.shape) == 2}
    assert formats
    assert all(NUMERIC_FORMATS[f].bits >= 8 for f in formats)
    assert not [note for note in plan.notes if "MTP matrices" in note]


def test_a6_a_plan_announces_fewer_bits_and_what_8_would_take(tmp_path: Path) -> None:
    plans = {
        bits: make_plan(BuildOptions(DENSE, recipe=read_recipe_file(recipe_file(tmp_path, bits))))
        for bits in ("Q4", "W8")
    }
    more = plans["W8"].output_bytes - plans["Q4"].output_bytes
    (note,) = (n for n in plans["Q4"].notes if "MTP matrices" in n)
    announced = int(note.rpartition(" would take ")[2].partition(" ")[0].replace(",", ""))
    assert abs(announced - more) < 4096  # the directory and the alignment of objects differ a little
    assert not [n for n in plans["W8"].notes if "MTP matrices" in n]


def draft_choices(folder: Path, texts: list[list[int]]) -> list[int]:
    """The drafted token after every position of every text, by the oracle on a checkpoint folder."""
    import torch

    oracle = import_module("oracle_logits")
    reference = oracle.Reference(folder, torch.float32)
    reference.load_mtp()
    drafted: list[int] = []
    with torch.inference_mode():
        for ids in texts:
            reference.forward(ids)
            hidden = reference.text.norm(reference.layers[-1])[:-1]
            embeds = reference.text.embed_tokens(torch.tensor(ids))[1:]
            positions = torch.arange(len(ids) - 1).expand(3, -1)
            drafted += reference.mtp_forward(embeds, hidden, positions)[1].argmax(-1).tolist()
    return drafted


def test_a6_eight_bits_draft_what_bf16_drafts_and_four_bits_no_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "oracle"))
    from tokenizers import Tokenizer

    train_tiny = import_module("train_tiny")
    tokenizer, template = Tokenizer.from_file(str(DENSE / "tokenizer.json")), train_tiny.renderer()
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    texts = [tokenizer.encode(train_tiny.document(rng, template)).ids for _ in range(24)]
    wanted = draft_choices(DENSE, texts)
    agreement = {}
    for bits in ("W8", "Q4"):
        out = tmp_path / f"{bits}.ninfer"
        build(make_plan(BuildOptions(DENSE, out, recipe=read_recipe_file(recipe_file(tmp_path, bits)))))
        with Artifact.open(out) as artifact:
            export(plan_export(artifact, ExportOptions(tmp_path / bits, shard_bytes=1 << 20)))
        found = draft_choices(tmp_path / bits, texts)
        agreement[bits] = sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)
    print(agreement)
    assert agreement["W8"] >= 0.99
    assert agreement["Q4"] <= agreement["W8"]
