// y[token][row] = sum_k weight[row][k] x[token][k] for many tokens: weights in "tiles" (tiles.cuh), x bf16
// [T][x_stride]. Alignment: x 16 bytes, x_stride a multiple of 8, tiles 64 bytes, outputs 4 bytes. Any T, N, K;
// columns of x from K up to the next multiple of 128 hold zeros. Up to MATRICES matrices of the same K and FORMAT.
// Reference: backends/reference/linear.py. Weights are bf16(code * bf16(scale)), of NVFP4 exact; products are exact, sums fp32;
// tolerance against float64 on those weights 2e-6 |w||x| and one rounding of the output.
//
// A block computes 256 rows (16 tile rows) of TOKENS tokens, a warp 2 tile rows of all of them (tile_product.cuh).
//
// Work: tiles (row tile major, token tile minor: neighbours share weights) x stages, in one line. Whole waves of tiles
// first, one tile per block; then the rest in equal spans of stages. A block that starts inside a tile leaves its sums
// to the tile's owner, which is the block with the lower index that starts the tile, ends with it, and adds them in
// index order. The grid is resident as a whole.
#include "tile_product.cuh"

#ifndef EPILOGUE
#define EPILOGUE 0
#endif
#ifndef MATRICES
#define MATRICES 1
#endif

enum Epilogue { STORE, SWIGLU, RESIDUAL };  // as in ops/linear_large.py

// Stages that weights are asked into the L2 ahead of their use. Where few, long tiles are shared by blocks at different
// places of K this hides the DRAM (7 % on an H200); elsewhere the instructions cost more than it brings.
constexpr int L2_AHEAD = EPILOGUE == RESIDUAL ? 4 : 0;
constexpr int N_TILES = TOKENS / 8;

constexpr int MAX_MATRICES = 6;

static_assert(TOKENS % 32 == 0, "geometry");
static_assert(MATRICES >= 1 && MATRICES <= MAX_MATRICES, "matrices");

struct LinearLargeParams {
    const uint8_t* tiles[MAX_MATRICES];
    void* out[MAX_MATRICES];  // STORE: bf16 or fp32 [T][out_stride]; SWIGLU: bf16; RESIDUAL: fp32, added to
    const uint16_t* x;
    float* partials;   // per block: TOKENS * 256 sums
    uint32_t* flags;   // per block; 0 between launches
    int n_rows[MAX_MATRICES];       // of the output: half the matrix's for SWIGLU
    int n_tile_rows[MAX_MATRICES];
    int stage_bytes[MAX_MATRICES];  // of a tile row in a stage
    int scales_at[MAX_MATRICES];    // byte in them of the scales that are copied to the ring; -1: none
    int first_pair[MAX_MATRICES];   // pairs of tile rows before this matrix
    int out_stride[MAX_MATRICES];
    int out_float[MAX_MATRICES];    // STORE: nonzero for fp32
    float factor[MAX_MATRICES];     // of sums: 2^24 where weights are scaled, 1 for bf16
    int n_pairs;                // of all matrices
    int n_tokens;
    int token_tiles;
    int x_stride;
    int stages;                 // of a tile: ceil(k / 128)
    int whole_tiles;            // computed by one block each
    int shared_tiles;           // the rest
};

using Sums = SumsOf<N_TILES>;

// What a warp computes: two tile rows of one matrix (the second is a repetition when the matrix has an odd number).
struct Assignment {
    int matrix;  // -1: nothing, only copies
    int tile_row;
};

DEVICE Assignment assignment(const LinearLargeParams& p, int row_tile) {
    const int pair = row_tile * WARPS + warp_index();
    if (pair >= p.n_pairs) return {-1, 0};
    int matrix = 0;
#pragma unroll
    for (int m = 1; m < MATRICES; ++m)
        if (pair >= p.first_pair[m]) matrix = m;
    return {matrix, 2 * (pair - p.first_pair[matrix])};
}

// The copying side of the ring: this thread's chunk of every stage, one token in TOKENS_PER_PASS.
struct Copies {
    uint32_t source;   // byte of the chunk from p.x on
    int valid_passes;  // passes whose token exists

    // Copies one stage to `slot` of the ring and goes on to the next; zeros when not `valid`. No branch: a stage is one
    // basic block, so that copies, operands and products are scheduled into each other.
    DEVICE void copy(const LinearLargeParams& p, unsigned char* slot, bool valid) {
        const int token = static_cast<int>(threadIdx.x) / STAGE_CHUNKS;
        const int chunk = static_cast<int>(threadIdx.x) % STAGE_CHUNKS;
        unsigned char* to = slot + (chunk / 8) * GROUP_BYTES + token * 128 + ((chunk % 8) ^ (token & 1) * 4) * 16;
        const unsigned char* from = reinterpret_cast<const unsigned char*>(p.x) + source;
        const uint32_t pass_bytes = TOKENS_PER_PASS * 2 * p.x_stride;
        const int passes = valid ? valid_passes : 0;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            cp_async_16_zfill(to + i * TOKENS_PER_PASS * 128, from + i * pass_bytes, i < passes);
        source += STAGE_COLUMNS * 2;
    }
};

