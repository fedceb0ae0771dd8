// The experts' products of a prompt chunk, grouped: out[pair][row] = sum_k weight[expert of pair][row][k] x[.][k], with
// SWIGLU silu(gate) · up of interleaved rows. A bank of experts in "tiles" (tiles.cuh); x bf16 [.][x_stride], with
// GATHER row order[pair], without row `pair`; out bf16 [pairs][out_stride]. Pairs lie in the order of their experts
// (moe_group.cu). Alignment: x 16 bytes, x_stride a multiple of 8, tiles 64 bytes, out 4 bytes, out_stride even;
// columns of x from K up to the next multiple of 128 hold zeros. Reference: backends/reference/moe.py. Sums fp32 of
// exact products, tolerance against float64 2e-6 |w||x| and one rounding of the output.
//
// Work: (column, row tile), row tile minor. A column is up to TOKENS pairs of one expert, a row tile 256 of its rows: a
// block computes one piece of work after the other, a warp two tile rows of it (tile_product.cuh), over as many token
// tiles as the column has pairs. Blocks that run together share the columns, and the weights of an expert with several
// columns, in the L2. Every sum has one owner, so results do not depend on the grid.
#include "tile_ring.cuh"

#ifndef SWIGLU
#define SWIGLU 0
#endif
#ifndef GATHER
#define GATHER 0
#endif

constexpr bool RING = MIN_BLOCKS > 1;  // weights pass through the ring too
constexpr int L2_AHEAD = RING && STAGES > 2 ? 0 : 4;  // stages that weights are asked into the L2 ahead of their use
constexpr int SLOT_BYTES = RING ? TOKEN_BYTES : STAGE_BYTES;  // of tokens
constexpr int PASS_TILES = TOKENS_PER_PASS / 8;
constexpr int PASSES = TOKENS / TOKENS_PER_PASS;

static_assert(CHUNKS == PASSES && PASS_TILES == 2 && TOKENS == 48, "a chunk per pass, the variants of compute");

struct MoeLargeParams {
    const uint8_t* tiles;
    const uint16_t* x;
    uint16_t* out;
    const int* order;
    const int* columns;    // [..][4]: expert, first pair, number of pairs, 0
    const int* n_columns;
    int n_rows;            // of an expert's output
    int expert_tiles;      // tile rows of an expert
    int row_tiles;         // ceil(expert_tiles / 16)
    int x_stride;
    int out_stride;
    int stages;            // ceil(k / 128)
    float factor;          // of sums: 2^24 where weights are scaled, 1 for bf16
};

struct Work {
    int expert, first_pair, n_pairs;
    int tile_row;  // the warp's first, in its expert; -1: nothing, only copies
};

DEVICE Work work_of(const MoeLargeParams& p, int index) {
    const uint4 column = load_16(p.columns + index / p.row_tiles * 4);
    const int tile_row = (index % p.row_tiles * WARPS + warp_index()) * 2;
    return {static_cast<int>(column.x), static_cast<int>(column.y), static_cast<int>(column.z),
            tile_row < p.expert_tiles ? tile_row : -1};
}

// Behind the ring every thread keeps words of its own that registers are too few for: for each pass where its token's
// row begins, the byte of its chunk in a row, and the index of the piece of work.
constexpr int CHUNK = PASSES, INDEX = PASSES + 1;
constexpr uint32_t NO_TOKEN = ~uint32_t{0};  // instead of the begin of a row

DEVICE uint32_t* kept(unsigned char* ring, int thread) {
    return reinterpret_cast<uint32_t*>(ring + (RING ? RING_BYTES : STAGES * STAGE_BYTES)) + thread;
}

// Copies this thread's 16-byte chunk of a token in each of N_PASSES passes to `slot`, and goes on to the next stage.
template <int N_PASSES>
DEVICE void copy_tokens(const MoeLargeParams& p, unsigned char* ring, unsigned char* slot, bool valid) {
    const int thread = static_cast<int>(thread_index_anew());
    const int token = thread / STAGE_CHUNKS, chunk = thread % STAGE_CHUNKS;
    unsigned char* to = slot + (chunk / 8) * GROUP_BYTES + token * 128 + ((chunk % 8) ^ (token & 1) * 4) * 16;
    uint32_t* own = kept(ring, thread);
    const uint32_t in_row = own[CHUNK * THREADS];
    own[CHUNK * THREADS] = in_row + STAGE_COLUMNS * 2;
#pragma unroll
    for (int i = 0; i < N_PASSES; ++i) {
        const uint32_t row = own[i * THREADS];
        const bool exists = valid && row != NO_TOKEN;
        cp_async_16_zfill(to + i * TOKENS_PER_PASS * 128,
                          reinterpret_cast<const unsigned char*>(p.x) + (exists ? row + in_row : 0), exists);
    }
}

// What multiply asks to copy.
template <int N_PASSES>
struct Copies {
    unsigned char* ring;
    DEVICE void copy(const MoeLargeParams& p, unsigned char* slot, bool valid) const {
        copy_tokens<N_PASSES>(p, ring, slot, valid);
    }
};

DEVICE uint32_t first_byte(const MoeLargeParams& p, const Work& work, int second) {
    const uint32_t row = work.expert * p.expert_tiles + minimum(work.tile_row + second, p.expert_tiles - 1);
    return row * p.stages * ROW_STAGE_BYTES;
}

