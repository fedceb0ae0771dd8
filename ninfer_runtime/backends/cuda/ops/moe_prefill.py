"""A mixture of experts for prompt chunks (``kernels/moe_group.cu``, ``moe_large.cu``).

Eight launches: the router's logits, routing, (token, slot) pairs in the order of their experts, the experts' gate and
up, their downs, the shared expert's two products, and the weighted sum onto the residual stream. Every expert's weights
are read once for each ``COLUMN_TOKENS`` of its tokens; sums are made in one order whatever the card. Reference:
``backends/reference/moe.py``.
"""

import ctypes
from dataclasses import dataclass

from ninfer_format.errors import SignatureError, UnsupportedError
from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops import linear_narrow
from ninfer_runtime.backends.cuda.ops.linear_large import ROW_TILES, STAGE_COLUMNS, sums_factor
from ninfer_runtime.backends.cuda.ops.linear_narrow import LinearNarrow, NarrowOutput
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride
from ninfer_runtime.backends.cuda.weights import MoeTensors

COLUMN_TOKENS = 48
"""Tokens of one expert that a block multiplies together: as many sums as two blocks per multiprocessor have registers
for. With 8 of 256 experts per token a chunk of 1,024 tokens brings an expert 32 on average."""
BLOCK_TOKENS = 32
"""Tokens that a block routes."""
MAX_EXPERTS = 1024
_MAX_STAGES, _MAX_SHARED = 3, 101_376
_THREADS, _ROUTE_THREADS = 256, 512
_BF16, _FLOAT, _INT, _COLUMN = 2, 4, 4, 16


class MoeRouteParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("logits", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("shares", ctypes.c_uint64),
        ("shared_shares", ctypes.c_uint64),
        ("histogram", ctypes.c_uint64),
        ("n_tokens", ctypes.c_int32),
        ("logits_stride", ctypes.c_int32),
    )


class MoeGroupParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("ids", ctypes.c_uint64),
        ("histogram", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("place", ctypes.c_uint64),
        ("columns", ctypes.c_uint64),
        ("n_columns", ctypes.c_uint64),
        ("shared_columns", ctypes.c_uint64),
        ("n_shared_columns", ctypes.c_uint64),
        ("n_tokens", ctypes.c_int32),
    )


class MoeReduceParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("routed", ctypes.c_uint64),
        ("shared", ctypes.c_uint64),
        ("place", ctypes.c_uint64),
        ("shares", ctypes.c_uint64),
        ("shared_shares", ctypes.c_uint64),
    )


class MoeLargeParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("tiles", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("columns", ctypes.c_uint64),
        ("n_columns", ctypes.c_uint64),
        ("n_rows", ctypes.c_int32),
        ("expert_tiles", ctypes.c_int32),
        ("row_tiles", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("factor", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class PromptExperts:
    """Working memory of a mixture of experts over T tokens with k experts each; layers follow each other in it.

    logits         float32 [T][experts + 1], the last one of the shared expert's gate
    ids, shares    int32 and float32 [T][k], by falling share: what the chunk was routed to
    shared_shares  float32 [T]
    histogram      int32 [blocks of tokens][experts]
    order, place   int32 [T · k]: the token of a pair in the order of experts, and where a pair lies in that order
    columns        int32 [most columns][4]: expert, first pair, number of pairs, 0
    n_columns      int32
    shared_columns, n_shared_columns  the same of the shared expert, whose pairs are all tokens
    inner          bf16 [T · k][stride], SwiGLU of gate and up of the experts, in that order
    routed         bf16 [T · k][hidden], the experts' results
    shared_inner   bf16 [T][stride], SwiGLU of the shared expert
    shared         bf16 [T][hidden], its result
    """

    logits: int
    ids: int
    shares: int
    shared_shares: int
    histogram: int
    order: int
    place: int
    columns: int
    n_columns: int
    shared_columns: int
    n_shared_columns: int
    inner: int
    routed: int
    shared_inner: int
    shared: int

    @classmethod
    def take(cls, taker: Taker, tensors: MoeTensors, n_tokens: int) -> "PromptExperts":
        """Memory for up to ``n_tokens`` tokens."""
        n_experts, hidden = tensors.n_experts, tensors.routed_down.n_outputs
        pairs = n_tokens * tensors.experts_per_token
        inner, shared = activation_stride(tensors.routed_down.k), activation_stride(tensors.shared.down.k)

        def take(name: str, n_bytes: int) -> int:
            return taker.take(f"workspace/moe_prefill/{name}", n_bytes)

        return cls(
            logits=take("logits", _FLOAT * n_tokens * (n_experts + 1)),
            ids=take("ids", _INT * pairs),
            shares=take("shares", _FLOAT * pairs),
            shared_shares=take("shared_shares", _FLOAT * n_tokens),
            histogram=take("histogram", _INT * -(-n_tokens // BLOCK_TOKENS) * n_experts),
            order=take("order", _INT * pairs),
            place=take("place", _INT * pairs),
            columns=take("columns", _COLUMN * most_columns(tensors, n_tokens)),
            n_columns=take("n_columns", _INT),
            shared_columns=take("shared_columns", _COLUMN * -(-n_tokens // BLOCK_TOKENS)),
            n_shared_columns=take("n_shared_columns", _INT),
            inner=take("inner", _BF16 * pairs * inner),
            routed=take("routed", _BF16 * pairs * hidden),
            shared_inner=take("shared_inner", _BF16 * n_tokens * shared),
            shared=take("shared", _BF16 * n_tokens * hidden),
        )


def most_columns(tensors: MoeTensors, n_tokens: int) -> int:
    """Columns that the pairs of ``n_tokens`` tokens can make: full ones, and one for the rest of every expert."""
    pairs = n_tokens * tensors.experts_per_token
    return min(pairs, pairs // COLUMN_TOKENS + tensors.n_experts)


def _product_spec(matrix: PackedMatrix) -> KernelSpec:
    """Gate and up, or down; a bank's gate and up gather their rows. Weights pass through shared memory, as deep as it
    is, but for BF16: its words are operands as they are, and take a block's registers."""
    token_bytes, kept_bytes = COLUMN_TOKENS * STAGE_COLUMNS * _BF16, 4 * _THREADS * (COLUMN_TOKENS // 16 + 2)
    rings = matrix.format != "BF16"
    weight_bytes = ROW_TILES * STAGE_COLUMNS // matrix.tile.step * matrix.block_bytes if rings else 4 * _THREADS
    stages = min(_MAX_STAGES, (_MAX_SHARED - kept_bytes) // (token_bytes + weight_bytes))
    defines = {
        "FORMAT": matrix.tile.code,
        "SWIGLU": int(matrix.interleaved),
        "GATHER": int(matrix.interleaved and matrix.n_experts > 1),
        "TOKENS": COLUMN_TOKENS,
        "STAGES": stages,
    }
    shared = stages * (token_bytes + weight_bytes) + kept_bytes
    return KernelSpec("moe_large.cu", "moe_large", tuple(defines.items()), _THREADS, shared, 2 if rings else 1)


def _group_spec(name: str, tensors: MoeTensors) -> KernelSpec:
    defines = {
        "N_EXPERTS": tensors.n_experts,
        "TOP_K": tensors.experts_per_token,
        "COLUMN_TOKENS": COLUMN_TOKENS,
        "HIDDEN": tensors.routed_down.n_outputs,
    }
    threads = _ROUTE_THREADS if name == "moe_route" else _THREADS
    return KernelSpec("moe_group.cu", name, tuple(defines.items()), threads)


def specs(tensors: MoeTensors) -> list[KernelSpec]:
    """Every variant that a network of this geometry may launch."""
    return [
        linear_narrow.spec((tensors.router,)),
        *(_group_spec(name, tensors) for name in ("moe_route", "moe_group", "moe_reduce")),
        _product_spec(tensors.routed_gate_up),
        _product_spec(tensors.routed_down),
        _product_spec(tensors.shared.gate_up),
        _product_spec(tensors.shared.down),
    ]


@dataclass(frozen=True, slots=True)
class Columns:
    """What a grouped product multiplies: the columns' address, that of their number, and the most there may be."""

    pointer: int
    n_pointer: int
    most: int
    most_pairs: int


class Grouped:
    """One product of experts with the pairs that were routed to them."""

    def __init__(self, device: Device, matrix: PackedMatrix, columns: Columns, order: int = 0) -> None:
        """``order``: the row of a pair, of a bank's gate and up."""
        if matrix.n_bytes >= 1 << 32:
            raise SignatureError(f"{matrix.name} has {matrix.n_bytes} bytes packed, fewer than {1 << 32} are needed")
        if columns.most_pairs * activation_stride(matrix.k) * _BF16 >= 1 << 32:
            raise UnsupportedError(
                f"{columns.most_pairs} rows of {matrix.k} columns for {matrix.name}: fewer than 4 GiB are needed"
            )
        spec = _product_spec(matrix)
        self._kernel = device.kernel(spec)
        self._row_tiles = -(-matrix.expert_tiles // ROW_TILES)
        per_sm = max(1, min(spec.min_blocks, device.shared_per_sm // (spec.shared_bytes + 1024)))
        self._blocks = min(device.n_sms * per_sm, columns.most * self._row_tiles)
        self._params = MoeLargeParams(
            tiles=matrix.pointer,
            order=order,
            columns=columns.pointer,
            n_columns=columns.n_pointer,
            n_rows=matrix.n_outputs,
            expert_tiles=matrix.expert_tiles,
            row_tiles=self._row_tiles,
            stages=matrix.k_padded // STAGE_COLUMNS,
            factor=sums_factor(matrix),
        )

    def launch(self, stream: Stream, x: int, x_stride: int, out: int, out_stride: int) -> None:
        """bf16 rows of ``x``, by token or by pair → bf16 rows of ``out``, by pair."""
        self._params.x, self._params.x_stride = x, x_stride
        self._params.out, self._params.out_stride = out, out_stride
        self._kernel.launch((self._blocks, 1, 1), self._params, stream)


class MoePrefill:
    """The networks of one layer for up to ``max_tokens`` normed rows."""

    def __init__(self, device: Device, tensors: MoeTensors, memory: PromptExperts, *, max_tokens: int) -> None:
        """UnsupportedError for sizes that have no kernels."""
        hidden, k = tensors.routed_down.n_outputs, tensors.experts_per_token
        if hidden % 8 or tensors.n_experts > MAX_EXPERTS or k > 32:
            raise UnsupportedError(
                f"hidden width {hidden}, {tensors.n_experts} experts, {k} per token: the cuda backend takes widths "
                f"divisible by 8, {MAX_EXPERTS} experts, 32 per token"
            )
        routed = Columns(memory.columns, memory.n_columns, most_columns(tensors, max_tokens), max_tokens * k)
        n_shared = -(-max_tokens // BLOCK_TOKENS)
        shared = Columns(memory.shared_columns, memory.n_shared_columns, n_shared, max_tokens)
        self._tensors, self._memory, self._max_tokens = tensors, memory, max_tokens
        self._route, self._group, self._reduce = (
            device.kernel(_group_spec(name, tensors)) for name in ("moe_route", "moe_group", "moe_reduce")
        )
        self._router = LinearNarrow(device, (tensors.router,))
        self.gate_up = Grouped(device, tensors.routed_gate_up, routed, memory.order)
        self.down = Grouped(device, tensors.routed_down, routed)
        self._shared_gate_up = Grouped(device, tensors.shared.gate_up, shared)
        self._shared_down = Grouped(device, tensors.shared.down, shared)

    def launch(self, stream: Stream, n_tokens: int, normed: int, x: int) -> None:
        """Queue ``x`` += experts of ``normed``: float32 [T][hidden], bf16 [T][activation_stride(hidden)]."""
        self.router(stream, n_tokens, normed)
        self.route(stream, n_tokens)
        self.experts(stream, normed)
        self.shared(stream, normed)
        self.reduce(stream, n_tokens, x)

    def router(self, stream: Stream, n_tokens: int, normed: int) -> None:
        """``normed`` → ``logits``."""
        router = self._tensors.router
        logits = NarrowOutput(self._memory.logits, is_float=True, stride=router.n_rows)
        self._router.launch(stream, n_tokens, normed, activation_stride(router.k), (logits,))

    def route(self, stream: Stream, n_tokens: int) -> None:
        """Logits → what goes where."""
        if not 0 < n_tokens <= self._max_tokens:
            raise ValueError(f"{n_tokens} tokens, the operation was made for 1 to {self._max_tokens}")
        m, grid = self._memory, (-(-n_tokens // BLOCK_TOKENS), 1, 1)
        route = MoeRouteParams(
            m.logits, m.ids, m.shares, m.shared_shares, m.histogram, n_tokens, self._tensors.n_experts + 1
        )
        self._route.launch(grid, route, stream)
        group = MoeGroupParams(
            m.ids,
            m.histogram,
            m.order,
            m.place,
            m.columns,
            m.n_columns,
            m.shared_columns,
            m.n_shared_columns,
            n_tokens,
        )
        self._group.launch(grid, group, stream)

    def experts(self, stream: Stream, normed: int) -> None:
        """``normed`` → ``inner`` → ``routed``."""
        m, t = self._memory, self._tensors
        inner = activation_stride(t.routed_down.k)
        self.gate_up.launch(stream, normed, activation_stride(t.routed_gate_up.k), m.inner, inner)
        self.down.launch(stream, m.inner, inner, m.routed, t.routed_down.n_outputs)

    def shared(self, stream: Stream, normed: int) -> None:
        """``normed`` → ``shared_inner`` → ``shared``."""
        m, shared = self._memory, self._tensors.shared
        inner = activation_stride(shared.down.k)
        self._shared_gate_up.launch(stream, normed, activation_stride(shared.gate_up.k), m.shared_inner, inner)
        self._shared_down.launch(stream, m.shared_inner, inner, m.shared, shared.down.n_outputs)

    def reduce(self, stream: Stream, n_tokens: int, x: int) -> None:
        """``x`` += shares · ``routed`` + shared share · ``shared``."""
        m = self._memory
        params = MoeReduceParams(x, m.routed, m.shared, m.place, m.shares, m.shared_shares)
        self._reduce.launch((n_tokens, 1, 1), params, stream)
