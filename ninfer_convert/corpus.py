"""Texts of a corpus in pieces that tokenize as if the whole text were tokenized at once; files are never held whole.

A piece ends after a line break that something visible follows, or before a single space between two visible
characters: the Qwen pre-tokenizer never joins anything across either. Only a text without both for ``LIMIT`` characters
is cut anywhere.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ninfer_format import SourceError
from ninfer_format.reader import open_regular

PIECE = 1 << 16
"""Characters from which on a place to cut is looked for."""
LIMIT = 1 << 20
_READ_BYTES = 1 << 20
_AFTER_LINE = re.compile(r"\n(?=\S)")
_BEFORE_SPACE = re.compile(r"(?<=\S)(?= \S)")
TEXT_MEMBER = "text"


@dataclass(slots=True)
class Corpus:
    """One file: ``.jsonl`` has a JSON object with a ``text`` member per line, anything else is UTF-8 text."""

    path: Path
    n_bytes: int = 0
    """Bytes read so far."""
    n_hard_cuts: int = 0
    """Places where a text had to be cut although that may change a token."""

    def pieces(self, piece: int = PIECE, limit: int = LIMIT) -> Iterator[str]:
        """The texts, cut; SourceError names the byte or line that is not what it should be."""
        texts = self._json_lines() if self.path.suffix.lower() == ".jsonl" else iter([self._blocks()])
        for blocks in texts:
            yield from self._cut(blocks, piece, limit)

    def _blocks(self) -> Iterator[str]:
        """The file as text, block by block; line ends stay as they are."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open_regular(self.path) as stream:
            while True:
                block = stream.read(_READ_BYTES)
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    position = self.n_bytes - (len(error.object) - len(block)) + error.start
                    raise SourceError(f"{self.path}: byte {position} is not UTF-8; convert the text first") from None
                self.n_bytes += len(block)
                if text:
                    yield text
                if not block:
                    return

    def _json_lines(self) -> Iterator[Iterator[str]]:
        for number, line in enumerate(self._lines(), 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[TEXT_MEMBER]
            except (ValueError, TypeError, KeyError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise SourceError(f'{self.path}: line {number} is no JSON object with a "{TEXT_MEMBER}" text')
            yield iter([text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")])

    def _lines(self) -> Iterator[str]:
        rest = ""
        for block in self._blocks():
            *lines, rest = (rest + block).split("\n")
            yield from lines
        yield rest

    def _cut(self, blocks: Iterator[str], piece: int, limit: int) -> Iterator[str]:
        held = ""
        for block in blocks:
            held += block
            while len(held) > piece:
                cut = self._place(held, piece, limit)
                if cut is None:
                    break
                yield held[:cut]
                held = held[cut:]
        if held:
            yield held

    def _place(self, held: str, piece: int, limit: int) -> int | None:
        """Where to cut, or None to read on."""
        if match := _AFTER_LINE.search(held, piece - 1):
            return match.end()
        if len(held) < limit:
            return None
        if match := _BEFORE_SPACE.search(held, piece):
            return match.start()
        self.n_hard_cuts += 1
        return limit
