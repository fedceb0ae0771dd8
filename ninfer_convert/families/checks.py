"""Compare what a family needs with what a checkpoint stores: existence, shape, dtype, and nothing left behind.

Findings are grouped by file and by name pattern, so that one cause is one line and never a wall of tensor names.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ninfer_convert.problems import Problem, some_names
from ninfer_convert.sources.bf16 import DIRECT_DTYPES
from ninfer_convert.sources.groups import weight_name
from ninfer_convert.sources.logical import PLAIN, LogicalCheckpoint, LogicalTensor

# Buffers that older libraries saved; they hold nothing that is not computed from the config.
_HARMLESS = (".rotary_emb.inv_freq",)
_NUMBER = re.compile(r"\.\d+(?=\.)")
_AGAIN = "download the complete checkpoint"


@dataclass(frozen=True, slots=True)
class OptionalPart:
    """A part of the model that can be left out: its source prefix, the option that does so, and what is lost."""

    prefix: str
    option: str
    loss: str


@dataclass(frozen=True, slots=True)
class SourceRules:
    """How strict the comparison is: exact name sets and BF16 only, or a custom conversion's."""

    bf16_only: bool
    exact_names: bool
    """Any unused tensor is an error."""
    errors_under: tuple[str, ...]
    """An unused tensor with one of these prefixes is an error."""
    optional: tuple[OptionalPart, ...]
    imported: frozenset[str] = frozenset()
    """Tensors whose stored words are taken over as they are."""


def check_sources(
    checkpoint: LogicalCheckpoint,
    shapes: Mapping[str, tuple[int, ...]],
    also_used: Iterable[str],
    rules: SourceRules,
    problems: list[Problem],
    notes: list[str],
) -> None:
    """Compare the needed ``shapes`` with ``checkpoint``; ``also_used`` names tensors accounted for elsewhere."""
    check_absent(checkpoint, shapes, rules.optional, problems, notes)
    _check_missing(checkpoint, shapes, rules.optional, problems)
    used = [ref for name in shapes if (ref := checkpoint.tensors.get(name)) is not None]
    _check_shapes(used, shapes, problems)
    _check_dtypes(used, rules, problems, notes)
    _check_unused(checkpoint, {*shapes, *also_used}, rules, problems, notes)


def check_absent(
    checkpoint: LogicalCheckpoint,
    needed: Iterable[str] | None,
    optional: Iterable[OptionalPart],
    problems: list[Problem],
    notes: list[str],
) -> None:
    """Shard files that are not there: a problem each if they hold something ``needed`` (None: everything is)."""
    wanted = None if needed is None else set(needed)
    for file, names in checkpoint.absent.items():
        lost = [name for name in names if wanted is None or name in wanted or weight_name(name) in wanted]
        if not lost and names:
            notes.append(f"{file} is not there; nothing that is converted lies in it ({len(names)} tensors)")
            continue
        what, advice = f"{len(names)} tensors, {some_names(names, 1)}", f"download {file}"
        for part in optional:
            if lost and all(name.startswith(part.prefix) for name in lost):
                what = f"{len(names)} tensors, all needed ones {part.prefix}*"
                advice += f", or pass {part.option} to convert without {part.loss}"
        message = f"the file is missing; the index puts {what} in it"
        problems.append(Problem("missing-shard", message, file, advice))


def _check_missing(
    checkpoint: LogicalCheckpoint,
    shapes: Mapping[str, tuple[int, ...]],
    optional: Iterable[OptionalPart],
    problems: list[Problem],
) -> None:
    stored = checkpoint.tensors
    missing = [name for name in shapes if name not in stored and name not in checkpoint.unavailable]
    for part in optional:
        needed = [name for name in shapes if name.startswith(part.prefix)]
        if needed and set(needed) <= set(missing):
            message = f"config.json describes {part.loss}, but the checkpoint holds no {part.prefix}* tensor"
            advice = f"{_AGAIN}, or pass {part.option} to convert without {part.loss}"
            problems.append(Problem("missing-part", message, part.prefix + "*", advice))
            missing = [name for name in missing if not name.startswith(part.prefix)]
    for pattern, names in _by_pattern(missing).items():
        shown = f"{len(names)} tensors are missing, the first is {names[0]}" if len(names) > 1 else "it is missing"
        expected = f"expected {list(shapes[names[0]])}"
        problems.append(Problem("missing-tensor", f"{shown}; {expected}", pattern, _missing_advice(pattern)))


def _missing_advice(pattern: str) -> str:
    if pattern.endswith("lm_head.weight"):
        return f'{_AGAIN}, or set "tie_word_embeddings": true in config.json if the head is the embedding'
    return _AGAIN


