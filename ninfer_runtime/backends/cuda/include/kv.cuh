// Paged keys and values: codec and addresses. Layout: ops/kv_cache.py; formula: specs/kernels.md, "KV pages".
// A page of one layer and plane is [kv head][64 tokens][256 dims]; int8 and fp6 codes have one fp16 scale per 64 dims, in
// planes [kv head][4 groups][64 tokens]. INT8 codes of V are stored with their signs flipped: 128 more, unsigned.
#pragma once
#include "common.cuh"

#define KV_QUANTIZED (KV_INT8 || KV_FP6)

constexpr int HEAD_DIM = 256;
constexpr int PAGE_TOKENS = 64;
constexpr int SCALE_GROUP = 64;
constexpr int GROUPS = HEAD_DIM / SCALE_GROUP;
constexpr int LANE_DIMS = HEAD_DIM / WARP_LANES;  // a warp holds a head: lane l has dims 8l .. 8l + 7
constexpr int KEY_BYTES = KV_FP6 ? HEAD_DIM * 6 / 8 : KV_INT8 ? HEAD_DIM : 2 * HEAD_DIM;  // codes of a token and head

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

constexpr float FP6_MAX = 14.0f;
constexpr uint32_t FP6_MAX_CODE = 0x1b;

// The nearest of 0, 1/16 .. 3/16 and 2^(e - 3) (1 + m / 4): sign, three bits of e, two of m; ties to the even m, 14 for what
// is larger. NaN and what rounds to zero are code 0.
DEVICE uint32_t fp6_code(float x) {
    const float magnitude = fabsf(x);
    if (!(magnitude > 0.0f)) return 0;
    uint32_t code = static_cast<uint32_t>(float_to_int_rn(minimum(magnitude, 0.25f) * 16.0f));
    if (magnitude >= 0.25f) {
        const uint32_t bits = __float_as_uint(minimum(magnitude, FP6_MAX));
        code = ((bits + 0x000fffffu + (bits >> 21 & 1)) >> 21) - (124u << 2);
    }
    return code == 0 ? 0 : minimum(code, FP6_MAX_CODE) | (x < 0.0f ? 0x20u : 0u);
}

struct Fp6Row {
    uint32_t code[LANE_DIMS];
    uint16_t scale;  // fp16, of the lane's group
};

// scale = fp16(max |x| / 14), code nearest to x times the reciprocal of the stored scale.
DEVICE Fp6Row encode_fp6(const float (&x)[LANE_DIMS]) {
    Fp6Row row;
    row.scale = float_to_half(magnitude<SCALE_GROUP>(x) / FP6_MAX);
    const float scale = half_to_float(row.scale);
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) row.code[i] = fp6_code(x[i] * inverse);
    return row;
}

// Keys: 16 dims in three words, pair r (dims 2r, 2r + 1) in the same bits of both halves of a word: pairs 0 1 2 in the upper
// six bits of words 0 1 2, pairs 4 5 6 in the next six; the lowest four have sign and exponent of pairs 3 and 7 in words 0
// and 1, and both pairs' mantissas in word 2. Token after token 192 bytes, unit after unit twelve. By a whole warp: the
// words of lanes 2u and 2u + 1 are those of unit u.
DEVICE void pack_fp6_key(const Fp6Row& row, uint32_t (&word)[3]) {
    uint32_t pair[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) pair[r] = row.code[2 * r] | row.code[2 * r + 1] << 16;
    const bool is_odd = lane_id() % 2 == 1;
    const int shift = is_odd ? 4 : 10;
    const uint32_t upper = pair[3] >> 2 & 0x000f000fu, mantissa = pair[3] & 0x00030003u;
    word[0] = pair[0] << shift | (is_odd ? 0u : upper);
    word[1] = pair[1] << shift | (is_odd ? upper : 0u);
    word[2] = pair[2] << shift | (is_odd ? mantissa : mantissa << 2);
#pragma unroll
    for (int i = 0; i < 3; ++i) word[i] |= shfl_xor(word[i], 1);
}

constexpr uint32_t HALF_SIGNS = 0x80008000u;
constexpr uint32_t HALF_FP6 = 0x1f001f00u;        // three exponent bits, two of the mantissa
constexpr uint32_t HALF_EXPONENTS = 0x1c001c00u;
constexpr uint32_t HALF_MANTISSAS = 0x03000300u;
constexpr float FP6_UNIT = 4096.0f;               // an fp6 value is that many times its bits read as fp16
constexpr uint32_t HALF_FP6_UNIT = 0x6c006c00u;   // twice, in fp16

