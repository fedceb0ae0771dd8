"""Which identity an output gets: a published contract only if nothing stands against it, otherwise a custom one."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_convert.config_check import config_differences, dflash_differences
from ninfer_convert.families.sections import ModelSections
from ninfer_convert.locate import slug
from ninfer_convert.problems import Problem
from ninfer_convert.recipe_file import RecipeFile
from ninfer_convert.resources import Frontend
from ninfer_format import Identity
from ninfer_format.published import PUBLISHED, TOKENIZER_IDS
from ninfer_format.recipes import RECIPE_NAMES, Recipe

BUILDABLE_RECIPES = ("groupwise-int", "bf16", "w8", "nvfp4")
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_CUSTOM = "drop --identity to convert it as a custom artifact"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user said about the identity."""

    identity: Identity | None
    recipe: str | RecipeFile | Recipe | None
    model_id: str | None
    no_mtp: bool
    no_vision: bool
    searched_scales: bool = False
    """Method mse, which no published artifact is made with."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the sources say about it."""

    name: str
    """Folder or repository name."""
    sections: ModelSections
    config: Mapping[str, Any]
    dflash_config: Mapping[str, Any] | None
    """None without a DFlash companion."""
    frontend: Frontend
    all_bf16: bool
    stores_nvfp4: bool
    """Decoder matrices of the source are stored as NVFP4."""
    nvfp4_obstacles: Callable[[Identity], Iterable[Problem]]
    """What keeps the sources from giving a published NVFP4 identity."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The identity, whether it is a published contract, and the recipe's name."""

    identity: Identity
    published: bool
    recipe: str


def choose_identity(wishes: Wishes, evidence: Evidence, problems: list[Problem], notes: list[str]) -> Choice:
    """The identity for these wishes; a wish that cannot be granted becomes problems, an inference becomes a note."""
    wanted = wishes.identity
    if wanted in PUBLISHED and wanted is not None:
        problems += obstacles(wanted, wishes, evidence)
        return Choice(wanted, True, wanted.weights_id)
    recipe = _recipe(wishes, evidence, problems, notes)
    if wanted is None and wishes.model_id is None and (inferred := _inferred(wishes, evidence, recipe, notes)):
        notes.append(f"identity {inferred}: the frontend files and config.json are the published ones")
        return Choice(inferred, True, recipe)
    return Choice(_custom(wishes, evidence, recipe, problems, notes), False, recipe)


def _recipe(wishes: Wishes, evidence: Evidence, problems: list[Problem], notes: list[str]) -> str:
    asked = wishes.identity.weights_id if wishes.identity is not None else None
    mixed = isinstance(wishes.recipe, RecipeFile | Recipe)
    recipe = _name(wishes.recipe) or asked or ("nvfp4" if evidence.stores_nvfp4 else BUILDABLE_RECIPES[0])
    if evidence.stores_nvfp4 and not (wishes.recipe or asked):
        notes.append("recipe nvfp4: decoder matrices of the source are stored so; --recipe chooses another")
    if recipe not in BUILDABLE_RECIPES and not mixed:
        known = "is not in this release" if recipe in RECIPE_NAMES else "is unknown"
        message = f"recipe {recipe!r} {known}; it builds {', '.join(BUILDABLE_RECIPES)}"
        problems.append(Problem("unsupported-recipe", message, "--recipe", "choose one of these"))
        return BUILDABLE_RECIPES[0]
    if asked is not None and asked != recipe:
        message = f"{wishes.identity} asks for weights_id {asked!r}, the recipe is {recipe!r}"
        advice = "a custom artifact's weights_id is its recipe; let them agree"
        problems.append(Problem("identity-refused", message, "--identity", advice))
    return recipe


def _name(recipe: str | RecipeFile | Recipe | None) -> str | None:
    return recipe.name if isinstance(recipe, RecipeFile | Recipe) else recipe


