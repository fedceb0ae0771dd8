"""`generation_config.json`: stop ids and suggested sampling values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ninfer_format.errors import ArtifactError
from ninfer_runtime.text.json_input import parse_json

GENERATION_CONFIG = "generation_config.json"

_NUMBERS = ("temperature", "top_p", "top_k", "min_p")
_UNSUPPORTED = {"repetition_penalty": 1.0, "num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0}
"""Settings that change the output and are not offered, with the value that switches each off."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the file says: ids that end a turn, SamplingParams fields it sets, and settings that are not offered."""

    stop_ids: frozenset[int]
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()

    @classmethod
    def from_file(cls, document: bytes, n_addressable: int) -> "GenerationDefaults":
        """From the file's bytes; ArtifactError when a value is of the wrong kind or an id outside the vocabulary."""
        members = parse_json(document, GENERATION_CONFIG)
        if not isinstance(members, dict):
            raise ArtifactError(f"{GENERATION_CONFIG} is not an object")
        stop_ids = _stop_ids(members.get("eos_token_id"), n_addressable)
        sampling = {name: _number(members[name], name) for name in _NUMBERS if members.get(name) is not None}
        if members.get("do_sample") is False:
            sampling["temperature"] = 0
        unsupported = (name for name, off in _UNSUPPORTED.items() if members.get(name, off) not in (off, None))
        return cls(stop_ids, sampling, tuple(unsupported))


def _stop_ids(value: Any, n_addressable: int) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < n_addressable for i in ids):
        raise ArtifactError(
            f"{GENERATION_CONFIG}: eos_token_id is {value!r}, expected an id or a non-empty list of ids "
            f"from 0 to {n_addressable - 1}"
        )
    return frozenset(ids)


def _number(value: Any, name: str) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArtifactError(f"{GENERATION_CONFIG}: {name} is {value!r}, expected a number")
    return value
