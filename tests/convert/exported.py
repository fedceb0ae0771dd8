"""Artifacts for the tests of what follows a build, and checkpoint folders read without the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.export import ExportOptions, ExportResult, export, plan_export
from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_format import Artifact, ArtifactWriter, Identity, ModelConfig, plan_inventory
from ninfer_format.published import CONFIG_RESOURCE, PUBLISHED

_NUMPY: Mapping[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
Words = NDArray[Any]


def artifact_of(source: Path, out: Path, **options: Any) -> Path:
    """Build ``out`` from a checkpoint folder."""
    plan = make_plan(BuildOptions(source, out, jobs=1, **options))
    assert plan.problems == ()
    build(plan)
    return out


def export_to(artifact: Path, folder: Path, **options: Any) -> ExportResult:
    """Export ``artifact`` to ``folder``."""
    with Artifact.open(artifact) as opened:
        return export(plan_export(opened, ExportOptions(folder, jobs=1, **options)))


def tensors_of(folder: Path) -> dict[str, Words]:
    """Every tensor of the safetensors files in ``folder``; BF16 as uint16 words."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        for name, row in json.loads(content[8:begin]).items():
            if name != "__metadata__":
                first, last = (begin + offset for offset in row["data_offsets"])
                tensors[name] = np.frombuffer(content[first:last], _NUMPY[row["dtype"]]).reshape(row["shape"])
    return tensors


def config_of(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder."""
    document: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return document


def with_payloads(artifact: Path, out: Path, payloads: Mapping[str, bytes]) -> Path:
    """A copy of an artifact with other bytes in some objects, of the same length."""
    with Artifact.open(artifact) as opened, ArtifactWriter(out, opened.directory) as writer:
        for name in opened.objects.names():
            writer.write(name, payloads.get(name, opened.payload(name)))
        writer.commit()
    return out


def sparse_artifact(out: Path, config: ModelConfig, identity: Identity, files: dict[str, bytes]) -> Path:
    """An artifact of any size whose tensors are holes."""
    if identity in PUBLISHED:
        inventory = plan_inventory(identity, resources={name: len(content) for name, content in files.items()})
    else:
        files = files | {CONFIG_RESOURCE: config.to_json()}
        sizes = {name: len(content) for name, content in files.items()}
        inventory = plan_inventory(config.geometry, config.recipe, identity=identity, resources=sizes)
    with ArtifactWriter(out, inventory.directory) as writer:
        for entry in inventory.objects:
            if entry.name in files:
                writer.write(entry.name, files[entry.name])
            else:
                writer.mark_written(entry.name)
        writer.commit()
    return out
