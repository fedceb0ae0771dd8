"""Builds with our own encoders: recipe nvfp4 from values, method mse, activation statistics, what the report says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_convert.families import ObjectSource
from ninfer_convert.pipeline import build
from ninfer_convert.plan import ConversionPlan
from ninfer_convert.report import report_of
from ninfer_format import Artifact, SourceError, TensorEntry, UsageError, encode_tensor
from ninfer_format.activation_stats import ActivationStats, SiteStats, dump_activation_stats, site_of
from ninfer_format.formats import NUMERIC_FORMATS
from ninfer_format.numeric.direct import widen_bf16
from ninfer_format.numeric.grouped_mse import quantize_groups_mse
from ninfer_format.numeric.nvfp4_divisor import max_divisor
from ninfer_format.numeric.nvfp4_encode import Method, encode_nvfp4
from tests.convert.nvfp4 import Matrix, stored, wide_config
from tests.convert.tiny import TinyCheckpoint, Words, frontend_files, random_words, shapes_of, unfuse_experts

PlanOf = Callable[..., ConversionPlan]
Floats = NDArray[np.float32]


def wide(folder: Path, *, moe: bool = False, seed: int = 0) -> TinyCheckpoint:
    """A plain checkpoint of four layers that the nvfp4 recipe fits."""
    rng, config = np.random.default_rng(seed), wide_config(moe=moe, n_layers=4)
    tensors = {name: random_words(shape, rng) for name, shape in shapes_of(config).items()}
    return TinyCheckpoint(folder, config, tensors, frontend_files()).save()


@pytest.fixture
def checkpoint(tmp_path: Path) -> TinyCheckpoint:
    return wide(tmp_path / "wide")


def values_of(source: ObjectSource, tensors: Mapping[str, Words], ids: Any = None) -> Floats:
    rows = [tensors[r.tensor].reshape(-1, source.row_width)[r.begin : r.begin + r.count] for r in source.runs]
    matrix = np.concatenate(rows)
    return widen_bf16(np.ascontiguousarray(matrix[ids] if source.transform == "draft_rows" else matrix))


def statistics(plan: ConversionPlan, rng: np.random.Generator) -> ActivationStats:
    """Statistics of every site of a plan's model."""
    sites: dict[str, SiteStats] = {}
    for entry in plan.require().inventory.tensors:
        if (site := site_of(entry.name)) is not None:
            square = np.exp(rng.normal(0, 2, entry.shape[-1])).astype(np.float32)
            sites.setdefault(site, SiteStats(float(np.float32(rng.uniform(1, 90))), 100, square))
    return ActivationStats("some/model", "float32", 100, 64, (), sites)