// Queues the copies of the first STAGES - 1 stages of a piece of work.
DEVICE void start_copies(const MoeLargeParams& p, unsigned char* ring, const Work& work) {
    const int thread = static_cast<int>(thread_index_anew());
    const int token = thread / STAGE_CHUNKS;
    uint32_t* own = kept(ring, thread);
    own[CHUNK * THREADS] = thread % STAGE_CHUNKS * 16;
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int at = i * TOKENS_PER_PASS + token, pair = work.first_pair + at;
        const bool exists = at < work.n_pairs;
        own[i * THREADS] = exists ? static_cast<uint32_t>(GATHER ? p.order[pair] : pair) * p.x_stride * 2 : NO_TOKEN;
    }
    const uint32_t from = first_byte(p, work, 0), second = first_byte(p, work, 1) - from;
    const int lane = thread % WARP_LANES;
    if (!RING && work.tile_row >= 0) {
        const int bytes = minimum(p.stages, L2_AHEAD) * ROW_STAGE_BYTES;
#pragma unroll 1
        for (int at = lane * 128; at < bytes; at += WARP_LANES * 128) {
            prefetch_l2(p.tiles + from + at);
            prefetch_l2(p.tiles + from + second + at);
        }
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        copy_tokens<PASSES>(p, ring, ring + i * SLOT_BYTES, i < p.stages);
        if (RING && work.tile_row >= 0 && i < p.stages)
            copy_weights(weights_slot(ring, i), p.tiles + from + i * ROW_STAGE_BYTES, second, 0);
        cp_async_commit();
    }
}

template <int N>
DEVICE void finish(const MoeLargeParams& p, const Work& work, const SumsOf<N>& sums) {
    const uint32_t lane = thread_index_anew() % WARP_LANES;
    const int t = static_cast<int>(lane) & 3;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = n * 8 + 2 * t + i;
            const bool exists = token < work.n_pairs;
            uint16_t* row = p.out + static_cast<int64_t>(work.first_pair + token) * p.out_stride;
            float values[2][2];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) values[m][half] = sums[m][n][2 * half + i] * p.factor;
            if (SWIGLU) {
                store_rows(row, work.tile_row * 8, work.tile_row * 8 + 8, p.n_rows, true, exists,
                           gated(values[0][0], values[0][1]), gated(values[1][0], values[1][1]), lane);
            } else {
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    store_rows(row, (work.tile_row + m) * 16, (work.tile_row + m) * 16 + 8, p.n_rows, true, exists,
                               values[m][0], values[m][1], lane);
            }
        }
}

template <bool IDLE, int N>
DEVICE void product(const MoeLargeParams& p, const Copies<ceil_div(N, PASS_TILES)>& copies, uint32_t from,
                    uint32_t second, unsigned char* ring, SumsOf<N>& sums) {
    if constexpr (RING)
        multiply_ring<IDLE, L2_AHEAD, N>(p, copies, p.tiles, from + (STAGES - 1) * ROW_STAGE_BYTES, second, ring,
                                         p.stages, sums);
    else
        multiply<IDLE, L2_AHEAD, N>(p, copies, p.tiles, from, from + second, ring, p.stages, sums);
}

// One piece of work with N token tiles; afterwards the copies of the next one are under way. What it is, is read again
// where it is needed: while sums grow, every register counts.
template <int N>
DEVICE void compute(const MoeLargeParams& p, unsigned char* ring) {
    SumsOf<N> sums;
    clear<N>(sums);
    {
        const Copies<ceil_div(N, PASS_TILES)> copies = {ring};
        const Work work = work_of(p, kept(ring, thread_index_anew())[INDEX * THREADS]);
        if (work.tile_row < 0)
            product<true, N>(p, copies, 0, 0, ring, sums);
        else
            product<false, N>(p, copies, first_byte(p, work, 0), first_byte(p, work, 1) - first_byte(p, work, 0), ring,
                              sums);
    }
    const int next = kept(ring, thread_index_anew())[INDEX * THREADS] + gridDim.x;
    if (next < *p.n_columns * p.row_tiles) start_copies(p, ring, work_of(p, next));
    const Work work = work_of(p, kept(ring, thread_index_anew())[INDEX * THREADS]);
    if (work.tile_row >= 0) finish<N>(p, work, sums);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) moe_large(const __grid_constant__ MoeLargeParams p) {
    DYNAMIC_SHARED(unsigned char, ring);
    grid_dependency_launch();
    grid_dependency_wait();
    int index = static_cast<int>(blockIdx.x);
    if (index >= *p.n_columns * p.row_tiles) return;
    start_copies(p, ring, work_of(p, index));
    do {
        kept(ring, thread_index_anew())[INDEX * THREADS] = index;
        const int n_tiles = ceil_div(work_of(p, index).n_pairs, 8);
        if (n_tiles <= 2)
            compute<2>(p, ring);
        else if (n_tiles <= 4)
            compute<4>(p, ring);
        else if (MIN_BLOCKS > 1 && n_tiles == 5)
            compute<(MIN_BLOCKS > 1 ? 5 : 6)>(p, ring);
        else
            compute<6>(p, ring);
        index = kept(ring, thread_index_anew())[INDEX * THREADS] + gridDim.x;
    } while (index < *p.n_columns * p.row_tiles);
}
