"""From a checkpoint folder to a ``.ninfer`` artifact: plan, quantize, write atomically, report.

Planning needs numpy only; ``build`` imports torch. Public names are loaded on first use.
"""

from typing import TYPE_CHECKING

from ninfer_format.lazy_names import lazy_names as _lazy_names

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

__getattr__, __dir__ = _lazy_names(__name__, _HOMES)
