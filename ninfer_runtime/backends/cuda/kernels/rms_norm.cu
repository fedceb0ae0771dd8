// y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * (1 + w)      x fp32 [T][HIDDEN]; w bf16 [HIDDEN]; HIDDEN a multiple of 4
// y: OUTPUT 0: bf16 [T][STRIDE], zero from HIDDEN on; 1: fp32 [T][HIDDEN]; 2: fp32 that holds the bf16 value.
// QUANTIZED (with OUTPUT 0, HIDDEN a multiple of 16): also quantized rows of the bf16 values, a form of quantize_rows.cu;
// y may then be null. Arrays 16-byte aligned.
// One block per row, float32 throughout, one rounding; reference backends/reference/norm.py, 1 ulp of bf16.
#include "common.cuh"
#include "quantize_rows.cuh"

#ifndef QUANTIZED
#define QUANTIZED 0
#endif

constexpr int UNITS = HIDDEN / 4;
constexpr int ALL_UNITS = QUANTIZED ? STRIDE / 4 : UNITS;  // whole warps where lanes meet
constexpr int UNITS_PER_THREAD = ceil_div(ALL_UNITS, THREADS);
static_assert(HIDDEN % 4 == 0 && STRIDE % 4 == 0 && STRIDE >= HIDDEN, "whole units of four");
static_assert(!QUANTIZED || (OUTPUT == 0 && HIDDEN % 16 == 0 && STRIDE % 128 == 0), "whole blocks and steps");

struct RmsNormParams {
    const float* x;
    const uint16_t* weight;
    void* y;
    unsigned char* quantized;
    int64_t row_bytes;  // of quantized rows
    float eps;
    float divisor;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) rms_norm(const __grid_constant__ RmsNormParams p) {
    STATIC_SHARED(float, scratch[THREADS / WARP_LANES]);
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t row = blockIdx.x;
    float v[UNITS_PER_THREAD][4];
    float sum = 0.0f;
#pragma unroll
    for (int u = 0; u < UNITS_PER_THREAD; ++u) {
        const int unit = u * THREADS + static_cast<int>(threadIdx.x);
        const uint4 words = unit < UNITS ? load_16(p.x + row * HIDDEN + unit * 4) : uint4{0, 0, 0, 0};
        v[u][0] = __uint_as_float(words.x);
        v[u][1] = __uint_as_float(words.y);
        v[u][2] = __uint_as_float(words.z);
        v[u][3] = __uint_as_float(words.w);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += v[u][i] * v[u][i];
    }
    const float scale = 1.0f / sqrtf(block_sum(sum, scratch) / HIDDEN + p.eps);
#pragma unroll
    for (int u = 0; u < UNITS_PER_THREAD; ++u) {
        const int unit = u * THREADS + static_cast<int>(threadIdx.x);
        if (unit >= ALL_UNITS) continue;
        const uint2 w = unit < UNITS ? load_8(p.weight + unit * 4) : uint2{0, 0};
        const float weight[4] = {bf16_lo(w.x), bf16_hi(w.x), bf16_lo(w.y), bf16_hi(w.y)};
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = v[u][i] * scale * (1.0f + weight[i]);
        if constexpr (OUTPUT == 0) {
            const uint2 words = {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])};
            if (!QUANTIZED || p.y != nullptr) store_8(static_cast<uint16_t*>(p.y) + row * STRIDE + unit * 4, words);
            if constexpr (QUANTIZED != NOT_QUANTIZED) {
                const float rounded[4] = {bf16_lo(words.x), bf16_hi(words.x), bf16_lo(words.y), bf16_hi(words.y)};
                quantize_row_step<QUANTIZED>(rounded, p.divisor, unit / 32 * 128, p.quantized + row * p.row_bytes,
                                             STRIDE);
            }
        } else {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = __float_as_uint(OUTPUT == 2 ? bf16_to_float(float_to_bf16(y[i])) : y[i]);
            store_16(static_cast<float*>(p.y) + row * HIDDEN + unit * 4, uint4{words[0], words[1], words[2], words[3]});
        }
    }
    if constexpr (OUTPUT == 0 && QUANTIZED == NOT_QUANTIZED)
        for (int column = HIDDEN + 4 * static_cast<int>(threadIdx.x); column < STRIDE; column += 4 * THREADS)
            store_8(static_cast<uint16_t*>(p.y) + row * STRIDE + column, uint2{0, 0});
}
