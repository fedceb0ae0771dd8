// Experts of up to 48 token columns: which block of a launch reads which expert's weights, and the products themselves.
//
// Every block of a launch routes all columns by itself from the router's logits: a warp per column, then a list of the
// distinct experts with their (column, rank) pairs in shared memory. That is shorter than a list that one block makes for
// all others. A pair is column * TOP_K + rank. An entry of the list is up to TILE tokens of one expert; an expert with more
// has several entries side by side, whose blocks read its weights from L2.
//
// Weights are a ring of STAGES blocks of tiles.cuh per warp, which only its warp fills and reads, and which runs on from
// entry to entry.
#pragma once

#include "moe.cuh"
#include "tiles.cuh"

#ifndef N_EXPERTS
#define N_EXPERTS 256
#endif
#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef COLUMNS
#define COLUMNS 8  // the most
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef TILE
#define TILE 8  // tokens of an entry; an mma has eight
#endif

constexpr int WARPS = THREADS / WARP_LANES;
constexpr int PAIRS = COLUMNS * TOP_K;
constexpr int DISTINCT = N_EXPERTS < PAIRS ? N_EXPERTS : PAIRS;
constexpr int ENTRIES = DISTINCT + PAIRS / TILE;
constexpr int MASK_WORDS = ceil_div(COLUMNS, 32);
constexpr int CHUNKS = ceil_div(N_EXPERTS, WARP_LANES);
static_assert(TOP_K <= WARP_LANES && CHUNKS <= WARP_LANES && N_EXPERTS < 65536 && TILE <= 8, "geometry");
static_assert(COLUMNS % 8 == 0 && COLUMNS <= 64 && STAGES >= 2, "geometry");

struct Selection {
    float shares[PAIRS];
    float shared_share[COLUMNS];
    uint32_t masks[N_EXPERTS][MASK_WORDS];  // columns of an expert
    uint32_t chunks[CHUNKS];                // of 32 experts: their entries, and << 16 their pairs
    uint16_t begin_of[N_EXPERTS];
    uint16_t ids[PAIRS];
    uint16_t experts[ENTRIES];  // by falling share for one column, otherwise ascending
    uint16_t begins[ENTRIES];   // of an entry's pairs
    uint16_t counts[ENTRIES];
    uint16_t pairs[PAIRS];      // expert after expert, columns ascending
    uint16_t n_entries;
};
#ifdef SELECTION_BYTES
static_assert(sizeof(Selection) <= SELECTION_BYTES && SELECTION_BYTES % 128 == 0, "shared memory of the selection");
#endif

// Before select_experts; ends with a barrier.
DEVICE void clear_masks(Selection& s) {
    for (int i = threadIdx.x; i < N_EXPERTS * MASK_WORDS; i += THREADS) s.masks[i / MASK_WORDS][i % MASK_WORDS] = 0;
    __syncthreads();
}

// Routing of one column by a warp; logits fp32 [N_EXPERTS + 1], the last one of the shared expert.
DEVICE void select_column(Selection& s, const float* logits, int column) {
    const int lane = static_cast<int>(lane_id());
    float mine[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int expert = lane + WARP_LANES * i;
        mine[i] = expert < N_EXPERTS ? logits[expert] : 0.0f;
    }
    const float shared = logits[N_EXPERTS];
    float logit;
    const int id = route_lane<N_EXPERTS, TOP_K>(mine, logit);
    if (lane < TOP_K) {
        s.ids[column * TOP_K + lane] = static_cast<uint16_t>(id);
        atomicOr(&s.masks[id][column / 32], 1u << (column % 32));
        if (column == 0) {  // all there is where nothing else is
            s.experts[lane] = static_cast<uint16_t>(id);
            s.begins[lane] = static_cast<uint16_t>(lane);
            s.counts[lane] = 1;
            s.pairs[lane] = static_cast<uint16_t>(lane);
        }
    }
    const float share = share_of_lane<TOP_K>(logit);
    if (lane < TOP_K) s.shares[column * TOP_K + lane] = share;
    if (lane == 0) s.shared_share[column] = sigmoid(shared);
}

