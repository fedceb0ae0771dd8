"""Let a program say something: a whole sequence on one slot, with as many drafts per round as wanted."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import train_tiny

from ninfer_runtime.backends.base import (
    Int32s,
    Logprobs,
    PrefillChunk,
    PrefillResult,
    ProgramLimits,
    ProgramOptions,
    Round,
    RoundResult,
    RowStatus,
    following,
    page_table,
)
from ninfer_runtime.backends.reference import ReferenceBackend
from ninfer_runtime.backends.reference.drafts import Draft, HeldDrafts
from ninfer_runtime.backends.reference.program import ReferenceProgram
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import parse_conversation
from tests.runtime.programs import GREEDY, LIMITS, PAGES_PER_SLOT, int32, pages_of

MAX_DRAFTS = 5
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, seed=11)
SPREAD = replace(SAMPLED, temperature=1.3, top_p=1.0, top_k=0, presence_penalty=0.6, frequency_penalty=0.3)
"""Penalties, and every id a candidate."""


def proposing(
    model: BoundModel, *, max_drafts: int = MAX_DRAFTS, limits: ProgramLimits = LIMITS, **options: Any
) -> ReferenceProgram:
    """A program that drafts, or with ``max_drafts`` 0 one without a proposer; all weights resident."""
    backend = ReferenceBackend()
    options = {"weight_budget": 1 << 30, "proposer": "mtp" if max_drafts else "none", **options}
    limits = replace(limits, max_drafts=max_drafts)
    return backend.create(model, backend.plan_memory(model, limits, ProgramOptions(**options)))


def hold(program: ReferenceProgram, index: int, anchor: int, drafts: Iterable[int], slot: int = 0) -> None:
    """Put drafts of the tokens behind ``anchor``, the sequence's token ``index``, into a slot."""
    program._slots.held[slot] = HeldDrafts(index, anchor, tuple(Draft(token) for token in drafts))


@dataclass(slots=True)
class Spoken:
    """What one sequence emitted, its log probabilities, and (drafted, accepted) of every round."""

    tokens: list[int]
    logprobs: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    status: RowStatus = RowStatus.RUNNING

    def acceptance(self, n_drafts: int) -> tuple[list[int], list[int]]:
        """How often draft i was evaluated, and how often it and those before it were right."""
        drafted = [sum(n > i for n, _ in self.rounds) for i in range(n_drafts)]
        return drafted, [sum(n > i for _, n in self.rounds) for i in range(n_drafts)]


def opened(
    program: ReferenceProgram,
    prompt: Int32s,
    *,
    n_drafts: int = 0,
    slot: int = 0,
    sampling: SamplingParams = GREEDY,
    chunks: Iterable[int] | None = None,
    fresh: bool = True,
    **fields: Any,
) -> PrefillResult:
    """Feed the prompt in chunks and draw what follows."""
    if fresh:
        program.reset(slot)
    lengths = list(chunks or [len(prompt)])
    for i, n in enumerate(lengths):
        part, prompt = prompt[:n], prompt[n:]
        chunk = PrefillChunk(slot, part, program.length(slot), pages_of(slot))
        if i == len(lengths) - 1:
            chunk = replace(chunk, sampling=sampling, n_drafts=n_drafts, **fields)
        result = program.prefill(chunk)
    assert result.token_id is not None
    return result


def round_with_drafts(
    program: ReferenceProgram,
    token_id: int,
    *,
    n_drafts: int,
    slot: int = 0,
    sampling: SamplingParams = GREEDY,
    stop_ids: frozenset[int] = frozenset(),
    budget: int = 1000,
    columns: int | None = None,
    **fields: Any,
) -> Round:
    """A round of one row that evaluates the drafts its slot holds (at most ``columns`` - 1) and drafts anew."""
    columns = (n_drafts + 1) if columns is None else columns
    return Round(
        slots=int32(slot),
        token_ids=np.array([[token_id, *[0] * (columns - 1)]], np.int32),
        n_columns=int32(columns),
        starts=int32(program.length(slot)),
        rope_deltas=int32(0),
        pages=page_table([pages_of(slot).tolist()], PAGES_PER_SLOT),
        sampling=(sampling,),
        stop_ids=(stop_ids,),
        budget=int32(budget),
        own_drafts=n_drafts > 0,
        n_drafts=int32(n_drafts) if n_drafts else None,
        **fields,
    )


