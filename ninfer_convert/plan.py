"""The conversion plan: everything that is known and checked before a byte of output is written.

``make_plan`` reads headers, config and frontend files only (and compares the two where a head is stored beside a tied
embedding). It collects every problem instead of stopping at the first. Specification: ``specs/conversion.md``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.allocation import follow_allocation
from ninfer_convert.build_options import BuildOptions
from ninfer_convert.coding import Coding, read_coding, stats_problems
from ninfer_convert.draft_head import Ranking, draft_ids, load_ranking, no_ranking
from ninfer_convert.draft_precision import draft_precision_notes
from ninfer_convert.families import ObjectSource
from ninfer_convert.families.checks import check_absent
from ninfer_convert.families.sections import ModelSections, read_sections
from ninfer_convert.identity import BUILDABLE_RECIPES, Choice, Evidence, Wishes, choose_identity
from ninfer_convert.memory import peak_memory
from ninfer_convert.output import SIDE_FILES_BYTES, check_output, check_space
from ninfer_convert.plan_sources import PlanSources, open_sources
from ninfer_convert.problems import PlanError, Problem
from ninfer_convert.recipe_file import RecipeFile, resolve
from ninfer_convert.resources import Frontend, read_frontend
from ninfer_convert.source_check import check_beside, check_tensors
from ninfer_convert.sources.logical import LogicalCheckpoint
from ninfer_format import Identity, Inventory, InventoryError, ModelConfig, NinferError
from ninfer_format.inventory import plan_inventory
from ninfer_format.model_config import published_config
from ninfer_format.model_geometry import draft_head_rows, inspect_config
from ninfer_format.published import CONFIG_RESOURCE, published
from ninfer_format.recipes import Recipe, recipe_for

__all__ = ["BuildOptions", "ConversionPlan", "PlanError", "Problem", "Target", "make_plan", "peak_memory"]


@dataclass(frozen=True, slots=True)
class Target:
    """What will be written: identity, config, inventory and where each of its objects comes from."""

    identity: Identity
    published: bool
    """The identity is one of the published contracts (named or inferred)."""
    config: ModelConfig
    inventory: Inventory
    sources: tuple[ObjectSource, ...]
    """In inventory order, one per object."""
    resources: Mapping[str, bytes]
    """Payloads by object name, ``model/config.json`` included."""
    draft_ids: NDArray[np.int32] | None
    """[draft head rows]; None only in a plan with problems."""
    ranking: Ranking | None
    """What ordered ``draft_ids``."""
    coding: Coding
    """How values become codes."""
    twins: Mapping[str, ObjectSource]
    """Where the prepacked folder holds the rows of decoder matrices that come from the base, by object name."""


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The complete plan. With a nonempty ``problems`` it can be shown but not built."""

    options: BuildOptions
    checkpoint: LogicalCheckpoint
    """The model's own: the base where there is one, otherwise the source."""
    prepacked: LogicalCheckpoint | None
    """The source, where there is a base."""
    dflash: LogicalCheckpoint | None
    target: Target | None
    """None when the config is so wrong that nothing could be planned; ``problems`` says why."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    """Decisions a user should know: ignored files, tied head, ranking used, rounded dtypes, inferred identity."""
    memory_bytes: int = 0
    """Resident memory that ``build`` stays below (``peak_memory``)."""
    output_bytes: int = 0
    """Exact size of the finished file."""
    disk_bytes: int = 0
    """Free space needed in the output folder: the temporary file, the journal and the report."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of every frontend resource, by object name."""

    def require(self) -> Target:
        """The target of a plan without problems; PlanError lists the problems otherwise."""
        if self.problems or self.target is None:
            raise PlanError(self.problems)
        return self.target

    def checkpoint_of(self, source: ObjectSource) -> LogicalCheckpoint:
        """The checkpoint that holds the tensors of ``source``."""
        holder = {"base": self.checkpoint, "packed": self.prepacked, "dflash": self.dflash}[source.origin]
        if holder is None:
            raise ValueError(f"object {source.name!r} needs the {source.origin} folder, which the plan lacks")
        return holder


