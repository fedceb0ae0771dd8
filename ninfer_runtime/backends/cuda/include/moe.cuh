// Routing of one token by one warp: the K largest of EXPERTS router logits, and their shares.
#pragma once

#include "common.cuh"

// A float as an integer of the same order; -0 and 0 are equal, NaN lies outside of the numbers.
DEVICE uint32_t ordered_bits(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float from_ordered_bits(uint32_t ordered) {
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// logits[i] of lane l is expert l + 32 i (those from EXPERTS on are not looked at). Afterwards every lane has the K ids
// by falling logit, the lower id first among equals, and their shares: a softmax over these K, equal to one over all
// that is divided by the sum of the K. Reference: backends/reference/moe.py, route.
template <int EXPERTS, int K>
DEVICE void route_token(const float (&logits)[ceil_div(EXPERTS, WARP_LANES)], int (&ids)[K], float (&shares)[K]) {
    static_assert(K <= EXPERTS, "experts per token");
    constexpr int MINE = ceil_div(EXPERTS, WARP_LANES);
    const int lane = static_cast<int>(lane_id());
    uint64_t keys[MINE];  // 0: taken, or no expert
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int expert = lane + WARP_LANES * i;
        keys[i] = expert < EXPERTS ? static_cast<uint64_t>(ordered_bits(logits[i])) << 32 | (0xffffffffu - expert) : 0;
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
        uint64_t best = 0;
#pragma unroll
        for (int i = 0; i < MINE; ++i) best = maximum(best, keys[i]);
        best = warp_max(best);
#pragma unroll
        for (int i = 0; i < MINE; ++i)
            if (keys[i] == best) keys[i] = 0;
        ids[k] = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
        shares[k] = from_ordered_bits(static_cast<uint32_t>(best >> 32));
    }
    const float largest = shares[0];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        shares[k] = expf(shares[k] - largest);
        sum += shares[k];
    }
#pragma unroll
    for (int k = 0; k < K; ++k) shares[k] /= sum;
}
