"""Which stored tensors belong to one matrix: its weight and the scales beside it, by explicit name endings."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ninfer_convert.checkpoint import TensorRef

WEIGHT = ".weight"
BANK = ""
"""Part name of an expert bank, whose tensor has no ``.weight`` ending."""
MARKER_PARTS = (
    ".weight_scale_inv", ".weight_packed", ".weight_global_scale", ".weight_scale_2", ".weight_scale",
    ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".input_global_scale", ".input_scale", ".input_scale_ub",
    ".activation_scale",
    ".qweight", ".qzeros", ".scales", ".g_idx", ".SCB", ".weight_format",
    ".weight.quant_map", ".weight.nested_quant_map", ".weight.absmax", ".weight.nested_absmax",
    ".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4",
    "_activation_scale", "_scale_inv", "_packed", "_blocks", "_scales",
)  # fmt: skip
"""Endings that say how the tensor without them is stored; the first that fits counts."""
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".kv_scale", ".output_scale")
"""Endings of scales of caches and activations: no part of any weight."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Stored tensors of one matrix: ``stem`` plus the part names are their names."""

    stem: str
    parts: Mapping[str, TensorRef]
    unavailable: frozenset[str] = field(default=frozenset())
    """Part names that the index knows but no readable file holds."""

    @property
    def name(self) -> str:
        """What a plain checkpoint calls the tensor: with ``.weight``, or an expert bank's name as it is."""
        return self.stem if BANK in self.parts or any(p.startswith("_") for p in self.parts) else self.stem + WEIGHT

    @property
    def weight(self) -> TensorRef | None:
        """The tensor under the plain name, whatever it holds."""
        return self.parts.get(WEIGHT) or self.parts.get(BANK)

    def names(self) -> tuple[str, ...]:
        """Names of all parts."""
        return tuple(ref.name for ref in self.parts.values())


def _split(name: str) -> tuple[str, str] | None:
    """Stem and part of a tensor with a marker ending."""
    for part in MARKER_PARTS:
        if name.endswith(part) and len(name) > len(part):
            return name.removesuffix(part), part
    return None


def weight_name(name: str) -> str:
    """What a plain checkpoint calls the tensor that the stored tensor ``name`` is a part of; itself if it is plain."""
    split = _split(name)
    if split is None:
        return name
    stem, part = split
    return stem if part.startswith("_") else stem + WEIGHT


def stored_groups(tensors: Mapping[str, TensorRef], unavailable: Iterable[str]) -> Iterator[StoredGroup]:
    """Every stored tensor in exactly one group; a tensor without markers beside it is a group of its own."""
    parts: dict[str, dict[str, TensorRef]] = defaultdict(dict)
    lost: dict[str, set[str]] = defaultdict(set)
    missing = dict.fromkeys(sorted(unavailable))
    plain: list[str] = []
    for name in (*tensors, *missing):
        split = _split(name)
        if split is None:
            plain.append(name)
        elif name in missing:
            lost[split[0]].add(split[1])
        else:
            parts[split[0]][split[1]] = tensors[name]
    for name in plain:
        stem = name.removesuffix(WEIGHT)
        part = WEIGHT if stem != name else BANK
        if name in missing:
            if stem in parts or stem in lost:
                lost[stem].add(part)
        elif stem in parts or stem in lost:
            parts[stem] = {part: tensors[name], **parts[stem]}
        else:
            yield StoredGroup(stem, {part: tensors[name]})
    for stem in dict.fromkeys([*parts, *sorted(lost)]):
        yield StoredGroup(stem, parts.get(stem, {}), frozenset(lost.get(stem, ())))
