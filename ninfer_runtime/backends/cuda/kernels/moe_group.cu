// A prompt chunk's routing to experts and back: three kernels around the products of moe_large.cu. T tokens, K experts
// each, pair = K token + slot. Reference: backends/reference/moe.py; ids equal, shares within 1e-6, sums in fp32.
//
// moe_route   ids int32, shares fp32 [T][K] and the shared expert's share fp32 [T] from logits fp32 [T][logits_stride]
//             (column N_EXPERTS: the shared expert's gate); histogram int32 [blocks][N_EXPERTS] of BLOCK_TOKENS tokens
// moe_group   pairs in the order of their experts, within an expert by token: order[place[pair]] = token. Columns of
//             the grouped products: of every expert its pairs in runs of at most COLUMN_TOKENS, those of most token
//             tiles first, so that blocks that take every n-th one have equal work.
// moe_reduce  x[t] += sum over slots of share · routed[place[pair]], in slot order, + shared share · shared[t]
// Arrays 16-byte aligned, HIDDEN a multiple of 8.
#include "moe.cuh"

#ifndef N_EXPERTS
#define N_EXPERTS 256
#endif
#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef COLUMN_TOKENS
#define COLUMN_TOKENS 48
#endif
#ifndef HIDDEN
#define HIDDEN 2048
#endif

constexpr int BLOCK_TOKENS = 32;
constexpr int WARPS = THREADS / WARP_LANES;

// Experts one after the other for whole warps: expert of a thread's i-th turn.
constexpr int TURNS = ceil_div(N_EXPERTS, THREADS);

struct MoeRouteParams {
    const float* logits;
    int* ids;
    float* shares;
    float* shared_shares;
    int* histogram;
    int n_tokens;
    int logits_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) moe_route(const __grid_constant__ MoeRouteParams p) {
    STATIC_SHARED(int, counts[N_EXPERTS]);
    constexpr int MINE = ceil_div(N_EXPERTS, WARP_LANES);
    for (int expert = threadIdx.x; expert < N_EXPERTS; expert += THREADS) counts[expert] = 0;
    __syncthreads();
    grid_dependency_launch();
    grid_dependency_wait();
    const int lane = static_cast<int>(lane_id());
    for (int i = warp_index(); i < BLOCK_TOKENS; i += WARPS) {
        const int token = static_cast<int>(blockIdx.x) * BLOCK_TOKENS + i;
        if (token >= p.n_tokens) break;
        const float* row = p.logits + static_cast<int64_t>(token) * p.logits_stride;
        float logits[MINE];
#pragma unroll
        for (int m = 0; m < MINE; ++m) {
            const int expert = lane + WARP_LANES * m;
            logits[m] = expert < N_EXPERTS ? row[expert] : 0.0f;
        }
        int ids[TOP_K];
        float shares[TOP_K];
        route_token<N_EXPERTS, TOP_K>(logits, ids, shares);
#pragma unroll
        for (int k = 0; k < TOP_K; ++k)
            if (lane == k) {
                p.ids[token * TOP_K + k] = ids[k];
                p.shares[token * TOP_K + k] = shares[k];
                atomicAdd(counts + ids[k], 1);
            }
        if (lane == 0) p.shared_shares[token] = sigmoid(row[N_EXPERTS]);
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < N_EXPERTS; expert += THREADS)
        p.histogram[static_cast<int>(blockIdx.x) * N_EXPERTS + expert] = counts[expert];
}

struct MoeGroupParams {
    const int* ids;
    const int* histogram;
    int* order;
    int* place;
    int* columns;    // [..][4]: expert, first pair, number of pairs, 0
    int* n_columns;
    int* shared_columns;    // the same of the shared expert: BLOCK_TOKENS tokens each
    int* n_shared_columns;
    int n_tokens;
};

