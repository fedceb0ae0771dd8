"""Run ``.ninfer`` artifacts: text models of the two architectures on any backend behind the ``Program`` seam.

Importing this package starts neither torch nor CuPy; a backend is imported when an ``Engine`` is opened.
"""

from ninfer_runtime.config import EngineConfig, SamplingParams

__all__ = ["EngineConfig", "SamplingParams"]
