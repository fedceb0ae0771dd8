// h[pair] = silu(gate) * up of the expert that a (column, rank) pair goes to, for up to 48 columns of a round: routing,
// then one pass over the distinct experts' weights (moe_round.cuh). logits fp32 [T][N_EXPERTS + 1]; x bf16 [T][x_stride], to
// be divided by its rms; bank in tiles (tiles.cuh), gate and up interleaved; h bf16 [T * TOP_K][out_stride]. The first
// block also leaves the routing: ids int32 and shares fp32 [T][TOP_K], the shared expert's share fp32 [T].
// Alignment: tiles 64 bytes, x and its rows 16. Reference: backends/reference/moe.py; tolerance 1e-5 |w||x| before the
// SwiGLU and one rounding.
//
// A tile row is the work of SPLIT warps, which divide its columns: a (expert, tile row) pair of the grid's line for each
// group of SPLIT warps in turn. The last one leaves the result; the others' sums go there through shared memory.
#include "moe_round.cuh"

#ifndef FORMAT
#define FORMAT Q4
#endif
#ifndef SPLIT
#define SPLIT 2
#endif
#ifndef BLOCKS
#define BLOCKS 16  // of tiles.cuh in a tile row
#endif
#ifndef EXPERT_TILES
#define EXPERT_TILES 64
#endif

constexpr int SLOT = Tile<FORMAT>::BLOCK_BYTES;
constexpr int GROUPS = WARPS / SPLIT;
constexpr int EXCHANGE = (SPLIT - 1) * NT * 4 * WARP_LANES;  // floats on their way in a group; two such
static_assert(WARPS % SPLIT == 0 && GROUPS <= 15, "a barrier per group");
static_assert(SELECTION_BYTES % 128 == 0, "alignment");
static_assert(SELECTION_BYTES + GROUPS * 2 * EXCHANGE * 4 + WARPS * STAGES * SLOT <= 101376, "shared memory");

struct MoeGateUpParams {
    const uint8_t* tiles;
    const float* logits;
    const uint16_t* x;
    const float* ss;  // fp32 [n_parts][T], parts of sum x^2; null: x is divided already
    uint16_t* out;
    int* ids;
    float* shares;
    float* shared_share;
    int n_columns;
    int x_stride;
    int out_stride;
    int n_out;  // rows of h
    int n_parts;
    float inverse_hidden;
    float epsilon;
    float factor;  // of sums
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    moe_gate_up(const __grid_constant__ MoeGateUpParams p) {
    DYNAMIC_SHARED(unsigned char, shared);
    STATIC_SHARED(float, rstd[COLUMNS]);
    Selection& s = *reinterpret_cast<Selection*>(shared);
    const int lane = static_cast<int>(lane_id()), g = lane >> 2, t = lane & 3;
    const int group = warp_index() / SPLIT, part = warp_index() % SPLIT;
    float* exchange = reinterpret_cast<float*>(shared + SELECTION_BYTES) + group * 2 * EXCHANGE + lane;
    unsigned char* ring =
        shared + SELECTION_BYTES + GROUPS * 2 * EXCHANGE * 4 + warp_index() * (STAGES * SLOT);

    grid_dependency_wait();
    grid_dependency_launch();  // behind the wait: what lies before this launch is then complete for the next one, too
    for (int column = WARPS - 1 - warp_index(); column < p.n_columns; column += WARPS) {
        float sum = 0.0f;
        if (p.ss != nullptr)
            for (int i = lane; i < p.n_parts; i += WARP_LANES) sum += p.ss[i * p.n_columns + column];
        sum = warp_sum(sum);
        if (lane == 0) rstd[column] = p.ss != nullptr ? 1.0f / sqrtf(sum * p.inverse_hidden + p.epsilon) : 1.0f;
    }
    select_experts(s, p.logits, p.n_columns);
    const int n_tasks = s.n_distinct * EXPERT_TILES;

    const int first_block = part * BLOCKS / SPLIT, n_blocks = (part + 1) * BLOCKS / SPLIT - first_block;
    const int stride = static_cast<int>(gridDim.x) * GROUPS;
    int asked = static_cast<int>(blockIdx.x) * GROUPS + group;  // the task that the ring has come to
    WeightStream stream;
    const auto open = [&] {
        if (asked < n_tasks && n_blocks > 0) {
            const size_t tile = static_cast<size_t>(s.experts[asked / EXPERT_TILES]) * EXPERT_TILES + asked % EXPERT_TILES;
            stream.run(p.tiles + (tile * BLOCKS + first_block) * SLOT, n_blocks, SLOT, SLOT);
        } else {
            stream.end();
        }
        asked += stride;
    };
    open();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i)
        if (stream.request<SLOT>(ring + i * SLOT)) open();

