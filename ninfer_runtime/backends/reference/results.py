"""Row outcomes put together into the arrays of a ``RoundResult``."""

from dataclasses import dataclass

import numpy as np

from ninfer_runtime.backends.base import Float32s, Logprobs, Round, RoundResult, RowStatus
from ninfer_runtime.models.spec import ModelSpec

from .rounds import RowOutcome, RowTask, known_row, verify_row
from .sampling import token_logprobs


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One row: logits float32 [n_columns, V], or [1, V] of the last column; hidden float32 [n_columns, hidden]."""

    logits: Float32s
    hidden: Float32s | None


def round_result(
    round_: Round, tasks: list[RowTask | None], evaluations: list[Evaluation | None], spec: ModelSpec
) -> RoundResult:
    """Draw for every row and lay the outcomes out; frozen rows stay zero."""
    b, q = round_.token_ids.shape
    vocab_rows, hidden = spec.text.vocab_rows, spec.text.hidden
    token_ids = np.zeros((b, q), np.int32)
    accepted, emitted, columns, starts, drafted = (np.zeros(b, np.int32) for _ in range(5))
    status = [RowStatus.FROZEN] * b
    logits = np.zeros((b, q, vocab_rows), np.float32) if round_.want_logits else None
    hiddens = np.zeros((b, q, hidden), np.float32) if round_.want_hidden else None
    logprobs = None
    if (n_top := round_.n_top_logprobs) is not None:
        n_top = min(n_top, spec.n_addressable)
        top_ids, top = np.zeros((b, q, n_top), np.int32), np.zeros((b, q, n_top), np.float32)
        logprobs = Logprobs(np.zeros((b, q), np.float32), top_ids, top)
    for row, (task, evaluation) in enumerate(zip(tasks, evaluations, strict=True)):
        if task is None or evaluation is None:
            continue
        n = len(task.token_ids)
        addressable = evaluation.logits[:, : spec.n_addressable]
        outcome = verify_row(task, addressable) if round_.verify else known_row(task, addressable[-1:])
        n_emitted = len(outcome.tokens)
        token_ids[row, :n_emitted] = outcome.tokens
        accepted[row], emitted[row], starts[row] = outcome.accepted, n_emitted, task.start
        columns[row] = n_emitted if round_.verify else n * bool(n_emitted)
        drafted[row] = n - 1 if round_.verify else 0
        status[row] = outcome.status
        if logprobs is not None:
            _fill_logprobs(logprobs, row, outcome, addressable, n)
        if logits is not None:
            logits[row, :n] = evaluation.logits
        if hiddens is not None and evaluation.hidden is not None:
            hiddens[row, :n] = evaluation.hidden
    return RoundResult(token_ids, accepted, emitted, columns, tuple(status), starts, logprobs, logits, hiddens, drafted)


def _fill_logprobs(logprobs: Logprobs, row: int, outcome: RowOutcome, addressable: Float32s, n_columns: int) -> None:
    first = n_columns - len(addressable)
    for at, (token, column) in enumerate(zip(outcome.tokens, outcome.columns, strict=True)):
        one = token_logprobs(addressable[column - first], token, logprobs.top_ids.shape[-1])
        logprobs.chosen[row, at] = one.chosen
        logprobs.top_ids[row, at], logprobs.top[row, at] = one.top_ids, one.top