def _custom(wishes: Wishes, evidence: Evidence, recipe: str, problems: list[Problem], notes: list[str]) -> Identity:
    explicit = wishes.identity.model_id if wishes.identity is not None else wishes.model_id
    if wishes.identity is not None and wishes.model_id not in (None, explicit):
        message = f"--identity {wishes.identity} and --model-id {wishes.model_id} name different models"
        problems.append(Problem("identity-refused", message, "--model-id", "give one of them"))
    identity = Identity(explicit or slug(evidence.name), recipe)
    if explicit is not None and not _MODEL_ID.fullmatch(explicit):
        message = f"model id {explicit!r:.80} has characters other than letters, digits, '.', '_' and '-'"
        problems.append(Problem("bad-model-id", message, "--model-id", f"use {slug(explicit)}"))
    if identity not in PUBLISHED:
        return identity
    if explicit is not None:
        message = f"{identity} is a published identity, which a model id alone does not give"
        problems.append(Problem("bad-model-id", message, "--model-id", f"pass --identity {identity}, or another name"))
        return identity
    other = Identity(f"{identity.model_id}-custom", recipe)
    notes.append(f"identity {other}: {identity} is a published contract, which has to be asked for with --identity")
    return other


def _inferred(wishes: Wishes, evidence: Evidence, recipe: str, notes: list[str]) -> Identity | None:
    """The published identity whose frontend files these are, if nothing stands against it."""
    for identity, row in PUBLISHED.items():
        digests = {name: resource.sha256 for name, resource in row.resources.items()}
        if identity.weights_id != recipe or digests != evidence.frontend.digests:
            continue
        against = list(obstacles(identity, wishes, evidence))
        if not against and evidence.all_bf16:
            return identity
        if not any(p.where == "config.json" for p in against):
            reason = against[0].message if against else "not every tensor is BF16"
            notes.append(f"a custom artifact, although the frontend files are those of {identity}: {reason}")
    return None


def obstacles(identity: Identity, wishes: Wishes, evidence: Evidence) -> Iterator[Problem]:
    """Everything that keeps these sources and options from being the published ``identity``."""

    def refused(message: str, where: str = "--identity", advice: str = _CUSTOM) -> Problem:
        return Problem("identity-refused", message, where, advice)

    if identity.weights_id == "nvfp4":
        yield from evidence.nvfp4_obstacles(identity)
    if wishes.recipe not in (None, identity.weights_id):
        yield refused(f"{identity} has the recipe {identity.weights_id!r}, not '{_name(wishes.recipe)}'", "--recipe")
    if wishes.model_id not in (None, identity.model_id):
        yield refused(f"{identity} has the model id {identity.model_id!r}, not {wishes.model_id!r}", "--model-id")
    if wishes.no_mtp:
        yield refused(f"{identity} has the MTP draft layer; --no-mtp gives a custom artifact", "--no-mtp")
    if wishes.no_vision:
        yield refused(f"{identity} has the vision tower; --no-vision gives a custom artifact", "--no-vision")
    if wishes.searched_scales:
        yield refused(f"{identity} has canonical scales; --method mse gives a custom artifact", "--method")
    yield from config_differences(identity, evidence.config)
    moe = identity.model_id == "qwen3.6-35b-a3b"
    if moe and evidence.dflash_config is None:
        advice = f"pass --dflash with the companion's folder, or {_CUSTOM}"
        yield refused(f"{identity} has a DFlash companion, and none is given", "--dflash", advice)
    elif evidence.dflash_config is not None:
        if moe:
            yield from dflash_differences(identity, evidence.dflash_config)
        else:
            yield refused(f"{identity} has no DFlash companion", "--dflash", f"drop --dflash, or {_CUSTOM}")
    n_ids = evidence.frontend.n_ids
    if n_ids not in (0, TOKENIZER_IDS):
        message = f"the tokenizer has {n_ids} ids, {identity} requires {TOKENIZER_IDS}"
        yield refused(message, "tokenizer.json, tokenizer_config.json")


def config_differs(found: Sequence[Problem]) -> bool:
    """Whether the published config check failed: then the published shapes say nothing about this checkpoint."""
    return any(problem.code == "config-differs" for problem in found)
