"""One generation from request to reply, shown while it grows; Ctrl-C ends it at the next token."""

import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from ninfer_runtime.engine.asking import Asked
from ninfer_runtime.engine.interrupts import cancel_on_interrupt
from ninfer_runtime.engine.sequence import Finish, FinishReason
from ninfer_runtime.text.events import ContentText, Event, ReasoningText
from ninfer_runtime.text.stream import Reply, join

if TYPE_CHECKING:
    from ninfer_runtime.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out. ``reason`` also knows stop strings and end markers that only the text shows."""

    reply: Reply
    token_ids: tuple[int, ...]
    n_reasoning_tokens: int
    finish: Finish
    reason: FinishReason


class Console:
    """Content on stdout and thinking on stderr, each flushed as it comes."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._out_ends_line = False
        self._err_ends_line = True

    def show(self, events: Iterable[Event]) -> None:
        """Write the texts of these events."""
        for event in events:
            match event:
                case ReasoningText(text):
                    self._err.write(text)
                    self._err.flush()
                    self._err_ends_line = text.endswith("\n")
                case ContentText(text):
                    self._end_thinking()
                    self._out.write(text)
                    self._out.flush()
                    self._out_ends_line = text.endswith("\n")

    def close(self) -> None:
        """End both texts with a newline; an empty answer is one too."""
        self._end_thinking()
        if not self._out_ends_line:
            self._out.write("\n")
            self._out.flush()
            self._out_ends_line = True

    def _end_thinking(self) -> None:
        if not self._err_ends_line:
            self._err.write("\n")
            self._err.flush()
            self._err_ends_line = True


def run_answer(engine: "Engine", asked: Asked, show: Callable[[list[Event]], None]) -> Answer:
    """Generate, read and show one answer. An interrupt ends it as cancelled, with what there is."""
    events: list[Event] = []
    token_ids: list[int] = []

    def take(new: list[Event]) -> None:
        events.extend(new)
        show(new)

    reader = asked.reader
    with closing(engine.generate(asked.request)) as generation:
        with cancel_on_interrupt(generation.cancel):
            for token in generation:
                token_ids.append(token.token_id)
                take(reader.take())
        take(reader.flush())
        finish = generation.finish
    assert finish is not None, "an exhausted generation has finished"
    return Answer(join(events), tuple(token_ids), reader.n_reasoning_tokens, finish, reader.reason(finish.reason))
