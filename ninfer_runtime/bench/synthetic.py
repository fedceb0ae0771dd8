"""Structurally exact artifacts with random weights: every object of an identity, at its place, in seconds.

Weights are drawn once per format, run through the canonical encoder, and repeated: their number is prime, so no two
rows of a matrix start at the same group of the pool. Standard deviations follow the role (``weight_std``), so that
activations stay finite and of the usual size through any number of layers. Specification: specs/benchmarks.md.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ninfer_format.directory import Identity, ResourceEntry
from ninfer_format.errors import UsageError
from ninfer_format.inventory import Inventory, plan_inventory
from ninfer_format.model_config import ModelConfig, published_config
from ninfer_format.model_geometry import ModelGeometry, draft_head_rows, geometry_from_config
from ninfer_format.published import CONFIG_RESOURCE, PUBLISHED, TOKENIZER_IDS, published, published_sections
from ninfer_format.recipes import RECIPE_NAMES, Recipe, published_recipe, recipe_for
from ninfer_format.roles import role_of
from ninfer_format.writer import ArtifactWriter
from ninfer_runtime.bench.frontend import frontend_resources
from ninfer_runtime.bench.random_weights import Filler

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SynthPlan:
    """What will be written: the objects in order and the content of the resources."""

    inventory: Inventory
    config: ModelConfig
    resources: Mapping[str, bytes]
    n_addressable: int


@dataclass(frozen=True, slots=True)
class SynthReport:
    """What was written and how long it took, generation of the random words and the final sync included."""

    path: Path
    identity: Identity
    file_bytes: int
    n_objects: int
    seed: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Document of ``bench synth --json``, schema ninfer.synth/1."""
        return {
            "schema": "ninfer.synth/1",
            "path": str(self.path),
            "identity": str(self.identity),
            "file_bytes": self.file_bytes,
            "objects": self.n_objects,
            "seed": self.seed,
            "seconds": self.seconds,
        }

    def to_text(self, *, as_json: bool) -> str:
        """What the command prints."""
        if as_json:
            return json.dumps(self.to_json(), indent=2) + "\n"
        rate = self.file_bytes / self.seconds / 1e9
        size = f"{self.n_objects} objects, {self.file_bytes:,} bytes"
        return f"{self.path}: {self.identity}, {size}, {self.seconds:.1f} s ({rate:.2f} GB/s)\n"


def plan_synthetic(identity: str, *, n_layers: int | None = None, config: Path | None = None) -> SynthPlan:
    """The artifact called ``identity`` (model/weights).

    A published identity without ``n_layers`` is exact in sizes and order. Otherwise the artifact is a custom one:
    ``config`` is the config.json of a checkpoint, without it the model must be a published one; the weights id is a
    recipe's name, and ``n_layers`` keeps only the first layers of the decoder. UsageError for anything else.
    """
    wanted = Identity.parse(identity)
    if config is None and n_layers is None and wanted in PUBLISHED:
        row = published(wanted)
        sizes = {name: resource.n_bytes for name, resource in row.resources.items()}
        resources = frontend_resources(TOKENIZER_IDS, sizes)
        return SynthPlan(plan_inventory(wanted), published_config(wanted), MappingProxyType(resources), TOKENIZER_IDS)
    sections = _published_model(wanted) if config is None else _sections_of(config)
    base = wanted if config is None and wanted in PUBLISHED else None
    if n_layers is not None:
        sections = _shortened(sections, n_layers)
        wanted = replace(wanted, model_id=f"{wanted.model_id}-{n_layers}l")
    n_addressable = _addressable(sections["text_config"])
    model = _custom_config(wanted, base, sections, n_addressable)
    resources = frontend_resources(n_addressable) | {CONFIG_RESOURCE: model.to_json()}
    inventory = plan_inventory(
        model.geometry,
        model.recipe,
        identity=wanted,
        resources={name: len(content) for name, content in resources.items()},
    )
    return SynthPlan(inventory, model, MappingProxyType(resources), n_addressable)


