"""Thinking apart from the answer.

A thinking block is recognised where the answer has not begun: the one the template opened, one the model opens itself
(thinking off or not), and further ones directly after it. From the first other text on, everything is content, tags
included. The newlines that frame a block belong to neither side.
"""

import re
from collections.abc import Collection
from enum import Enum, auto

from ninfer_runtime.text.events import ContentText, Event, ReasoningText
from ninfer_runtime.text.scan import open_suffix
from ninfer_runtime.text.tool_calls import CALL_OPEN, names_offered_function

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_COMPLETE_CALL = re.compile(r"</function>\s*</tool_call>")


class _State(Enum):
    BEFORE = auto()  # nothing of the answer yet: a block may open
    LEAD = auto()  # inside a block, nothing but whitespace yet
    INSIDE = auto()
    DRAFT = auto()  # inside a block, from a tool call's head on
    CONTENT = auto()


class ReasoningStage:
    """Text to ReasoningText and ContentText.

    starts_inside   the prompt ends within an open thinking block
    tool_names      functions on offer. A call of one of them that begins inside the block is held: if the block is
                    closed later, it was a draft and stays reasoning; if the message ends with the call complete, it
                    was meant, and becomes content.
    """

    def __init__(self, *, starts_inside: bool, tool_names: Collection[str] = ()) -> None:
        self._state = _State.LEAD if starts_inside else _State.BEFORE
        self._tool_names = tuple(tool_names)
        self._held = ""
        self._may_reopen = True
        self._after_block = False

    @property
    def inside(self) -> bool:
        """True while the text belongs to a thinking block."""
        return self._state in (_State.LEAD, _State.INSIDE, _State.DRAFT)

    def feed(self, text: str) -> list[Event]:
        """Events that are certain now."""
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def flush(self) -> list[Event]:
        """The rest: what was held for a marker that did not come."""
        held, self._held = self._held, ""
        if self._state is _State.CONTENT or not held:
            return []
        if self._state is _State.BEFORE:
            return _content(self._content_start(held))
        if self._state is _State.DRAFT and _COMPLETE_CALL.search(held):
            return _content(held.lstrip("\n"))
        return _reasoning(held.lstrip("\n") if self._state is _State.LEAD else held)

    def _step(self, events: list[Event]) -> bool:
        """One transition; False when more text is needed."""
        match self._state:
            case _State.BEFORE:
                return self._before(events)
            case _State.LEAD:
                return self._lead()
            case _State.INSIDE:
                return self._inside(events)
            case _State.DRAFT:
                return self._close_block(events)
            case _State.CONTENT:
                events.extend(_content(self._held))
                self._held = ""
                return False

    def _before(self, events: list[Event]) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK_OPEN):
            self._held, self._state, self._may_reopen = text[len(THINK_OPEN) :], _State.LEAD, False
            return True
        if text.startswith(THINK_CLOSE):  # the end of a block that was never opened
            self._held, self._after_block = text[len(THINK_CLOSE) :], True
            return True
        if THINK_OPEN.startswith(text) or THINK_CLOSE.startswith(text):
            return False
        self._held, self._state = self._content_start(self._held), _State.CONTENT
        return True

    def _content_start(self, text: str) -> str:
        return text.lstrip("\n") if self._after_block else text

    def _lead(self) -> bool:
        text = self._held.lstrip()
        if self._may_reopen:  # the template opened the block and the model opens it again
            if text.startswith(THINK_OPEN):
                self._held, self._may_reopen = text[len(THINK_OPEN) :], False
                return True
            if THINK_OPEN.startswith(text):
                return False
        if not text:
            return False
        self._held, self._state = self._held.lstrip("\n"), _State.INSIDE
        return True

    def _inside(self, events: list[Event]) -> bool:
        close, call = self._held.find(THINK_CLOSE), self._find_call()
        if close >= 0 and (call is None or close < call):
            return self._close_block(events)
        if call is not None:
            offered = names_offered_function(self._held[call:], self._tool_names)
            if offered is False:
                call += len(CALL_OPEN)
                events.extend(_reasoning(self._held[:call]))
                self._held = self._held[call:]
                return True
            if offered is True:
                self._state = _State.DRAFT
            keep = len(self._held) - call
        else:
            markers = (THINK_CLOSE, CALL_OPEN) if self._tool_names else (THINK_CLOSE,)
            keep = open_suffix(self._held, markers)
        body = self._held[: len(self._held) - keep].rstrip("\n")
        events.extend(_reasoning(body))
        self._held = self._held[len(body) :]
        return self._state is _State.DRAFT

    def _find_call(self) -> int | None:
        at = self._held.find(CALL_OPEN) if self._tool_names else -1
        return at if at >= 0 else None

    def _close_block(self, events: list[Event]) -> bool:
        close = self._held.find(THINK_CLOSE)
        if close < 0:
            return False
        events.extend(_reasoning(self._held[:close].rstrip("\n")))
        self._held = self._held[close + len(THINK_CLOSE) :]
        self._state, self._after_block, self._may_reopen = _State.BEFORE, True, False
        return True


def _reasoning(text: str) -> list[Event]:
    return [ReasoningText(text)] if text else []


def _content(text: str) -> list[Event]:
    return [ContentText(text)] if text else []
