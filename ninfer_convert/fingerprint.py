"""What a build depends on, as the journal records it; and in words, how two builds differ."""

import hashlib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ninfer_convert.plan import ConversionPlan
from ninfer_convert.sources.logical import LogicalCheckpoint

_PARTS = (
    ("source", "source file"),
    ("prepacked", "NVFP4 file"),
    ("dflash", "DFlash file"),
    ("resources", "resource"),
)
_SHARD_MEMBERS = {"bytes": "size", "mtime_ns": "modification time", "header_sha256": "header"}


def package_version(package: str) -> str | None:
    """Installed version of ``package``; None if it is used without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fingerprint_of(plan: ConversionPlan) -> dict[str, Any]:
    """Everything that decides the output's bytes: converter, options, planned directory, resources, ids, source files.

    The device and the number of workers do not; neither does where the folders are.
    """
    target, options = plan.require(), plan.options
    resources = {name: hashlib.sha256(payload).hexdigest() for name, payload in target.resources.items()}
    ids = target.draft_ids
    return {
        "converter": package_version("ninfer"),
        "options": {
            "identity": str(target.identity),
            "recipe": target.config.recipe.name,
            "no_mtp": options.no_mtp,
            "no_vision": options.no_vision,
            "dflash": plan.dflash is not None,
            "ranking_sha256": target.ranking.sha256 if target.ranking else None,
            "method": target.coding.method,
            "activation_stats_sha256": target.coding.stats_sha256,
            "draft_ids_sha256": None if ids is None else hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest(),
        },
        "directory_sha256": target.inventory.directory_sha256,
        "resources": resources,
        "source": _shards(plan.checkpoint),
        "prepacked": _shards(plan.prepacked) if plan.prepacked is not None else {},
        "dflash": _shards(plan.dflash) if plan.dflash is not None else {},
    }


def _shards(checkpoint: LogicalCheckpoint) -> dict[str, Any]:
    return {
        s.file: {"bytes": s.file_bytes, "mtime_ns": s.mtime_ns, "header_sha256": s.header_sha256}
        for s in checkpoint.shards
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed between two fingerprints, one clause each; empty if they are equal."""
    if before == now:
        return []
    return list(_differences(before, now)) or ["the journal was written by another release"]


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if before.get("converter") != now["converter"]:
        yield f"ninfer was {before.get('converter')}, is now {now['converter']}"
    options = _mapping(before.get("options"))
    for name, value in now["options"].items():
        if options.get(name) != value:
            yield f"{name} was {options.get(name)}, is now {value}"
    for part, what in _PARTS:
        yield from _files(what, _mapping(before.get(part)), now[part])
    if before.get("directory_sha256") != now["directory_sha256"]:
        yield "the planned objects are others"


def _files(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in before.keys() - now.keys():
        yield f"{what} {name} is gone"
    for name, facts in now.items():
        if name not in before:
            yield f"{what} {name} is new"
        elif before[name] != facts:
            old = before[name]
            members = [w for key, w in _SHARD_MEMBERS.items() if isinstance(old, dict) and old.get(key) != facts[key]]
            yield f"{what} {name} has another {' and '.join(members) or 'content'}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
