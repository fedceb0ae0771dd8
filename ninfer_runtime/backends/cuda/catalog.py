"""Every kernel variant that a model needs, and what each of them takes from an SM.

``model_specs`` is the one list: a program compiles it before it starts, ``ninfer-run kernels`` and the tests compile it
without a card. The register budget (``tuning/registers.json``) is what the variants took when it was recorded.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from ninfer_format.geometry import up
from ninfer_runtime.backends.cuda.arena import ArenaPlan
from ninfer_runtime.backends.cuda.compiler import Compiler, Cubin, KernelSpec
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.nvrtc import nvrtc
from ninfer_runtime.backends.cuda.ops import (
    attention_decode,
    attention_prefill,
    copy_pages,
    embed,
    gdn_decode,
    linear_large,
    linear_small,
    probes,
    repack,
    rms_norm,
    round_begin,
)
from ninfer_runtime.backends.cuda.ops.attention import attention_geometry
from ninfer_runtime.backends.cuda.ops.gdn_state import gdn_geometry
from ninfer_runtime.backends.cuda.ops.kv_cache import KvFormat
from ninfer_runtime.backends.cuda.ops.sampling import SamplerShape
from ninfer_runtime.backends.cuda.packing import PackedMatrix
from ninfer_runtime.backends.cuda.planned import CARDS, MODELS, planned_model
from ninfer_runtime.backends.cuda.resources import (
    MAX_SHARED_PER_BLOCK,
    Resources,
    blocks_per_sm,
    limits_of,
    resources_of,
)
from ninfer_runtime.backends.cuda.sass import Loop, has_disassembler, main_loop
from ninfer_runtime.backends.cuda.weights import DeviceWeights, plan_weights
from ninfer_runtime.models.spec import ModelSpec

KV_FORMATS: tuple[KvFormat, ...] = ("int8", "bf16")
BUDGET_FILE = Path(__file__).parent / "tuning" / "registers.json"
BUDGET_SCHEMA = "ninfer.registers/1"


@dataclass(frozen=True, slots=True)
class Needs:
    """What the kernels of one program are chosen by."""

    device: Device
    weights: DeviceWeights
    spec: ModelSpec
    kv_formats: tuple[KvFormat, ...]


Epilogue = str
Launch = tuple[tuple[PackedMatrix, ...], Epilogue]


def _launches(weights: DeviceWeights) -> Iterator[Launch]:
    """Matrices and epilogue of every matrix launch of a layer, and of the head."""
    for layer in weights.layers:
        yield layer.mixer.inputs.matrices, "store"
        yield (layer.mixer.output,), "residual"
        yield (layer.gate_up,), "swiglu"
        yield (layer.down,), "residual"
    yield (weights.head,), "store"


def _distinct_launches(weights: DeviceWeights) -> list[Launch]:
    """One launch of each kind: layers repeat, and kernels are told apart by formats, not by shapes."""
    kinds = {(tuple(m.format for m in matrices), epilogue): matrices for matrices, epilogue in _launches(weights)}
    return [(matrices, epilogue) for (_, epilogue), matrices in kinds.items()]


def _linear_small(needs: Needs) -> Iterable[KernelSpec]:
    launches = _distinct_launches(needs.weights)
    return chain.from_iterable(linear_small.specs(needs.device, *launch) for launch in launches)  # type: ignore[arg-type]


def _linear_large(needs: Needs) -> Iterable[KernelSpec]:
    launches = _distinct_launches(needs.weights)
    named = ((matrices, linear_large.Epilogue[epilogue.upper()]) for matrices, epilogue in launches)
    return chain.from_iterable(linear_large.specs(*launch) for launch in named)


def _attention_decode(needs: Needs) -> Iterable[KernelSpec]:
    geometries = (attention_geometry(needs.spec, format) for format in needs.kv_formats)
    return chain.from_iterable(map(attention_decode.specs, geometries))


def _attention_prefill(needs: Needs) -> Iterable[KernelSpec]:
    geometries = (attention_geometry(needs.spec, format) for format in needs.kv_formats)
    return chain.from_iterable(map(attention_prefill.specs, geometries))


def _sampling(needs: Needs) -> Iterable[KernelSpec]:
    return SamplerShape(needs.spec.n_addressable, up(needs.spec.text.vocab_rows, 4)).specs()


def _gdn_decode(needs: Needs) -> Iterable[KernelSpec]:
    return gdn_decode.specs(gdn_geometry(needs.spec.text, needs.spec.norm_eps))


OPERATORS: Mapping[str, Callable[[Needs], Iterable[KernelSpec]]] = {
    "linear_small": _linear_small,
    "linear_large": _linear_large,
    "attention_decode": _attention_decode,
    "attention_prefill": _attention_prefill,
    "copy_pages": lambda needs: copy_pages.specs(),
    "gdn_decode": _gdn_decode,
    "embed": lambda needs: embed.specs(needs.weights.embedding.format, needs.spec.text.hidden),
    "repack": lambda needs: repack.specs({matrix.format for matrix in needs.weights.matrices}),
    "rms_norm": lambda needs: rms_norm.specs(needs.spec.text.hidden),
    "round_begin": lambda needs: round_begin.specs(),
    "sampling": _sampling,
}
"""Modules of ``ops`` with kernels, and how each is asked for its variants."""

MEASURING: Mapping[str, Callable[[], Iterable[KernelSpec]]] = {"probes": probes.specs}
"""Modules of ``ops`` that measure a card and belong to no model."""


def model_specs(needs: Needs) -> tuple[KernelSpec, ...]:
    """All variants of a program. UnsupportedError for shapes that an operator does not have."""
    return tuple(dict.fromkeys(chain.from_iterable(collect(needs) for collect in OPERATORS.values())))


@cache
def planned_specs(arch: str) -> Mapping[KernelSpec, tuple[str, ...]]:
    """Every variant of ``planned.MODELS`` on the cards of ``arch``, with the models that need it; () for measuring.

    A target without a listed card is planned as the first card of the list.
    """
    cards = [card for card in CARDS if card.arch == arch] or CARDS[:1]
    users: dict[KernelSpec, list[str]] = {}
    for name in MODELS:
        model = planned_model(name)
        weights = plan_weights(model, ArenaPlan())
        for card in cards:
            for spec in model_specs(Needs(card.as_device(), weights, model.spec, KV_FORMATS)):
                users.setdefault(spec, []).append(name)
    for collect in MEASURING.values():
        for spec in collect():
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
        loop=main_loop(cubin.image, spec.name) if sass and has_disassembler() else None,
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
