"""A program under test: opened, bound, created, with contexts of any length filled cheaply."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np

from ninfer_format.errors import UsageError
from ninfer_format.reader import Artifact
from ninfer_runtime.backends import backend
from ninfer_runtime.backends.base import (
    Backend,
    Int32s,
    MemoryPlan,
    PrefillChunk,
    PrefillResult,
    Program,
    ProgramLimits,
    ProgramOptions,
)
from ninfer_runtime.config import (
    ON_DEVICE,
    PAGE_TOKENS,
    Architecture,
    Dtype,
    KvDtype,
    Nvfp4Activations,
    PrefillActivations,
    Proposer,
    Residency,
    SamplingParams,
    default_prefill_chunk,
)
from ninfer_runtime.models.binder import BoundModel, bind

GREEDY = SamplingParams.greedy()
SEED_TOKENS = 1024
"""Tokens really processed to fill a context; their pages are copied over the rest of it."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Which artifact runs where, and how much of it is kept ready."""

    path: Path
    backend: str = "cuda"
    device: str = "cuda"
    dtype: Dtype = "bfloat16"
    kv_dtype: KvDtype = "int8"
    prefill_chunk: int | None = None
    """None: what the engine takes for the model."""
    seed: int = 0
    max_drafts: int = 0
    """Of the draft layer, if there is one to measure."""
    residency: Residency = ON_DEVICE
    nvfp4_activations: Nvfp4Activations = "auto"
    prefill_activations: PrefillActivations = "bf16"


@dataclass(frozen=True, slots=True)
class Room:
    """What a set of benchmarks needs: rows and columns of its widest round, tokens of its longest row and of all."""

    rows: int = 1
    columns: int = 1
    context: int = 2048
    tokens: int = 2048

    def including(self, other: "Room") -> "Room":
        """Enough for both."""
        names = ("rows", "columns", "context", "tokens")
        return Room(**{name: max(getattr(self, name), getattr(other, name)) for name in names})


@runtime_checkable
class SetsLength(Protocol):
    """A program that can pretend a length: contexts are then filled by copying pages."""

    def bench_set_length(self, slot: int, n_tokens: int) -> None:
        """Make ``n_tokens`` the committed length; state and pages stay as they are."""


