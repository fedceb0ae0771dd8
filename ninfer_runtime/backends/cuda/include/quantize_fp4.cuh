// Activations as NVFP4, in the order in which operands are read; and the same numbers as bf16. Rule: specs/formats.md,
// oracle ninfer_format/numeric/nvfp4_activations.py; here as there every step is one fp32 operation, so words are equal.
//
// FP4 row of K columns, K padded to 128 with zeros: 64 bytes per 128 columns (a step), then K / 16 bytes of scales in
// the order of columns. Of a step the 16-byte chunk t has the words of lane t of a quad: columns 64 w/2 + 32 (w%2) + 8t
// .. + 7 in word w = 0..3. In a word, column 2 q + h of the eight is nibble q + 4 h: packed weights (packing.py) have
// the same order, and a product does not care which order k has inside a lane's eight.
#pragma once

#include "common.cuh"

enum QuantizedForm { NOT_QUANTIZED, AS_FP4, AS_BF16, AS_INT8 };  // as in ops/quantize_rows.py

// Bytes of a row's codes; its scales follow.
__host__ __device__ constexpr int fp4_code_bytes(int k_padded) { return k_padded / 2; }

// Where the word of eight columns from `column` on lies in a row.
DEVICE int fp4_word_at(int column) {
    return column / 128 * 64 + column % 32 / 8 * 16 + column % 128 / 32 * 4;
}

// E4M3 word nearest to value >= 0, ties to even, 448 for all that is larger; 0x7f for NaN.
DEVICE uint32_t e4m3_word(float value) {
    if (value != value) return 0x7f;
    value = minimum(value, 448.0f);
    if (value < 0x1p-6f) return static_cast<uint32_t>(float_to_int_rn(value * 512.0f));
    const uint32_t bits = __float_as_uint(value);
    return ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
}

DEVICE float e4m3_value(uint32_t word) {
    if (word == 0x7f) return __uint_as_float(0x7fffffffu);
    return word < 8 ? static_cast<float>(word) * 0x1p-9f : __uint_as_float((word + (120u << 3)) << 20);
}

// A block's scale, and what codes are made with.
struct BlockScale {
    float divisor, scale;
    uint32_t word;

    // largest: the greatest magnitude's bits; those of NaN are greater than any number's.
    DEVICE BlockScale(uint32_t largest, float divisor_) : divisor(divisor_) {
        word = e4m3_word(__uint_as_float(largest) * divisor / 6.0f);
        scale = e4m3_value(word);
    }

    // E2M1 word. Midpoints times the scale are exact, so comparing is dividing and rounding to nearest even.
    DEVICE uint32_t code(float x) const {
        const float scaled = x * divisor;
        const float a = fabsf(scaled);
        const uint32_t magnitude = static_cast<uint32_t>(a > 0.25f * scale) + (a >= 0.75f * scale) +
                                   (a > 1.25f * scale) + (a >= 1.75f * scale) + (a > 2.5f * scale) +
                                   (a >= 3.5f * scale) + (a > 5.0f * scale);
        return word == 0 ? 0u : magnitude | (__float_as_uint(scaled) >> 28 & 8u);
    }

    // code * scale: six significant bits.
    DEVICE float product(uint32_t code) const {
        const uint32_t magnitude = code & 7u;
        const uint32_t bits = magnitude < 2 ? magnitude * 0x3f000000u : ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22;
        return __uint_as_float(bits | (code & 8u) << 28) * scale;
    }
};

// Four columns per lane, 128 per warp: whole blocks in four neighbours. All lanes take part.
//
// x: columns 4 lane .. + 3 of the step that starts at `step`. row: the row's first byte; scales_at: byte of its scales.
template <int AS>
DEVICE void quantize_step(const float (&x)[4], float divisor, int step, unsigned char* row, int scales_at) {
    const int lane = static_cast<int>(lane_id());
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = maximum(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    largest = maximum(largest, shfl_xor(largest, 1));
    largest = maximum(largest, shfl_xor(largest, 2));
    const BlockScale block(largest, divisor);
    uint32_t code[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) code[i] = block.code(x[i]);
    if constexpr (AS == AS_BF16) {
        const uint2 words = {pack_bf16(block.product(code[0]), block.product(code[1])),
                             pack_bf16(block.product(code[2]), block.product(code[3]))};
        store_8(row + (step + 4 * lane) * 2, words);
    } else {
        uint32_t word = (code[0] | code[1] << 16 | code[2] << 4 | code[3] << 20) << (lane & 1) * 8;
        word |= shfl_xor(word, 1);
        if (lane % 2 == 0) store_4(row + fp4_word_at(step + 4 * lane), word);
        if (lane % 4 == 0) row[scales_at + (step + 4 * lane) / 16] = static_cast<unsigned char>(block.word);
    }
}
