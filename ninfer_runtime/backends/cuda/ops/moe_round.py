"""A mixture of experts for up to 48 token columns: three launches (``moe_gate_up.cu``, ``moe_down.cu``).

The first is ``linear_small``: the router's logits, and the shared expert's gate and up beside them. The second routes
and multiplies gate and up of the distinct experts, the third all downs, the weighted sum and the residual stream.
Reference: ``backends/reference/moe.py``.
"""

import ctypes
from dataclasses import dataclass, replace

from ninfer_format.errors import UnsupportedError
from ninfer_format.geometry import up
from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.linear_small import (
    LinearSmall,
    Output,
    Residual,
    RmsScale,
    Workspace,
)
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride
from ninfer_runtime.backends.cuda.weights import MoeTensors

MAX_COLUMNS = 48
MAX_EXPERTS = 1024
MAX_BLOCK_SHARED = 101_376
_TOKEN_TILE, _TILE_ROWS = 8, 16
_WARPS = 8
_SPLIT = 2
"""Warps that divide the columns of a tile row of gate and up: 8 of 256 experts are 512 tile rows, a card has two to
three times as many warps that wait for memory."""
_MAX_STAGES = 8
_WIDE_TILES = 6
_BF16, _FLOAT, _INT = 2, 4, 4


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


def token_tiles(n_columns: int) -> int:
    """Tiles of eight columns that a launch is compiled for: one, or as many as there may be."""
    return 1 if n_columns <= _TOKEN_TILE else _WIDE_TILES


