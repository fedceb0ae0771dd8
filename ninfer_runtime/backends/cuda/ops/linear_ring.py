"""What the products of quantized rows share: matrices of equal K times many rows, both through a ring in shared memory.

``kernels/linear_fp4.cu`` and ``kernels/linear_int8.cu``; the cut of the work is that of ``ops/linear_large.py``.
"""

import ctypes
from collections.abc import Callable, Sequence

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.linear_large import MAX_MATRICES, Output, flags_at, launches, schedule
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, row_bytes
from ninfer_runtime.backends.cuda.packing import PackedMatrix

STAGE_COLUMNS = 128
ROW_TILES = 16
THREADS = 256
SpecOf = Callable[[PackedMatrix, int, int], KernelSpec]
"""(first matrix of a launch, number of its matrices, tokens of a tile) → the variant."""


class RingParams(ctypes.Structure):
    """``struct RingParams`` of quantized_ring.cuh."""

    _fields_ = (
        ("tiles", ctypes.c_void_p * MAX_MATRICES),
        ("out", ctypes.c_void_p * MAX_MATRICES),
        ("x", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("n_rows", ctypes.c_int * MAX_MATRICES),
        ("n_tile_rows", ctypes.c_int * MAX_MATRICES),
        ("first_pair", ctypes.c_int * MAX_MATRICES),
        ("out_stride", ctypes.c_int * MAX_MATRICES),
        ("out_float", ctypes.c_int * MAX_MATRICES),
        ("factor", ctypes.c_float * MAX_MATRICES),
        ("out_divisor", ctypes.c_float),
        ("n_pairs", ctypes.c_int),
        ("n_tokens", ctypes.c_int),
        ("token_tiles", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("whole_tiles", ctypes.c_int),
        ("shared_tiles", ctypes.c_int),
    )


class RingLinear:
    """Matrices of equal K (packed, resident) times up to ``max_tokens`` quantized rows."""

    def __init__(
        self,
        device: Device,
        matrices: Sequence[PackedMatrix],
        form: QuantizedForm,
        spec_of: SpecOf,
        token_tiles: Sequence[int],
        *,
        max_tokens: int,
        workspace: int,
        divisor: float = 1.0,
        out_divisor: float | None = None,
    ) -> None:
        self._n_matrices, self._max_tokens = len(matrices), max_tokens
        self._row_bytes = row_bytes(matrices[0].k, form)
        self._launches = [
            _Launch(device, matrices, group, spec_of, token_tiles, workspace, divisor, out_divisor)
            for group in launches(matrices)
        ]

    def launch(self, stream: Stream, n_tokens: int, x: int, outputs: Sequence[Output], *, pdl: bool = True) -> None:
        """Queue the product of ``n_tokens`` quantized rows at ``x``, 16-byte aligned, ``row_bytes`` apart.

        ``outputs``: one per matrix; STORE writes bf16 or fp32, SWIGLU bf16 or quantized rows, RESIDUAL adds to fp32.
        """
        if not 0 < n_tokens <= self._max_tokens:
            raise ValueError(f"{n_tokens} tokens, the operation was made for 1 to {self._max_tokens}")
        if x % 16:
            raise ValueError(f"activations at {x:#x}: expected 16-byte aligned rows")
        if len(outputs) != self._n_matrices:
            raise ValueError(f"{len(outputs)} outputs for {self._n_matrices} matrices")
        for launch in self._launches:
            launch.launch(stream, n_tokens, x, self._row_bytes, outputs, pdl=pdl)


class _Launch:
    """Matrices of one launch, by index into the operation's."""

    def __init__(
        self,
        device: Device,
        matrices: Sequence[PackedMatrix],
        indices: Sequence[int],
        spec_of: SpecOf,
        token_tiles: Sequence[int],
        workspace: int,
        divisor: float,
        out_divisor: float | None,
    ) -> None:
        self.indices = indices
        self._matrices = [matrices[i] for i in indices]
        self._n_sms, self._token_tiles = device.n_sms, token_tiles
        self._kernels = {n: device.kernel(spec_of(self._matrices[0], len(indices), n)) for n in token_tiles}
        self._is_quantized = out_divisor is not None
        self._params = RingParams(partials=workspace, flags=workspace + flags_at(device.n_sms))
        self._params.out_divisor = 1.0 if out_divisor is None else out_divisor
        pairs = 0
        for i, matrix in enumerate(self._matrices):
            self._params.tiles[i] = matrix.pointer
            self._params.n_rows[i] = matrix.n_outputs
            self._params.n_tile_rows[i] = matrix.n_tiles
            self._params.factor[i] = 1.0 / (divisor * matrix.divisor)
            self._params.first_pair[i] = pairs
            pairs += -(-matrix.n_tiles // 2)
        self._params.n_pairs = pairs
        self._params.stages = self._matrices[0].k_padded // STAGE_COLUMNS

    def launch(
        self, stream: Stream, n_tokens: int, x: int, x_bytes: int, outputs: Sequence[Output], *, pdl: bool
    ) -> None:
        params = self._params
        cut = schedule(params.n_pairs, params.stages, n_tokens, self._n_sms, self._token_tiles)
        for i, (matrix, index) in enumerate(zip(self._matrices, self.indices, strict=True)):
            output, stride = outputs[index], matrix.n_outputs
            params.out[i] = output.pointer
            params.out_stride[i] = output.stride or (
                row_bytes(stride, QuantizedForm.FP4) if self._is_quantized else stride
            )
            params.out_float[i] = output.dtype == "fp32"
        params.x, params.row_bytes, params.n_tokens = x, x_bytes, n_tokens
        params.token_tiles = cut.token_tiles
        params.whole_tiles, params.shared_tiles = cut.whole_tiles, cut.shared_tiles
        self._kernels[cut.tokens].launch((cut.blocks, 1, 1), params, stream, pdl=pdl)
