"""Rounds that draft and verify, beside plain ones: what a round costs, and tokens per second at a given acceptance.

Random weights accept nothing, so acceptance is forced: the program takes each draft with a probability that makes
``ACCEPTED`` of all drafts right (``bench_accept``). Everything is computed as without that.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from ninfer_runtime.backends.base import Round, RoundResult, RowStatus, following
from ninfer_runtime.bench.bytes_moved import draft_bytes, kv_bytes_per_token, recurrence_bytes, round_bytes
from ninfer_runtime.bench.decode import WARM_UP_ROUNDS, RoundDriver, Shape, state_writes
from ninfer_runtime.bench.ops import CHAIN_L2_SIZES, chain_seconds
from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import Running, in_range

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.device import Device, Stream

ACCEPTED = 0.68
"""Share of the drafts that are right, as published for the engine whose rounds these are."""
N_DRAFTS = 3
ROWS = (1, 8)


@runtime_checkable
class ForcesAcceptance(Protocol):
    """A program that can take drafts whatever was drawn."""

    def bench_accept(self, probability: float) -> None:
        """From the next round on take every draft with this probability; 0: as it was drawn."""


@runtime_checkable
class RunsRecurrence(Protocol):
    """A program of the CUDA backend: its device, and the launches of its recurrent layers."""

    device: "Device"

    def bench_recurrence(self, n_rows: int, n_columns: int) -> list[Callable[["Stream"], None]]:
        """One launch per layer; each folds ``n_columns`` - 1 columns and records ``n_columns``."""


def acceptance_per_draft(share: float, n_drafts: int) -> float:
    """The probability p of each draft, given those before it, with p + p² + .. + pⁿ = n · share."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(1, n_drafts + 1)) < n_drafts * share else (low, p)
    return high


def drafts(run: Running, context: int, rounds: int, seed: int, plain: Mapping[int, float]) -> list[Result]:
    """``drafts/…``: rounds of ``N_DRAFTS`` drafts at 1 and 8 rows, as many as the program has.

    ``plain``: seconds of a round without drafts by rows, of a program that does not draft.
    """
    limits = run.plan.limits
    if limits.max_drafts < N_DRAFTS or not isinstance(run.program, ForcesAcceptance):
        return []
    out: list[Result] = []
    for n_rows in ROWS:
        if n_rows <= limits.max_rows and n_rows in plain:
            out += _drafts(run, Shape(context, n_rows, 1 + N_DRAFTS, rounds), seed, plain[n_rows])
    return out


def _drafts(run: Running, shape: Shape, seed: int, plain: float) -> list[Result]:
    seconds, results = time_drafting(run, shape, seed)
    again = time_drafting(run, replace(shape, rounds=WARM_UP_ROUNDS), seed)[1]
    objects, text = run.artifact.directory.objects, run.model.spec.text
    context = shape.context + WARM_UP_ROUNDS + shape.rounds
    own = N_DRAFTS * draft_bytes(objects)
    n_attention = text.layer_kinds.count("attention")
    own += N_DRAFTS * shape.rows * context * kv_bytes_per_token(text, run.kv_dtype) // n_attention
    timed = results[WARM_UP_ROUNDS:]
    emitted = sum(int(result.emitted.sum()) for result in timed)
    written = state_writes(run, shape, emitted / len(timed) / shape.rows)
    n_columns = shape.rows * shape.columns
    moved = (
        round_bytes(objects, text, [context] * shape.rows, run.kv_dtype, n_columns, state_writes=written).total + own
    )
    drafted = sum(int(result.drafted.sum()) for result in timed if result.drafted is not None)
    accepted = sum(int(result.accepted.sum()) for result in timed)
    mean, name = sum(seconds) / len(seconds), f"{run.identity}/c{shape.rows}/k{N_DRAFTS}"
    problem = _problem(run, results, again)
    check = f"{len(results)} rounds in range, {len(again)} repeated equal"
    details = {
        "mean_ms": round(mean * 1e3, 4),
        "median_ms": round(float(np.median(seconds)) * 1e3, 4),
        "p95_ms": round(float(np.percentile(seconds, 95)) * 1e3, 4),
        "plain_ms": round(plain * 1e3, 4),
        "draft_bytes": own,
        "accepted": round(accepted / max(drafted, 1), 4),
        "tokens_per_round": round(emitted / len(seconds) / shape.rows, 4),
        "context": shape.context,
    }
    return [
        Result(
            id=f"drafts/{name}/ctx{shape.context}",
            value=emitted / sum(seconds),
            unit="tok/s",
            limit="read_gbps",
            achieved=moved / mean / 1e9,
            check=check,
            problem=problem,
            details=details,
        ),
        Result(
            id=f"drafts/{name}/round",
            value=mean / plain,
            unit="x of a plain round",
            check=check,
            problem=problem,
            details=details,
        ),
    ]


