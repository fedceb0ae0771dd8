"""From (geometry, recipe) to the exact ordered objects of an artifact, and the comparison with a real directory.

``plan_inventory`` gives names, shapes, formats, offsets and the directory text; the writer writes that plan, the
verifier and the runtime compare with it. Specification: ``specs/inventory.md``.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import overload

from ninfer_format.directory import (
    Directory,
    DirectoryV1,
    Entry,
    Identity,
    ResourceEntry,
    TensorEntry,
    canonical_json,
    canonical_json_v1,
)
from ninfer_format.errors import GeometryError, InventoryError, SignatureError
from ninfer_format.formats import OBJECT_ALIGNMENT, RAW_BYTES, alignment_of, encoded_size, layout_for
from ninfer_format.geometry import MAX_EXTENT, up
from ninfer_format.model_config import ModelConfig
from ninfer_format.model_geometry import ModelGeometry
from ninfer_format.prefix import MAX_JSON_BYTES, payload_offset_for
from ninfer_format.published import FRONTEND_RESOURCES, PUBLISHED, RESOURCE_ORDER, published
from ninfer_format.recipes import Recipe, check_recipe, published_geometry, published_recipe, summary
from ninfer_format.roles import (
    ROLES,
    Role,
    expert_rows,
    layer_count,
    object_name,
    role_of,
    role_on_layer,
    role_shape,
    row_views,
)

__all__ = [
    "COMPONENTS",
    "Inventory",
    "compare_inventory",
    "component_of",
    "expected_inventory",
    "expert_rows",
    "plan_inventory",
    "resident_bytes",
    "resource_sizes",
    "role_of",
    "role_shape",
    "row_views",
]

COMPONENTS = ("frontend", "model", "text", "draft_head", "mtp", "vision", "dflash")
"""Parts of an artifact in physical order; an object's part is decided by its name (``component_of``)."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """A planned artifact.

    ``objects`` carry payload-relative offsets; ``roles`` maps each tensor name to (role, layer or None);
    ``directory_json`` is the canonical version-2 text. All sizes in bytes.
    """

    identity: Identity
    objects: tuple[Entry, ...]
    roles: Mapping[str, tuple[str, int | None]]
    directory_json: bytes

    @property
    def directory(self) -> Directory:
        """The planned directory."""
        return Directory(self.identity, self.objects)

    @property
    def directory_sha256(self) -> str:
        """SHA-256 (hex) of ``directory_json``."""
        return hashlib.sha256(self.directory_json).hexdigest()

    @property
    def payload_offset(self) -> int:
        """File offset of the payload area."""
        return payload_offset_for(len(self.directory_json))

    @property
    def payload_bytes(self) -> int:
        """Extent of the payload area: the end of the last object."""
        return self.objects[-1].offset + self.objects[-1].n_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the whole file; it ends with its last object."""
        return self.payload_offset + self.payload_bytes

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """The tensor objects in order."""
        return tuple(e for e in self.objects if isinstance(e, TensorEntry))

    @property
    def resources(self) -> tuple[ResourceEntry, ...]:
        """The resource objects in order."""
        return tuple(e for e in self.objects if isinstance(e, ResourceEntry))

    @property
    def directory_v1_json(self) -> bytes:
        """The same objects as a version-1 directory; InventoryError for NVFP4, which version 1 cannot hold."""
        if any(e.format == "NVFP4" for e in self.tensors):
            raise InventoryError(f"{self.identity} has NVFP4 objects; version 1 has no such format")
        return canonical_json_v1(DirectoryV1(self.identity.model_id, self.objects))

    @property
    def directory_v1_sha256(self) -> str:
        """SHA-256 (hex) of ``directory_v1_json``."""
        return hashlib.sha256(self.directory_v1_json).hexdigest()


@overload
def plan_inventory(
    subject: Identity | str, recipe: None = None, *, identity: None = None, resources: Mapping[str, int] | None = None
) -> Inventory: ...


