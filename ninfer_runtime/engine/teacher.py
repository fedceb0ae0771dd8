"""What the model says about text that is already there: logits after every token, and perplexity."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ninfer_format.errors import NonFiniteError, RequestError
from ninfer_runtime.backends.base import Float32s, Int32s, PrefillChunk, Program

SHORTEST_TEXT = 2
MAX_NATS = math.log(sys.float_info.max)


@dataclass(frozen=True, slots=True)
class Score:
    """Sum of natural log probabilities over ``n_scored`` of the text's tokens (all but the first)."""

    n_tokens: int
    n_scored: int
    total_log_probability: float

    @property
    def mean_negative_log_likelihood(self) -> float:
        """Nats per token."""
        return -self.total_log_probability / self.n_scored

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log likelihood; infinity where float64 ends."""
        nats = self.mean_negative_log_likelihood
        return math.exp(nats) if nats < MAX_NATS else math.inf


def teacher_forced_chunks(program: Program, slot: int, token_ids: Int32s, pages: Int32s) -> Iterator[Float32s]:
    """Reset ``slot`` and feed ``token_ids`` int32 [T]; yields float32 [n, head rows], T rows in all.

    ``pages`` int32 must cover T tokens and belong to the caller. Row t follows token t.
    """
    program.reset(slot)
    step = program.plan.limits.logits_rows
    for start in range(0, len(token_ids), step):
        part = token_ids[start : start + step]
        yield program.prefill(PrefillChunk(slot, part, start, pages, logits="all")).logits


def hidden_chunks(program: Program, slot: int, token_ids: Int32s, pages: Int32s) -> Iterator[Float32s]:
    """Reset ``slot`` and feed ``token_ids`` int32 [T]; yields final-normed hidden rows float32 [n, hidden], T rows."""
    program.reset(slot)
    step = program.plan.limits.prefill_chunk
    for start in range(0, len(token_ids), step):
        chunk = PrefillChunk(slot, token_ids[start : start + step], start, pages, want_hidden=True)
        hidden = program.prefill(chunk).hidden
        assert hidden is not None
        yield hidden


def score(program: Program, slot: int, token_ids: Int32s, pages: Int32s, *, overlap: int | None = None) -> Score:
    """Log likelihood of every token after the first, given at most a context of the program's ``max_context``.

    A longer text is cut into windows of that size; each window after the first repeats the last ``overlap`` tokens
    (default: half a window) as context and scores the rest, so every token is scored exactly once. Probabilities are
    over the addressable ids. Raises RequestError for fewer than two tokens or an overlap that leaves nothing to score,
    NonFiniteError for NaN or infinity.
    """
    limits, n_addressable = program.plan.limits, program.model.spec.n_addressable
    window = min(limits.max_context, limits.n_pages * limits.page_tokens)
    overlap = window // 2 if overlap is None else overlap
    if len(token_ids) < SHORTEST_TEXT:
        raise RequestError(f"the text has {len(token_ids)} tokens, expected at least {SHORTEST_TEXT}")
    if not 1 <= overlap < window:
        raise RequestError(f"the overlap is {overlap} tokens, expected 1 to {window - 1}")
    total, n_done = 0.0, 1
    while n_done < len(token_ids):
        begin = 0 if n_done == 1 else n_done - overlap
        end = min(begin + window, len(token_ids))
        row = begin
        for logits in teacher_forced_chunks(program, slot, token_ids[begin:end], pages):
            for own in logits[:, :n_addressable]:
                row += 1
                if n_done <= row < end:
                    total += _log_probability(own, int(token_ids[row]), row)
        n_done = end
    return Score(len(token_ids), len(token_ids) - 1, total)


def _log_probability(logits: Float32s, token_id: int, index: int) -> float:
    values = logits.astype(np.float64)
    peak = values.max()
    if not np.isfinite(peak):
        raise NonFiniteError(f"the logits for token {index} hold NaN or infinity; expected finite numbers")
    return float(values[token_id] - peak - np.log(np.exp(values - peak).sum()))
