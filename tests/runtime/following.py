"""Texts that a grammar lets through: random tokens among the allowed ones, as a model without sense would write."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_runtime.backends.base import Uint32s
from ninfer_runtime.engine.sequence import Grammar
from ninfer_runtime.text.grammar import GrammarSpec, grammar_for
from ninfer_runtime.text.tokenizer import Tokenizer

N_SPARE_WORDS = 2
"""Masks of the engine are as wide as the head, which has more rows than the vocabulary has ids."""


@dataclass(frozen=True, slots=True)
class Written:
    """``ended``: a stop id was allowed and drawn; otherwise the length limit cut the text."""

    token_ids: tuple[int, ...]
    text: str
    ended: bool


def row_of(grammar: Grammar, tokenizer: Tokenizer, drafts: Sequence[int] = ()) -> tuple[int, Uint32s]:
    """(rows filled, masks) with every word preset, so that a word left alone shows."""
    words = -(-tokenizer.n_addressable // 32) + N_SPARE_WORDS
    out = np.full((1 + len(drafts), words), 0xFFFFFFFF, np.uint32)
    return grammar.masks(drafts, out), out


def allowed(row: Uint32s) -> list[int]:
    """The ids of one mask row, in order."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def write(
    spec: GrammarSpec,
    tokenizer: Tokenizer,
    stop_ids: frozenset[int],
    seed: int,
    *,
    n_max: int = 300,
    starts_inside: bool = False,
    lean: Callable[[bytes, bytes], float] = lambda before, piece: 1.0,
) -> Written:
    """Draw until a stop id or ``n_max`` tokens; ``lean`` weighs a token by the bytes before it and its own."""
    rng = random.Random(seed)
    grammar = grammar_for(spec, tokenizer, stop_ids, starts_inside=starts_inside)
    token_ids: list[int] = []
    before = b""
    while len(token_ids) < n_max:
        n_rows, out = row_of(grammar, tokenizer)
        ids = allowed(out[0])
        assert n_rows == 1
        assert ids, "nothing may follow"
        assert max(ids) < tokenizer.n_addressable
        if (stops := stop_ids.intersection(ids)) and (len(stops) == len(ids) or rng.random() < 0.4):
            return Written(tuple(token_ids), tokenizer.decode(token_ids), True)
        ids = [token_id for token_id in ids if token_id not in stop_ids]
        weights = [lean(before, tokenizer.token_bytes(token_id)) for token_id in ids]
        token_ids += rng.choices(ids, weights)
        before += tokenizer.token_bytes(token_ids[-1])
        grammar.advance(token_ids[-1])
    return Written(tuple(token_ids), tokenizer.decode(token_ids), False)


def accepts(spec: GrammarSpec, tokenizer: Tokenizer, stop_ids: frozenset[int], token_ids: Sequence[int]) -> bool:
    """Would exactly these tokens be let through, with an end behind them?"""
    grammar = grammar_for(spec, tokenizer, stop_ids)
    for token_id in token_ids:
        if token_id not in allowed(row_of(grammar, tokenizer)[1][0]):
            return False
        grammar.advance(token_id)
    return stop_ids <= set(allowed(row_of(grammar, tokenizer)[1][0]))