    int task = static_cast<int>(blockIdx.x) * GROUPS + group;
    const uint8_t* x = reinterpret_cast<const uint8_t*>(p.x + t * 8);
    const auto row_at = [&](const Expert& expert, int n) {
        return x + static_cast<size_t>(expert.pair(s, n * 8 + g) / TOP_K) * p.x_stride * 2;
    };
    Expert expert;
    const uint8_t* row = x;
    Pieces<FORMAT> ahead;
    if (task < n_tasks) {
        expert.open(s, task / EXPERT_TILES);
        row = row_at(expert, 0);
        if (n_blocks > 0) ahead.fetch(row, first_block * Tile<FORMAT>::STEP);
    }
    int slot = 0, turn = 0;
#pragma unroll 1
    while (task < n_tasks) {
        Expert next = expert;
        const uint8_t* next_row = row;
        if (task + stride < n_tasks) {
            next.open(s, (task + stride) / EXPERT_TILES);
            next_row = row_at(next, 0);
        }
        Sums sums;
        clear(sums);
#pragma unroll 1
        for (int i = 0; i < n_blocks; ++i) {
            const int column = (first_block + i) * Tile<FORMAT>::STEP;
            const Pieces<FORMAT> now = ahead;
            if (i + 1 < n_blocks)
                ahead.fetch(row, column + Tile<FORMAT>::STEP);
            else
                ahead.fetch(next_row, first_block * Tile<FORMAT>::STEP);
            cp_async_wait<STAGES - 2>();
            warp_sync();
            unsigned char* freed = ring + (slot == 0 ? (STAGES - 1) * SLOT : slot - SLOT);
            multiply_block<FORMAT>(
                ring + slot, now, [&](int n) { return row_at(expert, n); }, column, expert.tiles,
                [&] {
                    if (stream.request<SLOT>(freed)) open();
                },
                sums);
            slot = slot == (STAGES - 1) * SLOT ? 0 : slot + SLOT;
        }
        if constexpr (SPLIT > 1) {
            float* place = exchange + turn * EXCHANGE;
            if (part < SPLIT - 1) {
#pragma unroll
                for (int i = 0; i < NT * 4; ++i)
                    if (NT == 1 || i / 4 < expert.tiles) place[(part * NT * 4 + i) * WARP_LANES] = sums[i / 4][i % 4];
            }
            barrier_sync(1 + group, SPLIT * WARP_LANES);
            if (part == SPLIT - 1) {
#pragma unroll
                for (int other = 0; other < SPLIT - 1; ++other)
#pragma unroll
                    for (int i = 0; i < NT * 4; ++i)
                        if (NT == 1 || i / 4 < expert.tiles)
                            sums[i / 4][i % 4] += place[(other * NT * 4 + i) * WARP_LANES];
            }
            turn ^= 1;
        }
        const int out_row = task % EXPERT_TILES * 8 + g;
        if (part == SPLIT - 1 && out_row < p.n_out) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                if (NT > 1 && n >= expert.tiles) break;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = n * 8 + 2 * t + i;
                    if (token >= expert.count) continue;
                    const int pair = s.pairs[expert.begin + token];
                    const float scale = rstd[pair / TOP_K] * p.factor;
                    const float gate = sums[n][i] * scale, up = sums[n][i + 2] * scale;
                    p.out[static_cast<size_t>(pair) * p.out_stride + out_row] = float_to_bf16(silu(gate) * up);
                }
            }
        }
        expert = next;
        row = next_row;
        task += stride;
    }

    if (blockIdx.x == 0) {
        for (int pair = threadIdx.x; pair < p.n_columns * TOP_K; pair += THREADS) {
            p.ids[pair] = s.ids[pair];
            p.shares[pair] = s.shares[pair];
        }
        for (int column = threadIdx.x; column < p.n_columns; column += THREADS)
            p.shared_share[column] = s.shared_share[column];
    }
}
