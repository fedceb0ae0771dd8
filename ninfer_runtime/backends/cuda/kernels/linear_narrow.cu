// y[t][row] = sum_k w[row][k] x[t][k] of many tokens and few rows: routers, gates. Up to MATRICES matrices, BF16 in
// "tiles" (tiles.cuh), of one K; x bf16 [T][x_stride], rows 16-byte aligned, zero from K up to the next multiple of 128.
// A block has TILE_ROWS tile rows of a matrix and 32 tokens, its warps share the columns and add their sums in warp
// order, so that results do not depend on the grid. Reference: backends/reference/linear.py; products exact, sums fp32,
// 2e-6 |w||x| and one rounding of bf16 outputs. Grid: (tokens / 32, most tile rows / TILE_ROWS, matrices).
#include "tiles.cuh"

#ifndef TILE_ROWS
#define TILE_ROWS 5
#endif
#ifndef MATRICES
#define MATRICES 1
#endif

constexpr int MAX_MATRICES = 6;
constexpr int WARPS = THREADS / WARP_LANES;
constexpr int TOKENS = 32;
constexpr int ROWS = TILE_ROWS * 16;
constexpr int ROW_FLOATS = ROWS + 4;  // of a token in shared memory: banks of two tokens do not meet
static_assert(WARPS * TOKENS * ROW_FLOATS * 4 <= 101376, "shared memory");
static_assert(MATRICES >= 1 && MATRICES <= MAX_MATRICES, "matrices");

struct LinearNarrowParams {
    const uint8_t* tiles[MAX_MATRICES];
    void* out[MAX_MATRICES];  // bf16 or fp32 [T][out_stride]
    const uint16_t* x;
    int n_rows[MAX_MATRICES];
    int n_tile_rows[MAX_MATRICES];
    int out_stride[MAX_MATRICES];
    int out_float[MAX_MATRICES];  // nonzero for fp32
    int n_tokens;
    int x_stride;
    int n_groups;  // of 64 columns
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_narrow(const __grid_constant__ LinearNarrowParams p) {
    DYNAMIC_SHARED(float, parts);
    grid_dependency_launch();
    grid_dependency_wait();
    const int matrix = MATRICES == 1 ? 0 : static_cast<int>(blockIdx.z);
    const int n_tile_rows = p.n_tile_rows[matrix], first_tile = static_cast<int>(blockIdx.y) * TILE_ROWS;
    if (first_tile >= n_tile_rows) return;
    const int lane = static_cast<int>(lane_id()), g = lane >> 2, t = lane & 3, warp = warp_index();
    const int first_token = static_cast<int>(blockIdx.x) * TOKENS;
    float sums[TILE_ROWS][TOKENS / 8][4] = {};
    const uint16_t* rows[TOKENS / 8];
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n)
        rows[n] = p.x + static_cast<int64_t>(minimum(first_token + n * 8 + g, p.n_tokens - 1)) * p.x_stride + 8 * t;
#pragma unroll 1
    for (int group = warp; group < p.n_groups; group += WARPS) {
        uint4 tokens[2][TOKENS / 8];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < TOKENS / 8; ++n) tokens[half][n] = load_16(rows[n] + group * 64 + half * 32);
#pragma unroll
        for (int i = 0; i < TILE_ROWS; ++i) {
            const int64_t row = minimum(first_tile + i, n_tile_rows - 1);
            const uint8_t* block = p.tiles[matrix] + (row * p.n_groups + group) * Tile<BF16>::BLOCK_BYTES + lane * 16;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint4 words = load_16(block + j * 512);
                const uint32_t operand[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
                for (int n = 0; n < TOKENS / 8; ++n) {
                    const uint4 token = tokens[j / 2][n];
                    mma_bf16(sums[i][n], operand, j % 2 ? token.z : token.x, j % 2 ? token.w : token.y);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < TILE_ROWS; ++i)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                parts[(warp * TOKENS + n * 8 + 2 * t + e % 2) * ROW_FLOATS + i * 16 + e / 2 * 8 + g] = sums[i][n][e];
    __syncthreads();
    const int first_row = first_tile * 16;
    for (int i = threadIdx.x; i < TOKENS * ROWS; i += THREADS) {
        const int token = i / ROWS, row = i % ROWS;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[(w * TOKENS + token) * ROW_FLOATS + row];
        if (first_token + token >= p.n_tokens || first_row + row >= p.n_rows[matrix]) continue;
        const int64_t at = static_cast<int64_t>(first_token + token) * p.out_stride[matrix] + first_row + row;
        if (p.out_float[matrix])
            static_cast<float*>(p.out[matrix])[at] = sum;
        else
            static_cast<uint16_t*>(p.out[matrix])[at] = float_to_bf16(sum);
    }
}
