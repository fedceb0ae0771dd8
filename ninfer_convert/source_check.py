"""Everything about stored tensors that headers tell: quantized or plain, missing, misshapen, left over, where from."""

import numpy as np

from ninfer_convert.allocation import Assignment, assign
from ninfer_convert.checkpoint import HEADERS_ONLY
from ninfer_convert.families.checks import OptionalPart, SourceRules, check_absent, check_faults, check_sources
from ninfer_convert.families.qwen3_5 import Names, SourceMap, converted_prefixes, object_sources
from ninfer_convert.identity import BUILDABLE_RECIPES, Choice, config_differs
from ninfer_convert.plan_sources import PlanSources
from ninfer_convert.prepacked_check import config_disagreements
from ninfer_convert.problems import Problem
from ninfer_convert.sources.logical import LogicalCheckpoint, LogicalTensor
from ninfer_convert.sources.markers import plain_despite_config
from ninfer_format import Inventory, ModelConfig, SourceError

_COMPARE_ROWS = 4096


def check_beside(read: PlanSources, choice: Choice) -> None:
    """A base is of use only where the source is prepacked and the recipe takes its words."""
    if read.prepacked is None:
        return
    if not read.stores_nvfp4:
        message = f"no decoder matrix of {read.prepacked.folder} is stored as NVFP4, which a base goes beside"
        read.problems.append(Problem("base-not-needed", message, "--base", "leave it out, or give the NVFP4 folder"))
    elif choice.recipe in BUILDABLE_RECIPES and choice.recipe != "nvfp4":
        message = f"recipe {choice.recipe!r} has no NVFP4 matrix, so nothing would come from {read.prepacked.folder}"
        read.problems.append(Problem("base-not-needed", message, "--base", "convert the base alone, or use nvfp4"))
    if read.prepacked.config is not None and read.checkpoint.config is not None and not choice.published:
        for message in config_disagreements(read.checkpoint.config, read.prepacked.config):
            advice = "give the base that the NVFP4 checkpoint was made from"
            read.problems.append(Problem("config-disagrees", message, "NVFP4 config.json", advice))


def check_tensors(
    read: PlanSources, choice: Choice, model: ModelConfig, inventory: Inventory, names: Names
) -> Assignment:
    """Where every object comes from; what is wrong with the tensors for it goes to the findings of ``read``."""
    stored = read.checkpoint.tensors.keys() | read.checkpoint.unavailable
    source_map = object_sources(model, inventory, stored, names)
    beside = SourceMap()
    if read.prepacked is not None:
        others = read.prepacked.tensors.keys() | read.prepacked.unavailable
        beside = object_sources(model, inventory, others, read.names_in(read.prepacked))
    assignment = assign(inventory, source_map.sources, read.checkpoint, beside.sources, read.prepacked)
    if choice.published and config_differs(read.problems):
        check_absent(read.checkpoint, None, (), read.problems, read.notes)
        return assignment
    if read.checkpoint.has_weights:
        _check_own(read, choice, model, names, source_map, assignment)
    if read.prepacked is not None and read.prepacked.has_weights:
        _check_prepacked(read, read.prepacked, choice, model, beside, assignment)
    return assignment


def _check_own(
    read: PlanSources, choice: Choice, model: ModelConfig, names: Names, source_map: SourceMap, assignment: Assignment
) -> None:
    prefixes = converted_prefixes(model, names, "base")
    shapes = assignment.needed("base", source_map.shapes["base"])
    if check_faults(read.checkpoint, prefixes, read.problems):
        check_absent(read.checkpoint, shapes, (), read.problems, read.notes)
        return
    if note := plain_despite_config(read.checkpoint, shapes):
        read.notes.append(note)
    optional = (
        OptionalPart("mtp.", "--no-mtp", "the MTP draft layer"),
        OptionalPart(names.vision, "--no-vision", "image and video input"),
    )
    moe = model.geometry.architecture == "qwen3_5_moe"
    rules = SourceRules(
        bf16_only=choice.published,
        exact_names=choice.published and moe,
        errors_under=() if choice.published else prefixes,
        optional=() if read.options.identity is not None and choice.published else optional,
        imported=assignment.imported,
    )
    also_used = (*source_map.shapes["base"], *((names.lm_head,) if names.tied else ()))
    check_sources(read.checkpoint, shapes, also_used, rules, read.problems, read.notes)
    if names.tied:
        _check_tied(read, names)
    if read.dflash is not None and read.dflash.has_weights:
        inside = converted_prefixes(model, names, "dflash")
        if check_faults(read.dflash, inside, read.problems):
            return
        inner = SourceRules(choice.published, choice.published, inside, ())
        check_sources(read.dflash, source_map.shapes["dflash"], (), inner, read.problems, read.notes)


def _check_prepacked(
    read: PlanSources,
    prepacked: LogicalCheckpoint,
    choice: Choice,
    model: ModelConfig,
    beside: SourceMap,
    assignment: Assignment,
) -> None:
    """The NVFP4 folder beside a base: its decoder matrices. The closed check of a published identity came earlier."""
    prefixes = tuple(p for p in converted_prefixes(model, read.names_in(prepacked), "base") if ".layers." in p)
    decoder = tuple(p for p in prefixes if not p.startswith("mtp."))
    shapes = assignment.needed("packed", beside.shapes["base"])
    if not choice.published and check_faults(prepacked, decoder, read.problems):
        return
    rules = SourceRules(False, False, (), (), assignment.imported)
    notes: list[str] = []
    check_sources(prepacked, shapes, beside.shapes["base"], rules, read.problems, notes)
    read.notes.extend(f"NVFP4 folder: {note}" for note in notes)


def _check_tied(read: PlanSources, names: Names) -> None:
    """A head stored beside a tied embedding must equal it, word for word."""
    embedding, head = read.checkpoint.tensors.get(names.embedding), read.checkpoint.tensors.get(names.lm_head)
    if head is None or embedding is None:
        read.notes.append(f"tied embeddings: the output head is made from {names.embedding}")
        return
    if any(p.where in (head.file, embedding.file) for p in read.checkpoint.problems):
        return
    if (read.folder / HEADERS_ONLY).exists():
        read.notes.append(f"tied embeddings: {names.lm_head} is stored too; build compares it, headers do not tell")
        return
    try:
        difference = _tied_difference(read.checkpoint, head, embedding)
    except (SourceError, OSError) as error:
        difference = f"the two cannot be compared: {error}"
    if difference is None:
        read.notes.append(f"tied embeddings: {names.lm_head} equals {names.embedding}, which the head is made from")
        return
    message = f"tie_word_embeddings is true, but a separate head is stored: {difference}"
    advice = 'set "tie_word_embeddings": false in config.json if the stored head is the right one'
    read.problems.append(Problem("tied-head-differs", message, names.lm_head, advice))


def _tied_difference(checkpoint: LogicalCheckpoint, head: LogicalTensor, embedding: LogicalTensor) -> str | None:
    """How the two tensors differ, or None if they are equal; reads both a few rows at a time."""
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return f"it is {head.dtype} {list(head.shape)}, the embedding {embedding.dtype} {list(embedding.shape)}"
    rows = head.shape[0] if head.shape else 0
    for begin in range(0, rows, _COMPARE_ROWS):
        count = min(_COMPARE_ROWS, rows - begin)
        ours, theirs = (checkpoint.read_words(ref.name, begin, count) for ref in (head, embedding))
        unequal = np.flatnonzero((ours != theirs).any(axis=1))
        if unequal.size:
            return f"row {begin + int(unequal[0])} differs from the embedding's"
    return None
