"""Tune linear_small on the card at hand: random 27B weights, checked, then timed in chains over distinct weights.

    python -m scripts.lab_linear [--columns 1,4,8,16,32] [--kinds gate_up,down] [--set warps=8,stages=6 ...]

Each ``--set`` is one more geometry to time: fields of LinearSmallTuning, applied to every row of the card's table, or
with ``large.`` or ``small.`` before the name to those of launches with many or few tile rows.
Times are of a captured graph whose launches may begin early, per launch; shares are of the read rate measured in the
same run. "layer" is the chain of five launches of a layer with linear attention.
"""

import argparse
import dataclasses
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ninfer_format.numeric.nvfp4 import E2M1, E4M3FN
from ninfer_runtime.backends.cuda.arena import Arena
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops import linear_small, probes
from ninfer_runtime.backends.cuda.ops.linear_small import (
    Epilogue,
    LinearSmall,
    Output,
    Residual,
    RmsScale,
    Workspace,
)
from ninfer_runtime.backends.cuda.ops.linear_small_tuning import LinearSmallTuning, linear_small_tuning
from ninfer_runtime.backends.cuda.packing import PackedMatrix, TileFormat, activation_stride, unpack_matrix

HIDDEN, MLP, INNER, LAYERS, MAX_COLUMNS = 5120, 17408, 6144, 12, 48
MOE_HIDDEN, MOE_INNER = 2048, 4096
SAMPLES = 9
MIN_LARGE_TILE_ROWS = 640
WARM_UP_SECONDS = 0.1
REST_SECONDS = 2.0  # before a layer is timed: an H200 that has been at its power limit for a while runs 8 % slower
LEAST_CHAIN_BYTES = 0  # copies of a launch's weights, where not LAYERS: until they are so many bytes
WORKSPACE_BYTES = 32 << 20  # enough for any geometry
Q4, Q5, Q6, W8, BF16, NVFP4 = "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S", "BF16", "NVFP4"

KINDS: dict[str, tuple[Epilogue, tuple[tuple[str, int, int], ...]]] = {
    "gdn_in": ("store", ((Q4, 4096, HIDDEN), (Q5, 12288, HIDDEN), (BF16, 48, HIDDEN), (BF16, 48, HIDDEN))),
    "out": ("residual", ((Q5, HIDDEN, INNER),)),
    "gate_up": ("swiglu", ((Q4, 2 * MLP, HIDDEN),)),
    "down": ("residual", ((Q5, HIDDEN, MLP),)),
    "attention_in": ("store", ((Q4, 7168, HIDDEN), (Q5, 7168, HIDDEN))),
    "head": ("store", ((Q6, 248320, HIDDEN),)),
    "w8_gate_up": ("swiglu", ((W8, 2 * MLP, HIDDEN),)),
    "w8_down": ("residual", ((W8, HIDDEN, MLP),)),
    "bf16_in": ("store", ((BF16, 16384, HIDDEN),)),
    "nvfp4_in": ("store", ((NVFP4, 16384, HIDDEN), (BF16, 48, HIDDEN), (BF16, 48, HIDDEN))),
    "nvfp4_out": ("residual", ((NVFP4, HIDDEN, INNER),)),
    "nvfp4_gate_up": ("swiglu", ((NVFP4, 2 * MLP, HIDDEN),)),
    "nvfp4_down": ("residual", ((NVFP4, HIDDEN, MLP),)),
    "moe_gdn_in": ("store", ((W8, 12288, MOE_HIDDEN), (BF16, 32, MOE_HIDDEN), (BF16, 32, MOE_HIDDEN))),
    "moe_attention_in": ("store", ((W8, 9216, MOE_HIDDEN),)),
    "moe_out": ("residual", ((W8, MOE_HIDDEN, MOE_INNER),)),
    # Next to no bytes: what a launch costs.
    "small_store": ("store", ((Q4, 16896, 256),)),
    "small_residual": ("residual", ((Q5, HIDDEN, 1024),)),
}
BITS = {Q4: 4, Q5: 5, Q6: 6, W8: 8, BF16: 16, NVFP4: 4}
LAYER = ("gdn_in", "out", "gate_up", "down")


