"""Could the CPU compute networks faster than the link brings them? A layer's feed-forward network of the 27B in torch.

    python scripts/measure_ffn_cpu.py [--link 27] [--columns 1 4] [--threads N] [--small]

Prints what each form of the weights takes per layer, the rate at which this host reads memory, and what a split of the
streamed networks between the link and the CPU could gain where rounds are as long as their copies. The copies read host
memory too: what they take is not there for the CPU. Where products are the longer bound, no split gains anything. Last:
the same for hosts of other memory, if the CPU kept up with it.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ninfer_runtime.bench import host

HIDDEN, WIDTH = 5120, 17_408
PACKED_BYTES = 153_190_400
"""Of a layer as it crosses the link: Q4 gate and up, Q5 down."""
GROUP = 64
SAMPLES = 7
HOSTS = {"DDR4-3200, two channels": 41e9, "DDR5-5600, two channels": 70e9}
"""Four fifths of what the modules transfer, bytes per second."""

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    """A network in one form of its weights: ``bytes_`` read per call, both products."""

    name: str
    bytes_: int
    gate_up: Product
    down: Product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [columns, hidden] through the network."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up)


def bf16(hidden: int, width: int) -> Form:
    """Weights as bfloat16."""
    first, second = torch.randn(2 * width, hidden).bfloat16(), torch.randn(hidden, width).bfloat16()
    return Form("bf16", 6 * hidden * width, lambda x: x @ first.T, lambda x: x @ second.T)


def int8(hidden: int, width: int) -> Form:
    """One scale per row, activations quantized on the way: torch's own dynamic int8 product."""

    def product(n_rows: int, k: int) -> Product:
        weights = torch.quantize_per_channel(
            torch.randn(n_rows, k), torch.full((n_rows,), 0.03), torch.zeros(n_rows, dtype=torch.int64), 0, torch.qint8
        )
        packed = torch.ops.quantized.linear_prepack(weights, None)
        return lambda x: torch.ops.quantized.linear_dynamic(x.float(), packed, False).bfloat16()

    return Form("int8", 3 * hidden * width, product(2 * width, hidden), product(hidden, width))


def int4(hidden: int, width: int) -> Form:
    """Groups of 64, bfloat16 activations: torch's int4 product for CPUs."""

    def product(n_rows: int, k: int) -> Product:
        codes = torch.randint(0, 16, (n_rows, k), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.full((k // GROUP, n_rows, 2), 0.03, dtype=torch.bfloat16)
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)

    n_bytes = 3 * hidden * width // 2 + 3 * hidden * width // GROUP * 4
    return Form("int4", n_bytes, product(2 * width, hidden), product(hidden, width))


def seconds_of(form: Form, columns: int, hidden: int) -> float:
    """The fastest of some calls after one."""
    x = torch.randn(columns, hidden).bfloat16()
    times = []
    for _ in range(1 + SAMPLES):
        began = time.perf_counter()
        form(x)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def gain(cpu_seconds: float, n_bytes: int, link: float, memory: float, packed_bytes: int) -> float:
    """How many times as fast streamed networks are with a part of them on the CPU, which reads what copies leave."""
    left = max(0.0, memory - link)
    alone = packed_bytes / link
    if left == 0.0:
        return 1.0
    beside = max(cpu_seconds, n_bytes / left)
    return 1 + alone / beside


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", type=float, default=27.0, help="GB/s of the card's link")
    parser.add_argument("--columns", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--small", action="store_true", help="a network of a hundredth of the size")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore", UserWarning)  # torch says that its quantized tensors will go
    scale, link = 8 if given.small else 1, given.link * 1e9
    hidden, width, packed_bytes = HIDDEN // scale, WIDTH // scale, PACKED_BYTES // scale**2
    memory = host.read_gbps(256 << 20) * 1e9
    print(f"{torch.get_num_threads()} threads, memory read at {memory / 1e9:.1f} GB/s, link {link / 1e9:.1f} GB/s")
    print(f"a layer crosses the link in {packed_bytes / link * 1e3:.2f} ms ({packed_bytes / 1e6:.1f} MB)")
    print(f"{'form':<6}{'columns':>8}{'MB':>8}{'ms':>9}{'GB/s':>8}{'gain where copies bound':>26}")
    sizes = {}
    for make in (bf16, int8, int4):
        try:
            form = make(hidden, width)
            for n in given.columns:
                seconds = seconds_of(form, n, hidden)
                split = gain(seconds, form.bytes_, link, memory, packed_bytes)
                rate = form.bytes_ / seconds / 1e9
                print(f"{form.name:<6}{n:>8}{form.bytes_ / 1e6:>8.1f}{seconds * 1e3:>9.2f}{rate:>8.1f}{split:>25.2f}x")
            sizes[form.name] = form.bytes_
        except (AttributeError, RuntimeError) as error:
            print(f"{make.__name__:<6} not in this torch: {str(error).splitlines()[0][:80]}", file=sys.stderr)
    for name, rate in HOSTS.items():
        gains = (f"{form} {gain(0.0, n, link, rate, packed_bytes):.2f}x" for form, n in sizes.items())
        print(f"{name} at {rate / 1e9:.0f} GB/s, a CPU that keeps up: {', '.join(gains)}")


if __name__ == "__main__":
    main()
