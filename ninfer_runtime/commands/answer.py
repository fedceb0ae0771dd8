"""One generation from request to reply, shown while it grows; Ctrl-C ends it at the next token."""

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from ninfer_runtime.engine.sequence import Finish, FinishReason, Request
from ninfer_runtime.text.events import ContentText, Event, ReasoningText
from ninfer_runtime.text.stream import Reply, TextStream, join

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


def run_answer(engine: "Engine", request: Request, stream: TextStream, show: Callable[[list[Event]], None]) -> Answer:
    """Generate, read and show one answer. An interrupt ends it as cancelled, with what there is."""
    events: list[Event] = []
    token_ids: list[int] = []

    def take(new: list[Event]) -> None:
        events.extend(new)
        show(new)

    with closing(engine.generate(request)) as generation:
        with cancel_on_interrupt(generation.cancel):
            for token in generation:
                token_ids.append(token.token_id)
                if not token.is_stop:
                    take(stream.feed([token.token_id]))
                if (hit := stream.stop) is not None:
                    generation.stop(FinishReason.STOP_STRING if hit.stop is not None else FinishReason.STOP_TOKEN)
        take(stream.flush())
        finish = generation.finish
    assert finish is not None, "an exhausted generation has finished"
    reply, reason = join(events), finish.reason
    if reply.stop is not None and reason is not FinishReason.CANCELLED:
        reason = FinishReason.STOP_STRING if reply.stop.stop is not None else FinishReason.STOP_TOKEN
    return Answer(reply, tuple(token_ids), stream.n_reasoning_tokens, finish, reason)


@contextmanager
def cancel_on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT calls ``cancel``, a second one interrupts at once. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
