"""The chain from token ids to typed events, and what its events join to.

tokens → bytes → UTF-8 → end of turn → reasoning → tool calls → stops. Every stage has ``feed`` and ``flush``; how the
input was split never changes what the events join to. Streaming sends the events, non-streaming joins them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ninfer_runtime.text.events import (
    ContentText,
    Event,
    ReasoningText,
    StopHit,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallFailed,
    ToolCallStart,
)
from ninfer_runtime.text.reasoning import ReasoningStage
from ninfer_runtime.text.stops import EndOfTurnStage, StopStage
from ninfer_runtime.text.tokenizer import Tokenizer
from ninfer_runtime.text.tool_calls import Tool, ToolCallStage, new_call_id
from ninfer_runtime.text.utf8 import Utf8Stage


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How one answer is read.

    starts_inside       the prompt ends within an open thinking block
    tools               functions on offer; a call of any other is text
    stops               stop strings of the answer
    reasoning_stops     stop strings of the thinking
    include_stop        the stop string itself is part of the text
    raw                 no stage but UTF-8 and ``stops``: control tokens and tags are shown as the answer
    tolerant_tool_calls accept complete functions whose outer closing tag is missing
    """

    starts_inside: bool = False
    tools: tuple[Tool, ...] = ()
    stops: tuple[str, ...] = ()
    reasoning_stops: tuple[str, ...] = ()
    include_stop: bool = False
    raw: bool = False
    tolerant_tool_calls: bool = False


class TokenStage:
    """Token ids to the bytes they stand for; control tokens stand for nothing, unless they are to be shown."""

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int] = frozenset(), *, show_all: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._show_all = show_all

    def feed(self, token_id: int) -> list[bytes]:
        """The token's bytes: one piece, or none."""
        if not self._show_all and (token_id in self._hidden_ids or self._tokenizer.is_control(token_id)):
            return []
        piece = self._tokenizer.token_bytes(token_id)
        return [piece] if piece else []

    def flush(self) -> list[bytes]:
        """Nothing: tokens are never held."""
        return []


class TextChain:
    """Everything after the bytes: what arrives as UTF-8 pieces leaves as events."""

    def __init__(
        self, options: StreamOptions, end_markers: Sequence[str] = (), call_id: Callable[[], str] = new_call_id
    ) -> None:
        tools = () if options.raw else options.tools
        self._raw = options.raw
        self._utf8 = Utf8Stage()
        self._end_of_turn = EndOfTurnStage(() if options.raw else end_markers)
        names = [tool.name for tool in tools]
        self._reasoning = ReasoningStage(starts_inside=options.starts_inside, tool_names=names)
        self._tool_calls = ToolCallStage(tools, tolerant=options.tolerant_tool_calls, call_id=call_id)
        self._stops = StopStage(options.stops, options.reasoning_stops, include=options.include_stop)
        self._finished = False

    @property
    def stop(self) -> StopHit | None:
        """What ended the text, once something did; generating more is of no use then."""
        if self._stops.hit is not None:
            return self._stops.hit
        return StopHit(None, "content") if self._end_of_turn.ended else None

    @property
    def inside_reasoning(self) -> bool:
        """True while the text belongs to a thinking block."""
        return not self._raw and self._reasoning.inside

    @property
    def inside_character(self) -> bool:
        """True while the bytes so far end within a character."""
        return self._utf8.inside

    def feed(self, piece: bytes) -> list[Event]:
        """Events that are certain now; none after a stop."""
        if self._finished or self.stop is not None:
            return []
        return self._from_text(self._utf8.feed(piece))

    def flush(self) -> list[Event]:
        """The end of the message: everything still held, once."""
        if self._finished:
            return []
        self._finished = True
        events = self._from_text(self._utf8.flush())
        events += self._from_raw(self._end_of_turn.flush())
        if not self._raw:
            events += self._to_stops(self._to_tool_calls(self._reasoning.flush()))
            events += self._to_stops(self._tool_calls.flush())
        events += self._stops.flush()
        if self._end_of_turn.ended and self._stops.hit is None:
            events.append(StopHit(None, "content"))
        return events

    def _from_text(self, texts: Iterable[str]) -> list[Event]:
        return [event for text in texts for event in self._from_raw(self._end_of_turn.feed(text))]

    def _from_raw(self, texts: Iterable[str]) -> list[Event]:
        events: list[Event] = []
        for text in texts:
            if self._raw:
                events += self._to_stops([ContentText(text)])
            else:
                events += self._to_stops(self._to_tool_calls(self._reasoning.feed(text)))
        return events

    def _to_tool_calls(self, events: Iterable[Event]) -> list[Event]:
        return [out for event in events for out in self._tool_calls.feed(event)]

    def _to_stops(self, events: Iterable[Event]) -> list[Event]:
        return [out for event in events for out in self._stops.feed(event)]


class TextStream:
    """The whole chain for one generation: token ids in, events out.

    hidden_ids      further ids that are never shown (stop ids that the vocabulary does not mark as special)
    end_markers     end-of-turn texts that are not one token in this vocabulary: spelled out, they end the turn
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: StreamOptions,
        *,
        hidden_ids: frozenset[int] = frozenset(),
        end_markers: Sequence[str] = (),
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._tokens = TokenStage(tokenizer, hidden_ids, show_all=options.raw)
        self._chain = TextChain(options, end_markers, call_id)
        self.n_reasoning_tokens = 0
        """Tokens fed while the text belonged to a thinking block."""

    @property
    def stop(self) -> StopHit | None:
        """What ended the text, once something did; generating more is of no use then."""
        return self._chain.stop

    @property
    def inside_reasoning(self) -> bool:
        """True while the text belongs to a thinking block."""
        return self._chain.inside_reasoning

    @property
    def inside_character(self) -> bool:
        """True while the tokens so far end within a character."""
        return self._chain.inside_character

    def feed(self, token_ids: Iterable[int]) -> list[Event]:
        """Events that are certain after these tokens."""
        events: list[Event] = []
        for token_id in token_ids:
            self.n_reasoning_tokens += self._chain.inside_reasoning
            for piece in self._tokens.feed(token_id):
                events += self._chain.feed(piece)
        return events

    def flush(self) -> list[Event]:
        """The end of the message: everything still held, once."""
        return self._chain.flush()


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """A complete tool call; ``arguments`` is the text of one JSON object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the events of one message join to."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[CompletedCall, ...] = ()
    stop: StopHit | None = None


def join(events: Iterable[Event]) -> Reply:
    """The message: texts joined by channel, completed calls in order, failed and unfinished ones left out."""
    texts: dict[type, list[str]] = {ReasoningText: [], ContentText: []}
    started: dict[int, ToolCallStart] = {}
    arguments: dict[int, list[str]] = {}
    completed: list[CompletedCall] = []
    stop: StopHit | None = None
    for event in events:
        match event:
            case ReasoningText(text) | ContentText(text):
                texts[type(event)].append(text)
            case ToolCallStart(index):
                started[index], arguments[index] = event, []
            case ToolCallArguments(index, fragment):
                arguments[index].append(fragment)
            case ToolCallEnd(index):
                begin = started.pop(index)
                completed.append(CompletedCall(begin.call_id, begin.name, "".join(arguments[index])))
            case ToolCallFailed(index):
                del started[index]
            case StopHit():
                stop = event
    return Reply("".join(texts[ReasoningText]), "".join(texts[ContentText]), tuple(completed), stop)
