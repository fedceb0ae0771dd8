"""The engine without threads: requests in, one chunk or one round per step, events out.

Everything here runs in one thread at a time. ``schedule → run → commit``: the scheduler decides, a prompt chunk or a
round runs, its results are handed out, and what ended gives its pages and its slot back.
"""

import secrets
import time
from collections.abc import Sequence

import numpy as np

from ninfer_format.errors import GenerationError
from ninfer_runtime.backends.base import PrefillChunk, PrefillResult, Program
from ninfer_runtime.cache.pages import PagePool, pages_for
from ninfer_runtime.cache.prefix import NoCache, PrefixCache
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.handle import Handle, stopped
from ninfer_runtime.engine.lane import Lane
from ninfer_runtime.engine.rounds import Rounds, events_of
from ninfer_runtime.engine.scheduler import Move, Scheduler, Waiting
from ninfer_runtime.engine.sequence import FinishReason, Reuse, TokenEvent
from ninfer_runtime.engine.speculate import DraftController
from ninfer_runtime.engine.stats import EngineStats, Totals


class EngineCore:
    """Slots, pages and rounds of one program."""

    def __init__(self, program: Program, config: EngineConfig) -> None:
        limits = program.plan.limits
        self.program = program
        self.pages = PagePool(limits.n_pages)
        self.cache: NoCache | PrefixCache = NoCache(program, self.pages)
        if config.prefix_reuse:
            places = {"device_snapshots": limits.device_snapshots, "host_snapshots": limits.host_snapshots}
            self.cache = PrefixCache(program, self.pages, **places)
        self.scheduler = Scheduler(limits.n_slots, limits.n_pages)
        self.fault: str | None = None
        self._config = config
        self._totals = Totals()
        self._rounds = Rounds(program, limits.max_drafts, self._totals, self._deliver)

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return self.scheduler.is_idle

    @property
    def n_alive(self) -> int:
        """Requests that wait or run."""
        return self.scheduler.n_waiting + len(self.scheduler.lanes)

    def add(self, handle: Handle, *, deadline: float | None = None) -> None:
        """Queue a checked request; ``deadline`` on the clock of ``time.perf_counter``."""
        n_new = self._n_new(handle)
        n_pages = pages_for(handle.n_prompt + n_new - 1)
        prompt = np.asarray(handle.request.token_ids, np.int32)
        self.scheduler.add(Waiting(handle, prompt, n_pages, time.perf_counter(), deadline))

    def step(self) -> bool:
        """Do one piece of work; False when there is none. A fault of the program ends every request and is raised."""
        try:
            self._sweep()
            self._admit()
            move = self.scheduler.next_move()
            if move is Move.CHUNK:
                self._chunk()
            elif move is Move.ROUND:
                self._rounds.step(self.scheduler.ready)
            self._retire_ended()
        except BaseException as error:
            self.fail(error)
            raise
        return move is not Move.IDLE

    def withdraw(self, handle: Handle) -> None:
        """End one request now; it counts as cancelled unless it has ended."""
        handle.cancel()
        if handle.done:
            return
        try:
            if any(lane.handle is handle for lane in self._rounds.in_flight):
                self._rounds.settle()
            self._sweep()
            self._retire_ended()
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """The program can no longer be trusted: end everything with an error."""
        if self.fault is not None:
            return
        self.fault = f"{type(error).__name__}: {error}"
        self._end_all(self.fault)

    def close(self) -> None:
        """End what still runs or waits."""
        if self.fault is None:
            self.fault = "it was closed"
            self._rounds.abandon()
            self._end_all(self.fault)

    def stats(self) -> EngineStats:
        """Numbers as of now."""
        limits, totals, lanes = self.program.plan.limits, self._totals, self.scheduler.lanes
        prefilling = sum(lane.is_prefilling for lane in tuple(lanes))
        return EngineStats(
            max_rows=limits.max_rows,
            running=len(lanes),
            prefilling=prefilling,
            decode_ready=len(lanes) - prefilling,
            waiting=self.scheduler.n_waiting,
            pages_used=self.pages.n_pages - self.pages.n_free,
            pages_cached=self.cache.pages_cached,
            pages_total=self.pages.n_pages,
            snapshots_used=self.cache.snapshots_used,
            snapshots_total=limits.device_snapshots + limits.host_snapshots,
            prompt_tokens=totals.prompt_tokens,
            computed_prefill_tokens=totals.computed_prefill_tokens,
            reused_tokens=totals.reused_tokens,
            generated_tokens=totals.generated_tokens,
            rounds=totals.rounds,
            row_rounds=totals.row_rounds,
            drafted=totals.drafted,
            accepted=totals.accepted,
            accepted_at=tuple(totals.accepted_at),
            requests_finished=dict(totals.finished),
            fault=self.fault,
        )

    # ---- schedule ----------------------------------------------------------------------------
    def _sweep(self) -> None:
        """End what was asked to end or has waited too long."""
        for waiting, error in self.scheduler.sweep():
            lane = self._lane(waiting, slot=-1, pages=())
            self._totals.finished["error" if error else FinishReason.CANCELLED.value] += 1
            reason = waiting.handle.asked_to_end or FinishReason.CANCELLED
            waiting.handle.end(None if error else lane.finish(reason), error)
        asked = [lane for lane in self.scheduler.lanes if lane.handle.asked_to_end is not None and lane.ended is None]
        if any(lane in self._rounds.in_flight for lane in asked):
            self._rounds.settle()
        for lane in asked:
            lane.ended = lane.ended or lane.handle.asked_to_end
        self._retire_ended()

    def _admit(self) -> None:
        """Start the next prompt, if a slot and its pages are there."""
        for waiting, slot in self.scheduler.candidates():
            request = waiting.handle.request
            begun = self.cache.begin(slot, request.anchors, waiting.prompt, waiting.n_pages, look_up=request.reuse)
            if begun is None:
                continue
            lane = self._lane(waiting, slot=slot, pages=tuple(begun.pages), reuse=begun.reuse)
            lane.n_folded = begun.reuse.n_tokens
            waiting.handle.n_prefilled = lane.n_folded
            self.scheduler.admit(waiting, lane)
            self._totals.prompt_tokens += lane.n_prompt
            self._totals.reused_tokens += lane.n_folded
            return

    def _lane(self, waiting: Waiting, *, slot: int, pages: Sequence[int], reuse: Reuse | None = None) -> Lane:
        handle, request = waiting.handle, waiting.handle.request
        sampling = request.sampling
        if sampling.seed is None:
            sampling = sampling.merged(seed=secrets.randbits(64))
        n_new = self._n_new(handle)
        max_drafts = self.program.plan.limits.max_drafts if request.speculate else 0
        return Lane(
            handle=handle,
            slot=slot,
            pages=tuple(pages),
            tokens=[int(t) for t in request.token_ids],
            n_prompt=handle.n_prompt,
            sampling=sampling,
            stop_ids=frozenset() if request.ignore_eos else request.stop_ids,
            n_new=n_new,
            is_cut=n_new < request.max_new,
            drafting=DraftController(max_drafts, backoff=self._config.draft_backoff),
            queued_at=waiting.queued_at,
            reuse=reuse or Reuse(),
        )

    def _n_new(self, handle: Handle) -> int:
        return min(handle.request.max_new, self.program.plan.limits.max_context - handle.n_prompt)

    # ---- run ---------------------------------------------------------------------------------
    def _chunk(self) -> None:
        """One chunk of known tokens; the last one draws the token that follows."""
        lane = self.scheduler.prefilling
        assert lane is not None, "a chunk is only due while a lane has known tokens"
        request, program = lane.handle.request, self.program
        token_ids = lane.next_chunk(program.plan.limits.prefill_chunk)
        end = lane.n_folded + len(token_ids)
        is_last = end == len(lane.tokens)
        if lane.n_emitted and lane.sampling.has_penalties and is_last:
            program.set_output_counts(lane.slot, np.array(lane.tokens[lane.n_prompt :], np.int32))
        mask = None
        if is_last and request.grammar is not None:
            mask = np.zeros((1, -(-program.model.spec.text.vocab_rows // 32)), np.uint32)
            try:
                request.grammar.masks((), mask)
            except Exception as error:  # what a request brings along may end that request, never the engine
                lane.ended = GenerationError(f"the grammar failed: {type(error).__name__}: {error}")
                return
        result = program.prefill(
            PrefillChunk(
                lane.slot,
                token_ids,
                lane.n_folded,
                np.array(lane.pages, np.int32),
                sampling=lane.sampling if is_last else None,
                logits_mask=None if mask is None else mask[0],
                n_top_logprobs=request.n_top_logprobs if is_last else None,
                n_drafts=max(0, min(lane.drafting.wanted(), lane.budget - 2)) if is_last else 0,
            )
        )
        was_prompt = lane.n_folded < lane.n_prompt
        lane.n_folded = end
        lane.handle.n_prefilled = min(end, lane.n_prompt)
        if was_prompt:
            self._totals.computed_prefill_tokens += len(token_ids)
            if end in request.anchors.at and request.reuse:
                self.cache.keep(
                    lane.slot, request.anchors, np.array(lane.tokens[:end], np.int32), lane.pages, is_frontier=False
                )
        if is_last:
            self._first_token(lane, result.token_id, result)

    def _first_token(self, lane: Lane, token_id: int | None, result: PrefillResult) -> None:
        if token_id is None:
            lane.ended = lane.not_finite()
            return
        lane.drafts = () if result.drafts is None else tuple(result.drafts.tolist())
        if lane.handle.asked_to_end is not None:
            lane.ended = lane.handle.asked_to_end
            return
        events = events_of(lane, token_id, result.logprobs, ())
        self._totals.generated_tokens += len(events)
        self._deliver(lane, tuple(events))

    def _deliver(self, lane: Lane, events: tuple[TokenEvent, ...]) -> None:
        try:
            lane.handle.deliver(events)
        except Exception as error:  # a consumer's failure ends its own request
            lane.ended = GenerationError(f"the consumer of the tokens failed: {type(error).__name__}: {error}")

    # ---- commit ------------------------------------------------------------------------------
    def _retire_ended(self) -> None:
        """Give back what ended lanes hold; a kept frontier keeps its pages."""
        for lane in [lane for lane in self.scheduler.lanes if lane.ended is not None]:
            if lane in self._rounds.in_flight:
                self._rounds.settle()
            reason = lane.ended
            if isinstance(reason, FinishReason):
                if lane.is_exact and lane.n_folded and lane.handle.request.reuse:
                    tokens = np.array(lane.tokens[: lane.n_folded], np.int32)
                    self.cache.keep(lane.slot, lane.handle.request.anchors, tokens, lane.pages, is_frontier=True)
                self._totals.finished[reason.value] += 1
            else:
                self._totals.finished["error"] += 1
            self.pages.release(lane.pages)
            self.scheduler.retire(lane)
            if isinstance(reason, FinishReason):
                lane.handle.end(lane.finish(reason))
            else:
                lane.handle.end(None, reason)

    def _end_all(self, why: str) -> None:
        for waiting in tuple(self.scheduler.waiting):
            waiting.handle.end(None, stopped(why))
        for lane in tuple(self.scheduler.lanes):
            lane.handle.end(None, stopped(why))
