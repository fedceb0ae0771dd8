"""A mixture of experts for up to 48 token columns: three launches.

The first (``moe_round_router.cu``) makes the router's logits, and the shared expert's gate and up beside them. The
second (``moe_gate_up.cu``) routes and multiplies gate and up of the distinct experts, the third (``moe_down.cu``) all
downs, the weighted sum and the residual stream. Reference: ``backends/reference/moe.py``.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ninfer_format.errors import UnsupportedError
from ninfer_format.geometry import up
from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.linear_small import Residual, RmsScale
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride
from ninfer_runtime.backends.cuda.weights import MoeTensors

MAX_COLUMNS = 48
MAX_EXPERTS = 1024
MAX_BLOCK_SHARED = 101_376
_TILE_ROWS, _LANES = 16, 32
_LIMITS = (1, 8, MAX_COLUMNS)
"""Numbers of columns that launches are made for; a launch takes the first that holds its columns."""
_TOKEN_TILE = 8
_ROUTER_WARPS, _GATE_UP_WARPS = 8, 8
_DOWN_WARPS: Mapping[int, tuple[int, int]] = MappingProxyType({1: (8, 1), 8: (16, 2), MAX_COLUMNS: (16, 1)})
"""By limit: warps, and how many of them divide an entry's columns. One column has eight entries, and a block of eight
warps has room beside one of gate and up."""
_GATE_UP_ROWS, _ROW_SPLIT = 2, 2
"""Tile rows of gate and up that a warp multiplies together (blocks up to ``_SMALL_BLOCK`` bytes), and how many warps
divide the columns of one: 8 of 256 experts are 512 tile rows, and a card has two to three times as many warps."""
_SMALL_BLOCK = 1152
_GATE_UP_TILE, _DOWN_TILE = 4, 8
"""Tokens of an expert that a warp takes at once: of gate and up they lie in the ring, 256 bytes each beside 1,088."""
_MAX_STAGES = {"moe_round_router": 8, "moe_gate_up": 4, "moe_down": 4}
"""H200, 35B-A3B: rings of 8 blocks instead of 4 cost gate and up 10 %; less of other launches fits beside them."""
_TWO_BLOCKS_SHARED = 160 << 10
"""Shared memory of an SM from which on two blocks of gate and up have room there."""
_BF16, _FLOAT, _INT = 2, 4, 4


class MoeRoundRouterParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("router", ctypes.c_uint64),
        ("shared_tiles", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("ss", ctypes.c_uint64),
        ("logits", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("n_columns", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("n_logits", ctypes.c_int32),
        ("n_out", ctypes.c_int32),
        ("router_tiles", ctypes.c_int32),
        ("n_parts", ctypes.c_int32),
        ("inverse_hidden", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("factor", ctypes.c_float),
    )


class MoeGateUpParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("tiles", ctypes.c_uint64),
        ("logits", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("ss", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("shares", ctypes.c_uint64),
        ("shared_share", ctypes.c_uint64),
        ("n_columns", ctypes.c_int32),
        ("x_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("n_out", ctypes.c_int32),
        ("n_parts", ctypes.c_int32),
        ("inverse_hidden", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("factor", ctypes.c_float),
    )


class MoeDownParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("tiles", ctypes.c_uint64),
        ("shared_tiles", ctypes.c_uint64),
        ("logits", ctypes.c_uint64),
        ("h", ctypes.c_uint64),
        ("shared_h", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("normed", ctypes.c_uint64),
        ("next_norm", ctypes.c_uint64),
        ("ss_out", ctypes.c_uint64),
        ("n_columns", ctypes.c_int32),
        ("h_stride", ctypes.c_int32),
        ("shared_stride", ctypes.c_int32),
        ("n_out", ctypes.c_int32),
        ("n_tiles", ctypes.c_int32),
        ("normed_stride", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("shared_factor", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class RoundExperts:
    """Working memory of a mixture of experts over T columns with k experts each; layers follow each other in it.

    logits        float32 [T][experts + 1], the last one of the shared expert's gate
    h, shared_h   bf16 [T · k][stride], [T][stride]: SwiGLU of the routed experts by (column, rank), of the shared one
    ids           int32 [layers][most T][k], by falling share; what the round was routed to, kept for every layer
    shares        float32 [T][k], theirs
    shared_share  float32 [T]
    """

    logits: int
    h: int
    shared_h: int
    ids: int
    shares: int
    shared_share: int
    layer_ids_bytes: int

    @classmethod
    def take(cls, taker: Taker, tensors: MoeTensors, n_columns: int, n_layers: int) -> "RoundExperts":
        """Memory for up to ``n_columns`` columns."""
        pairs = n_columns * tensors.experts_per_token
        inner, shared = activation_stride(tensors.routed_down.k), activation_stride(tensors.shared.down.k)
        return cls(
            logits=taker.take("workspace/moe/logits", _FLOAT * n_columns * (tensors.n_experts + 1)),
            h=taker.take("workspace/moe/h", _BF16 * pairs * inner),
            shared_h=taker.take("workspace/moe/shared_h", _BF16 * n_columns * shared),
            ids=taker.take("workspace/moe/ids", _INT * pairs * n_layers),
            shares=taker.take("workspace/moe/shares", _FLOAT * pairs),
            shared_share=taker.take("workspace/moe/shared_share", _FLOAT * n_columns),
            layer_ids_bytes=_INT * pairs,
        )

    def of_layer(self, layer: int) -> "RoundExperts":
        """What the layer works in."""
        return replace(self, ids=self.ids + layer * self.layer_ids_bytes)


def column_limits(max_columns: int) -> tuple[int, ...]:
    """Limits that launches of up to ``max_columns`` columns take."""
    return _LIMITS[: _LIMITS.index(limit_of(max_columns)) + 1]


def limit_of(n_columns: int) -> int:
    """The limit that a launch of so many columns takes."""
    return next(limit for limit in _LIMITS if limit >= n_columns)


def selection_bytes(n_experts: int, top_k: int, columns: int, tile: int) -> int:
    """Shared memory of the kernels' ``Selection``."""
    pairs, words = columns * top_k, -(-columns // 32)
    entries = min(n_experts, pairs) + pairs // tile
    floats = 4 * (pairs + columns + n_experts * words + -(-n_experts // 32))
    return up(floats + 2 * (n_experts + 2 * pairs + 3 * entries + 2), 128)


def _spec(
    device: Device,
    name: str,
    tensors: MoeTensors,
    limit: int,
    *,
    warps: int,
    slot: int,
    rest_bytes: int,
    defines: Sequence[tuple[str, int]],
    blocks_per_sm: int = 1,
) -> KernelSpec:
    """The variant with as many stages of ``slot`` bytes per warp as fit beside ``rest_bytes``."""
    columns = up(limit, _TOKEN_TILE)
    budget = min(MAX_BLOCK_SHARED, device.shared_per_sm // blocks_per_sm - 1024) - 4 * columns - rest_bytes
    stages = min(_MAX_STAGES[name], budget // (warps * slot))
    if stages < 2:
        raise UnsupportedError(
            f"{name}: {tensors.n_experts} experts, {tensors.experts_per_token} per token and "
            f"{tensors.routed_down.format} leave {stages} stages in shared memory, 2 needed"
        )
    common = (
        ("N_EXPERTS", tensors.n_experts),
        ("TOP_K", tensors.experts_per_token),
        ("COLUMNS", columns),
        ("STAGES", stages),
    )
    shared = rest_bytes + warps * stages * slot
    return KernelSpec(f"{name}.cu", name, (*common, *defines), _LANES * warps, shared, blocks_per_sm)


def router_spec(device: Device, tensors: MoeTensors, limit: int) -> KernelSpec:
    """The variant of ``moe_round_router.cu`` for up to ``limit`` columns."""
    router, shared = tensors.router, tensors.shared.gate_up
    return _spec(
        device,
        "moe_round_router",
        tensors,
        limit,
        warps=_ROUTER_WARPS,
        slot=max(router.block_bytes, shared.block_bytes),
        rest_bytes=_ROUTER_WARPS * up(limit, _TOKEN_TILE) * _TILE_ROWS * _FLOAT,
        defines=(
            ("SHARED_FORMAT", shared.tile.code),
            ("BLOCKS", router.k_steps),
            ("SHARED_BLOCKS", shared.k_steps),
        ),
    )


def _division(bank: PackedMatrix) -> tuple[int, int]:
    """Tile rows of gate and up that are multiplied together, and by how many warps."""
    rows = _GATE_UP_ROWS if bank.block_bytes <= _SMALL_BLOCK else 1
    return rows, rows * _ROW_SPLIT


def gate_up_spec(device: Device, tensors: MoeTensors, limit: int) -> KernelSpec:
    """The variant of ``moe_gate_up.cu`` for up to ``limit`` columns."""
    bank = tensors.routed_gate_up
    columns = up(limit, _TOKEN_TILE)
    selection = selection_bytes(tensors.n_experts, tensors.experts_per_token, columns, _GATE_UP_TILE)
    rows, split = _division(bank)
    exchange = _GATE_UP_WARPS // split * 2 * (split - 1) * rows * 4 * _LANES * _FLOAT
    return _spec(
        device,
        "moe_gate_up",
        tensors,
        limit,
        warps=_GATE_UP_WARPS,
        slot=rows * bank.block_bytes + _GATE_UP_TILE * bank.tile.step * _BF16,
        rest_bytes=selection + exchange,
        defines=(
            ("SELECTION_BYTES", selection),
            ("FORMAT", bank.tile.code),
            ("ROWS", rows),
            ("SPLIT", split),
            ("BLOCKS", bank.k_steps),
            ("EXPERT_TILES", bank.expert_tiles),
        ),
        blocks_per_sm=2 if device.shared_per_sm >= _TWO_BLOCKS_SHARED else 1,
    )


def down_spec(device: Device, tensors: MoeTensors, limit: int) -> KernelSpec:
    """The variant of ``moe_down.cu`` for up to ``limit`` columns."""
    bank, shared = tensors.routed_down, tensors.shared.down
    columns, (warps, split) = up(limit, _TOKEN_TILE), _DOWN_WARPS[limit]
    selection = selection_bytes(tensors.n_experts, tensors.experts_per_token, columns, _DOWN_TILE)
    parts = max(split * columns * tensors.experts_per_token, min(warps, shared.k_steps) * columns)
    return _spec(
        device,
        "moe_down",
        tensors,
        limit,
        warps=warps,
        slot=max(bank.block_bytes, shared.block_bytes),
        rest_bytes=selection + parts * _TILE_ROWS * _FLOAT,
        defines=(
            ("SELECTION_BYTES", selection),
            ("FORMAT", bank.tile.code),
            ("SHARED_FORMAT", shared.tile.code),
            ("SPLIT", split),
            ("BLOCKS", bank.k_steps),
            ("SHARED_BLOCKS", shared.k_steps),
        ),
    )


class MoeSmall:
    """A layer's mixture of experts in rounds."""

    def __init__(
        self,
        device: Device,
        tensors: MoeTensors,
        memory: RoundExperts,
        max_columns: int,
    ) -> None:
        """UnsupportedError for shapes that have no kernels."""
        if not 1 <= tensors.n_experts <= MAX_EXPERTS or tensors.experts_per_token > 32:
            raise UnsupportedError(
                f"{tensors.routed_down.name}: {tensors.n_experts} experts, {tensors.experts_per_token} per token; "
                f"kernels take up to {MAX_EXPERTS} and 32"
            )
        self.tensors, self.memory, self.max_columns = tensors, memory, max_columns
        self._device = device
        limits = column_limits(max_columns)
        self._router = {n: router_spec(device, tensors, n) for n in limits}
        self._gate_up = {n: gate_up_spec(device, tensors, n) for n in limits}
        self._down = {n: down_spec(device, tensors, n) for n in limits}

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """Its weights."""
        return self.tensors.matrices

    @property
    def specs(self) -> list[KernelSpec]:
        """Its kernel variants."""
        return list(dict.fromkeys([*self._router.values(), *self._gate_up.values(), *self._down.values()]))

    @property
    def ss_parts(self) -> int:
        """Parts of Σ x² that it leaves per column."""
        return self.tensors.routed_down.expert_tiles

    def prepare(self) -> None:
        """Load the kernels; before the first launch, outside of captures."""
        self._device.prepare(self.specs)

    def launch(self, stream: Stream, n_columns: int, x: int, rstd: RmsScale | None, residual: Residual) -> None:
        """Queue ``residual`` += experts of ``x``, bf16 [n_columns][activation_stride(hidden)]."""
        assert 1 <= n_columns <= self.max_columns
        self.launch_route(stream, n_columns, x, rstd)
        self.launch_gate_up(stream, n_columns, x, rstd)
        self.launch_down(stream, n_columns, residual)

    def launch_route(self, stream: Stream, n_columns: int, x: int, rstd: RmsScale | None) -> None:
        """Logits, and the shared expert's inner columns."""
        m, router, shared = self.memory, self.tensors.router, self.tensors.shared.gate_up
        p = MoeRoundRouterParams(
            router=router.pointer, shared_tiles=shared.pointer, x=x, logits=m.logits, out=m.shared_h
        )
        p.n_columns, p.x_stride = n_columns, activation_stride(router.k)
        p.out_stride = activation_stride(self.tensors.shared.down.k)
        p.n_logits, p.n_out, p.router_tiles = router.n_outputs, shared.n_outputs, router.n_tiles
        p.factor = shared.sums_factor
        _divide(p, rstd)
        self._queue(stream, self._router, n_columns, router.n_tiles + shared.n_tiles, p)

    def launch_gate_up(self, stream: Stream, n_columns: int, x: int, rstd: RmsScale | None) -> None:
        """The routing, and the routed experts' inner columns."""
        m, bank = self.memory, self.tensors.routed_gate_up
        p = MoeGateUpParams(tiles=bank.pointer, logits=m.logits, x=x, out=m.h, ids=m.ids, shares=m.shares)
        p.shared_share, p.n_columns, p.n_out = m.shared_share, n_columns, bank.n_outputs
        p.x_stride, p.out_stride = activation_stride(bank.k), activation_stride(self.tensors.routed_down.k)
        p.factor = bank.sums_factor
        _divide(p, rstd)
        distinct = min(self.tensors.n_experts, n_columns * self.tensors.experts_per_token)
        rows, split = _division(bank)
        tasks = distinct * -(-bank.expert_tiles // rows)
        most = self._device.n_sms * self._gate_up[1].min_blocks
        self._queue(stream, self._gate_up, n_columns, min(most, -(-tasks * split // _GATE_UP_WARPS)), p)

    def launch_down(self, stream: Stream, n_columns: int, residual: Residual) -> None:
        """Everything behind the inner columns."""
        m, bank, shared = self.memory, self.tensors.routed_down, self.tensors.shared.down
        p = MoeDownParams(tiles=bank.pointer, shared_tiles=shared.pointer, logits=m.logits, h=m.h, shared_h=m.shared_h)
        p.residual, p.ss_out = residual.x, residual.ss
        p.normed, p.next_norm = residual.normed, residual.next_norm
        p.n_columns, p.n_out, p.n_tiles = n_columns, bank.n_outputs, bank.expert_tiles
        p.h_stride, p.shared_stride = activation_stride(bank.k), activation_stride(shared.k)
        p.normed_stride = activation_stride(bank.n_outputs)
        p.factor, p.shared_factor = bank.sums_factor, shared.sums_factor
        self._queue(stream, self._down, n_columns, bank.expert_tiles, p)

    def _queue(
        self, stream: Stream, variants: Mapping[int, KernelSpec], n_columns: int, n_blocks: int, p: ctypes.Structure
    ) -> None:
        spec = variants[limit_of(n_columns)]
        self._device.kernel(spec).launch((n_blocks, 1, 1), p, stream)


def _divide(p: MoeRoundRouterParams | MoeGateUpParams, rstd: RmsScale | None) -> None:
    if rstd is not None:
        p.ss, p.n_parts, p.inverse_hidden, p.epsilon = rstd.ss, rstd.n_parts, 1 / rstd.hidden, rstd.epsilon
