"""One admitted sequence: its tokens, its place, and what it still may do."""

import time
from dataclasses import dataclass, field

import numpy as np

from ninfer_format.errors import GenerationError, NonFiniteError
from ninfer_runtime.backends.base import Int32s
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.engine.handle import Handle
from ninfer_runtime.engine.sequence import Finish, FinishReason, Forced, Reuse, TokenEvent, Verdict
from ninfer_runtime.engine.speculate import DraftController


@dataclass(slots=True, eq=False)
class Lane:
    """A sequence from admission to its end.

    tokens       prompt and everything emitted; the last emitted token is in no state yet
    n_folded     tokens in the committed state
    n_new        most tokens to emit; ``is_cut``: the context ends before the request's own limit
    drafts       what the slot holds, as far as the host knows
    """

    handle: Handle
    slot: int
    pages: tuple[int, ...]
    tokens: list[int]
    n_prompt: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    n_new: int
    is_cut: bool
    drafting: DraftController
    queued_at: float
    reuse: Reuse = field(default_factory=Reuse)
    n_folded: int = 0
    drafts: tuple[int, ...] = ()
    n_rounds: int = 0
    n_masked: int = 0
    """Rounds whose masks must be there before the launch; ``distrust``: so many the last time."""
    distrust: int = 0
    started_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    is_exact: bool = True
    """The committed state holds ``tokens[:n_folded]`` and nothing else."""
    ended: FinishReason | GenerationError | None = None

    @property
    def n_emitted(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def budget(self) -> int:
        """Tokens it may still emit."""
        return self.n_new - self.n_emitted

    @property
    def n_places(self) -> int:
        """Tokens its pages hold: all but the last one it may emit, which enters no state."""
        return self.n_prompt + self.n_new - 1

    @property
    def may_be_forced(self) -> bool:
        """Its reader may force text behind the next token."""
        reader = self.handle.request.reader
        return reader is not None and reader.may_force

    @property
    def is_prefilling(self) -> bool:
        """Known tokens wait to be folded, and the next one is not drawn yet."""
        return self.ended is None and (self.n_emitted == 0 or self.n_folded < len(self.tokens) - 1)

    @property
    def is_ready(self) -> bool:
        """It may take part in a round."""
        return self.ended is None and not self.is_prefilling

    def next_chunk(self, limit: int) -> Int32s:
        """Known tokens to fold next, int32 [1..limit]: up to an anchor of the prompt or the last known token."""
        end = min(len(self.tokens), self.n_folded + limit)
        inside = [at for at in self.handle.request.anchors.at if self.n_folded < at < end and at < self.n_prompt]
        return np.array(self.tokens[self.n_folded : min([end, *inside])], np.int32)

    def take(self, token_id: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> TokenEvent:
        """Note a drawn token, with everything that may end or bend the sequence after it."""
        index = len(self.tokens)
        self.tokens.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        is_stop = token_id in self.stop_ids
        event = TokenEvent(token_id, index, is_stop, logprob, top)
        if is_stop:
            self.ended = FinishReason.STOP_TOKEN
            return event
        try:
            verdict = self._show(token_id)
            if isinstance(verdict, FinishReason):
                self.ended = verdict
            elif self.budget <= 0:
                self.ended = self.length_reason
            elif isinstance(verdict, Forced):
                self._force(verdict.token_ids)
        except Exception as error:  # what a request brings along may end that request, never the engine
            self.ended = GenerationError(f"reading token {index} failed: {type(error).__name__}: {error}")
        return event

    def forced_events(self, since: int) -> tuple[TokenEvent, ...]:
        """Events of the tokens forced from index ``since`` on."""
        return tuple(TokenEvent(t, since + i, is_forced=True) for i, t in enumerate(self.tokens[since:]))

    def _show(self, token_id: int) -> Verdict:
        request = self.handle.request
        if request.grammar is not None:
            request.grammar.advance(token_id)
        return request.reader.feed(token_id) if request.reader is not None else None

    def _force(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids[: self.budget]:
            self.tokens.append(token_id)
            self._show(token_id)
        if self.budget <= 0:
            self.ended = self.length_reason

    @property
    def length_reason(self) -> FinishReason:
        """Why it ends when no token is left."""
        return FinishReason.CONTEXT_CAPACITY if self.is_cut else FinishReason.OUTPUT_LIMIT

    def not_finite(self) -> NonFiniteError:
        """The error of a sequence whose next token has no finite logits."""
        return NonFiniteError(
            f"the logits for token {len(self.tokens)} hold NaN or infinity; expected finite numbers. "
            "Check the artifact with ninfer-verify check --level numeric"
        )

    def finish(self, reason: FinishReason) -> Finish:
        """The report of its end."""
        now, first = time.perf_counter(), self.first_token_at
        return Finish(
            reason=reason,
            n_prompt=self.n_prompt,
            n_generated=self.n_emitted,
            n_rounds=self.n_rounds,
            seed=self.sampling.seed or 0,
            prefill_seconds=(first or now) - self.started_at,
            decode_seconds=now - first if first else 0.0,
            queue_seconds=self.started_at - self.queued_at,
            reuse=self.reuse,
            drafting=self.drafting.drafting,
        )
