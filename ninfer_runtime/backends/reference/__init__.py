"""The slow, obviously right path: torch on a CPU or CUDA device, float32 or bfloat16. Also the oracle for kernels."""

from ninfer_runtime.backends.base import MemoryPlan, ProgramLimits, ProgramOptions
from ninfer_runtime.models.binder import BoundModel

from .memory import free_memory, plan_memory, torch_device
from .program import ReferenceProgram


class ReferenceBackend:
    """``backends.base.Backend`` on torch."""

    name = "reference"

    def free_memory(self, options: ProgramOptions) -> int:
        """Bytes that could be allocated now; for the CPU those of the host."""
        return free_memory(torch_device(options.device))

    def plan_memory(self, model: BoundModel, limits: ProgramLimits, options: ProgramOptions) -> MemoryPlan:
        """Bytes of a program with these limits; UsageError for options that do not exist here."""
        return plan_memory(model, limits, options)

    def create(self, model: BoundModel, plan: MemoryPlan) -> ReferenceProgram:
        """A program of that plan."""
        return ReferenceProgram(model, plan)
