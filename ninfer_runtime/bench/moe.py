"""Time of the launches of a mixture of experts in rounds, on the weights of a running program, weights cold.

``moe/IDENTITY/cT`` is all of them over all layers, in a graph; ``moe/IDENTITY/cT/LAUNCH`` one kind alone. The bound is
the bytes of the experts that the columns were routed to, each once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.bench.ops import CHAIN_L2_SIZES, CHECKED_ROWS, MAX_ERROR, HoldsWeights, chain_seconds
from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import Running

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.arena import Taker
    from ninfer_runtime.backends.cuda.device import Device, Stream
    from ninfer_runtime.backends.cuda.ops.linear_small import Residual
    from ninfer_runtime.backends.cuda.ops.moe_round import MoeSmall, RoundExperts
    from ninfer_runtime.backends.cuda.weights import DeviceWeights, MoeTensors

COLUMNS = (1, 4, 8, 32)
Launch = Callable[["Stream"], None]


@dataclass(frozen=True, slots=True)
class Bench:
    """The layers' launches and the memory that they share: columns, residual stream, what the next matrix reads."""

    ops: tuple["MoeSmall", ...]
    memory: "RoundExperts"
    x: int
    residual: "Residual"
    region: tuple[int, int]
    """Where all of the memory begins and ends."""
    n_columns: int


def moe(run: Running) -> Iterator[Result]:
    """``moe/…`` at ``COLUMNS``; nothing for dense models and programs without kernels of their own."""
    program = run.program
    if not isinstance(program, HoldsWeights):
        return
    from ninfer_runtime.backends.cuda.arena import Arena, ArenaPlan
    from ninfer_runtime.backends.cuda.weights import MoeTensors

    device, weights = program.device, program.weights
    tensors = [layer.ffn for layer in weights.layers if isinstance(layer.ffn, MoeTensors)]
    if not tensors:
        return
    plan = ArenaPlan()
    _laid_out(device, plan, weights, tensors)
    arena = Arena(device, plan.n_bytes)
    try:
        bench = _laid_out(device, arena, weights, tensors)
        begin, end = bench.region
        stream = device.stream()
        device.fill(begin, 0, end - begin, stream)
        device.synchronize(stream)
        for op in bench.ops:
            op.prepare()
        for n_columns in COLUMNS:
            yield from _measured(run, device, bench, n_columns)
    finally:
        arena.close()


def _laid_out(device: "Device", taker: "Taker", weights: "DeviceWeights", tensors: Sequence["MoeTensors"]) -> Bench:
    from ninfer_runtime.backends.cuda.ops.linear_small import Residual
    from ninfer_runtime.backends.cuda.ops.moe_round import MoeSmall, RoundExperts
    from ninfer_runtime.backends.cuda.packing import activation_stride

    most, hidden = max(COLUMNS), weights.head.k
    begin = taker.take("bench", 0)
    memory = RoundExperts.take(taker, tensors[0], most, len(tensors))
    ops = [MoeSmall(device, t, memory.of_layer(i), most) for i, t in enumerate(tensors)]
    stride = activation_stride(hidden)
    residual = Residual(
        x=taker.take("bench/residual", 4 * most * hidden),
        ss=taker.take("bench/ss", 4 * most * ops[0].ss_parts),
        normed=taker.take("bench/normed", 2 * most * stride),
        next_norm=taker.take("bench/norm", 2 * stride),
    )
    x = taker.take("bench/x", 2 * most * stride)
    return Bench(tuple(ops), memory, x, residual, (begin, taker.take("bench", 0)), most)


