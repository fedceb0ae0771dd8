"""Figures per role, component and format, out of a conversion report: for model cards and pictures."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_format.errors import DirectoryError, UsageError
from ninfer_format.inventory import component_of, role_of
from ninfer_format.reader import open_regular
from ninfer_format.roles import ROLES
from ninfer_format.strict_json import parse_strict

REPORT_SCHEMA = "ninfer.conversion/1"
MAX_REPORT_BYTES = 256 << 20
_MEMBERS: Mapping[str, type] = {
    "identity": str,
    "recipe": dict,
    "output": dict,
    "arguments": dict,
    "source": dict,
    "config": dict,
    "statistics": dict,
    "objects": list,
    "notes": list,
    "environment": dict,
}
Report = Mapping[str, Any]


def read_report(path: Path) -> Report:
    """A conversion report from its file. UsageError when it is not one."""
    with open_regular(path) as stream:
        content = stream.read(MAX_REPORT_BYTES + 1)
    if len(content) > MAX_REPORT_BYTES:
        raise UsageError(f"{path}: is larger than {MAX_REPORT_BYTES} bytes; not a conversion report")
    try:
        report = parse_strict(content, what="report", reals=True)
    except DirectoryError as error:
        raise UsageError(f"{path}: not a conversion report: {error}") from None
    found = report.get("schema") if isinstance(report, dict) else None
    wrong = [
        name
        for name, kind in _MEMBERS.items()
        if not isinstance(report, dict) or not isinstance(report.get(name), kind)
    ]
    if found != REPORT_SCHEMA or wrong:
        what = f"its schema is {found!r:.60}" if found != REPORT_SCHEMA else f"{', '.join(wrong)} is missing"
        raise UsageError(f"{path}: not a conversion report ({REPORT_SCHEMA}): {what}; build the artifact again")
    return dict(report)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor of a report: its role, layer (None outside layers) and, where quantized, its error."""

    name: str
    role: str
    layer: int | None
    component: str
    format: str
    n_values: int
    n_bytes: int
    error: Mapping[str, float] | None

    @property
    def is_matrix(self) -> bool:
        """Whether a recipe decides its format."""
        return self.role in ROLES and ROLES[self.role].is_matrix

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per value, scales and padding included."""
        return 8 * self.n_bytes / self.n_values


@dataclass(frozen=True, slots=True)
class RoleSummary:
    """All quantized objects of one role together; errors as in the report, over all their values.

    ``removed`` is the mean share of squared error that a search took away, None where there was none.
    """

    role: str
    formats: tuple[str, ...]
    n_objects: int
    n_values: int
    n_bytes: int
    largest: float
    rms: float
    relative: float
    worst: StoredTensor
    removed: float | None

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per value, scales and padding included."""
        return 8 * self.n_bytes / self.n_values


def stored_tensors(report: Report) -> list[StoredTensor]:
    """Every tensor of the report in stored order."""
    found = []
    for record in report["objects"]:
        if "shape" not in record:
            continue
        role, layer = role_of(record["name"])
        found.append(
            StoredTensor(
                record["name"],
                role,
                layer,
                component_of(record["name"]),
                record["format"],
                math.prod(record["shape"]),
                record["bytes"],
                record.get("error"),
            )
        )
    return found


def role_summaries(tensors: Iterable[StoredTensor]) -> list[RoleSummary]:
    """One summary per role that has quantized objects, in the order of the inventory's tables."""
    by_role: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        if tensor.error is not None:
            by_role.setdefault(tensor.role, []).append(tensor)
    return [_summary(role, by_role[role]) for role in in_order(by_role)]


def in_order(roles: Iterable[str]) -> list[str]:
    """Roles in the order of the inventory's tables; unknown ones last."""
    position = {role: i for i, role in enumerate(ROLES)}
    return sorted(roles, key=lambda role: position.get(role, len(position)))


def _summary(role: str, own: Sequence[StoredTensor]) -> RoleSummary:
    errors = [(tensor, tensor.error) for tensor in own if tensor.error is not None]
    n_values = sum(tensor.n_values for tensor in own)
    squares = math.fsum(error["rms"] ** 2 * tensor.n_values for tensor, error in errors)
    source = math.fsum(_source_rms(error) ** 2 * tensor.n_values for tensor, error in errors)
    return RoleSummary(
        role,
        tuple(dict.fromkeys(tensor.format for tensor in own)),
        len(own),
        n_values,
        sum(tensor.n_bytes for tensor in own),
        max(error["max"] for _, error in errors),
        math.sqrt(squares / n_values),
        math.sqrt(squares / source) if source else 0.0,
        max(errors, key=lambda pair: pair[1]["relative"])[0],
        _mean_removed(errors),
    )


def _mean_removed(errors: Sequence[tuple[StoredTensor, Mapping[str, float]]]) -> float | None:
    searched = [(tensor.n_values, error["removed"]) for tensor, error in errors if "removed" in error]
    n_values = sum(n for n, _ in searched)
    return math.fsum(n * removed for n, removed in searched) / n_values if n_values else None


def _source_rms(error: Mapping[str, float]) -> float:
    """Root mean square of the source values: recorded, or what the two errors say where it is not."""
    if "source_rms" in error:
        return error["source_rms"]
    return error["rms"] / error["relative"] if error["relative"] else 0.0


def total_bits_per_weight(tensors: Sequence[StoredTensor]) -> float:
    """Stored bits per value over all tensors that hold weights."""
    weights = [tensor for tensor in tensors if tensor.format != "I32"]
    n_values = sum(tensor.n_values for tensor in weights)
    return 8 * sum(tensor.n_bytes for tensor in weights) / n_values if n_values else 0.0


def dump(document: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON, indented by 2, with a trailing newline."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