@overload
def plan_inventory(
    subject: ModelGeometry,
    recipe: Recipe,
    *,
    identity: Identity | None = None,
    resources: Mapping[str, int] | None = None,
) -> Inventory: ...


def plan_inventory(
    subject: Identity | str | ModelGeometry,
    recipe: Recipe | None = None,
    *,
    identity: Identity | None = None,
    resources: Mapping[str, int] | None = None,
) -> Inventory:
    """Plan a published identity, or any (geometry, recipe).

    ``resources`` maps resource names to sizes in bytes (their order does not matter); a published identity has all
    six frontend files, of the published sizes unless given, a custom artifact those that are given. ``identity``
    names a custom artifact; without it the model id is ``custom`` and the weights id the recipe's name.
    Raises InventoryError when geometry, recipe or resources do not go together.
    """
    if not isinstance(subject, ModelGeometry):
        row = published(subject)
        sizes = {name: r.n_bytes for name, r in row.resources.items()} if resources is None else dict(resources)
        if sorted(sizes) != sorted(FRONTEND_RESOURCES):
            raise InventoryError(
                f"{row.identity} has exactly the resources {', '.join(FRONTEND_RESOURCES)}; found {', '.join(sizes)}"
            )
        return _plan(row.identity, published_geometry(row.identity), published_recipe(row.identity), sizes)
    if recipe is None:
        raise InventoryError("a geometry alone does not decide an inventory; pass a recipe with it")
    return _plan(identity or Identity("custom", recipe.name), subject, recipe, dict(resources or {}))


def _plan(identity: Identity, geometry: ModelGeometry, recipe: Recipe, resources: Mapping[str, int]) -> Inventory:
    if problems := check_recipe(geometry, recipe):
        raise InventoryError(f"recipe {recipe.name!r} does not fit the model: " + summary(problems))
    if unknown := [name for name in resources if name not in RESOURCE_ORDER]:
        raise InventoryError(f"{unknown[0]!r} is not a resource of an artifact; expected {', '.join(RESOURCE_ORDER)}")
    if empty := [name for name, n_bytes in resources.items() if n_bytes < 1]:
        raise InventoryError(f"resource {empty[0]!r} is empty; an artifact stores nonempty files only")
    objects: list[Entry] = []
    roles: dict[str, tuple[str, int | None]] = {}
    end = 0
    for name in (n for n in RESOURCE_ORDER if n in resources):
        offset = up(end, alignment_of(RAW_BYTES))
        objects.append(ResourceEntry(name, RAW_BYTES, offset, resources[name]))
        end = offset + resources[name]
    for role, layer, format in _tensors(geometry, recipe):
        name, shape, layout = object_name(role, layer), role_shape(geometry, role), layout_for(format)
        try:
            n_bytes = encoded_size(format, layout, shape)
        except (SignatureError, GeometryError) as error:
            raise InventoryError(f"object {name!r} cannot be stored: {error}") from None
        offset = up(end, alignment_of(layout))
        objects.append(TensorEntry(name, shape, format, layout, offset, n_bytes))
        roles[name] = (role, layer)
        end = offset + n_bytes
    if end > MAX_EXTENT:
        raise InventoryError(f"the objects of this model take {end} bytes, beyond 2^63 - 1")
    text = canonical_json(Directory(identity, tuple(objects)))
    if len(text) > MAX_JSON_BYTES:
        raise InventoryError(f"the directory of this model takes {len(text)} bytes; the limit is {MAX_JSON_BYTES}")
    return Inventory(identity, tuple(objects), MappingProxyType(roles), text)


def _tensors(geometry: ModelGeometry, recipe: Recipe) -> Iterator[tuple[str, int | None, str]]:
    """(role, layer, format) of every tensor: runs of roles under one ``…/layers/*/`` repeat per layer."""
    for prefix, run in groupby(recipe.formats, key=lambda pair: ROLES[pair[0]].layer_prefix):
        roles = tuple(ROLES[role] for role, _ in run)
        layers = (None,) if prefix is None else range(layer_count(geometry, prefix))
        for layer in layers:
            for role in roles:
                if layer is None or role_on_layer(geometry, role, layer):
                    yield from _formatted(recipe, role, layer)


