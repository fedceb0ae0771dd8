"""Which decoder matrices are NVFP4, and which of them take over stored words (specs/conversion.md, Sources).

A source whose decoder is stored as NVFP4 decides matrix by matrix: what its makers kept at high precision stays so.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ninfer_convert.families import ObjectSource, Origin, Transform
from ninfer_convert.families.qwen3_5 import Names, object_sources
from ninfer_convert.problems import some_names
from ninfer_convert.sources.logical import PLAIN, LogicalCheckpoint
from ninfer_format import Inventory, ModelConfig, ResourceEntry, TensorEntry
from ninfer_format.inventory import plan_inventory
from ninfer_format.recipes import W8, Recipe, with_divisors
from ninfer_format.roles import ROLES, role_of

_DECODER = "text/layers/"
_WORDS: Mapping[str, Transform] = {"rows": "packed", "input_divisor": "input_divisor"}
"""Transform from values → transform from stored words."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Final sources in inventory order, and where else the same rows lie.

    ``twins`` are decoder matrices that the prepacked folder stores plain, by object name: they come from the base, and
    these sources must hold the same words.
    """

    sources: tuple[ObjectSource, ...]
    twins: Mapping[str, ObjectSource]

    def needed(self, origin: Origin, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Those of ``shapes`` that sources or twins of ``origin`` read."""
        used = (s for s in (*self.sources, *self.twins.values()) if s.origin == origin)
        return {name: shapes[name] for source in used for name in source.tensors}

    @property
    def imported(self) -> frozenset[str]:
        """Tensors whose stored words are taken over."""
        return frozenset(name for s in self.sources if s.transform == "packed" for name in s.tensors)


def stores_nvfp4(checkpoint: LogicalCheckpoint, names: Names) -> bool:
    """Whether any decoder matrix is stored as NVFP4 words."""
    prefix = names.text + "layers."
    return any(t.packed is not None and name.startswith(prefix) for name, t in checkpoint.tensors.items())


def decoder_matrices(
    inventory: Inventory, sources: Sequence[ObjectSource]
) -> Iterator[tuple[TensorEntry, ObjectSource]]:
    """Stored matrices of the decoder layers with the rows they are fused from."""
    for entry, source in zip(inventory.objects, sources, strict=True):
        matrix = isinstance(entry, TensorEntry) and len(entry.shape) == 2 and entry.name.startswith(_DECODER)
        if matrix and source.transform in ("rows", "packed"):
            assert isinstance(entry, TensorEntry)
            yield entry, source


def follow_allocation(model: ModelConfig, checkpoint: LogicalCheckpoint, names: Names) -> tuple[Recipe, list[str]]:
    """The recipe of ``model``, nvfp4, with every decoder matrix as precise as ``checkpoint`` stores it; and notes.

    NVFP4 where all fused parts are stored so; BF16 where any is stored plain; W8 where they are quantized otherwise.
    """
    inventory = plan_inventory(model.geometry, model.recipe)
    sources = object_sources(model, inventory, checkpoint.tensors.keys() | checkpoint.unavailable, names).sources
    by_role: dict[str, dict[str, str]] = defaultdict(dict)
    mixed: list[str] = []
    for entry, source in decoder_matrices(inventory, sources):
        if entry.format != "NVFP4":
            continue
        found = [t for name in source.tensors if (t := checkpoint.tensors.get(name)) is not None]
        packed = [t.packed is not None for t in found]
        if all(packed):  # also where nothing can be read, which is a problem already
            format = "NVFP4"
        else:
            format = "BF16" if any(t.kind == PLAIN for t in found) else W8
            mixed += [entry.name] if any(packed) else []
        by_role[role_of(entry.name)[0]][entry.name] = format
    notes = [f"{len(mixed)} fused matrices are NVFP4 only in part and kept in BF16: {some_names(mixed, 1)}"]
    return _with_formats(model.recipe, by_role), notes if mixed else []


def _with_formats(recipe: Recipe, by_role: Mapping[str, Mapping[str, str]]) -> Recipe:
    """``recipe`` with the formats of objects by role; a role that is NVFP4 nowhere gets its first object's format."""
    formats, exceptions = dict(recipe.formats), dict[str, str]()
    for role, objects in by_role.items():
        found = list(objects.values())
        formats[role] = "NVFP4" if "NVFP4" in found else found[0]
        exceptions |= {name: format for name, format in objects.items() if format != formats[role]}
    plain = [(role, format) for role, format in formats.items() if ROLES[role].divisor_of is None]
    return Recipe(recipe.name, with_divisors(plain, exceptions), MappingProxyType(exceptions))


def assign(
    inventory: Inventory, own: Sequence[ObjectSource], checkpoint: LogicalCheckpoint,
    beside: Sequence[ObjectSource] = (), prepacked: LogicalCheckpoint | None = None,
) -> Assignment:  # fmt: skip
    """Decide what NVFP4 objects are made from, and with that everything's origin.

    ``own`` are the sources in ``checkpoint``, ``beside`` those of the same objects in ``prepacked``, which then gives
    the words.
    """
    holder = checkpoint if prepacked is None else prepacked
    origin: Origin = "base" if prepacked is None else "packed"
    sources: list[ObjectSource] = []
    twins: dict[str, ObjectSource] = {}
    decoder = {entry.name for entry, _ in decoder_matrices(inventory, own)}
    for entry, source, other in zip(inventory.objects, own, beside or own, strict=True):
        stored = [holder.tensors.get(name) for name in other.tensors]
        words = bool(stored) and all(t is not None and t.packed is not None for t in stored)
        if not isinstance(entry, ResourceEntry) and words and _takes_words(entry, source):
            source = replace(other, transform=_WORDS[source.transform], origin=origin)
        elif prepacked is not None and entry.name in decoder and all(t and t.kind == PLAIN for t in stored):
            twins[entry.name] = replace(other, origin="packed")
        sources.append(source)
    return Assignment(tuple(sources), MappingProxyType(twins))


def _takes_words(entry: TensorEntry, source: ObjectSource) -> bool:
    return source.transform == "input_divisor" or (source.transform == "rows" and entry.format == "NVFP4")