// Sum of the values of the threads before this one; total: of all. scratch: one int per warp.
DEVICE int block_exclusive_sum(int value, int* scratch, int& total) {
    const int lane = static_cast<int>(lane_id());
    int sum = value;
#pragma unroll
    for (int delta = 1; delta < WARP_LANES; delta *= 2) {
        const int other = shfl_up(sum, delta);
        if (lane >= delta) sum += other;
    }
    __syncthreads();
    if (lane == WARP_LANES - 1) scratch[warp_index()] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        before += warp < warp_index() ? scratch[warp] : 0;
        total += scratch[warp];
    }
    return before + sum - value;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) moe_group(const __grid_constant__ MoeGroupParams p) {
    STATIC_SHARED(uint4, four_ids[BLOCK_TOKENS * TOP_K / 4]);
    STATIC_SHARED(int, scratch[WARPS]);
    grid_dependency_launch();
    grid_dependency_wait();
    const int block = static_cast<int>(blockIdx.x), first_token = block * BLOCK_TOKENS;
    const int n = minimum(p.n_tokens - first_token, BLOCK_TOKENS) * TOP_K;
    uint32_t* ids = reinterpret_cast<uint32_t*>(four_ids);
    for (int i = threadIdx.x; i < BLOCK_TOKENS * TOP_K; i += THREADS)
        ids[i] = i < n ? static_cast<uint32_t>(p.ids[first_token * TOP_K + i]) : ~uint32_t{0};
    __syncthreads();
    int pairs_before = 0, counts[TURNS], firsts[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int expert = turn * THREADS + static_cast<int>(threadIdx.x);
        const bool exists = expert < N_EXPERTS;
        int count = 0, earlier = 0;  // pairs of this expert: all, and of blocks before this one
        if (exists)
#pragma unroll 16
            for (int b = 0; b < static_cast<int>(gridDim.x); ++b) {
                const int of_block = p.histogram[b * N_EXPERTS + expert];
                count += of_block;
                earlier += b < block ? of_block : 0;
            }
        int n_pairs;
        counts[turn] = count;
        firsts[turn] = pairs_before + block_exclusive_sum(count, scratch, n_pairs);
        pairs_before += n_pairs;
        int next = firsts[turn] + earlier;
        for (int at = 0; at < n && exists; at += 4) {  // ids behind the last token are no expert's
            const uint4 four = *reinterpret_cast<const uint4*>(ids + at);
            const uint32_t each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (each[i] == static_cast<uint32_t>(expert)) {
                    p.place[first_token * TOP_K + at + i] = next;
                    p.order[next++] = first_token + (at + i) / TOP_K;
                }
        }
    }
    if (threadIdx.x == 0) store_16(p.shared_columns + block * 4, make_uint4(0, first_token, n / TOP_K, 0));
    if (block > 0) return;
    int columns_before = 0;
#pragma unroll 1
    for (int tiles = COLUMN_TOKENS / 8; tiles > 0; --tiles) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            // Columns of this expert that have so many token tiles: full ones, or what is left behind them.
            const int full = counts[turn] / COLUMN_TOKENS, rest = counts[turn] % COLUMN_TOKENS;
            const int first_full = tiles == COLUMN_TOKENS / 8 ? 0 : full;
            const int end = ceil_div(rest, 8) == tiles ? full + 1 : full;
            int n_columns;
            int column = columns_before + block_exclusive_sum(end - first_full, scratch, n_columns);
            columns_before += n_columns;
            for (int i = first_full; i < end; ++i, ++column)
                store_16(p.columns + column * 4,
                         make_uint4(turn * THREADS + threadIdx.x, firsts[turn] + i * COLUMN_TOKENS,
                                    i < full ? COLUMN_TOKENS : rest, 0));
        }
    }
    if (threadIdx.x == 0) {
        *p.n_columns = columns_before;
        *p.n_shared_columns = static_cast<int>(gridDim.x);
    }
}

struct MoeReduceParams {
    float* x;                // [T][HIDDEN]
    const uint16_t* routed;  // bf16 [pairs][HIDDEN]
    const uint16_t* shared;  // bf16 [T][HIDDEN]
    const int* place;
    const float* shares;
    const float* shared_shares;
};

DEVICE void add_scaled(float (&sums)[8], const uint16_t* from, float factor) {
    const uint4 words = load_16(from);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sums[2 * i] += factor * bf16_lo(pairs[i]);
        sums[2 * i + 1] += factor * bf16_hi(pairs[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    moe_reduce(const __grid_constant__ MoeReduceParams p) {
    static_assert(HIDDEN % 8 == 0, "16-byte pieces");
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t token = blockIdx.x;
    int64_t rows[TOP_K];
    float shares[TOP_K];
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        rows[k] = p.place[token * TOP_K + k];
        shares[k] = p.shares[token * TOP_K + k];
    }
    const float shared_share = p.shared_shares[token];
    for (int column = 8 * static_cast<int>(threadIdx.x); column < HIDDEN; column += 8 * THREADS) {
        float sums[8] = {};
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) add_scaled(sums, p.routed + rows[k] * HIDDEN + column, shares[k]);
        add_scaled(sums, p.shared + token * HIDDEN + column, shared_share);
        float* x = p.x + token * HIDDEN + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 before = load_16(x + 4 * half);
            store_16(x + 4 * half, make_uint4(__float_as_uint(__uint_as_float(before.x) + sums[4 * half]),
                                              __float_as_uint(__uint_as_float(before.y) + sums[4 * half + 1]),
                                              __float_as_uint(__uint_as_float(before.z) + sums[4 * half + 2]),
                                              __float_as_uint(__uint_as_float(before.w) + sums[4 * half + 3])));
        }
    }
}
