"""Fixtures of the converter's tests: small checkpoints with the real tensor names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan
from tests.convert.tiny import TinyCheckpoint, tiny_checkpoint


@pytest.fixture
def dense(tmp_path: Path) -> TinyCheckpoint:
    """A dense checkpoint in three shards."""
    return tiny_checkpoint(tmp_path / "tiny-dense")


@pytest.fixture
def moe(tmp_path: Path) -> TinyCheckpoint:
    """A mixture-of-experts checkpoint in three shards, banks fused."""
    return tiny_checkpoint(tmp_path / "tiny-moe", moe=True)


@pytest.fixture(params=["dense", "moe"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> TinyCheckpoint:
    """Both architectures in turn."""
    return tiny_checkpoint(tmp_path / f"tiny-{request.param}", moe=request.param == "moe")


@pytest.fixture
def plan_of() -> Callable[..., ConversionPlan]:
    """``plan_of(checkpoint, **options)``: the plan of a tiny checkpoint or folder."""

    def plan(source: TinyCheckpoint | Path, **options: Any) -> ConversionPlan:
        return make_plan(BuildOptions(source if isinstance(source, Path) else source.folder, **options))

    return plan