def make_plan(options: BuildOptions) -> ConversionPlan:
    """Plan the conversion that ``options`` describe.

    UsageError or SourceError if there is no such folder; everything else that is wrong is in ``problems``.
    """
    read = open_sources(options)
    target, frontend = _plan_target(read)
    if target is None:
        check_absent(read.checkpoint, None, (), read.problems, read.notes)
    output = target.inventory.file_bytes if target else 0
    disk = output + SIDE_FILES_BYTES if target else 0
    if options.out is not None:
        check_output(options.out, read.folders, force=options.force, problems=read.problems)
        check_space(options.out, disk, read.problems)
    memory = 0
    if target is not None:
        read.notes.extend(draft_precision_notes(target.inventory))
        memory = peak_memory(target.inventory, options.jobs, options.device, dequantizes=_dequantizes(read, target))
    return ConversionPlan(
        options,
        read.checkpoint,
        read.prepacked,
        read.dflash,
        target,
        tuple(dict.fromkeys(read.problems)),
        tuple(read.notes),
        memory,
        output,
        disk,
        frontend.digests,
    )


def _dequantizes(read: PlanSources, target: Target) -> bool:
    """Whether an encoder is given values that are not stored plain."""
    tensors = read.checkpoint.tensors
    from_own = (s for s in target.sources if s.origin == "base" and s.transform in ("rows", "draft_rows"))
    return any(t.as_floats for source in from_own for name in source.tensors if (t := tensors.get(name)) is not None)


def _plan_target(read: PlanSources) -> tuple[Target | None, Frontend]:
    options, config = read.options, read.checkpoint.config
    sections = None
    if config is not None:
        sections = read_sections(
            config, no_mtp=options.no_mtp, no_vision=options.no_vision, problems=read.problems, notes=read.notes
        )
    vision = not options.no_vision and (sections is None or sections.vision_config is not None)
    frontend = read_frontend(read.folder, vision=vision, problems=read.problems, notes=read.notes)
    if sections is None or config is None or (read.dflash is not None and read.dflash.config is None):
        return None, frontend
    evidence = Evidence(
        read.name,
        sections,
        config,
        read.dflash.config if read.dflash is not None else None,
        frontend,
        all(ref.dtype == "BF16" for ref in read.checkpoint.tensors.values()),
        read.stores_nvfp4,
        read.published_obstacles,
    )
    wishes = Wishes(
        options.identity, options.recipe, options.model_id, options.no_mtp, options.no_vision, options.method == "mse"
    )
    choice = choose_identity(wishes, evidence, read.problems, read.notes)
    if choice.recipe not in BUILDABLE_RECIPES and not isinstance(options.recipe, RecipeFile | Recipe):
        return None, frontend
    check_beside(read, choice)
    planned = _published(choice, frontend) if choice.published else _custom(choice, evidence, read)
    if planned is None:
        return None, frontend
    model, inventory, resources = planned
    names = read.names_in(read.checkpoint, tied=sections.tied and not choice.published)
    assignment = check_tensors(read, choice, model, inventory, names)
    coding = read_coding(options.method, options.activation_stats, read.problems)
    read.problems.extend(stats_problems(coding, inventory))
    ids, ranking = _draft(read, model, frontend)
    target = Target(
        inventory.identity,
        choice.published,
        model,
        inventory,
        assignment.sources,
        resources,
        ids,
        ranking,
        coding,
        assignment.twins,
    )
    return target, frontend


_Planned = tuple[ModelConfig, Inventory, Mapping[str, bytes]]


def _published(choice: Choice, frontend: Frontend) -> _Planned:
    """A published contract with this checkpoint's frontend files; absent ones count with their published sizes."""
    sizes = {name: resource.n_bytes for name, resource in published(choice.identity).resources.items()}
    sizes |= {name: len(payload) for name, payload in frontend.payloads.items()}
    inventory = plan_inventory(choice.identity, resources=sizes)
    return published_config(choice.identity), inventory, frontend.payloads


