"""Replace one member of a JSON object's text and leave every other byte as it is."""

import json
import re
from collections.abc import Iterator

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    """Members of the object that ``text`` is: key, and where its value begins and ends."""

    def skip(at: int) -> int:
        match = _SPACE.match(text, at)
        return match.end() if match else at

    at = skip(skip(0) + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = skip(skip(at) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        yield key, begin, end
        at = skip(end)
        if text[at] == ",":
            at = skip(at + 1)


def replace_member(text: str, key: str, value: str) -> str:
    """``text`` with the string ``value`` as the top-level member ``key``.

    ``text`` must be a JSON object that has the member. Non-ASCII characters are escaped if the old value's are.
    """
    (begin, end) = next((begin, end) for name, begin, end in _members(text) if name == key)
    return text[:begin] + json.dumps(value, ensure_ascii=text[begin:end].isascii()) + text[end:]