class Running:
    """An open artifact and its program. Made by ``running``."""

    def __init__(self, artifact: Artifact, model: BoundModel, plan: MemoryPlan, program: Program, seconds: float):
        self.artifact = artifact
        self.model = model
        self.plan = plan
        self.program = program
        self.create_seconds = seconds

    @property
    def identity(self) -> str:
        """model/weights, the middle of every id."""
        return str(self.artifact.identity)

    @property
    def kv_dtype(self) -> str:
        """Storage of keys and values, resolved."""
        options = self.plan.options
        if options.kv_dtype != "auto":
            return options.kv_dtype
        return "bf16" if options.dtype == "bfloat16" else "float32"

    def pages(self, slot: int, n_slots: int) -> Int32s:
        """The pages of one of ``n_slots`` slots: an equal part of the pool, at most one context."""
        limits = self.plan.limits
        each = min(limits.n_pages // n_slots, limits.pages_per_row)
        return np.arange(slot * each, (slot + 1) * each, dtype=np.int32)

    def fill(self, slots: Sequence[int], n_tokens: int, seed: int) -> tuple[Int32s, ...]:
        """Give every slot a context of ``n_tokens`` random tokens; pages of each. Equal seeds give equal contexts.

        A program that can pretend a length processes ``SEED_TOKENS`` of them and copies their pages; others process
        them all.
        """
        program, out = self.program, []
        for slot in slots:
            pages = self.pages(slot, len(slots))
            if n_tokens > len(pages) * PAGE_TOKENS:
                raise UsageError(f"a context of {n_tokens} tokens needs more pages than the {len(pages)} planned")
            program.reset(slot)
            really = n_tokens
            if isinstance(program, SetsLength):
                really = min(n_tokens, SEED_TOKENS)
            self.prefill(slot, 0, really, pages, seed + slot)
            if really < n_tokens:
                source = pages[: really // PAGE_TOKENS]
                targets = pages[len(source) : -(-n_tokens // PAGE_TOKENS)]
                program.copy_pages(np.resize(source, len(targets)), targets)
                cast(SetsLength, program).bench_set_length(slot, n_tokens)
            out.append(pages)
        return tuple(out)

    def prefill(self, slot: int, start: int, n_tokens: int, pages: Int32s, seed: int) -> PrefillResult:
        """Process random tokens in chunks from ``start`` on and draw one after the last, greedily."""
        ids, limit = self.random_ids(n_tokens, seed), self.plan.limits.prefill_chunk
        result: PrefillResult | None = None
        for begin in range(0, n_tokens, limit):
            part = ids[begin : begin + limit]
            is_last = begin + len(part) == n_tokens
            chunk = PrefillChunk(slot, part, start + begin, pages, sampling=GREEDY if is_last else None)
            result = self.program.prefill(chunk)
        if result is None:
            raise UsageError("a prompt of no tokens was asked for")
        return result

    def random_ids(self, n_tokens: int, seed: int) -> Int32s:
        """Addressable ids, int32 [n_tokens]."""
        rng = np.random.default_rng(seed)
        return rng.integers(0, self.model.spec.n_addressable, n_tokens).astype(np.int32)


def program_limits(options: BenchOptions, room: Room, architecture: Architecture) -> ProgramLimits:
    """Limits that hold ``room``."""
    n_pages = -(-max(room.tokens, room.context) // PAGE_TOKENS)
    chunk = options.prefill_chunk or default_prefill_chunk(options.backend, architecture)
    return ProgramLimits(
        max_rows=room.rows,
        max_columns=room.columns,
        max_context=room.context,
        n_pages=max(n_pages, room.rows * -(-room.tokens // room.rows // PAGE_TOKENS)),
        n_slots=room.rows,
        prefill_chunk=min(chunk, room.context),
        logits_rows=1,
        max_drafts=options.max_drafts,
    )


def has_draft_layer(path: Path) -> bool:
    """Whether the artifact has one."""
    with Artifact.open(path) as artifact:
        return bind(artifact).mtp is not None


def no_room(options: BenchOptions, room: Room) -> str | None:
    """What the device lacks for a program with so much room; None when it lacks nothing. UsageError for longer contexts
    than the model was made for."""
    maker = backend(options.backend)
    with Artifact.open(options.path) as artifact:
        return _planned(maker, bind(artifact), options, room)[1]


def _planned(maker: Backend, model: BoundModel, options: BenchOptions, room: Room) -> tuple[MemoryPlan, str | None]:
    longest = model.spec.max_position
    if longest is not None and room.context > longest:
        raise UsageError(f"the benchmark needs {room.context} tokens, the model was made for {longest}; use less")
    proposer: Proposer = "mtp" if options.max_drafts else "none"
    wanted = ProgramOptions(
        options.device,
        options.dtype,
        options.kv_dtype,
        nvfp4_activations=options.nvfp4_activations,
        prefill_activations=options.prefill_activations,
        proposer=proposer,
        residency=options.residency,
    )
    plan = maker.plan_memory(model, program_limits(options, room, model.spec.architecture), wanted)
    missing = plan.device_bytes - maker.free_memory(wanted)
    if missing <= 0:
        return plan, None
    return plan, (
        f"the benchmark needs {plan.device_bytes / 2**20:,.0f} MiB on {options.device}, "
        f"{missing / 2**20:,.0f} MiB more than are free; lower --context or --rows"
    )


@contextmanager
def running(options: BenchOptions, room: Room) -> Iterator[Running]:
    """Open, bind and create; everything is given back at the end.

    UsageError when the device has too little memory, with what is missing.
    """
    maker = backend(options.backend)
    with Artifact.open(options.path) as artifact:
        model = bind(artifact)
        plan, problem = _planned(maker, model, options, room)
        if problem is not None:
            raise UsageError(problem)
        started = time.perf_counter()
        program = maker.create(model, plan)
        try:
            yield Running(artifact, model, plan, program, time.perf_counter() - started)
        finally:
            program.close()


def in_range(model: BoundModel, token_ids: Sequence[int]) -> bool:
    """Whether every id may be sampled."""
    return all(0 <= token_id < model.spec.n_addressable for token_id in token_ids)
