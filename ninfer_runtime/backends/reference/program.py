"""The reference program: rounds run when they are launched, everything else follows ``backends/base.py``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ninfer_runtime.backends.base import (
    Int32s,
    Logprobs,
    MemoryPlan,
    Place,
    PrefillChunk,
    PrefillResult,
    Round,
    RoundResult,
    StateSnapshot,
    Ticket,
)
from ninfer_runtime.backends.checks import check_ids, check_prefill, check_round, check_row, check_slot, require
from ninfer_runtime.models.binder import BoundModel

from .activations import kinds_of
from .book import Launched, RoundBook
from .drafting import Drafting
from .drafts import Draft
from .embedding import embed
from .forward import Segment, decode_columns, head_logits
from .gdn import replay
from .kv_formats import KvPool
from .memory import kv_layers, torch_device
from .results import Evaluation, round_result
from .rounds import RowTask
from .sampling import sample, token_logprobs
from .slots import Slots
from .state import Columns, RowRecord
from .weights import Weights


class ReferenceProgram:
    """torch on a CPU or CUDA device; ``backends.base.Program`` states the contract of every method."""

    name = "reference"
    notes: tuple[tuple[str, str], ...] = ()
    runs_ahead = False

    def __init__(self, model: BoundModel, plan: MemoryPlan) -> None:
        self.model = model
        self.plan = plan
        self._device = torch_device(plan.options.device)
        self._weights = Weights(model.artifact, self._device, plan.options.dtype, plan.weight_bytes)
        proposes = plan.options.proposer != "none"
        self._slots = Slots(model.spec, plan.limits, self._weights.dtype, self._device, proposes=proposes)
        self._pool = KvPool(
            model.spec, kv_layers(model.spec, plan.options), plan.limits.n_pages, plan.options, self._device
        )
        self._drafting = Drafting(model, self._weights, self._pool, self._slots, plan) if proposes else None
        self._book = RoundBook()

    # ---- slots -------------------------------------------------------------------------------
    def length(self, slot: int) -> int:
        self._check_slot(slot)
        return self._slots.lengths[slot]

    def reset(self, slot: int) -> None:
        self._check_slot(slot)
        self._slots.reset(slot)

    def set_output_counts(self, slot: int, token_ids: Int32s) -> None:
        self._check_slot(slot)
        self._slots.set_output_counts(slot, token_ids)

    def snapshot(self, slot: int, place: Place = "device") -> StateSnapshot:
        self._check_slot(slot)
        return self._slots.snapshot(slot, place)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        self._check_slot(slot)
        self._slots.restore(slot, snapshot)

    def release(self, snapshot: StateSnapshot) -> None:
        self._slots.release(snapshot)

    def relocate(self, snapshot: StateSnapshot, place: Place) -> StateSnapshot:
        return self._slots.relocate(snapshot, place)

    def enter_thread(self) -> None:
        """torch binds nothing to a thread."""

    # ---- keys and values ---------------------------------------------------------------------
    def copy_pages(self, sources: Int32s, targets: Int32s) -> None:
        require(sources.shape == targets.shape, f"{sources.shape} sources for {targets.shape} targets")
        check_ids("sources", sources, self.plan.limits.n_pages)
        check_ids("targets", targets, self.plan.limits.n_pages)
        self._pool.copy_pages(sources.tolist(), targets.tolist())

    # ---- prompts -----------------------------------------------------------------------------
    @torch.inference_mode()
    def prefill(self, chunk: PrefillChunk) -> PrefillResult:
        spec, slot, n_tokens = self.model.spec, chunk.slot, len(chunk.token_ids)
        self._check_slot(slot)
        check_prefill(chunk, self._slots.lengths[slot], self.plan.limits, spec)
        x = embed(self._tensor(chunk.token_ids), self._weights, self.model.token_embedding, chunk.embeddings)
        index = np.arange(chunk.start, chunk.start + n_tokens, dtype=np.int32)
        positions = np.tile(index, (3, 1)) if chunk.positions is None else chunk.positions
        axes, pages = self._tensor(positions), self._tensor(chunk.pages)
        segment = Segment(0, n_tokens, chunk.start, pages, self._slots.recurrent[slot])
        with self._weights.activations.active(kinds_of(self.plan, n_tokens)):
            hidden = decode_columns(self.model, self._weights, self._pool, x, axes, [segment])
        self._slots.lengths[slot] += n_tokens
        n_wanted = {"none": 0, "last": 1, "all": n_tokens}[chunk.logits]
        n_evaluated = max(n_wanted, int(chunk.sampling is not None))
        logits = head_logits(self.model, self._weights, hidden[n_tokens - n_evaluated :]).numpy()
        addressable = logits[:, : spec.n_addressable]
        is_finite = bool(np.isfinite(addressable).all())
        token_id = logprobs = None
        if chunk.sampling is not None and is_finite:
            counts, position = self._slots.counts[slot], chunk.start + n_tokens
            token_id = sample(addressable[-1], chunk.sampling, counts, position, chunk.logits_mask)
            self._slots.count(slot, np.array([token_id], np.int32))
            if chunk.n_top_logprobs is not None:
                one = token_logprobs(addressable[-1], token_id, chunk.n_top_logprobs)
                logprobs = Logprobs(np.array(one.chosen, np.float32), one.top_ids, one.top)
        drafts = None
        if self._drafting is not None:
            found = self._drafting.follow_prompt(chunk, Columns(x, hidden, axes, pages), token_id)
            drafts = found if chunk.n_drafts else None
        kept = hidden.float().cpu().numpy() if chunk.want_hidden else None
        return PrefillResult(token_id, logits[n_evaluated - n_wanted :], kept, logprobs, is_finite, drafts)

    # ---- rounds ------------------------------------------------------------------------------
    @torch.inference_mode()
    def launch(self, round_: Round) -> Ticket:
        previous = self._book.previous_of(round_)
        check_round(round_, self.plan.limits, self.model.spec)
        tasks = [self._task(round_, b, previous) for b in range(round_.n_rows)]
        if previous is not None:
            self._commit(previous, None)
        records: list[RowRecord | None] = [
            None if task is None else RowRecord(int(round_.slots[b]), len(task.token_ids))
            for b, task in enumerate(tasks)
        ]
        for slot in round_.slots.tolist():
            self._slots.held[slot] = None
        columns, evaluations = self._evaluate(round_, tasks, records)
        result = round_result(round_, tasks, evaluations, self.model.spec)
        if self._drafting is not None:
            result = self._drafting.follow_round(round_, tasks, columns, result)
        budgets = np.array([0 if task is None else task.budget for task in tasks], np.int32)
        return self._book.add(Launched(round_, result, records, budgets))

    def read(self, ticket: Ticket) -> RoundResult:
        return self._book.read(ticket)

    @torch.inference_mode()
    def commit(self, ticket: Ticket, columns: Int32s | None = None) -> None:
        launched = self._book.find(ticket)
        require(not launched.is_settled, f"round {ticket.serial} was committed already")
        self._commit(launched, columns)

    def rollback(self, ticket: Ticket) -> None:
        launched = self._book.find(ticket)
        require(not launched.is_settled, f"round {ticket.serial} was committed already")
        self._book.settle(launched, give_up=True)

    @contextmanager
    def observing(self, observer: Callable[[str, Tensor], None]) -> Iterator[None]:
        """While the block runs, ``observer(matrix, x)`` sees the rows x [T, K] that every stored matrix multiplies."""
        self._weights.observer = observer
        try:
            yield
        finally:
            self._weights.observer = None

    def close(self) -> None:
        self._weights.close()
        del self._weights, self._pool, self._slots

    # ---- inside ------------------------------------------------------------------------------
    def _check_slot(self, slot: int) -> None:
        check_slot(slot, self.plan.limits, self._book.busy_slots())

    def _tensor(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self._device)

    def _commit(self, launched: Launched, columns: Int32s | None) -> None:
        for record, n_columns, emitted in launched.fold(columns):
            recurrent = self._slots.recurrent[record.slot]
            replay(recurrent, record, n_columns)
            if self._drafting is not None and record.columns is not None:
                record.columns.remember(recurrent, n_columns)
            self._slots.lengths[record.slot] += n_columns
            self._slots.count(record.slot, emitted)
        self._book.settle(launched)

    def _task(self, round_: Round, b: int, previous: Launched | None) -> RowTask | None:
        """Row ``b`` with everything resolved, checked; None when it ended in the previous round."""
        slot = int(round_.slots[b])
        token_ids = round_.token_ids[b, : round_.n_columns[b]].copy()
        start, budget = int(round_.starts[b]), int(round_.budget[b])
        length = self._slots.lengths[slot] if 0 <= slot < self.plan.limits.n_slots else 0
        if previous is None:
            self._check_slot(slot)
        else:
            following = previous.continuation(b)
            if following is None:
                return None
            token_ids[0], start, budget = following
            length += int(previous.result.columns[b])
        require(budget >= 1, f"row {b} has a budget of {budget}, expected at least 1")
        drafts: tuple[Draft, ...] = ()
        if round_.own_drafts:
            drafts = self._slots.held_drafts(slot, start, int(token_ids[0]))
            token_ids = token_ids[: 1 + len(drafts)]
            token_ids[1:] = [draft.token_id for draft in drafts[: len(token_ids) - 1]]
        n_drafts = 0 if round_.n_drafts is None else int(round_.n_drafts[b])
        behind = max(0, min(n_drafts, budget - 1 - len(token_ids)))
        check_row(b, token_ids, start, length, round_.pages[b], self.plan.limits, self.model.spec, behind)
        masks = None if round_.logits_mask is None else round_.logits_mask[b]
        counts = self._slots.counts[slot]
        return RowTask(token_ids, start, round_.sampling[b], counts, round_.stop_ids[b], budget, masks, drafts)

    def _evaluate(
        self, round_: Round, tasks: list[RowTask | None], records: list[RowRecord | None]
    ) -> tuple[list[Columns | None], list[Evaluation | None]]:
        """Every row's columns, and their logits: all rows through the layers together."""
        segments, token_ids, positions = [], [], []
        begin = 0
        for b, (task, record) in enumerate(zip(tasks, records, strict=True)):
            if task is None or record is None:
                continue
            end = begin + len(task.token_ids)
            recurrent = self._slots.recurrent[record.slot]
            segments.append(Segment(begin, end, task.start, self._tensor(round_.pages[b]), recurrent, record))
            token_ids.append(task.token_ids)
            positions.append(np.arange(task.start, task.start + end - begin) + int(round_.rope_deltas[b]))
            begin = end
        if not segments:
            return [None] * len(tasks), [None] * len(tasks)
        x = embed(self._tensor(np.concatenate(token_ids)), self._weights, self.model.token_embedding)
        axes = self._tensor(np.tile(np.concatenate(positions), (3, 1)))
        hidden = decode_columns(self.model, self._weights, self._pool, x, axes, segments)
        needs_all = round_.verify or round_.want_logits
        spans = [range(s.begin if needs_all else s.end - 1, s.end) for s in segments]
        evaluated = head_logits(self.model, self._weights, hidden[[c for span in spans for c in span]])
        logits = iter(evaluated.split([len(span) for span in spans]))
        rows = iter(segments)
        columns: list[Columns | None] = []
        out: list[Evaluation | None] = []
        for record in records:
            if record is None:
                columns.append(None)
                out.append(None)
                continue
            segment = next(rows)
            span = slice(segment.begin, segment.end)
            record.columns = Columns(x[span], hidden[span], axes[:, span], segment.pages)
            columns.append(record.columns)
            own = hidden[span].float().cpu().numpy() if round_.want_hidden else None
            out.append(Evaluation(next(logits).numpy(), own))
        return columns, out
