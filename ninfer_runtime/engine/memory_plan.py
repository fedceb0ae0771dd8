"""From an ``EngineConfig`` to a memory plan, before anything is allocated; and what would fit where it does not."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ninfer_format.errors import UnsupportedError, UsageError
from ninfer_runtime.backends.base import Backend, MemoryPlan, ProgramLimits, ProgramOptions
from ninfer_runtime.config import (
    MAX_CONCURRENCY,
    PAGE_TOKENS,
    PREFILL_CHUNK_MULTIPLE,
    Architecture,
    EngineConfig,
    KvDtype,
    default_prefill_chunk,
)
from ninfer_runtime.models.binder import BoundModel

MAX_LOGITS_ROWS = 256
"""Rows of logits per teacher-forced call: 254 MB of float32 at 248,320 rows."""
HEADROOM_BYTES = 1 << 30
"""What ``kv_capacity="auto"`` leaves free on the device."""
LONGEST_CONTEXT = 1 << 20
"""Where the search for the largest context ends when the model names no limit of its own."""

_SMALLER_KV: tuple[KvDtype, ...] = ("int8", "fp6")
KV_FORMATS: tuple[KvDtype, ...] = ("bf16", *_SMALLER_KV)
GRID_SEQUENCES = (1, 2, 4, 8)
ContextGrid = Mapping[KvDtype, tuple[int | None, ...]]
Room = Callable[[EngineConfig], int | None]


def program_options(config: EngineConfig) -> ProgramOptions:
    """The part of the config that a backend sees."""
    return ProgramOptions(
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        weight_budget=config.weight_budget,
        kv_rotation=config.kv_rotation,
        nvfp4_activations=config.nvfp4_activations,
        prefill_activations=config.prefill_activations,
        proposer=config.spec,
        draft_head=config.lm_head_draft,
        acceptance=config.acceptance,
        residency=config.residency,
    )


def program_limits(config: EngineConfig, architecture: Architecture) -> ProgramLimits:
    """Limits of a program that serves this config; with ``kv_capacity`` "auto" those of the largest pool."""
    chunk = config.prefill_chunk or default_prefill_chunk(config.backend, architecture)
    chunk = min(chunk, config.max_context)
    return ProgramLimits(
        max_rows=config.max_concurrency,
        max_columns=1 + config.draft_tokens,
        max_context=config.max_context,
        n_pages=config.n_pages,
        n_slots=config.max_concurrency,
        prefill_chunk=chunk,
        logits_rows=min(chunk, MAX_LOGITS_ROWS),
        device_snapshots=config.snapshots,
        host_snapshots=config.host_snapshots,
        max_drafts=config.draft_tokens,
    )


def plan_engine(backend: Backend, model: BoundModel, config: EngineConfig) -> MemoryPlan:
    """The plan of an engine, or UsageError when the device has too little free memory for it.

    The message says how much is missing, what takes most, and which flag helps.
    """
    check_context(model, config)
    free = backend.free_memory(program_options(config))
    plan = plan_within(backend, model, config, free)
    if plan.reserved_bytes > free:
        raise UsageError(shortage(backend, model, config, plan, free))
    return plan


def check_context(model: BoundModel, config: EngineConfig) -> None:
    """UsageError for a context that the model was not made for."""
    limit = model.spec.max_position
    if limit is not None and config.max_context > limit:
        raise UsageError(f"max_context is {config.max_context}, the model was made for {limit}; lower --max-context")


def plan_within(backend: Backend, model: BoundModel, config: EngineConfig, free: int) -> MemoryPlan:
    """The plan of a config, whether it fits or not.

    With ``kv_capacity`` "auto" the pool is the largest that leaves ``HEADROOM_BYTES`` of ``free``: at most every
    sequence's whole context, at least one whole context and one page per sequence.
    """
    options, limits = program_options(config), program_limits(config, model.spec.architecture)
    least = max(config.pages_per_sequence, config.max_concurrency)
    if config.kv_capacity == "auto" and config.weight_residency == "ffn":
        # Networks take what the smallest pool leaves; the pool then takes the rest.
        options = backend.plan_memory(model, replace(limits, n_pages=least), options).options

    def planned(n_pages: int) -> MemoryPlan:
        return backend.plan_memory(model, replace(limits, n_pages=n_pages), options)

    if config.kv_capacity != "auto":
        return planned(limits.n_pages)
    n_pages = largest(least, limits.n_pages, lambda n: free - HEADROOM_BYTES - planned(n).reserved_bytes)
    return planned(n_pages or least)


def largest(low: int, high: int, room: Callable[[int], int | None]) -> int | None:
    """The largest n in low .. high with ``room(n)`` >= 0; None: not even low.

    ``room`` falls with n, nearly in a straight line, or is None from some n on: the straight line is tried in turn with
    the middle.
    """
    if high < low or (left := room(low)) is None or left < 0:
        return None
    if (missing := room(high)) is not None and missing >= 0:
        return high
    is_straight = True
    while high - low > 1:
        n = (low + high) // 2
        if is_straight and missing is not None:
            n = min(max(low + left * (high - low) // (left - missing), low + 1), high - 1)
        found = room(n)
        if found is not None and found >= 0:
            low, left = n, found
        else:
            high, missing = n, found
        is_straight = not is_straight
    return low


def room_on(backend: Backend, model: BoundModel) -> Room:
    """Bytes that a config leaves of the free memory, negative: that are missing; None: it cannot be planned."""

    def room(config: EngineConfig) -> int | None:
        try:
            free = backend.free_memory(program_options(config))
            return free - plan_within(backend, model, config, free).reserved_bytes
        except (UnsupportedError, UsageError):
            return None

    return room


def largest_context(model: BoundModel, config: EngineConfig, room: Room) -> int | None:
    """The longest context at the config's concurrency, in whole pages (or the model's limit); None: not even one."""
    limit = model.spec.max_position or LONGEST_CONTEXT
    if isinstance(config.kv_capacity, int):
        limit = min(limit, config.kv_capacity)

    def context(pages: int) -> EngineConfig:
        return replace(config, max_context=min(limit, pages * PAGE_TOKENS))

    pages = largest(1, -(-limit // PAGE_TOKENS), lambda n: room(context(n)))
    return None if pages is None else context(pages).max_context


def largest_concurrency(config: EngineConfig, room: Room) -> int | None:
    """The most sequences at the config's context; None: not even one."""
    return largest(1, MAX_CONCURRENCY, lambda n: room(replace(config, max_concurrency=n)))


