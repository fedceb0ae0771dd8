"""Quantized activations (``kernels/quantize_rows.cu``). References: ``ninfer_format/numeric/nvfp4_activations.py`` and
``int8_activations.py``.

NVFP4 has two forms of the same numbers: FP4 rows for cards whose matrix instruction takes them, bf16(code · scale) rows
for the ordinary product everywhere else. The norm can write any form itself, the SwiGLU product those of NVFP4.
"""

import ctypes
import enum

from ninfer_format.errors import UnsupportedError
from ninfer_format.geometry import up
from ninfer_format.numeric.int8_activations import GROUP
from ninfer_format.numeric.nvfp4 import BLOCK
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.packing import activation_stride

_STEP = 128
_THREADS = 256
_ROW_ALIGNMENT = 16


class QuantizedForm(enum.IntEnum):
    """How quantized rows are stored; the number is the kernels' FORM."""

    FP4 = 1  # codes in operand order, then scales: ``row_bytes``
    BF16 = 2  # bf16(code · scale) in the order of columns
    INT8 = 3  # bytes in operand order, then scale and sum of every 64 columns: ``row_bytes``


def has_fp4_product(arch: str) -> bool:
    """Whether cards of this compile target multiply FP4 blocks with their scales (``mma_fp4`` of ptx.cuh)."""
    return arch in ("sm_120a", "sm_121a")


def form_for(arch: str) -> QuantizedForm:
    """The form that products on such a card take."""
    return QuantizedForm.FP4 if has_fp4_product(arch) else QuantizedForm.BF16


def row_bytes(k: int, form: QuantizedForm) -> int:
    """Bytes from one quantized row of ``k`` columns to the next."""
    stride = activation_stride(k)
    if form is QuantizedForm.BF16:
        return 2 * stride
    if form is QuantizedForm.INT8:
        return stride + stride // GROUP * 8
    return up(stride // 2 + stride // BLOCK, _ROW_ALIGNMENT)


def check_columns(k: int, form: QuantizedForm) -> None:
    """UnsupportedError unless ``k`` columns are whole blocks."""
    if form is not QuantizedForm.INT8 and k % BLOCK:
        raise UnsupportedError(f"{k} columns of NVFP4 activations, expected a multiple of {BLOCK}")


class QuantizeRowsParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("row_bytes", ctypes.c_int64),
        ("divisor", ctypes.c_float),
        ("n_rows", ctypes.c_int),
    )


def kernel_spec(k: int, form: QuantizedForm) -> KernelSpec:
    """One variant."""
    check_columns(k, form)
    defines = (("STRIDE", activation_stride(k)), ("FORM", int(form)))
    return KernelSpec("quantize_rows.cu", "quantize_rows", defines, _THREADS)


class QuantizeRows:
    """Rows of ``k`` columns, bf16 [T][activation_stride(k)] and zero behind them → quantized rows."""

    def __init__(self, device: Device, k: int, form: QuantizedForm) -> None:
        self._kernel = device.kernel(kernel_spec(k, form))
        self._steps = activation_stride(k) // _STEP
        self._row_bytes = row_bytes(k, form)

    def launch(self, stream: Stream, n_rows: int, x: int, divisor: float, out: int, *, pdl: bool = True) -> None:
        """``out`` [T][row_bytes], 16-byte aligned; in the bf16 form it may be ``x``."""
        blocks = -(-n_rows * self._steps // (_THREADS // 32))
        params = QuantizeRowsParams(x, out, self._row_bytes, divisor, n_rows)
        self._kernel.launch((blocks, 1, 1), params, stream, pdl=pdl)
