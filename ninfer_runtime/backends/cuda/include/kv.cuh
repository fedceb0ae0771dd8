// Paged keys and values: codec and addresses. Layout: ops/kv_cache.py; formula: specs/kernels.md, "KV pages".
// A page of one layer and plane is [kv head][64 tokens][256 dims]; int8 codes have one fp16 scale per 64 dims, in planes
// [kv head][4 groups][64 tokens]. Codes of V are stored with their signs flipped: 128 more, unsigned.
#pragma once
#include "common.cuh"

constexpr int HEAD_DIM = 256;
constexpr int PAGE_TOKENS = 64;
constexpr int SCALE_GROUP = 64;
constexpr int GROUPS = HEAD_DIM / SCALE_GROUP;
constexpr int LANE_DIMS = HEAD_DIM / WARP_LANES;  // a warp holds a head: lane l has dims 8l .. 8l + 7

// Index of a token's row of HEAD_DIM in a plane of a layer.
DEVICE int64_t kv_row(int page, int n_kv_heads, int head, int token_in_page) {
    return (static_cast<int64_t>(page) * n_kv_heads + head) * PAGE_TOKENS + token_in_page;
}

// Index of a scale of the token whose row of codes is `row`.
DEVICE int64_t scale_index(int64_t row, int token_in_page, int group) {
    return (row - token_in_page) * GROUPS + group * PAGE_TOKENS + token_in_page;
}

// Largest magnitude of the lane's group of DIMS dims; NaN if any of them is NaN, so that it reaches the scale.
template <int DIMS>
DEVICE float magnitude(const float (&x)[LANE_DIMS]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) largest = fabsf(x[i]) <= largest ? largest : fabsf(x[i]);
#pragma unroll
    for (int mask = 1; mask < DIMS / LANE_DIMS; mask <<= 1) {
        const float other = shfl_xor(largest, mask);
        largest = other <= largest || largest != largest ? largest : other;
    }
    return largest;
}

struct Int8Row {
    uint2 codes;     // the lane's 8 dims
    uint16_t scale;  // fp16, of the lane's group
};

DEVICE uint32_t pack_bytes(int a, int b, int c, int d) {
    return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | static_cast<uint32_t>(d) << 24;
}

// scale = fp16(max |x| / 127), code = rne(x / scale) by the reciprocal of the stored scale, clamped to +-127.
DEVICE Int8Row encode_int8(const float (&x)[LANE_DIMS]) {
    Int8Row row;
    row.scale = float_to_half(magnitude<SCALE_GROUP>(x) / 127.0f);
    const float scale = half_to_float(row.scale);
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    int code[LANE_DIMS];
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) code[i] = minimum(maximum(float_to_int_rn(x[i] * inverse), -127), 127);
    row.codes.x = pack_bytes(code[0], code[1], code[2], code[3]);
    row.codes.y = pack_bytes(code[4], code[5], code[6], code[7]);
    return row;
}

DEVICE uint2 flip_signs(uint2 codes) { return {codes.x ^ 0x80808080u, codes.y ^ 0x80808080u}; }

DEVICE uint4 encode_bf16(const float (&x)[LANE_DIMS]) {
    return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}

DEVICE void decode_bf16(float (&x)[LANE_DIMS], uint4 words) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = bf16_lo(word[i]);
        x[2 * i + 1] = bf16_hi(word[i]);
    }
}

constexpr uint32_t HALF_BYTES = 0x64646464u;   // 0x64uu is 1024 + u in fp16
constexpr uint32_t HALF_OFFSET = 0xe480e480u;  // -(1024 + 128), twice

// Two codes, offset by 128, in the bytes of `offset_codes` that `selector` names: exact fp16 integers.
DEVICE uint32_t half_codes(uint32_t offset_codes, uint32_t selector) {
    return add_f16x2(prmt(offset_codes, HALF_BYTES, selector), HALF_OFFSET);
}
