"""Mixed recipes: a TOML file of role patterns and formats over a built-in recipe.

Reading checks everything that needs no model; ``resolve`` applies the rules to one, object by object, later rules over
earlier ones, and finds every pattern that matches nothing or asks for a format that cannot be. Specification:
``specs/conversion.md``.
"""

import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ninfer_format import Recipe, StorageError, UsageError
from ninfer_format.formats import NUMERIC_FORMATS
from ninfer_format.model_geometry import ModelGeometry
from ninfer_format.recipes import RECIPE_NAMES, fits_nvfp4, recipe_for, with_divisors
from ninfer_format.roles import (
    ROLES,
    Role,
    Style,
    layer_count,
    object_name,
    role_on_layer,
    role_shape,
    roles_present,
)

MAX_BYTES = 1 << 20
DEFAULT_BASE = "groupwise-int"
SHORT_NAMES: Mapping[str, str] = {f.name.partition("G")[0]: f.name for f in NUMERIC_FORMATS.values() if f.group}
"""``Q4`` and the like for the grouped formats, whose full names also say group and scale."""

_KEYS = ("name", "description", "base", "fused", "formats")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PATTERN = re.compile(r"[a-z0-9_*?{},/-]+")
_LAYERS = re.compile(r"\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*")


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of ``[formats]``: the objects that ``pattern`` matches are stored as ``format`` (full name)."""

    pattern: str
    format: str


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A checked recipe file. ``fused`` None: as the base has it (only ``nvfp4`` fuses the dense projections)."""

    name: str
    base: str
    fused: bool | None
    rules: tuple[Rule, ...]
    description: str
    sha256: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _Object:
    """A matrix of the model: its role, and its layer or None."""

    role: Role
    layer: int | None

    @property
    def name(self) -> str:
        return object_name(self.role.name, self.layer)


# --- reading ----------------------------------------------------------------------------------------------------------


def recipe_option(value: str | None) -> "str | RecipeFile | None":
    """What ``--recipe`` means: a built-in name stays one; a path, or a name that ends in .toml, is a file to read."""
    is_path = value is not None and (value.endswith(".toml") or "/" in value)
    return read_recipe_file(Path(value)) if value is not None and is_path else value


