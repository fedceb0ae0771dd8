"""Artifacts for the runtime's tests, made by the real converter, once per session and source."""

from __future__ import annotations

from pathlib import Path

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "examples" / "tiny"


def convert(source: Path, out: Path, recipe: str) -> ConversionPlan:
    """Build ``out`` from a checkpoint folder and return the plan it followed."""
    plan = make_plan(BuildOptions(source, out, recipe=recipe, jobs=1))
    build(plan)
    return plan
