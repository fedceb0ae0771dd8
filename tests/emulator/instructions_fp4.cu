// The block-scaled FP4 product of ptx.cuh: every lane's operands, scales and results as plain arrays [lane][words].
// Only for sm_120a and its family, so in a file of its own. Layouts are checked against fp4_model.py.
#include "common.cuh"

struct Fp4ProbeParams {
    const uint32_t* a;       // [32][4]
    const uint32_t* b;       // [32][2]
    const float* c;          // [32][4]
    const uint32_t* scales;  // [32][2]: of A, of B
    float* out;              // [32][4]
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    probe_mma_fp4(const __grid_constant__ Fp4ProbeParams p) {
    const int t = static_cast<int>(threadIdx.x);
    const uint32_t a[4] = {p.a[4 * t], p.a[4 * t + 1], p.a[4 * t + 2], p.a[4 * t + 3]};
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = p.c[4 * t + i];
    mma_fp4<SELECT_A, SELECT_B>(d, a, p.b[2 * t], p.b[2 * t + 1], p.scales[2 * t], p.scales[2 * t + 1]);
    for (int i = 0; i < 4; ++i) p.out[4 * t + i] = d[i];
}