def _measured(run: Running, device: "Device", bench: Bench, n_columns: int) -> Iterator[Result]:
    x = _columns(device, bench, n_columns)
    problem = _problem(run, device, bench, x)
    k = bench.ops[0].tensors.experts_per_token
    ids = np.empty((len(bench.ops), bench.n_columns, k), np.int32)
    device.download(bench.memory.ids, ids)
    touched = [len(np.unique(of_layer[:n_columns])) for of_layer in ids]
    last = [touched[-1]] * len(touched)  # launches of one kind all follow the logits that the last layer left
    kinds: dict[str, tuple[list[Launch], int]] = {
        "": ([_all(op, bench, n_columns) for op in bench.ops], _bytes(bench, touched)),
        "/route": ([_route(op, bench, n_columns) for op in bench.ops], _bytes(bench, None)),
        "/gate_up": ([_gate_up(op, bench, n_columns) for op in bench.ops], _bank_bytes(bench, last, 0)),
        "/down": (
            [_down(op, bench, n_columns) for op in bench.ops],
            _bank_bytes(bench, last, 1) + sum(op.tensors.shared.down.n_bytes for op in bench.ops),
        ),
    }
    for kind, (launches, n_bytes) in kinds.items():
        rounds = max(1, -(-CHAIN_L2_SIZES * device.l2_bytes // n_bytes))
        seconds = chain_seconds(device, launches, rounds) / rounds
        yield Result(
            id=f"moe/{run.identity}/c{n_columns}{kind}",
            value=seconds / len(launches) * 1e6,
            unit="us",
            limit="read_gbps",
            achieved=n_bytes / seconds / 1e9,
            check=f"routing and {CHECKED_ROWS} rows of the last layer against the artifact",
            problem=problem,
            details={
                "layers": len(launches),
                "mb_per_layer": round(n_bytes / len(launches) / 1e6, 2),
                "distinct_experts": round(float(np.mean(touched if kind == "" else last)), 2),
            },
        )


def _all(op: "MoeSmall", bench: Bench, n_columns: int) -> Launch:
    return lambda stream: op.launch(stream, n_columns, bench.x, None, bench.residual)


def _route(op: "MoeSmall", bench: Bench, n_columns: int) -> Launch:
    return lambda stream: op.launch_route(stream, n_columns, bench.x, None)


def _gate_up(op: "MoeSmall", bench: Bench, n_columns: int) -> Launch:
    return lambda stream: op.launch_gate_up(stream, n_columns, bench.x, None)


def _down(op: "MoeSmall", bench: Bench, n_columns: int) -> Launch:
    return lambda stream: op.launch_down(stream, n_columns, bench.residual)


def _bank_bytes(bench: Bench, touched: Sequence[int], which: int) -> int:
    """Of the banks of gate and up (0) or of down (1), of so many experts in each layer."""
    banks = [(op.tensors.routed_gate_up, op.tensors.routed_down)[which] for op in bench.ops]
    return sum(n * bank.n_bytes // bank.n_experts for n, bank in zip(touched, banks, strict=True))


def _bytes(bench: Bench, touched: Sequence[int] | None) -> int:
    """Of a pass over all layers; None: of its first launches only."""
    first = sum(op.tensors.router.n_bytes + op.tensors.shared.gate_up.n_bytes for op in bench.ops)
    if touched is None:
        return first
    banks = _bank_bytes(bench, touched, 0) + _bank_bytes(bench, touched, 1)
    return first + banks + sum(op.tensors.shared.down.n_bytes for op in bench.ops)


def _columns(device: "Device", bench: Bench, n_columns: int) -> NDArray[np.float32]:
    """Random normed columns in the input, as their BF16 values [n_columns, hidden]."""
    from ninfer_runtime.backends.cuda.packing import activation_stride

    hidden = bench.ops[0].tensors.router.k
    values = np.random.default_rng(n_columns).standard_normal((n_columns, hidden)).astype(np.float32)
    words = np.zeros((n_columns, activation_stride(hidden)), np.uint16)
    words[:, :hidden] = values.view(np.uint32) >> 16
    device.upload(bench.x, words)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def _problem(run: Running, device: "Device", bench: Bench, x: NDArray[np.float32]) -> str:
    """Run every layer once, for its routing; what is wrong with the last layer's first column, or nothing."""
    stream, op, n_columns = device.stream(), bench.ops[-1], len(x)
    for each in bench.ops:
        device.fill(bench.residual.x, 0, 4 * x.size, stream)
        each.launch(stream, n_columns, bench.x, None, bench.residual)
    device.synchronize(stream)
    out = np.empty(x.shape, np.float32)
    ids = np.empty((n_columns, op.tensors.experts_per_token), np.int32)
    shares, own = np.empty(ids.shape, np.float32), np.empty(n_columns, np.float32)
    for place, array in (
        (bench.residual.x, out),
        (op.memory.ids, ids),
        (op.memory.shares, shares),
        (op.memory.shared_share, own),
    ):
        device.download(place, array)

    def rows(name: str, first: int, n: int) -> NDArray[np.float32]:
        return run.artifact.rows(name, np.arange(first, first + n))

    t, column = op.tensors, x[0]
    logits = rows(t.router.name, 0, t.n_experts + 1) @ column
    best = np.argsort(-logits[:-1], kind="stable")[: ids.shape[1]]
    if set(best.tolist()) != set(ids[0].tolist()):
        return f"{t.router.name}: the first column goes to {ids[0].tolist()}, expected {best.tolist()}"
    n, width = min(CHECKED_ROWS, x.shape[1]), t.routed_down.k
    expected = np.zeros(n)
    for expert, share in zip(ids[0].tolist(), shares[0].tolist(), strict=True):
        gate_up = rows(t.routed_gate_up.name, expert * 2 * width, 2 * width) @ column
        expected += share * (rows(t.routed_down.name, expert * x.shape[1], n) @ _swiglu(gate_up))
    shared = rows(t.shared.gate_up.name, 0, t.shared.gate_up.n_rows) @ column
    expected += own[0] * (rows(t.shared.down.name, 0, n) @ _swiglu(shared))
    error = float(np.linalg.norm(out[0, :n] - expected) / np.linalg.norm(expected))
    return "" if error <= MAX_ERROR else f"{t.routed_down.name} is off by {error:.2g}, expected at most {MAX_ERROR}"


def _swiglu(gate_up: NDArray[np.float32]) -> NDArray[np.float32]:
    gate, up = np.split(gate_up, 2)
    result: NDArray[np.float32] = gate / (1 + np.exp(-gate)) * up
    return result