def random_matrix(device: CudaDevice, rng: np.random.Generator, format: str, n: int, k: int, glu: bool) -> PackedMatrix:
    """Random codes, scales between 1/2 and 1 over sqrt(K): a pool of blocks repeated with an odd shift per matrix."""
    matrix = PackedMatrix(format, format, n, k, interleaved=glu)
    n_blocks, pool_blocks = matrix.n_bytes // matrix.block_bytes, 4099
    pool = rng.integers(0, 256, (pool_blocks, matrix.block_bytes), np.uint8)
    if matrix.tile.floating:
        pool[:, -matrix.tile.scale_bytes :] = rng.integers(0x28, 0x40, (pool_blocks, matrix.tile.scale_bytes))
        matrix = dataclasses.replace(matrix, divisor=float(4 * np.sqrt(k)))
    elif matrix.tile.group:
        scale = rng.uniform(0.5, 1.0, (pool_blocks, 32)) / (np.sqrt(k) * 2 ** (matrix.tile.bits - 2))
        pool[:, -64:] = scale.astype(np.float16).view(np.uint8).reshape(pool_blocks, 64)
    else:
        values = (rng.standard_normal((pool_blocks, 1024)) / np.sqrt(k)).astype(np.float32)
        pool[:] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(pool_blocks, 2048)
    pointer = device.allocate(matrix.n_bytes)
    for first in range(0, n_blocks, pool_blocks):
        part = pool[: min(pool_blocks, n_blocks - first)]
        device.upload(pointer + first * matrix.block_bytes, np.ascontiguousarray(part))
    return matrix.at(pointer)


@dataclass(frozen=True)
class Buffers:
    """Device memory that all launches use."""

    x: dict[int, int]  # K → activations
    out: int
    residual: int
    normed: int
    norm: int
    ss: int
    ss_out: int


