"""Products of many tokens with both operands NVFP4 (``kernels/linear_fp4.cu``): y[t, n] = Σ w[n, k] x[t, k].

For cards with the block-scaled FP4 instruction. Elsewhere ``LinearLarge`` multiplies the bf16 form of the same rows by
``bf16_twin`` of the same matrices: the sums are the same numbers up to the order of fp32 additions.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

from ninfer_format.errors import SignatureError
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.linear_large import MAX_MATRICES, Epilogue, Output, flags_at, launches, schedule
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, row_bytes
from ninfer_runtime.backends.cuda.packing import PackedMatrix, tile_format

STAGE_COLUMNS = 128
STAGES = {128: 3, 64: 4}
"""Depth of the ring by tokens of a block's tile, as far as 99 KB of shared memory reach."""
_TOKEN_TILES = tuple(STAGES)
_ROW_TILES = 16
_THREADS = 256
_TOKEN_BYTES = STAGE_COLUMNS // 2 + STAGE_COLUMNS // 16


class LinearFp4Params(ctypes.Structure):
    """``struct LinearFp4Params`` of linear_fp4.cu."""

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


def bf16_twin(matrix: PackedMatrix, divisor: float) -> PackedMatrix:
    """The matrix for ``LinearLarge`` on bf16(code · scale) rows: what it divides by is the product of both divisors."""
    return replace(matrix, divisor=matrix.divisor * divisor)


def specs(matrices: Sequence[PackedMatrix], epilogue: Epilogue, *, quantized: bool = False) -> list[KernelSpec]:
    """Variants that these matrices may need; ``quantized``: the outputs of SWIGLU are FP4 rows."""
    return [
        _spec(len(group), epilogue, tokens, quantized=quantized)
        for group in launches(matrices)
        for tokens in _TOKEN_TILES
    ]


def _spec(n_matrices: int, epilogue: Epilogue, tokens: int, *, quantized: bool) -> KernelSpec:
    stages = STAGES[tokens]
    defines = [("MATRICES", n_matrices), ("EPILOGUE", int(epilogue)), ("TOKENS", tokens), ("STAGES", stages)]
    if quantized:
        defines.append(("QUANTIZED", int(QuantizedForm.FP4)))
    stage_bytes = _ROW_TILES * _BLOCK_BYTES + tokens * _TOKEN_BYTES
    return KernelSpec("linear_fp4.cu", "linear_fp4", tuple(defines), _THREADS, stages * stage_bytes)


_BLOCK_BYTES = tile_format("NVFP4").block_bytes


class LinearFp4:
    """NVFP4 matrices of equal K (packed, resident) times up to ``max_tokens`` rows of FP4 activations."""

    def __init__(
        self,
        device: Device,
        matrices: Sequence[PackedMatrix],
        epilogue: Epilogue,
        *,
        max_tokens: int,
        workspace: int,
        divisor: float,
        out_divisor: float | None = None,
    ) -> None:
        """``divisor`` of the rows; ``workspace`` as of ``LinearLarge``, which may share it on one stream.

        ``out_divisor`` (SWIGLU): the outputs are FP4 rows of this divisor instead of bf16 rows.
        """
        if not matrices:
            raise SignatureError("a product of many tokens takes at least one matrix")
        for matrix in matrices:
            if matrix.format != "NVFP4":
                raise SignatureError(f"{matrix.name} is {matrix.format}, FP4 activations multiply NVFP4")
            if matrix.k != matrices[0].k:
                raise SignatureError(f"{matrix.name} has {matrix.k} columns, {matrices[0].name} has {matrices[0].k}")
            if matrix.interleaved != (epilogue is Epilogue.SWIGLU):
                raise SignatureError(f"{matrix.name}: SwiGLU takes interleaved gate and up rows, and nothing else does")
            if out_divisor is not None and (epilogue is not Epilogue.SWIGLU or matrix.n_outputs % 16):
                raise SignatureError(f"{matrix.name}: only SwiGLU outputs in whole blocks of 16 are quantized")
        self._n_matrices, self._max_tokens = len(matrices), max_tokens
        self._row_bytes = row_bytes(matrices[0].k, QuantizedForm.FP4)
        self._out_divisor = out_divisor
        self._launches = [
            _Launch(device, matrices, group, epilogue, workspace, divisor, quantized=out_divisor is not None)
            for group in launches(matrices)
        ]

    def launch(self, stream: Stream, n_tokens: int, x: int, outputs: Sequence[Output], *, pdl: bool = True) -> None:
        """Queue the product of ``n_tokens`` FP4 rows at ``x``, 16-byte aligned, ``row_bytes`` apart.

        ``outputs``: one per matrix; STORE writes bf16 or fp32, SWIGLU bf16 or quantized rows, RESIDUAL adds to fp32.
        """
        if not 0 < n_tokens <= self._max_tokens:
            raise ValueError(f"{n_tokens} tokens, the operation was made for 1 to {self._max_tokens}")
        if x % 16:
            raise ValueError(f"activations at {x:#x}: expected 16-byte aligned rows")
        if len(outputs) != self._n_matrices:
            raise ValueError(f"{len(outputs)} outputs for {self._n_matrices} matrices")
        for launch in self._launches:
            launch.launch(stream, n_tokens, x, self._row_bytes, outputs, self._out_divisor, pdl=pdl)


class _Launch:
    """Matrices of one launch, by index into the operation's."""

    def __init__(
        self,
        device: Device,
        matrices: Sequence[PackedMatrix],
        indices: Sequence[int],
        epilogue: Epilogue,
        workspace: int,
        divisor: float,
        *,
        quantized: bool,
    ) -> None:
        self.indices = indices
        self._matrices = [matrices[i] for i in indices]
        self._n_sms = device.n_sms
        self._kernels = {n: device.kernel(_spec(len(indices), epilogue, n, quantized=quantized)) for n in _TOKEN_TILES}
        self._params = LinearFp4Params(partials=workspace, flags=workspace + flags_at(device.n_sms))
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
        self,
        stream: Stream,
        n_tokens: int,
        x: int,
        x_bytes: int,
        outputs: Sequence[Output],
        out_divisor: float | None,
        *,
        pdl: bool,
    ) -> None:
        params = self._params
        cut = schedule(params.n_pairs, params.stages, n_tokens, self._n_sms, _TOKEN_TILES)
        for i, (matrix, index) in enumerate(zip(self._matrices, self.indices, strict=True)):
            output = outputs[index]
            params.out[i] = output.pointer
            stride = row_bytes(matrix.n_outputs, QuantizedForm.FP4) if out_divisor is not None else matrix.n_outputs
            params.out_stride[i] = output.stride or stride
            params.out_float[i] = output.dtype == "fp32"
        params.x, params.row_bytes, params.n_tokens = x, x_bytes, n_tokens
        params.out_divisor = 1.0 if out_divisor is None else out_divisor
        params.token_tiles = cut.token_tiles
        params.whole_tiles, params.shared_tiles = cut.whole_tiles, cut.shared_tiles
        self._kernels[cut.tokens].launch((cut.blocks, 1, 1), params, stream, pdl=pdl)
