"""JSON as a container may use it: one reading, no surprises, bounded memory.

Refused beyond plain JSON errors: duplicate members, ``-0``, reals, NaN and Infinity, a byte-order mark, integers of
more than 19 digits, and text whose bracket structure already shows that it cannot be the expected document. The
structure is checked on the raw bytes before any Python object is made, so hostile text cannot exhaust memory.
"""

import json
import math
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import DirectoryError

_MAX_DIGITS = 19
_COMMAS_PER_OBJECT = 64


def _outside_strings(text: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes of ``text`` that are not inside a JSON string (quotes themselves excluded)."""
    quotes = text == ord('"')
    backslashes = np.flatnonzero(text == ord("\\")).astype(np.int32)
    if backslashes.size:
        starts = np.flatnonzero(np.diff(backslashes, prepend=-2) != 1)
        lengths = np.diff(starts, append=backslashes.size)
        after_odd_run = backslashes[starts + lengths - 1][lengths % 2 == 1] + 1
        quotes[after_odd_run[after_odd_run < text.size]] = False
    inside = np.bitwise_xor.accumulate(quotes.view(np.uint8))
    bare: NDArray[np.uint8] = text[(inside == 0) & ~quotes]
    return bare


def check_structure(text: bytes, *, max_depth: int, min_object_bytes: int, what: str) -> None:
    """Refuse text nested deeper than ``max_depth`` or with more objects than ``len(text) / min_object_bytes``.

    Runs in a few passes over the bytes and allocates a small multiple of their number.
    """
    if not text:
        raise DirectoryError(f"the {what} is empty")
    bare = _outside_strings(np.frombuffer(text, dtype=np.uint8))
    opens_object, opens_array = bare == ord("{"), bare == ord("[")
    closes = (bare == ord("}")) | (bare == ord("]"))
    n_objects, n_arrays = int(opens_object.sum()), int(opens_array.sum())
    depth = np.cumsum(opens_object.astype(np.int8) + opens_array - closes.astype(np.int8), dtype=np.int32)
    deepest = int(depth.max(initial=0))
    if deepest > max_depth:
        raise DirectoryError(f"the {what} is nested {deepest} levels deep; at most {max_depth} are allowed")
    if n_objects * min_object_bytes > len(text) + 2 * min_object_bytes or n_arrays > n_objects + 1:
        raise DirectoryError(
            f"the {what} has {n_objects} JSON objects and {n_arrays} arrays in {len(text)} bytes; not a valid one"
        )
    if int((bare == ord(",")).sum()) > _COMMAS_PER_OBJECT * (n_objects + 1):
        raise DirectoryError(f"the {what} has far more members or elements than {n_objects} objects can hold")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DirectoryError(f"member {twice!r} appears twice in one JSON object")
    return members


def _integer(text: str) -> int:
    if text == "-0":
        raise DirectoryError("an integer is written -0; expected 0")
    if len(text.lstrip("-")) > _MAX_DIGITS:
        raise DirectoryError(f"an integer has {len(text)} digits; the largest allowed value is 2^63 - 1")
    return int(text)


def _real(text: str) -> NoReturn:
    raise DirectoryError(f"the real number {text} appears; only integers are allowed")


def _constant(text: str) -> NoReturn:
    raise DirectoryError(f"the value {text} appears; it is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise DirectoryError(f"the number {text} is out of range")
    return value


def parse_strict(text: bytes, *, what: str, reals: bool = False) -> Any:
    """Parse UTF-8 JSON with unique members; ``reals`` also admits finite real numbers (the config resource has some).

    DirectoryError says what is wrong with the ``what``.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise DirectoryError(f"the {what} is not UTF-8: byte {byte:#04x} at position {error.start}") from None
    if decoded.startswith("\ufeff"):
        raise DirectoryError(f"the {what} starts with a byte-order mark; it must start with its JSON text")
    try:
        return json.loads(
            decoded,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_finite if reals else _real,
            parse_constant=_constant,
        )
    except json.JSONDecodeError as error:
        raise DirectoryError(f"the {what} is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise DirectoryError(f"the {what} is nested too deeply") from None
