// out[i] = a[i] + b[i]     a, b, out: [n] fp32, 4-byte aligned; one thread per element
// The example of a kernel with its test; exact.
#include "common.cuh"

struct VectorAddParams {
    const float* a;
    const float* b;
    float* out;
    int n;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) vector_add(const __grid_constant__ VectorAddParams p) {
    grid_dependency_wait();
    const int i = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
    if (i < p.n) p.out[i] = p.a[i] + p.b[i];
    grid_dependency_launch();
}
