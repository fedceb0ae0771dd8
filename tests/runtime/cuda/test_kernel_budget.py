"""Every kernel variant of the planned models, for both tuned targets: no spills, no local memory, no growth.

The budget is recorded with one compiler version (``constraints/cpu.txt`` pins it); ``scripts/record_registers.py``
records it anew after a kernel changed for a reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ninfer_runtime.backends.base import MemoryPlan, ProgramOptions
from ninfer_runtime.backends.cuda.catalog import (
    BUDGET_FILE,
    DRAFTING,
    LIMITS,
    KernelRow,
    budget_of,
    kernel_rows,
    planned_specs,
    problems_of,
    program_specs,
    read_budget,
)
from ninfer_runtime.backends.cuda.compiler import KERNEL_FOLDER, KernelSpec
from ninfer_runtime.backends.cuda.nvrtc import nvrtc
from ninfer_runtime.backends.cuda.ops.quantize_rows import has_fp4_product
from ninfer_runtime.backends.cuda.planned import CARDS, MODELS, TARGETS, Card, planned_model
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.config import KvDtype

GOOD = KernelRow("good[]x128", "sm_120a", 128, 32, 0, 0, 1024, 4, ("tiny/w8",), ())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", TARGETS)
def test_every_variant_stays_within_its_budget(arch: str) -> None:
    rows = kernel_rows(arch)
    problems = problems_of(rows, read_budget()[arch])
    assert not problems, "\n".join(problems)
    warnings = [f"{row.name}: {warning}" for row in rows for warning in row.warnings]
    assert not warnings, "\n".join(warnings)


def test_budget_is_of_this_compiler() -> None:
    recorded = json.loads(BUDGET_FILE.read_text())["nvrtc"]
    installed = ".".join(map(str, nvrtc().version))
    assert recorded == installed, "record the budget again: python scripts/record_registers.py"


class Prepared(Exception):
    """Ends the making of a program once it has said what it needs."""


class Asking:
    """A device that keeps what a program wants to have prepared."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def __getattr__(self, name: str) -> Any:
        return getattr(self._card, name)

    def stream(self) -> object:
        return object()

    def allocate(self, n_bytes: int) -> int:
        return 1 << 20

    def free(self, pointer: int) -> None:
        assert pointer == 1 << 20

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        raise Prepared(frozenset(specs))


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("tiny/groupwise-int", "int8"),
        ("tiny/groupwise-int", "fp6"),
        ("tiny/bf16", "bf16"),
        ("tiny-moe/groupwise-int", "int8"),
    ],
)
def test_catalog_lists_exactly_what_a_program_prepares(name: str, dtype: KvDtype) -> None:
    model, card, options = planned_model(name), CARDS[0], ProgramOptions(kv_dtype=dtype)
    drafting = replace(options, proposer="mtp", draft_head=True)
    by_ratio = replace(drafting, acceptance="ratio")
    wide, narrow = DRAFTING
    for limits, chosen in ((LIMITS, options), (wide, drafting), (narrow, by_ratio)):
        plan = MemoryPlan(limits, chosen, *(1 << 36,) * 6)
        device: Any = Asking(card)
        with pytest.raises(Prepared) as prepared:
            CudaProgram(model, plan, device)
        listed = program_specs(model, card.as_device(), limits, chosen)
        assert prepared.value.args[0] == frozenset(listed)
        assert set(listed) <= set(planned_specs(card.arch))


@pytest.mark.parametrize("arch", TARGETS)
def test_no_kernel_is_left_out(arch: str) -> None:
    expected = {path.name for path in KERNEL_FOLDER.glob("*.cu")} - (
        set() if has_fp4_product(arch) else {"linear_fp4.cu"}
    )
    assert {spec.source for spec in planned_specs(arch)} == expected


@pytest.mark.parametrize("arch", TARGETS)
def test_every_planned_model_has_kernels_and_every_variant_a_name_of_its_own(arch: str) -> None:
    specs = planned_specs(arch)
    assert set(MODELS) == {name for users in specs.values() for name in users}
    names = [(spec.variant, spec.shared_bytes) for spec in specs]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"local_bytes": 16}, "has 16 bytes of local memory"),
        ({"shared_bytes": 101_377}, "takes 101377 bytes of shared memory, at most 101376"),
        ({"blocks_per_sm": 0}, "does not fit an SM"),
        ({"registers": 33}, "takes 33 registers, 32 were recorded"),
    ],
)
def test_each_limit_is_held(change: dict[str, int], complaint: str) -> None:
    assert problems_of([GOOD], budget_of([GOOD])) == []
    (problem,) = problems_of([replace(GOOD, **change)], budget_of([GOOD]))  # type: ignore[arg-type]
    assert problem == f"good[]x128 for sm_120a {complaint}"


def test_fewer_registers_than_recorded_are_fine() -> None:
    assert problems_of([replace(GOOD, registers=31)], budget_of([GOOD])) == []


def test_variant_without_budget_and_budget_without_variant_are_problems() -> None:
    assert problems_of([GOOD], {}) == ["good[]x128 for sm_120a has no recorded register budget"]
    assert problems_of([], budget_of([GOOD])) == ["good[]x128 is recorded, but no kernel has that name"]
