// Two tile rows per warp times the tokens of a block: operand A from packed weights ("tiles", tiles.cuh) in registers,
// operand B from a ring of STAGES stages of 128 columns of TOKENS tokens in shared memory. Shared by the kernels of many
// tokens, which say where tokens come from and what becomes of sums. Weights are bf16(code * bf16(scale)); products are
// exact, sums fp32.
//
// In a stage token row n of a 64-column group is 128 bytes, its 16-byte chunk c at c ^ 4 (n & 1), so that the 8 lanes of
// a phase (two tokens, chunks 4 h + t) read all 32 banks. Behind the tokens of a stage: a word of scales of each lane.
#pragma once

#include "common.cuh"
#include "tile_sums.cuh"
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

static_assert(THREADS == 256 && TOKENS % TOKENS_PER_PASS == 0 && TOKENS_PER_PASS % 2 == 0, "geometry");
static_assert(STAGES * STAGE_BYTES <= 101376, "shared memory");

// ---- from codes to operands
//
// A bf16 word with 8 bits or fewer set at its low end is that integer times 2^-133, subnormal or not: codes need no
// conversion, and fma(u, scale 2^109, -bias scale 2^-24) is the weight times 2^-24, rounded once. The scale itself is
// rounded to bf16; any binary16 scale stays in range. The factor 2^24 is made up for in the epilogue. NVFP4 is exact, with
// a factor of its own (tiles.cuh).

struct Scale {
    static constexpr uint32_t BIAS = FORMAT == Q4 ? 8 : FORMAT == Q5 ? 16 : FORMAT == Q6 ? 32 : 128;
    uint32_t unit;     // of a code at bit 0, bf16 twice; NVFP4: two scales
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
    uint32_t codes = 0, unit = scale.unit;
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
    } else if constexpr (FORMAT == W8) {  // two's complement to offset binary
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
    uint2 pairs;  // W8, NVFP4: scales of rows g and g + 8

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
        if constexpr (FORMAT == NVFP4) {
            const uint32_t row = block + Layout::SCALES_AT + (lane >> 2) * 16 + in_block * 4;
            pairs = make_uint2(load_4(tiles + row), load_4(tiles + (row + 8)));
        }
    }

    // Scales of the lane's rows for a group of the stage, or a half of a group; staged: its 8 bytes of the ring.
    DEVICE void scales(const unsigned char* staged, int group, int half, Scale (&scale)[2]) const {
        if constexpr (FORMAT == NVFP4) {
            scale[0].unit = fp4_scales(pairs.x, lane_id());
            scale[1].unit = fp4_scales(pairs.y, lane_id());
            return;
        }
        const uint2 both = STAGED_SCALES ? *reinterpret_cast<const uint2*>(staged) : pairs;
        const int second = FORMAT == W8 ? half : group;
        scale[0].set(second ? half_hi(both.x) : half_lo(both.x));
        scale[1].set(second ? half_hi(both.y) : half_lo(both.y));
    }

    DEVICE void operand(int j, const Scale (&scale)[2], uint32_t (&a)[4]) const {
        if constexpr (FORMAT == NVFP4) {
            fp4_operand(a, words, j, {scale[0].unit, scale[1].unit});
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (FORMAT == BF16)
                    a[i] = words[4 * j + i];
                else
                    a[i] = scaled_pair(words, j, i, scale[i & 1]);
            }
        }
    }
};

// Where a warp's weights of a piece begin: bytes of its two tile rows' first stage from the matrix's first on.
constexpr uint32_t ROW_STAGE_BYTES = LaneWeights::BLOCKS_PER_STAGE * LaneWeights::Layout::BLOCK_BYTES;

// Sums of n_stages stages for this warp's two tile rows; IDLE: only copies. Operand A of a half group is made while the
// half before is multiplied. The barrier for a stage is in the middle of the stage before, so that its first operands
// are here when it begins. N: tiles of eight tokens; L2_AHEAD: stages that weights are asked into the L2 ahead of their
// use. copies.copy(p, slot, valid) queues this thread's part of the next stage's tokens.
template <bool IDLE, int L2_AHEAD, int N, typename Params, typename Copies>
DEVICE void multiply(const Params& p, Copies& copies, const uint8_t* tiles, uint32_t first_row, uint32_t second_row,
                     unsigned char* ring, int n_stages, SumsOf<N>& sums) {
    static_assert(STAGES >= 3 || N == 0, "a stage is waited for in the middle of the one before");
    using Lane = LaneWeights;
    constexpr int N_BLOCK = N % 4 == 0 ? 4 : N % 3 == 0 ? 3 : 2;  // token tiles whose operands are in registers together
    static_assert(N % N_BLOCK == 0 && N * 8 <= TOKENS, "token tiles");
    const int lane = static_cast<int>(lane_id());
    const int g = lane >> 2, t = lane & 3;
    const int half_offset[2] = {(t + 4 * (g & 1)) * 16, (t + 4 * (~g & 1)) * 16};

    Lane weights[2];
    uint32_t at[2] = {first_row, second_row};  // byte of the stage that is loaded next, from the matrix's first on
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
        for (int m = 0; m < 2; ++m)
            if (FORMAT != BF16) weights[m].load(tiles, at[m], 0, 0, lane);
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
    for (int left = n_stages; left > 0; --left) {
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
                for (int n0 = 0; n0 < N; n0 += N_BLOCK) {
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
