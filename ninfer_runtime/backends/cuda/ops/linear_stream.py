"""y = W x for up to 8 token columns, several matrices in one launch (``kernels/linear_stream.cu``).

Every warp of the grid streams an equal span of the weights. ``LinearSmall`` takes more columns. Reference:
``backends/reference/linear.py``. Against float64 on the dequantized weights the sums are within 1e-5 ‖w‖‖x‖.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.linear_small import (
    EPILOGUES,
    MAX_MATRICES,
    Epilogue,
    Output,
    Residual,
    RmsScale,
    activation_stride,
)
from ninfer_runtime.backends.cuda.packing import PackedMatrix

MAX_COLUMNS = 8
_WARPS = 16
_MIN_BLOCKS = 1
_SHARED_BYTES = 98_304
_BLOCKS_PER_SM = 1
_PLACE_BYTES = 32 * 4 * 4
_ABSENT = 2**31 - 1


class LinearStreamParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("tiles", ctypes.c_uint64 * MAX_MATRICES),
        ("out", ctypes.c_uint64 * MAX_MATRICES),
        ("x", ctypes.c_uint64),
        ("ss", ctypes.c_uint64),
        ("spans", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("normed", ctypes.c_uint64),
        ("next_norm", ctypes.c_uint64),
        ("ss_out", ctypes.c_uint64),
        ("format", ctypes.c_int32 * MAX_MATRICES),
        ("n_out", ctypes.c_int32 * MAX_MATRICES),
        ("n_tiles", ctypes.c_int32 * MAX_MATRICES),
        ("k_steps", ctypes.c_int32 * MAX_MATRICES),
        ("first_step", ctypes.c_int32 * MAX_MATRICES),
        ("out_stride", ctypes.c_int32 * MAX_MATRICES),
        ("out_float", ctypes.c_int32 * MAX_MATRICES),
        ("n_columns", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("n_parts", ctypes.c_int32),
        ("normed_stride", ctypes.c_int32),
        ("inverse_hidden", ctypes.c_float),
        ("epsilon", ctypes.c_float),
    )


def kernel_spec(matrices: Sequence[PackedMatrix], epilogue: Epilogue) -> KernelSpec:
    """The variant for matrices of these formats."""
    formats = sum(1 << code for code in {matrix.tile.code for matrix in matrices})
    defines = (("FORMATS", formats), ("EPILOGUE", EPILOGUES.index(epilogue)), ("BLOCK_SHARED", _SHARED_BYTES))
    return KernelSpec("linear_stream.cu", "linear_stream", defines, 32 * _WARPS, _SHARED_BYTES, _MIN_BLOCKS)


def cut_spans(matrices: Sequence[PackedMatrix], n_warps: int) -> npt.NDArray[np.uint32]:
    """First step of each warp and the end, [warps + 1]: spans of about equal bytes, none empty, none of two matrices.

    Fewer warps than asked for when there are not enough steps.
    """
    steps = np.array([matrix.n_tiles * matrix.k_steps for matrix in matrices])
    n_bytes = np.array([matrix.n_bytes for matrix in matrices], np.float64)
    shares = np.minimum(np.maximum(np.floor(n_bytes / n_bytes.sum() * n_warps).astype(int), 1), steps)
    while shares.sum() < min(n_warps, steps.sum()):
        # The next warp goes where the spans are longest.
        load = np.where(shares < steps, n_bytes / shares, -1.0)
        shares[np.argmax(load)] += 1
    cuts, first = [np.zeros(1, np.int64)], 0
    for n_steps, share in zip(steps.tolist(), shares.tolist(), strict=True):
        cuts.append(first + np.arange(1, share + 1) * n_steps // share)
        first += n_steps
    return np.concatenate(cuts).astype(np.uint32)


def workspace_bytes(device: Device) -> int:
    """Bytes that all launches on one stream share, all bits one between them."""
    return device.n_sms * _BLOCKS_PER_SM * _WARPS * _PLACE_BYTES


class LinearStream:
    """One launch: ``matrices`` of one K, applied to the same activations."""

    def __init__(
        self, device: Device, arena: Taker, matrices: Sequence[PackedMatrix], epilogue: Epilogue, workspace: int
    ) -> None:
        """Takes the table of spans from ``arena``; ``prepare`` fills it. UnsupportedError for what does not fit."""
        if not 1 <= len(matrices) <= MAX_MATRICES or len({m.k for m in matrices}) != 1:
            found = ", ".join(f"{m.name} [{m.n_rows}, {m.k}]" for m in matrices)
            raise UnsupportedError(f"one launch takes 1 to {MAX_MATRICES} matrices of one K, found {found}")
        self.matrices, self.epilogue = tuple(matrices), epilogue
        self._device, self._workspace = device, workspace
        self.spec = kernel_spec(matrices, epilogue)
        cuts = cut_spans(matrices, device.n_sms * _BLOCKS_PER_SM * _WARPS)
        self._n_blocks = -(-(cuts.size - 1) // _WARPS)
        # The last block may have warps without a span.
        self._cuts = np.concatenate([cuts, np.full(self._n_blocks * _WARPS + 1 - cuts.size, cuts[-1], np.uint32)])
        self._table = arena.take(f"tables/linear_stream/{matrices[0].name}", self._cuts.nbytes)

    @property
    def ss_parts(self) -> int:
        """Parts of Σ x² that the residual epilogue writes per column."""
        return self.matrices[0].n_tiles

    def prepare(self) -> None:
        """Upload the table and load the kernel; before the first launch, outside of captures."""
        self._device.upload(self._table, self._cuts)
        self._device.kernel(self.spec)

    def launch(
        self,
        stream: Stream,
        n_columns: int,
        x: int,
        rstd: RmsScale | None = None,
        outputs: Sequence[Output] = (),
        residual: Residual | None = None,
    ) -> None:
        """As ``LinearSmall.launch``, for up to 8 columns."""
        assert 1 <= n_columns <= MAX_COLUMNS
        assert (residual is not None) == (self.epilogue == "residual")
        p = LinearStreamParams()
        first = 0
        for i in range(MAX_MATRICES):
            p.first_step[i] = first if i < len(self.matrices) else _ABSENT
            if i < len(self.matrices):
                matrix = self.matrices[i]
                p.tiles[i], p.format[i] = matrix.pointer, matrix.tile.code
                p.n_out[i], p.n_tiles[i] = matrix.n_outputs, matrix.n_tiles
                p.k_steps[i] = matrix.k_steps
                first += matrix.n_tiles * matrix.k_steps
        for i, output in enumerate(outputs):
            p.out[i], p.out_float[i] = output.pointer, output.is_float
            p.out_stride[i] = self.matrices[i].n_outputs if output.stride is None else output.stride
        p.x, p.x_stride = x, activation_stride(self.matrices[0].k)
        p.spans, p.workspace, p.n_columns = self._table, self._workspace, n_columns
        if rstd is not None:
            p.ss, p.n_parts, p.inverse_hidden, p.epsilon = rstd.ss, rstd.n_parts, 1 / rstd.hidden, rstd.epsilon
        if residual is not None:
            p.residual, p.ss_out = residual.x, residual.ss
            p.normed, p.next_norm = residual.normed, residual.next_norm
            p.normed_stride = activation_stride(self.matrices[0].n_outputs)
        self._device.kernel(self.spec).launch((self._n_blocks, 1, 1), p, stream)
