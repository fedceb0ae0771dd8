"""Qwen tool calls out of the answer, arguments streamed while the model still writes them.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Whitespace between tags is free. A call begins when an offered function is named; anything else is text. A parameter
ends at the ``</parameter>`` that another parameter or ``</function>`` follows, so values may mention the tags. A block
that breaks the grammar, or ends too early, is reported as failed and its text given back; calls after it survive.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from ninfer_runtime.text.events import (
    ContentText,
    Event,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallFailed,
    ToolCallStart,
)
from ninfer_runtime.text.scan import Match, first_match, open_suffix
from ninfer_runtime.text.tool_values import allowed_types, is_settled_string, json_string, value_json

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
FUNCTION_OPEN = "<function="
FUNCTION_CLOSE = "</function>"
PARAMETER_OPEN = "<parameter="
PARAMETER_CLOSE = "</parameter>"
MAX_KEY_CHARS = 256

_IN_VALUE = (PARAMETER_CLOSE, FUNCTION_CLOSE, PARAMETER_OPEN, CALL_OPEN)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function on offer: its name and the JSON schema of its parameters object."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def declared(self) -> frozenset[str]:
        """Names of the parameters the schema lists."""
        properties = self.parameters.get("properties")
        return frozenset(properties) if isinstance(properties, Mapping) else frozenset()

    def types_of(self, key: str) -> frozenset[str]:
        """JSON types that the schema allows for one parameter; empty when it does not say."""
        properties = self.parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        if schema is None:
            schema = self.parameters.get("additionalProperties")
        return allowed_types(schema, self.parameters)


def tools_from(definitions: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Tools from OpenAI function definitions, nested under ``function`` or flat."""
    functions = [definition.get("function", definition) for definition in definitions]
    return tuple(Tool(function["name"], function.get("parameters") or {}) for function in functions)


def new_call_id() -> str:
    """``call_`` and 16 hex digits."""
    return f"call_{secrets.token_hex(8)}"


def names_offered_function(text: str, names: Collection[str]) -> bool | None:
    """Does ``text``, which starts with ``<tool_call>``, go on to name an offered function? None: too early to say."""
    rest = text[len(CALL_OPEN) :].lstrip()
    if FUNCTION_OPEN.startswith(rest):
        return None
    if not rest.startswith(FUNCTION_OPEN):
        return False
    return _completes(rest[len(FUNCTION_OPEN) :], names)


class _State(Enum):
    TEXT = auto()
    HEAD = auto()  # at <tool_call>, function not known yet
    TAGS = auto()  # between parameters
    VALUE = auto()
    TAIL = auto()  # after </function>


class _ValueEnd(NamedTuple):
    """Where a value's text is certain to, and what comes there: its end, a broken block, or nothing known yet."""

    at: int
    kind: str


@dataclass(slots=True)
class _Gap:
    """Whitespace around calls: dropped, except one stretch of it where text goes on after them."""

    held: str = ""
    between: str = ""
    after_call: bool = False
    any_text: bool = False


