"""One sequence from prompt to finish, on the seam alone: prefill in chunks, then rounds of one row."""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ninfer_format.errors import NonFiniteError
from ninfer_runtime.backends.base import (
    Int32s,
    Logprobs,
    PrefillChunk,
    PrefillResult,
    Program,
    Round,
    RoundResult,
    RowStatus,
    Ticket,
    following,
    page_table,
)
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.engine.sequence import Finish, FinishReason, Request, TokenEvent

SLOT = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that can run to its end: prompt int32 [T], resolved sampling (seed set), reserved pages, output limit.

    ``is_cut`` tells that the context ends before ``request.max_new`` tokens are out.
    """

    request: Request
    prompt: Int32s
    sampling: SamplingParams
    pages: tuple[int, ...]
    n_new: int
    is_cut: bool

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the sequence."""
        return frozenset() if self.request.ignore_eos else self.request.stop_ids


class Generation:
    """The token events of one request, in order; ``finish`` is set once the iteration has ended.

    A consumer that has seen enough calls ``stop`` (a stop string) or ``cancel``, from any thread; the iteration then
    ends. ``close`` gives everything back at once and is safe to call twice. NonFiniteError is raised while iterating
    when the model produces NaN or infinity; the engine stays usable.
    """

    def __init__(self, program: Program, admitted: Admitted, on_end: Callable[[], None]) -> None:
        self._program = program
        self._admitted = admitted
        self._on_end = on_end
        self._events = self._run()
        self._asked_to_end: FinishReason | None = None
        self._open_round: Ticket | None = None
        self._started = time.perf_counter()
        self._first_token_at: float | None = None
        self._n_rounds = 0
        self.n_prefilled = 0
        """Prompt tokens processed so far."""
        self.n_generated = 0
        """Tokens emitted so far."""
        self.finish: Finish | None = None
        """Set when the generation has ended."""

    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        try:
            return next(self._events)
        except BaseException as error:
            reason = error.value if isinstance(error, StopIteration) else None
            self._end(reason or FinishReason.CANCELLED)
            raise

    def stop(self, reason: FinishReason = FinishReason.STOP_STRING) -> None:
        """End after the event taken last; that event stays part of the result."""
        self._asked_to_end = self._asked_to_end or reason

    def cancel(self) -> None:
        """End at the next boundary: after the prefill chunk or the round in progress."""
        self.stop(FinishReason.CANCELLED)

    def close(self) -> None:
        """Give up the rest; without a finish so far the generation counts as cancelled."""
        self._events.close()
        self._end(self._asked_to_end or FinishReason.CANCELLED)

    # ---- the sequence ------------------------------------------------------------------------
    def _run(self) -> Generator[TokenEvent, None, FinishReason]:
        prefilled = self._prefill()
        if prefilled is None:
            return self._asked_to_end or FinishReason.CANCELLED
        token_id, index = prefilled.token_id, len(self._admitted.prompt)
        if token_id is None:
            raise self._not_finite(index)
        self._first_token_at = time.perf_counter()
        yield self._event(token_id, index, prefilled.logprobs, ())
        if (reason := self._reason_after(token_id)) is not None:
            return reason
        round_ = self._round(token_id)
        ticket = self._launch(round_)
        while True:
            ahead = None
            if self._program.runs_ahead:
                round_ = following(round_, ticket)
                ahead = self._launch(round_)
            result = self._program.read(ticket)
            if ahead is None:
                self._program.commit(ticket)
                self._open_round = None
            for column in range(int(result.emitted[0])):
                token_id, index = int(result.token_ids[0, column]), index + 1
                yield self._event(token_id, index, result.logprobs, (0, column))
                if (reason := self._reason_after(token_id)) is not None:
                    return reason
            if result.status[0] is RowStatus.NOT_FINITE:
                raise self._not_finite(index + 1)
            if ahead is None:
                round_ = self._next_round(round_, result)
                ahead = self._launch(round_)
            ticket = ahead

    def _prefill(self) -> PrefillResult | None:
        """All chunks; None when the generation was told to end between two."""
        program, admitted = self._program, self._admitted
        program.reset(SLOT)
        pages, n_prompt = np.array(admitted.pages, np.int32), len(admitted.prompt)
        limit = program.plan.limits.prefill_chunk
        result = None
        for start in range(0, n_prompt, limit):
            if self._asked_to_end is not None:
                return None
            token_ids = admitted.prompt[start : start + limit]
            is_last = start + len(token_ids) == n_prompt
            sampling = admitted.sampling if is_last else None
            n_top = admitted.request.n_top_logprobs
            result = program.prefill(
                PrefillChunk(SLOT, token_ids, start, pages, sampling=sampling, n_top_logprobs=n_top)
            )
            self.n_prefilled = start + len(token_ids)
        return result if self._asked_to_end is None else None

    def _round(self, token_id: int) -> Round:
        """The first round: its input is the token the prefill drew."""
        admitted = self._admitted

        def one(value: int) -> Int32s:
            return np.array([value], np.int32)

        return Round(
            slots=one(SLOT),
            token_ids=np.array([[token_id]], np.int32),
            n_columns=one(1),
            starts=one(len(admitted.prompt)),
            rope_deltas=one(0),
            pages=page_table([admitted.pages], len(admitted.pages)),
            sampling=(admitted.sampling,),
            stop_ids=(admitted.stop_ids,),
            budget=one(admitted.n_new - 1),
            n_top_logprobs=admitted.request.n_top_logprobs,
        )

    def _next_round(self, round_: Round, result: RoundResult) -> Round:
        """The round after one that has been read and committed."""
        last = result.token_ids[:, result.emitted[0] - 1]
        starts, budget = result.starts + result.columns, round_.budget - result.emitted
        return replace(round_, token_ids=last[:, None].copy(), starts=starts, budget=budget, previous=None)

    def _launch(self, round_: Round) -> Ticket:
        self._open_round = self._program.launch(round_)
        self._n_rounds += 1
        return self._open_round

    # ---- events and ends ---------------------------------------------------------------------
    def _event(self, token_id: int, index: int, logprobs: Logprobs | None, at: tuple[int, ...]) -> TokenEvent:
        self.n_generated += 1
        is_stop = token_id in self._admitted.stop_ids
        if logprobs is None:
            return TokenEvent(token_id, index, is_stop)
        top = zip(logprobs.top_ids[at].tolist(), logprobs.top[at].tolist(), strict=True)
        return TokenEvent(token_id, index, is_stop, float(logprobs.chosen[at]), tuple(top))

    def _reason_after(self, token_id: int) -> FinishReason | None:
        if token_id in self._admitted.stop_ids:
            return FinishReason.STOP_TOKEN
        if self._asked_to_end is not None:
            return self._asked_to_end
        if self.n_generated < self._admitted.n_new:
            return None
        return FinishReason.CONTEXT_CAPACITY if self._admitted.is_cut else FinishReason.OUTPUT_LIMIT

    def _not_finite(self, index: int) -> NonFiniteError:
        return NonFiniteError(
            f"the logits for token {index} hold NaN or infinity; expected finite numbers. "
            "Check the artifact with ninfer-verify check --level numeric"
        )

    def _end(self, reason: FinishReason) -> None:
        if self.finish is not None:
            return
        now, first = time.perf_counter(), self._first_token_at
        self.finish = Finish(
            reason=reason,
            n_prompt=len(self._admitted.prompt),
            n_generated=self.n_generated,
            n_rounds=self._n_rounds,
            seed=self._admitted.sampling.seed or 0,
            prefill_seconds=(first or now) - self._started,
            decode_seconds=now - first if first else 0.0,
        )
        if self._open_round is not None:
            self._program.rollback(self._open_round)
            self._open_round = None
        self._on_end()
