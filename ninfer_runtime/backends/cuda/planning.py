"""What a program takes before anything is allocated, which networks it streams, and how fast its rounds should be."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ninfer_format.command import require_extra
from ninfer_format.errors import UnsupportedError, UsageError
from ninfer_format.geometry import up
from ninfer_runtime.backends.base import MemoryPlan, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda.arena import ALIGNMENT, ArenaPlan, Region
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.matrices import SmallMatrices
from ninfer_runtime.backends.cuda.memory import Regions, lay_out, memory_plan, round_columns, snapshot_bytes
from ninfer_runtime.backends.cuda.ops.gdn_state import GdnStateLayout
from ninfer_runtime.backends.cuda.packing import PackedMatrix
from ninfer_runtime.backends.cuda.residency import (
    ACCEPTANCE,
    CpuSeconds,
    LayerBytes,
    Rates,
    RoundBytes,
    RoundTime,
    choose,
    round_time,
)
from ninfer_runtime.backends.cuda.weights import GdnTensors, LayerTensors, MlpTensors
from ninfer_runtime.config import Residency
from ninfer_runtime.models.binder import BoundModel

_PREDICTED_DRAFTS = 3


Tables = dict[tuple[int, int, str, bool], tuple[BoundModel, tuple[Region, ...]]]
"""Regions of launches' tables that were counted before: by model, columns of a round, proposer and draft head. Counting
them takes longer than all the rest, and contexts and pools do not change them."""


def plan_program(
    model: BoundModel, limits: ProgramLimits, options: ProgramOptions, device: Device, tables: Tables | None = None
) -> MemoryPlan:
    """The sums of a program whose residency is chosen; UsageError or UnsupportedError for what has no kernels."""
    return _planned(model, limits, options, device, {} if tables is None else tables)[1]


def _planned(
    model: BoundModel, limits: ProgramLimits, options: ProgramOptions, device: Device, tables: Tables
) -> tuple[Regions, MemoryPlan]:
    plan, host = ArenaPlan(), ArenaPlan()
    regions = lay_out(model, limits, options, device, plan, host)
    key, begin = (id(model), round_columns(limits), options.proposer, options.draft_head), len(plan.regions)
    if key not in tables:
        SmallMatrices(device, plan, regions, round_columns(limits))
        tables[key] = model, tuple(plan.regions[begin:])
    else:
        for region in tables[key][1]:
            plan.take(region.name, region.n_bytes)
    return regions, memory_plan(limits, options, plan, snapshot_bytes(regions), host.n_bytes)


def plan_streamed(
    model: BoundModel,
    limits: ProgramLimits,
    options: ProgramOptions,
    device: Device,
    free: int,
    rates: Rates,
    tables: Tables | None = None,
) -> MemoryPlan:
    """The plan whose networks are streamed so that ``free`` bytes hold the program, if that is possible.

    UnsupportedError for a mixture of experts, UsageError for more resident layers than there are.
    """
    residency, n_layers = options.residency, len(model.layers)
    if (residency.n_ffn_layers or 0) > n_layers:
        raise UsageError(f"n_ffn_layers is {residency.n_ffn_layers}, the model has {n_layers} layers")
    on_device = replace(residency, weights="device", streamed=(), n_slots=0)
    kept = {} if tables is None else tables
    regions, resident = _planned(model, limits, replace(options, residency=on_device), device, kept)
    found = [_network(layer) for layer in regions.weights.layers]
    networks = [network for network in found if network is not None]
    if len(networks) < n_layers:
        raise UnsupportedError(
            f"{model.artifact.path}: a mixture of experts reads other parts of its networks in every round, which are "
            "not streamed; leave --weight-residency ffn out"
        )

    def with_streamed(streamed: tuple[int, ...], n_slots: int, on_cpu: tuple[int, ...] = ()) -> MemoryPlan:
        """Every region is aligned by itself, so sizes add up."""
        moved = [networks[i] for i in streamed]
        slot = sum(up(max((network[half] for network in moved), default=0), ALIGNMENT) for half in (0, 1))
        exact = n_slots * slot - sum(map(sum, moved))
        aligned = n_slots * slot - sum(_aligned(network) for network in moved)
        return replace(
            resident,
            options=replace(options, residency=replace(chosen, streamed=streamed, n_slots=n_slots, on_cpu=on_cpu)),
            weight_bytes=resident.weight_bytes + exact,
            workspace_bytes=resident.workspace_bytes + aligned - exact,
            host_weight_bytes=resident.host_weight_bytes + sum(_aligned(network) for network in moved),
            cpu_weight_bytes=sum(_cpu_bytes(model, i) for i in on_cpu),
        )

    seconds = None if rates.cpu is None else (rates.cpu.of_one, rates.cpu.of_eight)
    chosen = replace(residency, rates=(rates.read, rates.link), cpu_seconds=seconds)
    cost = round_bytes(model, regions, limits, limits.max_drafts)
    choice = choose(
        replace(cost, n_columns=limits.max_rows * cost.n_columns),  # what the CPU takes: of full rounds
        rates.limited(residency),
        residency,
        lambda streamed, n_slots: with_streamed(streamed, n_slots).reserved_bytes <= free,
    )
    return with_streamed(choice.streamed, choice.n_slots, choice.on_cpu)


def _cpu_bytes(model: BoundModel, layer: int) -> int:
    """Of a network in the form that the CPU multiplies."""
    require_extra("torch", "cpu")
    from ninfer_runtime.backends.cuda.cpu_networks import network_bytes

    return network_bytes(model, layer)


def _aligned(network: tuple[int, int]) -> int:
    return sum(up(n_bytes, ALIGNMENT) for n_bytes in network)


def _network(layer: LayerTensors) -> tuple[int, int] | None:
    """Bytes of a dense network's halves."""
    ffn = layer.ffn
    return (ffn.gate_up.n_bytes, ffn.down.n_bytes) if isinstance(ffn, MlpTensors) else None