class ToolCallStage:
    """ContentText to ContentText and tool call events; other events pass.

    tools       functions on offer; without any, all text passes unchanged
    tolerant    accept a call whose function is complete but whose ``</tool_call>`` is missing
    """

    def __init__(
        self, tools: Sequence[Tool], *, tolerant: bool = False, call_id: Callable[[], str] = new_call_id
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._tolerant = tolerant
        self._call_id = call_id
        self._state = _State.TEXT
        self._text = ""  # not consumed yet
        self._block: list[str] = []  # consumed text of the open call
        self._gap = _Gap()
        self._gap_before = (self._gap.held, self._gap.between, self._gap.after_call)
        self._n_calls = 0
        self._tool: Tool | None = None
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._value = ""  # consumed text of a value that is not streamed
        self._streamed = False

    def feed(self, event: Event) -> list[Event]:
        """Events that are certain now."""
        if not isinstance(event, ContentText) or not self._tools:
            return [event]
        self._text += event.text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def flush(self) -> list[Event]:
        """The end of the message: an open call failed, held text is text."""
        events: list[Event] = []
        if self._state in (_State.TEXT, _State.HEAD):
            self._say(self._text, events)
        elif self._state is _State.TAIL and self._tolerant:
            self._end_call(events)
            self._say(self._text, events)
        else:
            self._fail(len(self._text), events)
        self._text = ""
        if self._gap.held and not self._gap.after_call:
            events.append(ContentText(self._gap.held))
        self._gap.held = ""
        return events

    def _step(self, events: list[Event]) -> bool:
        match self._state:
            case _State.TEXT:
                return self._in_text(events)
            case _State.HEAD:
                return self._in_head(events)
            case _State.TAGS:
                return self._between_tags(events)
            case _State.VALUE:
                return self._in_value(events)
            case _State.TAIL:
                return self._in_tail(events)

    # ---- text --------------------------------------------------------------------------------
    def _in_text(self, events: list[Event]) -> bool:
        at = self._text.find(CALL_OPEN)
        cut = at if at >= 0 else len(self._text) - open_suffix(self._text, (CALL_OPEN,))
        self._say(self._text[:cut], events)
        self._text = self._text[cut:]
        if at >= 0:
            self._state = _State.HEAD
        return at >= 0

    def _say(self, text: str, events: list[Event]) -> None:
        """Text for the reader; its trailing whitespace is held, it may stand before a call."""
        gap = self._gap
        text = gap.held + text
        body = text.rstrip()
        gap.held = text[len(body) :]
        if not body:
            return
        if gap.after_call:
            start = body.lstrip()
            separator = gap.between or body[: len(body) - len(start)]
            body = (separator if gap.any_text else "") + start
            gap.between, gap.after_call = "", False
        gap.any_text = True
        events.append(ContentText(body))

    # ---- calls -------------------------------------------------------------------------------
    def _in_head(self, events: list[Event]) -> bool:
        offered = names_offered_function(self._text, self._tools)
        if offered is None:
            return False
        if offered is False:
            self._say(CALL_OPEN, events)
            self._text, self._state = self._text[len(CALL_OPEN) :], _State.TEXT
            return True
        begin = self._text.index(FUNCTION_OPEN) + len(FUNCTION_OPEN)
        end = self._text.index(">", begin)
        self._tool, self._keys, self._block = self._tools[self._text[begin:end]], set(), []
        gap = self._gap
        self._gap_before = (gap.held, gap.between, gap.after_call)
        gap.between = gap.between or gap.held
        gap.held, gap.after_call = "", True
        self._consume(end + 1, _State.TAGS)
        events.append(ToolCallStart(self._n_calls, self._call_id(), self._tool.name))
        return True

    def _between_tags(self, events: list[Event]) -> bool:
        rest = self._text.lstrip()
        skipped = len(self._text) - len(rest)
        if rest.startswith(FUNCTION_CLOSE):
            self._consume(skipped + len(FUNCTION_CLOSE), _State.TAIL)
            return True
        if not rest.startswith(PARAMETER_OPEN):
            if PARAMETER_OPEN.startswith(rest) or FUNCTION_CLOSE.startswith(rest):
                return False
            return self._fail(skipped, events)
        begin = skipped + len(PARAMETER_OPEN)
        key, closed, _ = self._text[begin:].partition(">")
        if "\n" in key or len(key) > MAX_KEY_CHARS or (closed and (not key or key in self._keys)):
            return self._fail(begin, events)
        if not closed:
            return False
        # The newline that frames the value's start belongs to the tag: wait for the character that shows it.
        after = begin + len(key) + 1
        if len(self._text) == after:
            return False
        if self._text[after] == "\n":
            after += 1
        assert self._tool is not None
        lead = ", " if self._keys else "{"
        self._keys.add(key)
        self._types, self._value, self._streamed = self._tool.types_of(key), "", False
        self._consume(after, _State.VALUE)
        events.append(ToolCallArguments(self._n_calls, f"{lead}{json_string(key)}: "))
        return True

    def _in_value(self, events: list[Event]) -> bool:
        end = self._find_value_end()
        at = end.at
        if end.kind != "broken" and self._text[:at].endswith("\n"):
            at -= 1  # the newline that may frame the value's end
        self._take_value(at, events)
        if end.kind == "open":
            return False
        if end.kind == "broken":
            return self._fail(0, events)
        self._consume(self._text.index(PARAMETER_CLOSE) + len(PARAMETER_CLOSE), _State.TAGS)
        events.append(ToolCallArguments(self._n_calls, '"' if self._streamed else value_json(self._value, self._types)))
        return True

    def _find_value_end(self) -> _ValueEnd:
        """The first tag in the value that ends it or breaks the block, or how far the value's text is certain."""
        position = 0
        while (tag := first_match(self._text, _IN_VALUE, position)) is not None:
            kind = "closed" if tag.marker == PARAMETER_CLOSE else "broken"
            verdict = self._tag_verdict(tag)
            if verdict is not False:
                return _ValueEnd(tag.begin, kind if verdict else "open")
            position = tag.end
        return _ValueEnd(len(self._text) - open_suffix(self._text[position:], _IN_VALUE), "open")

    def _tag_verdict(self, tag: Match) -> bool | None:
        """Is a tag inside a value meant as one? False: it is part of the value; None: too early to say."""
        after = self._text[tag.end :]
        match tag.marker:
            case "</parameter>":
                return _follows(after.lstrip(), (PARAMETER_OPEN, FUNCTION_CLOSE))
            case "</function>":
                return _follows(after.lstrip(), (CALL_CLOSE,))
            case "<parameter=":
                assert self._tool is not None
                return _completes(after, self._tool.declared - self._keys)
        return names_offered_function(self._text[tag.begin :], self._tools)

    def _take_value(self, n_chars: int, events: list[Event]) -> None:
        """Move certain text of the value on: streamed when it can only be a string, kept otherwise."""
        piece = self._text[:n_chars]
        self._consume(n_chars, _State.VALUE)
        if self._streamed:
            body = json_string(piece)[1:-1]
        else:
            self._value += piece
            if not is_settled_string(self._value, self._types):
                return
            body, self._streamed = json_string(self._value)[:-1], True
        if body:
            events.append(ToolCallArguments(self._n_calls, body))

    def _in_tail(self, events: list[Event]) -> bool:
        rest = self._text.lstrip()
        if not rest.startswith(CALL_CLOSE):
            if CALL_CLOSE.startswith(rest):
                return False
            if not self._tolerant:
                return self._fail(0, events)
            self._end_call(events)
            return True
        self._consume(len(self._text) - len(rest) + len(CALL_CLOSE), _State.TEXT)
        self._end_call(events)
        return True

    def _end_call(self, events: list[Event]) -> None:
        events.append(ToolCallArguments(self._n_calls, "}" if self._keys else "{}"))
        events.append(ToolCallEnd(self._n_calls))
        self._n_calls += 1
        self._state = _State.TEXT

    def _fail(self, n_chars: int, events: list[Event]) -> bool:
        """The open call is text after all, up to ``n_chars`` of the unconsumed text."""
        self._consume(n_chars, _State.TEXT)
        events.append(ToolCallFailed(self._n_calls))
        self._n_calls += 1
        self._gap.held, self._gap.between, self._gap.after_call = self._gap_before
        self._say("".join(self._block), events)
        return True

    def _consume(self, n_chars: int, state: _State) -> None:
        self._block.append(self._text[:n_chars])
        self._text, self._state = self._text[n_chars:], state


def _completes(rest: str, names: Collection[str]) -> bool | None:
    """Does ``rest`` begin with one of ``names`` and ``>``? None when it still may."""
    name, closed, _ = rest.partition(">")
    if closed:
        return name in names
    return None if any(offered.startswith(name) for offered in names) else False


def _follows(rest: str, tags: tuple[str, ...]) -> bool | None:
    """Does one of ``tags`` start ``rest``? None when it still may."""
    if rest.startswith(tags):
        return True
    return None if any(tag.startswith(rest) for tag in tags) else False
