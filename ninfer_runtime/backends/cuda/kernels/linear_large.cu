// y[token][row] = sum_k weight[row][k] x[token][k] for many tokens: weights in "tiles" (tiles.cuh), x bf16
// [T][x_stride]. Alignment: x 16 bytes, x_stride a multiple of 8, tiles 64 bytes, outputs 4 bytes. Any T, N, K;
// columns of x from K up to the next multiple of 128 hold zeros. Up to MATRICES matrices of the same K and FORMAT.
// Reference: backends/reference/linear.py. Weights are bf16(code * bf16(scale)); products are exact, sums fp32;
// tolerance against float64 on those weights 2e-6 |w||x| and one rounding of the output.
//
// A block computes 256 rows (16 tile rows) of TOKENS tokens, a warp 2 tile rows of all of them. Weights go from global
// memory to fragments in registers; activations through a ring of STAGES stages of 128 columns in shared memory. In a
// stage token row n of a group is 128 bytes, its 16-byte chunk c at c ^ 4 (n & 1), so that the 8 lanes of a phase (two
// tokens, chunks 4 h + t) read all 32 banks.
//
// Work: tiles (row tile major, token tile minor: neighbours share weights) x stages, in one line. Whole waves of tiles
// first, one tile per block; then the rest in equal spans of stages. A block that starts inside a tile leaves its sums
// to the tile's owner, which is the block with the lower index that starts the tile, ends with it, and adds them in
// index order. The grid is resident as a whole.
#include "common.cuh"
#include "tiles.cuh"

#ifndef FORMAT
#define FORMAT Q4
#endif
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

enum Epilogue { STORE, SWIGLU, RESIDUAL };  // as in ops/linear_large.py

constexpr int WARPS = THREADS / WARP_LANES;
constexpr int STAGE_COLUMNS = 128;
constexpr int GROUP_COLUMNS = 64;
constexpr int GROUP_BYTES = TOKENS * GROUP_COLUMNS * 2;
constexpr int TOKEN_BYTES = 2 * GROUP_BYTES;                // of a stage
constexpr int SCALE_BYTES = THREADS * 4;                    // of a stage: a word of each lane
constexpr int STAGE_BYTES = TOKEN_BYTES + SCALE_BYTES;
constexpr int STAGE_CHUNKS = STAGE_COLUMNS / 8;             // 16-byte chunks of a token in a stage
constexpr int CHUNKS = TOKEN_BYTES / 16 / THREADS;          // chunks that a thread copies per stage
constexpr int TOKENS_PER_PASS = THREADS / STAGE_CHUNKS;     // tokens that one chunk of every thread covers
constexpr int N_TILES = TOKENS / 8;
// Stages that weights are asked into the L2 ahead of their use. Where few, long tiles are shared by blocks at different
// places of K this hides the DRAM (7 % on an H200); elsewhere the instructions cost more than it brings.
constexpr int L2_AHEAD = EPILOGUE == RESIDUAL ? 4 : 0;
constexpr int N_BLOCK = 4;  // token tiles whose operands are in registers together

constexpr int MAX_MATRICES = 6;

static_assert(THREADS == 256 && TOKENS % 32 == 0 && TOKENS_PER_PASS % 2 == 0 && N_TILES % N_BLOCK == 0, "geometry");
static_assert(MATRICES >= 1 && MATRICES <= MAX_MATRICES, "matrices");
static_assert(STAGES >= 3 && STAGES * STAGE_BYTES <= 101376, "shared memory");

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

using Sums = float[2][N_TILES][4];

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

// ---- from codes to operands
//
// A bf16 word with 8 bits or fewer set at its low end is that integer times 2^-133, subnormal or not: codes need no
// conversion, and fma(u, scale 2^109, -bias scale 2^-24) is the weight times 2^-24, rounded once. The scale itself is
// rounded to bf16; any binary16 scale stays in range. The factor 2^24 is made up for in the epilogue.

struct Scale {
    static constexpr uint32_t BIAS = FORMAT == Q4 ? 8 : FORMAT == Q5 ? 16 : FORMAT == Q6 ? 32 : 128;
    uint32_t unit;     // of a code at bit 0, bf16 twice
    uint32_t shifted;  // Q4: of a code at bit 4
    uint32_t offset;   // -BIAS units