def _custom(choice: Choice, evidence: Evidence, read: PlanSources) -> _Planned | None:
    """A custom artifact: geometry from the config, recipe by name, and the config as a resource."""
    sections = evidence.sections
    advice = "use a config.json of the Qwen3.5, 3.6 or 3.8 family"
    vocab_rows = sections.text_config.get("vocab_size")
    n_ids = evidence.frontend.n_ids
    if type(vocab_rows) is int and n_ids > vocab_rows:
        message = f"the tokenizer has {n_ids} ids, the embedding {vocab_rows} rows"
        fix = "use the tokenizer files of this checkpoint"
        read.problems.append(Problem("tokenizer-too-large", message, "tokenizer.json, tokenizer_config.json", fix))
        n_ids = 0
    rows = draft_head_rows(n_ids or (vocab_rows if type(vocab_rows) is int and vocab_rows > 0 else 1))
    token_ids = sections.token_ids
    if sections.vision_config is not None and token_ids is None:
        token_ids = dict.fromkeys(("image", "video", "vision_start", "vision_end"), 0)  # already a problem
    geometry, wrong = inspect_config(sections.text_config, sections.vision_config, evidence.dflash_config, rows)
    wrong = wrong or _between(sections, evidence.dflash_config)
    if geometry is None or wrong:
        read.problems.extend(Problem("bad-config", message, "config.json", advice) for message in wrong)
        return None
    if geometry.architecture != sections.architecture:
        message = f"the root says {sections.architecture}, text_config describes {geometry.architecture}"
        read.problems.append(Problem("bad-config", message, "config.json", advice))
        return None
    if geometry.text.n_experts and geometry.dflash is None:
        read.notes.append("no DFlash companion is given: the artifact has no dflash objects")
    wanted = read.options.recipe
    try:
        if isinstance(wanted, RecipeFile):
            recipe, wrong_rules = resolve(wanted, geometry)
            mend = "mend the recipe file"
            read.problems.extend(Problem("bad-recipe", message, "--recipe", mend) for message in wrong_rules)
        elif isinstance(wanted, Recipe):
            recipe = wanted
        else:
            recipe = recipe_for(geometry, choice.recipe)
        model = ModelConfig(
            sections.text_config, sections.vision_config, token_ids, evidence.dflash_config, recipe, rows
        )
        if choice.recipe == "nvfp4" and not isinstance(wanted, RecipeFile | Recipe) and read.stores_nvfp4:
            recipe, notes = follow_allocation(model, read.decoder, read.names_in(read.decoder, tied=sections.tied))
            read.notes.extend(notes)
            model = replace(model, recipe=recipe)
        resources = {**evidence.frontend.payloads, CONFIG_RESOURCE: model.to_json()}
        sizes = {name: len(payload) for name, payload in resources.items()}
        inventory = plan_inventory(geometry, recipe, identity=choice.identity, resources=sizes)
    except InventoryError as error:
        read.problems.append(Problem("bad-config", str(error), "config.json", advice))
        return None
    return model, inventory, resources


def _between(sections: ModelSections, dflash: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Members of the companion's config that do not go with the target's."""
    if dflash is None:
        return ()
    pairs = (("vocab_size", "vocab_size"), ("num_target_layers", "num_hidden_layers"))
    text = sections.text_config
    return tuple(
        f"the DFlash companion's {theirs} is {dflash[theirs]!r:.40}, the model's {ours} is {text.get(ours)}"
        for theirs, ours in pairs
        if dflash.get(theirs) is not None and dflash[theirs] != text.get(ours)
    )


def _draft(
    read: PlanSources, model: ModelConfig, frontend: Frontend
) -> tuple[NDArray[np.int32] | None, Ranking | None]:
    """Draft ids and what ranked them; (None, None) and a problem if they cannot be chosen."""
    vocab_rows, n_ids = model.geometry.text.vocab_rows, frontend.n_ids
    if not model.draft_head_rows <= n_ids <= vocab_rows:
        return None, None  # already a problem
    path = read.options.ranking
    try:
        ranking = no_ranking(n_ids) if path is None else load_ranking(path, vocab_rows=vocab_rows, n_ids=n_ids)
        ids = draft_ids(ranking, model.draft_head_rows, frontend.forced)
    except (NinferError, OSError) as error:
        advice = "give a counts file of this vocabulary or a .ninfer artifact with the same tokenizer"
        where = str(path) if path is not None else "draft head"
        read.problems.append(Problem("bad-ranking", str(error), where, advice))
        return None, None
    read.notes.append(f"draft head ranking: {ranking.label}")
    return ids, ranking
