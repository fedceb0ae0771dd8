"""Products of many tokens, grouped codes times bytes (``kernels/linear_int8.cu``): y[t, n] = Σ w[n, k] x[t, k]."""

from collections.abc import Sequence
from functools import partial

from ninfer_format.errors import SignatureError
from ninfer_format.numeric.int8_activations import GROUP
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

TOKENS = 64
"""Of a block's tile."""
_MAX_SHARED = 101_376
_TOKEN_BYTES = STAGE_COLUMNS + STAGE_COLUMNS // GROUP * 8


def takes_int8(matrix: PackedMatrix) -> bool:
    """Whether the matrix has integer codes with scales."""
    return bool(matrix.tile.group) and not matrix.tile.floating


def specs(matrices: Sequence[PackedMatrix], epilogue: Epilogue) -> list[KernelSpec]:
    """Variants that these matrices may need."""
    return [_spec(matrices[group[0]], len(group), TOKENS, epilogue=epilogue) for group in launches(matrices)]


def _spec(matrix: PackedMatrix, n_matrices: int, tokens: int, *, epilogue: Epilogue) -> KernelSpec:
    stage_bytes = ROW_TILES * STAGE_COLUMNS // matrix.tile.step * matrix.block_bytes + tokens * _TOKEN_BYTES
    stages = min(3, _MAX_SHARED // stage_bytes)
    defines = {"FORMAT": matrix.tile.code, "MATRICES": n_matrices, "EPILOGUE": int(epilogue), "TOKENS": tokens}
    defines["STAGES"] = stages
    return KernelSpec("linear_int8.cu", "linear_int8", tuple(defines.items()), THREADS, stages * stage_bytes)


class LinearInt8(RingLinear):
    """Matrices of grouped integer codes times rows of signed bytes."""

    def __init__(
        self,
        device: Device,
        matrices: Sequence[PackedMatrix],
        epilogue: Epilogue,
        *,
        max_tokens: int,
        workspace: int,
    ) -> None:
        """``workspace`` as of ``LinearLarge``, which may share it on one stream."""
        check_matrices(matrices, epilogue)
        for matrix in matrices:
            if not takes_int8(matrix):
                raise SignatureError(f"{matrix.name} is {matrix.format}, bytes multiply grouped integer codes")
        super().__init__(
            device,
            matrices,
            QuantizedForm.INT8,
            partial(_spec, epilogue=epilogue),
            (TOKENS,),
            max_tokens=max_tokens,
            workspace=workspace,
        )
