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

// logits[i] of lane l is expert l + 32 i (those from EXPERTS on are not looked at). Lane k < K gets the id of the k-th
// largest logit, the lower id first among equals, and the logit; K <= 32.
template <int EXPERTS, int K>
DEVICE int route_lane(const float (&logits)[ceil_div(EXPERTS, WARP_LANES)], float& logit) {
    static_assert(K <= EXPERTS && K <= WARP_LANES, "experts per token");
    constexpr int MINE = ceil_div(EXPERTS, WARP_LANES);
    const uint32_t lane = lane_id();
    uint32_t keys[MINE];  // 0: taken, or no expert
#pragma unroll
    for (int i = 0; i < MINE; ++i)
        keys[i] = lane + WARP_LANES * i < EXPERTS ? maximum(ordered_bits(logits[i]), 1u) : 0u;
    uint32_t own_id = 0, own_key = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        uint32_t best = keys[0];
#pragma unroll
        for (int i = 1; i < MINE; ++i) best = maximum(best, keys[i]);
        best = reduce_max(best);
        uint32_t first = 0xffffffffu;
#pragma unroll
        for (int i = MINE - 1; i >= 0; --i)
            if (keys[i] == best) first = lane + WARP_LANES * i;
        const uint32_t id = reduce_min(first);
#pragma unroll
        for (int i = 0; i < MINE; ++i)
            if (id == lane + WARP_LANES * i) keys[i] = 0;
        if (lane == static_cast<uint32_t>(k)) {
            own_id = id;
            own_key = best;
        }
    }
    logit = from_ordered_bits(own_key);
    return static_cast<int>(own_id);
}

// The share of lane k < K, whose logit is the k-th largest: a softmax over these K, equal to one over all experts that is
// divided by the sum of the K. Reference: backends/reference/moe.py, route.
template <int K>
DEVICE float share_of_lane(float logit) {
    const float largest = shfl(logit, 0);
    const float weight = static_cast<int>(lane_id()) < K ? expf(logit - largest) : 0.0f;
    return weight / warp_sum(weight);
}

// Both for every lane: K ids by falling logit, and their shares.
template <int EXPERTS, int K>
DEVICE void route_token(const float (&logits)[ceil_div(EXPERTS, WARP_LANES)], int (&ids)[K], float (&shares)[K]) {
    float logit;
    const int id = route_lane<EXPERTS, K>(logits, logit);
    const float share = share_of_lane<K>(logit);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        ids[k] = shfl(id, k);
        shares[k] = shfl(share, k);
    }
}
