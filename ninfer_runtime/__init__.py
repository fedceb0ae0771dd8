"""Run ``.ninfer`` artifacts: text models of the two architectures on any backend behind the ``Program`` seam.

``LLM`` answers prompts and conversations; ``Engine`` below it works on token ids. Importing this package starts neither
torch nor CuPy; a backend is imported when an ``LLM`` or an ``Engine`` is opened.
"""

from typing import TYPE_CHECKING

from ninfer_format.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ninfer_runtime.config import EngineConfig, SamplingParams
    from ninfer_runtime.engine.engine import Engine
    from ninfer_runtime.engine.handle import Handle
    from ninfer_runtime.engine.sequence import Finish, FinishReason, Request, TokenEvent
    from ninfer_runtime.engine.stats import EngineStats
    from ninfer_runtime.llm import LLM
    from ninfer_runtime.llm_outputs import CompletionOutput, Logprob, RequestOutput, StreamedOutput
    from ninfer_runtime.llm_params import GenerationParams
    from ninfer_runtime.text.grammar import Choice, JsonObject, JsonSchema, Lark, Regex

_HOMES = {
    "Choice": "text.grammar",
    "CompletionOutput": "llm_outputs",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "EngineStats": "engine.stats",
    "Finish": "engine.sequence",
    "FinishReason": "engine.sequence",
    "GenerationParams": "llm_params",
    "Handle": "engine.handle",
    "JsonObject": "text.grammar",
    "JsonSchema": "text.grammar",
    "LLM": "llm",
    "Lark": "text.grammar",
    "Logprob": "llm_outputs",
    "Regex": "text.grammar",
    "Request": "engine.sequence",
    "RequestOutput": "llm_outputs",
    "SamplingParams": "config",
    "StreamedOutput": "llm_outputs",
    "TokenEvent": "engine.sequence",
}

__all__ = [
    "LLM",
    "Choice",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Finish",
    "FinishReason",
    "GenerationParams",
    "Handle",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "Logprob",
    "Regex",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StreamedOutput",
    "TokenEvent",
]

__getattr__, __dir__ = _lazy_names(__name__, _HOMES)
