// Parts that the attention kernels share: norm and rotation of a head held by a warp, and the even division of work.
#pragma once
#include "common.cuh"
#include "kv.cuh"

constexpr int RATIO = N_HEADS / N_KV_HEADS;
constexpr int PAIRS = ROTARY_DIM / 2;
constexpr float NO_SCORE = -1e30f;  // finite, so that differences of two are 0 and not NaN
#define MASKED __uint_as_float(0xff800000u)  // the weight of a masked key is 0 whatever the largest score
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float SCORE_SCALE = LOG2_E / 16.0f;  // 1 / sqrt(HEAD_DIM), to base 2

static_assert(N_HEADS % N_KV_HEADS == 0 && RATIO >= 1 && RATIO <= 8, "query heads per KV head");
static_assert(ROTARY_DIM % 2 == 0 && ROTARY_DIM > 0 && ROTARY_DIM <= HEAD_DIM, "leading dims that turn");

// The device copy of ops/attention.py rope_table.
struct RopeTable {
    float frequency[PAIRS];
    int axis[PAIRS];
};

struct Turn {
    float cosine;
    float sine;
};

// Cosine and sine of an angle of 0 up to 2^20 in fp32, both within 1e-7. The first product is exact: the angle is a
// multiple of 2^-23 (or small), and so is a multiple of the 22-bit constant. No local memory, unlike sincosf.
DEVICE Turn turn_of(float angle) {
    const int quarter = float_to_int_rn(angle * 0.63661977236758134308f);
    const float n = static_cast<float>(quarter);
    float x = fmaf(n, -1.57079625129699707031e+0f, angle);
    x = fmaf(n, -7.54978941586159635335e-8f, x);
    x = fmaf(n, -5.39030285815811905290e-15f, x);
    const float square = x * x;
    float sine = fmaf(-1.9515295891e-4f, square, 8.3321608736e-3f);
    sine = fmaf(sine, square, -1.6666654611e-1f);
    sine = fmaf(sine * square, x, x);
    float cosine = fmaf(2.443315711809948e-5f, square, -1.388731625493765e-3f);
    cosine = fmaf(cosine, square, 4.166664568298827e-2f);
    cosine = fmaf(cosine, square * square, fmaf(-0.5f, square, 1.0f));
    const float c = quarter & 1 ? sine : cosine, s = quarter & 1 ? cosine : sine;
    return {(quarter + 1) & 2 ? -c : c, quarter & 2 ? -s : s};
}

// x / rms(x) * (1 + weight) of a head; weight: the lane's 8 words, bf16.
DEVICE void normalize_head(float (&x)[LANE_DIMS], uint4 weight, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) squares = fmaf(x[i], x[i], squares);
    const float scale = 1.0f / sqrtf(warp_sum(squares) / HEAD_DIM + eps);
    float w[LANE_DIMS];
    decode_bf16(w, weight);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) x[i] = x[i] * scale * (1.0f + w[i]);
}

// Turn pair (i, i + PAIRS) by turns[i] (shared memory).
DEVICE void rotate_head(float (&x)[LANE_DIMS], const Turn* turns) {
    const int first = LANE_DIMS * static_cast<int>(lane_id());
    float other[LANE_DIMS];
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) {
        const int dim = first + i;
        const int partner = dim < PAIRS ? dim + PAIRS : dim < ROTARY_DIM ? dim - PAIRS : dim;
        if (PAIRS % LANE_DIMS == 0) {
            other[i] = shfl(x[i], partner / LANE_DIMS);
        } else {
#pragma unroll
            for (int j = 0; j < LANE_DIMS; ++j) {
                const float candidate = shfl(x[j], partner / LANE_DIMS);
                if (partner % LANE_DIMS == j) other[i] = candidate;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) {
        const int dim = first + i;
        if (dim >= ROTARY_DIM) continue;
        const Turn turn = turns[dim < PAIRS ? dim : dim - PAIRS];
        x[i] = dim < PAIRS ? x[i] * turn.cosine - other[i] * turn.sine : x[i] * turn.cosine + other[i] * turn.sine;
    }
}

// The head times the Walsh-Hadamard matrix of 256 (Sylvester order), divided by 16: its own inverse. Distances 1, 2, 4, ..,
// 128 in this order, float32. By a whole warp.
DEVICE void hadamard(float (&x)[LANE_DIMS]) {
#pragma unroll
    for (int distance = 1; distance < LANE_DIMS; distance *= 2) {
#pragma unroll
        for (int i = 0; i < LANE_DIMS; ++i) {
            if (i & distance) continue;
            const float a = x[i], b = x[i + distance];
            x[i] = a + b;
            x[i + distance] = a - b;
        }
    }
#pragma unroll
    for (int mask = 1; mask < WARP_LANES; mask *= 2) {
        const bool is_upper = (lane_id() & mask) != 0;
#pragma unroll
        for (int i = 0; i < LANE_DIMS; ++i) {
            const float other = shfl_xor(x[i], mask);
            x[i] = is_upper ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) x[i] *= 0.0625f;
}

// First of the units that part `part` of `n_parts` works on; n_parts <= n_units, so that none is empty.
DEVICE int part_begin(int part, int n_parts, int n_units) {
    return static_cast<int>(static_cast<uint64_t>(part) * n_units / n_parts);
}

// The part that works on `unit`.
DEVICE int part_of(int unit, int n_parts, int n_units) {
    return static_cast<int>(((static_cast<uint64_t>(unit) + 1) * n_parts - 1) / n_units);
}
