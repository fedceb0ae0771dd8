"""Compiled grammars over one vocabulary, and the state of one text that follows one."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ninfer_format.command import require_extra
from ninfer_format.errors import GenerationError, RequestError
from ninfer_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ninfer_runtime.backends.base import Uint32s

Automaton = Any
"""An ``llguidance.LLMatcher`` at the beginning of a text."""

MAX_SOURCE_CHARS = 1 << 18
COMPILE_SECONDS = 10.0
COMPILE_STACK_BYTES = 256 << 20
"""The compiler recurses along chains of rules and references; the longest that fit into ``MAX_SOURCE_CHARS`` need a
quarter of this (address space, not memory)."""
MAX_MESSAGE_CHARS = 500
MAX_STOP_BITS = 64


@dataclass(frozen=True, slots=True)
class StopBits:
    """Masks uint32 [ceil(n_addressable / 32)]: the stop ids; text without them; everything without them."""

    stop: "Uint32s"
    text: "Uint32s"
    everything: "Uint32s"


class GrammarVocabulary:
    """One tokenizer as llguidance sees it. Added tokens stand for themselves there: no text of a grammar spells one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._llguidance = require_extra("llguidance", "grammar")
        self.tokenizer = tokenizer
        self.n_addressable = tokenizer.n_addressable
        control = frozenset(token.token_id for token in tokenizer.added.values() if token.special)
        if not control:
            raise RequestError("this vocabulary has no control token, so no form can be prescribed in it")
        self.end_id = max(control)
        """Stands for the end of the text inside llguidance; the sequence's stop ids take its place."""
        self._view = self._llguidance.LLTokenizer(self._llguidance.TokenizerWrapper(_View(tokenizer, self.end_id)))
        self._limits = self._llguidance.LLParserLimits(verbose_errors=False)
        self.all_bits = all_bits(self.n_addressable)
        self.text_bits = self.all_bits & ~bits_of(self.n_addressable, control)
        """uint32 [ceil(n_addressable / 32)]: every id but control tokens."""
        self._stop_bits: dict[frozenset[int], StopBits] = {}

    def stop_bits(self, stop_ids: frozenset[int]) -> "StopBits":
        """The masks that these stop ids make; shared by all texts that end with them, and not to be changed."""
        if (found := self._stop_bits.get(stop_ids)) is None:
            stop = bits_of(self.n_addressable, stop_ids)
            found = StopBits(stop, self.text_bits & ~stop, self.all_bits & ~stop)
            if len(self._stop_bits) >= MAX_STOP_BITS:
                self._stop_bits.clear()
            self._stop_bits[stop_ids] = found
        return found

    def tag(self, text: str) -> str:
        """How a grammar's rule says ``text``: as its token if it is one, otherwise spelled out."""
        token = self.tokenizer.added.get(text)
        return f"<[{token.token_id}]>" if token is not None else f'"{text}"'

    # ---- sources -----------------------------------------------------------------------------
    def json_source(self, schema: str, whitespace: str) -> str:
        """For one document of a JSON schema, with ``whitespace`` between its tokens."""
        matcher = self._llguidance.LLMatcher
        try:
            source: str = matcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": whitespace})
        except ValueError as error:
            raise RequestError(f"the JSON schema is wrong: {error}") from None
        return source

    def regex_source(self, pattern: str) -> str:
        """For a text that the whole pattern matches."""
        source: str = self._llguidance.LLMatcher.grammar_from_regex(pattern)
        return source

    def lark_source(self, text: str) -> str:
        """For a text of a Lark grammar."""
        source: str = self._llguidance.LLMatcher.grammar_from_lark(text)
        return source

    # ---- compiling ---------------------------------------------------------------------------
    def compile(self, source: str) -> Automaton:
        """The automaton at the beginning of the text. RequestError with the compiler's words."""
        if len(source) > MAX_SOURCE_CHARS:
            raise RequestError(f"the grammar has {len(source)} characters, expected at most {MAX_SOURCE_CHARS}")
        made: list[Automaton] = []

        def run() -> None:
            made.append(self._llguidance.LLMatcher(self._view, source, log_level=0, limits=self._limits))

        with _THREAD_LOCK:  # the stack size is one setting for all threads to come
            before = threading.stack_size(COMPILE_STACK_BYTES)
            try:
                thread = threading.Thread(target=run, name="grammar", daemon=True)
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join(COMPILE_SECONDS)
        if thread.is_alive():
            raise RequestError(f"the grammar was not compiled in {COMPILE_SECONDS:g} seconds; make it smaller")
        (automaton,) = made
        self._refuse_errors(automaton)
        first, probe = np.zeros_like(self.text_bits), automaton.deep_copy()
        probe.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        if probe.is_error() or not first.any():
            raise RequestError("the grammar allows no text, or is too complex from the start")
        return automaton

    def _refuse_errors(self, automaton: Automaton) -> None:
        if automaton.is_error():
            raise RequestError(f"the grammar cannot be used: {_short(automaton.get_error())}")


