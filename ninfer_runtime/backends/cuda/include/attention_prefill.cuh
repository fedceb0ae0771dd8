// What the attention kernels of a prompt chunk share: parameters, how the work is counted and dealt, the running softmax of a
// tile's rows, and the gate. Rows of a tile: (token, head of the KV group). A unit of work: a KV head, a tile, 32 keys.
#pragma once
#include "attention.cuh"

#ifndef LOWEST
#define LOWEST 0  // 1: index 0 of the row is not seen
#endif

struct AttentionPrefillParams {
    const uint16_t* qk;
    const uint16_t* gv;
    const int* pages;
    const uint8_t* k;
    const uint8_t* v;
    const uint16_t* k_scales;
    const uint16_t* v_scales;
    float* partial;  // [2 * part][TILE_ROWS][HEAD_DIM]: a part's first tile, if begun by another part; + 1: its last
    float* stats;    // [2 * part][TILE_ROWS][2]: score that the weights are relative to, sum of the weights
    uint16_t* out;
    float* mixed;    // [token][N_HEADS * HEAD_DIM], rotated, not gated; null: without rotation
    int n_tokens;
    int start;
    int qk_stride;
    int gv_stride;
    int out_stride;
    int n_parts;
};

constexpr int WARPS = 8;
constexpr int TILE_ROWS = 128;
constexpr int TILE_KEYS = 32;
constexpr int WEIGHT_BYTES = TILE_ROWS * TILE_KEYS * 2;
constexpr int PAGE_UNITS = PAGE_TOKENS / TILE_KEYS;
constexpr int PAGE_RING = 4;
constexpr int WHOLE = -1;  // slot of a tile that one part does from its first key to its last
constexpr float STALE = 8.0f;  // weights are relative to a score that may be this far (to base 2) below the largest
constexpr float WEIGHT_SHIFT = KV_QUANTIZED ? 6.0f : 0.0f;  // fp16 weights up to 2^14: small ones keep their digits

static_assert(THREADS == WARPS * WARP_LANES && PAGE_TOKENS % TILE_KEYS == 0, "eight warps; a tile lies in one page");

DEVICE int n_tiles(const AttentionPrefillParams& p) { return ceil_div(p.n_tokens * RATIO, TILE_ROWS); }

// Key tiles that the rows of a tile see.
DEVICE int tile_units(const AttentionPrefillParams& p, int tile) {
    const int end_token = minimum(p.n_tokens, (TILE_ROWS * tile + TILE_ROWS - 1) / RATIO + 1);
    return ceil_div(p.start + end_token, TILE_KEYS);
}

DEVICE int head_units(const AttentionPrefillParams& p) {
    int total = 0;
    for (int tile = 0; tile < n_tiles(p); ++tile) total += tile_units(p, tile);
    return total;
}

DEVICE int weight_offset(int row, int chunk) { return row * TILE_KEYS * 2 + 16 * (chunk ^ (row >> 1 & 3)); }

// The running softmax of rows 16 warp + g and + 8 of a tile. A lane's scores s[n][i] are those of keys 8n + 2t + i % 2, or,
// SPREAD, of 8t + 4 (i % 2) + n; i / 2 says which row.
template <bool SPREAD>
struct alignas(16) TileSoftmax {
    float reference[2];
    float sum[2];

    DEVICE void clear() {
        reference[0] = reference[1] = NO_SCORE;
        sum[0] = sum[1] = 0.0f;
    }