def _check_shapes(
    used: Iterable[LogicalTensor], shapes: Mapping[str, tuple[int, ...]], problems: list[Problem]
) -> None:
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    for ref in used:
        if ref.shape != shapes[ref.name]:
            groups[_pattern(ref.name), ref.shape, shapes[ref.name]].append(ref.name)
    for (pattern, found, expected), names in groups.items():
        message = f"shape {list(found)}, expected {list(expected)} from config.json{_count(names)}"
        advice = "use config.json and weights of one checkpoint"
        if len(expected) > 1 and found == (*expected[:-2], expected[-1], expected[-2]):
            advice += "; the last two dimensions look transposed"
        problems.append(Problem("wrong-shape", message, pattern, advice))


def _check_dtypes(used: Iterable[LogicalTensor], rules: SourceRules, problems: list[Problem], notes: list[str]) -> None:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    rounded: dict[str, list[str]] = defaultdict(list)
    dequantized: dict[str, list[str]] = defaultdict(list)
    imported: dict[str, list[str]] = defaultdict(list)
    for ref in used:
        if ref.name in rules.imported:
            imported[ref.kind].append(ref.name)
        elif ref.kind != PLAIN and not rules.bf16_only:
            dequantized[ref.kind].append(ref.name)
        elif ref.dtype not in DIRECT_DTYPES or (rules.bf16_only and ref.dtype != "BF16"):
            groups[_pattern(ref.name), ref.dtype].append(ref.name)
        elif ref.dtype != "BF16":
            rounded[ref.dtype].append(ref.name)
    for (pattern, dtype), names in groups.items():
        wanted = "BF16, which a published identity requires" if rules.bf16_only else ", ".join(DIRECT_DTYPES)
        plain = dtype in DIRECT_DTYPES
        advice = "convert it without --identity" if plain else "use the original BF16 checkpoint"
        problems.append(Problem("wrong-dtype", f"dtype {dtype}, expected {wanted}{_count(names)}", pattern, advice))
    for kind, names in imported.items():
        notes.append(f"{len(names)} tensors are stored as {kind}; their words are taken over: {some_names(names, 1)}")
    for kind, names in dequantized.items():
        how = "dequantized to float32, which only objects of BF16 or FP32 round to BF16"
        notes.append(f"{len(names)} tensors are stored as {kind} and {how}: {some_names(names, 1)}")
    for dtype, names in rounded.items():
        notes.append(f"{len(names)} {dtype} tensors are rounded to BF16, nearest, ties to even: {some_names(names, 1)}")


def _check_unused(
    checkpoint: LogicalCheckpoint, used: set[str], rules: SourceRules, problems: list[Problem], notes: list[str]
) -> None:
    unused = [n for n in checkpoint.tensors if n not in used and not n.endswith(_HARMLESS)]
    suspicious = [n for n in unused if rules.exact_names or n.startswith(rules.errors_under)]
    for pattern, names in _by_pattern(suspicious).items():
        message = f"the checkpoint stores it, but nothing in this model uses it{_count(names)}"
        advice = "use a checkpoint of exactly this architecture; converting would drop these weights"
        problems.append(Problem("unused-tensor", message, pattern, advice))
    if left := sorted(set(unused) - set(suspicious)):
        notes.append(f"{len(left)} tensors of the checkpoint are not used: {some_names(left)}")


def _pattern(name: str) -> str:
    return _NUMBER.sub(".*", name)


def _by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[_pattern(name)].append(name)
    return {names[0] if len(names) == 1 else pattern: names for pattern, names in groups.items()}


def _count(names: list[str]) -> str:
    return f" ({len(names)} tensors, the first is {names[0]})" if len(names) > 1 or "*" in _pattern(names[0]) else ""


def check_faults(checkpoint: LogicalCheckpoint, prefixes: tuple[str, ...], problems: list[Problem]) -> bool:
    """One problem per way in which tensors under ``prefixes`` are stored wrongly; whether there is any."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for fault in checkpoint.faults:
        if fault.name.startswith(prefixes):
            groups[fault.code, fault.message, fault.advice].append(fault.name)
    for (code, message, advice), names in groups.items():
        count, where = grouped_places(names)
        problems.append(Problem(code, message + count, where, advice))
    return bool(groups)


def grouped_places(names: list[str]) -> tuple[str, str]:
    """For a problem that tensors ``names`` share: how many there are, as a parenthesis, and where, by pattern."""
    if len(names) == 1:
        return "", names[0]
    return f" ({len(names)} tensors, the first is {names[0]})", some_names(list(_by_pattern(names)), 1)
