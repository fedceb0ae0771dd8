"""Token ids to the residual stream (``kernels/embed.cu``). Reference: ``backends/reference/embedding.py``, bfloat16."""

import ctypes

from ninfer_format.errors import UnsupportedError
from ninfer_format.formats import NUMERIC_FORMATS, row_split_planes
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.packing import activation_stride

_GROUPED = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")
FORMATS = (*_GROUPED, "BF16")
_UNIT = 8
_THREADS = 256


class EmbedParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("own_index", ctypes.c_uint64),
        ("own_rows", ctypes.c_uint64),
        ("norm_weight", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("xn", ctypes.c_uint64),
        ("ss", ctypes.c_uint64),
        ("n_tokens", ctypes.c_int32),
    )


def kernel_spec(format: str, hidden: int, with_norm: bool) -> KernelSpec:
    """One variant. UnsupportedError for formats and widths it cannot read."""
    if format not in FORMATS:
        raise UnsupportedError(f"token embedding of format {format}, the cuda backend reads {', '.join(FORMATS)}")
    if hidden % _UNIT:
        raise UnsupportedError(f"hidden width {hidden}, the cuda backend needs a multiple of {_UNIT}")
    defines = (
        ("HIDDEN", hidden),
        ("STRIDE", activation_stride(hidden)),
        ("FORMAT_BITS", NUMERIC_FORMATS[format].bits),
        ("WITH_NORM", int(with_norm)),
    )
    return KernelSpec("embed.cu", "embed", defines, _THREADS)


def specs(format: str, hidden: int) -> list[KernelSpec]:
    """Every variant that ``Embed`` of this matrix may launch."""
    return [kernel_spec(format, hidden, with_norm) for with_norm in (False, True)]


class Embed:
    """Rows of one embedding matrix [n_rows, hidden] at ``pointer``, laid out as in the file."""

    def __init__(self, device: Device, format: str, n_rows: int, hidden: int, pointer: int) -> None:
        self._plain, self._normed = (device.kernel(spec) for spec in specs(format, hidden))
        self._base, self._high, self._scales = pointer, 0, 0
        if format in _GROUPED:
            planes = row_split_planes(format, (n_rows, hidden))
            self._high, self._scales = pointer + planes.high_offset, pointer + planes.scale_offset

    def launch(
        self,
        stream: Stream,
        n_tokens: int,
        tokens: int,
        x: int,
        *,
        norm_weight: int = 0,
        xn: int = 0,
        ss: int = 0,
        own_index: int = 0,
        own_rows: int = 0,
        pdl: bool = True,
    ) -> None:
        """``x`` fp32 [T, hidden] from ``tokens`` int32 [T], values rounded to bf16.

        norm_weight  bf16 [hidden]; with it ``xn`` bf16 [T, activation_stride] = bf16(x · (1 + w)) and ``ss`` fp32 [T],
                     the sums of x², are written too
        own_index    int32 [T], -1 or a row of ``own_rows`` fp32 [n, hidden] that takes the place of the token's
        """
        kernel = self._normed if norm_weight else self._plain
        params = EmbedParams(
            self._base, self._high, self._scales, tokens, own_index, own_rows, norm_weight, x, xn, ss, n_tokens
        )
        kernel.launch((n_tokens, 1, 1), params, stream, pdl=pdl)
