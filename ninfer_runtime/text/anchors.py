"""Where a rendered conversation is likely to be continued differently: the anchors of prefix reuse.

Turns begin where the template put its ``<|im_start|>``; text that merely spells it begins none. Four of those places
outlast a request:

- the end of the system block with its tools, which other conversations share,
- the start of the last question, where another question may be asked instead,
- the end of the last question, from which on templates drop the thinking once the next question is asked,
- the start of the generation header: the history that any further turn appends to.

A user turn that begins with a tool's result is no question.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ninfer_runtime.cache.prefix import MIN_SAVED
from ninfer_runtime.engine.sequence import Anchors
from ninfer_runtime.text.tokenizer import Segment

if TYPE_CHECKING:
    from ninfer_runtime.text.template import TemplateOptions

TURN_OPEN = "<|im_start|>"
TOOL_RESULT = "<tool_response>"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a prompt: index of its first token, the role the template wrote, whether it holds tool results."""

    start: int
    role: str
    is_tool_result: bool = False


def prompt_anchors(
    segments: Sequence[Segment], token_ids: Sequence[int], turn_open: int | None, options: "TemplateOptions"
) -> Anchors:
    """Anchors of a prompt and the segments it was encoded from.

    turn_open  id of ``<|im_start|>``; None: the vocabulary has no such token, and the prompt no anchors
    """
    key = template_key(options)
    if turn_open is None:
        return Anchors(key)
    starts = [index for index, token_id in enumerate(token_ids) if token_id == turn_open]
    roles = _roles(segments)
    turns = [Turn(start, *role) for start, role in zip(starts, roles, strict=True)]
    return Anchors(key, _apart(_places(turns)))


def template_key(options: "TemplateOptions") -> bytes:
    """The template mode, spelled out: everything that was chosen for the rendering but the messages and tools."""
    return json.dumps(options.variables(), sort_keys=True).encode()


def _roles(segments: Sequence[Segment]) -> list[tuple[str, bool]]:
    """(role, holds tool results) of every turn, in order."""
    roles = []
    for i, segment in enumerate(segments):
        if segment.control and segment.text == TURN_OPEN:
            header = segments[i + 1].text if i + 1 < len(segments) and not segments[i + 1].control else ""
            role, _, content = header.partition("\n")
            after = segments[i + 2] if i + 2 < len(segments) else Segment("")
            holds_results = not content.strip() and after.control and after.text == TOOL_RESULT
            roles.append((role.strip(), holds_results))
    return roles


def _places(turns: Sequence[Turn]) -> list[int]:
    """Places worth a state, the one that saves most first."""
    places = []
    if turns and turns[0].role == "system" and len(turns) > 1:
        places.append(turns[1].start)
    questions = [i for i, turn in enumerate(turns) if turn.role == "user" and not turn.is_tool_result]
    if questions and questions[-1] + 1 < len(turns):
        places.append(turns[questions[-1] + 1].start)
    if turns and turns[-1].role == "assistant":
        places.append(turns[-1].start)
    if questions:
        places.append(turns[questions[-1]].start)
    return places


def _apart(places: Sequence[int]) -> tuple[int, ...]:
    """The places in order, without those that save next to nothing beside an earlier one of the list."""
    chosen: list[int] = []
    for place in places:
        if all(abs(place - other) >= MIN_SAVED for other in (0, *chosen)):
            chosen.append(place)
    return tuple(sorted(chosen))