// The copies of `n` stages of a tile from `stage` on, the first STAGES - 1 of them under way.
DEVICE Copies start_copies(const LinearLargeParams& p, unsigned char* ring, const Assignment& a, int token_tile,
                           int stage, int n) {
    const int first = token_tile * TOKENS + static_cast<int>(threadIdx.x) / STAGE_CHUNKS;
    const int column = stage * STAGE_COLUMNS + static_cast<int>(threadIdx.x) % STAGE_CHUNKS * 8;
    Copies copies = {(static_cast<uint32_t>(first) * p.x_stride + column) * 2,
                     ceil_div(maximum(p.n_tokens - first, 0), TOKENS_PER_PASS)};
    const uint8_t* scales = nullptr;  // a word of this lane's
    int step = 0;
    if (a.matrix >= 0 && p.scales_at[a.matrix] >= 0) {
        const int lane = static_cast<int>(lane_id());
        const int64_t row = minimum(a.tile_row + lane / 16, p.n_tile_rows[a.matrix] - 1);
        step = p.stage_bytes[a.matrix];
        scales = p.tiles[a.matrix] + (row * p.stages + stage) * step + p.scales_at[a.matrix] + lane % 16 * 4;
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < n) {
            copies.copy(p, ring + i * STAGE_BYTES, true);
            if (step) cp_async_4(ring + i * STAGE_BYTES + TOKEN_BYTES + threadIdx.x * 4, scales + i * step);
        }
        cp_async_commit();
    }
    return copies;
}

// ---- handing sums over: [register quadruple][thread] float4

DEVICE float* partial_of(const LinearLargeParams& p, int block) {
    return p.partials + (static_cast<int64_t>(block) * 2 * N_TILES * THREADS + threadIdx.x) * 4;
}

DEVICE void leave(const LinearLargeParams& p, const Sums& sums) {
    float* to = partial_of(p, blockIdx.x);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            store_16(to + (m * N_TILES + n) * THREADS * 4,
                     make_uint4(__float_as_uint(sums[m][n][0]), __float_as_uint(sums[m][n][1]),
                                __float_as_uint(sums[m][n][2]), __float_as_uint(sums[m][n][3])));
    __syncthreads();
    if (threadIdx.x == 0) store_release(p.flags + blockIdx.x, 1);
}

DEVICE void collect(const LinearLargeParams& p, int block, Sums& sums) {
    if (threadIdx.x == 0)
        while (load_acquire(p.flags + block) == 0) {
        }
    __syncthreads();
    const float* from = partial_of(p, block);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const uint4 part = load_16(from + (m * N_TILES + n) * THREADS * 4);
            sums[m][n][0] += __uint_as_float(part.x);
            sums[m][n][1] += __uint_as_float(part.y);
            sums[m][n][2] += __uint_as_float(part.z);
            sums[m][n][3] += __uint_as_float(part.w);
        }
    __syncthreads();
    if (threadIdx.x == 0) store_release(p.flags + block, 0);
}

// ---- epilogues. A lane has rows g, g + 8 of tokens 2t, 2t + 1: sums [0], [1] and [2], [3].

// fp32, each 8 rows of a token one 32-byte sector. What is added to is read in batches: a store might change it.
template <bool ADD>
DEVICE void finish_float(float* out, int64_t stride, int n_tokens, int first_token, int n_rows, int first_row,
                         const Sums& sums) {
    const int g = static_cast<int>(lane_id()) >> 2, t = static_cast<int>(lane_id()) & 3;
    constexpr int BATCH = 4;
#pragma unroll
    for (int n0 = 0; n0 < N_TILES; n0 += BATCH) {
        float before[BATCH][2][4];
#pragma unroll
        for (int at = 0; at < BATCH * 8; ++at) {
            const int token = first_token + (n0 + at / 8) * 8 + 2 * t + at % 2, row = first_row + at % 8 / 2 * 8 + g;
            const bool exists = token < n_tokens && row < n_rows;
            before[at / 8][at % 8 / 4][at % 4] = ADD && exists ? out[token * stride + row] : 0.0f;
        }
#pragma unroll
        for (int at = 0; at < BATCH * 8; ++at) {
            const int token = first_token + (n0 + at / 8) * 8 + 2 * t + at % 2, row = first_row + at % 8 / 2 * 8 + g;
            if (token < n_tokens && row < n_rows)
                out[token * stride + row] = before[at / 8][at % 8 / 4][at % 4] + sums[at % 8 / 4][n0 + at / 8][at % 4];
        }
    }
}

