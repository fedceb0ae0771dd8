"""JSON from files and users: duplicate names, NaN, Infinity and bottomless nesting are errors with a place."""

import json
import math
from typing import Any

from ninfer_format.errors import ArtifactError, NinferError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"the name {name!r} stands twice in one object")
        members[name] = value
    return members


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is out of range")
    return number


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def parse_json(document: bytes | str, place: str, error: type[NinferError] = ArtifactError) -> Any:
    """The document's value; ``error`` naming ``place`` when it is not strict JSON in UTF-8."""
    try:
        text = document if isinstance(document, str) else document.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse)
    except UnicodeDecodeError as problem:
        raise error(f"{place} is not UTF-8: byte {problem.start} cannot be decoded") from None
    except RecursionError:
        raise error(f"{place} is nested too deeply") from None
    except ValueError as problem:
        raise error(f"{place} is not JSON: {problem}") from None
