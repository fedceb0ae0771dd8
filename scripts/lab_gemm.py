"""Speed and correctness of the prefill matrix products on the card at hand, as shares of the mma probe of the same run.

    python scripts/lab_gemm.py [--tokens 1024,2048] [--kernels FOLDER]… [--only NAME]

For each shape: median time over rotating copies of the weights, TFLOP/s, share of the probe, and the error of some tile
rows against float64. ``--kernels`` may be repeated: other folders with a ``linear_large.cu`` to compare.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ninfer_runtime.backends.cuda.compiler import INCLUDE_FOLDER, KERNEL_FOLDER, Compiler, Sources
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops import probes
from ninfer_runtime.backends.cuda.ops.linear_large import (
    Epilogue,
    LinearLarge,
    Output,
    clear_workspace,
    specs,
    workspace_bytes,
)
from ninfer_runtime.backends.cuda.packing import TILE_ROWS, PackedMatrix, unpack_matrix

Q4, Q5, Q6, W8, BF16 = "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S", "BF16"
CHECKED_TILE_ROWS = 4


@dataclass(frozen=True)
class Shape:
    """A launch of the 27B model: (format, rows) of its matrices, K and epilogue."""

    name: str
    matrices: tuple[tuple[str, int], ...]
    k: int
    epilogue: Epilogue

    @property
    def flops_per_token(self) -> int:
        """2 N K of all matrices."""
        return 2 * self.k * sum(n for _, n in self.matrices)


SHAPES = (
    Shape("gate_up", ((Q4, 34816),), 5120, Epilogue.SWIGLU),
    Shape("down", ((Q5, 5120),), 17408, Epilogue.RESIDUAL),
    Shape("gdn_in", ((Q4, 4096), (Q5, 12288), (BF16, 48), (BF16, 48)), 5120, Epilogue.STORE),
    Shape("attention_in", ((Q4, 7168), (Q5, 7168)), 5120, Epilogue.STORE),
    Shape("output", ((Q5, 5120),), 6144, Epilogue.RESIDUAL),
    Shape("value_z", ((Q5, 12288),), 5120, Epilogue.STORE),
    Shape("query_key", ((Q4, 4096),), 5120, Epilogue.STORE),
    Shape("q6", ((Q6, 12288),), 5120, Epilogue.STORE),
    Shape("w8", ((W8, 12288),), 5120, Epilogue.STORE),
    Shape("bf16", ((BF16, 12288),), 5120, Epilogue.STORE),
)
MODEL = {"gate_up": 64, "down": 64, "gdn_in": 48, "attention_in": 16, "output": 64}  # launches per pass of the 27B


def random_packed(matrix: PackedMatrix, generator: torch.Generator) -> torch.Tensor:
    """Packed bytes on the card: any codes, scales that give outputs of order one."""
    tile = matrix.tile
    blocks = (matrix.n_tiles * matrix.k_steps, tile.block_bytes)
    if not tile.group:
        values = torch.randn(blocks[0], blocks[1] // 2, device="cuda", generator=generator) / matrix.k**0.5
        words: torch.Tensor = values.to(torch.bfloat16).view(torch.uint8)
        return words
    packed = torch.randint(0, 256, blocks, dtype=torch.uint8, device="cuda", generator=generator)
    scales = torch.rand(blocks[0], tile.scale_bytes // 2, device="cuda", generator=generator) * 1.5 + 0.5
    scales = scales / (2 ** (tile.bits - 1) * matrix.k**0.5)
    packed[:, -tile.scale_bytes :] = scales.to(torch.float16).view(torch.uint8)
    return packed


def sampled_rows(matrix: PackedMatrix, packed: torch.Tensor) -> Iterator[tuple[list[int], torch.Tensor]]:
    """(rows of the matrix, float64 values [rows, k]) of some tile rows; SwiGLU: gate rows, then up rows, of a tile."""
    per_tile = packed.reshape(matrix.n_tiles, -1)
    for tile_row in np.unique(np.linspace(0, matrix.n_tiles - 1, CHECKED_TILE_ROWS).astype(int)).tolist():
        part = PackedMatrix("part", matrix.format, TILE_ROWS, matrix.k)
        codes, scales = unpack_matrix(part, per_tile[tile_row].cpu().numpy())
        if scales is None:
            words = torch.from_numpy(codes.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
            values = words.double()
        else:
            values = torch.from_numpy(codes * np.repeat(scales.view(np.float16), matrix.tile.group, 1)[:, : matrix.k])
        yield list(range(tile_row * TILE_ROWS, (tile_row + 1) * TILE_ROWS)), values.double().cuda()


def relative_error(
    shape: Shape, matrix: PackedMatrix, packed: torch.Tensor, x: torch.Tensor, out: torch.Tensor
) -> float:
    """|out − reference| / |reference| over the sampled rows; the residual epilogue starts from zero."""
    difference = norm = 0.0
    for rows, values in sampled_rows(matrix, packed):
        y = x.double() @ values.T
        if shape.epilogue is Epilogue.SWIGLU:
            half = TILE_ROWS // 2
            y = torch.nn.functional.silu(y[:, :half]) * y[:, half:]
            rows = list(range(rows[0] // 2, rows[0] // 2 + half))
        keep = [i for i, row in enumerate(rows) if row < matrix.n_outputs]
        found = out[:, [rows[i] for i in keep]].double()
        difference += float((found - y[:, keep]).square().sum())
        norm += float(y[:, keep].square().sum())
    return float((difference / norm) ** 0.5)


def measure(device: CudaDevice, shape: Shape, n_tokens: int, workspace: int) -> tuple[float, float]:
    """(milliseconds, relative error) of one launch."""
    generator = torch.Generator("cuda").manual_seed(n_tokens)
    stream = device.stream()
    swiglu = shape.epilogue is Epilogue.SWIGLU
    plain = [PackedMatrix(f"m{i}", f, n, shape.k, interleaved=swiglu) for i, (f, n) in enumerate(shape.matrices)]
    n_copies = 1 + -(-3 * device.l2_bytes // sum(m.n_bytes for m in plain))
    x = torch.randn(n_tokens, shape.k, device="cuda", generator=generator).to(torch.bfloat16)
    fp32 = shape.epilogue is Epilogue.RESIDUAL
    outs = [
        torch.full((n_tokens, m.n_outputs), torch.nan, device="cuda", dtype=torch.float32 if fp32 else torch.bfloat16)
        for m in plain
    ]
    outputs = [Output(out.data_ptr(), "fp32" if fp32 else "bf16") for out in outs]
    copies = [[random_packed(m, generator) for m in plain] for _ in range(n_copies)]
    ops = [
        LinearLarge(
            device,
            [m.at(packed.data_ptr()) for m, packed in zip(plain, copy, strict=True)],
            shape.epilogue,
            max_tokens=n_tokens,
            workspace=workspace,
        )
        for copy in copies
    ]
    if fp32:
        outs[0].zero_()
    torch.cuda.synchronize()
    ops[0].launch(stream, n_tokens, x.data_ptr(), shape.k, outputs)
    stream.synchronize()
    error = max(relative_error(shape, m, packed, x, out) for m, packed, out in zip(plain, copies[0], outs, strict=True))

    def work() -> None:
        for op in ops:
            op.launch(stream, n_tokens, x.data_ptr(), shape.k, outputs)

    return probes.median_ms(device, stream, work, samples=7, warm_up=2) / n_copies, error


def main() -> None:
    """Print one row per shape, token count and kernel folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1024")
    parser.add_argument("--kernels", action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    chosen = [shape for shape in SHAPES if not options.only or shape.name in options.only]
    for folder in options.kernels or [KERNEL_FOLDER]:
        folder = Path(folder)
        device = CudaDevice(compiler=Compiler("sm_90a", sources=Sources(folder, INCLUDE_FOLDER)))
        matrices = {
            s: [PackedMatrix("m", f, n, s.k, interleaved=s.epilogue == 1) for f, n in s.matrices] for s in chosen
        }
        device.prepare(spec for s in chosen for spec in specs(matrices[s], s.epilogue))
        stream = device.stream()
        probe = probes.mma_tflops(device, stream)
        print(
            f"{folder}: {device.name}, {device.n_sms} SMs, mma probe {probe.value:.0f} TFLOP/s ({probe.shape})",
            flush=True,
        )
        workspace = device.allocate(workspace_bytes(device))
        clear_workspace(device, workspace)
        for n_tokens in map(int, options.tokens.split(",")):
            total_ms = total_flops = 0.0
            for shape in chosen:
                ms, error = measure(device, shape, n_tokens, workspace)
                rate = shape.flops_per_token * n_tokens / ms / 1e9
                share = rate / probe.value
                print(
                    f"T={n_tokens:5d} {shape.name:13s} {ms * 1000:8.1f} us {rate:6.1f} TFLOP/s {share:6.1%} "
                    f"error {error:.1e}",
                    flush=True,
                )
                total_ms += MODEL.get(shape.name, 0) * ms
                total_flops += MODEL.get(shape.name, 0) * shape.flops_per_token * n_tokens
            if total_ms:
                share = total_flops / total_ms / 1e9 / probe.value
                print(f"T={n_tokens:5d} 27B launches together: {total_ms:.1f} ms, {share:.1%} of the probe", flush=True)
        device.free(workspace)


if __name__ == "__main__":
    main()