DEVICE void finish(const LinearLargeParams& p, const Assignment& a, int first_token, Sums& sums) {
    const float factor = p.factor[a.matrix];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] *= factor;
    const int t = static_cast<int>(lane_id()) & 3;
    const int n_rows = p.n_rows[a.matrix];
    const int64_t stride = p.out_stride[a.matrix];
    if (EPILOGUE == RESIDUAL || (EPILOGUE == STORE && p.out_float[a.matrix])) {
        finish_float<EPILOGUE == RESIDUAL>(static_cast<float*>(p.out[a.matrix]), stride, p.n_tokens,
                                           first_token, n_rows, a.tile_row * 16, sums);
        return;
    }
    const bool aligned = (stride & 1) == 0;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = first_token + n * 8 + 2 * t + i;
            const bool exists = token < p.n_tokens;
            uint16_t* row = static_cast<uint16_t*>(p.out[a.matrix]) + token * stride;
            if (EPILOGUE == SWIGLU) {
                store_rows(row, a.tile_row * 8, a.tile_row * 8 + 8, n_rows, aligned, exists,
                           gated(sums[0][n][i], sums[0][n][2 + i]), gated(sums[1][n][i], sums[1][n][2 + i]));
            } else {
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    store_rows(row, (a.tile_row + m) * 16, (a.tile_row + m) * 16 + 8, n_rows, aligned, exists,
                               sums[m][n][i], sums[m][n][2 + i]);
            }
        }
    }
}

// The index-th piece of work of a block: stages [begin, end) of a tile.
struct Piece {
    int tile, begin, end;
    int tile_end;  // in the line of shared stages
};

DEVICE int span_begin(const LinearLargeParams& p, int block) {
    return static_cast<int>(static_cast<int64_t>(p.shared_tiles) * p.stages * block / gridDim.x);
}

DEVICE Piece piece_of(const LinearLargeParams& p, int index) {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const int whole = p.whole_tiles / blocks;
    if (index < whole) return {index * blocks + block, 0, p.stages, 0};
    const int first = span_begin(p, block), last = span_begin(p, block + 1);
    const int in_line = first / p.stages + index - whole;
    const int start = in_line * p.stages;
    const int begin = maximum(first, start) - start;
    return {p.whole_tiles + in_line, begin, minimum(last - start, p.stages), start + p.stages};
}

DEVICE Copies start_piece(const LinearLargeParams& p, unsigned char* ring, int index) {
    const Piece piece = piece_of(p, index);
    return start_copies(p, ring, assignment(p, piece.tile / p.token_tiles), piece.tile % p.token_tiles, piece.begin,
                        piece.end - piece.begin);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_large(const __grid_constant__ LinearLargeParams p) {
    DYNAMIC_SHARED(unsigned char, ring);
    grid_dependency_wait();

    // A piece is derived from its index wherever it is needed: while sums grow, every register counts. The copies of
    // the next piece are under way while one is finished.
    Copies copies = start_piece(p, ring, 0);
    for (int index = 0;; ++index) {
        Sums sums;
        clear(sums);
        {
            const Piece piece = piece_of(p, index);
            if (piece.begin >= piece.end) break;
            const Assignment a = assignment(p, piece.tile / p.token_tiles);
            const int n = piece.end - piece.begin;
            if (a.matrix < 0) {
                multiply<true, L2_AHEAD, N_TILES>(p, copies, nullptr, 0, 0, ring, n, sums);
            } else {
                const uint32_t row = a.tile_row, last = p.n_tile_rows[a.matrix] - 1;
                const uint32_t first_row = (row * p.stages + piece.begin) * ROW_STAGE_BYTES;
                const uint32_t second_row = (minimum(row + 1, last) * p.stages + piece.begin) * ROW_STAGE_BYTES;
                multiply<false, L2_AHEAD, N_TILES>(p, copies, p.tiles[MATRICES == 1 ? 0 : a.matrix], first_row,
                                                   second_row, ring, n, sums);
            }
        }
        copies = start_piece(p, ring, index + 1);
        const Piece piece = piece_of(p, index);
        if (piece.begin > 0) {
            leave(p, sums);
            continue;
        }
        // Whoever holds the rest of the tile comes next in index order.
        int done = piece.end;
        for (int other = static_cast<int>(blockIdx.x) + 1; done < p.stages; ++other) {
            collect(p, other, sums);
            done += minimum(span_begin(p, other + 1), piece.tile_end) - span_begin(p, other);
        }
        const Assignment a = assignment(p, piece.tile / p.token_tiles);
        const int first_token = piece.tile % p.token_tiles * TOKENS;
        if (a.matrix >= 0) finish(p, a, first_token, sums);
    }
}
