"""A grammar that begins behind the thinking block, and one that only keeps an answer from ending too early."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ninfer_format.errors import GenerationError
from ninfer_runtime.text.grammar_matcher import GrammarVocabulary, MatchedText, all_bits, bits_of, has_bit
from ninfer_runtime.text.reasoning import THINK_CLOSE

if TYPE_CHECKING:
    from ninfer_runtime.backends.base import Uint32s

CLOSE = THINK_CLOSE.encode()
MAX_FRAME = 2
"""Newlines between the closing tag and the answer, as the templates write them; they belong to neither."""

_THINKING, _FRAME, _ANSWER = range(3)


class AfterThinking:
    """The engine's ``Grammar`` for an answer behind an open thinking block.

    Until the block is closed every id is allowed but stop ids: the text may not end there. Then come at most two
    newlines, and the answer. The closing tag may also be spelled by several tokens; the one that ends it brings nothing
    but newlines along.
    """

    def __init__(self, answer: MatchedText, vocabulary: GrammarVocabulary, stop_ids: frozenset[int]) -> None:
        self._answer = answer
        self._tokenizer = vocabulary.tokenizer
        self._closings = _closings_of(vocabulary)
        self._thinking = vocabulary.stop_bits(stop_ids).everything
        self._place, self._count = _THINKING, 0
        """``_count``: letters of the closing tag that the text ends with, or newlines that may still come."""

    def masks(self, drafts: Sequence[int], out: "Uint32s") -> int:
        """As ``Grammar``."""
        place, count = self._place, self._count
        for n_drafts in range(len(drafts) + 1):
            row, rest = out[n_drafts], drafts[n_drafts:]
            if place == _ANSWER:
                return n_drafts + self._answer.masks(rest, out[n_drafts:])
            if place == _THINKING:
                self._fill(row, self._thinking & ~self._closings.forbidden[count])
            else:
                newlines = self._closings.newlines[count]
                n_rows = self._answer.masks(rest, out[n_drafts:])
                is_newline = bool(rest) and has_bit(newlines, rest[0])
                row[: len(newlines)] |= newlines
                if not is_newline:
                    return n_drafts + n_rows
            if not rest or not has_bit(row, rest[0]):
                return n_drafts + 1
            place, count = self._after(place, count, rest[0])
        raise AssertionError("the last row has no draft behind it")

    def advance(self, token_id: int) -> None:
        """The token was emitted."""
        if self._place == _FRAME and not has_bit(self._closings.newlines[self._count], token_id):
            self._place = _ANSWER
        if self._place == _ANSWER:
            self._answer.advance(token_id)
        else:
            self._place, self._count = self._after(self._place, self._count, token_id)

    def _after(self, place: int, count: int, token_id: int) -> tuple[int, int]:
        piece = self._tokenizer.token_bytes(token_id)
        if place == _THINKING:
            text = CLOSE[:count] + piece
            at = text.find(CLOSE)
            if at < 0:
                return _THINKING, next(n for n in range(len(CLOSE) - 1, -1, -1) if text.endswith(CLOSE[:n]))
            piece, count = text[at + len(CLOSE) :], MAX_FRAME
        if piece.strip(b"\n"):
            raise GenerationError(f"token {token_id} ends the thinking and begins the answer at once")
        left = max(count - len(piece), 0)
        return (_FRAME, left) if left else (_ANSWER, 0)

    @staticmethod
    def _fill(row: "Uint32s", bits: "Uint32s") -> None:
        row[: len(bits)], row[len(bits) :] = bits, 0


class _Closings:
    """Tokens around the closing tag in one vocabulary.

    forbidden[n]  behind n letters of the tag: ids that complete it and go on with something else than newlines
    newlines[n]   ids of 1 to n newlines
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        tokenizer, n_ids = vocabulary.tokenizer, vocabulary.n_addressable
        forbidden: list[set[int]] = [set() for _ in CLOSE]
        newlines: list[set[int]] = [set() for _ in range(MAX_FRAME + 1)]
        for token_id in range(n_ids):
            piece = tokenizer.token_bytes(token_id)
            if CLOSE[-1:] in piece:
                for n, ids in enumerate(forbidden):
                    _, found, rest = (CLOSE[:n] + piece).partition(CLOSE)
                    if found and rest.strip(b"\n"):
                        ids.add(token_id)
            elif piece and not piece.strip(b"\n"):
                for ids in newlines[len(piece) :]:
                    ids.add(token_id)
        self.forbidden = [bits_of(n_ids, frozenset(ids)) for ids in forbidden]
        self.newlines = [bits_of(n_ids, frozenset(ids)) for ids in newlines]


_CLOSINGS: "weakref.WeakKeyDictionary[GrammarVocabulary, _Closings]" = weakref.WeakKeyDictionary()


def _closings_of(vocabulary: GrammarVocabulary) -> _Closings:
    """Made once per vocabulary."""
    if (found := _CLOSINGS.get(vocabulary)) is None:
        found = _CLOSINGS[vocabulary] = _Closings(vocabulary)
    return found


class AtLeast:
    """The engine's ``Grammar`` for an answer of which only the length is prescribed: no stop id among its first
    ``n_tokens`` tokens."""

    def __init__(self, n_tokens: int, n_addressable: int, stop_ids: frozenset[int]) -> None:
        self._n_left = n_tokens
        self._all = all_bits(n_addressable)
        self._no_stop = self._all & ~bits_of(n_addressable, stop_ids)

    def masks(self, drafts: Sequence[int], out: "Uint32s") -> int:
        """As ``Grammar``."""
        for n_drafts in range(len(drafts) + 1):
            bits = self._no_stop if n_drafts < self._n_left else self._all
            out[n_drafts, : len(bits)], out[n_drafts, len(bits) :] = bits, np.uint32(0)
            if n_drafts < len(drafts) and not has_bit(bits, drafts[n_drafts]):
                return n_drafts + 1
        return len(drafts) + 1

    def advance(self, token_id: int) -> None:
        """The token was emitted."""
        self._n_left = max(self._n_left - 1, 0)