class MatchedText:
    """The engine's ``Grammar`` for a text that an automaton accepts. While a request waits for its turn it has next to
    no size."""

    def __init__(self, automaton: Automaton, vocabulary: GrammarVocabulary, stop_ids: frozenset[int]) -> None:
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._stop_ids = stop_ids
        self._bits = vocabulary.stop_bits(stop_ids)
        self._ended = False

    @cached_property
    def _matcher(self) -> Automaton:
        return self._automaton.deep_copy()

    @cached_property
    def _row(self) -> "Uint32s":
        return np.zeros_like(self._bits.stop)

    def masks(self, drafts: Sequence[int], out: "Uint32s") -> int:
        """As ``Grammar``; GenerationError when the next step is too much work for the grammar."""
        n_taken, ended, n_rows = 0, self._ended, 0
        try:
            while True:
                self._fill(out[n_rows], ended)
                n_rows += 1
                if n_rows > len(drafts) or not has_bit(out[n_rows - 1], drafts[n_rows - 1]):
                    return n_rows
                draft = drafts[n_rows - 1]
                ended = ended or draft in self._stop_ids
                if not ended:
                    self._take(draft)
                    n_taken += 1
        finally:
            if n_taken and not self._matcher.rollback(n_taken):
                raise GenerationError(f"the grammar lost its place: {_short(self._matcher.get_error())}")

    def advance(self, token_id: int) -> None:
        """The token was emitted; GenerationError if it does not continue the text."""
        if token_id in self._stop_ids:
            self._ended = True
        if not self._ended:
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise GenerationError(f"token {token_id} breaks the form: {_short(self._matcher.get_error())}")

    def _fill(self, row: "Uint32s", ended: bool) -> None:
        """Ids that may follow the matcher's text, in a row that may be wider than the vocabulary."""
        n_words = len(self._bits.stop)
        row[n_words:] = 0
        if ended:
            row[:n_words] = self._bits.stop
            return
        self._matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        if self._matcher.is_error():
            raise GenerationError(f"the form is too complex to go on: {_short(self._matcher.get_error())}")
        may_end = has_bit(self._row, self._vocabulary.end_id)
        np.bitwise_and(self._row, self._bits.text, out=row[:n_words])
        if may_end:
            row[:n_words] |= self._bits.stop
        elif not row.any():
            raise GenerationError("the form allows no token here")


class _View:
    """What llguidance reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.n_addressable)]
        self.special_token_ids = [token.token_id for token in tokenizer.added.values()]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode_text(text if isinstance(text, str) else text.decode("utf-8", "replace"))


_THREAD_LOCK = threading.Lock()


def bits_of(n_ids: int, ids: frozenset[int]) -> "Uint32s":
    """uint32 [ceil(n_ids / 32)] with the bits of ``ids`` set; ids beyond are left out."""
    flags = np.zeros(-(-n_ids // 32) * 32, np.uint8)
    flags[[token_id for token_id in ids if token_id < n_ids]] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def all_bits(n_ids: int) -> "Uint32s":
    """uint32 [ceil(n_ids / 32)] with the bits of all ids below ``n_ids`` set, and no other."""
    flags = np.zeros(-(-n_ids // 32) * 32, np.uint8)
    flags[:n_ids] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def has_bit(row: "Uint32s", token_id: int) -> bool:
    """Is the id allowed in a mask?"""
    word = token_id >> 5
    return word < len(row) and bool(int(row[word]) >> (token_id & 31) & 1)


def _short(message: str) -> str:
    """A compiler's message on one line, without its dump of the parser's state."""
    text = " ".join(message.partition("<non-verbose/>")[0].split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"