DEVICE int columns_of(const Selection& s, int expert) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < MASK_WORDS; ++w) count += __popc(s.masks[expert][w]);
    return count;
}

// The entries, from the masks.
DEVICE void list_experts(Selection& s, int n_columns) {
    const int lane = static_cast<int>(lane_id()), thread = static_cast<int>(threadIdx.x);
    for (int chunk = warp_index(); chunk < CHUNKS; chunk += WARPS) {
        const int expert = chunk * WARP_LANES + lane;
        const uint32_t count = expert < N_EXPERTS ? columns_of(s, expert) : 0;
        const uint32_t total = warp_sum((count + TILE - 1) / TILE | count << 16);
        if (lane == 0) s.chunks[chunk] = total;
    }
    __syncthreads();
    for (int chunk = warp_index(); chunk < CHUNKS; chunk += WARPS) {
        const int expert = chunk * WARP_LANES + lane;
        const uint32_t count = expert < N_EXPERTS ? columns_of(s, expert) : 0;
        const uint32_t own = (count + TILE - 1) / TILE | count << 16;
        uint32_t end = own;
#pragma unroll
        for (int delta = 1; delta < WARP_LANES; delta *= 2) {
            const uint32_t lower = shfl_up(end, delta);
            if (lane >= delta) end += lower;
        }
        end += warp_sum(lane < chunk ? s.chunks[lane] : 0u);
        const int position = static_cast<int>((end - own) & 0xffffu), begin = static_cast<int>((end - own) >> 16);
        if (count > 0) s.begin_of[expert] = static_cast<uint16_t>(begin);
        for (int i = 0; i * TILE < static_cast<int>(count); ++i) {
            s.experts[position + i] = static_cast<uint16_t>(expert);
            s.begins[position + i] = static_cast<uint16_t>(begin + i * TILE);
            s.counts[position + i] = static_cast<uint16_t>(minimum(static_cast<int>(count) - i * TILE, TILE));
        }
        if (chunk == CHUNKS - 1 && lane == WARP_LANES - 1) s.n_entries = static_cast<uint16_t>(end & 0xffffu);
    }
    __syncthreads();
    for (int pair = thread; pair < n_columns * TOP_K; pair += THREADS) {
        const int expert = s.ids[pair], column = pair / TOP_K;
        int place = s.begin_of[expert];
#pragma unroll
        for (int w = 0; w < MASK_WORDS; ++w) {
            const uint32_t below = w < column / 32 ? 0xffffffffu : w > column / 32 ? 0u : (1u << (column % 32)) - 1u;
            place += __popc(s.masks[expert][w] & below);
        }
        s.pairs[place] = static_cast<uint16_t>(pair);
    }
    __syncthreads();
}

// Routing of all columns by the block; logits fp32 [n_columns][N_EXPERTS + 1]. Ends with a barrier.
DEVICE void select_experts(Selection& s, const float* logits, int n_columns) {
    for (int column = warp_index(); column < n_columns; column += WARPS)
        select_column(s, logits + column * (N_EXPERTS + 1), column);
    if (n_columns == 1 && threadIdx.x == 0) s.n_entries = TOP_K;
    __syncthreads();
    if (n_columns > 1) list_experts(s, n_columns);
}

// The pairs of one entry.
struct Entry {
    int begin;  // in Selection::pairs
    int count;

    DEVICE void open(const Selection& s, int entry) {
        begin = s.begins[entry];
        count = s.counts[entry];
    }

    // Missing tokens read the last one's row: they make columns that nobody reads.
    DEVICE int pair(const Selection& s, int token) const { return s.pairs[begin + minimum(token, count - 1)]; }
};

// The copying side of a warp's ring. A run is `left` blocks of n_bytes, `stride` bytes apart; 0 bytes behind the last one.
struct WeightStream {
    const uint8_t* at;
    int stride;
    int n_bytes;
    int left;

