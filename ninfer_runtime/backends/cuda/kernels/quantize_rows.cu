// x[t] -> quantized rows: x bf16 [T][STRIDE], zeros from K on, STRIDE a multiple of 128; rows of row_bytes, 16-byte aligned.
// FORM 1: NVFP4 words under a divisor (quantize_fp4.cuh); 2: the same as bf16(code * scale) [T][STRIDE], x itself allowed;
// 3: signed bytes (quantize_int8.cuh). A warp quantizes a step of 128 columns of a row. References, equal words:
// ninfer_format/numeric/nvfp4_activations.py and int8_activations.py.
#include "common.cuh"
#include "quantize_rows.cuh"

constexpr int STEPS = STRIDE / 128;
static_assert(STRIDE % 128 == 0 && FORM >= AS_FP4 && FORM <= AS_INT8, "whole steps");

struct QuantizeRowsParams {
    const uint16_t* x;
    unsigned char* out;
    int64_t row_bytes;
    float divisor;
    int n_rows;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    quantize_rows(const __grid_constant__ QuantizeRowsParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int lane = static_cast<int>(lane_id());
    const int64_t step = static_cast<int64_t>(blockIdx.x) * (THREADS / WARP_LANES) + warp_index();
    if (step >= static_cast<int64_t>(p.n_rows) * STEPS) return;
    const int64_t row = step / STEPS;
    const int column = static_cast<int>(step % STEPS) * 128;
    const uint2 words = load_8(p.x + row * STRIDE + column + 4 * lane);
    const float x[4] = {bf16_lo(words.x), bf16_hi(words.x), bf16_lo(words.y), bf16_hi(words.y)};
    quantize_row_step<FORM>(x, p.divisor, column, p.out + row * p.row_bytes, STRIDE);
}
