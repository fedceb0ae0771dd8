"""Time of the matrix launches of a decode round, one kind at a time, on the weights of a running program."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.bench.bytes_moved import launch_bytes
from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import Running

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.arena import Taker
    from ninfer_runtime.backends.cuda.device import Device, Stream
    from ninfer_runtime.backends.cuda.ops.linear_small import Epilogue, LinearSmall, Workspace
    from ninfer_runtime.backends.cuda.packing import PackedMatrix
    from ninfer_runtime.backends.cuda.weights import DeviceWeights

REPEATS = 20
WARM_UPS = 3
CHAIN_L2_SIZES = 4
"""A chain reads at least so many times the L2 cache, so that nothing is found there again."""
CHECKED_ROWS = 64
MAX_ERROR = 1e-2
"""‖out − reference‖ / ‖reference‖ over the checked rows; outputs are BF16."""


@runtime_checkable
class HoldsWeights(Protocol):
    """A program of the CUDA backend: its device, and its weights there."""

    device: "Device"
    weights: "DeviceWeights"


@dataclass(frozen=True, slots=True)
class Scratch:
    """Device memory of the launches: one input column, what they write, and the residual stream."""

    x: int
    out: int
    out_stride: int
    residual: int
    ss: int
    normed: int
    next_norm: int
    regions: tuple[tuple[int, int], ...]
    """(address, bytes) of all of them."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The launches of one kind over all layers, and the bytes of weights that they read."""

    kind: str
    ops: tuple["LinearSmall", ...]
    n_bytes: int


def ops(run: Running) -> Iterator[Result]:
    """``matrix/…``: every kind in a graph of its launches over all layers, weights cold; medians of ``REPEATS``."""
    program = run.program
    if not isinstance(program, HoldsWeights):
        return
    from ninfer_runtime.backends.cuda.arena import Arena, ArenaPlan
    from ninfer_runtime.backends.cuda.ops.linear_small import Workspace, workspace_bytes

    device, weights = program.device, program.weights
    n_bytes = launch_bytes(run.artifact.directory.objects)

    def laid_out(taker: "Taker") -> tuple["Workspace", Scratch, list[Chain]]:
        workspace = Workspace(taker, workspace_bytes(device, 1))
        return workspace, _scratch(taker, weights), _chains(device, taker, weights, workspace, n_bytes)

    plan = ArenaPlan()
    laid_out(plan)
    arena = Arena(device, plan.n_bytes)
    try:
        workspace, scratch, chains = laid_out(arena)
        stream = device.stream()
        for place, size in scratch.regions:
            device.fill(place, 0, size, stream)
        workspace.clear(device, stream)
        device.synchronize(stream)
        for chain in chains:
            yield _measured(run, device, chain, scratch)
    finally:
        arena.close()


