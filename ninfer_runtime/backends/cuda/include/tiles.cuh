// Packed weight blocks ("tiles") as mma.m16n8k16 operand A. Layout and the order of K: packing.py; oracle there, too.
// A block is 16 rows x Tile<F>::STEP columns. Lane = 4 g + t owns, of every 64-column group, columns 8t..8t+7 (mma 0, 1)
// and 32+8t..32+8t+7 (mma 2, 3): operand B of token n = g is two 16-byte loads from a row-major activation, of which
// .x .y are b0 b1 of the even mma and .z .w of the odd one. Codes come out as exact bf16; scales multiply sums, but those
// of NVFP4 the codes.
#pragma once

#include "common.cuh"

enum TileFormat { Q4, Q5, Q6, W8, BF16, NVFP4 };  // TileFormat.code of packing.py

template <int F>
struct Tile {
    static_assert(F >= Q4 && F <= NVFP4, "format");
    static constexpr int STEP = F <= Q6 || F == NVFP4 ? 128 : 64;  // columns of a block
    static constexpr int GROUPS = STEP / 64;                       // 64-column groups of a block
    static constexpr int WORDS =                                   // per lane and group
        F == Q4 || F == NVFP4 ? 4 : F == Q5 ? 5 : F == Q6 ? 6 : F == W8 ? 8 : 16;
    static constexpr int PIECES = WORDS / 4;                       // 16-byte pieces of them
    static constexpr int REST = WORDS % 4;                         // words behind the pieces
    static constexpr int REST_AT = GROUPS * PIECES * 512;
    static constexpr int SCALES_AT = REST_AT + GROUPS * REST * 128;
    static constexpr int SCALE_BYTES = F == BF16 ? 0 : F == NVFP4 ? 128 : 64;
    static constexpr int BLOCK_BYTES = SCALES_AT + SCALE_BYTES;
};

// The lane's words of one 64-column group; block is 16-byte aligned, in shared or global memory.
template <int F>
DEVICE void tile_words(uint32_t (&words)[Tile<F>::WORDS], const unsigned char* block, int group, int lane) {
    using L = Tile<F>;
#pragma unroll
    for (int piece = 0; piece < L::PIECES; ++piece) {
        const uint4 v = *reinterpret_cast<const uint4*>(block + (group * L::PIECES + piece) * 512 + lane * 16);
        words[4 * piece] = v.x;
        words[4 * piece + 1] = v.y;
        words[4 * piece + 2] = v.z;
        words[4 * piece + 3] = v.w;
    }
    const unsigned char* rest = block + L::REST_AT + (lane * L::GROUPS + group) * L::REST * 4;
    if constexpr (L::REST == 1) {
        words[4] = *reinterpret_cast<const uint32_t*>(rest);
    } else if constexpr (L::REST == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(rest);
        words[4] = v.x;
        words[5] = v.y;
    }
}

// Binary16 scale pairs of the lane's rows: .x row g, .y row g+8; low half first 64-column group (W8: first 32 columns).
template <int F>
DEVICE uint2 tile_scales(const unsigned char* block, int lane) {
    static_assert(Tile<F>::SCALE_BYTES == 64, "scales of binary16");
    return *reinterpret_cast<const uint2*>(block + Tile<F>::SCALES_AT + (lane >> 2) * 8);
}

// What tile_operand<F, false> adds to every code. 0x4300 | u is exactly 128 + u in bf16 for u < 128.
template <int F>
__host__ __device__ constexpr int tile_bias() {
    return F == Q4 ? 136 : F == Q5 ? 144 : F == Q6 ? 160 : 0;
}

