"""Checks of a prepacked NVFP4 source that need values: global scales, and BF16 tensors that the base must repeat.

``build`` makes them before it creates a file; ``plan --values`` on request.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from ninfer_convert.families import ObjectSource
from ninfer_convert.plan import ConversionPlan
from ninfer_convert.problems import Problem, some_names
from ninfer_convert.row_reader import RowReader
from ninfer_convert.sources.nvfp4 import PackedNvfp4
from ninfer_format import SourceError

_COMPARE_ELEMENTS = 1 << 21


def check_values(plan: ConversionPlan) -> tuple[list[Problem], list[str]]:
    """Problems, and notes for the report, of a plan without other problems. OSError passes through.

    The BF16 matrices that base and prepacked folder both hold are read in full, global scales one by one.
    """
    problems: list[Problem] = []
    notes = _check_global_scales(plan, problems)
    if twins := plan.require().twins:
        problems += _unequal_twins(plan)
        notes.append(f"{len(twins)} matrices are BF16 in both folders, and their words are equal")
    return problems, notes


def with_values(plan: ConversionPlan) -> ConversionPlan:
    """``plan`` with what ``check_values`` finds."""
    with plan.checkpoint, plan.prepacked or nullcontext():
        problems, notes = check_values(plan)
    return replace(plan, problems=tuple(problems), notes=(*plan.notes, *notes))


def _check_global_scales(plan: ConversionPlan, problems: list[Problem]) -> list[str]:
    target = plan.require()
    weights: list[str] = []
    inputs: list[str] = []
    absent = 0
    for source in target.sources:
        if source.transform not in ("packed", "input_divisor"):
            continue
        tensors = plan.checkpoint_of(source).tensors
        words = [packed for name in source.tensors if (packed := tensors[name].packed) is not None]
        is_weight = source.transform == "packed"
        try:
            divisors = [(p, d) for p in words if (d := _divisor(p, is_weight)) is not None]
        except SourceError as error:
            problems.append(Problem("bad-global-scale", str(error), source.name, "use an undamaged checkpoint"))
            continue
        absent += not divisors
        if len({d.view(np.uint32).item() for _, d in divisors}) > 1:
            if target.published:
                problems.append(_differing(source, divisors, is_weight))
            (weights if is_weight else inputs).append(source.name)
    notes = []
    if weights:
        what = "block scales are rounded anew for one divisor per matrix, at most half an E4M3 step"
        notes.append(f"in {len(weights)} fused matrices the global scales differ: {what}: {some_names(weights, 1)}")
    if inputs:
        what = "the smallest divisor is stored, which covers the largest activations"
        notes.append(f"for {len(inputs)} fused matrices the activation scales differ: {what}: {some_names(inputs, 1)}")
    if absent and target.coding.stats is None:
        what = "their input_scale_divisor is 1; --activation-stats gives measured ones"
        notes.append(f"{absent} NVFP4 matrices have no activation scale: {what}")
    return notes


def _divisor(packed: PackedNvfp4, is_weight: bool) -> np.float32 | None:
    return packed.weight_divisor() if is_weight else packed.input_divisor()


def _differing(source: ObjectSource, divisors: Sequence[tuple[PackedNvfp4, np.float32]], is_weight: bool) -> Problem:
    (first, a), (second, b) = divisors[0], next(pair for pair in divisors if pair[1] != divisors[0][1])
    names = [p.weight_global_name if is_weight else p.input_global_name for p in (first, second)]
    message = f"{names[0]} is {a:.9g}, {names[1]} is {b:.9g}; a published artifact stores one for both, unchanged"
    advice = "convert it without --identity: a custom artifact gets a common divisor"
    return Problem("global-scales-differ", message, source.name, advice)


def _unequal_twins(plan: ConversionPlan) -> Iterator[Problem]:
    target = plan.require()
    own = {source.name: source for source in target.sources}
    for name, twin in target.twins.items():
        readers = [RowReader(plan.checkpoint_of(source), source) for source in (own[name], twin)]
        if (place := _first_difference(*readers)) is not None:
            tensor, index = readers[1].locate(*place)
            message = f"the base holds another value than the NVFP4 folder at index {list(index)}"
            advice = "give the base that the NVFP4 checkpoint was made from"
            yield Problem("base-differs", message, tensor, advice)


def _first_difference(ours: RowReader, theirs: RowReader) -> tuple[int, int] | None:
    """Row and column of the first element with different BF16 words."""
    step = max(1, _COMPARE_ELEMENTS // ours.width)
    for begin in range(0, ours.n_rows, step):
        shape = min(step, ours.n_rows - begin), ours.width
        a, b = np.empty(shape, np.uint16), np.empty(shape, np.uint16)
        ours.read(begin, a)
        theirs.read(begin, b)
        if (unequal := a != b).any():
            row, column = np.unravel_index(int(unequal.argmax()), shape)
            return begin + int(row), int(column)
    return None
