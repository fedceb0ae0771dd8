"""Engine settings are checked once, by name, before anything is opened."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from ninfer_format.errors import UsageError
from ninfer_runtime.backends import backend
from ninfer_runtime.config import EngineConfig


@pytest.mark.parametrize(
    "name, value",
    [
        ("dtype", "float16"),
        ("kv_dtype", "fp8"),
        ("max_context", 0),
        ("max_context", 1.5),
        ("max_context", 2**31),
        ("prefill_chunk", 0),
        ("prefill_chunk", 100),
        ("max_concurrency", 0),
        ("max_concurrency", 9),
        ("kv_capacity", 2047),
        ("weight_budget", -1),
    ],
)
def test_setting_outside_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    "settings, n_pages",
    [
        ({"max_context": 64}, 1),
        ({"max_context": 65}, 2),
        ({"max_context": 65, "max_concurrency": 3}, 6),
        ({"max_context": 65, "kv_capacity": 129, "max_concurrency": 3}, 3),
    ],
)
def test_capacity_is_rounded_up_to_pages(settings: dict[str, Any], n_pages: int) -> None:
    assert EngineConfig(**settings).n_pages == n_pages


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().dtype = "bfloat16"  # type: ignore[misc]


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown backend 'tpu', expected one of reference"):
        backend("tpu")
