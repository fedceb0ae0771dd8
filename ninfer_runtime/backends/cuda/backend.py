"""The CUDA backend: which device, what fits on it, and the program."""

import re
from dataclasses import replace

from ninfer_format.command import require_extra
from ninfer_format.errors import UsageError
from ninfer_format.hashing import Progress, silent
from ninfer_runtime.backends.base import MemoryPlan, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.planned import DRIVER_BYTES
from ninfer_runtime.backends.cuda.planning import Tables, plan_program, plan_streamed
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.backends.cuda.rates import measured_rates
from ninfer_runtime.backends.cuda.residency import CpuSeconds, Rates
from ninfer_runtime.models.binder import BoundModel

_DEVICE = re.compile(r"cuda(?::(0|[1-9][0-9]*))?")


def device_index(name: str) -> int:
    """The number in ``cuda:N``; UsageError for other names."""
    found = _DEVICE.fullmatch(name)
    if found is None:
        raise UsageError(f"the cuda backend does not run on {name!r}, expected cuda or cuda:N")
    return int(found[1] or 0)


class CudaBackend:
    """``backends.base.Backend`` on CUDA devices; tests hand in another device."""

    name = "cuda"

    def __init__(
        self, device: Device | None = None, *, progress: Progress = silent, rates: Rates | None = None
    ) -> None:
        """``rates`` of the device, where they are known."""
        self._given = device
        self._given_rates = rates
        self._rates: dict[int, Rates] = {}
        self._cpu: dict[int, CpuSeconds | None] = {}
        self._tables: Tables = {}
        self._progress = progress
        self._opened: dict[int, Device] = {}

    def free_memory(self, options: ProgramOptions) -> int:
        """Bytes that could be allocated now, at most what a card of the limit would leave a program."""
        free, limit = self._device(options).free_bytes(), options.residency.memory_limit
        return free if limit is None else min(free, max(0, limit - DRIVER_BYTES))

    def plan_memory(self, model: BoundModel, limits: ProgramLimits, options: ProgramOptions) -> MemoryPlan:
        """The one allocation of a program; UsageError or UnsupportedError for what has no kernels."""
        if options.dtype != "bfloat16":
            raise UsageError(f"dtype {options.dtype!r} is not part of the cuda backend, expected bfloat16")
        device = self._device(options)
        if options.residency.weights == "ffn" and options.residency.streamed is None:
            free, rates = self.free_memory(options), self.rates(options)
            if options.residency.n_cpu_layers != 0 and rates.cpu is None:
                rates = replace(rates, cpu=self._cpu_seconds(model, device))
            return plan_streamed(model, limits, options, device, free, rates, self._tables)
        return plan_program(model, limits, options, device, self._tables)

    def rates(self, options: ProgramOptions) -> Rates:
        """Of the device: given, or measured once."""
        if self._given_rates is not None:
            return self._given_rates
        device = self._device(options)
        if id(device) not in self._rates:
            self._rates[id(device)] = measured_rates(device)
        return self._rates[id(device)]

    def _cpu_seconds(self, model: BoundModel, device: Device) -> CpuSeconds | None:
        """Of a network of the model beside copies to the device, measured once; None where it has no dense ones."""
        if id(model) not in self._cpu:
            require_extra("torch", "cpu")
            from ninfer_runtime.backends.cuda.cpu_networks import measured_seconds

            self._cpu[id(model)] = measured_seconds(model, device)
        return self._cpu[id(model)]

    def create(self, model: BoundModel, plan: MemoryPlan) -> CudaProgram:
        """Compile, allocate, load."""
        return CudaProgram(model, plan, self._device(plan.options), progress=self._progress)

    def _device(self, options: ProgramOptions) -> Device:
        if self._given is not None:
            return self._given
        index = device_index(options.device)
        if index not in self._opened:
            from ninfer_runtime.backends.cuda.launch import CudaDevice

            self._opened[index] = CudaDevice(index)
        return self._opened[index]
