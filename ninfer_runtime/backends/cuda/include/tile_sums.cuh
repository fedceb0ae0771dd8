// Sums of a warp's two tile rows, and how they reach memory. A lane has rows g, g + 8 of tokens 2t, 2t + 1 of every
// tile of eight tokens: sums [0], [1] and [2], [3].
#pragma once

#include "common.cuh"

template <int N>
using SumsOf = float[2][N][4];

template <int N>
DEVICE void clear(SumsOf<N>& sums) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
}

DEVICE void store_pair(uint16_t* row, int first, int n_rows, bool aligned, float low, float high) {
    const uint32_t pair = pack_bf16(low, high);
    if (aligned && first + 1 < n_rows) {
        *reinterpret_cast<uint32_t*>(row + first) = pair;
    } else {
        if (first < n_rows) row[first] = static_cast<uint16_t>(pair);
        if (first + 1 < n_rows) row[first + 1] = static_cast<uint16_t>(pair >> 16);
    }
}

// Two values of one token: upper belongs to row block_a + g, lower to block_b + g. Neighbouring rows meet in one lane:
// even lanes end with rows (g, g + 1) of the first block, odd ones with rows (g - 1, g) of the second.
DEVICE void store_rows(uint16_t* row, int block_a, int block_b, int n_rows, bool aligned, bool exists, float upper,
                       float lower, uint32_t lane = lane_id()) {
    const int g = static_cast<int>(lane) >> 2;
    const bool odd = g & 1;
    const float received = shfl_xor(odd ? upper : lower, 4);
    if (exists)
        store_pair(row, odd ? block_b + g - 1 : block_a + g, n_rows, aligned, odd ? received : upper,
                   odd ? lower : received);
}

// x / (1 + exp(-x)), relative error about 2^-21: one rounding to bf16 follows.
DEVICE float gated(float gate, float up) {
    return gate * rcp_approx(1.0f + exp2_approx(gate * -1.4426950408889634f)) * up;
}
