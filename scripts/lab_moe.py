"""Time the launches of a prompt chunk's experts at the sizes of a 35B-A3B: python scripts/lab_moe.py [tokens ...].

Banks of several layers, each larger than the L2, so that weights come from memory. Prints microseconds per launch, the
rate of the multiplications that tokens need, and of the bytes of weights.
"""

import sys
from collections.abc import Callable, Sequence

import numpy as np

from ninfer_runtime.backends.cuda.arena import Arena, ArenaPlan, Taker
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops.moe_prefill import MoePrefill, PromptExperts, specs
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride
from ninfer_runtime.backends.cuda.weights import MlpTensors, MoeTensors

EXPERTS, PER_TOKEN, HIDDEN, WIDTH = 256, 8, 2048, 512
TOKENS = (1024, 4096)
LAYERS = 5
REPEATS = 5
SCALE_BYTE = 0x30
"""No binary16 of two bytes up to this is as large as 0.2."""


def tensors(formats: tuple[str, str], taker: Taker) -> MoeTensors:
    """One layer's matrices, gate and up and down of the routed experts in ``formats``."""

    def place(
        name: str, matrix_format: str, n_rows: int, k: int, glu: bool = False, n_experts: int = 1
    ) -> PackedMatrix:
        matrix = PackedMatrix(name, matrix_format, n_rows * n_experts, k, interleaved=glu, n_experts=n_experts)
        return matrix.at(taker.take(name, matrix.n_bytes))

    return MoeTensors(
        router=place("router", "BF16", EXPERTS + 1, HIDDEN),
        routed_gate_up=place("routed_gate_up", formats[0], 2 * WIDTH, HIDDEN, True, EXPERTS),
        routed_down=place("routed_down", formats[1], HIDDEN, WIDTH, False, EXPERTS),
        shared=MlpTensors(
            place("shared_gate_up", "W8G32_F16S", 2 * WIDTH, HIDDEN, True),
            place("shared_down", "W8G32_F16S", HIDDEN, WIDTH),
        ),
        experts_per_token=PER_TOKEN,
    )


class Lab:
    """Layers with random weights, activations of one chunk and its routing by random logits."""

    def __init__(self, device: CudaDevice, n_tokens: int, formats: tuple[str, str], skew: float = 0.0) -> None:
        self.device, self.stream, self.n_tokens = device, device.stream(), n_tokens
        plan = ArenaPlan()
        self._lay_out(plan, formats)
        self.arena = Arena(device, plan.n_bytes)
        self.layers, self.memory, self.x, self.normed = self._lay_out(self.arena, formats)
        noise = np.random.default_rng(1)
        begin, end = self.layers[0].router.pointer, self.x
        block = noise.integers(0, SCALE_BYTE, 1 << 24, np.uint8)
        for at in range(begin, end, block.size):
            device.upload(at, block[: end - at])
        rows = noise.standard_normal((n_tokens, activation_stride(HIDDEN)), np.float32)
        device.upload(self.normed, (rows.view(np.uint32) >> 16).astype(np.uint16))
        popular = skew * noise.standard_normal(EXPERTS + 1)
        self.logits = (noise.standard_normal((n_tokens, EXPERTS + 1)) + popular).astype(np.float32)
        device.prepare(specs(self.layers[0]))
        self.ops = [MoePrefill(device, layer, self.memory, max_tokens=n_tokens) for layer in self.layers]
        device.upload(self.memory.logits, self.logits)
        self.ops[0].route(self.stream, n_tokens)
        self.stream.synchronize()

    def _lay_out(self, taker: Taker, formats: tuple[str, str]) -> tuple[list[MoeTensors], PromptExperts, int, int]:
        layers = [tensors(formats, taker) for _ in range(LAYERS)]
        x = taker.take("x", self.n_tokens * HIDDEN * 4)
        memory = PromptExperts.take(taker, layers[0], self.n_tokens)
        normed = taker.take("normed", self.n_tokens * activation_stride(HIDDEN) * 2)
        return layers, memory, x, normed

    def microseconds(self, work: Callable[[MoePrefill], None]) -> float:
        """Median time of ``work``, one layer after the other."""
        times = []
        for _ in range(REPEATS + 1):
            begin, end = self.device.event(timing=True), self.device.event(timing=True)
            begin.record(self.stream)
            for op in self.ops:
                work(op)
            end.record(self.stream)
            end.synchronize()
            times.append(1e3 * end.elapsed_ms(begin) / LAYERS)
        return float(np.median(times[1:]))

    def report(self, names: Sequence[str] = ()) -> None:
        """A line for each launch, or for those of ``names``."""
        n, m, first = self.n_tokens, self.memory, self.layers[0]
        rows = activation_stride(HIDDEN), activation_stride(WIDTH)
        works: dict[str, tuple[Callable[[MoePrefill], None], float, int]] = {
            "router": (lambda op: op.router(self.stream, n, self.normed), EXPERTS * HIDDEN, 0),
            "route, group": (lambda op: op.route(self.stream, n), 0, 0),
            "gate_up": (
                lambda op: op.gate_up.launch(self.stream, self.normed, rows[0], m.inner, rows[1]),
                PER_TOKEN * 2 * WIDTH * HIDDEN,
                first.routed_gate_up.n_bytes,
            ),
            "down": (
                lambda op: op.down.launch(self.stream, m.inner, rows[1], m.routed, HIDDEN),
                PER_TOKEN * WIDTH * HIDDEN,
                first.routed_down.n_bytes,
            ),
            "shared": (lambda op: op.shared(self.stream, self.normed), 3 * WIDTH * HIDDEN, 0),
            "reduce": (lambda op: op.reduce(self.stream, n, self.x), 0, 0),
            "all": (
                lambda op: op.launch(self.stream, n, self.normed, self.x),
                (PER_TOKEN + 1) * 3 * WIDTH * HIDDEN + EXPERTS * HIDDEN,
                first.routed_gate_up.n_bytes + first.routed_down.n_bytes,
            ),
        }
        self.device.upload(m.logits, self.logits)
        for name, (work, weights, n_bytes) in works.items():
            if names and name not in names:
                continue
            time = self.microseconds(work)
            rates = f"{2e-6 * n * weights / time:6.1f} TFLOP/s {n_bytes / time / 1e3:7.0f} GB/s"
            print(f"{n:5} tokens {name:12} {time:8.1f} us {rates}", flush=True)

    def close(self) -> None:
        """Give the memory back."""
        self.stream.synchronize()
        self.arena.close()


if __name__ == "__main__":
    card = CudaDevice()
    for count in [int(text) for text in sys.argv[1:]] or TOKENS:
        lab = Lab(card, count, ("Q4G64_F16S", "Q5G64_F16S"))
        lab.report()
        lab.close()