// Register I of operand A of mma J, both constants after unrolling: exact codes, or with EXACT = false codes plus
// tile_bias<F>(), which costs one instruction less. (a & b) | c is one lop3.
template <int F, bool EXACT = true>
DEVICE uint32_t tile_pair(const uint32_t (&words)[Tile<F>::WORDS], int j, int i) {
    const int p = 4 * j + i;
    if constexpr (F == BF16) {
        return words[p];
    } else if constexpr (F == W8) {
        // q = low seven bits - 128 sign: (128 + low) + (-128 or -256), which differ in one bit.
        const uint32_t word = words[4 * (j / 2) + i] >> (8 * (j % 2));
        const uint32_t low = lop3<0xea>(word, 0x007f007fu, 0x43004300u);
        return fma_bf16x2(low, 0x3f803f80u, lop3<0xea>(word, 0x00800080u, 0xc300c300u));
    } else {
        uint32_t u;
        if constexpr (F == Q4) {
            u = lop3<0xea>(words[i] >> (4 * j), 0x000f000fu, 0x43004300u);
        } else if constexpr (F == Q5) {
            if (p < 15) {
                u = lop3<0xea>(words[p / 3] >> (5 * (p % 3)), 0x001f001fu, 0x43004300u);
            } else {
                u = lop3<0xea>(words[4] >> 11, 0x00100010u, 0x43004300u);
                u = lop3<0xea>(words[3] >> 12, 0x00080008u, u);
                u = lop3<0xea>(words[2] >> 13, 0x00040004u, u);
                u = lop3<0xea>(words[1] >> 14, 0x00020002u, u);
                u = lop3<0xea>(words[0] >> 15, 0x00010001u, u);
            }
        } else {
            if (p < 12) {
                u = lop3<0xea>(words[p / 2] >> (6 * (p % 2)), 0x003f003fu, 0x43004300u);
            } else {
                u = lop3<0xea>(words[i] >> 12, 0x000f000fu, 0x43004300u);
                u = lop3<0xea>(words[4 + i / 2] >> (8 + 2 * (i % 2)), 0x00300030u, u);
            }
        }
        constexpr uint32_t MINUS = 0xc300c300u | tile_bias<F>() % 128 * 0x10001u;  // bf16 -bias, twice
        return EXACT ? fma_bf16x2(u, 0x3f803f80u, MINUS) : u;
    }
}

// Operand A of mma j of the group.
template <int F, bool EXACT = true>
DEVICE void tile_operand(uint32_t (&a)[4], const uint32_t (&words)[Tile<F>::WORDS], int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = tile_pair<F, EXACT>(words, j, i);
}

// ---- NVFP4
//
// A code (sign, two bits of exponent, one of mantissa) set into the bf16 word's sign, exponent and mantissa is the number
// times 2^-126, subnormal or not, and a scale's byte in exponent and mantissa is the scale times 2^-120. Their product, with
// the scale times 2^119, is the weight times 2^-7 (and the matrix's divisor), exactly: six significant bits at most.

DEVICE uint32_t rotate_left(uint32_t word, int n) { return word << n | word >> (32 - n); }  // 0 < n < 32

// Two codes times 2^-126: register i of operand A of mma j.
template <int WORDS>
DEVICE uint32_t fp4_codes(const uint32_t (&words)[WORDS], int j, int i) {
    const uint32_t word = words[j / 2 * 2 + i % 2];
    const int q = j % 2 * 2 + i / 2;  // nibble of each half
    // A sign moves six bits further than the rest: two words, in which those of two nibbles have done so already.
    const uint32_t ahead = rotate_left(word, 6);
    const uint32_t both = lop3<0xca>(q < 2 ? 0x22002200u : 0x00220022u, ahead, word);
    return rotate_left(both, (38 - 4 * q) % 32) & 0x81c081c0u;
}

// Scales times 2^119 of the lane's two blocks of a row and 64-column group, the first 32 columns' in the low half.
// row_scales: the row's four bytes of the group.
DEVICE uint32_t fp4_scales(uint32_t row_scales, int lane) {
    const uint32_t bits = rotate_left(row_scales, lane & 2 ? 28 : 4) & 0x07f007f0u;
    return mul_bf16x2(mul_bf16x2(bits, 0x7f007f00u), 0x77807780u);
}

// Operand A of mma j of the group; scales: of the lane's rows g and g + 8.
template <int WORDS>
DEVICE void fp4_operand(uint32_t (&a)[4], const uint32_t (&words)[WORDS], int j, const uint32_t (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t scale = j / 2 ? upper_twice(scales[i % 2]) : lower_twice(scales[i % 2]);
        a[i] = mul_bf16x2(fp4_codes(words, j, i), scale);
    }
}

// A block's scales of the lane's rows: .x .y row g, first and second 64-column group, .z .w row g + 8.
DEVICE uint4 fp4_block_scales(const unsigned char* block, int lane) {
    return *reinterpret_cast<const uint4*>(block + Tile<NVFP4>::SCALES_AT + (lane >> 2) * 16);
}
