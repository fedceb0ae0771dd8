"""check: agrees with what build wrote, for every kind of object, and names every byte that is another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_convert.check import CheckOptions, CheckResult, check
from ninfer_convert.cli import app
from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan
from ninfer_convert.problems import PlanError
from ninfer_convert.recipe_file import recipe_option
from ninfer_format import Artifact, TensorEntry, UsageError
from ninfer_format.formats import NUMERIC_FORMATS, blockscale_planes, row_split_planes
from tests.convert.nvfp4 import Pair, nvfp4_pair
from tests.convert.test_nvfp4_encode_build import wide
from tests.convert.tiny import TinyCheckpoint, tiny_dflash

PlanOf = Callable[..., ConversionPlan]


def checked(path: Path, source: Path, **options: Any) -> CheckResult:
    return check(CheckOptions(path, source, **options))


def flip(path: Path, name: str, offset: int, bit: int = 1) -> None:
    """Change one bit of a payload."""
    with Artifact.open(path) as artifact:
        at = artifact.payload_offset + artifact.objects[name].offset + offset
    with open(path, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ bit]))


@pytest.mark.parametrize("everything", [False, True], ids=["sample", "all"])
@pytest.mark.parametrize("recipe", ["groupwise-int", "bf16", "w8", "nvfp4"])
def test_a_fresh_build_agrees(tiny: TinyCheckpoint, tmp_path: Path, recipe: str, everything: bool) -> None:
    out = tmp_path / "x.ninfer"
    build(make_plan(BuildOptions(tiny.folder, out, recipe=recipe)))
    result = checked(out, tiny.folder, everything=everything)
    assert result.mismatches == ()
    assert result.everything == everything
    if everything:
        assert result.compared_bytes > 0.98 * result.total_bytes  # the rest lies between planes


@pytest.mark.parametrize("options", [{"no_mtp": True}, {"no_vision": True}, {"method": "mse"}, {"model_id": "other"}])
def test_options_of_the_build_are_found_out(dense: TinyCheckpoint, tmp_path: Path, options: dict[str, Any]) -> None:
    out = tmp_path / "x.ninfer"
    build(make_plan(BuildOptions(dense.folder, out, **options)))
    result = checked(out, dense.folder)
    assert result.mismatches == ()
    assert result.method == options.get("method", "max")


def test_mixed_recipe_ranking_and_companion_are_found_out(moe: TinyCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\n[formats]\n"text/layers/*/moe/shared_down" = "Q6"\n')
    counts = np.random.default_rng(3).permutation(384).astype("<i8")
    (tmp_path / "counts").write_bytes(counts.tobytes())
    recipe, dflash = recipe_option(str(tmp_path / "mine.toml")), tiny_dflash(tmp_path / "dflash")
    out, ranking = tmp_path / "x.ninfer", tmp_path / "counts"
    build(make_plan(BuildOptions(moe.folder, out, recipe=recipe, ranking=ranking, dflash=dflash)))
    assert checked(out, moe.folder, dflash=dflash, everything=True).mismatches == ()
    assert checked(out, moe.folder, dflash=dflash, ranking=ranking).mismatches == ()
    (tmp_path / "counts").write_bytes(np.zeros(384, "<i8").tobytes())
    found = {m.name for m in checked(out, moe.folder, dflash=dflash, ranking=ranking).mismatches}
    assert found == {"text/draft_head", "text/draft_head_token_ids"}


@pytest.mark.parametrize("method", ["max", "mse"])
def test_nvfp4_of_our_own_agrees(tmp_path: Path, method: str) -> None:
    checkpoint, out = wide(tmp_path / "wide"), tmp_path / "x.ninfer"
    build(make_plan(BuildOptions(checkpoint.folder, out, recipe="nvfp4", method=method)))
    for everything in (False, True):
        result = checked(out, checkpoint.folder, everything=everything)
        assert (result.mismatches, result.method) == ((), method)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return nvfp4_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def imported(pair: Pair) -> bytes:
    out = pair.base.folder.parent / "x.ninfer"
    return build(make_plan(BuildOptions(pair.source.folder, out, base=pair.base.folder))).path.read_bytes()


def places(path: Path) -> dict[str, tuple[str, int, str]]:
    """Kind of byte → object, offset in it, what a check calls it."""
    with Artifact.open(path) as artifact:
        shape = artifact.objects["text/layers/1/mlp/gate_up"].shape  # type: ignore[union-attr]
        embedding = artifact.objects["text/token_embedding"].shape  # type: ignore[union-attr]
    packed, grouped = blockscale_planes(shape), row_split_planes("W8G32_F16S", embedding)
    return {
        "codes": ("text/layers/1/mlp/gate_up", 0, "codes"),
        "last code": ("text/layers/1/mlp/gate_up", packed.code_bytes - 1, "codes"),
        "block scale": ("text/layers/1/mlp/gate_up", packed.scale_offset + 77, "block scales"),
        "divisor": ("text/layers/1/mlp/gate_up", packed.divisor_offset, "divisor"),
        "input divisor": ("text/layers/1/mlp/gate_up_projection/input_scale_divisor", 1, "content"),
        "BF16 matrix": ("text/layers/3/attention/output", 100, "words"),
        "projection": ("text/layers/0/gdn/a_projection", 0, "words"),
        "norm": ("text/layers/2/input_norm", 3, "words"),
        "convolution": ("text/layers/2/gdn/convolution", 9, "content"),
        "grouped code": ("text/token_embedding", 1, "codes"),
        "grouped scale": ("text/token_embedding", grouped.scale_offset + 1, "scales"),
        "resource": ("frontend/chat_template.jinja", 5, "content"),
        "config": ("frontend/generation_config.json", 5, "content"),
        "id table": ("text/draft_head_token_ids", 4, ""),
    }


@pytest.mark.parametrize("everything", [False, True], ids=["sample", "all"])
def test_words_of_the_pair_agree(pair: Pair, imported: bytes, tmp_path: Path, everything: bool) -> None:
    (tmp_path / "x.ninfer").write_bytes(imported)
    result = checked(tmp_path / "x.ninfer", pair.source.folder, base=pair.base.folder, everything=everything)
    assert result.mismatches == ()


KINDS = ("codes", "last code", "block scale", "divisor", "input divisor", "BF16 matrix", "projection", "norm",
         "convolution", "grouped code", "grouped scale", "resource", "config")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_changed_bit_is_named(pair: Pair, imported: bytes, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.ninfer"
    path.write_bytes(imported)
    name, offset, what = places(path)[kind]
    flip(path, name, offset)
    (mismatch,) = checked(path, pair.source.folder, base=pair.base.folder).mismatches
    assert mismatch.name == name
    assert what in str(mismatch)


def test_a_bit_outside_the_sample_is_found_by_all(pair: Pair, tmp_path: Path) -> None:
    checkpoint, out = wide(tmp_path / "wide"), tmp_path / "x.ninfer"
    build(make_plan(BuildOptions(checkpoint.folder, out, recipe="w8")))
    with Artifact.open(out) as artifact:
        planes = row_split_planes("W8G32_F16S", artifact.objects["text/output_head"].shape)  # type: ignore[union-attr]
    flip(out, "text/output_head", 5 * planes.groups_per_row * 32 + 1)
    # Too small to be sampled unless the limit for whole comparison is lowered.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ninfer_convert.recompare._WHOLE_BYTES", 0)
        assert checked(out, checkpoint.folder).mismatches == ()
        (mismatch,) = checked(out, checkpoint.folder, everything=True).mismatches
    assert (mismatch.name, mismatch.what, mismatch.row) == ("text/output_head", "codes", 5)


def test_sample_covers_the_rows_where_parts_meet(tmp_path: Path) -> None:
    checkpoint, out = wide(tmp_path / "wide"), tmp_path / "x.ninfer"
    build(make_plan(BuildOptions(checkpoint.folder, out)))
    name = "text/layers/0/gdn/value_z"
    with Artifact.open(out) as artifact:
        planes = row_split_planes("Q5G64_F16S", artifact.objects[name].shape)  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ninfer_convert.recompare._WHOLE_BYTES", 0)
        for row in (0, 191, 192, 383):  # value has 4 heads of 48 rows
            flip(out, name, row * planes.groups_per_row * 32)
            (mismatch,) = checked(out, checkpoint.folder).mismatches
            assert (mismatch.name, mismatch.row) == (name, row)
            flip(out, name, row * planes.groups_per_row * 32)


def test_padding_between_planes_is_compared_by_all(dense: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    build(make_plan(BuildOptions(dense.folder, out)))
    with Artifact.open(out) as artifact:
        grouped = [e for e in artifact.objects if isinstance(e, TensorEntry) and NUMERIC_FORMATS[e.format].group == 64]
    name, planes = next(
        (e.name, p)
        for e in grouped
        if (p := row_split_planes(e.format, e.shape)).scale_offset > p.high_offset + p.high_bytes
    )
    flip(out, name, planes.high_offset + planes.high_bytes)
    (mismatch,) = checked(out, dense.folder, everything=True).mismatches
    assert (mismatch.name, mismatch.row) == (name, None)


def test_artifact_of_another_checkpoint_or_with_another_directory_differs(
    dense: TinyCheckpoint, tmp_path: Path
) -> None:
    out = tmp_path / "x.ninfer"
    build(make_plan(BuildOptions(dense.folder, out)))
    dense.frontend["chat_template.jinja"] += b" "
    dense.save()
    (mismatch,) = (m for m in checked(out, dense.folder).mismatches if "chat_template" in str(m) and "bytes" in str(m))
    assert mismatch.name == "directory"
    dense.config["text_config"]["intermediate_size"] = 200
    dense.save()
    with pytest.raises(PlanError):
        checked(out, dense.folder)


def test_command_says_what_it_compared_and_exits_by_the_result(
    pair: Pair, imported: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.ninfer"
    path.write_bytes(imported)

    def command(*options: str) -> tuple[int, str]:
        words = ["check", str(path), "--source", str(pair.source.folder), "--base", str(pair.base.folder), *options]
        return app(words, standalone_mode=False), capsys.readouterr().out

    code, text = command()
    assert code == 0
    assert "equal" in text
    assert "--all compares everything" in text
    flip(path, "text/token_embedding", 1)
    code, text = command("--all", "--json")
    document = json.loads(text)
    assert code == 1
    assert (document["schema"], document["equal"], document["all"]) == ("ninfer.check/1", False, True)
    assert [m["name"] for m in document["mismatches"]] == ["text/token_embedding"]
    assert command("--quiet") == (1, "")
    code, text = command()
    assert "text/token_embedding: the codes differ in row 0" in text
    path.unlink()
    with pytest.raises(UsageError):
        command()
