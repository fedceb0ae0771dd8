"""The config resource ``model/config.json``: what a custom artifact says about its model, read strictly.

The four published identities have the same document built in. A ``ModelConfig`` is valid once it exists: its geometry
is computed and its recipe checked when it is made. Specification: ``specs/inventory.md``.
"""

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from ninfer_format.directory import Identity
from ninfer_format.errors import DirectoryError, InventoryError
from ninfer_format.model_geometry import ModelGeometry, draft_head_rows, geometry_from_config
from ninfer_format.published import CONFIG_RESOURCE, PUBLISHED, TOKENIZER_IDS, published_sections
from ninfer_format.recipes import Recipe, check_recipe, published_recipe, summary
from ninfer_format.roles import ROLES
from ninfer_format.strict_json import parse_strict

MAX_CONFIG_BYTES = 1 << 20
"""Cap of the config text: real ones are below 16 KiB, and parsing this much stays far below 100 MB."""
TOKEN_ID_KEYS = ("image", "video", "vision_start", "vision_end")
_MEMBERS = ("text_config", "vision_config", "token_ids", "dflash", "recipe", "draft_head_rows")
MAX_DEPTH = 32


class OpenArtifact(Protocol):
    """What ``config_of`` needs of an opened artifact."""

    @property
    def identity(self) -> Identity: ...

    @property
    def objects(self) -> Container[object]: ...

    def payload(self, name: str, /) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model: config sections with Hugging Face member names, media token ids, recipe, proposal head rows.

    Making one raises InventoryError that names every wrong member. ``geometry`` follows from the sections.
    """

    text_config: Mapping[str, Any]
    vision_config: Mapping[str, Any] | None
    token_ids: Mapping[str, int] | None
    dflash: Mapping[str, Any] | None
    recipe: Recipe
    draft_head_rows: int
    geometry: ModelGeometry = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        geometry = geometry_from_config(self.text_config, self.vision_config, self.dflash, self.draft_head_rows)
        object.__setattr__(self, "geometry", geometry)
        problems = _token_id_problems(self.token_ids, geometry) + check_recipe(geometry, self.recipe)
        if problems:
            raise InventoryError("the model config cannot be used: " + summary(problems))

    @classmethod
    def from_json(cls, text: bytes | memoryview, *, name: str = "custom") -> "ModelConfig":
        """Read the resource strictly; ``name`` labels its recipe. InventoryError says what is wrong and where."""
        document = _parse(text)
        if not isinstance(document, dict) or sorted(document) != sorted(_MEMBERS):
            found = ", ".join(sorted(document)) if isinstance(document, dict) else type(document).__name__
            raise InventoryError(
                f"{CONFIG_RESOURCE} has {found[:200]}; expected an object with exactly {', '.join(_MEMBERS)}"
            )
        section = {
            key: _section(document, key, optional=key != "text_config")
            for key in ("text_config", "vision_config", "token_ids", "dflash")
        }
        config = cls(
            section["text_config"] or {},
            section["vision_config"],
            section["token_ids"],
            section["dflash"],
            _recipe(document["recipe"], name),
            document["draft_head_rows"],
        )
        config.to_json()  # a config that cannot be written again (lone surrogates) is refused now, not later
        return config

    def to_json(self) -> bytes:
        """Canonical text: the six members in specification order, sections sorted by member name, no white space."""
        ids = self.token_ids
        try:
            document = {
                "text_config": _sorted(self.text_config),
                "vision_config": _sorted(self.vision_config),
                "token_ids": None if ids is None else {key: ids[key] for key in TOKEN_ID_KEYS},
                "dflash": _sorted(self.dflash),
                "recipe": dict(self.recipe.formats) | dict(self.recipe.exceptions),
                "draft_head_rows": self.draft_head_rows,
            }
            text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")
        except (TypeError, ValueError, RecursionError) as error:
            raise InventoryError(
                f"the model config is not plain JSON: {error}; mend the config.json it came from"
            ) from None
        if len(text) > MAX_CONFIG_BYTES:
            raise InventoryError(f"the model config takes {len(text)} bytes; the limit is {MAX_CONFIG_BYTES}")
        return text


def published_config(identity: Identity | str) -> ModelConfig:
    """The built-in document of one of the four published identities."""
    return ModelConfig(
        **published_sections(identity),
        recipe=published_recipe(identity),
        draft_head_rows=draft_head_rows(TOKENIZER_IDS),
    )


def config_of(artifact: OpenArtifact) -> ModelConfig:
    """Config of an opened artifact: the built-in one of a published identity, otherwise its config resource.

    A published identity never takes its config from the file: there a ``model/config.json`` is an object too many.
    Raises InventoryError when there is neither.
    """
    if artifact.identity in PUBLISHED:
        return published_config(artifact.identity)
    if CONFIG_RESOURCE not in artifact.objects:
        known = ", ".join(map(str, PUBLISHED))
        raise InventoryError(
            f"{artifact.identity} is not a published identity ({known}) and the file has no {CONFIG_RESOURCE}; "
            "convert the checkpoint again, or set a published identity if it is one"
        )
    return ModelConfig.from_json(artifact.payload(CONFIG_RESOURCE), name=artifact.identity.weights_id)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def _token_id_problems(token_ids: Any, geometry: ModelGeometry) -> list[str]:
    if token_ids is None:
        return (
            ["token_ids is null, expected the four media token ids of a model with vision"] if geometry.vision else []
        )
    if sorted(token_ids) != sorted(TOKEN_ID_KEYS):
        found = ", ".join(map(repr, token_ids))[:200] or "no members"
        return [f"token_ids has {found}, expected {', '.join(TOKEN_ID_KEYS)}"]
    last = geometry.text.vocab_rows - 1
    return [
        f"token_ids.{key} is {value!r:.60}, expected an id from 0 to {last}"
        for key, value in token_ids.items()
        if type(value) is not int or not 0 <= value <= last
    ]


def _section(document: Mapping[str, Any], key: str, *, optional: bool) -> dict[str, Any] | None:
    value = document[key]
    if isinstance(value, dict) or (value is None and optional):
        return value
    expected = "an object or null" if optional else "an object"
    raise InventoryError(f"{CONFIG_RESOURCE}: {key} is {value!r:.60}, expected {expected}")


def _recipe(value: Any, name: str) -> Recipe:
    """Roles first, then exceptions: the first member that is no role starts the exceptions."""
    if not isinstance(value, dict) or not value:
        raise InventoryError(f"{CONFIG_RESOURCE}: recipe is {value!r:.60}, expected an object of role: format members")
    formats: list[tuple[str, str]] = []
    exceptions: dict[str, str] = {}
    for key, format in value.items():
        if not isinstance(format, str):
            raise InventoryError(f"{CONFIG_RESOURCE}: recipe[{key[:120]!r}] is {format!r:.60}, expected a format name")
        if key not in ROLES:
            exceptions[key] = format
        elif exceptions:
            raise InventoryError(f"{CONFIG_RESOURCE}: recipe role {key!r} comes after exceptions; roles stand first")
        else:
            formats.append((key, format))
    return Recipe(name, tuple(formats), MappingProxyType(exceptions))


def _parse(text: bytes | memoryview) -> Any:
    """Strict JSON as in the directory, but with finite reals: a config has some."""
    if len(text) > MAX_CONFIG_BYTES:
        raise InventoryError(f"{CONFIG_RESOURCE} has {len(text)} bytes; the limit is {MAX_CONFIG_BYTES}")
    try:
        document = parse_strict(bytes(text), what=CONFIG_RESOURCE, reals=True)
    except DirectoryError as error:
        raise InventoryError(str(error)) from None
    _check_depth(document)
    return document


def _check_depth(document: Any) -> None:
    """At most MAX_DEPTH levels, found without recursion: what follows walks the document recursively."""
    level, depth = [document], 0
    while level := [
        child
        for value in level
        if isinstance(value, dict | list)
        for child in (value.values() if isinstance(value, dict) else value)
    ]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InventoryError(f"{CONFIG_RESOURCE} is nested more than {MAX_DEPTH} levels deep")
