"""Time the attention kernels of a 27B-sized model: python scripts/lab_attention.py [kernels=DIR] [check] [decode] ...

DIR holds other versions of the kernels for the parts behind it: check, decode, prefill, short,
chunk (int8 prompts behind 0, 7,168 and 130,048 tokens, with a check).

Rounds run as a graph of 16 layers, each with its own pages (cold in L2), with programmatic edges; shares are of the
measured read bandwidth for the bytes of the cached tokens, and of the measured bf16 ``mma.sync`` rate.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ninfer_runtime.backends.cuda.compiler import INCLUDE_FOLDER, Compiler, Sources
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops import attention_decode, attention_prefill
from ninfer_runtime.backends.cuda.ops.attention import attention_geometry, rope_table
from ninfer_runtime.backends.cuda.ops.kv_cache import HEAD_DIM, KvFormat, KvLayout
from ninfer_runtime.backends.cuda.ops.probes import mma_tflops, read_gbps
from ninfer_runtime.backends.cuda.ops.round_state import ROW_STATE
from ninfer_runtime.config import PAGE_TOKENS
from tests.runtime.cuda.attention_rig import Rig, Row, check_written, largest_error, model, run_decode, run_prefill

SPEC = model(24, 4)
LAYERS = 16
REPEATS = 5
FORMATS: tuple[KvFormat, ...] = ("int8", "bf16")
DECODES = [(1, 1, 0), (1, 1, 500), (1, 1, 7_680), (1, 1, 65_536), (1, 1, 250_000), (1, 4, 500), (1, 4, 7_680)]
DECODES += [
    (1, 4, 65_536),
    (1, 4, 250_000),
    (1, 6, 65_536),
    (4, 1, 7_680),
    (8, 1, 7_680),
    (8, 1, 65_536),
    (8, 4, 7_680),
]
PREFILLS = [(1024, 0), (1024, 8_192 - 1024), (1024, 131_072 - 1024)]


class Lab:
    """A device, a pool of one format, and projections of up to 1024 tokens."""

    def __init__(self, device: CudaDevice, format: KvFormat, n_tokens: int, n_layers: int) -> None:
        self.device = device
        self.stream = device.stream()
        self.geometry = attention_geometry(SPEC, format)
        self.layout = KvLayout(n_layers, 4, -(-n_tokens // PAGE_TOKENS) + 16, format)
        self.pointers: list[int] = []
        self.pool = self.allocate(self.layout.n_bytes)
        random = np.random.default_rng(0)
        self.fill_pool(random)
        self.stride = self.geometry.projection_rows
        words = random.standard_normal(1024 * self.stride).astype(np.float32).view(np.uint32) >> 16
        self.qk, self.gv = self.put(words.astype(np.uint16)), self.put(words[::-1].astype(np.uint16))
        self.norm = self.put(np.zeros(HEAD_DIM, np.uint16))
        self.rope = self.put(rope_table(SPEC))
        self.out = self.allocate(1024 * 24 * HEAD_DIM * 2)
        self.pages = random.permutation(self.layout.n_pages).astype(np.int32)

    def allocate(self, n_bytes: int) -> int:
        """Device memory until ``close``."""
        self.pointers.append(self.device.allocate(n_bytes))
        return self.pointers[-1]

    def fill_pool(self, random: np.random.Generator) -> None:
        """Random codes, scales of 1/64: how fast products are depends on the bits that change."""
        layout = self.layout
        codes = random.integers(0, 256, 1 << 24, np.uint8)
        if layout.format == "bf16":
            codes = (random.standard_normal(1 << 23).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        scales = np.full(1 << 20, 0x2400, np.uint16)
        for plane, offset in enumerate(layout.plane_offsets):
            content = (codes if plane < 2 else scales).view(np.uint8)
            source, size = self.put(content), layout.plane_page_bytes[plane] * layout.n_pages
            for layer in range(layout.n_layers):
                for at in range(0, size, content.size):
                    target = self.pool + layer * layout.layer_bytes + offset + at
                    self.device.copy(target, source, min(content.size, size - at), self.stream)

    def put(self, array: np.ndarray) -> int:
        """A copy on the device."""
        array = np.ascontiguousarray(array)
        pointer = self.allocate(array.nbytes)
        self.device.upload(pointer, array)
        return pointer

    def microseconds(self, work: Callable[[], None]) -> float:
        """Median time of what ``work`` queues, as a graph."""
        work()
        self.device.synchronize()
        with self.device.capture(self.stream) as graph:
            work()
        times = []
        for _ in range(REPEATS + 1):
            begin, end = self.device.event(timing=True), self.device.event(timing=True)
            begin.record(self.stream)
            graph.launch(self.stream)
            end.record(self.stream)
            end.synchronize()
            times.append(1e3 * end.elapsed_ms(begin))
        graph.close()
        return float(np.median(times[1:]))

    def decode(self, n_rows: int, q: int, context: int) -> float:
        """Microseconds of a layer: attention and merge."""
        width = -(-(context + q) // PAGE_TOKENS)
        states = np.zeros(n_rows, ROW_STATE)
        states["start"], states["n_columns"] = context, q
        table = np.resize(self.pages, (n_rows, width))
        size = attention_decode.workspace_bytes(self.geometry, self.device.n_sms, n_rows, q)
        arguments = {
            "n_rows": n_rows, "rows": self.put(states), "page_table": self.put(table), "pages_per_row": width,
            "qk": self.qk, "qk_stride": self.stride, "gv": self.gv, "gv_stride": self.stride, "q_norm": self.norm,
            "k_norm": self.norm, "rope": self.rope, "out": self.out, "out_stride": 24 * HEAD_DIM,
            "workspace": self.allocate(size),
        }  # fmt: skip
        op = attention_decode.AttentionDecode(self.device, self.geometry, q)

        def layers() -> None:
            for layer in range(self.layout.n_layers):
                op.launch(self.stream, planes=self.layout.planes(self.pool, layer), pdl=True, **arguments)

        return self.microseconds(layers) / self.layout.n_layers

    def prefill(self, n_tokens: int, start: int) -> float:
        """Microseconds of a layer: append, attention and merge."""
        positions = np.tile(np.arange(start, start + n_tokens, dtype=np.int32), 3)
        arguments = {
            "n_tokens": n_tokens, "start": start, "positions": self.put(positions), "pages": self.put(self.pages),
            "qk": self.qk, "qk_stride": self.stride, "gv": self.gv, "gv_stride": self.stride, "q_norm": self.norm,
            "k_norm": self.norm, "rope": self.rope, "out": self.out, "out_stride": 24 * HEAD_DIM,
            "workspace": self.allocate(attention_prefill.workspace_bytes(self.geometry, self.device.n_sms, n_tokens)),
        }  # fmt: skip
        op = attention_prefill.AttentionPrefill(self.device, self.geometry)

        def layers() -> None:
            for layer in range(self.layout.n_layers):
                op.launch(self.stream, planes=self.layout.planes(self.pool, layer), **arguments)

        return self.microseconds(layers) / self.layout.n_layers

    def close(self) -> None:
        """Free everything."""
        self.device.synchronize()
        for pointer in self.pointers:
            self.device.free(pointer)


def check(device: CudaDevice) -> None:
    """A few sizes against the oracle of the tests."""
    torch.set_num_threads(8)
    for format in FORMATS:
        for rows, q in (
            ([Row(5000, 1)], 1),
            ([Row(4095, 4), Row(63, 4, 7), Row(0, 3), Row(700, 0)], 4),
            ([Row(9000, 6)], 6),
        ):
            outcome = run_decode(Rig(device, SPEC, format, 400, 1), rows, q)
            check_written(outcome)
            print(f"{format} decode q={q} {[row.start for row in rows]}: error {largest_error(outcome):.1e}")
        for start, n_tokens in ((0, 70), (4000, 300), (63, 1024)):
            positions = torch.arange(start, start + n_tokens).expand(3, -1)
            outcome = run_prefill(Rig(device, SPEC, format, 200, 1), start, n_tokens, positions, range(0, n_tokens, 23))
            check_written(outcome)
            print(f"{format} prefill {start}+{n_tokens}: error {largest_error(outcome):.1e}")


def decode(device: CudaDevice) -> None:
    """Rounds of several shapes."""
    read = read_gbps(device, device.stream()).value
    print(f"read {read:.0f} GB/s")
    for format in FORMATS:
        lab = Lab(device, format, 8 * 65_600, LAYERS)
        for n_rows, q, context in DECODES:
            us = lab.decode(n_rows, q, context)
            moved = lab.layout.token_bytes / LAYERS * context * n_rows
            print(
                f"{format} rows {n_rows} columns {q} context {context:6d}: {us:7.1f} us, "
                f"{moved / us / 1e3:6.0f} GB/s, {1e-1 * moved / us / read:5.1f} %"
            )
        lab.close()


def prefill(device: CudaDevice) -> None:
    """Chunks of several lengths."""
    mma = mma_tflops(device, device.stream()).value
    print(f"mma {mma:.0f} TFLOP/s")
    for format in FORMATS:
        lab = Lab(device, format, 131_072, 2)
        for n_tokens, start in PREFILLS:
            us = lab.prefill(n_tokens, start)
            flops = 4.0 * HEAD_DIM * 24 * sum(range(start + 1, start + n_tokens + 1))
            print(
                f"{format} prefill {n_tokens} after {start:6d}: {us:8.1f} us, {flops / us / 1e6:5.0f} TFLOP/s, "
                f"{1e-4 * flops / us / mma:5.1f} %"
            )
        lab.close()


def chunk(device: CudaDevice) -> None:
    """INT8 prompts behind few and many tokens: microseconds, TFLOP/s and the error of a small one."""
    lab = Lab(device, "int8", 131_072, 1)
    words = []
    for start in (0, 7_168, 131_072 - 1024):
        us = lab.prefill(1024, start)
        flops = 4.0 * HEAD_DIM * 24 * sum(range(start + 1, start + 1025))
        words.append(f"{start}: {us:.0f} us {flops / us / 1e6:.0f} TFLOP/s")
    lab.close()
    positions = torch.arange(63, 363).expand(3, -1)
    outcome = run_prefill(Rig(device, SPEC, "int8", 200, 1), 63, 300, positions, range(0, 300, 23))
    check_written(outcome)
    print("int8 chunk", *words, f"error {largest_error(outcome):.1e}", sep="; ", flush=True)


def short(device: CudaDevice) -> None:
    """The two sizes that versions are compared by."""
    for format in FORMATS:
        lab = Lab(device, format, 65_536, 4)
        times = [lab.decode(1, q, context) for q in (1, 4) for context in (0, 7_680, 65_000)]
        times += [lab.prefill(1024, start) for start in (0, 31_744)]
        print(format, "decode", *(f"{us:.1f}" for us in times[:6]), "prefill", *(f"{us:.0f}" for us in times[6:]))
        lab.close()


PARTS = {"check": check, "decode": decode, "prefill": prefill, "short": short, "chunk": chunk}


def main() -> None:
    """Run the parts named on the command line, in order."""
    device = CudaDevice()
    for name in sys.argv[1:] or ["check", "decode", "prefill"]:
        if name.startswith("kernels="):
            folder = Path(name.removeprefix("kernels="))
            device.close()
            sources = Sources(folder, INCLUDE_FOLDER)
            device = CudaDevice(compiler=Compiler("sm_90a", sources=sources, report=lambda line: None))
            print(folder)
        else:
            PARTS[name](device)
    device.close()


if __name__ == "__main__":
    main()
