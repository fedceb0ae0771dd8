// Router logits of a prompt chunk: logits[t][row] = sum_k w[row][k] x[t][k], fp32. w BF16 in "tiles" (tiles.cuh), x bf16
// [T][x_stride], 16-byte aligned rows, zero from K up to the next multiple of 128. Few rows and many columns: a block has
// TILE_ROWS tile rows and 32 tokens, its warps share the columns and add their sums in warp order, so that results do
// not depend on the grid. Reference: backends/reference/moe.py; products exact, sums fp32, 2e-6 |w||x|.
#include "common.cuh"
#include "tiles.cuh"

#ifndef TILE_ROWS
#define TILE_ROWS 5
#endif

constexpr int WARPS = THREADS / WARP_LANES;
constexpr int TOKENS = 32;
constexpr int ROWS = TILE_ROWS * 16;
constexpr int ROW_FLOATS = ROWS + 4;  // of a token in shared memory: banks of two tokens do not meet
static_assert(WARPS * TOKENS * ROW_FLOATS * 4 <= 101376, "shared memory");

struct MoeRouterParams {
    const uint8_t* tiles;
    const uint16_t* x;
    float* logits;
    int n_rows;
    int n_tile_rows;
    int n_tokens;
    int x_stride;
    int n_groups;       // of 64 columns
    int logits_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    moe_router(const __grid_constant__ MoeRouterParams p) {
    DYNAMIC_SHARED(float, parts);
    grid_dependency_launch();
    grid_dependency_wait();
    const int lane = static_cast<int>(lane_id()), g = lane >> 2, t = lane & 3, warp = warp_index();
    const int first_token = static_cast<int>(blockIdx.x) * TOKENS, first_tile = static_cast<int>(blockIdx.y) * TILE_ROWS;
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
            const int64_t row = minimum(first_tile + i, p.n_tile_rows - 1);
            const uint8_t* block = p.tiles + (row * p.n_groups + group) * Tile<BF16>::BLOCK_BYTES + lane * 16;
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
    for (int i = threadIdx.x; i < TOKENS * ROWS; i += THREADS) {
        const int token = i / ROWS, row = i % ROWS;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[(w * TOKENS + token) * ROW_FLOATS + row];
        if (first_token + token < p.n_tokens && first_tile * 16 + row < p.n_rows)
            p.logits[static_cast<int64_t>(first_token + token) * p.logits_stride + first_tile * 16 + row] = sum;
    }
}