def _measured(run: Running, device: "Device", chain: Chain, scratch: Scratch) -> Result:
    for op in chain.ops:
        op.prepare()
    x = _input(device, scratch, chain.ops[0].matrices[0].k)
    problem = _problem(run, device, chain.ops[-1], scratch, x)
    rounds = max(1, -(-CHAIN_L2_SIZES * device.l2_bytes // chain.n_bytes))
    launches = [lambda stream, op=op: _launch(op, scratch, stream) for op in chain.ops]
    seconds = chain_seconds(device, launches, rounds) / rounds
    return Result(
        id=f"matrix/{run.identity}/{chain.kind}",
        value=seconds / len(chain.ops) * 1e6,
        unit="us",
        limit="read_gbps",
        achieved=chain.n_bytes / seconds / 1e9,
        check=f"{CHECKED_ROWS} rows of each matrix of the last layer against the artifact",
        problem=problem,
        details={"launches": len(chain.ops), "mb_per_launch": round(chain.n_bytes / len(chain.ops) / 1e6, 2)},
    )


def chain_seconds(device: "Device", launches: Sequence[Callable[["Stream"], None]], rounds: int) -> float:
    """Median seconds of a graph of all launches, one after the other, ``rounds`` times over."""
    stream = device.stream()
    with device.capture(stream) as graph:
        for _ in range(rounds):
            for launch in launches:
                launch(stream)
    begin, end = device.event(timing=True), device.event(timing=True)
    found = []
    for repeat in range(WARM_UPS + REPEATS):
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        if repeat >= WARM_UPS:
            found.append(end.elapsed_ms(begin) / 1e3)
    graph.close()
    return sorted(found)[REPEATS // 2]


def _chains(
    device: "Device",
    taker: "Taker",
    weights: "DeviceWeights",
    workspace: "Workspace",
    n_bytes: dict[str, tuple[int, ...]],
) -> list[Chain]:
    from ninfer_runtime.backends.cuda.ops.linear_small import LinearSmall
    from ninfer_runtime.backends.cuda.weights import GdnTensors, MlpTensors

    kinds: dict[str, list[LinearSmall]] = {}

    def add(kind: str, matrices: Sequence["PackedMatrix"], epilogue: "Epilogue") -> None:
        kinds.setdefault(kind, []).append(LinearSmall(device, taker, matrices, epilogue, 1, workspace))

    for layer in weights.layers:
        mixer = "gdn" if isinstance(layer.mixer, GdnTensors) else "attention"
        add(f"{mixer}/input", layer.mixer.inputs.matrices, "store")
        add(f"{mixer}/output", [layer.mixer.output], "residual")
        if isinstance(layer.ffn, MlpTensors):
            add("mlp/gate_up", [layer.ffn.gate_up], "swiglu")
            add("mlp/down", [layer.ffn.down], "residual")
    add("head", [weights.head], "store")
    return [Chain(kind, tuple(found), sum(n_bytes[kind])) for kind, found in kinds.items()]


def _scratch(taker: "Taker", weights: "DeviceWeights") -> Scratch:
    from ninfer_runtime.backends.cuda.packing import activation_stride

    matrices = weights.matrices
    hidden = weights.head.k
    stride = activation_stride(max(matrix.n_rows for matrix in matrices))
    parts = max(matrix.n_tiles for matrix in matrices)
    sizes = {
        "x": 2 * activation_stride(max(matrix.k for matrix in matrices)),
        "out": 2 * stride * max(len(layer.mixer.inputs.matrices) for layer in weights.layers),
        "residual": 4 * activation_stride(hidden),
        "ss": 4 * parts,
        "normed": 2 * activation_stride(hidden),
        "next_norm": 2 * activation_stride(hidden),
    }
    places = {name: (taker.take(f"bench/{name}", n_bytes), n_bytes) for name, n_bytes in sizes.items()}
    return Scratch(
        **{name: place for name, (place, _) in places.items()}, out_stride=stride, regions=tuple(places.values())
    )


def _launch(op: "LinearSmall", scratch: Scratch, stream: "Stream") -> None:
    from ninfer_runtime.backends.cuda.ops.linear_small import Output, Residual

    if op.epilogue == "residual":
        residual = Residual(scratch.residual, scratch.ss, scratch.normed, scratch.next_norm)
        op.launch(stream, 1, scratch.x, residual=residual)
        return
    places = [scratch.out + 2 * scratch.out_stride * i for i in range(len(op.matrices))]
    op.launch(stream, 1, scratch.x, outputs=[Output(place) for place in places])


def _input(device: "Device", scratch: Scratch, k: int) -> NDArray[np.float32]:
    """A random column in the input, as its BF16 values."""
    words = np.random.default_rng(k).standard_normal(k).astype(np.float32).view(np.uint32) >> 16
    device.upload(scratch.x, words.astype(np.uint16))
    return (words << 16).astype(np.uint32).view(np.float32)


def _problem(run: Running, device: "Device", op: "LinearSmall", scratch: Scratch, x: NDArray[np.float32]) -> str:
    """What is wrong with the outputs of one launch, or nothing."""
    stream = device.stream()
    if op.epilogue == "residual":
        device.fill(scratch.residual, 0, 4 * op.matrices[0].n_outputs, stream)
    _launch(op, scratch, stream)
    device.synchronize(stream)
    for i, matrix in enumerate(op.matrices):
        rows = np.sort(np.random.default_rng(i).choice(matrix.n_outputs, min(CHECKED_ROWS, matrix.n_outputs), False))
        expected = run.artifact.rows(matrix.name, rows) @ x
        if op.epilogue == "swiglu":
            up = run.artifact.rows(matrix.name, rows + matrix.n_outputs) @ x
            expected = expected / (1 + np.exp(-expected)) * up
        if op.epilogue == "residual":
            out = np.empty(matrix.n_outputs, np.float32)
            device.download(scratch.residual, out)
        else:
            words = np.empty(matrix.n_outputs, np.uint16)
            device.download(scratch.out + 2 * scratch.out_stride * i, words)
            out = (words.astype(np.uint32) << 16).view(np.float32)
        error = float(np.linalg.norm(out[rows] - expected) / np.linalg.norm(expected))
        if not error <= MAX_ERROR:
            return f"{matrix.name} is off by {error:.2g}, expected at most {MAX_ERROR}"
    return ""