def speak(
    program: ReferenceProgram,
    prompt: Int32s,
    n: int,
    *,
    n_drafts: int = 0,
    sampling: SamplingParams = GREEDY,
    stop_ids: frozenset[int] = frozenset(),
    n_top_logprobs: int | None = None,
    one_ahead: bool = False,
    chunks: Iterable[int] | None = None,
) -> Spoken:
    """At most ``n`` tokens on slot 0; every round committed in full."""
    first = opened(
        program,
        prompt,
        n_drafts=min(n_drafts, max(0, n - 2)),
        sampling=sampling,
        n_top_logprobs=n_top_logprobs,
        chunks=chunks,
    )
    assert first.token_id is not None
    out = Spoken([first.token_id])
    _note_logprobs(out, first.logprobs, 1)
    round_ = round_with_drafts(
        program,
        first.token_id,
        n_drafts=n_drafts,
        sampling=sampling,
        stop_ids=stop_ids,
        budget=n - 1,
        n_top_logprobs=n_top_logprobs,
    )
    if first.token_id in stop_ids:
        out.status = RowStatus.STOP_ID
    ticket = program.launch(round_) if out.status is RowStatus.RUNNING else None
    while ticket is not None:
        ahead = None
        if one_ahead:
            wanted = int32(n_drafts)
            round_ = following(round_, ticket, wanted + 1 if n_drafts else None, wanted if n_drafts else None)
            ahead = program.launch(round_)
        result = program.read(ticket)
        if not one_ahead:
            program.commit(ticket)
        _note(out, result)
        if out.status is not RowStatus.RUNNING:
            if ahead is not None:
                program.rollback(ahead)
            ahead = None
        elif not one_ahead:
            starts, budget = result.starts + result.columns, round_.budget - result.emitted
            token_ids = round_.token_ids.copy()
            token_ids[0, 0] = out.tokens[-1]
            round_ = replace(round_, token_ids=token_ids, starts=starts, budget=budget)
            ahead = program.launch(round_)
        ticket = ahead
    return out


def _note(out: Spoken, result: RoundResult) -> None:
    n = int(result.emitted[0])
    out.tokens += result.token_ids[0, :n].tolist()
    assert result.drafted is not None
    out.rounds.append((int(result.drafted[0]), int(result.accepted[0])))
    out.status = result.status[0]
    logprobs = result.logprobs
    if logprobs is not None:
        _note_logprobs(out, Logprobs(logprobs.chosen[0], logprobs.top_ids[0], logprobs.top[0]), n)


def _note_logprobs(out: Spoken, logprobs: Logprobs | None, n: int) -> None:
    if logprobs is None:
        return
    chosen = logprobs.chosen.reshape(-1)
    top_ids, top = (x.reshape(len(chosen), -1) for x in (logprobs.top_ids, logprobs.top))
    for i in range(n):
        out.logprobs.append((float(chosen[i]), tuple(top_ids[i].tolist()), tuple(top[i].tolist())))


def questions(model: BoundModel, seed: int, n: int) -> list[Int32s]:
    """Prompts like those the tiny models were trained on, with and without thinking in turn."""
    frontend, rng = Frontend.open(model.artifact), random.Random(seed)
    kinds = list(train_tiny.TASKS)
    out = []
    for i in range(n):
        text, _, _, tools, _ = train_tiny.example(kinds[i % len(kinds)], rng)
        conversation = parse_conversation([{"role": "user", "content": text}], tools or [])
        thinking = bool(i // len(kinds) % 2)
        out.append(np.array(frontend.prompt(conversation, thinking=thinking).token_ids, np.int32))
    return out


def stop_ids_of(model: BoundModel) -> frozenset[int]:
    """Ids that end an answer."""
    return Frontend.open(model.artifact).generation.stop_ids
