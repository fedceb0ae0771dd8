// Gated DeltaNet: geometry and the arithmetic on tokens that rounds and prefill share.
// KEY_HEADS and VALUE_HEADS are the compiler's -D.
#pragma once

#include "common.cuh"

constexpr int GDN_DIM = 128;
constexpr int GDN_TAPS = 4;
constexpr int GDN_HISTORY = GDN_TAPS - 1;
constexpr float GDN_L2_EPS = 1e-6f;
constexpr float GDN_QUERY_SCALE = 0.088388347648318447f;  // 128^-0.5

constexpr int GDN_RATIO = VALUE_HEADS / KEY_HEADS;
constexpr int GDN_KEY_WIDTH = KEY_HEADS * GDN_DIM;
constexpr int GDN_VALUE_WIDTH = VALUE_HEADS * GDN_DIM;
constexpr int GDN_CHANNELS = 2 * GDN_KEY_WIDTH + GDN_VALUE_WIDTH;
static_assert(VALUE_HEADS % KEY_HEADS == 0, "consecutive value heads share a key head");

// Never contracted into an fma.
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }

struct alignas(16) Float4 {
    float v[4];
};

// Four bf16 of one lane.
DEVICE void unpack_4(uint2 words, float (&x)[4]) {
    x[0] = bf16_lo(words.x), x[1] = bf16_hi(words.x), x[2] = bf16_lo(words.y), x[3] = bf16_hi(words.y);
}

DEVICE uint2 pack_4(const float (&x)[4]) { return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])}; }

DEVICE float dot_4(const float (&a)[4], const float (&b)[4]) {
    return fmaf(a[3], b[3], fmaf(a[2], b[2], fmaf(a[1], b[1], mul_rn(a[0], b[0]))));
}

// x / sqrt(sum x^2 + eps) of 128 numbers, four per lane of a warp; returns the factor.
DEVICE float l2_normalize(float (&x)[4]) {
    const float scale = rsqrt_approx(warp_sum(dot_4(x, x)) + GDN_L2_EPS);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = mul_rn(x[i], scale);
    return scale;
}

DEVICE float silu_fast(float x) { return x * rcp_approx(1.0f + exp2_approx(x * -1.44269504f)); }

// silu(sum_j taps[j] columns[j]) in bf16, of four channels; the last tap multiplies the current token. Both in shared
// memory, rows of `stride` channels.
DEVICE uint2 convolve_4(const uint16_t* columns, const uint16_t* taps, int stride) {
    float total[4] = {}, x[4], w[4];
#pragma unroll
    for (int j = 0; j < GDN_TAPS; ++j) {
        unpack_4(*reinterpret_cast<const uint2*>(columns + j * stride), x);
        unpack_4(*reinterpret_cast<const uint2*>(taps + j * stride), w);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] = fmaf(w[i], x[i], total[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = silu_fast(total[i]);
    return pack_4(total);
}

struct GdnGates {
    float alpha, beta;
};

// g = -exp(a_log) softplus(a + dt_bias), the logarithm of alpha.
DEVICE float gdn_log_decay(float a, float a_log, float dt_bias) {
    return -mul_rn(expf_precise(a_log), softplus(a + dt_bias));
}

// A head's channels: its value, and the query and key of its key head, which the first of the value heads that share
// it accounts for.
struct GdnChannels {
    int query, key, value;  // first channel of each part
    bool owns_key;

    DEVICE explicit GdnChannels(int head)
        : query(head / GDN_RATIO * GDN_DIM),
          key(GDN_KEY_WIDTH + query),
          value(2 * GDN_KEY_WIDTH + head * GDN_DIM),
          owns_key(head % GDN_RATIO == 0) {}

    DEVICE int first(int part) const { return part == 0 ? query : part == 1 ? key : value; }
    // Channel of the 8-channel vector `i` in 0..47 of [query | key | value].
    DEVICE int vector(int i) const { return first(i / 16) + i % 16 * 8; }
    DEVICE bool owns(int i) const { return i >= 32 || owns_key; }
};
constexpr int GDN_HEAD_VECTORS = 3 * GDN_DIM / 8;
