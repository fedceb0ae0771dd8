"""Text to token ids and back, from the artifact's own tokenizer files.

The base vocabulary is byte-level BPE: every id stands for bytes. Added tokens stand for their text; `tokenizer.json`
lists most of them, `tokenizer_config.json` all. ``encode_text`` never produces an added token, so text of users stays
text; ``encode_segments`` puts them where the template did.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ninfer_format.command import require_extra
from ninfer_format.errors import ArtifactError
from ninfer_runtime.text.json_input import parse_json

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token outside the BPE vocabulary. ``special`` ones steer the model and are never shown."""

    token_id: int
    text: str
    special: bool
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt: ordinary text, or (``control``) the text of exactly one added token."""

    text: str
    control: bool = False


def byte_alphabet() -> dict[int, int]:
    """Code point of a byte-level BPE vocabulary → byte: printable Latin-1 as itself, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {code: code for code in shown} | {0x100 + i: byte for i, byte in enumerate(hidden)}


_ALPHABET = byte_alphabet()


class Tokenizer:
    """One vocabulary. Ids ``0 .. n_addressable - 1`` mean something; the matrices may have more rows."""

    def __init__(self, encoder: Any, base: Mapping[str, int], added: Sequence[AddedToken]) -> None:
        self._encoder = encoder
        self.added: Mapping[str, AddedToken] = {token.text: token for token in added}
        self._added_by_id = {token.token_id: token for token in added}
        self._base = {token_id: piece for piece, token_id in base.items()}
        ids = self._base.keys() | self._added_by_id.keys()
        self.n_addressable: int = max(ids) + 1
        self._bytes: dict[int, bytes] = {token.token_id: token.text.encode() for token in added}
        self._check(ids)

    @classmethod
    def from_files(cls, tokenizer_json: bytes, tokenizer_config: bytes) -> "Tokenizer":
        """The tokenizer of the two files' bytes. ArtifactError when they are broken or contradict each other."""
        tokenizers = require_extra("tokenizers", "cpu")
        try:
            loaded = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ArtifactError(f"{TOKENIZER_JSON} is not a tokenizer: {error}") from None
        # The same model without added tokens: what they spell is then ordinary text.
        plain = tokenizers.Tokenizer(loaded.model)
        plain.normalizer, plain.pre_tokenizer = loaded.normalizer, loaded.pre_tokenizer
        base = loaded.get_vocab(with_added_tokens=False)
        if not base:
            raise ArtifactError(f"{TOKENIZER_JSON} has an empty vocabulary")
        listed = {
            token_id: AddedToken(token_id, token.content, **{flag: getattr(token, flag) for flag in _FLAGS})
            for token_id, token in loaded.get_added_tokens_decoder().items()
        }
        config = parse_json(tokenizer_config, TOKENIZER_CONFIG)
        return cls(plain, base, _merge(listed, config))

    # ---- encode ------------------------------------------------------------------------------
    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text; text that looks like an added token is encoded letter by letter."""
        if not text:
            return []
        try:
            encoded = self._encoder.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):  # lone surrogates, from JSON escapes or undecodable arguments
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            encoded = self._encoder.encode(text, add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a rendered prompt; neighbouring ordinary segments are encoded as one text."""
        ids: list[int] = []
        ordinary: list[str] = []
        for segment in segments:
            if not segment.control:
                ordinary.append(segment.text)
                continue
            ids += self.encode_text("".join(ordinary))
            ordinary.clear()
            ids.append(self.added[segment.text].token_id)
        return ids + self.encode_text("".join(ordinary))

    def split(self, text: str) -> list[Segment]:
        """Segments of trusted text: added tokens are control wherever they stand, leftmost and longest first."""
        segments: list[Segment] = []
        position = 0
        for match in self._added_pattern.finditer(text):
            if match.start() > position:
                segments.append(Segment(text[position : match.start()]))
            segments.append(Segment(match.group(), control=True))
            position = match.end()
        if position < len(text):
            segments.append(Segment(text[position:]))
        return segments

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.added, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    # ---- decode ------------------------------------------------------------------------------
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: UTF-8 that may begin or end inside a character; b"" for padding rows."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._base.get(token_id, "")
            found = self._bytes[token_id] = piece.translate(_ALPHABET).encode("latin-1")
        return found

    def is_control(self, token_id: int) -> bool:
        """True for tokens that are never shown, such as the end of turn."""
        token = self._added_by_id.get(token_id)
        return token is not None and token.special

    def decode(self, token_ids: Iterable[int]) -> str:
        """All the text, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def is_single_token(self, text: str) -> bool:
        """True when one added token spells exactly ``text``."""
        return text in self.added

    def _check(self, ids: Collection[int]) -> None:
        if len(ids) != self.n_addressable or min(ids) != 0:
            missing = min(set(range(self.n_addressable)).difference(ids))
            raise ArtifactError(
                f"the tokenizer has {len(ids)} tokens with ids up to {max(ids)}, but none with id {missing}; "
                "expected every id from 0 on"
            )
        pieces = (piece for token_id, piece in self._base.items() if token_id not in self._added_by_id)
        if foreign := set("".join(pieces)) - set(map(chr, _ALPHABET)):
            raise ArtifactError(
                f"{TOKENIZER_JSON}: the vocabulary has the character {min(foreign)!r}, which byte-level BPE never "
                "writes; other kinds of vocabularies are not supported"
            )
        for token in self._added_by_id.values():
            if token.single_word or token.lstrip or token.rstrip:
                raise ArtifactError(
                    f"added token {token.text!r} has single_word, lstrip or rstrip set, expected all false"
                )
            if (piece := self._base.get(token.token_id)) is not None and piece != token.text:
                raise ArtifactError(f"id {token.token_id} is both {piece!r} and the added token {token.text!r}")


def _merge(listed: Mapping[int, AddedToken], config: Any) -> list[AddedToken]:
    """Added tokens of both files by id; a token defined twice must agree."""
    merged = dict(listed)
    definitions = config.get("added_tokens_decoder", {}) if isinstance(config, dict) else None
    if not isinstance(definitions, dict):
        raise ArtifactError(f"{TOKENIZER_CONFIG} is not an object with an added_tokens_decoder object")
    for key, definition in definitions.items():
        token = _added_token(key, definition)
        if merged.setdefault(token.token_id, token) != token:
            raise ArtifactError(
                f"added token {token.token_id}: {TOKENIZER_JSON} has {merged[token.token_id]}, "
                f"{TOKENIZER_CONFIG} has {token}"
            )
    by_text: dict[str, int] = {}
    for token in merged.values():
        if by_text.setdefault(token.text, token.token_id) != token.token_id:
            raise ArtifactError(f"added token {token.text!r} has two ids, {by_text[token.text]} and {token.token_id}")
    return [merged[token_id] for token_id in sorted(merged)]


def _added_token(key: str, definition: Any) -> AddedToken:
    place = f"{TOKENIZER_CONFIG}: added_tokens_decoder[{key!r}]"
    if not key.isascii() or not key.isdigit():
        raise ArtifactError(f"{place}: the key is no token id")
    if not isinstance(definition, dict) or not isinstance(text := definition.get("content"), str) or not text:
        raise ArtifactError(f"{place} has no content, expected the token's text")
    flags = {flag: definition.get(flag, False) for flag in _FLAGS}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise ArtifactError(f"{place}: {', '.join(_FLAGS)} must be booleans")
    return AddedToken(int(key), text, **flags)
