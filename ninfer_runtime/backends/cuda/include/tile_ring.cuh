// As tile_product.cuh, with the weights in the ring too: two tile rows per warp times the tokens of a block, both copied
// to shared memory STAGES - 1 stages ahead, so that neither registers nor other warps have to cover the memory's latency.
// For few tokens per weight and two blocks per SM. Slots of tokens of all warps come first, then slots of weights, of
// which a warp writes and reads only its own: blocks of tiles.cuh as they are, scales included.
#pragma once

#include "tile_product.cuh"

constexpr int ROW_PIECES = ROW_STAGE_BYTES / 16;  // of a tile row in a stage
constexpr int WARP_BYTES = 2 * ROW_STAGE_BYTES;   // of a warp's weights in a stage
constexpr int RING_BYTES = STAGES * (TOKEN_BYTES + WARPS * WARP_BYTES);

DEVICE unsigned char* weights_slot(unsigned char* ring, int slot) {
    return ring + STAGES * TOKEN_BYTES + (slot * WARPS + static_cast<int>(thread_index_anew()) / WARP_LANES) * WARP_BYTES;
}

// Copies a stage of two tile rows, `second` bytes apart, to the warp's slot; l2_ahead: bytes from there on that the L2
// is asked for, 0: none.
DEVICE void copy_weights(unsigned char* to, const uint8_t* from, uint32_t second, uint32_t l2_ahead) {
    const uint32_t lane = thread_index_anew() % WARP_LANES;
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int i = 0; i < ceil_div(ROW_PIECES, WARP_LANES); ++i) {
            const uint32_t piece = i * WARP_LANES + lane;
            if (piece < ROW_PIECES)
                cp_async_16(to + row * ROW_STAGE_BYTES + piece * 16, from + (row * second + piece * 16));
        }
    if (l2_ahead == 0) return;
#pragma unroll
    for (int line = 0; line < ceil_div(ROW_STAGE_BYTES, 128); line += 16)
        if ((line + lane % 16) * 128 < ROW_STAGE_BYTES)
            prefetch_l2(from + (lane < 16 ? 0 : second) + l2_ahead + (line + lane % 16) * 128);
}

// What a lane needs of one 64-column group of a tile row whose stage is in shared memory.
DEVICE void read_weights(LaneWeights& to, const unsigned char* stage, int group, int lane) {
    using Layout = LaneWeights::Layout;
    const unsigned char* block = stage + group / Layout::GROUPS * Layout::BLOCK_BYTES;
    tile_words<FORMAT>(to.words, block, group % Layout::GROUPS, lane);
    if constexpr (FORMAT == W8) to.pairs = tile_scales<W8>(block, lane);
    if constexpr (FORMAT == NVFP4) {
        const unsigned char* row = block + Layout::SCALES_AT + (lane >> 2) * 16 + group % Layout::GROUPS * 4;
        to.pairs = make_uint2(*reinterpret_cast<const uint32_t*>(row), *reinterpret_cast<const uint32_t*>(row + 8));
    }
}

// Sums of n_stages stages, of which the first STAGES - 1 are under way; the next one of the warp's weights begins at
// `from`, its second tile row `second` bytes on. IDLE: only tokens are copied. copies.copy(p, slot, valid) queues this
// thread's part of the next stage's tokens.
template <bool IDLE, int L2_AHEAD, int N, typename Params, typename Copies>
DEVICE void multiply_ring(const Params& p, const Copies& copies, const uint8_t* tiles, uint32_t from, uint32_t second,
                          unsigned char* ring, int n_stages, SumsOf<N>& sums) {
    static_assert(FORMAT != BF16 && N * 8 <= TOKENS && STAGES >= 2, "words are not the operand");
    static_assert(N == 0 || (ROW_STAGE_BYTES % 16 == 0 && RING_BYTES <= 101376), "pieces of 16 bytes in shared memory");
    int slot = 0;
#pragma unroll 1
    for (int left = n_stages; left > 0; --left) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this stage is here, the one before is free
        const bool valid = left >= STAGES;
        const int free_slot = slot == 0 ? STAGES - 1 : slot - 1;
        copies.copy(p, ring + free_slot * TOKEN_BYTES, valid);
        if (!IDLE && valid) {
            const bool ahead = L2_AHEAD > 0 && left > STAGES - 1 + L2_AHEAD;
            copy_weights(weights_slot(ring, free_slot), tiles + from, second, ahead ? L2_AHEAD * ROW_STAGE_BYTES : 0);
            from += ROW_STAGE_BYTES;
        }
        cp_async_commit();
#pragma unroll 1
        for (int group = 0; group < 2 && !IDLE; ++group) {
            const uint32_t thread = thread_index_anew(), lane = thread % WARP_LANES, g = lane / 4, t = lane % 4;
            const unsigned char* stage =
                ring + STAGES * TOKEN_BYTES + (slot * WARPS + thread / WARP_LANES) * WARP_BYTES;
            LaneWeights weights[2];
            Scale scale[2][2];  // [m][row g, g + 8]
#pragma unroll
            for (int m = 0; m < 2; ++m) read_weights(weights[m], stage + m * ROW_STAGE_BYTES, group, lane);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t operand[2][2][4];  // [m][j][register]
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    if (half == 0 || FORMAT == W8)
                        weights[m].scales(stage + m * ROW_STAGE_BYTES + LaneWeights::Layout::SCALES_AT + g * 8, group,
                                          half, scale[m]);
#pragma unroll
                    for (int j = 0; j < 2; ++j) weights[m].operand(2 * half + j, scale[m], operand[m][j]);
                }
                const unsigned char* rows =
                    ring + slot * TOKEN_BYTES + g * 128 + group * GROUP_BYTES + (t + 4 * ((half ^ g) & 1)) * 16;
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const uint4 token = *reinterpret_cast<const uint4*>(rows + n * 1024);
#pragma unroll
                    for (int m = 0; m < 2; ++m) mma_bf16(sums[m][n], operand[m][0], token.x, token.y);
#pragma unroll
                    for (int m = 0; m < 2; ++m) mma_bf16(sums[m][n], operand[m][1], token.z, token.w);
                }
            }
        }
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    cp_async_wait<0>();
    __syncthreads();  // the next piece's copies overwrite what the slowest warp still reads
}