class Lab:
    """A card with weights of every kind, ``LAYERS`` times (the head once)."""

    def __init__(self, kinds: Sequence[str], seed: int) -> None:
        self.device = CudaDevice()
        self.stream = self.device.stream()
        self.rng = np.random.default_rng(seed)
        self.read_gbps = probes.read_gbps(self.device, self.stream, n_bytes=4 << 30).value
        self.weights: dict[str, list[list[PackedMatrix]]] = {}
        for kind in kinds:
            epilogue, shapes = KINDS[kind]
            n_bytes = sum(n * k * BITS[f] // 8 for f, n, k in shapes)
            copies = 1 if kind == "head" else max(2, LEAST_CHAIN_BYTES // n_bytes) if LEAST_CHAIN_BYTES else LAYERS
            make = [
                [random_matrix(self.device, self.rng, f, n, k, epilogue == "swiglu") for f, n, k in shapes]
                for _ in range(copies)
            ]
            self.weights[kind] = make
        self.activations: dict[int, npt.NDArray[np.float32]] = {}
        pointers = {k: self._activations(k) for k in (256, 1024, MOE_HIDDEN, MOE_INNER, HIDDEN, INNER, MLP)}
        zeros = np.zeros(MAX_COLUMNS * activation_stride(MLP), np.float32)
        ss = np.full((320, MAX_COLUMNS), HIDDEN / 320, np.float32)
        self.buffers = Buffers(
            pointers,
            self.device.allocate(MAX_COLUMNS * 248320 * 4),
            self._put(zeros[: MAX_COLUMNS * HIDDEN]),
            self._put(zeros),
            self._put(np.zeros(HIDDEN, np.uint16)),
            self._put(ss),
            self._put(ss),
        )

    def _put(self, array: npt.NDArray[np.generic]) -> int:
        pointer = self.device.allocate(array.nbytes)
        self.device.upload(pointer, array)
        return pointer

    def _activations(self, k: int) -> int:
        words = (self.rng.standard_normal((MAX_COLUMNS, k)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.activations[k] = (words.astype(np.uint32) << 16).view(np.float32)
        return self._put(words)

    def ops(self, arena: Arena, workspace: Workspace, kind: str, columns: int) -> list[LinearSmall]:
        made = [
            LinearSmall(self.device, arena, matrices, KINDS[kind][0], columns, workspace)
            for matrices in self.weights[kind]
        ]
        for op in made:
            op.prepare()
        return made

    def launch(self, op: LinearSmall, columns: int) -> None:
        b, first = self.buffers, op.matrices[0]
        x = b.x[first.k]
        if op.epilogue == "residual":
            op.launch(self.stream, columns, x, residual=Residual(b.residual, b.ss_out, b.normed, b.norm))
            return
        outputs, at = [], b.out
        for matrix in op.matrices:
            is_float = matrix.n_outputs > 100_000 or matrix.n_outputs < 100
            outputs.append(Output(at, is_float))
            at += columns * matrix.n_outputs * 4
        op.launch(self.stream, columns, x, RmsScale(b.ss, 320, HIDDEN, 0.0), outputs)

    def check(self, op: LinearSmall, columns: int) -> float:
        """Largest error in units of 2^-8 |y| + 1e-5 |w||x| over some tile rows; -1 when two runs differ."""
        b, worst = self.buffers, 0.0
        n_bytes = columns * sum(m.n_outputs for m in op.matrices) * 4
        runs = []
        for _ in range(2):
            self.device.fill(b.residual, 0, columns * HIDDEN * 4, self.stream)
            self.device.fill(b.out, 0xFF, n_bytes, self.stream)
            self.launch(op, columns)
            self.stream.synchronize()
            pointer = b.residual if op.epilogue == "residual" else b.out
            found = np.empty(n_bytes, np.uint8)
            self.device.download(pointer, found)
            runs.append(found)
        if not np.array_equal(runs[0], runs[1]):
            return -1.0
        at = 0
        for matrix in op.matrices:
            n = matrix.n_outputs
            is_float = op.epilogue == "residual" or n > 100_000 or n < 100
            size = columns * n * (4 if is_float else 2)
            raw = runs[0][at : at + size]
            at += columns * n * 4
            found64 = (
                raw.view(np.float32).astype(np.float64)
                if is_float
                else (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            ).reshape(columns, n)
            x = self.activations[matrix.k][:columns].astype(np.float64)
            for tile in {0, 1, matrix.n_tiles // 3, matrix.n_tiles // 2 + 1, matrix.n_tiles - 1}:
                tile = min(tile, matrix.n_tiles - 1)
                packed = np.empty(matrix.k_steps * matrix.block_bytes, np.uint8)
                self.device.download(matrix.pointer + tile * packed.size, packed)
                one = PackedMatrix("tile", matrix.format, 16, matrix.k, interleaved=matrix.interleaved)
                codes, scales = unpack_matrix(one, packed)
                if scales is None:
                    w = (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
                elif matrix.tile.floating:
                    real = np.repeat(E4M3FN[scales].astype(np.float64), matrix.tile.group, axis=1)[:, : matrix.k]
                    w = E2M1[codes].astype(np.float64) * real / matrix.divisor
                else:
                    real = np.repeat(scales.view(np.float16).astype(np.float64), matrix.tile.group, axis=1)
                    w = codes * real[:, : matrix.k]
                product = x @ w.T
                unit = 1e-5 * np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None]
                if matrix.interleaved:
                    gate, up = product[:, :8], product[:, 8:]
                    product, unit = gate / (1 + np.exp(-gate)) * up, unit[:, :8] * (1 + np.abs(gate) + np.abs(up))
                rows = slice(tile * product.shape[1], (tile + 1) * product.shape[1])
                error = np.abs(found64[:, rows] - product) / (unit + (0 if is_float else 2.0**-8) * np.abs(product))
                worst = max(worst, float(error.max()) if np.all(np.isfinite(error)) else np.inf)
        return worst

    def time_us(self, work: Callable[[], int]) -> float:
        """Median microseconds per launch of a graph of ``work``, which returns its number of launches."""
        with self.device.capture(self.stream) as graph:
            n_launches = work()
        # An idle card runs at a fraction of its clock, and takes a while to speed up.
        until = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < until:
            graph.launch(self.stream)
            graph.launch(self.stream)
            self.stream.synchronize()
        start, stop = self.device.event(timing=True), self.device.event(timing=True)
        times = []
        for _ in range(SAMPLES):
            graph.launch(self.stream)
            start.record(self.stream)
            graph.launch(self.stream)
            stop.record(self.stream)
            self.stream.synchronize()
            times.append(stop.elapsed_ms(start) * 1000 / n_launches)
        graph.close()
        return statistics.median(times)


def chain(lab: Lab, ops: Sequence[LinearSmall], columns: int, repeats: int) -> Callable[[], int]:
    """``repeats`` passes over all of ``ops``."""

    def work() -> int:
        for _ in range(repeats):
            for op in ops:
                lab.launch(op, columns)
        return repeats * len(ops)

    return work


def measure(lab: Lab, kinds: Sequence[str], columns_list: Sequence[int], check: bool) -> None:
    """Print a table for the geometry in force."""
    arena = Arena(lab.device, WORKSPACE_BYTES)
    workspace = Workspace(arena, WORKSPACE_BYTES)
    workspace.clear(lab.device, lab.stream)
    ops = {kind: lab.ops(arena, workspace, kind, max(columns_list)) for kind in kinds}
    for kind in kinds:
        n_bytes = sum(m.n_bytes for m in ops[kind][0].matrices)
        cells = []
        for columns in columns_list:
            error = f" e{lab.check(ops[kind][0], columns):.2f}" if check else ""
            us = lab.time_us(chain(lab, ops[kind], columns, 3))
            share = n_bytes / us / 1e3 / lab.read_gbps
            cells.append(f"{columns}: {us:.1f}us {100 * share:.1f}%{error}")
        print(f"  {kind:13s} {n_bytes / 1e6:6.1f} MB  " + "  ".join(cells), flush=True)
    if all(kind in kinds for kind in LAYER):
        layers = [op for group in zip(*(ops[kind] for kind in LAYER), strict=True) for op in group]
        n_bytes = sum(m.n_bytes for kind in LAYER for m in ops[kind][0].matrices)
        one, cells = 0.0, []
        for columns in columns_list:
            time.sleep(REST_SECONDS)
            us = lab.time_us(chain(lab, layers, columns, 3)) * len(LAYER)
            one = one or us
            cells.append(f"{columns}: {us:.1f}us {100 * n_bytes / us / 1e3 / lab.read_gbps:.1f}% x{us / one:.3f}")
        print(f"  {'layer':13s} {n_bytes / 1e6:6.1f} MB  " + "  ".join(cells), flush=True)
    print("  clocks", clocks(), flush=True)
    arena.close()


def clocks() -> str:
    """SM and memory clock in MHz and the power draw, as nvidia-smi reads them now."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", default="1,4,8,16,32")
    parser.add_argument("--kinds", default=",".join(LAYER))
    parser.add_argument("--set", action="append", default=[], help="field=value,... of LinearSmallTuning")
    parser.add_argument("--check", action="store_true", help="check every geometry, not only the table's")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = int(np.random.default_rng().integers(2**31)) if options.seed is None else options.seed
    kinds, columns = options.kinds.split(","), [int(c) for c in options.columns.split(",")]
    lab = Lab(kinds, seed)
    print(f"{lab.device.name}, {lab.device.n_sms} SMs, read {lab.read_gbps:.0f} GB/s, seed {seed}", flush=True)
    for i, text in enumerate(["", *options.set]):
        changes = {key: int(value) for key, value in (item.split("=") for item in text.split(",") if item)}

        def tuned(
            device: CudaDevice,
            size: int,
            n_tile_rows: int,
            formats: frozenset[TileFormat],
            changes: dict[str, int] = changes,
        ) -> LinearSmallTuning:
            found = linear_small_tuning(device, size, n_tile_rows, formats)
            mine = "large." if n_tile_rows >= MIN_LARGE_TILE_ROWS else "small."
            wanted = {key.removeprefix(mine): value for key, value in changes.items()}
            return dataclasses.replace(found, **{key: value for key, value in wanted.items() if "." not in key})

        setattr(linear_small, "linear_small_tuning", tuned)  # noqa: B010 - the lab's own geometry in the product's place
        print(text or "table", flush=True)
        try:
            measure(lab, kinds, columns, check=options.check or i == 0)
        except Exception as error:  # a geometry that does not fit must not end the run
            print(f"  {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