def _formatted(recipe: Recipe, role: Role, layer: int | None) -> Iterator[tuple[str, int | None, str]]:
    if role.divisor_of is None or recipe.format_of(role.divisor_of, layer) == "NVFP4":
        yield role.name, layer, recipe.format_of(role.name, layer)


def resource_sizes(objects: Iterable[Entry]) -> dict[str, int]:
    """Name → bytes of those resources an artifact may have; others are left for ``compare_inventory`` to report."""
    return {e.name: e.n_bytes for e in objects if isinstance(e, ResourceEntry) and e.name in RESOURCE_ORDER}


def expected_inventory(directory: Directory, config: ModelConfig) -> Inventory:
    """What a file with this directory must hold: ``config``'s objects with the file's own resource lengths.

    A published identity is expected to have its six frontend files; the sizes of those it lacks are the published ones.
    """
    sizes = resource_sizes(directory.objects)
    if directory.identity in PUBLISHED:
        row = published(directory.identity)
        return plan_inventory(
            row.identity, resources={name: sizes.get(name, r.n_bytes) for name, r in row.resources.items()}
        )
    return plan_inventory(config.geometry, config.recipe, identity=directory.identity, resources=sizes)


def compare_inventory(expected: Inventory, directory: Directory, *, packed: bool, limit: int = 20) -> list[str]:
    """Differences as sentences, at most ``limit`` and then a count; empty when the directory is as expected.

    Objects are matched by name. ``packed`` also demands inventory order and the offsets a writer gives them; without
    it, order and gaps are free, as for a generic reader.
    """
    problems: list[str] = []
    if directory.identity != expected.identity:
        problems.append(f"the identity is {directory.identity}, expected {expected.identity}")
    found = {e.name: e for e in directory.objects}
    wanted = {e.name: e for e in expected.objects}
    problems += [f"object {name!r} is missing" for name in wanted if name not in found]
    problems += [f"object {name!r} is unexpected" for name in found if name not in wanted]
    for name, entry in wanted.items():
        if name in found:
            problems += _entry_problems(entry, found[name], packed=packed)
    if packed and not problems:
        for position, (entry, other) in enumerate(zip(expected.objects, directory.objects, strict=True)):
            if entry.name != other.name:
                problems.append(f"object {position} is {other.name!r}, expected {entry.name!r}")
                break
    if len(problems) > limit:
        problems[limit:] = [f"and {len(problems) - limit} more differences"]
    return problems


_FIELDS = {
    "tensor": ("shape", "format", "layout", "n_bytes"),
    "resource": ("encoding", "n_bytes"),
}


def _entry_problems(expected: Entry, found: Entry, *, packed: bool) -> Iterator[str]:
    if expected.kind != found.kind:
        yield f"object {expected.name!r} is a {found.kind}, expected a {expected.kind}"
        return
    for name in _FIELDS[expected.kind] + (("offset",) if packed else ()):
        want, have = getattr(expected, name), getattr(found, name)
        if want != have:
            label = "bytes" if name == "n_bytes" else name
            yield f"object {expected.name!r} has {label} {_spell(have)}, expected {_spell(want)}"


def _spell(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def component_of(name: str) -> str:
    """Component of an object: one of COMPONENTS, or ``other`` for names outside the contract."""
    if name in ("text/draft_head", "text/draft_head_token_ids"):
        return "draft_head"
    head = name.partition("/")[0]
    return head if head in COMPONENTS else "other"


def resident_bytes(inventory: Inventory, components: Iterable[str] = COMPONENTS) -> int:
    """Bytes of one device block that holds the tensors of ``components``, each at the next multiple of 256.

    Activation divisors are read at load time and not placed.
    """
    chosen, cursor = set(components), 0
    for entry in inventory.tensors:
        if component_of(entry.name) in chosen and ROLES[inventory.roles[entry.name][0]].divisor_of is None:
            cursor = up(cursor, OBJECT_ALIGNMENT) + entry.n_bytes
    return cursor
