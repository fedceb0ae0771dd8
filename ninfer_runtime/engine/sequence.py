"""One request and what comes out of it: token events, a finish reason, counters and times."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from ninfer_format.errors import RequestError
from ninfer_runtime.backends.base import Int32s, Uint32s
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
class Forced:
    """Tokens that come next whatever the model says; they are emitted like drawn ones."""

    token_ids: tuple[int, ...]


Verdict = FinishReason | Forced | None


class Reader(Protocol):
    """Reads a sequence's tokens in the engine's worker, one call per emitted token, so that what it finds ends the
    sequence exactly there. It must not block."""

    @property
    def may_force(self) -> bool:
        """Whether the verdict on the next token may be Forced."""

    def feed(self, token_id: int) -> Verdict:
        """Take one token (stop ids are not shown to it): go on (None), end after it, or force what follows."""


class Grammar(Protocol):
    """What a sequence may say next. Used by the engine's worker alone."""

    def masks(self, drafts: Sequence[int], out: Uint32s) -> int:
        """Fill ``out`` uint32 [1 + len(drafts), words]: row i holds the ids allowed after ``drafts[:i]``.

        Returns the rows filled: 1 + the drafts that are allowed themselves. The state does not change. Where the text
        may end, the sequence's stop ids are allowed.
        """

    def advance(self, token_id: int) -> None:
        """The token was emitted."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where a prompt is likely to be continued differently, for prefix reuse.

    key     what must agree beside the tokens (template mode, media digests); prompts with other keys share nothing
    at      token counts at which the state is worth keeping: ends of the system block, of turns, of the prompt
    """

    key: bytes = b""
    at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate.

    token_ids       the prompt, at least one id
    sampling        resolved parameters; a missing seed is drawn by the engine
    max_new         most tokens to emit
    stop_ids        an emitted one ends the generation (it is the last event, marked as a stop)
    ignore_eos      run on through stop ids
    n_top_logprobs  None: no logprobs; 0: of each emitted token; n: also of the n most likely ones
    reader          looks at every token; None: nothing but ids, counts and the caller end the sequence
    grammar         what may be said; None: everything
    anchors         for prefix reuse; ``reuse`` False neither looks for a prefix nor keeps one
    speculate       False: no drafts for this request
    """

    token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new: int = 128
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n_top_logprobs: int | None = None
    reader: Reader | None = None
    grammar: Grammar | None = None
    anchors: Anchors = field(default_factory=Anchors)
    reuse: bool = True
    speculate: bool = True

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
    is_forced: bool = False
    """It was forced by the reader: the model did not draw it, and it has no log probability."""


class MissReason(Enum):
    """Why no longer prefix was reused."""

    NONE = "none"
    """Everything that is known of the prompt was: the rest is new, or its last token."""
    OFF = "off"
    EMPTY = "empty"
    """Nothing is kept under this key."""
    DIFFERS = "differs"
    """The kept text goes on differently."""
    NO_STATE = "no-state"
    """The text is kept further than the last saved state."""
    EVICTED = "evicted"
    """It had been kept."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What prefix reuse found.

    n_tokens          prompt tokens that were not computed
    n_known           tokens that agree with kept text, saved state or not
    reason            why it was not more
    first_difference  index of the first prompt token that differs from kept text, None when none does
    """

    n_tokens: int = 0
    n_known: int = 0
    reason: MissReason = MissReason.OFF
    first_difference: int | None = None


@dataclass(frozen=True, slots=True)
class Drafting:
    """What speculation did for one sequence; ``accepted_at[i]`` counts rounds that accepted draft i."""

    n_rounds: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    accepted_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation; times in seconds.

    ``queue_seconds`` ends when the prompt begins, ``prefill_seconds`` with the first token, ``decode_seconds`` covers
    the other ``n_generated - 1``.
    """

    reason: FinishReason
    n_prompt: int
    n_generated: int
    n_rounds: int
    seed: int
    prefill_seconds: float
    decode_seconds: float
    queue_seconds: float = 0.0
    reuse: Reuse = field(default_factory=Reuse)
    drafting: Drafting = field(default_factory=Drafting)

    @property
    def prefill_rate(self) -> float:
        """Computed prompt tokens per second."""
        return (self.n_prompt - self.reuse.n_tokens) / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return (self.n_generated - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0
