"""The reader of one served answer: the text chain, and the tokens it was read from."""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ninfer_runtime.engine.sequence import FinishReason, TokenEvent, Verdict
from ninfer_runtime.text.events import Event, StopHit

if TYPE_CHECKING:
    from ninfer_runtime.engine.reading import AnswerReader


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token of an answer, stop ids left out. ``is_thinking``: it was read inside a thinking block."""

    token: TokenEvent
    is_thinking: bool


class ChoiceReader:
    """An ``AnswerReader`` that also knows, if asked, which tokens were thinking."""

    __slots__ = ("_inner", "_keep_drawn", "_thinking")

    def __init__(self, inner: "AnswerReader", *, keep_drawn: bool = False) -> None:
        self._inner = inner
        self._keep_drawn = keep_drawn
        self._thinking: deque[bool] = deque()

    def feed(self, token_id: int) -> Verdict:
        """In the worker, for every token that is no stop id."""
        if not self._keep_drawn:
            return self._inner.feed(token_id)
        before = self._inner.n_reasoning_tokens
        verdict = self._inner.feed(token_id)
        self._thinking.append(self._inner.n_reasoning_tokens > before)
        return verdict

    @property
    def may_force(self) -> bool:
        """As the inner reader says."""
        return self._inner.may_force

    def take(self) -> list[Event]:
        """Events since the last take."""
        return self._inner.take()

    def flush(self) -> list[Event]:
        """The rest, once."""
        return self._inner.flush()

    def drawn(self, tokens: tuple[TokenEvent, ...]) -> tuple[Drawn, ...]:
        """The tokens of one step as they were read; () unless they are kept."""
        if not self._keep_drawn:
            return ()
        return tuple(Drawn(token, self._thinking.popleft()) for token in tokens if not token.is_stop)

    def reason(self, reason: FinishReason) -> FinishReason:
        """Why the answer ended, given why the engine's sequence did."""
        return self._inner.reason(reason)

    @property
    def stop(self) -> StopHit | None:
        """What ended the text, once something did."""
        return self._inner.stop

    @property
    def n_reasoning_tokens(self) -> int:
        """Tokens fed so far that belong to thinking."""
        return self._inner.n_reasoning_tokens
