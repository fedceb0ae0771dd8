"""Run ``.ninfer`` artifacts: text models of the two architectures on any backend behind the ``Program`` seam.

Importing this package starts neither torch nor CuPy; a backend is imported when an ``Engine`` is opened.
"""

from typing import TYPE_CHECKING

from ninfer_format.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ninfer_runtime.config import EngineConfig, SamplingParams
    from ninfer_runtime.engine.engine import Engine
    from ninfer_runtime.engine.handle import Handle
    from ninfer_runtime.engine.sequence import Finish, FinishReason, Request, TokenEvent

_HOMES = {
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "Finish": "engine.sequence",
    "FinishReason": "engine.sequence",
    "Handle": "engine.handle",
    "Request": "engine.sequence",
    "SamplingParams": "config",
    "TokenEvent": "engine.sequence",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "Finish",
    "FinishReason",
    "Handle",
    "Request",
    "SamplingParams",
    "TokenEvent",
]

__getattr__, __dir__ = _lazy_names(__name__, _HOMES)
