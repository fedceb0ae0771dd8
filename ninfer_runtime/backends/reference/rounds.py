"""What a row emits from its columns' logits: draws, accepted drafts, and why it ended."""

from dataclasses import dataclass, field

import numpy as np

from ninfer_runtime.backends.base import Float32s, Int32s, RowStatus, Uint32s
from ninfer_runtime.config import SamplingParams

from .drafts import Draft, draw_by_ratio
from .sampling import Counts, Purpose, adjust, candidates, sample, seed_of


@dataclass(frozen=True, slots=True)
class RowTask:
    """One row of a round, everything resolved.

    token_ids    its inputs, int32 [n_columns]
    start        index of column 0
    counts       occurrence counts of the slot, int32 [V]; not modified
    masks        uint32 [q, words] or None
    drafts       those the slot held behind column 0, also beyond the columns that are evaluated
    """

    token_ids: Int32s
    start: int
    params: SamplingParams
    counts: Counts
    stop_ids: frozenset[int]
    budget: int
    masks: Uint32s | None
    drafts: tuple[Draft, ...] = ()

    def mask(self, column: int) -> Uint32s | None:
        """The mask of one column."""
        return None if self.masks is None else self.masks[column]


@dataclass(slots=True)
class RowOutcome:
    """Tokens a row emitted, from which columns, and why it stopped."""

    tokens: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    accepted: int = 0
    status: RowStatus = RowStatus.RUNNING


def verify_row(task: RowTask, logits: Float32s) -> RowOutcome:
    """Draw column by column while the next input equals the draw; logits float32 [n_columns, n addressable].

    Drafts with a distribution decide the draw of the column before them, those beyond the last column too: whether the
    caller cuts a row may depend on what was drafted, the distribution of what it emits must not.
    """
    out, counts = RowOutcome(), task.counts
    for i in range(len(task.token_ids)):
        if not np.isfinite(logits[i]).all():
            out.status = RowStatus.NOT_FINITE
            return out
        token = _draw(task, i, logits[i], counts)
        _emit(out, task, token, i)
        is_draft_right = i + 1 < len(task.token_ids) and int(task.token_ids[i + 1]) == token
        out.accepted += is_draft_right
        if out.status is not RowStatus.RUNNING or not is_draft_right:
            return out
        if task.params.has_penalties:
            counts = counts.copy()
            counts[token] += 1
    return out


def _draw(task: RowTask, column: int, logits: Float32s, counts: Counts) -> int:
    """The token behind one column of a verify row."""
    params, index, mask = task.params, task.start + column + 1, task.mask(column)
    has_ratio = bool(task.drafts) and task.drafts[0].distribution is not None
    if not has_ratio:
        return sample(logits, params, counts, index, mask)
    if column == len(task.drafts):
        return sample(logits, params, counts, index, mask, Purpose.BONUS)
    draft = task.drafts[column]
    assert draft.distribution is not None
    target = candidates(adjust(logits, params, counts, mask), params)
    return draw_by_ratio(target, draft.token_id, draft.distribution, seed_of(params), index)


def known_row(task: RowTask, logits: Float32s) -> RowOutcome:
    """Draw from the last column only; logits float32 [1, n addressable] of that column."""
    out, last = RowOutcome(), len(task.token_ids) - 1
    if not np.isfinite(logits).all():
        out.status = RowStatus.NOT_FINITE
        return out
    token = sample(logits[0], task.params, task.counts, task.start + last + 1, task.mask(last))
    _emit(out, task, token, last)
    return out


def _emit(out: RowOutcome, task: RowTask, token: int, column: int) -> None:
    out.tokens.append(token)
    out.columns.append(column)
    if token in task.stop_ids:
        out.status = RowStatus.STOP_ID
    elif len(out.tokens) >= task.budget:
        out.status = RowStatus.BUDGET
