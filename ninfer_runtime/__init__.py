"""Run ``.ninfer`` artifacts: text models of the two architectures on any backend behind the ``Program`` seam.

Importing this package starts neither torch nor CuPy; a backend is imported when an ``Engine`` is opened.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ninfer_runtime.config import EngineConfig, SamplingParams
    from ninfer_runtime.engine.engine import Engine
    from ninfer_runtime.engine.generation import Generation
    from ninfer_runtime.engine.sequence import Finish, FinishReason, Request, TokenEvent

_HOMES = {
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "Finish": "engine.sequence",
    "FinishReason": "engine.sequence",
    "Generation": "engine.generation",
    "Request": "engine.sequence",
    "SamplingParams": "config",
    "TokenEvent": "engine.sequence",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "Finish",
    "FinishReason",
    "Generation",
    "Request",
    "SamplingParams",
    "TokenEvent",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