def time_drafting(
    run: Running, shape: Shape, seed: int, accepted: float = ACCEPTED
) -> tuple[list[float], list[RoundResult]]:
    """Seconds between the reads of ``shape.rounds`` rounds, and the results of all, those that warm up included."""
    program = run.program
    assert isinstance(program, ForcesAcceptance)
    pages = run.fill(range(shape.rows), shape.context, seed)
    wanted = np.full(shape.rows, N_DRAFTS, np.int32)
    program.bench_accept(acceptance_per_draft(accepted, N_DRAFTS))
    round_: Round = replace(RoundDriver(run, replace(shape, columns=1), pages, seed).first, n_drafts=wanted)
    ticket, stamps, results = program.launch(round_), [0.0], []
    try:
        for _ in range(1 + WARM_UP_ROUNDS + shape.rounds):
            round_ = following(round_, ticket, wanted + 1, wanted)
            ahead = program.launch(round_)
            results.append(program.read(ticket))
            stamps.append(time.perf_counter())
            ticket = ahead
    finally:
        program.rollback(ticket)
        program.bench_accept(0.0)
    return np.diff(stamps[-shape.rounds - 1 :]).tolist(), results[1:]


def _problem(run: Running, results: list[RoundResult], again: list[RoundResult]) -> str:
    """What is wrong with the output, or nothing."""
    for n, result in enumerate(results):
        for b, status in enumerate(result.status):
            tokens = result.token_ids[b, : result.emitted[b]].tolist()
            if status is not RowStatus.RUNNING or not tokens or not in_range(run.model, tokens):
                return f"round {n}, row {b}: {status.name}, tokens {tokens}"
    for n, (first, second) in enumerate(zip(results, again, strict=False)):
        if not np.array_equal(first.token_ids, second.token_ids):
            return f"round {n} emitted {first.token_ids.tolist()}, in a second run {second.token_ids.tolist()}"
    return ""


def recurrence(run: Running) -> list[Result]:
    """``state/…``: the recurrent layers of a round that folds 3 columns and records 4, at 1 and 8 rows."""
    program, limits, text = run.program, run.plan.limits, run.model.spec.text
    n_columns = 1 + N_DRAFTS
    if not isinstance(program, RunsRecurrence) or limits.max_columns < n_columns:
        return []
    out = []
    for n_rows in ROWS:
        if n_rows > limits.max_rows:
            continue
        moved = n_rows * recurrence_bytes(text, n_columns - 1, n_columns)
        run.fill(range(n_rows), min(64, run.plan.limits.max_context // 2), 0)
        launches = program.bench_recurrence(n_rows, n_columns)
        repeats = -(-CHAIN_L2_SIZES * program.device.l2_bytes // moved)
        seconds = chain_seconds(program.device, launches, repeats) / repeats
        out.append(
            Result(
                id=f"state/{run.identity}/c{n_rows}",
                value=seconds * 1e6,
                unit="us",
                limit="read_gbps",
                achieved=moved / seconds / 1e9,
                check="as the rounds",
                details={"layers": len(launches), "folded": n_columns - 1, "recorded": n_columns, "bytes": moved},
            )
        )
    return out