    DEVICE void set(float scale) {
        const float unit_scale = scale * 0x1p109f;
        unit = pack_bf16(unit_scale, unit_scale);
        if (FORMAT == Q4) shifted = mul_bf16x2(unit, 0x3d803d80u);  // 1 / 16
        offset = mul_bf16x2(unit, 0x80008000u | BIAS * 0x10001u);
    }
};

// Register i of operand A of mma j of a group.
DEVICE uint32_t scaled_pair(const uint32_t (&words)[Tile<FORMAT>::WORDS], int j, int i, const Scale& scale) {
    const int pair = 4 * j + i;
    uint32_t codes, unit = scale.unit;
    if constexpr (FORMAT == Q4) {
        const uint32_t word = j < 2 ? words[i] : words[i] >> 8;
        codes = word & (j % 2 ? 0x00f000f0u : 0x000f000fu);
        if (j % 2) unit = scale.shifted;
    } else if constexpr (FORMAT == Q5) {
        if (pair < 15) {
            codes = words[pair / 3] >> (5 * (pair % 3)) & 0x001f001fu;
        } else {
            codes = words[4] >> 11 & 0x00100010u;
            codes = lop3<0xea>(words[3] >> 12, 0x00080008u, codes);
            codes = lop3<0xea>(words[2] >> 13, 0x00040004u, codes);
            codes = lop3<0xea>(words[1] >> 14, 0x00020002u, codes);
            codes = lop3<0xea>(words[0] >> 15, 0x00010001u, codes);
        }
    } else if constexpr (FORMAT == Q6) {
        if (pair < 12)
            codes = words[pair / 2] >> (6 * (pair % 2)) & 0x003f003fu;
        else
            codes = lop3<0xea>(words[4 + i / 2] >> (8 + 2 * (i % 2)), 0x00300030u, words[i] >> 12 & 0x000f000fu);
    } else {  // two's complement to offset binary
        codes = lop3<0x6a>(words[4 * (j / 2) + i] >> (8 * (j % 2)), 0x00ff00ffu, 0x00800080u);
    }
    return fma_bf16x2(codes, unit, scale.offset);
}

// What a lane holds of one 64-column group of a tile row, or of half of it (BY_HALF).
struct LaneWeights {
    using Layout = Tile<FORMAT>;
    static constexpr bool BY_HALF = FORMAT == BF16;
    static constexpr bool STAGED_SCALES = FORMAT <= Q6;  // scales come with the ring: a word per lane and stage
    static constexpr int BLOCKS_PER_STAGE = STAGE_COLUMNS / Layout::STEP;
    static_assert(!STAGED_SCALES || (BLOCKS_PER_STAGE == 1 && Layout::SCALE_BYTES == 64), "64 bytes per tile row");

    uint32_t words[Layout::WORDS];
    uint2 pairs;  // W8: scales of rows g and g + 8

    // stage: byte of the stage's first block from the matrix's first on.
    DEVICE void load(const uint8_t* tiles, uint32_t stage, int group, int half, int lane) {
        const uint32_t block = stage + group / Layout::GROUPS * Layout::BLOCK_BYTES;
        const int in_block = group % Layout::GROUPS;
        constexpr int PIECES = Layout::PIECES / (BY_HALF ? 2 : 1);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int piece = half * PIECES + i;
            const uint4 v = load_16(tiles + (block + (in_block * Layout::PIECES + piece) * 512 + lane * 16));
            words[4 * piece] = v.x;
            words[4 * piece + 1] = v.y;
            words[4 * piece + 2] = v.z;
            words[4 * piece + 3] = v.w;
        }
        const uint32_t rest = block + Layout::REST_AT + (lane * Layout::GROUPS + in_block) * Layout::REST * 4;
        if constexpr (Layout::REST == 1) words[4] = load_4(tiles + rest);
        if constexpr (Layout::REST == 2) {
            const uint2 v = load_8(tiles + rest);
            words[4] = v.x;
            words[5] = v.y;
        }
        if constexpr (FORMAT == W8) pairs = load_8(tiles + (block + Layout::SCALES_AT + (lane >> 2) * 8));
    }

    // Scales of the lane's rows for a group of the stage, or a half of a group; staged: its 8 bytes of the ring.
    DEVICE void scales(const unsigned char* staged, int group, int half, Scale (&scale)[2]) const {
        const uint2 both = STAGED_SCALES ? *reinterpret_cast<const uint2*>(staged) : pairs;
        const int second = FORMAT == W8 ? half : group;
        scale[0].set(second ? half_hi(both.x) : half_lo(both.x));
        scale[1].set(second ? half_hi(both.y) : half_lo(both.y));
    }

    DEVICE void operand(int j, const Scale (&scale)[2], uint32_t (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (FORMAT == BF16)
                a[i] = words[4 * j + i];
            else
                a[i] = scaled_pair(words, j, i, scale[i & 1]);
        }
    }
};

