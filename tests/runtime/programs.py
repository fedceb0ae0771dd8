"""Drive a program by hand: prompts, rounds of any shape, and the committed state as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.backends.base import (
    Float32s,
    Int32s,
    PrefillChunk,
    Program,
    ProgramLimits,
    ProgramOptions,
    Round,
    RoundResult,
    page_table,
)
from ninfer_runtime.backends.reference import ReferenceBackend
from ninfer_runtime.backends.reference.program import ReferenceProgram
from ninfer_runtime.config import Dtype, SamplingParams
from ninfer_runtime.models.binder import BoundModel

GREEDY = SamplingParams.greedy()
PAGES_PER_SLOT = 4
LIMITS = ProgramLimits(
    max_rows=4,
    max_columns=6,
    max_context=64 * PAGES_PER_SLOT,
    n_pages=5 * PAGES_PER_SLOT,
    n_slots=5,
    prefill_chunk=256,
    device_snapshots=2,
    host_snapshots=1,
)


def program_of(model: BoundModel, dtype: Dtype = "float32", **limits: Any) -> ReferenceProgram:
    """A program with small limits; all weights resident."""
    backend = ReferenceBackend()
    plan = backend.plan_memory(model, replace(LIMITS, **limits), ProgramOptions(dtype=dtype, weight_budget=1 << 30))
    return backend.create(model, plan)


def int32(*values: int) -> Int32s:
    return np.array(values, np.int32)


def pages_of(slot: int) -> Int32s:
    """The pages these tests give a slot; scattered, so that order matters."""
    return np.arange(slot, 5 * PAGES_PER_SLOT, 5, dtype=np.int32)[::-1].copy()


def random_ids(model: BoundModel, seed: int, n_tokens: int) -> Int32s:
    ids = np.random.default_rng(seed).integers(0, model.spec.n_addressable, n_tokens)
    return ids.astype(np.int32)


def cuts(seed: int, n_tokens: int) -> list[int]:
    """Random chunk lengths, one of them 1, that add up to ``n_tokens``."""
    rng, parts = np.random.default_rng(seed), [1]
    while sum(parts) < n_tokens:
        parts.append(int(rng.integers(1, min(70, n_tokens - sum(parts)) + 1)))
    return parts


def prefill(
    program: Program, ids: Int32s, *, slot: int = 0, chunks: Iterable[int] | None = None, fresh: bool = True
) -> Float32s:
    """Feed ``ids`` in chunks and return all logits [T, V]."""
    if fresh:
        program.reset(slot)
    out = []
    for n in chunks or [len(ids)]:
        start = program.length(slot)
        part, ids = ids[:n], ids[n:]
        out.append(program.prefill(PrefillChunk(slot, part, start, pages_of(slot), logits="all")).logits)
    return np.concatenate(out)


@dataclass
class Row:
    """One row of a round under test."""

    slot: int
    inputs: Sequence[int]
    sampling: SamplingParams = GREEDY
    stop_ids: frozenset[int] = frozenset()
    budget: int = 1000


def round_of(program: Program, *rows: Row, **fields: Any) -> Round:
    """A round at the slots' present lengths."""
    q = max(len(row.inputs) for row in rows)
    token_ids = np.zeros((len(rows), q), np.int32)
    for b, row in enumerate(rows):
        token_ids[b, : len(row.inputs)] = row.inputs
    return Round(
        slots=int32(*(row.slot for row in rows)),
        token_ids=token_ids,
        n_columns=int32(*(len(row.inputs) for row in rows)),
        starts=int32(*(program.length(row.slot) for row in rows)),
        rope_deltas=np.zeros(len(rows), np.int32),
        pages=page_table([pages_of(row.slot).tolist() for row in rows], PAGES_PER_SLOT),
        sampling=tuple(row.sampling for row in rows),
        stop_ids=tuple(row.stop_ids for row in rows),
        budget=int32(*(row.budget for row in rows)),
        **fields,
    )


def play(program: Program, *rows: Row, **fields: Any) -> RoundResult:
    """Launch, read, commit in full."""
    ticket = program.launch(round_of(program, *rows, **fields))
    result = program.read(ticket)
    program.commit(ticket)
    return result


def emitted(result: RoundResult, b: int = 0) -> list[int]:
    """Tokens of one row."""
    return [int(token) for token in result.token_ids[b, : result.emitted[b]]]


def step(program: Program, first: int, n: int, row: Row | None = None) -> list[int]:
    """``n`` tokens one column at a time, starting from the last emitted token ``first``."""
    row, tokens = row or Row(0, [first]), [first]
    for _ in range(n):
        tokens += emitted(play(program, replace(row, inputs=[tokens[-1]])))
    return tokens[1:]


def state_of(program: ReferenceProgram, slot: int = 0) -> tuple[NDArray[Any], ...]:
    """Committed state of a slot, bit for bit: convolution columns, matrices, counts, length."""
    recurrent = program._slots.recurrent[slot]
    conv = recurrent.conv.float().numpy().copy()
    counts = program._slots.counts[slot].copy()
    return conv, recurrent.matrices.numpy().copy(), counts, np.array(program.length(slot))


def same(first: tuple[NDArray[Any], ...], second: tuple[NDArray[Any], ...]) -> bool:
    """Whether two states are equal, bit for bit."""
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