    DEVICE void run(const uint8_t* first, int n_blocks, int block_bytes, int block_stride) {
        at = first + lane_id() * 16;
        left = n_blocks;
        n_bytes = block_bytes;
        stride = block_stride;
    }

    DEVICE void end() {
        left = 0x7fffffff;
        n_bytes = 0;
        stride = 0;
    }

    // The next block's neighbour, so many bytes behind it.
    template <int MOST_BYTES>
    DEVICE void copy(unsigned char* slot, int bytes) const {
        const int piece = static_cast<int>(lane_id()) * 16;
#pragma unroll
        for (int n = 0; n < ceil_div(MOST_BYTES, 512); ++n)
            if (piece + n * 512 < n_bytes) cp_async_16(slot + piece + n * 512, at + bytes + n * 512);
    }

    // Requests the next block into a slot. True when the run is at its end: the next one is due.
    template <int MOST_BYTES>
    DEVICE bool request(unsigned char* slot) {
        copy<MOST_BYTES>(slot, 0);
        at += stride;
        return --left == 0;
    }
};

template <int N>
using SumsOf = float[N][4];

template <int N>
DEVICE void clear(SumsOf<N>& sums) {
#pragma unroll
    for (int i = 0; i < N * 4; ++i) sums[i / 4][i % 4] = 0.0f;
}

// sums[m] += weights of M tile rows' blocks, side by side in shared memory, x one tile of eight tokens. pieces: this lane's
// 16 bytes for every 32 columns. Operands keep their bias, which leaves by mma over the same activations, once for all
// tile rows: that takes fewer instructions than to subtract it from every code.
template <int F, int M, typename Behind>
DEVICE void multiply_rows(const unsigned char* slot, const uint4 (&pieces)[Tile<F>::STEP / 32], const Behind& behind,
                          SumsOf<M>& sums) {
    using L = Tile<F>;
    constexpr bool BIASED = tile_bias<F>() != 0;
    constexpr uint32_t MINUS = (0xc300u | tile_bias<F>() % 128) * 0x10001u;
    const uint32_t minus[4] = {MINUS, MINUS, MINUS, MINUS};
    const int lane = static_cast<int>(lane_id());
    uint32_t words[M][L::GROUPS][L::WORDS];
    uint2 scales[M];
    uint4 fp4[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const unsigned char* block = slot + m * L::BLOCK_BYTES;
        if constexpr (F == NVFP4)
            fp4[m] = fp4_block_scales(block, lane);
        else if constexpr (F != BF16)
            scales[m] = tile_scales<F>(block, lane);
#pragma unroll
        for (int group = 0; group < L::GROUPS; ++group) tile_words<F>(words[m][group], block, group, lane);
    }
    behind();
#pragma unroll
    for (int group = 0; group < L::GROUPS; ++group) {
        float start[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (BIASED) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 b = pieces[2 * group + half];
                mma_bf16(start, minus, b.x, b.y);
                mma_bf16(start, minus, b.z, b.w);
            }
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
            float parts[4] = {start[0], start[1], start[2], start[3]};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 b = pieces[2 * group + half];
                uint32_t a[2][4];
                if constexpr (F == NVFP4) {
                    const uint32_t both[2] = {fp4_scales(group ? fp4[m].y : fp4[m].x, lane),
                                              fp4_scales(group ? fp4[m].w : fp4[m].z, lane)};
#pragma unroll
                    for (int j = 0; j < 2; ++j) fp4_operand(a[j], words[m][group], 2 * half + j, both);
                } else {
#pragma unroll
                    for (int j = 0; j < 2; ++j) tile_operand<F, !BIASED>(a[j], words[m][group], 2 * half + j);
                }
                if constexpr (F == BF16 || F == NVFP4) {  // nothing is left to scale
                    mma_bf16(sums[m], a[0], b.x, b.y);
                    mma_bf16(sums[m], a[1], b.z, b.w);
                } else {
                    mma_bf16(parts, a[0], b.x, b.y);
                    mma_bf16(parts, a[1], b.z, b.w);
                    if (F != W8 && half == 0) continue;  // W8 has a scale per 32 columns
                    const bool second = F == W8 ? half == 1 : group == 1;  // of the block's two scales
                    const float scale = second ? half_hi(scales[m].x) : half_lo(scales[m].x);
                    const float scale8 = second ? half_hi(scales[m].y) : half_lo(scales[m].y);
                    sums[m][0] += scale * parts[0];
                    sums[m][1] += scale * parts[1];
                    sums[m][2] += scale8 * parts[2];
                    sums[m][3] += scale8 * parts[3];
#pragma unroll
                    for (int i = 0; i < 4; ++i) parts[i] = 0.0f;
                }
            }
        }
    }
}

