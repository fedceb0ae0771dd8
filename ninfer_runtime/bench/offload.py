"""Rounds whose feed-forward networks come from host memory, on a card that is emulated: less memory, a slower link.

A round can end no sooner than its copies alone, and no sooner than its products alone: both are measured in the same
run, the products on a program of the same model that is all resident. How much longer it takes is a property of the
schedule, and is carried over to the card that is meant.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from ninfer_format.reader import Artifact
from ninfer_runtime.bench.decode import WARM_UP_ROUNDS, Shape, problem_of, time_rounds
from ninfer_runtime.bench.drafts import N_DRAFTS, time_drafting
from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import BenchOptions, Running, no_room, running
from ninfer_runtime.commands.report import say
from ninfer_runtime.config import ON_DEVICE, Residency
from ninfer_runtime.models.binder import bind
from ninfer_runtime.models.qwen3_5 import MlpWeights

MEMORY_LIMIT = 16 << 30
LINK_LIMIT = 27e9
PUBLISHED_LAYERS = 41
"""Resident layers of the published measurement on an RTX 5060 Ti."""
ACCEPTED = 0.52
"""Share of the drafts that was accepted there."""
TARGET = "rtx5060ti"
DRAFTING = f"k{N_DRAFTS}"
_COPY_SAMPLES = _PROMPT_SAMPLES = 3


@runtime_checkable
class CopiesNetworks(Protocol):
    """A program that may stream networks."""

    def bench_copies(self) -> float:
        """Seconds that the copies of one round take alone."""


@dataclass(frozen=True, slots=True)
class OffloadCase:
    """``n_layers`` whose networks stay on the device, ``n_cpu`` of the others that the CPU computes; None: as many as
    fit, as make rounds shortest. A case that is left out where it does not fit says so on stderr."""

    context: int
    rounds: int
    n_layers: int | None = None
    memory_limit: int = MEMORY_LIMIT
    link_limit: float = LINK_LIMIT
    n_cpu: int | None = 0
    left_out_without_room: bool = False

    @property
    def residency(self) -> Residency:
        """As an option of the program."""
        return Residency(
            "ffn",
            self.n_layers,
            n_cpu_layers=self.n_cpu,
            host_embedding=True,
            memory_limit=self.memory_limit,
            link_limit=self.link_limit,
        )

    @property
    def shape(self) -> Shape:
        """Of the widest round."""
        return Shape(self.context, 1, 1 + N_DRAFTS, self.rounds)


def offload_cases(context: int, rounds: int) -> tuple[OffloadCase, ...]:
    """What fits the card, and the published number of layers if that fits, whose rounds are long."""
    published = OffloadCase(context, max(8, rounds // 4), PUBLISHED_LAYERS, left_out_without_room=True)
    return OffloadCase(context, rounds), published


@dataclass(frozen=True, slots=True)
class _Measured:
    """Seconds per round and the tokens, without drafts and with ``N_DRAFTS`` of them; seconds of a whole prompt."""

    plain: float
    drafting: float
    prompt: float
    plain_tokens: tuple[int, ...]
    drafted_tokens: tuple[int, ...]
    problem: str


def offload(options: BenchOptions, cases: Sequence[OffloadCase], accepted: float = ACCEPTED) -> Iterator[Result]:
    """``offload/…`` of every case, with ``accepted`` of the drafts taken; nothing for models and programs that cannot
    stream."""
    with Artifact.open(options.path) as artifact:
        if not all(isinstance(layer.ffn, MlpWeights) for layer in bind(artifact).layers):
            return
    options = replace(options, max_drafts=N_DRAFTS)
    resident: dict[tuple[int, int], _Measured] = {}
    for case in cases:
        key = case.context, case.rounds
        if key not in resident:
            with running(replace(options, residency=ON_DEVICE), case.shape.room) as run:
                if not isinstance(run.program, CopiesNetworks):
                    return
                resident[key] = _measure(run, case, options.seed, accepted)
        streaming = replace(options, residency=case.residency)
        if case.left_out_without_room and (problem := no_room(streaming, case.shape.room)):
            say(f"{case.n_layers} resident networks are left out: {problem}")
            continue
        with running(streaming, case.shape.room) as run:
            yield from _results(run, case, options.seed, accepted, resident[key])


def _measure(run: Running, case: OffloadCase, seed: int, accepted: float) -> _Measured:
    shape = replace(case.shape, columns=1)
    plain = time_rounds(run, shape, seed)
    seconds, results = time_drafting(run, case.shape, seed, accepted)
    prompts, first_token = [], None
    for _ in range(1 + _PROMPT_SAMPLES):
        run.program.reset(0)
        started = time.perf_counter()
        first_token = run.prefill(0, 0, case.context, run.pages(0, 1), seed).token_id
        prompts.append(time.perf_counter() - started)
    return _Measured(
        plain=plain.mean,
        prompt=float(np.median(prompts[1:])),
        drafting=float(np.mean(seconds)),
        plain_tokens=(first_token or 0, *(int(result.token_ids[0, 0]) for result in plain.results)),
        drafted_tokens=tuple(int(token) for result in results for token in result.token_ids[0, : result.emitted[0]]),
        problem=problem_of(run, shape, plain, seed),
    )


def _results(run: Running, case: OffloadCase, seed: int, accepted: float, resident: _Measured) -> Iterator[Result]:
    assert isinstance(run.program, CopiesNetworks)
    found = _measure(run, case, seed, accepted)
    copies = float(np.median([run.program.bench_copies() for _ in range(_COPY_SAMPLES)]))
    chosen, n_layers = run.plan.options.residency, len(run.model.layers)
    n_resident = n_layers - len(chosen.streamed or ())
    wrong = found.problem or resident.problem
    check = f"{len(found.plain_tokens) + len(found.drafted_tokens)} tokens as of the resident program"
    name = f"offload/{run.identity}/n{n_resident}/ctx{case.context}"
    if chosen.n_cpu_layers != 0:  # whose sums are in another order
        name += f"/cpu{len(chosen.on_cpu)}"
        same = [one == other for one, other in zip(found.plain_tokens, resident.plain_tokens, strict=False)]
        check = f"the first {(*same, False).index(False)} of {len(same)} tokens as of the resident program"
    elif found.plain_tokens != resident.plain_tokens or found.drafted_tokens != resident.drafted_tokens:
        wrong = wrong or "tokens differ from those of the program that is all resident"
    by_cpu, n_moving = _cpu_seconds(chosen), _n_moving(chosen, chosen.on_cpu)
    all_copies = copies * _n_moving(chosen, ()) / n_moving if n_moving else 0.0
    expected = _forecast(run)
    per_round = len(found.drafted_tokens) / (WARM_UP_ROUNDS + case.rounds)
    chunks = -(-case.context // run.plan.limits.prefill_chunk)
    for kind, seconds, products, passes, n_tokens, predicted in (
        ("plain", found.plain, resident.plain, 1, 1.0, (expected.get("plain"), 1.0)),
        (DRAFTING, found.drafting, resident.drafting, 1, per_round, (expected.get(DRAFTING), 1 + accepted * N_DRAFTS)),
        ("prefill", found.prompt, resident.prompt, chunks, case.context, (None, 0.0)),
    ):
        on_cpu = by_cpu.get(kind, 0.0)
        moved = passes * (all_copies if kind == "prefill" else copies)
        ratio = seconds / max(moved, products + on_cpu)
        details = {
            "ms": round(seconds * 1e3, 4),
            "copies_ms": round(moved * 1e3, 4),
            "products_ms": round(products * 1e3, 4),
            "cpu_ms": round(on_cpu * 1e3, 4),
            "on_cpu": list(chosen.on_cpu),
            "streamed": list(chosen.streamed or ()),
            "slots": chosen.n_slots,
            "device_bytes": run.plan.reserved_bytes,
            "host_bytes": run.plan.host_weight_bytes,
            "link_gbps": round(case.link_limit / 1e9, 3),
            "tokens": round(n_tokens, 4),
        }
        yield Result(f"{name}/{kind}", ratio, "x of the larger bound", check=check, problem=wrong, details=details)
        if predicted[0] is not None:
            took = predicted[0] * ratio
            details = {"round_ms": round(took * 1e3, 3), "forecast_ms": round(predicted[0] * 1e3, 3)}
            id_, rate = f"{name}/{kind}/{TARGET}", predicted[1] / took
            yield Result(id_, rate, "tok/s predicted", check=check, problem=wrong, details=details)


def _n_moving(residency: Residency, on_cpu: tuple[int, ...]) -> int:
    """Networks that a pass copies when it leaves those ``on_cpu`` out."""
    from ninfer_runtime.backends.cuda.residency import moving_layers

    streamed = residency.streamed or ()
    skipped = {k for k, layer in enumerate(streamed) if layer in on_cpu}
    return len(moving_layers(len(streamed), residency.n_slots, skipped))


def _cpu_seconds(residency: Residency) -> dict[str, float]:
    """Of the networks that the CPU computes in a round, as it took for one before: plain, with drafts."""
    from ninfer_runtime.backends.cuda.planning import cpu_of

    if (seconds := cpu_of(residency)) is None:
        return {}
    n = len(residency.on_cpu)
    return {"plain": n * seconds.at(1), DRAFTING: n * seconds.at(1 + N_DRAFTS)}


def _forecast(run: Running) -> dict[str, float]:
    """Seconds of rounds on the card that is meant, by its own plan of the same limits: plain, with drafts."""
    from ninfer_runtime.backends.cuda.card import CardBackend, card_named

    backend, options = CardBackend(card_named(TARGET)), run.plan.options
    meant = replace(options.residency, streamed=None, n_slots=0, on_cpu=(), n_cpu_layers=0)
    meant = replace(meant, memory_limit=None, link_limit=None, rates=None, cpu_seconds=None)
    plan = backend.plan_memory(run.model, run.plan.limits, replace(options, residency=meant))
    found = backend.forecast(run.model, plan)
    if found is None:
        return {}
    return {"plain": found.plain.seconds} | ({DRAFTING: found.drafting.seconds} if found.drafting else {})