def _sum(matrices: Iterable[PackedMatrix]) -> int:
    return sum(matrix.n_bytes for matrix in matrices)


def round_bytes(model: BoundModel, regions: Regions, limits: ProgramLimits, n_drafts: int) -> RoundBytes:
    """What a round of one row at the longest context reads, with so many drafts behind it."""
    r, weights = regions, regions.weights
    n_gdn = sum(isinstance(layer.mixer, GdnTensors) for layer in weights.layers)
    state = 2 * GdnStateLayout(r.gdn).state_bytes_per_slot // max(1, n_gdn)
    page = r.kv.n_bytes // (r.kv.n_layers * r.kv.n_pages)
    keys = page * limits.pages_per_row
    layers = []
    for layer in weights.layers:
        mixer = _sum(layer.mixer.inputs.matrices) + layer.mixer.output.n_bytes
        halves = _network(layer) or (_sum(layer.ffn.matrices), 0)
        layers.append(LayerBytes(mixer + (state if isinstance(layer.mixer, GdnTensors) else keys), *halves))
    tail, launches = weights.head.n_bytes, 2
    if (draft := weights.draft) is not None:
        own = draft.layer
        block = _sum([draft.input_projection, *own.mixer.inputs.matrices, own.mixer.output, *own.ffn.matrices]) + keys
        head = weights.head if draft.head is None else draft.head
        tail += block + n_drafts * head.n_bytes + max(0, n_drafts - 1) * block
        launches += 8 + 10 * n_drafts
    return RoundBytes(tuple(layers), tail, launches, 1 + n_drafts)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Rounds of one row at the longest context: plain ones, and with drafts where the program makes them."""

    plain: RoundTime
    drafting: RoundTime | None
    n_drafts: int

    @property
    def plain_rate(self) -> float:
        """Tokens per second without drafts."""
        return 1 / self.plain.seconds

    @property
    def drafting_rate(self) -> float | None:
        """With them, ``ACCEPTANCE`` of them accepted."""
        return None if self.drafting is None else (1 + ACCEPTANCE * self.n_drafts) / self.drafting.seconds


def forecast(model: BoundModel, regions: Regions, plan: MemoryPlan, rates: Rates) -> Forecast:
    """From bytes, rates, and the order of copies and products."""
    residency, n_drafts = plan.options.residency, min(_PREDICTED_DRAFTS, plan.limits.max_drafts)
    rates = rates.limited(residency)

    def seconds(n: int) -> RoundTime:
        cost = round_bytes(model, regions, plan.limits, n)
        return round_time(cost, residency.streamed or (), residency.n_slots, rates, residency.on_cpu)

    return Forecast(seconds(0), seconds(n_drafts) if n_drafts else None, n_drafts)


def planned_forecast(model: BoundModel, plan: MemoryPlan, device: Device, rates: Rates) -> Forecast:
    """Of a program that does not exist yet."""
    regions = lay_out(model, plan.limits, plan.options, device, ArenaPlan())
    return forecast(model, regions, plan, rates)


def forecast_text(found: Forecast) -> str:
    """In words."""
    drafts = found.drafting_rate
    more = "" if drafts is None else f", {drafts:.1f} with {found.n_drafts} drafts at {ACCEPTANCE:.0%} accepted"
    times = found.drafting or found.plain
    by_cpu = f", {times.cpu * 1e3:.1f} of them the CPU's" if times.cpu else ""
    return (
        f"{found.plain_rate:.1f} tokens/s{more} (a round of {times.seconds * 1e3:.1f} ms: "
        f"copies {times.copy * 1e3:.1f}, products {times.compute * 1e3:.1f}{by_cpu})"
    )


def cpu_of(residency: Residency) -> CpuSeconds | None:
    """What the CPU was found to take."""
    return None if residency.cpu_seconds is None else CpuSeconds(*residency.cpu_seconds)


def _cpu_text(residency: Residency) -> str:
    """Which networks it computes in rounds, and how long it takes for one."""
    if (seconds := cpu_of(residency)) is None:
        return "no network: none is streamed"
    took = f"{seconds.of_one * 1e3:.1f} ms a network, {seconds.of_eight * 1e3:.1f} in a round of eight columns"
    if not residency.on_cpu:
        return f"no network, rounds would be no shorter: {took}"
    layers = ", ".join(map(str, residency.on_cpu))
    return f"{len(residency.on_cpu)} networks in rounds (layers {layers}): {took}"


def residency_notes(model: BoundModel, regions: Regions, plan: MemoryPlan) -> tuple[tuple[str, str], ...]:
    """Where weights lie, for reports; nothing where all are on the device."""
    residency, ring = plan.options.residency, regions.weights.ring
    rows: list[tuple[str, str]] = []
    if residency.host_embedding:
        rows.append(("embedding", f"{regions.weights.embedding.n_bytes:,} bytes in host memory, read by rows"))
    if residency.weights == "ffn":
        n = len(model.layers)
        text = f"all {n} on the device"
        if ring is not None:
            slots = "1 slot" if ring.n_slots == 1 else f"{ring.n_slots} slots"
            layers = ", ".join(str(layer.layer) for layer in ring.layers)
            text = (
                f"{n - len(ring.layers)} of {n} on the device, {len(ring.layers)} through {slots} "
                f"(layers {layers}), {ring.copied_bytes:,} bytes per round"
            )
        rows.append(("networks", text))
        if residency.n_cpu_layers != 0:
            rows.append(("CPU", _cpu_text(residency)))
        if residency.rates is not None:
            rates = Rates(*residency.rates, cpu=cpu_of(residency))
            limited = rates.limited(residency)
            paced = f", paced to {limited.link / 1e9:.1f}" if limited != rates else ""
            rows.append(("link", f"{rates.link / 1e9:.1f} GB/s{paced}, memory {rates.read / 1e9:,.0f} GB/s"))
            rows.append(("predicted", forecast_text(forecast(model, regions, plan, rates))))
    return tuple(rows)
