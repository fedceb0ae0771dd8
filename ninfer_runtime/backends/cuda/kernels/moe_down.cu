// x[c] += sum over ranks of share * (down of the expert) h[pair] + shared share * (shared down) hs[c], for up to 48 columns
// of a round; then what the next matrix reads: bf16(x (1 + w)) and parts of sum x^2, as linear_small's residual epilogue.
// One block per tile row: 16 outputs of all experts. logits fp32 [T][N_EXPERTS + 1]; h bf16 [T * TOP_K][h_stride]; hs bf16
// [T][shared_stride]; x fp32 [T][n_out]. Weights in tiles (tiles.cuh). Alignment: tiles 64 bytes, h, hs and rows 16.
// Reference: backends/reference/moe.py; tolerance 1e-5 |w||h|. Order of sums: x, the shared expert, experts by rank: a
// column's bits do not depend on the other columns' experts.
//
// All but the routed experts' products comes before the dependency wait: of the launch ahead only h is read, and that
// one lets this one begin when the router's logits and hs are complete. SPLIT warps divide an entry's columns.
#include "moe_round.cuh"

#ifndef FORMAT
#define FORMAT Q5
#endif
#ifndef SHARED_FORMAT
#define SHARED_FORMAT W8
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#ifndef BLOCKS
#define BLOCKS 4  // of tiles.cuh in a tile row
#endif
#ifndef SHARED_BLOCKS
#define SHARED_BLOCKS 8
#endif

constexpr int NT = COLUMNS / 8;  // tiles of tokens of the shared expert
constexpr int ROUTED_BYTES = Tile<FORMAT>::BLOCK_BYTES;
constexpr int SHARED_BYTES = Tile<SHARED_FORMAT>::BLOCK_BYTES;
constexpr int SLOT = ROUTED_BYTES > SHARED_BYTES ? ROUTED_BYTES : SHARED_BYTES;
constexpr int ROWS = 16;
constexpr int GROUPS = WARPS / SPLIT;
constexpr int SHARED_WARPS = WARPS < SHARED_BLOCKS ? WARPS : SHARED_BLOCKS;  // that have a part of the shared expert
constexpr int PARTS = SPLIT * PAIRS > SHARED_WARPS * COLUMNS ? SPLIT * PAIRS : SHARED_WARPS * COLUMNS;  // of 16 sums
constexpr int MINE = ceil_div(COLUMNS * ROWS, THREADS);  // results of a thread
static_assert(THREADS % ROWS == 0 && WARPS % SPLIT == 0 && SPLIT <= 2, "geometry");
static_assert(SELECTION_BYTES + PARTS * ROWS * 4 + WARPS * STAGES * SLOT <= 101376, "shared memory");

