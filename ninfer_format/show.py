"""Where the bytes of an artifact are: totals by component, format and role, as JSON and as bars on a terminal."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_format.directory import Entry, Identity, TensorEntry, entry_members
from ninfer_format.inventory import COMPONENTS, component_of
from ninfer_format.reader import Artifact

SHOW_SCHEMA = "ninfer.show/1"
_LAYER = re.compile(r"(?<=/layers/)\d+(?=/)")
_EIGHTHS = " ▏▎▍▌▋▊▉"
LARGEST_ROLES = 12
TITLES = {"draft_head": "draft head", "mtp": "MTP", "dflash": "DFlash", "model": "model config"}


@dataclass(frozen=True, slots=True)
class Share:
    """A named part of the file: how many objects, how many payload bytes."""

    name: str
    n_objects: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Overview:
    """Totals of one artifact in bytes; ``framing_bytes`` is all that belongs to no object."""

    path: Path
    identity: Identity
    file_bytes: int
    payload_offset: int
    framing_bytes: int
    components: tuple[Share, ...]
    formats: tuple[Share, ...]
    roles: tuple[Share, ...]
    objects: tuple[Entry, ...]


def format_of(entry: Entry) -> str:
    """Numeric format of a tensor, encoding of a resource."""
    return entry.format if isinstance(entry, TensorEntry) else entry.encoding


def role_pattern(name: str) -> str:
    """The object's name with its layer number replaced by ``*``."""
    return _LAYER.sub("*", name)


def _shares(objects: Iterable[Entry], key: Callable[[Entry], str]) -> tuple[Share, ...]:
    """Totals per key, largest first."""
    totals: dict[str, tuple[int, int]] = {}
    for entry in objects:
        count, n_bytes = totals.get(key(entry), (0, 0))
        totals[key(entry)] = (count + 1, n_bytes + entry.n_bytes)
    shares = (Share(name, count, n_bytes) for name, (count, n_bytes) in totals.items())
    return tuple(sorted(shares, key=lambda share: -share.n_bytes))


def overview(artifact: Artifact) -> Overview:
    """Add up the directory of an open artifact; no payload is read."""
    objects = tuple(artifact.objects)
    order = {name: i for i, name in enumerate((*COMPONENTS, "other"))}
    components = _shares(objects, lambda entry: component_of(entry.name))
    return Overview(
        artifact.path,
        artifact.identity,
        artifact.file_bytes,
        artifact.payload_offset,
        artifact.file_bytes - sum(entry.n_bytes for entry in objects),
        tuple(sorted(components, key=lambda share: order[share.name])),
        _shares(objects, format_of),
        _shares(objects, lambda entry: role_pattern(entry.name)),
        objects,
    )


def to_json(shown: Overview, *, with_objects: bool) -> dict[str, Any]:
    """The document of ``show --json`` (schema ``ninfer.show/1``)."""

    def table(shares: Iterable[Share]) -> list[dict[str, Any]]:
        return [{"name": s.name, "objects": s.n_objects, "bytes": s.n_bytes} for s in shares]

    document: dict[str, Any] = {
        "schema": SHOW_SCHEMA,
        "path": str(shown.path),
        "identity": str(shown.identity),
        "file_bytes": shown.file_bytes,
        "payload_offset": shown.payload_offset,
        "header_and_padding_bytes": shown.framing_bytes,
        "components": table(shown.components),
        "formats": table(shown.formats),
        "roles": table(shown.roles),
    }
    if with_objects:
        document["objects"] = [entry_members(entry) for entry in shown.objects]
    return document


def human_bytes(n: int) -> str:
    """A byte count for people: ``17,495,365,888 bytes`` is ``16.3 GiB``."""
    size, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"


def bar(fraction: float, width: int, *, ascii_only: bool) -> str:
    """A bar of at most ``width`` columns; anything above zero shows."""
    if ascii_only:
        return ("#" * max(1, round(fraction * width)) if fraction > 0 else "").ljust(width)
    eighths = max(1, round(fraction * width * 8)) if fraction > 0 else 0
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _table(title: str, shares: Iterable[Share], total: int, width: int, *, ascii_only: bool) -> list[str]:
    rows = [(TITLES.get(s.name, s.name), s) for s in shares]
    name_width = min(max((len(name) for name, _ in rows), default=0), max(12, width - 44))
    bar_width = max(4, min(40, width - name_width - 36))
    lines = [title]
    for name, share in rows:
        shown = name if len(name) <= name_width else name[: name_width - 1] + "~"
        fraction = share.n_bytes / total if total else 0.0
        drawn = bar(fraction, bar_width, ascii_only=ascii_only)
        count = f"{share.n_objects:>6}×" if not ascii_only else f"{share.n_objects:>6}x"
        lines.append(
            f"  {shown:<{name_width}} {drawn} {100 * fraction:5.1f} % {human_bytes(share.n_bytes):>10} {count}"
        )
    return lines


def render(shown: Overview, *, width: int, ascii_only: bool, with_objects: bool) -> str:
    """The text of ``show`` for a terminal of ``width`` columns."""
    rest = Share("header, padding", 0, shown.framing_bytes)
    lines = [
        f"{shown.path}",
        f"  identity  {shown.identity}",
        f"  size      {shown.file_bytes:,} bytes ({human_bytes(shown.file_bytes)}), {len(shown.objects)} objects, "
        f"payload at {shown.payload_offset:,}",
    ]
    total = shown.file_bytes
    lines += _table("by component", (*shown.components, rest), total, width, ascii_only=ascii_only)
    lines += _table("by format", shown.formats, total, width, ascii_only=ascii_only)
    largest = shown.roles[:LARGEST_ROLES]
    title = "largest roles" if len(largest) < len(shown.roles) else "by role"
    lines += _table(title, largest, total, width, ascii_only=ascii_only)
    if with_objects:
        lines.append("objects (payload offset, bytes, format, shape, name)")
        for entry in shown.objects:
            shape = str(list(entry.shape)) if isinstance(entry, TensorEntry) else "-"
            lines.append(f"  {entry.offset:>14} {entry.n_bytes:>13} {format_of(entry):<12} {shape:<16} {entry.name}")
    return "\n".join(lines)
