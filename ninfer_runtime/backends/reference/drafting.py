"""When the draft layer runs: behind every prompt chunk and every round, over exactly the tokens that may be folded.

Reading is not optional: a column is due for every folded token, whether or not drafts are wanted behind it, so that
they are the same wherever drafting starts.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ninfer_runtime.backends.base import Int32s, MemoryPlan, PrefillChunk, Round, RoundResult, RowStatus
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.models.binder import BoundModel

from .drafts import Draft, HeldDrafts
from .embedding import embed
from .kv_formats import KvPool
from .mtp import DraftLayer, DraftRow
from .rounds import RowTask
from .sampling import Counts
from .slots import Slots
from .state import Columns, Recurrent
from .weights import Weights


class Drafting:
    """The proposer of one program; drafts go to the slots."""

    def __init__(self, model: BoundModel, weights: Weights, pool: KvPool, slots: Slots, plan: MemoryPlan) -> None:
        self._model, self._weights, self._slots = model, weights, slots
        self._max_drafts = plan.limits.max_drafts
        self._layer = DraftLayer(model, weights, pool, plan.options)

    def follow_prompt(self, chunk: PrefillChunk, columns: Columns, token_id: int | None) -> Int32s:
        """Read a folded chunk and draft behind the drawn token; int32 [n] of the drafts the slot now holds."""
        slot, recurrent = chunk.slot, self._slots.recurrent[chunk.slot]
        params, counts = chunk.sampling or SamplingParams.greedy(), self._slots.counts[slot]
        n_tokens = len(chunk.token_ids)
        row = self._row(columns, n_tokens, chunk.start, recurrent, token_id, params, counts, chunk.n_drafts)
        drafts = self._layer.follow([row])[0]
        columns.remember(recurrent, n_tokens)
        self._hold(slot, chunk.start + n_tokens, token_id, drafts)
        return _ids(drafts)

    def follow_round(
        self, round_: Round, tasks: list[RowTask | None], columns: list[Columns | None], result: RoundResult
    ) -> RoundResult:
        """Read what every row may fold and draft behind what it emitted; the result with the drafts filled in."""
        b = round_.n_rows
        n_drafts, drafts = np.zeros(b, np.int32), np.zeros((b, self._max_drafts), np.int32)
        rows, which = [], []
        for i, (task, own) in enumerate(zip(tasks, columns, strict=True)):
            n_columns = int(result.columns[i])
            if task is None or own is None or n_columns == 0:
                continue
            emitted = result.token_ids[i, : result.emitted[i]]
            wanted = 0
            if round_.n_drafts is not None and result.status[i] is RowStatus.RUNNING:
                wanted = max(0, min(int(round_.n_drafts[i]), task.budget - len(emitted) - 1))
            counts = task.counts
            if task.params.has_penalties:
                counts = counts.copy()
                np.add.at(counts, emitted, 1)
            recurrent, last = self._slots.recurrent[int(round_.slots[i])], int(emitted[-1])
            rows.append(self._row(own, n_columns, task.start, recurrent, last, task.params, counts, wanted))
            which.append(i)
        for i, found in zip(which, self._layer.follow(rows) if rows else [], strict=True):
            n_drafts[i] = len(found)
            drafts[i, : len(found)] = _ids(found)
            emitted = result.token_ids[i, : result.emitted[i]]
            index = int(result.starts[i] + result.columns[i])
            self._hold(int(round_.slots[i]), index, int(emitted[-1]), found)
        return result if round_.n_drafts is None else replace(result, drafts=drafts, n_drafts=n_drafts)

    def _row(
        self,
        columns: Columns,
        n_columns: int,
        start: int,
        recurrent: Recurrent,
        next_id: int | None,
        params: SamplingParams,
        counts: Counts,
        n_drafts: int,
    ) -> DraftRow:
        """The first ``n_columns`` tokens, and with drafts to make also the one that was drawn behind them."""
        embeddings = columns.embeddings[:n_columns]
        hidden = torch.cat([recurrent.hidden, columns.hidden[:n_columns]])
        positions = torch.cat([recurrent.position, columns.positions[:, :n_columns]], 1)
        if next_id is None or n_drafts == 0:
            n_drafts = 0
            hidden, positions = hidden[:-1], positions[:, :-1]
        else:
            embeddings = torch.cat([embeddings, self._embedding(next_id, embeddings)])
        return DraftRow(start, embeddings, hidden, positions, columns.pages, params, counts, n_drafts)

    def _embedding(self, token_id: int, like: Tensor) -> Tensor:
        return embed(torch.tensor([token_id], device=like.device), self._weights, self._model.token_embedding)

    def _hold(self, slot: int, index: int, anchor: int | None, drafts: tuple[Draft, ...]) -> None:
        self._slots.held[slot] = HeldDrafts(index, anchor, drafts) if anchor is not None and drafts else None


def _ids(drafts: tuple[Draft, ...]) -> Int32s:
    return np.array([draft.token_id for draft in drafts], np.int32)
