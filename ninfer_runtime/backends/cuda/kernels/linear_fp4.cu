// y[token][row] = sum_k weight[row][k] x[token][k], both NVFP4: weights in "tiles" (tiles.cuh), x as FP4 rows
// (quantize_fp4.cuh) of row_bytes. sm_120a and its family only; elsewhere linear_large.cu multiplies the same numbers as
// bf16. Alignment: x and row_bytes 16 bytes, tiles 128 bytes, outputs 4 bytes. Any T, N, K; K padded to 128 with zeros. Up
// to MATRICES matrices of the same K. Products and sums of a block of 16 are exact, sums of blocks fp32; reference: the
// same numbers in float64, tolerance 2e-6 |w||x| and one rounding of the output.
//
// A block computes 256 rows (16 tile rows) of TOKENS tokens, a warp 2 tile rows of all of them. Both operands come through
// a ring of STAGES stages of 128 columns in shared memory and are read as they lie: a lane's words of operand A of a
// 64-column group are 16 bytes, those of operand B of two groups too, and 8 lanes of a phase read 128 bytes in a row.
// A register of scales serves two operands A (lanes 2m, 2m + 1 of a quad have tile row m's), or four operands B (lane n of
// a quad has the n-th's). How blocks share tiles: tile_pieces.cuh.
#include "common.cuh"
#include "tile_pieces.cuh"
#include "quantized_ring.cuh"
#include "tiles.cuh"

#ifndef TOKENS
#define TOKENS 128
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef EPILOGUE
#define EPILOGUE 0
#endif
#ifndef MATRICES
#define MATRICES 1
#endif
#ifndef QUANTIZED
#define QUANTIZED 0
#endif

constexpr int N_TILES = TOKENS / 8;
constexpr int BLOCK_BYTES = Tile<NVFP4>::BLOCK_BYTES;  // of a tile row in a stage
constexpr int CODE_BYTES = 64;                         // of a token in a stage
constexpr int EXTRA_BYTES = 8;  // scales
using Ring = RingLayout<BLOCK_BYTES, CODE_BYTES, EXTRA_BYTES, TOKENS>;
using Copies = RingCopies<Ring, BLOCK_BYTES, CODE_BYTES, EXTRA_BYTES, TOKENS>;

static_assert(THREADS == 256, "eight warps");
static_assert(Tile<NVFP4>::STEP == 128 && Tile<NVFP4>::SCALE_BYTES == 128, "a block per tile row and stage");
static_assert(STAGES >= 2 && STAGES * Ring::STAGE_BYTES <= 101376, "shared memory");
static_assert(MATRICES >= 1 && MATRICES <= MAX_MATRICES, "matrices");

using Sums = SumsOf<N_TILES>;

// Operands B of the lane: words of both 64-column groups of four tiles of eight tokens.
struct Tokens {
    uint4 words[4];
    uint2 scales;  // of the quad's lane: of tile t, by group

    DEVICE void load(const unsigned char* slot, int n0) {
        const int lane = static_cast<int>(lane_id());
        const int g = lane >> 2, t = lane & 3;
        scales = *reinterpret_cast<const uint2*>(slot + Ring::EXTRAS_AT + ((n0 + t) * 8 + g) * 8);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            words[n] = *reinterpret_cast<const uint4*>(slot + Ring::TOKENS_AT + Ring::chunk_at((n0 + n) * 8 + g, t));
    }
};

template <int N>
DEVICE void multiply_tile(Sums& sums, int n0, int group, const uint32_t (&a)[2][2][4], const uint2& scales_a,
                          const Tokens& tokens) {
    const uint4& words = tokens.words[N];
    const uint32_t b0 = group ? words.z : words.x, b1 = group ? words.w : words.y;
    const uint32_t of_a = group ? scales_a.y : scales_a.x, of_b = group ? tokens.scales.y : tokens.scales.x;
    mma_fp4<0, N>(sums[0][n0 + N], a[0][group], b0, b1, of_a, of_b);
    mma_fp4<1, N>(sums[1][n0 + N], a[1][group], b0, b1, of_a, of_b);
}

// Sums of one stage.
DEVICE void multiply_stage(const unsigned char* slot, Sums& sums) {
    const int lane = static_cast<int>(lane_id());
    const int g = lane >> 2, t = lane & 3;
    const unsigned char* weights = slot + warp_index() * Ring::WARP_BYTES;
    uint32_t a[2][2][4];  // [tile row][group][register]
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const uint4 v = *reinterpret_cast<const uint4*>(weights + m * BLOCK_BYTES + group * 512 + lane * 16);
            a[m][group][0] = v.x;
            a[m][group][1] = v.y;
            a[m][group][2] = v.z;
            a[m][group][3] = v.w;
        }
    const uint2 scales_a = *reinterpret_cast<const uint2*>(weights + t / 2 * BLOCK_BYTES + Tile<NVFP4>::SCALES_AT +
                                                           g * 16 + t % 2 * 8);
#pragma unroll
    for (int n0 = 0; n0 < N_TILES; n0 += 4) {
        Tokens tokens;
        tokens.load(slot, n0);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            multiply_tile<0>(sums, n0, group, a, scales_a, tokens);
            multiply_tile<1>(sums, n0, group, a, scales_a, tokens);
            multiply_tile<2>(sums, n0, group, a, scales_a, tokens);
            multiply_tile<3>(sums, n0, group, a, scales_a, tokens);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_fp4(const __grid_constant__ RingParams p) {
    DYNAMIC_SHARED(unsigned char, ring);
    grid_dependency_wait();

    run_pieces<Ring, Copies, STAGES, MATRICES, EPILOGUE, QUANTIZED, N_TILES>(
        p, ring, [](const unsigned char* slot, Sums& sums) { multiply_stage(slot, sums); });
}
