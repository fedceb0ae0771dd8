"""What the text chain says, one frozen dataclass per kind of event. Joining the texts of one kind gives the whole."""

from dataclasses import dataclass
from typing import Literal

Channel = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More thinking, without its tags and their framing newlines."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of an offered function has begun. ``index`` counts the calls of this message from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete; its fragments join to one JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class ToolCallFailed:
    """The call was malformed or unfinished: it never happened, and its whole text follows as content."""

    index: int


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string (or the spelled-out end of turn, ``stop`` None) was reached; nothing follows."""

    stop: str | None
    channel: Channel


Event = ReasoningText | ContentText | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallFailed | StopHit
