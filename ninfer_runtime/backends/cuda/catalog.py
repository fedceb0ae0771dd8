"""Every kernel variant that a model needs, and what each of them takes from an SM.

``program_specs`` lists what a program prepares when it starts; ``ninfer-run kernels`` and the tests compile the same
for models and cards that are not there. The register budget (``tuning/registers.json``) is what the variants took when
it was recorded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

from ninfer_format.directory import TensorEntry
from ninfer_format.formats import NUMERIC_FORMATS
from ninfer_runtime.backends.base import ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda import draft_pass, matrices, prompt_pass, round_pass
from ninfer_runtime.backends.cuda.arena import ArenaPlan
from ninfer_runtime.backends.cuda.compiler import Compiler, Cubin, KernelSpec
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.memory import lay_out, round_columns
from ninfer_runtime.backends.cuda.nvrtc import nvrtc
from ninfer_runtime.backends.cuda.ops import probes, repack
from ninfer_runtime.backends.cuda.ops.round_state import MAX_COLUMNS, MAX_ROWS
from ninfer_runtime.backends.cuda.planned import CARDS, MODELS, planned_model
from ninfer_runtime.backends.cuda.resources import (
    MAX_SHARED_PER_BLOCK,
    Resources,
    blocks_per_sm,
    limits_of,
    resources_of,
)
from ninfer_runtime.backends.cuda.sass import Loop, main_loop
from ninfer_runtime.config import Acceptance, KvDtype, Nvfp4Activations
from ninfer_runtime.models.binder import BoundModel

KV_STORAGES: tuple[tuple[KvDtype, bool], ...] = (
    ("int8", True),
    ("int8", False),
    ("fp6", True),
    ("fp6", False),
    ("bf16", False),
)
"""Formats of keys and values, with and without the rotation in front of them."""
NVFP4_ACTIVATIONS: tuple[Nvfp4Activations, ...] = ("a4", "a16")
"""What prompts may multiply NVFP4 matrices by."""
LIMITS = ProgramLimits(max_rows=MAX_ROWS, max_columns=MAX_COLUMNS, n_slots=MAX_ROWS)
"""Of the planned programs: every number of rows and columns a round can have."""
DRAFTING = (replace(LIMITS, max_drafts=MAX_COLUMNS - 1), replace(LIMITS, max_rows=1, max_drafts=MAX_COLUMNS - 1))
"""Of those that draft, equal and by ratio."""
BUDGET_FILE = Path(__file__).parent / "tuning" / "registers.json"
BUDGET_SCHEMA = "ninfer.registers/1"


def program_specs(
    model: BoundModel, device: Device, limits: ProgramLimits, options: ProgramOptions
) -> tuple[KernelSpec, ...]:
    """All variants of a program; only numbers are read from ``device``. UnsupportedError as ``memory.lay_out``."""
    plan = ArenaPlan()
    regions = lay_out(model, limits, options, device, plan)
    small = matrices.SmallMatrices(device, plan, regions, round_columns(limits))
    parts = (
        small.specs,
        matrices.large_specs(regions),
        round_pass.specs(regions, model.spec, limits.max_columns),
        prompt_pass.specs(regions, model.spec),
        draft_pass.specs(regions, model.spec, limits.max_columns),
        repack.specs({matrix.format for matrix in regions.weights.matrices}),
    )
    return tuple(dict.fromkeys(chain.from_iterable(parts)))


def _other_rows(model: BoundModel) -> list[ProgramOptions]:
    """What prompts may multiply matrices by, whatever a card's own choice is."""
    formats = {entry.format for entry in model.artifact.objects if isinstance(entry, TensorEntry)}
    wanted: list[ProgramOptions] = []
    if "NVFP4" in formats:
        wanted += [ProgramOptions(kv_dtype="int8", nvfp4_activations=kind) for kind in NVFP4_ACTIVATIONS]
    if any(NUMERIC_FORMATS[name].kind == "grouped" for name in formats):
        wanted.append(ProgramOptions(kv_dtype="int8", prefill_activations="int8"))
    return wanted