struct MoeDownParams {
    const uint8_t* tiles;
    const uint8_t* shared_tiles;
    const float* logits;
    const uint16_t* h;
    const uint16_t* shared_h;
    float* residual;
    uint16_t* normed;  // bf16 [T][normed_stride]; may be null
    const uint16_t* next_norm;
    float* ss_out;     // fp32 [tile rows][T]
    int n_columns;
    int h_stride;
    int shared_stride;
    int n_out;
    int n_tiles;       // of an expert: the grid
    int normed_stride;
    float factor;      // of sums
    float shared_factor;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) moe_down(const __grid_constant__ MoeDownParams p) {
    DYNAMIC_SHARED(unsigned char, shared);
    Selection& s = *reinterpret_cast<Selection*>(shared);
    float* parts = reinterpret_cast<float*>(shared + SELECTION_BYTES);  // [PARTS][ROWS]
    const int lane = static_cast<int>(lane_id()), g = lane >> 2, t = lane & 3, warp = warp_index();
    const int tile = blockIdx.x, thread = static_cast<int>(threadIdx.x);
    unsigned char* ring = shared + SELECTION_BYTES + PARTS * ROWS * 4 + warp * (STAGES * SLOT);

    grid_dependency_launch();
    const int part = warp % SPLIT;
    const int first_block = part * BLOCKS / SPLIT, n_blocks = (part + 1) * BLOCKS / SPLIT - first_block;
    // The shared expert's blocks: every WARPS-th is this warp's.
    const int n_shared = (SHARED_BLOCKS - warp + WARPS - 1) / WARPS;
    int asked = warp / SPLIT;  // list entry that the ring comes to next
    WeightStream stream;
    const auto open = [&] {
        if (asked < s.n_entries && n_blocks > 0) {
            const size_t row = static_cast<size_t>(s.experts[asked]) * p.n_tiles + tile;
            stream.run(p.tiles + (row * BLOCKS + first_block) * ROUTED_BYTES, n_blocks, ROUTED_BYTES, ROUTED_BYTES);
        } else {
            stream.end();
        }
        asked += GROUPS;
    };
    stream.run(p.shared_tiles + (static_cast<size_t>(tile) * SHARED_BLOCKS + warp) * SHARED_BYTES, n_shared, SHARED_BYTES,
               WARPS * SHARED_BYTES);
    int requested = 0;
    for (; requested < minimum(n_shared, STAGES - 1); ++requested) {
        stream.request<SLOT>(ring + requested * SLOT);
        cp_async_commit();
    }
    clear_masks(s);
    select_experts(s, p.logits, p.n_columns);
    const auto request = [&](unsigned char* slot) {
        const bool ended = stream.request<SLOT>(slot);
        cp_async_commit();
        if (ended) open();
    };
    if (n_shared < STAGES) open();  // all of them are asked for; otherwise the last request will say so
#pragma unroll 1
    for (; requested < STAGES - 1; ++requested) request(ring + requested * SLOT);

    // Residual stream and norm of this thread's results.
    float result[MINE], norm[MINE];
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int column = (thread + i * THREADS) / ROWS, row = tile * ROWS + thread % ROWS;
        const bool exists = column < p.n_columns && row < p.n_out;
        result[i] = exists ? p.residual[static_cast<size_t>(column) * p.n_out + row] : 0.0f;
        norm[i] = exists && p.normed != nullptr ? bf16_to_float(p.next_norm[row]) : 0.0f;
    }

    int slot = 0;
    const auto await = [&] {  // the slot to request into behind the reads of this one
        cp_async_wait<STAGES - 2>();
        warp_sync();
        return ring + (slot == 0 ? (STAGES - 1) * SLOT : slot - SLOT);
    };
    {
        SumsOf<NT> sums;
        clear(sums);
        const uint8_t* h = reinterpret_cast<const uint8_t*>(p.shared_h + t * 8);
        const int tiles = NT == 1 ? 1 : ceil_div(p.n_columns, 8);
#pragma unroll 1
        for (int i = 0; i < n_shared; ++i) {
            const uint8_t* column = h + (warp + i * WARPS) * Tile<SHARED_FORMAT>::STEP * 2;
            unsigned char* freed = await();
            multiply_block<SHARED_FORMAT, NT>(
                ring + slot, tiles,
                [&](int n, int piece) {
                    const int token = minimum(n * 8 + g, p.n_columns - 1);
                    return load_16(column + static_cast<size_t>(token) * p.shared_stride * 2 + piece * 64);
                },
                [&] { request(freed); }, sums);
            slot = slot == (STAGES - 1) * SLOT ? 0 : slot + SLOT;
        }
        if (n_shared > 0) {
#pragma unroll
            for (int i = 0; i < NT * 4; ++i) {
                const int column = i / 4 * 8 + 2 * t + i % 2;
                parts[(warp * COLUMNS + column) * ROWS + i % 4 / 2 * 8 + g] = sums[i / 4][i % 4];
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int column = (thread + i * THREADS) / ROWS;
        if (column >= p.n_columns) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < SHARED_WARPS; ++w) sum += parts[(w * COLUMNS + column) * ROWS + thread % ROWS];
        result[i] += s.shared_share[column] * (sum * p.shared_factor);
    }
    __syncthreads();

    grid_dependency_wait();
    const uint8_t* h = reinterpret_cast<const uint8_t*>(p.h + t * 8) + first_block * Tile<FORMAT>::STEP * 2;
    const auto row_at = [&](const Entry& entry) {
        return h + static_cast<size_t>(entry.pair(s, g)) * p.h_stride * 2;
    };
    Entry entry;
    const uint8_t* row = h;
    Pieces<FORMAT> ahead;
    const int n_entries = n_blocks > 0 ? s.n_entries : 0;
    if (warp / SPLIT < n_entries) {
        entry.open(s, warp / SPLIT);
        row = row_at(entry);
        ahead.fetch(row, 0);
    }
#pragma unroll 1
    for (int i = warp / SPLIT; i < n_entries; i += GROUPS) {
        Entry next = entry;
        const uint8_t* next_row = row;
        if (i + GROUPS < n_entries) {
            next.open(s, i + GROUPS);
            next_row = row_at(next);
        }
        SumsOf<1> sums;
        clear(sums);
#pragma unroll 1
        for (int block = 0; block < n_blocks; ++block) {
            const Pieces<FORMAT> now = ahead;
            if (block + 1 < n_blocks)
                ahead.fetch(row, (block + 1) * Tile<FORMAT>::STEP);
            else
                ahead.fetch(next_row, 0);
            unsigned char* freed = await();
            multiply_rows<FORMAT, 1>(ring + slot, now.pieces, [&] { request(freed); }, sums);
            slot = slot == (STAGES - 1) * SLOT ? 0 : slot + SLOT;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int token = 2 * t + j % 2;
            if (token < entry.count)
                parts[(part * PAIRS + s.pairs[entry.begin + token]) * ROWS + j / 2 * 8 + g] = sums[0][j];
        }
        entry = next;
        row = next_row;
    }
    __syncthreads();

    constexpr int FIRST_PART = SPLIT > BLOCKS ? SPLIT - BLOCKS : 0;  // parts below it have no blocks
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int column = (thread + i * THREADS) / ROWS, row = tile * ROWS + thread % ROWS;
        const bool exists = column < p.n_columns && row < p.n_out;
        float x = result[i];
        if (exists) {
#pragma unroll
            for (int k = 0; k < TOP_K; ++k) {
                const int pair = column * TOP_K + k;
                float sum = 0.0f;
#pragma unroll
                for (int other = FIRST_PART; other < SPLIT; ++other)
                    sum += parts[(other * PAIRS + pair) * ROWS + thread % ROWS];
                x += s.shares[pair] * (sum * p.factor);
            }
            p.residual[static_cast<size_t>(column) * p.n_out + row] = x;
            if (p.normed != nullptr)
                p.normed[static_cast<size_t>(column) * p.normed_stride + row] = float_to_bf16(x * (1.0f + norm[i]));
        }
        float square = exists ? x * x : 0.0f;
#pragma unroll
        for (int mask = 1; mask < ROWS; mask <<= 1) square += shfl_xor(square, mask);
        if (exists && thread % ROWS == 0) p.ss_out[tile * p.n_columns + column] = square;
    }
}