@pytest.mark.parametrize("method", ["max", "mse"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_nvfp4_objects_equal_the_numpy_encoder(tmp_path: Path, plan_of: PlanOf, method: Method, moe: bool) -> None:
    checkpoint = wide(tmp_path / "wide", moe=moe)
    plan = plan_of(checkpoint, out=tmp_path / "x.ninfer", recipe="nvfp4", method=method)
    target, n_packed = plan.require(), 0
    result = build(plan, step_lanes=2048)
    with Artifact.open(result.path) as artifact:
        for entry, source in zip(target.inventory.objects, target.sources, strict=True):
            if not isinstance(entry, TensorEntry) or not source.runs:
                continue
            if source.transform == "input_divisor":
                assert artifact.tensor(entry.name) == 1
            elif entry.format == "NVFP4":
                words, stored = (
                    encode_nvfp4(values_of(source, checkpoint.tensors), method=method),
                    artifact.words(entry.name),
                )
                assert stored.divisor == words.divisor, entry.name
                assert np.array_equal(stored.codes, words.codes), entry.name
                assert stored.scales is not None
                assert np.array_equal(stored.scales, words.scales), entry.name
                n_packed += 1
            elif NUMERIC_FORMATS[entry.format].kind == "grouped" and method == "max":
                values = values_of(source, checkpoint.tensors, target.draft_ids)
                assert bytes(artifact.payload(entry.name)) == encode_tensor(values, entry.format, entry.layout)
    assert n_packed == (24 if moe else 16)


@pytest.mark.parametrize("method", ["max", "mse"])
def test_nvfp4_bytes_do_not_depend_on_workers_or_pieces(
    checkpoint: TinyCheckpoint, plan_of: PlanOf, method: str
) -> None:
    contents = []
    for jobs, step in ((1, None), (3, 256), (2, 4096)):
        out = checkpoint.folder.parent / "x.ninfer"
        plan = plan_of(checkpoint, out=out, recipe="nvfp4", method=method, jobs=jobs, force=True)
        build(plan, step_lanes=step)
        contents.append(out.read_bytes())
    assert contents[0] == contents[1] == contents[2]


def test_shapes_that_nvfp4_cannot_hold_are_w8(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    plan = plan_of(dense, out=tmp_path / "x.ninfer", recipe="nvfp4")
    assert "NVFP4" not in {e.format for e in plan.require().inventory.tensors}
    build(plan)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_groupwise_mse_equals_numpy_and_its_gain_is_reported(
    tiny: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, weighted: bool, fresh_seed: int
) -> None:
    options: dict[str, Any] = {"out": tmp_path / "x.ninfer", "method": "mse"}
    sites: Mapping[str, SiteStats] = {}
    if weighted:
        stats = statistics(plan_of(tiny), np.random.default_rng(fresh_seed))
        sites = stats.sites
        options["activation_stats"] = tmp_path / "stats.json"
        options["activation_stats"].write_bytes(dump_activation_stats(stats))
    plan = plan_of(tiny, **options)
    target, result = plan.require(), build(plan, step_lanes=1024)
    report = json.loads(report_of(result.path).read_text())
    errors = {record["name"]: record.get("error") for record in report["objects"]}
    n_weighted, shares = 0, dict[int, list[float]]()
    with Artifact.open(result.path) as artifact:
        for entry, source in zip(target.inventory.objects, target.sources, strict=True):
            if not isinstance(entry, TensorEntry) or NUMERIC_FORMATS[entry.format].kind != "grouped":
                continue
            values, fmt = values_of(source, tiny.tensors, target.draft_ids), NUMERIC_FORMATS[entry.format]
            site = sites.get(site_of(entry.name) or "")
            importance = site.mean_square if site is not None else None
            n_weighted += importance is not None
            expected, stored = quantize_groups_mse(values, fmt, importance), artifact.words(entry.name)
            assert np.array_equal(stored.codes, expected.codes), entry.name
            assert stored.scales is not None
            assert np.array_equal(stored.scales, expected.scales), entry.name
            shares.setdefault(fmt.bits, []).append(errors[entry.name]["removed"])
            # What the search gains under drawn weights is theirs; without any it is stated object by object.
            least, most = (0.0, 1.0) if weighted else (0.03 if fmt.bits < 6 else 0.0, 0.6)
            assert least <= shares[fmt.bits][-1] < most, entry.name
    assert all(np.mean(found) > 0.03 for bits, found in shares.items() if bits < 6)
    assert (n_weighted > 0) == weighted
    assert report["arguments"]["method"] == "mse"


def test_activation_statistics_give_divisors_and_weights(
    checkpoint: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, fresh_seed: int
) -> None:
    stats = statistics(plan_of(checkpoint, recipe="nvfp4"), np.random.default_rng(fresh_seed))
    file = tmp_path / "stats.json"
    file.write_bytes(dump_activation_stats(stats))
    options: dict[str, Any] = {"out": tmp_path / "x.ninfer", "recipe": "nvfp4", "activation_stats": file}
    plan = plan_of(checkpoint, method="mse", **options)
    source = next(s for s in plan.require().sources if s.name == "text/layers/1/mlp/down")
    site = "text/layers/1/mlp/down_projection/input_scale_divisor"
    expected = encode_nvfp4(
        values_of(source, checkpoint.tensors), method="mse", importance=stats.sites[site].mean_square
    )
    with Artifact.open(build(plan).path) as artifact:
        for name in (n for n in artifact.objects.names() if n.endswith("input_scale_divisor")):
            assert artifact.tensor(name) == max_divisor(np.float32(stats.sites[name].amax))
        assert np.array_equal(artifact.words("text/layers/1/mlp/down").codes, expected.codes)
    report = json.loads(report_of(tmp_path / "x.ninfer").read_text())
    assert report["activations"]["sites"] == len(stats.sites)
    assert 0 < next(r for r in report["objects"] if r["name"] == "text/layers/1/mlp/down")["error"]["removed"] < 1


def test_statistics_of_another_model_or_none_at_all_are_refused(
    checkpoint: TinyCheckpoint, tiny: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    file, stats = tmp_path / "stats.json", statistics(plan_of(tiny), np.random.default_rng(0))
    file.write_bytes(dump_activation_stats(stats))
    (problem,) = plan_of(checkpoint, recipe="nvfp4", activation_stats=file).problems
    assert (problem.code, problem.where) == ("bad-activation-stats", "--activation-stats")
    assert "columns" in problem.message
    file.write_text("{}")
    assert [p.code for p in plan_of(checkpoint, activation_stats=file).problems] == ["bad-activation-stats"]
    missing = plan_of(checkpoint, activation_stats=tmp_path / "none.json").problems
    assert [p.code for p in missing] == ["bad-activation-stats"]


@pytest.mark.parametrize("method", ["max", "mse"])
def test_bad_value_is_found_while_measuring_and_named(
    checkpoint: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, method: str
) -> None:
    name = "model.language_model.layers.3.self_attn.q_proj.weight"
    checkpoint.tensors[name][200, 5] = 0x7F80
    plan = plan_of(checkpoint.save(), out=tmp_path / "x.ninfer", recipe="nvfp4", method=method)
    with pytest.raises(SourceError) as caught:
        build(plan)
    assert repr(name) in str(caught.value)
    assert "[200, 5]" in str(caught.value)
    assert list(tmp_path.glob("*.ninfer*")) == []


def test_all_zero_matrix_has_divisor_one_and_zero_words(
    checkpoint: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    checkpoint.tensors["model.language_model.layers.0.mlp.down_proj.weight"][:] = 0
    for method in ("max", "mse"):
        out = tmp_path / f"{method}.ninfer"
        build(plan_of(checkpoint.save(), out=out, recipe="nvfp4", method=method))
        with Artifact.open(out) as artifact:
            words = artifact.words("text/layers/0/mlp/down")
            assert words.divisor == 1
            assert not words.codes.any()
            assert words.scales is not None
            assert not words.scales.any()


def test_resume_with_another_method_or_other_statistics_is_refused(
    checkpoint: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    out = tmp_path / "x.ninfer"
    options: dict[str, Any] = {"out": out, "recipe": "nvfp4"}

    class Halt(KeyboardInterrupt):
        pass

    def stop(n_bytes: int) -> None:
        stop.total += n_bytes  # type: ignore[attr-defined]
        if stop.total > 200_000:  # type: ignore[attr-defined]
            raise Halt

    stop.total = 0  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        build(plan_of(checkpoint, **options), progress=stop, sync_seconds=0)
    with pytest.raises(UsageError, match="method was max, is now mse"):
        build(plan_of(checkpoint, **options, method="mse", resume=True))
    stats = tmp_path / "stats.json"
    stats.write_bytes(dump_activation_stats(statistics(plan_of(checkpoint), np.random.default_rng(0))))
    with pytest.raises(UsageError, match="activation_stats_sha256"):
        build(plan_of(checkpoint, **options, activation_stats=stats, resume=True))
    resumed = build(plan_of(checkpoint, **options, resume=True))
    assert resumed.n_resumed > 0
    content = out.read_bytes()
    build(plan_of(checkpoint, **options, force=True))
    assert out.read_bytes() == content


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_our_words_stored_as_compressed_tensors_come_back_bit_for_bit(
    tmp_path: Path, plan_of: PlanOf, moe: bool
) -> None:
    checkpoint = wide(tmp_path / "wide", moe=moe)
    unfuse_experts(checkpoint.tensors)
    plan = plan_of(checkpoint.save(), out=tmp_path / "own.ninfer", recipe="nvfp4", model_id="same")
    target = plan.require()
    with Artifact.open(build(plan).path) as artifact:
        for entry, source in zip(target.inventory.objects, target.sources, strict=True):
            if not isinstance(entry, TensorEntry) or entry.format != "NVFP4":
                continue
            words, row = artifact.words(entry.name), 0
            assert words.scales is not None
            assert words.divisor is not None
            for run in source.runs:
                stem, rows = run.tensor.removesuffix(".weight"), slice(row, row + run.count)
                n_rows, width = checkpoint.tensors[run.tensor].shape if run.tensor in checkpoint.tensors else (0, 0)
                if n_rows:
                    del checkpoint.tensors[run.tensor]
                    empty = np.zeros((n_rows, width // 2), np.uint8), np.zeros((n_rows, width // 16), np.uint8)
                    matrix = Matrix(*empty, words.divisor, np.float32(1))
                    checkpoint.tensors |= stored(stem, matrix, "compressed-tensors")
                into = slice(run.begin, run.begin + run.count)
                checkpoint.tensors[f"{stem}.weight_packed"][into] = words.codes[rows]
                checkpoint.tensors[f"{stem}.weight_scale"].view(np.uint8)[into] = words.scales[rows]
                row += run.count
    again = plan_of(checkpoint.save(), out=tmp_path / "again.ninfer", model_id="same")
    assert again.require().config.recipe.name == "nvfp4"
    assert build(again).path.read_bytes() == (tmp_path / "own.ninfer").read_bytes()
