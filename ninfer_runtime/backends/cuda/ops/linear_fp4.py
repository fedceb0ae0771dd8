"""Products of many tokens with both operands NVFP4 (``kernels/linear_fp4.cu``): y[t, n] = Σ w[n, k] x[t, k].

For cards with the block-scaled FP4 instruction. Elsewhere ``LinearLarge`` multiplies the bf16 form of the same rows by
``bf16_twin`` of the same matrices: the sums are the same numbers up to the order of fp32 additions.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ninfer_format.errors import SignatureError
from ninfer_format.numeric.nvfp4 import BLOCK
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.ops.linear_large import Epilogue, check_matrices, launches
from ninfer_runtime.backends.cuda.ops.linear_ring import (
    ROW_TILES,
    STAGE_COLUMNS,
    THREADS,
    RingLinear,
)
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm
from ninfer_runtime.backends.cuda.packing import PackedMatrix

STAGES = {128: 3, 64: 4}
"""Depth of the ring by tokens of a block's tile, as far as 99 KB of shared memory reach."""
_TOKEN_BYTES = STAGE_COLUMNS // 2 + STAGE_COLUMNS // BLOCK


def bf16_twin(matrix: PackedMatrix, divisor: float) -> PackedMatrix:
    """The matrix for ``LinearLarge`` on bf16(code · scale) rows: what it divides by is the product of both divisors."""
    return replace(matrix, divisor=matrix.divisor * divisor)


def specs(matrices: Sequence[PackedMatrix], epilogue: Epilogue, *, quantized: bool = False) -> list[KernelSpec]:
    """Variants that these matrices may need; ``quantized``: the outputs of SWIGLU are FP4 rows."""
    return [
        _spec(matrices[group[0]], len(group), tokens, epilogue=epilogue, quantized=quantized)
        for group in launches(matrices)
        for tokens in STAGES
    ]


def _spec(matrix: PackedMatrix, n_matrices: int, tokens: int, *, epilogue: Epilogue, quantized: bool) -> KernelSpec:
    stages = STAGES[tokens]
    defines = [("MATRICES", n_matrices), ("EPILOGUE", int(epilogue)), ("TOKENS", tokens), ("STAGES", stages)]
    if quantized:
        defines.append(("QUANTIZED", int(QuantizedForm.FP4)))
    stage_bytes = ROW_TILES * matrix.block_bytes + tokens * _TOKEN_BYTES
    return KernelSpec("linear_fp4.cu", "linear_fp4", tuple(defines), THREADS, stages * stage_bytes)


class LinearFp4(RingLinear):
    """NVFP4 matrices times rows of FP4 activations."""

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
        check_matrices(matrices, epilogue)
        for matrix in matrices:
            if matrix.format != "NVFP4":
                raise SignatureError(f"{matrix.name} is {matrix.format}, FP4 activations multiply NVFP4")
            if out_divisor is not None and (epilogue is not Epilogue.SWIGLU or matrix.n_outputs % BLOCK):
                raise SignatureError(f"{matrix.name}: only SwiGLU outputs in whole blocks of {BLOCK} are quantized")
        super().__init__(
            device,
            matrices,
            QuantizedForm.FP4,
            partial(_spec, epilogue=epilogue, quantized=out_divisor is not None),
            tuple(STAGES),
            max_tokens=max_tokens,
            workspace=workspace,
            divisor=divisor,
            out_divisor=out_divisor,
        )
