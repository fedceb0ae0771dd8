"""Looking for markers in text that is still growing."""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """``text[begin:end]`` is ``marker``."""

    begin: int
    end: int
    marker: str


def first_match(text: str, markers: Sequence[str], start: int = 0) -> Match | None:
    """The match that is complete first, reading left to right from ``start``; of those that end together the longest.

    This is the one a reader of single characters would see, so the answer does not depend on how the text was split.
    """
    found: Match | None = None
    for marker in markers:
        begin = text.find(marker, start)
        if begin < 0:
            continue
        match = Match(begin, begin + len(marker), marker)
        if found is None or (match.end, match.begin) < (found.end, found.begin):
            found = match
    return found


def open_suffix(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of a marker: it may still become one."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        suffix = text[-length:]
        if any(len(marker) > length and marker.startswith(suffix) for marker in markers):
            return length
    return 0