// One lane's activations of a block's columns: 16-byte pieces, 32 columns apart.
template <int F>
struct Pieces {
    static constexpr int COUNT = Tile<F>::STEP / 32;
    uint4 pieces[COUNT];

    // row: of this lane's token, at its piece.
    DEVICE void fetch(const uint8_t* row, int column) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) pieces[i] = load_16(row + column * 2 + i * 64);
    }
};

// sums += weights x activations for one block in shared memory and `tiles` of N tiles of eight tokens.
// operand(n, piece): this lane's 16 bytes of tile n, 32 columns each; behind() is called behind the reads of weights.
template <int F, int N, typename Operand, typename Behind>
DEVICE void multiply_block(const unsigned char* slot, int tiles, const Operand& operand, const Behind& behind,
                           SumsOf<N>& sums) {
    using L = Tile<F>;
    const int lane = static_cast<int>(lane_id());
    uint32_t words[L::GROUPS][L::WORDS];
    uint2 scales = {0, 0};
    uint4 fp4 = {0, 0, 0, 0};
    if constexpr (F == NVFP4)
        fp4 = fp4_block_scales(slot, lane);
    else if constexpr (F != BF16)
        scales = tile_scales<F>(slot, lane);
#pragma unroll
    for (int group = 0; group < L::GROUPS; ++group) tile_words<F>(words[group], slot, group, lane);
    behind();
#pragma unroll
    for (int group = 0; group < L::GROUPS; ++group) {
        uint32_t a[4][4];
        if constexpr (F == NVFP4) {
            const uint32_t both[2] = {fp4_scales(group ? fp4.y : fp4.x, lane), fp4_scales(group ? fp4.w : fp4.z, lane)};
#pragma unroll
            for (int j = 0; j < 4; ++j) fp4_operand(a[j], words[group], j, both);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) tile_operand<F>(a[j], words[group], j);
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (N > 1 && n >= tiles) break;
            const uint4 b[2] = {operand(n, 2 * group), operand(n, 2 * group + 1)};
            if constexpr (F == BF16 || F == NVFP4) {  // nothing is left to scale
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    mma_bf16(sums[n], a[2 * half], b[half].x, b[half].y);
                    mma_bf16(sums[n], a[2 * half + 1], b[half].z, b[half].w);
                }
            } else {
                float parts[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    mma_bf16(parts[half], a[2 * half], b[half].x, b[half].y);
                    mma_bf16(parts[half], a[2 * half + 1], b[half].z, b[half].w);
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {  // W8 has a scale per 32 columns
                    const bool second = F == W8 ? half == 1 : group == 1;  // of the block's two scales
                    const float scale = second ? half_hi(scales.x) : half_lo(scales.x);
                    const float scale8 = second ? half_hi(scales.y) : half_lo(scales.y);
                    sums[n][0] += scale * parts[half][0];
                    sums[n][1] += scale * parts[half][1];
                    sums[n][2] += scale8 * parts[half][2];
                    sums[n][3] += scale8 * parts[half][3];
                }
            }
        }
    }
}
