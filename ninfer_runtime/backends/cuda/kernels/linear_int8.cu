// y[token][row] = sum_k weight[row][k] x[token][k]: weights in "tiles" (tiles.cuh) with FORMAT's integer codes, x as signed
// bytes with a scale per 64 columns (quantize_int8.cuh), rows of row_bytes. Alignment: x and row_bytes 16 bytes, tiles 64
// bytes, outputs 4 bytes. Any T, N, K; K padded to 128 with zeros. Up to MATRICES matrices of the same K and FORMAT.
// Reference: the same codes and scales in float64, ninfer_format/numeric/int8_activations.py; sums of a group's products are
// exact, sums of groups fp32: tolerance 2e-6 |w||x| and one rounding of the output.
//
// A block computes 256 rows (16 tile rows) of TOKENS tokens, a warp 2 tile rows of all of them; both operands come through a
// ring in shared memory (quantized_ring.cuh). A lane's codes of 64 columns become bytes of operand A by masks and shifts; codes
// without a sign keep their offset, which leaves with the sum of the token's codes: products start at -offset * that sum.
// They also start at the bits of 1.5 * 2^23: what they end with is then a float, that number plus the sum.
#include "common.cuh"
#include "tile_pieces.cuh"
#include "quantized_ring.cuh"
#include "tiles.cuh"

#ifndef FORMAT
#define FORMAT Q4
#endif
#ifndef TOKENS
#define TOKENS 64
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

constexpr int N_TILES = TOKENS / 8;
constexpr int BLOCK_BYTES = 128 / Tile<FORMAT>::STEP * Tile<FORMAT>::BLOCK_BYTES;  // of a tile row in a stage
constexpr int CODE_BYTES = 128;                                                    // of a token in a stage
constexpr int EXTRA_BYTES = 16;                                                    // scale and sum, twice
constexpr int OFFSET = FORMAT == Q4 ? 8 : FORMAT == Q5 ? 16 : FORMAT == Q6 ? 32 : 0;
constexpr int FLOAT_BITS = 0x4b400000;
constexpr float FLOAT_VALUE = 12582912.0f;
using Ring = RingLayout<BLOCK_BYTES, CODE_BYTES, EXTRA_BYTES, TOKENS>;
using Copies = RingCopies<Ring, BLOCK_BYTES, CODE_BYTES, EXTRA_BYTES, TOKENS>;
using Sums = SumsOf<N_TILES>;

static_assert(THREADS == 256, "eight warps");
static_assert(FORMAT <= W8, "integer codes");
static_assert(STAGES >= 2 && STAGES * Ring::STAGE_BYTES <= 101376, "shared memory");
static_assert(MATRICES >= 1 && MATRICES <= MAX_MATRICES, "matrices");

// Register i of operand A of the product over columns 32 half .. + 31 of a group: the four bytes are columns 0 4 1 5 (i < 2)
// or 2 6 3 7 of the lane's eight.
DEVICE uint32_t code_bytes(const uint32_t (&words)[Tile<FORMAT>::WORDS], int half, int i) {
    if constexpr (FORMAT == W8) {
        return words[4 * half + i];
    } else if constexpr (FORMAT == Q4) {
        const uint32_t word = words[i] >> (8 * half);
        return lop3<0xea>(word, 0x000f000fu, word << 4 & 0x0f000f00u);
    } else {
        const uint32_t low = tile_pair<FORMAT, false>(words, 2 * half, i) & 0x003f003fu;
        const uint32_t high = tile_pair<FORMAT, false>(words, 2 * half + 1, i) & 0x003f003fu;
        return high << 8 | low;
    }
}

// Operand A of a tile row's 64 columns, and scales of rows g and g + 8: of the group, or (W8) of each half of it.
struct Weights {
    uint32_t bytes[2][4];  // [half][register]
    float scales[2][2];    // [row][half]

    DEVICE void load(const unsigned char* block, int group, int lane) {
        using Layout = Tile<FORMAT>;
        const unsigned char* own = block + group / Layout::GROUPS * Layout::BLOCK_BYTES;
        uint32_t words[Layout::WORDS];
        tile_words<FORMAT>(words, own, group % Layout::GROUPS, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i) bytes[half][i] = code_bytes(words, half, i);
        const uint2 both = tile_scales<FORMAT>(own, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool second = FORMAT == W8 ? half == 1 : group == 1;
            scales[0][half] = second ? half_hi(both.x) : half_lo(both.x);
            scales[1][half] = second ? half_hi(both.y) : half_lo(both.y);
        }
    }
};

// Sums of one stage.
DEVICE void multiply_stage(const unsigned char* slot, Sums& sums) {
    const int lane = static_cast<int>(lane_id());
    const int g = lane >> 2, t = lane & 3;
    const unsigned char* own = slot + warp_index() * Ring::WARP_BYTES;
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
        Weights weights[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) weights[m].load(own + m * BLOCK_BYTES, group, lane);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const uint4 codes =
                *reinterpret_cast<const uint4*>(slot + Ring::TOKENS_AT + Ring::chunk_at(n * 8 + g, group * 4 + t));
            float scale[2];
            int start[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint2 extra = *reinterpret_cast<const uint2*>(slot + Ring::EXTRAS_AT +
                                                                    (n * 8 + 2 * t + i) * EXTRA_BYTES + group * 8);
                scale[i] = __uint_as_float(extra.x);
                start[i] = FLOAT_BITS - OFFSET * static_cast<int>(extra.y);
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                int first[4] = {start[0], start[1], start[0], start[1]};
                mma_s8(first, weights[m].bytes[0], codes.x, codes.y);
                if constexpr (FORMAT == W8) {
                    int second[4] = {FLOAT_BITS, FLOAT_BITS, FLOAT_BITS, FLOAT_BITS};
                    mma_s8(second, weights[m].bytes[1], codes.z, codes.w);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float a = __uint_as_float(static_cast<uint32_t>(first[i])) - FLOAT_VALUE;
                        const float b = __uint_as_float(static_cast<uint32_t>(second[i])) - FLOAT_VALUE;
                        sums[m][n][i] += scale[i % 2] * (a * weights[m].scales[i / 2][0] + b * weights[m].scales[i / 2][1]);
                    }
                } else {
                    mma_s8(first, weights[m].bytes[1], codes.z, codes.w);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float sum = __uint_as_float(static_cast<uint32_t>(first[i])) - FLOAT_VALUE;
                        sums[m][n][i] += sum * (weights[m].scales[i / 2][0] * scale[i % 2]);
                    }
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_int8(const __grid_constant__ RingParams p) {
    DYNAMIC_SHARED(unsigned char, ring);
    grid_dependency_wait();
    run_pieces<Ring, Copies, STAGES, MATRICES, EPILOGUE, NOT_QUANTIZED, N_TILES>(
        p, ring, [](const unsigned char* slot, Sums& sums) { multiply_stage(slot, sums); });
}
