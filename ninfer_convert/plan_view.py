"""A conversion plan as text for people and as JSON for scripts."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ninfer_convert.families import ObjectSource
from ninfer_convert.plan import ConversionPlan, Target
from ninfer_convert.problems import Problem
from ninfer_convert.source_facts import hub_origin
from ninfer_convert.sources.logical import LogicalCheckpoint
from ninfer_format import TensorEntry
from ninfer_format.inventory import component_of

SCHEMA = "ninfer.plan/1"
_PREFIXES = {"dflash": "dflash: ", "packed": "nvfp4: "}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(n_bytes: int) -> str:
    """``n_bytes`` exactly, and rounded to a binary unit: ``17,495,365,888 B (16.3 GiB)``."""
    value, unit = float(n_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{n_bytes:,} B" + (f" ({value:.1f} {_UNITS[unit]})" if unit else "")


def render(plan: ConversionPlan, *, objects: bool = True) -> str:
    """The plan as plain text; ``objects`` adds the table of every object and its source tensors."""
    both = [("source", plan.checkpoint)]
    if plan.prepacked is not None:
        both = [("source", plan.prepacked), ("base", plan.checkpoint)]
    lines = []
    for label, held in both:
        facts = f"{len(held.tensors)} tensors in {len(held.shards)} files, {size(held.source_bytes)}"
        lines += [f"{label:10} {held.folder}", f"           {facts}"]
    if plan.dflash is not None:
        lines.append(f"dflash     {plan.dflash.folder}, {len(plan.dflash.tensors)} tensors")
    if plan.target is not None:
        lines += _summary(plan, plan.target)
    if plan.notes:
        lines += ["", "notes", *(f"  - {note}" for note in plan.notes)]
    if plan.target is not None:
        lines += ["", *_components(plan.target)]
        if objects:
            lines += ["", *_objects(plan.target)]
    return "\n".join([*lines, "", *render_problems(plan.problems)])


def render_problems(problems: Sequence[Problem]) -> list[str]:
    """One line per problem under a count; a single line if there are none."""
    if not problems:
        return ["no problems found: ready to build"]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return [f"{count}, nothing can be built:", *(f"  - {problem}" for problem in problems)]


def _summary(plan: ConversionPlan, target: Target) -> list[str]:
    kind = "published contract" if target.published else "custom artifact"
    return [
        f"identity   {target.identity} ({kind})",
        f"recipe     {target.config.recipe.name}",
        f"output     {size(plan.output_bytes)}, {len(target.inventory.objects)} objects",
        f"directory  sha256 {target.inventory.directory_sha256}",
        f"disk       {size(plan.disk_bytes)} free space needed in the output folder",
        f"memory     {size(plan.memory_bytes)} at most",
    ]


def _components(target: Target) -> list[str]:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for entry in target.inventory.objects:
        total = totals[component_of(entry.name)]
        total[0], total[1] = total[0] + 1, total[1] + entry.n_bytes
    rows = [(name, f"{count}", f"{n_bytes:,}") for name, (count, n_bytes) in totals.items()]
    return _table(("component", "objects", "bytes"), rows, "<>>")


def _objects(target: Target) -> list[str]:
    rows = []
    for entry, source in zip(target.inventory.objects, target.sources, strict=True):
        if isinstance(entry, TensorEntry):
            shape, form = "×".join(map(str, entry.shape)) or "scalar", entry.format
        else:
            shape, form = "", "resource"
        rows.append((entry.name, shape, form, f"{entry.n_bytes:,}", _origin(source)))
    return _table(("object", "shape", "format", "bytes", "source"), rows, "<><><")


def _origin(source: ObjectSource) -> str:
    if source.transform == "resource":
        return source.name.rpartition("/")[2]
    if source.transform == "draft_ids":
        return "chosen by the ranking"
    tensors = source.tensors
    more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
    prefix = _PREFIXES.get(source.origin, "")
    return prefix + " + ".join(tensors[:4]) + more


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> list[str]:
    """Columns as wide as their longest cell, two spaces apart; ``align`` has ``<`` or ``>`` per column."""
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)).rstrip() for row in cells]


def to_json(plan: ConversionPlan) -> dict[str, Any]:
    """The plan as a JSON document (schema ``ninfer.plan/1``); sizes in bytes, one entry per object in stored order."""
    target = plan.target
    return {
        "schema": SCHEMA,
        "ready": not plan.problems,
        "source": _source_json(plan.prepacked or plan.checkpoint, plan.dflash),
        "base": _source_json(plan.checkpoint, None) if plan.prepacked is not None else None,
        "identity": str(target.identity) if target else None,
        "published": target.published if target else None,
        "recipe": target.config.recipe.name if target else None,
        "output_bytes": plan.output_bytes,
        "disk_bytes": plan.disk_bytes,
        "memory_bytes": plan.memory_bytes,
        "directory_sha256": target.inventory.directory_sha256 if target else None,
        "frontend_sha256": dict(plan.digests),
        "draft_head": _draft_json(target),
        "problems": [
            {"code": p.code, "where": p.where, "message": p.message, "advice": p.advice} for p in plan.problems
        ],
        "notes": list(plan.notes),
        "objects": _objects_json(target) if target else [],
    }


def _source_json(checkpoint: LogicalCheckpoint, dflash: LogicalCheckpoint | None) -> dict[str, Any]:
    repository, revision = hub_origin(checkpoint.folder)
    return {
        "folder": str(checkpoint.folder),
        "repository": repository,
        "revision": revision,
        "dflash": str(dflash.folder) if dflash else None,
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.source_bytes,
        "files": [{"file": s.file, "bytes": s.file_bytes, "tensors": s.n_tensors} for s in checkpoint.shards],
        "ignored_files": list(checkpoint.ignored),
    }


def _draft_json(target: Target | None) -> dict[str, Any] | None:
    if target is None or target.draft_ids is None or target.ranking is None:
        return None
    return {
        "rows": int(target.draft_ids.size),
        "ranking": target.ranking.label,
        "ranking_sha256": target.ranking.sha256,
    }


def _objects_json(target: Target) -> list[dict[str, Any]]:
    documents = []
    for entry, source in zip(target.inventory.objects, target.sources, strict=True):
        document: dict[str, Any] = {
            "name": entry.name,
            "kind": entry.kind,
            "offset": entry.offset,
            "bytes": entry.n_bytes,
        }
        if isinstance(entry, TensorEntry):
            document |= {"shape": list(entry.shape), "format": entry.format, "layout": entry.layout}
            document |= {"transform": source.transform, "origin": source.origin, "sources": list(source.tensors)}
        documents.append(document)
    return documents
