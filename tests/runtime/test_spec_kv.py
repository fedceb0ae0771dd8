"""The examples and tables of specs/kv-cache.md and specs/program.md are those of the code."""

from __future__ import annotations

import doctest
import itertools
import re
from pathlib import Path

import pytest

from ninfer_format.published import PUBLISHED
from ninfer_runtime.backends.base import ProgramLimits
from ninfer_runtime.backends.kv_numeric import head_bytes, token_bytes
from ninfer_runtime.backends.reference.sampling import Purpose
from ninfer_runtime.commands.plan import planned_from
from ninfer_runtime.config import KvStorage
from scripts import score_kv
from tests.runtime.run_command import Ninfer, in_this_process

ROOT = Path(__file__).resolve().parents[2]
STORAGES: tuple[KvStorage, ...] = ("float32", "bf16", "int8", "fp6")
DENSE, SPARSE = "qwen3.6-27b/groupwise-int", "qwen3.6-35b-a3b/groupwise-int"
OTHERS = ("qwen3.6-27b/nvfp4", "qwen3.8-27b/groupwise-int")
NEARLY = 0.03
"""How far the backend's working memory may move the numbers of a plan without a change of the page."""


def page(name: str) -> str:
    return (ROOT / "specs" / f"{name}.md").read_text(encoding="utf-8")


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table whose heading line begins so, numbers without their separators."""
    table = itertools.takewhile(lambda line: line.startswith("|"), text[text.index(heading) :].splitlines()[2:])
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]
    return [[cell.replace(",", "").replace("−", "-") for cell in row] for row in cells]


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ninfer:
    return in_this_process(capsys, monkeypatch)


@pytest.mark.parametrize("name", ["kv-cache", "program"])
def test_examples_print_what_they_say(name: str) -> None:
    result = doctest.testfile(str(ROOT / "specs" / f"{name}.md"), module_relative=False, encoding="utf-8")
    assert result.failed == 0
    assert result.attempted > 1


def test_bytes_of_formats_are_those_of_the_published_models() -> None:
    found = {}
    with planned_from(DENSE) as dense, planned_from(SPARSE) as sparse:
        for storage in STORAGES:
            cells = [head_bytes(storage, 256)]
            for spec in (dense.spec, sparse.spec):
                n_layers, heads = len(spec.attention_layers), (spec.text.n_kv_heads, spec.text.head_dim)
                cells += [token_bytes(storage, n_layers + drafts, *heads) for drafts in (0, 1)]
            found[storage] = cells
    listed = rows(page("kv-cache"), "| format | one head")
    assert {name: [int(cell) for cell in cells] for name, *cells in listed} == found


def test_errors_of_constructed_heads_are_those_that_the_script_prints() -> None:
    listed = rows(page("kv-cache"), "| format | rotated | perplexity dense")
    assert len(listed) == len(score_kv.CHOICES)
    for (storage, rotated, *cells), (kv_dtype, rotation) in zip(listed, score_kv.CHOICES, strict=True):
        assert storage == ("float32" if kv_dtype == "auto" else kv_dtype)
        assert rotated == {"int8": "on" if rotation else "off", "fp6": "on" if rotation else "off"}.get(storage, "")
        found = score_kv.outlier_score(storage, rotation=rotation)
        assert [float(cell) for cell in cells[-2:]] == pytest.approx([found.max_score_error, found.attention], abs=6e-5)


def test_trained_model_is_scored_with_and_without_outliers() -> None:
    """A small run of the whole table."""
    found = score_kv.scored_rows([ROOT / "examples" / "tiny" / "dense"], 2)
    plain, outliers = ([row["models"][name] for row in found] for name in ("dense", "dense + outliers"))
    exact, bf16, int8, int8_rotated, fp6, fp6_rotated = plain
    assert exact["max_logit_error"] == 0.0
    assert bf16["rms_logit_error"] < int8["rms_logit_error"] < fp6["rms_logit_error"]
    assert fp6_rotated["rms_logit_error"] < 0.2
    for score in (*plain, *outliers):
        assert score["perplexity"] == pytest.approx(exact["perplexity"], rel=1e-3)
    assert outliers[2]["rms_logit_error"] > 2 * int8["rms_logit_error"]
    assert outliers[3]["rms_logit_error"] < 0.7 * outliers[2]["rms_logit_error"]
    assert int8_rotated["rms_logit_error"] < 0.02


@pytest.mark.parametrize("name", [DENSE, SPARSE, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_plans_of_the_published_models_are_those_of_the_page(ninfer: Ninfer, name: str) -> None:
    text = page("kv-cache")
    flags = re.findall(r"`(--kv-dtype int8 .*--draft-tokens 3)`", text)[0].split()
    parts, contexts = rows(text, "| model | weights |"), rows(text, "| model | format | 1 sequence")
    assert {row[0] for row in parts} == {row[0] for row in contexts} == {str(identity) for identity in PUBLISHED}
    weights, kv, state, *free = (int(cell) for row in parts if row[0] == name for cell in row[1:])
    run = ninfer("plan", name, "--gpu", "rtx5090", "--gpu", "rtx5060ti", *flags, "--json")
    assert run.code == 0, run.err
    for card, left in zip(run.document["cards"], free, strict=True):
        assert [round(card[part] / 2**20) for part in ("weight_bytes", "kv_bytes")] == [weights, kv]
        assert card["state_bytes"] / 2**20 == pytest.approx(state, rel=NEARLY)
        assert card["free_bytes"] / 2**20 == pytest.approx(left, rel=NEARLY)
        assert card["fits"] == (left >= 0)
    grid = {row[1]: [int(cell) for cell in row[2:]] for row in contexts if row[0] == name}
    found = {
        kv_dtype: list(by_n.values()) for kv_dtype, by_n in run.document["cards"][0]["context_by_kv_dtype"].items()
    }
    assert found.keys() == grid.keys()
    for kv_dtype, tokens in grid.items():
        assert found[kv_dtype] == pytest.approx(tokens, rel=NEARLY)


def test_limits_and_purposes_are_documented() -> None:
    text = page("program")
    listed = {name for row in rows(text, "| limit |") for name in re.findall(r"\w+", row[0])}
    assert listed == set(ProgramLimits.__dataclass_fields__) - {"page_tokens"}
    numbers = {int(n) for row in rows(text, "| purpose |") for n in re.findall(r"\d+", row[0])}
    assert numbers == {int(purpose) for purpose in Purpose}