def selection_bytes(n_experts: int, top_k: int, tiles: int) -> int:
    """Shared memory of the kernels' ``Selection``."""
    columns = _TOKEN_TILE * tiles
    pairs, words = columns * top_k, -(-columns // 32)
    distinct = min(n_experts, pairs)
    floats = 4 * (pairs + columns + n_experts * words + -(-n_experts // 32))
    return up(floats + 2 * (n_experts + 2 * pairs + 2 * distinct + 2), 128)


def _budget(device: Device, tiles: int) -> int:
    """Shared memory of a block; up to eight columns this launch and the next share an SM."""
    whole = min(MAX_BLOCK_SHARED, device.shared_per_sm - 1024)
    return min(whole, device.shared_per_sm // 2 - 1024) if tiles == 1 else whole


def _spec(
    device: Device, source: str, tiles: int, tensors: MoeTensors, rest_bytes: int, slot: int, *defines: tuple[str, int]
) -> KernelSpec:
    """The variant with as many stages as fit beside ``rest_bytes``."""
    selection = selection_bytes(tensors.n_experts, tensors.experts_per_token, tiles)
    static_bytes = 4 * _TOKEN_TILE * tiles
    stages = min(_MAX_STAGES, (_budget(device, tiles) - static_bytes - selection - rest_bytes) // (_WARPS * slot))
    if stages < 2:
        raise UnsupportedError(
            f"{source}: {tensors.n_experts} experts, {tensors.experts_per_token} per token and "
            f"{tensors.routed_down.format} leave {stages} stages in shared memory, 2 needed"
        )
    common = (
        ("N_EXPERTS", tensors.n_experts),
        ("TOP_K", tensors.experts_per_token),
        ("NT", tiles),
        ("STAGES", stages),
        ("SELECTION_BYTES", selection),
    )
    shared = selection + rest_bytes + _WARPS * stages * slot
    name = source.removesuffix(".cu")
    return KernelSpec(source, name, (*common, *defines), 32 * _WARPS, shared, 2 if tiles == 1 else 1)


def gate_up_spec(device: Device, tensors: MoeTensors, tiles: int) -> KernelSpec:
    """The variant of ``moe_gate_up.cu`` for 8 · ``tiles`` columns."""
    bank = tensors.routed_gate_up
    exchange = _WARPS // _SPLIT * 2 * (_SPLIT - 1) * tiles * 4 * 32 * 4
    defines = (("FORMAT", bank.tile.code), ("SPLIT", _SPLIT))
    shape = (("BLOCKS", bank.k_steps), ("EXPERT_TILES", bank.expert_tiles))
    return _spec(device, "moe_gate_up.cu", tiles, tensors, exchange, bank.block_bytes, *defines, *shape)


def down_spec(device: Device, tensors: MoeTensors, tiles: int) -> KernelSpec:
    """The variant of ``moe_down.cu`` for 8 · ``tiles`` columns."""
    bank, shared = tensors.routed_down, tensors.shared.down
    columns = _TOKEN_TILE * tiles
    parts = max(columns * tensors.experts_per_token, _WARPS * columns) * _TILE_ROWS * 4
    formats = (("FORMAT", bank.tile.code), ("SHARED_FORMAT", shared.tile.code))
    shape = (("BLOCKS", bank.k_steps), ("SHARED_BLOCKS", shared.k_steps))
    slot = max(bank.block_bytes, shared.block_bytes)
    return _spec(device, "moe_down.cu", tiles, tensors, parts, slot, *formats, *shape)


class MoeSmall:
    """A layer's mixture of experts in rounds."""

    def __init__(
        self,
        device: Device,
        taker: Taker,
        tensors: MoeTensors,
        memory: RoundExperts,
        max_columns: int,
        workspace: Workspace,
    ) -> None:
        """UnsupportedError for shapes that have no kernels."""
        if not 1 <= tensors.n_experts <= MAX_EXPERTS or tensors.experts_per_token > 32:
            raise UnsupportedError(
                f"{tensors.routed_down.name}: {tensors.n_experts} experts, {tensors.experts_per_token} per token; "
                f"kernels take up to {MAX_EXPERTS} and 32"
            )
        self.tensors, self.memory, self.max_columns = tensors, memory, max_columns
        self._device = device
        first = (tensors.router, tensors.shared.gate_up)
        self.route = LinearSmall(device, taker, first, "mixed", max_columns, workspace)
        sizes = dict.fromkeys((token_tiles(1), token_tiles(max_columns)))
        self._gate_up = {tiles: gate_up_spec(device, tensors, tiles) for tiles in sizes}
        self._down = {tiles: down_spec(device, tensors, tiles) for tiles in sizes}

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """Its weights."""
        return self.tensors.matrices

    @property
    def specs(self) -> list[KernelSpec]:
        """Its kernel variants."""
        return [*self.route.specs, *self._gate_up.values(), *self._down.values()]

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
        m = self.memory
        inner = Output(m.shared_h, stride=activation_stride(self.tensors.shared.down.k))
        self.route.launch(stream, n_columns, x, rstd, (Output(m.logits, is_float=True), inner))

    def launch_gate_up(self, stream: Stream, n_columns: int, x: int, rstd: RmsScale | None) -> None:
        """The routing, and the routed experts' inner columns."""
        m, bank = self.memory, self.tensors.routed_gate_up
        p = MoeGateUpParams(tiles=bank.pointer, logits=m.logits, x=x, out=m.h, ids=m.ids, shares=m.shares)
        p.shared_share, p.n_columns, p.n_out = m.shared_share, n_columns, bank.n_outputs
        p.x_stride, p.out_stride = activation_stride(bank.k), activation_stride(self.tensors.routed_down.k)
        p.factor = bank.sums_factor
        if rstd is not None:
            p.ss, p.n_parts, p.inverse_hidden, p.epsilon = rstd.ss, rstd.n_parts, 1 / rstd.hidden, rstd.epsilon
        spec = self._gate_up[token_tiles(n_columns)]
        tasks = min(self.tensors.n_experts, n_columns * self.tensors.experts_per_token) * bank.expert_tiles
        grid = (min(self._device.n_sms * spec.min_blocks, -(-tasks // (_WARPS // _SPLIT))), 1, 1)
        self._device.kernel(spec).launch(grid, p, stream)

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
        self._device.kernel(self._down[token_tiles(n_columns)]).launch((bank.expert_tiles, 1, 1), p, stream)
