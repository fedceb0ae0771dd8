"""Named views on stored tensors: which rows of which object play which part."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ninfer_format.directory import TensorEntry
from ninfer_format.errors import InventoryError
from ninfer_format.model_geometry import ModelGeometry
from ninfer_format.roles import role_named, role_of, row_views


@dataclass(frozen=True, slots=True)
class View:
    """Rows [begin, end) of the object ``name``; for vectors, elements."""

    name: str
    begin: int
    end: int

    @property
    def n_rows(self) -> int:
        """Rows of the view."""
        return self.end - self.begin


Parts = Mapping[str, View]


def parts_under(prefix: str, entries: Iterable[TensorEntry], geometry: ModelGeometry) -> Parts:
    """Views of every object under ``prefix``: by the rest of its name, and by part where rows have several meanings.

    A matrix whose rows have one meaning that others are fused from (``a_projection``) is also named by that meaning,
    so fused and split artifacts offer the same parts.
    """
    parts: dict[str, View] = {}
    for entry in entries:
        if not entry.name.startswith(prefix):
            continue
        suffix = entry.name.removeprefix(prefix)
        n_rows = entry.shape[0] if entry.shape else 1
        parts[suffix] = View(entry.name, 0, n_rows)
        role = role_of(entry.name)[0]
        for part, begin, end in row_views(geometry, role) or ((role_named(role).dims[0], 0, n_rows),):
            if suffix == part + "_projection" or end - begin < n_rows:
                parts[part] = View(entry.name, begin, end)
    return parts


def take(parts: Parts, part: str, prefix: str) -> View:
    """The view of ``part``, or InventoryError naming what the artifact lacks."""
    try:
        return parts[part]
    except KeyError:
        raise InventoryError(f"no object under {prefix!r} holds {part!r}; it holds {', '.join(parts)}") from None