// Sums of stages [begin, end) for this warp's two tile rows; IDLE: only copies. Operand A of a half group is made
// while the half before is multiplied. The barrier for a stage is in the middle of the stage before, so that its first
// operands are here when it begins.
template <bool IDLE>
DEVICE void multiply(const LinearLargeParams& p, Copies& copies, const Assignment& a, unsigned char* ring, int begin,
                     int end, Sums& sums) {
    using Lane = LaneWeights;
    constexpr uint32_t ROW_STAGE_BYTES = Lane::BLOCKS_PER_STAGE * Lane::Layout::BLOCK_BYTES;
    const int lane = static_cast<int>(lane_id());
    const int g = lane >> 2, t = lane & 3;
    const int half_offset[2] = {(t + 4 * (g & 1)) * 16, (t + 4 * (~g & 1)) * 16};
    const uint8_t* tiles = p.tiles[MATRICES == 1 || IDLE ? 0 : a.matrix];

    Lane weights[2];
    uint32_t at[2] = {0, 0};    // byte of the tile row's stage that is loaded next, from the matrix's first on
    Scale scale[2][2];          // [m][row g, g + 8]
    uint32_t operand[2][2][4];  // [m][j][register]
    int slot = 0;
    // Makes the operand of half `half` of group `group` from words that are here, and asks for the next ones.
    const auto prepare = [&](int group, int half, int left) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            if constexpr (FORMAT == BF16) {  // words are the operand: only the next ones are asked for
                if (group == 0 && half == 0 && left > 1) at[m] += ROW_STAGE_BYTES;
                weights[m].load(tiles, at[m], group, half, lane);
            } else if (half == 0 || FORMAT == W8) {
                weights[m].scales(ring + slot + TOKEN_BYTES + warp_index() * 128 + g * 8 + m * 64, group, half,
                                  scale[m]);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) weights[m].operand(2 * half + j, scale[m], operand[m][j]);
            if (FORMAT != BF16 && half == 1) {
                if (group == 1 && left > 1) at[m] += ROW_STAGE_BYTES;
                weights[m].load(tiles, at[m], group ^ 1, 0, lane);
            }
        }
    };
    if (!IDLE) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint32_t row = minimum(a.tile_row + m, p.n_tile_rows[a.matrix] - 1);
            at[m] = (row * p.stages + begin) * ROW_STAGE_BYTES;
            if (FORMAT != BF16) weights[m].load(tiles, at[m], 0, 0, lane);
        }
    }
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    uint4 first[N_BLOCK];  // operands B of a stage's first block, read before the stage begins
    const auto read_tokens = [&](uint4(&tokens)[N_BLOCK], int half, int n0) {
        const unsigned char* rows = ring + slot + g * 128 + half / 2 * GROUP_BYTES + half_offset[half % 2];
#pragma unroll
        for (int n = 0; n < N_BLOCK; ++n) tokens[n] = *reinterpret_cast<const uint4*>(rows + (n0 + n) * 1024);
    };
    if (!IDLE) {
        prepare(0, 0, 1);
        read_tokens(first, 0, 0);
    }