def write_synthetic(
    plan: SynthPlan, out: Path, *, seed: int = 0, overwrite: bool = False, jobs: int | None = None
) -> SynthReport:
    """Write the artifact; equal seeds give equal files. Errors as ``ArtifactWriter``."""
    started = time.perf_counter()
    inventory = plan.inventory
    with ArtifactWriter(out, inventory.directory, overwrite=overwrite) as writer:
        for entry in inventory.objects:
            if isinstance(entry, ResourceEntry):
                writer.write(entry.name, plan.resources[entry.name])
        Filler(writer, plan.n_addressable, seed).fill(inventory.tensors, jobs or os.cpu_count() or 1)
        writer.commit()
    seconds = time.perf_counter() - started
    return SynthReport(out, inventory.identity, inventory.file_bytes, len(inventory.objects), seed, seconds)


def _published_model(wanted: Identity) -> dict[str, Any]:
    for identity in PUBLISHED:
        if identity.model_id == wanted.model_id:
            return published_sections(identity)
    known = ", ".join(dict.fromkeys(identity.model_id for identity in PUBLISHED))
    raise UsageError(f"{wanted.model_id!r} is not a published model ({known}); give its config.json with --config")


def _sections_of(path: Path) -> dict[str, Any]:
    """The sections of a checkpoint's config.json."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("text_config"), dict):
        raise UsageError(f"{path} has no text_config object; expected the config.json of a checkpoint")
    keys = {"image": "image_token_id", "video": "video_token_id"}
    keys |= {name: f"{name}_token_id" for name in ("vision_start", "vision_end")}
    vision = document.get("vision_config")
    ids = {name: document[key] for name, key in keys.items() if key in document} if vision else None
    return {"text_config": document["text_config"], "vision_config": vision, "token_ids": ids, "dflash": None}


def _shortened(sections: dict[str, Any], n_layers: int) -> dict[str, Any]:
    """Only the first layers; the DFlash companion, which reads later ones, is left out."""
    text = dict(sections["text_config"])
    kinds = text.get("layer_types")
    if not 1 <= n_layers <= text["num_hidden_layers"]:
        raise UsageError(f"--layers is {n_layers}, expected 1 to {text['num_hidden_layers']}")
    text["num_hidden_layers"] = n_layers
    if isinstance(kinds, list):
        text["layer_types"] = kinds[:n_layers]
    return sections | {"text_config": text, "dflash": None}


def _addressable(text_config: Mapping[str, Any]) -> int:
    """Ids of the tokenizer: the published count where the matrices hold it, otherwise every row."""
    rows = text_config.get("vocab_size")
    if type(rows) is not int:
        raise UsageError(f"text_config.vocab_size is {rows!r}, expected an integer")
    return min(rows, TOKENIZER_IDS)


def _custom_config(
    identity: Identity, base: Identity | None, sections: Mapping[str, Any], n_addressable: int
) -> ModelConfig:
    """Config of a custom artifact; ``base`` is the published identity it is cut from, which decides its recipe."""
    draft_rows = draft_head_rows(n_addressable)
    geometry = geometry_from_config(sections["text_config"], sections["vision_config"], sections["dflash"], draft_rows)
    if base is not None:
        recipe = _kept_recipe(published_recipe(base), geometry)
    elif identity.weights_id in RECIPE_NAMES:
        recipe = recipe_for(geometry, identity.weights_id)
    else:
        raise UsageError(f"{identity.weights_id!r} is not a recipe, expected one of {', '.join(RECIPE_NAMES)}")
    return ModelConfig(**sections, recipe=recipe, draft_head_rows=draft_rows)


def _kept_recipe(recipe: Recipe, geometry: ModelGeometry) -> Recipe:
    """A published recipe without what the shortened model lacks."""
    formats = tuple(p for p in recipe.formats if geometry.dflash is not None or not p[0].startswith("dflash/"))
    last = geometry.text.n_layers
    exceptions = {name: format for name, format in recipe.exceptions.items() if (role_of(name)[1] or 0) < last}
    return Recipe(recipe.name, formats, MappingProxyType(exceptions))
