// Router logits and the shared expert's inner columns for up to 48 columns of a round, in one launch:
// logits[c] = router x[c] / rms, fp32 [T][n_logits]; hs[c] = silu(gate x[c] / rms) * (up x[c] / rms), bf16 [T][out_stride].
// x bf16 [T][x_stride], zero from K to x_stride. Router in BF16 tiles (tiles.cuh), gate and up interleaved in tiles of
// SHARED_FORMAT. Alignment: tiles 64 bytes, x and its rows 16. Reference: backends/reference/moe.py; tolerance 1e-5 |w||x|.
//
// One block per tile row, the router's first; its warps divide the columns. All of a small model's weights are in shared
// memory before the dependency wait; x goes from L2 straight to registers.
#include "moe_round.cuh"

#ifndef SHARED_FORMAT
#define SHARED_FORMAT W8
#endif
#ifndef BLOCKS
#define BLOCKS 32  // of tiles.cuh in a tile row of the router
#endif
#ifndef SHARED_BLOCKS
#define SHARED_BLOCKS 32
#endif

constexpr int NT = COLUMNS / 8;
constexpr int ROUTER_BYTES = Tile<BF16>::BLOCK_BYTES;
constexpr int SHARED_BYTES = Tile<SHARED_FORMAT>::BLOCK_BYTES;
constexpr int SLOT = ROUTER_BYTES > SHARED_BYTES ? ROUTER_BYTES : SHARED_BYTES;
constexpr int ROWS = 16;
static_assert(WARPS * COLUMNS * ROWS * 4 + WARPS * STAGES * SLOT <= 101376, "shared memory");

struct MoeRoundRouterParams {
    const uint8_t* router;
    const uint8_t* shared_tiles;
    const uint16_t* x;
    const float* ss;  // fp32 [n_parts][T], parts of sum x^2; null: x is divided already
    float* logits;
    uint16_t* out;
    int n_columns;
    int x_stride;
    int out_stride;
    int n_logits;
    int n_out;         // rows of hs
    int router_tiles;  // tile rows; the rest of the grid is the shared expert's
    int n_parts;
    float inverse_hidden;
    float epsilon;
    float factor;  // of the shared expert's sums
};

// This warp's part of a tile row: every WARPS-th block, those in the ring and those to come.
template <int F>
DEVICE void multiply_row(const MoeRoundRouterParams& p, WeightStream& stream, unsigned char* ring, int n_blocks,
                         SumsOf<NT>& sums) {
    const int lane = static_cast<int>(lane_id()), g = lane >> 2, t = lane & 3;
    const int tiles = NT == 1 ? 1 : ceil_div(p.n_columns, 8);
    const uint8_t* x = reinterpret_cast<const uint8_t*>(p.x + t * 8);
    uint32_t rows[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) rows[n] = minimum(n * 8 + g, p.n_columns - 1) * p.x_stride * 2;
    Pieces<F> ahead;
    const auto fetch = [&](int i) { ahead.fetch(x + rows[0], (warp_index() + i * WARPS) * Tile<F>::STEP); };
    if (n_blocks > 0) fetch(0);
    int slot = 0;
#pragma unroll 1
    for (int i = 0; i < n_blocks; ++i) {
        const Pieces<F> now = ahead;
        if (i + 1 < n_blocks) fetch(i + 1);
        const uint8_t* column = x + (warp_index() + i * WARPS) * Tile<F>::STEP * 2;
        cp_async_wait<STAGES - 2>();
        warp_sync();
        unsigned char* freed = ring + (slot == 0 ? (STAGES - 1) * SLOT : slot - SLOT);
        multiply_block<F, NT>(
            ring + slot, tiles,
            [&](int n, int piece) { return n == 0 ? now.pieces[piece] : load_16(column + rows[n] + piece * 64); },
            [&] {
                if (stream.request<SLOT>(freed)) stream.end();
                cp_async_commit();
            },
            sums);
        slot = slot == (STAGES - 1) * SLOT ? 0 : slot + SLOT;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    moe_round_router(const __grid_constant__ MoeRoundRouterParams p) {
    DYNAMIC_SHARED(unsigned char, shared);
    STATIC_SHARED(float, rstd[COLUMNS]);
    float* parts = reinterpret_cast<float*>(shared);  // [WARPS][COLUMNS][ROWS]
    const int lane = static_cast<int>(lane_id()), g = lane >> 2, t = lane & 3, warp = warp_index();
    const int thread = static_cast<int>(threadIdx.x);
    unsigned char* ring = shared + WARPS * COLUMNS * ROWS * 4 + warp * (STAGES * SLOT);
    const bool is_router = static_cast<int>(blockIdx.x) < p.router_tiles;
    const int tile = is_router ? blockIdx.x : blockIdx.x - p.router_tiles;
    const int blocks = is_router ? BLOCKS : SHARED_BLOCKS, bytes = is_router ? ROUTER_BYTES : SHARED_BYTES;
    const int n_blocks = (blocks - warp + WARPS - 1) / WARPS;

    grid_dependency_launch();
    WeightStream stream;
    stream.run((is_router ? p.router : p.shared_tiles) + (static_cast<size_t>(tile) * blocks + warp) * bytes, n_blocks,
               bytes, WARPS * bytes);
    if (n_blocks == 0) stream.end();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
        if (stream.request<SLOT>(ring + i * SLOT)) stream.end();
        cp_async_commit();
    }
    grid_dependency_wait();

    for (int column = warp; column < p.n_columns; column += WARPS) {
        float sum = 0.0f;
        if (p.ss != nullptr)
            for (int i = lane; i < p.n_parts; i += WARP_LANES) sum += p.ss[i * p.n_columns + column];
        sum = warp_sum(sum);
        if (lane == 0) rstd[column] = p.ss != nullptr ? 1.0f / sqrtf(sum * p.inverse_hidden + p.epsilon) : 1.0f;
    }
    SumsOf<NT> sums;
    clear(sums);
    if (is_router) {
        multiply_row<BF16>(p, stream, ring, n_blocks, sums);
    } else {
        multiply_row<SHARED_FORMAT>(p, stream, ring, n_blocks, sums);
    }
#pragma unroll
    for (int i = 0; i < NT * 4; ++i) {
        const int column = i / 4 * 8 + 2 * t + i % 2;
        parts[(warp * COLUMNS + column) * ROWS + i % 4 / 2 * 8 + g] = sums[i / 4][i % 4];
    }
    __syncthreads();
    const int n_results = p.n_columns * ROWS;
    for (int i = thread; i < round_up(n_results, WARP_LANES); i += THREADS) {
        const bool exists = i < n_results;
        const int column = exists ? i / ROWS : 0, row = i % ROWS;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[(w * COLUMNS + column) * ROWS + row];
        sum *= rstd[column];
        if (is_router) {
            const int expert = tile * ROWS + row;
            if (exists && expert < p.n_logits) p.logits[column * p.n_logits + expert] = sum;
        } else {
            sum *= p.factor;
            const float up = shfl_xor(sum, 8);
            const int out_row = tile * 8 + row;
            if (exists && row < 8 && out_row < p.n_out)
                p.out[static_cast<size_t>(column) * p.out_stride + out_row] = float_to_bf16(silu(sum) * up);
        }
    }
}