#pragma unroll 1
    for (int left = end - begin; left > 0; --left) {
#pragma unroll
        for (int half = 0; half < 4; ++half) {
            if (half == 2) {  // the next stage is here, the one before is free
                cp_async_wait<STAGES - 3>();
                __syncthreads();
                const bool valid = left >= STAGES;
                unsigned char* free_slot = ring + (slot == 0 ? (STAGES - 1) * STAGE_BYTES : slot - STAGE_BYTES);
                copies.copy(p, free_slot, valid);
                if (!IDLE && Lane::STAGED_SCALES)
                    cp_async_4(free_slot + TOKEN_BYTES + threadIdx.x * 4,
                               tiles + ((lane < 16 ? at[0] : at[1]) + (valid ? (STAGES - 1) * ROW_STAGE_BYTES : 0) +
                                        Lane::Layout::SCALES_AT + lane % 16 * 4));
                cp_async_commit();
                if (!IDLE && L2_AHEAD > 0) {
                    constexpr int LINES = ceil_div(ROW_STAGE_BYTES, 128);
                    static_assert(LINES <= 32, "a lane's line");
                    const int line = LINES <= 16 ? lane % 16 : lane;
                    const uint32_t ahead = L2_AHEAD * ROW_STAGE_BYTES + line * 128;
                    if (line < LINES && left > L2_AHEAD) {
                        prefetch_l2(tiles + ((LINES <= 16 && lane >= 16 ? at[1] : at[0]) + ahead));
                        if (LINES > 16) prefetch_l2(tiles + (at[1] + ahead));
                    }
                }
            }
            if (!IDLE) {
                uint32_t now[2][2][4];
#pragma unroll
                for (int i = 0; i < 16; ++i) now[i / 8][i / 4 % 2][i % 4] = operand[i / 8][i / 4 % 2][i % 4];
                if (FORMAT == BF16) prepare((half + 1) % 4 / 2, (half + 1) % 2, left);
#pragma unroll
                for (int n0 = 0; n0 < N_TILES; n0 += N_BLOCK) {
                    uint4 tokens[N_BLOCK];
                    if (half == 0 && n0 == 0) {
#pragma unroll
                        for (int n = 0; n < N_BLOCK; ++n) tokens[n] = first[n];
                    } else {
                        read_tokens(tokens, half, n0);
                    }
#pragma unroll
                    for (int m = 0; m < 2; ++m)
#pragma unroll
                        for (int n = 0; n < N_BLOCK; ++n)
                            mma_bf16(sums[m][n0 + n], now[m][0], tokens[n].x, tokens[n].y);
#pragma unroll
                    for (int m = 0; m < 2; ++m)
#pragma unroll
                        for (int n = 0; n < N_BLOCK; ++n)
                            mma_bf16(sums[m][n0 + n], now[m][1], tokens[n].z, tokens[n].w);
                }
            }
            if (half == 3) slot = slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
            if (!IDLE && FORMAT != BF16) prepare((half + 1) % 4 / 2, (half + 1) % 2, left);
            if (!IDLE && half == 3) read_tokens(first, 0, 0);
        }
    }
    cp_async_wait<0>();
    __syncthreads();  // the next piece's copies overwrite what the slowest warp still reads
}

DEVICE void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
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

DEVICE void store_pair(uint16_t* row, int first, int n_rows, bool aligned, float low, float high) {
    const uint32_t pair = pack_bf16(low, high);
    if (aligned && first + 1 < n_rows) {
        *reinterpret_cast<uint32_t*>(row + first) = pair;
    } else {
        if (first < n_rows) row[first] = static_cast<uint16_t>(pair);
        if (first + 1 < n_rows) row[first + 1] = static_cast<uint16_t>(pair >> 16);
    }
}

// Two values of one token: upper belongs to row block_a + g, lower to block_b + g. Neighbouring rows meet in one lane:
// even lanes end with rows (g, g + 1) of the first block, odd ones with rows (g - 1, g) of the second.
DEVICE void store_rows(uint16_t* row, int block_a, int block_b, int n_rows, bool aligned, bool exists, float upper,
                       float lower) {
    const int g = static_cast<int>(lane_id()) >> 2;
    const bool odd = g & 1;
    const float received = shfl_xor(odd ? upper : lower, 4);
    if (exists)
        store_pair(row, odd ? block_b + g - 1 : block_a + g, n_rows, aligned, odd ? received : upper,
                   odd ? lower : received);
}

// x / (1 + exp(-x)), relative error about 2^-21: one rounding to bf16 follows.
DEVICE float gated(float gate, float up) {
    return gate * rcp_approx(1.0f + exp2_approx(gate * -1.4426950408889634f)) * up;
}

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
            if (a.matrix < 0) {
                multiply<true>(p, copies, a, ring, piece.begin, piece.end, sums);
            } else {
                multiply<false>(p, copies, a, ring, piece.begin, piece.end, sums);
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