def context_grid(model: BoundModel, config: EngineConfig, room: Room) -> ContextGrid:
    """The longest context of every KV format beside every number of sequences, each with its whole context in the pool.

    Everything else is the config's.
    """

    def context(kv_dtype: KvDtype, n: int) -> int | None:
        changed = replace(config, kv_dtype=kv_dtype, max_concurrency=n, kv_capacity=None)
        return largest_context(model, changed, room)

    return {kv_dtype: tuple(context(kv_dtype, n) for n in GRID_SEQUENCES) for kv_dtype in KV_FORMATS}


def remedy(model: BoundModel, config: EngineConfig, room: Room, moved: str = "") -> str | None:
    """Flags, with values, that make the config fit; None when none do. A single flag is preferred.

    ``moved``: flags that the config has already beyond the user's.
    """
    for changed, flags in _single_changes(config):
        if (left := room(changed)) is not None and left >= 0:
            return f"{flags}{moved}"
    if (tokens := largest_context(model, config, room)) is not None:
        return f"--max-context {tokens}{moved}"
    for kv_dtype in ("auto", *_SMALLER_KV):
        small = replace(config, max_concurrency=1, kv_dtype=kv_dtype, kv_capacity=None, prefill_chunk=_SMALLEST_CHUNK)
        small = replace(small, snapshots=0)
        if (tokens := largest_context(model, small, room)) is not None:
            context = f" --max-context {min(tokens, config.max_context)}"
            flags = f"--max-concurrency 1 --kv-dtype {kv_dtype} --prefill-chunk {_SMALLEST_CHUNK}{context}"
            return f"{flags}{moved}"
    if config.backend != "cuda" or (config.weight_residency == "ffn" and config.host_embedding):
        return None
    # Weights in host memory, and everything small besides.
    away = replace(config, weight_residency="ffn", host_embedding=True)
    return remedy(model, away, room, " --weight-residency ffn --host-embedding")


_SMALLEST_CHUNK = PREFILL_CHUNK_MULTIPLE


