"""One request and what comes out of it: token events, a finish reason, counters and times."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ninfer_format.errors import RequestError
from ninfer_runtime.backends.base import Int32s
from ninfer_runtime.config import SamplingParams

MAX_TOP_LOGPROBS = 20


class FinishReason(Enum):
    """Why a generation ended, in the words of ``ninfer-run``."""

    OUTPUT_LIMIT = "output-limit"
    CONTEXT_CAPACITY = "context-capacity"
    STOP_TOKEN = "stop-token"
    STOP_STRING = "stop-string"
    CANCELLED = "cancelled"


def check_tokens(token_ids: Sequence[int], vocab_rows: int) -> Int32s:
    """int32 [T] of a nonempty list of matrix rows; RequestError naming the first id that is none."""
    if len(token_ids) == 0:
        raise RequestError("the prompt has no tokens, expected at least one")
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(f"the prompt is {ids.dtype} of shape {ids.shape}, expected one list of token ids")
    if ids.min() < 0 or ids.max() >= vocab_rows:
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab_rows))[0])
        raise RequestError(f"prompt token {at} has id {int(ids[at])}, expected 0 to {vocab_rows - 1}")
    return np.ascontiguousarray(ids, np.int32)


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate.

    token_ids       the prompt, at least one id
    sampling        resolved parameters; a missing seed is drawn by the engine
    max_new         most tokens to emit
    stop_ids        an emitted one ends the generation (it is the last event, marked as a stop)
    ignore_eos      run on through stop ids
    n_top_logprobs  None: no logprobs; 0: of each emitted token; n: also of the n most likely ones
    """

    token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new: int = 128
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n_top_logprobs: int | None = None

    def check(self, n_addressable: int, vocab_rows: int, max_context: int) -> Int32s:
        """The prompt as int32 [T], or RequestError naming what cannot run.

        Prompt ids may name any matrix row, as teacher-forced comparisons need; biased ids must be addressable.
        """
        prompt = check_tokens(self.token_ids, vocab_rows)
        if len(prompt) >= max_context:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the context holds {max_context} with at least one of output; "
                "shorten the prompt or raise --max-context"
            )
        if self.max_new < 1:
            raise RequestError(f"max_new is {self.max_new}, expected at least 1")
        if self.n_top_logprobs is not None and not 0 <= self.n_top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"n_top_logprobs is {self.n_top_logprobs}, expected 0 to {MAX_TOP_LOGPROBS}")
        for token_id, _ in self.sampling.logit_bias:
            if token_id >= n_addressable:
                raise RequestError(f"logit_bias names token {token_id}, expected 0 to {n_addressable - 1}")
        return prompt


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token. ``is_stop`` marks a stop id, which text does not show."""

    token_id: int
    index: int
    """Absolute index in the sequence: the prompt's length for the first one."""
    is_stop: bool = False
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation; times in seconds.

    ``prefill_seconds`` ends with the first token, ``decode_seconds`` covers the other ``n_generated - 1``.
    """

    reason: FinishReason
    n_prompt: int
    n_generated: int
    n_rounds: int
    seed: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.n_prompt / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return (self.n_generated - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0
