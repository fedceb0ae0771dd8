"""Stop strings: withhold text that may still become one, release the rest at once."""

from collections.abc import Sequence

from ninfer_format.errors import RequestError
from ninfer_runtime.text.events import Channel, ContentText, Event, ReasoningText, StopHit
from ninfer_runtime.text.scan import first_match, open_suffix


class StopFilter:
    """Text up to the first stop string. Of several, the one that is complete first wins, then the longest.

    include    the stop string itself is passed on too
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if not all(stops):
            raise RequestError("a stop string is empty, expected at least one character")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text so far that is certain; "" after a hit."""
        if self.hit is not None:
            return ""
        self._held += text
        if (match := first_match(self._held, self._stops)) is not None:
            self.hit = match.marker
            out, self._held = self._held[: match.end if self._include else match.begin], ""
            return out
        keep = open_suffix(self._held, self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """Text that was withheld for a stop string that did not come."""
        out, self._held = self._held, ""
        return out


class EndOfTurnStage:
    """Raw text up to a spelled-out end-of-turn marker, for vocabularies in which it is not one token."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._filter = StopFilter(markers)

    @property
    def ended(self) -> bool:
        """True once a marker was read."""
        return self._filter.hit is not None

    def feed(self, text: str) -> list[str]:
        """Text that is certain now: one string, or none."""
        out = self._filter.feed(text)
        return [out] if out else []

    def flush(self) -> list[str]:
        """What was withheld."""
        out = self._filter.flush()
        return [out] if out else []


class StopStage:
    """Stop strings on the answer, and separate ones on the thinking; tool calls are never searched.

    Each stretch of one kind of text is searched by itself: withheld text is released when another kind follows.
    """

    def __init__(self, content: Sequence[str] = (), reasoning: Sequence[str] = (), *, include: bool = False) -> None:
        self._filters = {"content": StopFilter(content, include=include)}
        self._filters["reasoning"] = StopFilter(reasoning, include=include)
        self._channel: Channel | None = None
        self.hit: StopHit | None = None

    def feed(self, event: Event) -> list[Event]:
        """The event as far as it is certain; a StopHit ends everything."""
        if self.hit is not None:
            return []
        channel = _channel(event)
        events = self.flush() if channel != self._channel else []
        self._channel = channel
        if channel is None:
            return [*events, event]
        assert isinstance(event, ContentText | ReasoningText)
        stops = self._filters[channel]
        events += _text(channel, stops.feed(event.text))
        if stops.hit is not None:
            self.hit = StopHit(stops.hit, channel)
            events.append(self.hit)
        return events

    def flush(self) -> list[Event]:
        """Withheld text of the current stretch."""
        return [] if self._channel is None else _text(self._channel, self._filters[self._channel].flush())


def _channel(event: Event) -> Channel | None:
    match event:
        case ContentText():
            return "content"
        case ReasoningText():
            return "reasoning"
    return None


def _text(channel: Channel, text: str) -> list[Event]:
    if not text:
        return []
    return [ContentText(text) if channel == "content" else ReasoningText(text)]
