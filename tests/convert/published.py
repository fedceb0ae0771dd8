"""Built artifacts with their reports, for the tests of what goes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_convert.report import report_of
from ninfer_format import TensorEntry
from ninfer_format.inventory import plan_inventory

ERRORS = {"Q4G64_F16S": 0.11, "Q5G64_F16S": 0.05, "Q6G64_F16S": 0.025, "W8G32_F16S": 0.0054, "NVFP4": 0.1}


def built(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Build ``out`` and return its report."""
    build(make_plan(BuildOptions(folder, out, **options)))
    report: dict[str, Any] = json.loads(report_of(out).read_text())
    return report


def planned_report(identity: str) -> dict[str, Any]:
    """A report as a build of a published identity would leave it, with errors that fit the formats."""
    inventory = plan_inventory(identity)
    objects: list[dict[str, Any]] = []
    formats: dict[str, dict[str, int]] = {}
    for number, entry in enumerate(inventory.objects):
        record: dict[str, Any] = {"name": entry.name, "bytes": entry.n_bytes, "sha256": f"{number:064x}"}
        if isinstance(entry, TensorEntry):
            record |= {"shape": list(entry.shape), "format": entry.format}
            total = formats.setdefault(entry.format, {"objects": 0, "bytes": 0})
            total["objects"], total["bytes"] = total["objects"] + 1, total["bytes"] + entry.n_bytes
            if entry.format in ERRORS:
                relative = ERRORS[entry.format] * (1 + number % 7 / 20)
                record["error"] = {"max": 0.3, "rms": relative * 0.02, "relative": relative, "source_rms": 0.02}
        objects.append(record)
    return {
        "schema": "ninfer.conversion/1",
        "identity": identity,
        "published": True,
        "recipe": {"name": identity.partition("/")[2], "formats": {}, "exceptions": {}, "file": None},
        "output": {"bytes": inventory.file_bytes, "payload_offset": 4096, "directory_sha256": "0" * 64},
        "arguments": {"source": "here", "identity": identity},
        "source": {"name": "Model", "repository": "org/Model", "revision": "a" * 40, "licence": None, "shards": []},
        "config": {"text_config": {"num_hidden_layers": 64, "hidden_size": 5120}},
        "statistics": {"formats": formats},
        "objects": objects,
        "notes": [],
        "environment": {"ninfer": "0.1.0"},
    }
