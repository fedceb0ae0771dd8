"""The slow, obviously right path: torch on a CPU or CUDA device, float32 or bfloat16. Also the oracle for kernels."""

from ninfer_runtime.backends.base import MemoryPlan, ProgramLimits, ProgramOptions
from ninfer_runtime.models.binder import BoundModel

from .memory import plan_memory
from .program import ReferenceProgram


class ReferenceBackend:
    """``backends.base.Backend`` on torch."""

    name = "reference"

    def plan_memory(self, model: BoundModel, limits: ProgramLimits, options: ProgramOptions) -> MemoryPlan:
        """Bytes of a program with these limits; UsageError for options that do not exist here."""
        return plan_memory(model, limits, options)

    def create(self, model: BoundModel, plan: MemoryPlan) -> ReferenceProgram:
        """A program of that plan."""
        return ReferenceProgram(model, plan)