    // Scores into 16-bit weights; scale, above 0: of the rows' scores, to base 2. factors[row] is what the row's earlier
    // results shrink by, mostly 1; true if it is not 1 in one of the lane's rows.
    DEVICE bool weigh(float (&s)[TILE_KEYS / 8][4], const float (&scale)[2], uint8_t* weights, float* factors, int first_key,
                      int start, int tile) {
        const int g = lane_id() / 4, t = lane_id() % 4, row = 16 * static_cast<int>(threadIdx.x / WARP_LANES) + g;
        if (first_key + TILE_KEYS > start) {  // some row of the chunk may not see them all
            const int first = first_key + (SPREAD ? 8 : 2) * t;
            const int last[2] = {start + (tile * TILE_ROWS + row) / RATIO - first,
                                 start + (tile * TILE_ROWS + row + 8) / RATIO - first};
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if ((SPREAD ? 4 * (i % 2) + n : 8 * n + i % 2) > last[i / 2]) s[n][i] = MASKED;
            }
        }
        if (LOWEST == 1 && first_key == 0 && t == 0) s[0][0] = s[0][2] = MASKED;
        float top[2] = {fmaxf(s[0][0], s[0][1]), fmaxf(s[0][2], s[0][3])};
#pragma unroll
        for (int n = 1; n < TILE_KEYS / 8; ++n) {
            top[0] = fmaxf(top[0], fmaxf(s[n][0], s[n][1]));
            top[1] = fmaxf(top[1], fmaxf(s[n][2], s[n][3]));
        }
#pragma unroll
        for (int mask = 1; mask <= 2; mask <<= 1) {
            const float other[2] = {shfl_xor(top[0], mask), shfl_xor(top[1], mask)};
            top[0] = fmaxf(top[0], other[0]);
            top[1] = fmaxf(top[1], other[1]);
        }
        float offset[2];
        bool moves = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scaled = top[half] * scale[half];
            const float now = scaled > reference[half] + STALE ? scaled : reference[half];
            const float factor = exp2_approx(reference[half] - now);
            moves = moves || factor != 1.0f;
            reference[half] = now;
            sum[half] *= factor;
            if (t == 0) factors[row + 8 * half] = factor;
            offset[half] = WEIGHT_SHIFT - now;
        }
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = exp2_approx(fmaf(s[n][i], scale[i / 2], offset[i / 2]));
            sum[0] += s[n][0] + s[n][1];
            sum[1] += s[n][2] + s[n][3];
        }
        const int row4 = row >> 1 & 3;
        if (SPREAD) {
            uint8_t* const at = weights + row * TILE_KEYS * 2 + 16 * (t ^ row4);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<uint4*>(at + 8 * half * TILE_KEYS * 2) = {
                    pack(s[0][2 * half], s[1][2 * half]), pack(s[2][2 * half], s[3][2 * half]),
                    pack(s[0][2 * half + 1], s[1][2 * half + 1]), pack(s[2][2 * half + 1], s[3][2 * half + 1])};
        } else {
            uint8_t* const target = weights + row * TILE_KEYS * 2 + 4 * t;
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; ++n) {
                uint8_t* const at = target + 16 * (n ^ row4);
                *reinterpret_cast<uint32_t*>(at) = pack(s[n][0], s[n][1]);
                *reinterpret_cast<uint32_t*>(at + 8 * TILE_KEYS * 2) = pack(s[n][2], s[n][3]);
            }
        }
        return moves;
    }

    DEVICE static uint32_t pack(float a, float b) { return KV_QUANTIZED ? pack_half(a, b) : pack_bf16(a, b); }

    DEVICE void publish(float* references, float* sums) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * warp_index() + static_cast<int>(lane_id()) / 4 + 8 * half;
            sum[half] += shfl_xor(sum[half], 1);
            sum[half] += shfl_xor(sum[half], 2);
            if (lane_id() % 4 == 0) references[row] = reference[half], sums[row] = sum[half];
        }
    }
};

// Within 1e-6 relative; the result is rounded to bf16.
DEVICE float gate_of(float x) { return rcp_approx(1.0f + exp2_approx(-LOG2_E * x)); }

DEVICE uint32_t gated(float a, float b, uint32_t gate) {
    const uint32_t mixed = pack_bf16(a, b);
    return pack_bf16(bf16_lo(mixed) * gate_of(bf16_lo(gate)), bf16_hi(mixed) * gate_of(bf16_hi(gate)));
}

// Element of a row of gates or outputs where a row of the tile's head group begins.
DEVICE int64_t row_begin(int token, int stride, int head, int row) {
    return static_cast<int64_t>(token) * stride + (head * RATIO + row % RATIO) * HEAD_DIM;
}
