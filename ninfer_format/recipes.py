"""Recipes: which format every role is stored in, and with that which objects exist.

A recipe is an ordered list (role, format) plus exceptions for single objects. Four are built in for any geometry; the
published identities are the same recipes with the deviations listed here. Specification: ``specs/inventory.md``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ninfer_format.directory import Identity
from ninfer_format.errors import InventoryError
from ninfer_format.formats import NUMERIC_FORMATS
from ninfer_format.model_geometry import ModelGeometry, draft_head_rows, geometry_from_config
from ninfer_format.published import TOKENIZER_IDS, published, published_sections
from ninfer_format.roles import (
    ROLES,
    Role,
    Style,
    object_name,
    role_of,
    role_on_layer,
    role_shape,
    roles_present,
    styles_of,
)

Q4, Q5, Q6, W8 = "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"
RECIPE_NAMES = ("groupwise-int", "bf16", "w8", "nvfp4")
NVFP4_ROW_MULTIPLE = 128
NVFP4_COLUMN_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Recipe:
    """Ordered (role, format) pairs and the objects that deviate from their role's format.

    ``name`` is a label (the ``weights_id`` of a custom artifact) and takes no part in comparison.
    """

    name: str = field(compare=False)
    formats: tuple[tuple[str, str], ...]
    exceptions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in inventory order."""
        return tuple(role for role, _ in self.formats)

    def format_of(self, role: str, layer: int | None = None) -> str:
        """Format of ``role`` on ``layer``; InventoryError when the recipe has no such role."""
        name = object_name(role, layer)
        if name in self.exceptions:
            return self.exceptions[name]
        for known, format in self.formats:
            if known == role:
                return format
        raise InventoryError(f"recipe {self.name!r} has no role {role!r}")


# Roles not listed are W8: MTP, DFlash, the vision merger, and most of the mixture-of-experts decoder.
_GROUPWISE_SHARED = {
    "text/output_head": Q6,
    "text/draft_head": Q4,
    "vision/patch_embedding": Q6,
    "vision/layers/*/attention/qkv": Q4,
    "vision/layers/*/attention/output": Q5,
    "vision/layers/*/mlp/fc1": Q4,
    "vision/layers/*/mlp/fc2": Q5,
}
_GROUPWISE_DENSE = _GROUPWISE_SHARED | {
    "text/token_embedding": Q6,
    "text/layers/*/attention/query_key": Q4,
    "text/layers/*/attention/gate_value": Q5,
    "text/layers/*/attention/output": Q5,
    "text/layers/*/gdn/query_key": Q4,
    "text/layers/*/gdn/value_z": Q5,
    "text/layers/*/gdn/output": Q5,
    "text/layers/*/mlp/gate_up": Q4,
    "text/layers/*/mlp/down": Q5,
}
_GROUPWISE_MOE = _GROUPWISE_SHARED | {
    "text/layers/*/moe/routed_gate_up": Q4,
    "text/layers/*/moe/routed_down": Q5,
}


def recipe_for(geometry: ModelGeometry, name: str, style: Style | None = None) -> Recipe:
    """The built-in recipe ``name`` for this model; InventoryError lists the names otherwise.

    groupwise-int: 4 to 8 bits by role. bf16: every matrix BF16. w8: every matrix that groupwise-int quantizes is W8.
    nvfp4: decoder matrices NVFP4 where the shape allows (rows % 128 = 0, columns % 64 = 0) and W8 elsewhere,
    embedding and head W8, the rest as groupwise-int. ``style`` is the naming; by default a dense model is split, and
    fused for nvfp4.
    """
    if name not in RECIPE_NAMES:
        raise InventoryError(f"unknown recipe {name!r}; this release knows {', '.join(RECIPE_NAMES)}")
    if style is None:
        style = "moe" if geometry.architecture == "qwen3_5_moe" else "fused" if name == "nvfp4" else "split"
    pairs = [(r.name, _built_in_format(geometry, name, style, r)) for r in roles_present(geometry, style)]
    return Recipe(name, with_divisors(pairs))


def _built_in_format(geometry: ModelGeometry, name: str, style: Style, role: Role) -> str:
    if not role.is_matrix:
        return role.formats[0]
    if name == "bf16":
        return "BF16"
    if name == "w8":
        return W8
    if name == "nvfp4" and role.name in ("text/token_embedding", "text/output_head"):
        return W8
    if name == "nvfp4" and role.name.startswith("text/layers/"):
        return "NVFP4" if "NVFP4" in role.formats and fits_nvfp4(role_shape(geometry, role.name)) else W8
    table = _GROUPWISE_MOE if style == "moe" else _GROUPWISE_DENSE
    return table.get(role.name, W8)


def fits_nvfp4(shape: tuple[int, ...]) -> bool:
    """Whether a matrix [N, K] can be stored as NVFP4 (N % 128 = 0 and K % 64 = 0)."""
    return len(shape) == 2 and not shape[0] % NVFP4_ROW_MULTIPLE and not shape[1] % NVFP4_COLUMN_MULTIPLE


_DIVISORS: Mapping[str, str] = {r.divisor_of: r.name for r in ROLES.values() if r.divisor_of is not None}