// The 16 values of a unit of keys, divided by FP6_UNIT, in order: exact fp16.
DEVICE void unpack_fp6_key(const uint32_t (&word)[3], uint32_t (&value)[8]) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        value[i] = (word[i] & HALF_SIGNS) | (word[i] >> 2 & HALF_FP6);
        value[4 + i] = (word[i] << 6 & HALF_SIGNS) | (word[i] << 4 & HALF_FP6);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
        value[3 + 4 * i] = (word[i] << 12 & HALF_SIGNS) | (word[i] << 10 & HALF_EXPONENTS) |
                           (word[2] << (6 + 2 * i) & HALF_MANTISSAS);
}

// Values: of 64 dims first sign and exponent, four bits each, then the mantissas, two each: 32 and 16 bytes. Eight dims are
// a word of the first and 16 bits of the second, in each the even dims in the lower half, the odd ones in the upper.
DEVICE void pack_fp6_value(const Fp6Row& row, uint32_t& upper, uint32_t& mantissa) {
    upper = mantissa = 0;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) {
        upper |= (row.code[i] >> 2) << (16 * (i % 2) + 4 * (i / 2));
        mantissa |= (row.code[i] & 3u) << (8 * (i % 2) + 2 * (i / 2));
    }
}

// Number `index` (0 .. 3) of the fours in the halves of `upper` (16 bits each) and `mantissa` (the lower 8 bits of each):
// a pair of values divided by FP6_UNIT, exact fp16.
DEVICE uint32_t fp6_pair(uint32_t upper, uint32_t mantissa, int index) {
    return (upper << (12 - 4 * index) & HALF_SIGNS) | (upper << (12 - 4 * index) >> 2 & HALF_EXPONENTS) |
           (mantissa << (8 - 2 * index) & HALF_MANTISSAS);
}

// A pair of fp6 values as fp16 times the pair of scales: exact, then rounded once.
DEVICE uint32_t scaled_fp6(uint32_t pair, uint32_t scales) { return mul_f16x2(mul_f16x2(pair, HALF_FP6_UNIT), scales); }

DEVICE uint2 flip_signs(uint2 codes) { return {codes.x ^ 0x80808080u, codes.y ^ 0x80808080u}; }

DEVICE uint4 encode_bf16(const float (&x)[LANE_DIMS]) {
    return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}

// Codes of the lane's dims into a row of KEY_BYTES, in global or shared memory; returns the scale of its group. By a whole
// warp.
template <bool IS_K>
DEVICE uint16_t store_codes(const float (&x)[LANE_DIMS], uint8_t* row, uint8_t* copy) {
    const int lane = lane_id();
#if KV_FP6
    const Fp6Row encoded = encode_fp6(x);
    if constexpr (IS_K) {
        uint32_t word[3];
        pack_fp6_key(encoded, word);
        if (lane % 2 == 0) {
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                const int at = 6 * lane + 4 * i;
                *reinterpret_cast<uint32_t*>(row + at) = word[i];
                if (copy != nullptr) *reinterpret_cast<uint32_t*>(copy + at) = word[i];
            }
        }
    } else {
        uint32_t upper, mantissa;
        pack_fp6_value(encoded, upper, mantissa);
        const int at = lane / 8 * 48 + lane % 8 * 4, behind = lane / 8 * 48 + 32 + lane % 8 * 2;
        *reinterpret_cast<uint32_t*>(row + at) = upper;
        *reinterpret_cast<uint16_t*>(row + behind) = static_cast<uint16_t>(mantissa);
        if (copy != nullptr) {
            *reinterpret_cast<uint32_t*>(copy + at) = upper;
            *reinterpret_cast<uint16_t*>(copy + behind) = static_cast<uint16_t>(mantissa);
        }
    }
    return encoded.scale;
#elif KV_INT8
    const Int8Row encoded = encode_int8(x);
    const uint2 codes = IS_K ? encoded.codes : flip_signs(encoded.codes);
    store_8(row + LANE_DIMS * lane, codes);
    if (copy != nullptr) *reinterpret_cast<uint2*>(copy + LANE_DIMS * lane) = codes;
    return encoded.scale;
#else
    const uint4 encoded = encode_bf16(x);
    store_16(row + 2 * LANE_DIMS * lane, encoded);
    if (copy != nullptr) *reinterpret_cast<uint4*>(copy + 2 * LANE_DIMS * lane) = encoded;
    return 0;
#endif
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
