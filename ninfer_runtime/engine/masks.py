"""Masks of rounds whose rows have grammars: in front of the launch, or while the device works.

A greedy row can be launched without its masks. Where the token it draws is allowed, it is the one it would have drawn
under the mask; where it is not, the round counts up to there, and the next one has its masks first. A row whose model
keeps leaving its form gets its masks first for longer and longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_format.errors import GenerationError
from ninfer_runtime.backends.base import Int32s, Uint32s
from ninfer_runtime.engine.lane import Lane

ALL_ALLOWED = np.uint32(0xFFFFFFFF)
MAX_DISTRUST = 64
"""Rounds that get their masks first after a row has left its form again and again."""


@dataclass(frozen=True, slots=True)
class RoundMasks:
    """uint32 [B, q, words] of a round, and how many drafts each row evaluates under them."""

    words: Uint32s
    held: tuple[int, ...]

    def n_allowed(self, b: int, token_ids: Int32s) -> int:
        """Of the tokens that row ``b`` drew from its columns, int32 [n], those up to the first it may not emit."""
        for column, token_id in enumerate(token_ids.tolist()):
            if not int(self.words[b, column, token_id >> 5]) >> (token_id & 31) & 1:
                return column
        return len(token_ids)


def have_grammars(lanes: Sequence[Lane]) -> bool:
    """Is there a row with a form?"""
    return any(lane.handle.request.grammar is not None for lane in lanes)


def may_come_late(lanes: Sequence[Lane]) -> bool:
    """All rows with a form are greedy and have kept to it lately."""
    bound = [lane for lane in lanes if lane.handle.request.grammar is not None]
    return all(lane.sampling.is_greedy and lane.n_masked == 0 for lane in bound)


def masks_of(lanes: Sequence[Lane], held: Sequence[int], n_words: int) -> RoundMasks:
    """The masks behind what the rows have emitted and behind each of the ``held[b]`` drafts that they allow.

    A grammar that fails ends its row.
    """
    masks = np.full((len(lanes), 1 + max(held), n_words), ALL_ALLOWED, np.uint32)
    out = list(held)
    for b, lane in enumerate(lanes):
        grammar = lane.handle.request.grammar
        if grammar is None:
            continue
        try:
            out[b] = grammar.masks(lane.drafts[: held[b]], masks[b, : 1 + held[b]]) - 1
        except Exception as error:  # what a request brings along may end that request, never the engine
            lane.ended = GenerationError(f"the grammar failed: {type(error).__name__}: {error}")
            masks[b], out[b] = ALL_ALLOWED, 0
    return RoundMasks(masks, tuple(out))


def note_masked_round(lane: Lane) -> None:
    """The row has taken part in a round that had its masks."""
    lane.n_masked = max(lane.n_masked - 1, 0)


def note_left(lane: Lane) -> None:
    """The row drew what its form does not allow."""
    lane.distrust = min(max(2 * lane.distrust, 1), MAX_DISTRUST)
    lane.n_masked = lane.distrust