def with_divisors(
    pairs: Iterable[tuple[str, str]], exceptions: Mapping[str, str] = MappingProxyType({})
) -> tuple[tuple[str, str], ...]:
    """Insert each activation divisor directly after its matrix, where that is NVFP4 on any layer."""
    excepted = {role_of(name)[0] for name, format in exceptions.items() if format == "NVFP4"}
    out: list[tuple[str, str]] = []
    for role, format in pairs:
        out.append((role, format))
        if role in _DIVISORS and (format == "NVFP4" or role in excepted):
            out.append((_DIVISORS[role], "FP32"))
    return tuple(out)


def published_geometry(identity: Identity | str) -> ModelGeometry:
    """Geometry of one of the four published models."""
    sections = published_sections(identity)
    return geometry_from_config(
        sections["text_config"], sections["vision_config"], sections["dflash"], draft_head_rows(TOKENIZER_IDS)
    )


_ROLE_DEVIATIONS: Mapping[str, Mapping[str, str]] = {
    "qwen3.8-27b/groupwise-int": {"text/token_embedding": W8, "text/output_head": W8},
}
_LAYER_DEVIATIONS: Mapping[str, tuple[tuple[str, str, tuple[int, ...]], ...]] = {
    "qwen3.6-27b/nvfp4": (
        ("text/layers/*/attention/query_key_gate_value", "BF16", (3, 7, 11, 15, 19, 23)),
        ("text/layers/*/attention/output", "BF16", (3, 7)),
        ("text/layers/*/gdn/output", "BF16", (4,)),
    ),
    "qwen3.6-35b-a3b/groupwise-int": (("text/layers/*/moe/routed_down", Q6, (34, 38, 39)),),
}


def published_recipe(identity: Identity | str) -> Recipe:
    """The exact recipe of one of the four published artifacts."""
    row = published(identity)
    recipe = recipe_for(published_geometry(row.identity), row.identity.weights_id)
    changed = _ROLE_DEVIATIONS.get(str(row.identity), {})
    exceptions = {
        object_name(role, layer): format
        for role, format, layers in _LAYER_DEVIATIONS.get(str(row.identity), ())
        for layer in layers
    }
    formats = tuple((role, changed.get(role, format)) for role, format in recipe.formats)
    return Recipe(recipe.name, formats, MappingProxyType(exceptions))


def check_recipe(geometry: ModelGeometry, recipe: Recipe) -> list[str]:
    """Problems, one sentence each: roles of no model or out of order, formats a role cannot have, idle exceptions."""
    problems = [p for role, format in recipe.formats if (p := _format_problem(geometry, role, role, format))]
    formats = dict(recipe.formats)
    for name, format in recipe.exceptions.items():
        role, layer = role_of(name)
        spec = ROLES.get(role) if role in formats else None
        if spec is None or layer is None or not role_on_layer(geometry, spec, layer):
            problems.append(f"the exception {name[:120]!r} names no object of a layer of this model")
        elif problem := _format_problem(geometry, name, role, format):
            problems.append(problem)
        elif format == formats[role]:
            problems.append(f"the exception {name!r} repeats the format of its role, {format}")
    if problems:
        return problems
    plain = tuple(role for role in recipe.roles if ROLES[role].divisor_of is None)
    expected = [tuple(r.name for r in roles_present(geometry, style)) for style in styles_of(geometry)]
    if plain not in expected:
        return [_sequence_problem(plain, expected)]
    if recipe.formats != with_divisors([p for p in recipe.formats if p[0] in plain], recipe.exceptions):
        return ["input_scale_divisor roles must stand directly after each matrix that is NVFP4, and only there"]
    return []


def summary(problems: Sequence[str], limit: int = 12) -> str:
    """Problems as one text for an error message: the first ``limit``, then how many more there are."""
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more


def _format_problem(geometry: ModelGeometry, where: str, role: str, format: str) -> str | None:
    spec = ROLES.get(role)
    if spec is None:
        return f"{role[:120]!r} is not a role of any model this release knows"
    if format not in NUMERIC_FORMATS:
        return f"{where!r} has the unknown format {format[:40]!r}; this release knows {', '.join(NUMERIC_FORMATS)}"
    if format not in spec.formats:
        return f"{where!r} is stored as {format}, expected {' or '.join(spec.formats)}"
    if format == "NVFP4" and not fits_nvfp4(shape := role_shape(geometry, role)):
        return f"{where!r} {list(shape)} is stored as NVFP4, which needs rows % 128 = 0 and columns % 64 = 0"
    return None


def _sequence_problem(found: tuple[str, ...], expected: list[tuple[str, ...]]) -> str:
    """First place where the role order leaves the closest permitted one."""
    closest = max(expected, key=lambda roles: len(set(roles) & set(found)))
    for i, role in enumerate(closest):
        if i >= len(found) or found[i] != role:
            at = repr(found[i]) if i < len(found) else "the end"
            return f"role {i} of the recipe is {at}, expected {role!r} (roles stand in inventory order, each once)"
    return f"the recipe has {found[len(closest)]!r} after its last role {closest[-1]!r}"