@cache
def planned_specs(arch: str) -> Mapping[KernelSpec, tuple[str, ...]]:
    """Every variant of ``planned.MODELS`` on the cards of ``arch``, with the models that need it; () for measuring.

    A target without a listed card is planned as the first card of the list.
    """
    cards = [card for card in CARDS if card.arch == arch] or CARDS[:1]
    users: dict[KernelSpec, list[str]] = {}
    for name in MODELS:
        model = planned_model(name)
        for card, (dtype, rotation), limits in product(cards, KV_STORAGES, (LIMITS, *DRAFTING)):
            options = ProgramOptions(kv_dtype=dtype, kv_rotation=rotation)
            if limits.max_drafts:
                acceptance: Acceptance = "equal" if limits.max_rows > 1 else "ratio"
                options = replace(options, proposer="mtp", draft_head=True, acceptance=acceptance)
            for spec in program_specs(model, card.as_device(), limits, options):
                users.setdefault(spec, []).append(name)
        for card, options in product(cards, _other_rows(model)):
            for spec in program_specs(model, card.as_device(), LIMITS, options):
                users.setdefault(spec, []).append(name)
    for spec in probes.specs():
        users.setdefault(spec, [])
    return {spec: tuple(dict.fromkeys(names)) for spec, names in users.items()}


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One compiled variant. ``shared_bytes`` per block, static included; ``loop`` None unless asked for."""

    name: str
    arch: str
    threads: int
    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    used_by: tuple[str, ...]
    warnings: tuple[str, ...]
    loop: Loop | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object; ``loop`` only when there is one."""
        document = asdict(self)
        if self.loop is None:
            del document["loop"]
        return document


def _row(spec: KernelSpec, arch: str, cubin: Cubin, used_by: tuple[str, ...], *, sass: bool) -> KernelRow:
    found: Resources = resources_of(cubin.image, cubin.log, spec.name)
    return KernelRow(
        name=spec.variant,
        arch=arch,
        threads=spec.threads,
        registers=found.registers,
        spill_bytes=found.spill_bytes,
        local_bytes=found.local_bytes,
        shared_bytes=spec.shared_bytes + found.static_shared_bytes,
        blocks_per_sm=blocks_per_sm(found, spec.threads, spec.shared_bytes, limits_of(arch)),
        used_by=used_by,
        warnings=cubin.warnings,
        loop=main_loop(cubin.image, spec.name) if sass else None,
    )


def kernel_rows(
    arch: str, *, compiler: Compiler | None = None, jobs: int | None = None, sass: bool = False
) -> list[KernelRow]:
    """Compile everything for ``arch`` and describe each variant, by name. CompileError, MissingExtraError."""
    specs = planned_specs(arch)
    cubins = (compiler or Compiler(arch)).compile_all(specs, jobs)
    rows = (_row(spec, arch, cubins[spec], users, sass=sass) for spec, users in specs.items())
    return sorted(rows, key=lambda row: (row.name, row.shared_bytes))


def budget_of(rows: Sequence[KernelRow]) -> dict[str, int]:
    """Registers per variant name."""
    return {row.name: row.registers for row in rows}


def read_budget(path: Path = BUDGET_FILE) -> Mapping[str, Mapping[str, int]]:
    """arch → variant → registers, as recorded."""
    recorded: Mapping[str, Mapping[str, int]] = json.loads(path.read_text(encoding="utf-8"))["registers"]
    return recorded


def write_budget(registers: Mapping[str, Mapping[str, int]], path: Path = BUDGET_FILE) -> None:
    """Record a budget, with the compiler that it is true for."""
    version = ".".join(map(str, nvrtc().version))
    by_name = {arch: dict(sorted(found.items())) for arch, found in registers.items()}
    document = {"schema": BUDGET_SCHEMA, "nvrtc": version, "registers": by_name}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def problems_of(rows: Sequence[KernelRow], budget: Mapping[str, int]) -> list[str]:
    """What must not be: spills, local memory, too much shared memory, blocks that fit no SM, more registers."""
    problems: list[str] = []
    for row in rows:
        where = f"{row.name} for {row.arch}"
        if row.spill_bytes:
            problems.append(f"{where} spills {row.spill_bytes} bytes")
        if row.local_bytes:
            problems.append(f"{where} has {row.local_bytes} bytes of local memory")
        if row.shared_bytes > MAX_SHARED_PER_BLOCK:
            problems.append(f"{where} takes {row.shared_bytes} bytes of shared memory, at most {MAX_SHARED_PER_BLOCK}")
        if not row.blocks_per_sm:
            problems.append(f"{where} does not fit an SM")
        if row.name not in budget:
            problems.append(f"{where} has no recorded register budget")
        elif row.registers > budget[row.name]:
            problems.append(f"{where} takes {row.registers} registers, {budget[row.name]} were recorded")
    problems += [f"{name} is recorded, but no kernel has that name" for name in budget if name not in budget_of(rows)]
    return problems
