"""Kinds of values a request's fields can have. Each reads a decoded JSON value and describes itself as a JSON schema.

``read(value, place)`` returns the value as the API modules use it, or raises ApiError with status 400 and the place.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ninfer_runtime.serve.errors import ApiError

MAX_SHOWN_CHARS = 80


class Kind(Protocol):
    """One kind of value."""

    def read(self, value: Any, place: str) -> Any:
        """The value, or ApiError naming ``place``."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of what ``read`` accepts."""


def wrong(place: str, value: Any, expected: str) -> ApiError:
    """The error for a value of the wrong kind or out of range."""
    return ApiError(f"{place} is {shown(value)}, expected {expected}", code="invalid_value", param=place)


def shown(value: Any) -> str:
    """A decoded JSON value in a few words; long text is cut."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return repr(value) if len(value) <= MAX_SHOWN_CHARS else f"a string of {len(value)} characters"
        case int() | float():
            return repr(value)
        case list():
            return f"an array of {len(value)}" if value else "an empty array"
    return "an object"


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number; ``1.0``, ``"1"`` and ``true`` are none."""

    low: int
    high: int

    def read(self, value: Any, place: str) -> int:
        """The number."""
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise wrong(place, value, f"an integer from {self.low} to {self.high}")
        return value

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds."""

    low: float
    high: float

    def read(self, value: Any, place: str) -> float:
        """The number."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not self.low <= value <= self.high:
            raise wrong(place, value, f"a number from {self.low:g} to {self.high:g}")
        return float(value)

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Boolean:
    """true or false."""

    def read(self, value: Any, place: str) -> bool:
        """The truth value."""
        if not isinstance(value, bool):
            raise wrong(place, value, "true or false")
        return value

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class String:
    """Text of a bounded length."""

    least: int = 0
    most: int = 1 << 26

    def read(self, value: Any, place: str) -> str:
        """The text."""
        if not isinstance(value, str) or not self.least <= len(value) <= self.most:
            some = "a string" if self.most >= 1 << 26 else f"a string of {self.least} to {self.most} characters"
            raise wrong(
                place, value, "a string that is not empty" if self.least == 1 and self.most >= 1 << 26 else some
            )
        return value

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        return {"type": "string", "minLength": self.least, "maxLength": self.most}


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def read(self, value: Any, place: str) -> str:
        """The word."""
        if not isinstance(value, str) or value not in self.words:
            raise wrong(place, value, " or ".join(map(repr, self.words)))
        return value

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True, slots=True)
class Strings:
    """A string, or an array of some; read as a tuple without the empty ones."""

    most: int
    single: bool = True

    def read(self, value: Any, place: str) -> tuple[str, ...]:
        """The strings."""
        texts = [value] if self.single and isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > self.most or not all(isinstance(text, str) for text in texts):
            raise wrong(place, value, f"{'a string or ' if self.single else ''}an array of at most {self.most} strings")
        return tuple(text for text in texts if text)

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        several = {"type": "array", "items": {"type": "string"}, "maxItems": self.most}
        return {"anyOf": [{"type": "string"}, several]} if self.single else several


@dataclass(frozen=True, slots=True)
class Array:
    """An array whose items the API module reads."""

    least: int = 0
    most: int = 1 << 20
    items: str = "items"

    def read(self, value: Any, place: str) -> list[Any]:
        """The array."""
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            bounds = f"{self.least} to {self.most}" if self.most < 1 << 20 else f"at least {self.least}"
            raise wrong(place, value, f"an array of {bounds} {self.items}")
        return value

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        return {"type": "array", "minItems": self.least, "maxItems": self.most, "items": {"type": "object"}}


@dataclass(frozen=True, slots=True)
class Free:
    """Anything that the API module reads by itself; ``describes`` is its JSON schema."""

    describes: Mapping[str, Any]

    def read(self, value: Any, place: str) -> Any:
        """The value."""
        return value

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        return dict(self.describes)


@dataclass(frozen=True, slots=True)
class StringMap:
    """Up to ``most`` pairs of short strings."""

    most: int = 16
    key_chars: int = 64
    value_chars: int = 512

    def read(self, value: Any, place: str) -> dict[str, str]:
        """The pairs."""
        good = isinstance(value, dict) and len(value) <= self.most
        if not good or not all(
            isinstance(text, str) and len(key) <= self.key_chars and len(text) <= self.value_chars
            for key, text in value.items()
        ):
            raise wrong(
                place,
                value,
                f"at most {self.most} pairs of a name of {self.key_chars} and a text of {self.value_chars} characters",
            )
        return dict(value)

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        texts = {"type": "string", "maxLength": self.value_chars}
        return {"type": "object", "maxProperties": self.most, "additionalProperties": texts}


ANYTHING = Free({})
