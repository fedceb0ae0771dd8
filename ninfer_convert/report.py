"""The conversion report ``OUT.conversion.json``: what was converted from what, how, and how far from the source.

Descriptive only; nothing reads it back. Schema ``ninfer.conversion/1``, described in ``specs/conversion.md``.
"""

import json
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ninfer_convert.fingerprint import package_version
from ninfer_convert.hub import spelled
from ninfer_convert.journal import Finished
from ninfer_convert.plan import ConversionPlan, Target
from ninfer_convert.recipe_file import RecipeFile
from ninfer_convert.source_facts import content_sha256, source_facts
from ninfer_convert.sources.logical import LogicalCheckpoint
from ninfer_format import Recipe, TensorEntry
from ninfer_format.inventory import component_of

SCHEMA = "ninfer.conversion/1"
_PACKAGES = ("ninfer", "numpy", "torch")


def report_of(out: Path) -> Path:
    """Where the report of an artifact lies."""
    return out.with_name(f"{out.name}.conversion.json")


def conversion_report(
    plan: ConversionPlan,
    finished: Mapping[str, Finished],
    *,
    n_resumed: int,
    n_workers: int,
    elapsed_seconds: float,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The report document of a completed build. Sizes in bytes, errors in units of the weights."""
    target, options = plan.require(), plan.options
    return {
        "schema": SCHEMA,
        "identity": str(target.identity),
        "published": target.published,
        "recipe": _recipe(target, options.recipe),
        "output": {
            "path": str(options.out),
            "bytes": target.inventory.file_bytes,
            "payload_offset": target.inventory.payload_offset,
            "directory_sha256": target.inventory.directory_sha256,
        },
        "arguments": {
            "source": spelled(options.source),
            "identity": str(options.identity) if options.identity else None,
            "recipe": _name_of(options.recipe),
            "model_id": options.model_id,
            "frontend": str(options.frontend) if options.frontend else None,
            "base": spelled(options.base) if options.base else None,
            "dflash": spelled(options.dflash) if options.dflash else None,
            "ranking": str(options.ranking) if options.ranking else None,
            "method": options.method,
            "activation_stats": str(options.activation_stats) if options.activation_stats else None,
            "device": options.device,
            "no_mtp": options.no_mtp,
            "no_vision": options.no_vision,
        },
        "source": _source(plan.prepacked or plan.checkpoint),
        "base": _source(plan.checkpoint) if plan.prepacked is not None else None,
        "dflash": _source(plan.dflash) if plan.dflash is not None else None,
        "activations": _activations(target),
        "config": _config(target),
        "draft_head": _draft_head(target),
        "statistics": _statistics(target),
        "objects": [_object(target, index, finished) for index in range(len(target.inventory.objects))],
        "notes": list(notes),
        "resumed_objects": n_resumed,
        "elapsed_seconds": round(elapsed_seconds, 3),
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "byte_order": sys.byteorder,
            "workers": n_workers,
            **{name: package_version(name) for name in _PACKAGES},
        },
    }


def dump_report(document: Mapping[str, Any]) -> bytes:
    """The report as UTF-8 JSON, indented by 2, with a trailing newline."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _source(checkpoint: LogicalCheckpoint) -> dict[str, Any]:
    return {
        **(checkpoint.facts or source_facts(checkpoint.folder)),
        "folder": str(checkpoint.folder),
        "tensors": len(checkpoint.tensors),
        "dtypes": dict(Counter(ref.dtype for ref in checkpoint.tensors.values())),
        "kinds": dict(Counter(ref.kind for ref in checkpoint.tensors.values())),
        "bytes": checkpoint.source_bytes,
        "shards": [
            {
                "file": s.file,
                "bytes": s.file_bytes,
                "tensors": s.n_tensors,
                "header_sha256": s.header_sha256,
                "sha256": content_sha256(checkpoint.folder / s.file),
            }
            for s in checkpoint.shards
        ],
        "ignored_files": list(checkpoint.ignored),
    }


def _name_of(recipe: str | RecipeFile | Recipe | None) -> str | None:
    return recipe.name if isinstance(recipe, Recipe) else str(recipe) if recipe else None


def _recipe(target: Target, wanted: str | RecipeFile | Recipe | None) -> dict[str, Any]:
    recipe = target.config.recipe
    document = {"name": recipe.name, "formats": dict(recipe.formats), "exceptions": dict(recipe.exceptions)}
    if not isinstance(wanted, RecipeFile):
        return document | {"file": None}
    file = {"sha256": wanted.sha256, "base": wanted.base, "description": wanted.description}
    return document | {"file": file | {"rules": {rule.pattern: rule.format for rule in wanted.rules}}}


def _config(target: Target) -> dict[str, Any]:
    config = target.config
    return {
        "text_config": config.text_config,
        "vision_config": config.vision_config,
        "token_ids": config.token_ids,
        "dflash": config.dflash,
        "draft_head_rows": config.draft_head_rows,
    }


def _activations(target: Target) -> dict[str, Any] | None:
    stats = target.coding.stats
    if stats is None:
        return None
    facts = {"model": stats.model, "tokens": stats.n_tokens, "sites": len(stats.sites)}
    return {"sha256": target.coding.stats_sha256, **facts}


def _draft_head(target: Target) -> dict[str, Any] | None:
    if target.draft_ids is None or target.ranking is None:
        return None
    ranking = target.ranking
    return {"rows": int(target.draft_ids.size), "ranking": ranking.label, "ranking_sha256": ranking.sha256}


def _statistics(target: Target) -> dict[str, Any]:
    inventory = target.inventory
    formats: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    layouts: Counter[str] = Counter()
    components: Counter[str] = Counter()
    for entry in inventory.objects:
        components[component_of(entry.name)] += entry.n_bytes
    for tensor in inventory.tensors:
        formats[tensor.format][0] += 1
        formats[tensor.format][1] += tensor.n_bytes
        layouts[tensor.layout] += 1
    tensor_bytes, resource_bytes = (sum(e.n_bytes for e in part) for part in (inventory.tensors, inventory.resources))
    return {
        "objects": len(inventory.objects),
        "tensors": len(inventory.tensors),
        "resources": len(inventory.resources),
        "formats": {name: {"objects": count, "bytes": n_bytes} for name, (count, n_bytes) in formats.items()},
        "layouts": dict(layouts),
        "encodings": dict(Counter(e.encoding for e in inventory.resources)),
        "component_bytes": dict(components),
        "tensor_bytes": tensor_bytes,
        "resource_bytes": resource_bytes,
        "object_bytes": tensor_bytes + resource_bytes,
        "span_bytes": inventory.payload_bytes,
        "gap_bytes": inventory.payload_bytes - tensor_bytes - resource_bytes,
    }


def _object(target: Target, index: int, finished: Mapping[str, Finished]) -> dict[str, Any]:
    entry, source = target.inventory.objects[index], target.sources[index]
    document: dict[str, Any] = {"name": entry.name, "bytes": entry.n_bytes, "sha256": finished[entry.name].sha256}
    if isinstance(entry, TensorEntry):
        document |= {
            "shape": list(entry.shape),
            "format": entry.format,
            "transform": source.transform,
            "origin": source.origin,
            "sources": list(source.tensors),
        }
    error = finished[entry.name].error
    return document if error is None else document | {"error": dict(error)}
