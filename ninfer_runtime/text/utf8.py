"""Bytes to text: a character is held until all its bytes are there."""

import codecs


class Utf8Stage:
    """Decode UTF-8 that arrives in arbitrary pieces.

    Bytes that can never become a character turn into U+FFFD as the Unicode standard's maximal subparts; a character
    left incomplete at the end becomes one U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def inside(self) -> bool:
        """True while a character has begun and not ended."""
        return bool(self._decoder.getstate()[0])

    def feed(self, piece: bytes) -> list[str]:
        """Text that is complete now: one string, or none."""
        text = self._decoder.decode(piece)
        return [text] if text else []

    def flush(self) -> list[str]:
        """What an incomplete tail becomes."""
        text = self._decoder.decode(b"", final=True)
        return [text] if text else []
