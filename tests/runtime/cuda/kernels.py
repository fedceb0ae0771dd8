"""Small kernels written for these tests, in folders of their own, and compilers for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ninfer_runtime.backends.cuda.compiler import Compiler, KernelSpec, Sources

COPY = """// y[i] = SCALE * x[i]
#include "factor.cuh"
struct CopyParams { const float* x; float* y; int n; };
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) copy(const __grid_constant__ CopyParams p) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < p.n) p.y[i] = factor() * p.x[i];
}
"""
FACTOR = "#pragma once\n__device__ inline float factor() { return SCALE; }\n"

HEAVY = """
struct HeavyParams { const float* x; float* y; int n; };
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) spills(const __grid_constant__ HeavyParams p) {
    float v[400];
    for (int i = 0; i < 400; i++) v[i] = p.x[i * THREADS + threadIdx.x];
    __syncthreads();
    for (int j = 0; j < p.n; j++) {
#pragma unroll
        for (int i = 0; i < 400; i++) v[i] = v[i] * v[(i + 7) % 400] + 1.0f;
    }
#pragma unroll
    for (int i = 0; i < 400; i++) p.y[i * THREADS + threadIdx.x] = v[i];
}
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) indexed(const __grid_constant__ HeavyParams p) {
    __shared__ float scratch[64];
    float v[16];
    scratch[threadIdx.x & 63] = p.x[0];
    __syncthreads();
    for (int i = 0; i < 16; i++) v[i] = p.x[i * THREADS + threadIdx.x] + scratch[i];
    for (int j = 0; j < p.n; j++) v[j & 15] += v[(j * 3) & 15];
    for (int i = 0; i < 16; i++) p.y[i * THREADS + threadIdx.x] = v[i];
}
"""

MATRIX = """
struct MatrixParams { const uint4* a; float* y; int n; };
using u32 = unsigned int;
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) product(const __grid_constant__ MatrixParams p) {
    float d[4] = {};
#pragma unroll 1
    for (int i = threadIdx.x; i < p.n; i += 32) {
        const uint4 a = p.a[i];
#pragma unroll
        for (int j = 0; j < 6; j++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%4,%5}, "
                         "{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                         : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w));
    }
#pragma unroll 1
    for (int i = 0; i < p.n; i++) p.y[i] += d[i & 1] + d[2] + d[3];
}
"""

FILES = {"kernels/copy.cu": COPY, "include/factor.cuh": FACTOR, "kernels/heavy.cu": HEAVY, "kernels/matrix.cu": MATRIX}
COPY_SPEC = KernelSpec("copy.cu", "copy", (("SCALE", "2.0f"),), 128)


def write_sources(folder: Path) -> Sources:
    """The files above under ``folder``, with any changed texts already there left alone."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(text)
    return Sources(folder / "kernels", folder / "include")


def silent(line: str) -> None:
    """The reporter that shows nothing."""


def compiler_in(
    place: Path,
    arch: str = "sm_120a",
    *,
    folder: Path | None = None,
    line_info: bool = False,
    report: Callable[[str], None] = silent,
) -> Compiler:
    """A compiler of the sources in ``place`` that keeps its cubins there too, unless in ``folder``."""
    sources = write_sources(place)
    return Compiler(arch, sources=sources, folder=folder or place / "cache", line_info=line_info, report=report)