def read_recipe_file(path: Path) -> RecipeFile:
    """Read and check a file. UsageError lists everything that is wrong with it, StorageError if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; --recipe takes a built-in name or a TOML file") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: is larger than {MAX_BYTES} bytes; not a recipe")
    try:
        document = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: is not TOML: {error}") from None
    problems = list(_document_problems(document))
    if problems:
        raise UsageError("\n".join(f"{path}: {problem}" for problem in problems))
    rules = tuple(Rule(pattern, _full_name(format)) for pattern, format in document["formats"].items())
    return RecipeFile(
        document["name"],
        document.get("base", DEFAULT_BASE),
        document.get("fused"),
        rules,
        document.get("description", ""),
        hashlib.sha256(content).hexdigest(),
    )


def _full_name(format: str) -> str:
    return SHORT_NAMES.get(format, format)


def _document_problems(document: Mapping[str, Any]) -> Iterable[str]:
    for key in document:
        if key not in _KEYS:
            yield f"unknown member {key!r:.80}{_did_you_mean(key, _KEYS)}; a recipe has {', '.join(_KEYS)}"
    name = document.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        found = "is missing" if name is None else f"is {name!r:.80}"
        yield f"name {found}; expected up to 64 letters, digits, '.', '_' and '-', which become the weights_id"
    elif name in RECIPE_NAMES:
        yield f"name is {name!r}, which is a built-in recipe; choose another"
    if not isinstance(document.get("description", ""), str):
        yield "description is not a string"
    base = document.get("base", DEFAULT_BASE)
    if base not in RECIPE_NAMES:
        yield f"base is {base!r:.80}{_did_you_mean(base, RECIPE_NAMES)}; expected one of {', '.join(RECIPE_NAMES)}"
    if not isinstance(document.get("fused", True), bool):
        yield "fused is not true or false"
    formats = document.get("formats")
    if not isinstance(formats, dict) or not formats:
        yield 'there is no table [formats]; expected lines like "text/layers/*/mlp/down" = "Q6"'
        return
    for pattern, format in formats.items():
        yield from _rule_problems(pattern, format)


def _rule_problems(pattern: str, format: Any) -> Iterable[str]:
    if not _PATTERN.fullmatch(pattern):
        yield f"{pattern!r:.120} is not a pattern; expected a role in quotes, with *, ?, ** or {{a,b}} in it"
    else:
        try:
            _expression(pattern)
        except ValueError as error:
            yield f"{pattern!r:.120}: {error}"
    known = (*SHORT_NAMES, *NUMERIC_FORMATS)
    if not isinstance(format, str) or format not in known:
        yield f"{pattern!r:.120} has the unknown format {format!r:.40}{_did_you_mean(format, known)}; {_registry()}"


def _registry() -> str:
    short = {full: name for name, full in SHORT_NAMES.items()}
    return "known are " + ", ".join(f"{name} ({short[name]})" if name in short else name for name in NUMERIC_FORMATS)


def _did_you_mean(found: Any, known: Iterable[str]) -> str:
    close = get_close_matches(str(found)[:200], list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


# --- patterns ---------------------------------------------------------------------------------------------------------


def _expression(pattern: str) -> re.Pattern[str]:
    """What ``pattern`` matches, over whole object names; ValueError for a part that makes no sense."""
    parts = []
    for segment in _segments(pattern):
        if segment == "**":
            parts.append(r"(?:[^/]+/)*[^/]+")
        elif _LAYERS.fullmatch(segment):
            parts.append("(?:" + "|".join(map(str, _layers(segment))) + ")")
        elif segment:
            parts.append(_segment_expression(segment))
        else:
            raise ValueError("an empty part stands between slashes")
    return re.compile("/".join(parts))


def _segments(pattern: str) -> list[str]:
    """Split at the slashes that are not inside braces."""
    return re.split(r"/(?![^{}]*\})", pattern)


def _segment_expression(segment: str) -> str:
    out, depth = "", 0
    for char in segment:
        if char == "{":
            depth += 1
            out += "(?:"
        elif char == "}":
            depth -= 1
            out += ")"
        elif char == "," and depth:
            out += "|"
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char))
        if depth not in (0, 1):
            raise ValueError("braces are nested or out of order")
    if depth:
        raise ValueError("a brace is not closed")
    return out


def _layers(segment: str) -> list[int]:
    """``0-3,7`` → 0, 1, 2, 3, 7."""
    layers: list[int] = []
    for part in segment.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if end < begin:
            raise ValueError(f"the layers {part} run backwards")
        layers += range(begin, end + 1)
    return layers


# --- applying ---------------------------------------------------------------------------------------------------------


def resolve(file: RecipeFile, geometry: ModelGeometry) -> tuple[Recipe, list[str]]:
    """The recipe for this model, and every problem, one sentence each. With problems the recipe is only the base."""
    moe = geometry.architecture == "qwen3_5_moe"
    fused = file.base == "nvfp4" if file.fused is None else file.fused
    style: Style = "moe" if moe else "fused" if fused else "split"
    base = recipe_for(geometry, file.base, style)
    problems = []
    if moe and file.fused is False:
        problems.append("fused = false: the projections of a mixture of experts are always stored fused")
    objects = [_Object(r, layer) for r in roles_present(geometry, style) for layer in _layers_of(geometry, r)]
    chosen = {item.name: base.format_of(item.role.name) for item in objects}
    for rule in file.rules:
        matched, found = _matched(rule, geometry, style, objects)
        problems += found
        chosen |= {item.name: rule.format for item in matched}
    if problems:
        return Recipe(file.name, base.formats), problems
    return _recipe(file.name, objects, chosen), []


def _layers_of(geometry: ModelGeometry, role: Role) -> Iterable[int | None]:
    if role.layer_prefix is None:
        return (None,)
    count = layer_count(geometry, role.layer_prefix)
    return (layer for layer in range(count) if role_on_layer(geometry, role, layer))


def _matched(
    rule: Rule, geometry: ModelGeometry, style: Style, objects: Sequence[_Object]
) -> tuple[list[_Object], list[str]]:
    """The matrices that a rule is about, and what is wrong with it."""
    expression = _expression(rule.pattern)
    matched = [item for item in objects if expression.fullmatch(item.name)]
    matrices = [item for item in matched if item.role.is_matrix]
    label = f"{rule.pattern!r} = {rule.format}"
    if not matched:
        return [], [f"{label} matches nothing{_why_nothing(rule.pattern, style, objects)}"]
    if not matrices:
        kept = matched[0].role
        return [], [f"{label} names no matrix: {kept.name!r} is always {kept.formats[0]}"]
    return matrices, [*_idle_layers(label, rule, geometry, matched), *_refused(label, rule, geometry, matrices)]


def _idle_layers(label: str, rule: Rule, geometry: ModelGeometry, matched: Sequence[_Object]) -> Iterable[str]:
    """Layers that do not exist, and single ones on which nothing matches; ranges may pass over other mixers."""
    found = {item.layer for item in matched}
    prefixes = {item.role.layer_prefix for item in matched}
    last = (
        max(layer_count(geometry, prefix) for prefix in prefixes if prefix is not None) - 1 if None not in found else 0
    )
    for segment in filter(_LAYERS.fullmatch, _segments(rule.pattern)):
        for part in segment.split(","):
            layers = _layers(part)
            if layers[-1] > last:
                yield f"{label}: layer {layers[-1]} does not exist; the last one is {last}"
            elif found.isdisjoint(layers):
                yield f"{label}: nothing on layer {part} matches"


def _refused(label: str, rule: Rule, geometry: ModelGeometry, items: Sequence[_Object]) -> Iterable[str]:
    roles = {item.role.name: item.role for item in items}
    for role in roles.values():
        if rule.format not in role.formats:
            yield f"{label}: {role.name!r} can be {', '.join(role.formats)}"
        elif rule.format == "NVFP4" and not fits_nvfp4(shape := role_shape(geometry, role.name)):
            yield f"{label}: {role.name!r} {list(shape)} needs rows % 128 = 0 and columns % 64 = 0"


def _why_nothing(pattern: str, style: Style, objects: Sequence[_Object]) -> str:
    """Roles that were perhaps meant, or why a role that exists elsewhere is not in this model."""
    present = {item.role.name for item in objects}
    widened = "/".join("*" if _LAYERS.fullmatch(s) else s for s in _segments(pattern))
    expression = _expression(widened)
    elsewhere = [name for name in ROLES if expression.fullmatch(name.replace("*", "0"))]
    if widened != pattern and any(name in present for name in elsewhere):
        return " on these layers"
    if others := [name for name in elsewhere if name not in present and ROLES[name].is_matrix]:
        role = ROLES[others[0]]
        if style != "moe" and style not in role.styles and role.styles != ("moe",):
            return f": {role.name!r} needs fused = {'true' if 'fused' in role.styles else 'false'}"
        return f": this model has no {role.name!r}"
    return _did_you_mean(widened, sorted(present))


def _recipe(name: str, objects: Sequence[_Object], chosen: Mapping[str, str]) -> Recipe:
    """Formats per role (the one most of its objects have, the first on ties) and the objects that deviate."""
    pairs: list[tuple[str, str]] = []
    exceptions: dict[str, str] = {}
    for role in dict.fromkeys(item.role.name for item in objects):
        own = {item.name: chosen[item.name] for item in objects if item.role.name == role}
        common = Counter(own.values()).most_common(1)[0][0]
        pairs.append((role, common))
        exceptions |= {name: format for name, format in own.items() if format != common}
    return Recipe(name, with_divisors(pairs, exceptions), MappingProxyType(exceptions))
