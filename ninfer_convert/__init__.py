"""From a checkpoint folder to a ``.ninfer`` artifact: plan, quantize, write atomically, report.

Planning needs numpy only; ``build`` imports torch. Public names are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ninfer_convert.checkpoint import Checkpoint
    from ninfer_convert.pipeline import BuildResult, build
    from ninfer_convert.plan import BuildOptions, ConversionPlan, Target, make_plan
    from ninfer_convert.plan_view import render, to_json
    from ninfer_convert.problems import PlanError, Problem

_HOMES = {
    "BuildOptions": "plan",
    "BuildResult": "pipeline",
    "Checkpoint": "checkpoint",
    "ConversionPlan": "plan",
    "PlanError": "problems",
    "Problem": "problems",
    "Target": "plan",
    "build": "pipeline",
    "make_plan": "plan",
    "render": "plan_view",
    "to_json": "plan_view",
}

__all__ = [
    "BuildOptions",
    "BuildResult",
    "Checkpoint",
    "ConversionPlan",
    "PlanError",
    "Problem",
    "Target",
    "build",
    "make_plan",
    "render",
    "to_json",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
