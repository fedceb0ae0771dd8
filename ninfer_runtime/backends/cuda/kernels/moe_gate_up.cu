// h[pair] = silu(gate) * up of the expert that a (column, rank) pair goes to, for up to 48 columns of a round: routing,
// then one pass over the distinct experts' weights (moe_round.cuh). logits fp32 [T][N_EXPERTS + 1]; x bf16 [T][x_stride],
// to be divided by its rms; bank in tiles (tiles.cuh), gate and up interleaved; h bf16 [T * TOP_K][out_stride]. The first
// block also leaves the routing: ids int32 and shares fp32 [T][TOP_K], the shared expert's share fp32 [T].
// Alignment: tiles 64 bytes, x and its rows 16. Reference: backends/reference/moe.py; tolerance 1e-5 |w||x| before the
// SwiGLU and one rounding.
//
// ROWS tile rows are the work of SPLIT warps, which divide their columns: an (entry, tile rows) pair of the grid's line for
// each group of SPLIT warps in turn. The last one leaves the result; the others' sums go there through shared memory. The ring
// brings the tokens' columns of a block beside the block: from L2 they take as long as the weights take from memory.
#define TILE 4
#include "moe_round.cuh"

#ifndef FORMAT
#define FORMAT Q4
#endif
#ifndef SPLIT
#define SPLIT 2
#endif
#ifndef ROWS
#define ROWS 2
#endif
#ifndef BLOCKS
#define BLOCKS 16  // of tiles.cuh in a tile row
#endif
#ifndef EXPERT_TILES
#define EXPERT_TILES 64
#endif

constexpr int WEIGHT_BYTES = Tile<FORMAT>::BLOCK_BYTES;
constexpr int TOKEN_BYTES = Tile<FORMAT>::STEP * 2;  // of a token's columns of a block
constexpr int TOKEN_PIECES = TOKEN_BYTES / 16;
constexpr int COPIES = TILE * TOKEN_PIECES / WARP_LANES;  // of a lane
constexpr int TOKENS_AT = ROWS * WEIGHT_BYTES;  // in a slot
constexpr int SLOT = TOKENS_AT + TILE * TOKEN_BYTES;
constexpr int EXPERT_ROWS = ceil_div(EXPERT_TILES, ROWS);  // runs of ROWS tile rows
constexpr int GROUPS = WARPS / SPLIT;
constexpr int EXCHANGE = (SPLIT - 1) * ROWS * 4 * WARP_LANES;  // floats on their way in a group; two such
static_assert(ROWS == 1 || ROWS == 2, "tile rows");
static_assert(WARPS % SPLIT == 0 && GROUPS <= 15 && TILE * TOKEN_PIECES % WARP_LANES == 0, "geometry");
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

