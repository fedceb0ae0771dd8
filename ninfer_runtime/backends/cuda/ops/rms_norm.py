"""RMS norm of rows of the residual stream (``kernels/rms_norm.cu``). Reference: ``backends/reference/norm.py``.

Decode has no such launch: there the norm is folded into the matrices. Prompts and ``want_hidden`` use it.
"""

import ctypes
from typing import Literal

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, check_columns, row_bytes
from ninfer_runtime.backends.cuda.packing import activation_stride

RmsNormOutput = Literal["bf16", "float", "rounded"]

OUTPUTS: tuple[RmsNormOutput, ...] = ("bf16", "float", "rounded")  # numbered as in the kernel
_UNIT = 4
_THREADS = 256


class RmsNormParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("weight", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("quantized", ctypes.c_uint64),
        ("row_bytes", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("divisor", ctypes.c_float),
    )


def kernel_spec(hidden: int, output: RmsNormOutput, quantized: QuantizedForm | None = None) -> KernelSpec:
    """One variant. UnsupportedError for widths it cannot read."""
    if hidden % _UNIT:
        raise UnsupportedError(f"hidden width {hidden}, the cuda backend needs a multiple of {_UNIT}")
    defines = [("HIDDEN", hidden), ("STRIDE", activation_stride(hidden)), ("OUTPUT", OUTPUTS.index(output))]
    if quantized is not None:
        check_columns(hidden, quantized)
        defines.append(("QUANTIZED", int(quantized)))
    return KernelSpec("rms_norm.cu", "rms_norm", tuple(defines), _THREADS)


def specs(hidden: int, outputs: tuple[RmsNormOutput, ...] = ("bf16", "rounded")) -> list[KernelSpec]:
    """The variants for the normed input of matrices and for hidden rows that go to the host."""
    return [kernel_spec(hidden, output) for output in outputs]


class RmsNorm:
    """y = x / sqrt(mean(x²) + eps) · (1 + w), rows of ``hidden`` elements.

    output: "bf16" rows of ``activation_stride(hidden)``, zero behind ``hidden``; "float" fp32 [T, hidden]; "rounded"
    the same with values rounded to bf16, the hidden rows of the seam.
    """

    def __init__(self, device: Device, hidden: int, eps: float, output: RmsNormOutput = "bf16") -> None:
        self._kernel = device.kernel(kernel_spec(hidden, output))
        self._eps = eps

    def launch(self, stream: Stream, n_rows: int, x: int, weight: int, y: int) -> None:
        """``x`` fp32 [T, hidden], ``weight`` bf16 [hidden] → ``y``."""
        self._kernel.launch((n_rows, 1, 1), RmsNormParams(x=x, weight=weight, y=y, eps=self._eps), stream)


class QuantizingRmsNorm:
    """The same norm; its rows, rounded to bf16, also as NVFP4 (``ops/quantize_rows.py``) in the same launch."""

    def __init__(self, device: Device, hidden: int, eps: float, form: QuantizedForm) -> None:
        self._kernel = device.kernel(kernel_spec(hidden, "bf16", form))
        self._eps, self._row_bytes = eps, row_bytes(hidden, form)

    def launch(
        self, stream: Stream, n_rows: int, x: int, weight: int, divisor: float, quantized: int, y: int = 0
    ) -> None:
        """``quantized`` [T][row_bytes], 16-byte aligned; ``y``: bf16 rows as well, 0: none."""
        params = RmsNormParams(x, weight, y, quantized, self._row_bytes, self._eps, divisor)
        self._kernel.launch((n_rows, 1, 1), params, stream)
