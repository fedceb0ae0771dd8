"""The conversion report says what was made of what, how exactly, and can be checked against the artifact."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_convert.pipeline import build
from ninfer_convert.plan import ConversionPlan
from ninfer_convert.report import report_of
from ninfer_format import Artifact
from ninfer_format.numeric.direct import widen_bf16
from tests.convert.tiny import TinyCheckpoint, tiny_dflash

PlanOf = Callable[..., ConversionPlan]


def built(plan: ConversionPlan) -> tuple[Path, dict[str, Any]]:
    """A built artifact and its parsed report."""
    out = build(plan).path
    text = report_of(out).read_bytes()
    assert text.endswith(b"}\n")
    document: dict[str, Any] = json.loads(text)
    assert json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n" == text
    return out, document


def test_report_lies_beside_the_artifact_and_has_a_versioned_schema(
    tiny: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    plan = plan_of(tiny, out=tmp_path / "x.ninfer")
    out, report = built(plan)
    assert report_of(out) == tmp_path / "x.ninfer.conversion.json"
    assert report["schema"] == "ninfer.conversion/1"
    assert report["identity"] == str(plan.require().identity)
    assert report["recipe"]["name"] == "groupwise-int"
    assert report["recipe"]["formats"]["text/draft_head"] == "Q4G64_F16S"
    assert report["output"]["bytes"] == out.stat().st_size
    assert report["output"]["directory_sha256"] == plan.require().inventory.directory_sha256
    assert report["elapsed_seconds"] > 0
    assert report["environment"]["torch"]


def test_object_digests_are_those_of_the_stored_bytes(tiny: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    out, report = built(plan_of(tiny, out=tmp_path / "x.ninfer"))
    with Artifact.open(out) as artifact:
        assert [o["name"] for o in report["objects"]] == [e.name for e in artifact.directory.objects]
        for record in report["objects"]:
            assert hashlib.sha256(artifact.payload(record["name"])).hexdigest() == record["sha256"]


def test_errors_of_quantized_objects_are_those_of_the_decoded_values(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    out, report = built(plan_of(dense, out=tmp_path / "x.ninfer"))
    records = {record["name"]: record for record in report["objects"]}
    assert "error" not in records["text/final_norm"]
    assert "error" not in records["frontend/tokenizer.json"]
    names = {
        "text/token_embedding": "model.language_model.embed_tokens.weight",
        "text/layers/1/mlp/down": "model.language_model.layers.1.mlp.down_proj.weight",
        "vision/layers/0/mlp/fc2": "model.visual.blocks.0.mlp.linear_fc2.weight",
        "mtp/input_projection": "mtp.fc.weight",
    }
    with Artifact.open(out) as artifact:
        for name, tensor in names.items():
            source = widen_bf16(dense.tensors[tensor]).astype(np.float64)
            difference = source - artifact.tensor(name)
            error = records[name]["error"]
            assert error["max"] == pytest.approx(np.abs(difference).max(), rel=1e-5)
            assert error["rms"] == pytest.approx(math.sqrt((difference**2).mean()), rel=1e-4)
            assert error["relative"] == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(source), rel=1e-4)
    assert sum("error" in record for record in records.values()) == sum(
        record.get("format", "").startswith(("Q", "W8")) for record in records.values()
    )


def test_sources_are_recorded_with_sizes_and_header_digests(
    moe: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    companion = tiny_dflash(tmp_path / "companion")
    _, report = built(plan_of(moe, out=tmp_path / "x.ninfer", dflash=companion))
    assert {shard["file"] for shard in report["source"]["shards"]} == set(moe.shards())
    for folder, shards in ((moe.folder, report["source"]["shards"]), (companion, report["dflash"]["shards"])):
        for shard in shards:
            content = (folder / shard["file"]).read_bytes()
            header_bytes = 8 + int.from_bytes(content[:8], "little")
            assert shard["bytes"] == len(content)
            assert shard["header_sha256"] == hashlib.sha256(content[:header_bytes]).hexdigest()
    assert report["source"]["dtypes"] == {"BF16": len(moe.tensors)}


def test_statistics_add_up_to_the_file(tiny: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    out, report = built(plan_of(tiny, out=tmp_path / "x.ninfer"))
    statistics = report["statistics"]
    assert statistics["objects"] == statistics["tensors"] + statistics["resources"] == len(report["objects"])
    assert statistics["object_bytes"] == sum(record["bytes"] for record in report["objects"])
    assert statistics["object_bytes"] == sum(statistics["component_bytes"].values())
    assert statistics["tensor_bytes"] == sum(f["bytes"] for f in statistics["formats"].values())
    assert statistics["span_bytes"] == statistics["object_bytes"] + statistics["gap_bytes"]
    assert report["output"]["payload_offset"] + statistics["span_bytes"] == out.stat().st_size
    assert sum(statistics["layouts"].values()) == statistics["tensors"]


def test_notes_of_the_plan_are_in_the_report(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    plan = plan_of(dense, out=tmp_path / "x.ninfer")
    _, report = built(plan)
    assert report["notes"] == list(plan.notes)
    assert any("ranked by token id" in note for note in report["notes"])
    assert report["draft_head"]["rows"] == plan.require().config.draft_head_rows


def test_two_builds_differ_in_nothing_but_time_and_path(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    _, first = built(plan_of(dense, out=tmp_path / "x.ninfer", jobs=1))
    _, second = built(plan_of(dense, out=tmp_path / "x.ninfer", jobs=3, force=True))
    for report in (first, second):
        del report["elapsed_seconds"], report["environment"]["workers"]
    assert first == second


def test_report_of_an_undecodable_file_name_is_still_utf8(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    out = tmp_path / "caf\udce9.ninfer"
    build(plan_of(dense, out=out))
    report_of(out).read_bytes().decode("utf-8")