def _single_changes(config: EngineConfig) -> Iterator[tuple[EngineConfig, str]]:
    """Configs that differ in one setting and keep the context of every sequence, with their flags."""
    for kv_dtype in _SMALLER_KV:
        if kv_dtype != config.kv_dtype:
            yield replace(config, kv_dtype=kv_dtype), f"--kv-dtype {kv_dtype}"
    if config.snapshots:
        yield replace(config, snapshots=0), "--snapshots 0"
    if isinstance(config.kv_capacity, int) or (config.kv_capacity is None and config.max_concurrency > 1):
        yield replace(config, kv_capacity="auto"), "--kv-capacity auto"
    for n in range(config.max_concurrency - 1, 0, -1):
        yield replace(config, max_concurrency=n), f"--max-concurrency {n}"
    if config.prefill_chunk != _SMALLEST_CHUNK:
        yield replace(config, prefill_chunk=_SMALLEST_CHUNK), f"--prefill-chunk {_SMALLEST_CHUNK}"
    if config.backend == "cuda":
        yield from _host_changes(config)


def _host_changes(config: EngineConfig) -> Iterator[tuple[EngineConfig, str]]:
    """Weights in host memory: the embedding costs next to nothing, networks cost speed."""
    moves: list[tuple[dict[str, Any], str]] = []
    if not config.host_embedding:
        moves.append(({"host_embedding": True}, "--host-embedding"))
    if config.n_ffn_layers is not None:
        moves.append(({"n_ffn_layers": None}, "--n-ffn-layers auto"))
    elif config.weight_residency == "device":
        moves.append(({"weight_residency": "ffn"}, "--weight-residency ffn"))
    for changes, flags in moves:
        yield replace(config, **changes), flags
    if len(moves) > 1:
        yield replace(config, **moves[0][0], **moves[1][0]), " ".join(flags for _, flags in moves)


def shortage(backend: Backend, model: BoundModel, config: EngineConfig, plan: MemoryPlan, free: int) -> str:
    """One line: what is needed, what is free, what takes most, what helps."""
    rows = sorted(((n, label) for label, n in plan.rows() if n and not label.startswith("host")), reverse=True)
    parts = ", ".join(f"{label} {mebibytes(n)}" for n, label in rows)
    flags = remedy(model, config, room_on(backend, model))
    advice = f"{flags} would fit" if flags else "no flags make it fit; use a smaller artifact"
    return (
        f"the plan needs {mebibytes(plan.reserved_bytes)} on {config.device}, {mebibytes(free)} are free ({parts}); "
        f"{advice}"
    )


def mebibytes(n_bytes: int) -> str:
    """As reports write memory."""
    return f"{n_bytes / 2**20:,.0f} MiB"


@dataclass(frozen=True, slots=True)
class Survey:
    """What a device holds of a model: a plan, and the limits beside it.

    fits        whether the plan fits ``free_bytes``, what the device has for a program
    context     the longest context at the plan's concurrency; ``concurrency``: the most sequences at its context
    auto_tokens tokens of the pool that ``kv_capacity="auto"`` takes; None where it does not fit
    grid        longest context by KV format and number of sequences (``GRID_SEQUENCES``)
    remedy      flags that make the config fit, when it does not
    """

    plan: MemoryPlan
    free_bytes: int
    fits: bool
    context: int | None
    concurrency: int | None
    auto_tokens: int | None
    grid: ContextGrid
    remedy: str | None

    @property
    def left_bytes(self) -> int:
        """What stays free; negative: what is missing."""
        return self.free_bytes - self.plan.reserved_bytes


def survey(backend: Backend, model: BoundModel, config: EngineConfig) -> Survey:
    """Plan a config for a device, and search what else it could hold. Nothing is allocated."""
    check_context(model, config)
    free, room = backend.free_memory(program_options(config)), room_on(backend, model)
    plan = plan_within(backend, model, config, free)
    does_fit = plan.reserved_bytes <= free
    auto = plan_within(backend, model, replace(config, kv_capacity="auto"), free)
    return Survey(
        plan=plan,
        free_bytes=free,
        fits=does_fit,
        context=largest_context(model, config, room),
        concurrency=largest_concurrency(config, room),
        auto_tokens=auto.limits.n_pages * PAGE_TOKENS if auto.reserved_bytes <= free else None,
        grid=context_grid(model, config, room),
        remedy=None if does_fit else remedy(model, config, room),
    )
