// x[t] = bf16(E[tokens[t]]), or the caller's own row; xn[t] = bf16(x[t] * (1 + w)); ss[t] = sum of x[t]^2.
// E: file layout (specs/layouts.md), rows of HIDDEN columns, a multiple of 8; x fp32 [T][HIDDEN]; w bf16 [HIDDEN];
// xn bf16 [T][STRIDE], zero from HIDDEN on; ss fp32 [T]. Every array 16-byte aligned. One block per token.
// Reference: backends/reference/embedding.py with dtype bfloat16; x exact, xn exact, ss 1e-6 relative.
#include "common.cuh"

// FORMAT_BITS: 4, 5, 6 (groups of 64), 8 (groups of 32) or 16 (bf16). WITH_NORM: xn and ss are written.
constexpr int GROUP = FORMAT_BITS == 8 ? 32 : 64;
constexpr int GROUPS_PER_ROW = round_up(HIDDEN, 128) / GROUP;
constexpr int UNIT = 8;  // columns per thread and step
static_assert(HIDDEN % UNIT == 0 && STRIDE % UNIT == 0 && STRIDE >= HIDDEN, "whole units");
static_assert(FORMAT_BITS == 4 || FORMAT_BITS == 5 || FORMAT_BITS == 6 || FORMAT_BITS == 8 || FORMAT_BITS == 16,
              "a stored format");

struct EmbedParams {
    const unsigned char* base;     // low nibbles, bytes, or bf16 words
    const unsigned char* high;     // Q5 and Q6
    const uint16_t* scales;        // fp16, grouped formats
    const int* tokens;
    const int* own_index;          // per token, row of own_rows or -1; null: none
    const float* own_rows;         // fp32 [n][HIDDEN]
    const uint16_t* norm_weight;
    float* x;
    uint16_t* xn;
    float* ss;
    int n_tokens;
};

// Eight stored values from column `column` on.
DEVICE void stored_unit(const EmbedParams& p, int64_t row, int column, float (&v)[UNIT]) {
    if constexpr (FORMAT_BITS == 16) {
        const uint4 words = load_16(p.base + (row * HIDDEN + column) * 2);
        const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[2 * i] = bf16_lo(pairs[i]);
            v[2 * i + 1] = bf16_hi(pairs[i]);
        }
    } else {
        const int64_t group = row * GROUPS_PER_ROW + column / GROUP;
        const int lane = column % GROUP;
        const float scale = half_to_float(p.scales[group]);
        uint32_t low[2] = {0, 0}, above = 0;
        if constexpr (FORMAT_BITS == 8) {
            const uint2 bytes = load_8(p.base + group * 32 + lane);
            low[0] = bytes.x;
            low[1] = bytes.y;
        } else {
            low[0] = load_4(p.base + group * 32 + lane / 2);
        }
        if constexpr (FORMAT_BITS == 5) above = p.high[group * 8 + lane / 8];
        if constexpr (FORMAT_BITS == 6) above = *reinterpret_cast<const uint16_t*>(p.high + group * 16 + lane / 4);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            uint32_t u;
            if constexpr (FORMAT_BITS == 8)
                u = (low[i / 4] >> (8 * (i % 4))) & 255u;
            else
                u = (low[0] >> (4 * i)) & 15u;
            if constexpr (FORMAT_BITS == 5) u |= ((above >> i) & 1u) << 4;
            if constexpr (FORMAT_BITS == 6) u |= ((above >> (2 * i)) & 3u) << 4;
            const int code = static_cast<int>(u << (32 - FORMAT_BITS % 32)) >> (32 - FORMAT_BITS % 32);
            v[i] = scale * static_cast<float>(code);
        }
    }
}

DEVICE void own_unit(const float* row, int column, float (&v)[UNIT]) {
#pragma unroll
    for (int i = 0; i < UNIT; ++i) v[i] = row[column + i];
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) embed(const __grid_constant__ EmbedParams p) {
    STATIC_SHARED(float, scratch[THREADS / WARP_LANES]);
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t t = blockIdx.x;
    const int64_t row = p.tokens[t];
    const int own = p.own_index == nullptr ? -1 : p.own_index[t];
    float sum = 0.0f;
    for (int column = static_cast<int>(threadIdx.x) * UNIT; column < HIDDEN; column += THREADS * UNIT) {
        float v[UNIT];
        if (own >= 0)
            own_unit(p.own_rows + static_cast<int64_t>(own) * HIDDEN, column, v);
        else
            stored_unit(p, row, column, v);
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) v[i] = bf16_to_float(float_to_bf16(v[i]));
        const uint4 low = {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
        const uint4 high = {__float_as_uint(v[4]), __float_as_uint(v[5]), __float_as_uint(v[6]), __float_as_uint(v[7])};
        store_16(p.x + t * HIDDEN + column, low);
        store_16(p.x + t * HIDDEN + column + 4, high);
        if constexpr (WITH_NORM) {
            const uint4 w = load_16(p.norm_weight + column);
            const uint32_t weights[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum += v[2 * i] * v[2 * i];
                sum += v[2 * i + 1] * v[2 * i + 1];
                words[i] = pack_bf16(v[2 * i] * (1.0f + bf16_lo(weights[i])), v[2 * i + 1] * (1.0f + bf16_hi(weights[i])));
            }
            store_16(p.xn + t * STRIDE + column, uint4{words[0], words[1], words[2], words[3]});
        }
    }
    if constexpr (WITH_NORM) {
        for (int column = HIDDEN + static_cast<int>(threadIdx.x) * UNIT; column < STRIDE; column += THREADS * UNIT)
            store_16(p.xn + t * STRIDE + column, uint4{0, 0, 0, 0});
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0) p.ss[t] = sum;
    }
}
