"""The model card: numbers that are those of the artifact, and no word from elsewhere that could become markup."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_convert.card import model_card
from ninfer_convert.manifest import ArtifactFacts
from ninfer_convert.publish import publish
from ninfer_convert.recipe_file import RecipeFile, Rule
from ninfer_convert.summaries import role_summaries, stored_tensors, total_bits_per_weight
from ninfer_format import Artifact, TensorEntry
from ninfer_format.numeric.direct import widen_bf16
from tests.convert.published import built, planned_report
from tests.convert.tiny import TinyCheckpoint, tiny_dflash

FACTS = ArtifactFacts("model.ninfer", 123_456, "ab" * 32, 100, None)


def front_matter(card: str) -> dict[str, Any]:
    """The metadata block; every value is JSON, which is YAML."""
    first, *lines = card.split("---\n")[1].splitlines()
    return {name: json.loads(value) for name, _, value in (line.partition(": ") for line in (first, *lines))}


def rows_under(card: str, heading: str) -> dict[str, list[str]]:
    """First cell → other cells of the tables under a heading."""
    section = card.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip("`"): row[1:] for row in rows if row[0] != "---"}


def test_errors_per_role_are_those_of_the_decoded_values(dense: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    built(dense.folder, out)
    publish(out)
    rows = rows_under((tmp_path / "MODEL_CARD.md").read_text(), "Recipe and errors")
    squares = source = n_bytes = n_values = 0.0
    largest, relatives = 0.0, []
    with Artifact.open(out) as artifact:
        for layer in range(4):
            name = f"text/layers/{layer}/mlp/down"
            entry = artifact.objects[name]
            assert isinstance(entry, TensorEntry)
            values = widen_bf16(dense.tensors[f"model.language_model.layers.{layer}.mlp.down_proj.weight"])
            difference = values.astype(np.float64) - artifact.tensor(name)
            squares += float((difference**2).sum())
            source += float((values.astype(np.float64) ** 2).sum())
            relatives.append(np.linalg.norm(difference) / np.linalg.norm(values.astype(np.float64)))
            largest = max(largest, float(np.abs(difference).max()))
            n_bytes, n_values = n_bytes + entry.n_bytes, n_values + math.prod(entry.shape)
    form, count, bits, error, worst, most = rows["text/layers/*/mlp/down"]
    assert (form, count, bits) == ("`Q5G64_F16S`", "4", f"{8 * n_bytes / n_values:.2f}")
    assert float(error) == pytest.approx(math.sqrt(squares / source), rel=5e-3)
    assert float(worst.split()[0]) == pytest.approx(max(relatives), rel=5e-3)
    assert worst.endswith(f"(layer {int(np.argmax(relatives))})")
    assert float(most) == pytest.approx(largest, rel=5e-3)


def test_sizes_add_up_and_parts_are_named(moe: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    report = built(moe.folder, out, dflash=tiny_dflash(tmp_path / "companion"), no_vision=True)
    card = model_card(report, FACTS)
    sizes = rows_under(card, "Sizes")
    components = {name: cells for name, cells in sizes.items() if len(cells) == 3 and name != "component"}
    assert set(components) == {"frontend", "model config", "text", "draft head", "MTP", "DFlash"}
    assert sum(int(cells[1].replace(",", "")) for cells in components.values()) == report["statistics"]["object_bytes"]
    assert "| parts | text, DFlash companion, MTP draft layer |" in card
    assert "(mixture of experts), 4 layers, hidden 72, 5 experts" in card
    assert "DFlash companion: `companion`" in card
    assert "--dflash DFLASH --no-vision" in card.replace("--method max ", "")


def test_an_exact_artifact_says_so(dense: TinyCheckpoint, tmp_path: Path) -> None:
    report = built(dense.folder, tmp_path / "x.ninfer", recipe="bf16")
    card = model_card(report, FACTS)
    assert "tensors are exact copies of the source." in card
    assert rows_under(card, "Recipe and errors") == {}


@pytest.mark.parametrize("identity", ["qwen3.6-27b/nvfp4", "qwen3.6-35b-a3b/groupwise-int"])
def test_published_contracts_have_a_row_per_quantized_role(identity: str) -> None:
    report = planned_report(identity)
    rows = rows_under(model_card(report, FACTS), "Recipe and errors")
    roles = role_summaries(stored_tensors(report))
    assert list(rows)[1:] == [role.role for role in roles]
    assert len(roles) > 15
    assert 4.25 < total_bits_per_weight(stored_tensors(report)) < 6


def test_metadata_follows_the_source(dense: TinyCheckpoint, tmp_path: Path) -> None:
    (dense.folder / "README.md").write_text("---\nlicense: other\nlicense_name: odd\nlicense_link: LICENSE\n---\n")
    (dense.folder / "LICENSE").write_text("The Odd Licence\n")
    card = model_card(built(dense.folder, tmp_path / "x.ninfer"), FACTS)
    assert front_matter(card) == {
        "license": "other",
        "license_name": "odd",
        "license_link": "LICENSE",
        "library_name": "ninfer",
        "tags": ["ninfer", "qwen3_5", "groupwise-int"],
    }
    assert "- checkpoint: `other`, `odd`, `LICENSE`, `LICENSE` (The Odd Licence)" in card


def test_without_a_licence_none_is_claimed(dense: TinyCheckpoint, tmp_path: Path) -> None:
    card = model_card(built(dense.folder, tmp_path / "x.ninfer"), FACTS)
    assert "icence" not in card
    assert "license" not in card


def test_words_from_elsewhere_cannot_become_markup(dense: TinyCheckpoint, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> [x](http://y) | a\n\n# Title `code` ![i](j) ***"
    folder = dense.folder.rename(dense.folder.with_name("a`b|c`` d"))
    (folder / "LICENSE").write_text(evil.replace("\n", " "))
    (folder / "README.md").write_text('---\nlicense: x"\\n--- # y\n---\n')
    recipe = RecipeFile("mix", "w8", None, (Rule("text/output_head", "BF16"),), evil, "00" * 32)
    report = built(folder, tmp_path / "x.ninfer", recipe=recipe)
    report["notes"].append(evil)
    report["draft_head"]["ranking"] = evil
    card = model_card(report, FACTS)
    body = card.split("\n---\n", 1)[1]
    prose = re.sub(
        r"```sh\n.*?```", "", body.partition("## Sizes")[0] + body.partition("## Sources")[2], flags=re.DOTALL
    )
    outside_code = re.sub(r"(`+).*?\1(?!`)", "", prose)
    for raw in ("<", r"\[", r"\]\(http", "\n# Title", r"\*"):
        assert not re.search(rf"(?<!\\){raw}", outside_code), raw
    assert body.count("\n# ") == 1
    assert front_matter(card)["license"].startswith("x")
    tables = [line for line in body.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    cells = {line.replace("\\|", "").count(" | ") for line in tables}
    assert cells <= {1, 2, 3, 6}
    assert "```` a`b\\|c`` d ````" not in body
    assert "a`b\\|c`` d" in body