// A token's row in a slot: 64 bytes off its neighbours', so that two rows of a phase touch all banks.
DEVICE int in_row(int token, int byte) { return token * TOKEN_BYTES + (byte ^ (token & 1) * 64); }

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

    clear_masks(s);
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
    const int n_tasks = s.n_entries * EXPERT_ROWS;

    const int first_block = part * BLOCKS / SPLIT, n_blocks = (part + 1) * BLOCKS / SPLIT - first_block;
    const int stride = static_cast<int>(gridDim.x) * GROUPS;
    int asked = static_cast<int>(blockIdx.x) * GROUPS + group;  // the task that the ring has come to
    WeightStream stream;
    const uint8_t* tokens[COPIES];  // this lane's pieces of the block that the ring has come to
    int n_copies = 0;
    int next_row = 0;  // bytes to the second tile row; 0 where there is none
    const auto open = [&] {
        n_copies = 0;
        if (asked < n_tasks && n_blocks > 0) {
            const int entry = asked / EXPERT_ROWS, row = asked % EXPERT_ROWS * ROWS;
            const size_t tile = static_cast<size_t>(s.experts[entry]) * EXPERT_TILES + row;
            next_row = row + 1 < EXPERT_TILES ? BLOCKS * WEIGHT_BYTES : 0;
            stream.run(p.tiles + (tile * BLOCKS + first_block) * WEIGHT_BYTES, n_blocks, WEIGHT_BYTES, WEIGHT_BYTES);
            const int begin = s.begins[entry], count = s.counts[entry];
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int piece = lane + i * WARP_LANES, token = piece / TOKEN_PIECES;
                if (token >= count) continue;
                tokens[i] = reinterpret_cast<const uint8_t*>(p.x) +
                            static_cast<size_t>(s.pairs[begin + token] / TOP_K) * p.x_stride * 2 +
                            first_block * TOKEN_BYTES + piece % TOKEN_PIECES * 16;
                n_copies = i + 1;
            }
        } else {
            stream.end();
        }
        asked += stride;
    };
    const auto request = [&](unsigned char* slot) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int piece = lane + i * WARP_LANES;
            if (i < n_copies) {
                cp_async_16(slot + TOKENS_AT + in_row(piece / TOKEN_PIECES, piece % TOKEN_PIECES * 16), tokens[i]);
                tokens[i] += TOKEN_BYTES;
            }
        }
        if constexpr (ROWS == 2) stream.copy<WEIGHT_BYTES>(slot + WEIGHT_BYTES, next_row);
        const bool ended = stream.request<WEIGHT_BYTES>(slot);
        cp_async_commit();
        if (ended) open();
    };
    open();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) request(ring + i * SLOT);

    int slot = 0, turn = 0;
#pragma unroll 1
    for (int task = static_cast<int>(blockIdx.x) * GROUPS + group; task < n_tasks; task += stride) {
        Entry entry;
        entry.open(s, task / EXPERT_ROWS);
        const int token = minimum(g, entry.count - 1);
        SumsOf<ROWS> sums;
        clear(sums);
#pragma unroll 1
        for (int i = 0; i < n_blocks; ++i) {
            cp_async_wait<STAGES - 2>();
            warp_sync();
            unsigned char* freed = ring + (slot == 0 ? (STAGES - 1) * SLOT : slot - SLOT);
            const unsigned char* row = ring + slot + TOKENS_AT;
            uint4 b[TOKEN_BYTES / 64];
#pragma unroll
            for (int piece = 0; piece < TOKEN_BYTES / 64; ++piece)
                b[piece] = *reinterpret_cast<const uint4*>(row + in_row(token, piece * 64 + t * 16));
            multiply_rows<FORMAT, ROWS>(ring + slot, b, [&] { request(freed); }, sums);
            slot = slot == (STAGES - 1) * SLOT ? 0 : slot + SLOT;
        }
        if constexpr (SPLIT > 1) {
            float* place = exchange + turn * EXCHANGE;
            if (part < SPLIT - 1) {
#pragma unroll
                for (int i = 0; i < ROWS * 4; ++i) place[(part * ROWS * 4 + i) * WARP_LANES] = sums[i / 4][i % 4];
            }
            barrier_sync(1 + group, SPLIT * WARP_LANES);
            if (part == SPLIT - 1) {
#pragma unroll
                for (int other = 0; other < SPLIT - 1; ++other)
#pragma unroll
                    for (int i = 0; i < ROWS * 4; ++i)
                        sums[i / 4][i % 4] += place[(other * ROWS * 4 + i) * WARP_LANES];
            }
            turn ^= 1;
        }
        if (part == SPLIT - 1) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (2 * t + i >= entry.count) continue;
                const int pair = s.pairs[entry.begin + 2 * t + i];
                const float scale = rstd[pair / TOP_K] * p.factor;
#pragma unroll
                for (int m = 0; m < ROWS; ++m) {
                    const int tile = task % EXPERT_ROWS * ROWS + m, out_row = tile * 8 + g;
                    const float gate = sums[m][i] * scale, up = sums[m][i + 2] * scale;
                    if (tile < EXPERT_TILES && out_row < p.n_out)
                        p.out[static_cast<size_t>(pair) * p.out_stride + out_row] = float_to_bf16(silu(gate) * up);
                }
            }
        }
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
