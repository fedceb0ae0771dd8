// y[token][row] = sum_k weight[row][k] x[token][k] for many tokens: weights in "tiles" (tiles.cuh), x bf16
// [T][x_stride]. Alignment: x 16 bytes, x_stride a multiple of 8, tiles 64 bytes, outputs 4 bytes. Any T, N, K;
// columns of x from K up to the next multiple of 128 hold zeros. Up to MATRICES matrices of the same K and FORMAT.
// Reference: backends/reference/linear.py. Weights are bf16(code * bf16(scale)), of NVFP4 exact; products are exact, sums fp32;
// tolerance against float64 on those weights 2e-6 |w||x| and one rounding of the output.
//
// A block computes 256 rows (16 tile rows) of TOKENS tokens, a warp 2 tile rows of all of them (tile_product.cuh).
// Work: tiles (row tile major, token tile minor: neighbours share weights) x stages, cut as tile_pieces.cuh says.
#include "tile_pieces.cuh"
#include "tile_product.cuh"

#ifndef EPILOGUE
#define EPILOGUE 0
#endif
#ifndef MATRICES
#define MATRICES 1
#endif
#ifndef QUANTIZED
#define QUANTIZED 0
#endif

// Stages that weights are asked into the L2 ahead of their use. Where few, long tiles are shared by blocks at different
// places of K this hides the DRAM (7 % on an H200); elsewhere the instructions cost more than it brings.
constexpr int L2_AHEAD = EPILOGUE == RESIDUAL && FORMAT != NVFP4 ? 4 : 0;  // NVFP4: registers
constexpr int N_TILES = TOKENS / 8;

static_assert(TOKENS % 32 == 0, "geometry");
static_assert(MATRICES >= 1 && MATRICES <= MAX_MATRICES, "matrices");
static_assert(QUANTIZED == NOT_QUANTIZED || (EPILOGUE == SWIGLU && QUANTIZED == AS_BF16), "what may be quantized");

struct LinearLargeParams {
    const uint8_t* tiles[MAX_MATRICES];
    void* out[MAX_MATRICES];  // STORE: bf16 or fp32 [T][out_stride]; SWIGLU: bf16, or quantized; RESIDUAL: fp32, added to
    const uint16_t* x;
    float* partials;   // per block: TOKENS * 256 sums
    uint32_t* flags;   // per block; 0 between launches
    int n_rows[MAX_MATRICES];       // of the output: half the matrix's for SWIGLU
    int n_tile_rows[MAX_MATRICES];
    int stage_bytes[MAX_MATRICES];  // of a tile row in a stage
    int scales_at[MAX_MATRICES];    // byte in them of the scales that are copied to the ring; -1: none
    int first_pair[MAX_MATRICES];   // pairs of tile rows before this matrix
    int out_stride[MAX_MATRICES];   // elements; quantized: bytes
    int out_float[MAX_MATRICES];    // STORE: nonzero for fp32
    float factor[MAX_MATRICES];     // of sums: 2^24 where weights are scaled, 1 for bf16
    int n_pairs;                // of all matrices
    int n_tokens;
    int token_tiles;
    int x_stride;
    int stages;                 // of a tile: ceil(k / 128)
    int whole_tiles;            // computed by one block each
    int shared_tiles;           // the rest
    float out_divisor;          // of what is quantized
};

using Sums = SumsOf<N_TILES>;

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

DEVICE Copies start_piece(const LinearLargeParams& p, unsigned char* ring, int index) {
    const Piece piece = piece_of(p, index);
    const Assignment a = assignment<MATRICES>(p, piece.tile / p.token_tiles);
    return start_copies(p, ring, a, piece.tile % p.token_tiles, piece.begin, piece.end - piece.begin);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_large(const __grid_constant__ LinearLargeParams p) {
    DYNAMIC_SHARED(unsigned char, ring);
    grid_dependency_wait();
    grid_dependency_launch();  // every block runs from here to its end: what comes next takes places that are left

    // A piece is derived from its index wherever it is needed: while sums grow, every register counts. The copies of
    // the next piece are under way while one is finished.
    Copies copies = start_piece(p, ring, 0);
    for (int index = 0;; ++index) {
        Sums sums;
        clear(sums);
        {
            const Piece piece = piece_of(p, index);
            if (piece.begin >= piece.end) break;
            const Assignment a = assignment<MATRICES>(p, piece.tile / p.token_tiles);
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
            leave<N_TILES>(p, sums);
            continue;
        }
        collect_rest<N_TILES>(p, piece, sums);
        const Assignment a = assignment<MATRICES>(p, piece.tile / p.token_tiles);
        const int first_token = piece.tile % p.token_tiles * TOKENS;
        if (a.matrix >= 0) finish<EPILOGUE, QUANTIZED, N_TILES>(p, a, first_token, sums);
    }
}
