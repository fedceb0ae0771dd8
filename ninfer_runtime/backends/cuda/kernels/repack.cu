// Rows of a matrix as the file stores them -> "tiles" (packing.py, the oracle; bit-exact). Row-split planes of Q4, Q5, Q6
// and W8 (specs/layouts.md §2), bf16 words, or rows of E2M1 codes and swizzled E4M3 scales (§3). One warp per (tile row, step) block, a lane writes its own words.
// Alignment: base plane 32 bytes, high plane 8, scales 2, bf16 rows 2, out 64. Rows come in two runs: the first gives rows
// 0..7 of every tile row, the second rows 8..15; tile row i starts at row stride * i of a run. Experts follow each other
// every expert_rows rows of both runs and have expert_tiles tile rows. Rows past n_rows of a run (of an expert) and columns
// past K are padding: code 0, scale 0.
#include "tiles.cuh"

#ifndef FORMAT
#define FORMAT 0
#endif

struct RepackParams {
    const uint8_t* base[2];  // codes; bf16: words
    const uint8_t* high[2];
    const uint8_t* scales[2];
    uint8_t* out;
    int n_rows[2];
    int row_stride;
    int n_tiles;
    int k_steps;
    int k;         // bf16: words of a row
    int groups;    // of a row in the file
    int expert_tiles;
    int expert_rows;
    int scale_row[2];  // NVFP4: the run's first row, from the first row of its scales on
};

constexpr int BITS = FORMAT == Q4 ? 4 : FORMAT == Q5 ? 5 : FORMAT == Q6 ? 6 : FORMAT == W8 ? 8 : 16;
constexpr int HIGH_BITS = FORMAT == Q5 ? 1 : FORMAT == Q6 ? 2 : 0;
constexpr uint32_t BIAS = FORMAT <= Q6 ? 1u << (BITS - 1) : 0u;

// Offset-binary code (W8: two's complement, bf16: word) at a column, counted from the start of the row.
DEVICE uint32_t code_at(const RepackParams& p, int run, int expert, int row, int column) {
    if (row >= p.n_rows[run]) return BIAS;
    row += expert * p.expert_rows;
    if constexpr (FORMAT == BF16) {
        if (column >= p.k) return 0;
        return reinterpret_cast<const uint16_t*>(p.base[run])[static_cast<size_t>(row) * p.k + column];
    } else if constexpr (FORMAT == W8) {
        return p.base[run][static_cast<size_t>(row) * p.groups * 32 + column];
    } else {
        const size_t group = static_cast<size_t>(row) * p.groups + column / 64;
        const int i = column % 64;
        uint32_t u = p.base[run][group * 32 + i / 2] >> (4 * (i % 2)) & 15u;
        if constexpr (HIGH_BITS != 0) {
            const int bit = i * HIGH_BITS;
            u |= (p.high[run][group * (8 * HIGH_BITS) + bit / 8] >> (bit % 8) & ((1u << HIGH_BITS) - 1)) << 4;
        }
        return u ^ BIAS;  // two's complement to offset-binary
    }
}

// Two codes of pair p of this lane, in the halves of a word.
DEVICE uint32_t pair_at(const RepackParams& p, int tile, int column, int pair) {
    const int g = static_cast<int>(lane_id()) >> 2, t = static_cast<int>(lane_id()) & 3;
    const int j = pair / 4, i = pair % 4, run = i % 2;
    const int expert = tile / p.expert_tiles, row = tile % p.expert_tiles * p.row_stride + g;
    const int at = column + 32 * (j / 2) + 8 * t + 4 * (j % 2) + 2 * (i / 2);
    return code_at(p, run, expert, row, at) | code_at(p, run, expert, row, at + 1) << 16;
}

DEVICE void pack_words(uint32_t (&words)[Tile<FORMAT>::WORDS], const RepackParams& p, int tile, int column) {
#pragma unroll
    for (int w = 0; w < Tile<FORMAT>::WORDS; ++w) words[w] = 0;
#pragma unroll
    for (int pair = 0; pair < 16; ++pair) {
        const uint32_t u = pair_at(p, tile, column, pair);
        if constexpr (FORMAT == Q4) {
            words[pair % 4] |= u << (4 * (pair / 4));
        } else if constexpr (FORMAT == Q5) {
            if (pair < 15) {
                words[pair / 3] |= u << (5 * (pair % 3));
            } else {
#pragma unroll
                for (int w = 0; w < 5; ++w) words[w] |= (u >> w & 0x00010001u) << 15;
            }
        } else if constexpr (FORMAT == Q6) {
            if (pair < 12) {
                words[pair / 2] |= u << (6 * (pair % 2));
            } else {
                const int i = pair - 12;
                words[i] |= (u & 0x000f000fu) << 12;
                words[4 + i / 2] |= (u >> 4 & 0x00030003u) << (12 + 2 * (i % 2));
            }
        } else if constexpr (FORMAT == W8) {
            words[4 * (pair / 8) + pair % 4] |= u << (8 * (pair % 8 / 4));
        } else {
            words[pair] = u;
        }
    }
}

// ---- NVFP4: eight codes of a row are four bytes of the file and a word here, four scales are a word in both

DEVICE void pack_fp4(uint32_t (&words)[Tile<FORMAT>::WORDS], const RepackParams& p, int tile, int column) {
    const int g = static_cast<int>(lane_id()) >> 2, t = static_cast<int>(lane_id()) & 3;
    const int row = tile % p.expert_tiles * p.row_stride + g;
    const size_t stored = static_cast<size_t>(tile / p.expert_tiles) * p.expert_rows + row;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const int run = w % 2, at = column + w / 2 * 32 + t * 8;
        uint32_t codes = 0;
        if (row < p.n_rows[run] && at < p.k) codes = load_4(p.base[run] + stored * (p.k / 2) + at / 2);
        uint32_t halves[2];  // even columns, odd columns
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            uint32_t nibbles = codes >> (4 * odd) & 0x0f0f0f0fu;
            nibbles = (nibbles | nibbles >> 4) & 0x00ff00ffu;
            halves[odd] = (nibbles | nibbles >> 8) & 0x0000ffffu;
        }
        words[w] = halves[0] | halves[1] << 16;
    }
}

// Word `lane` of a block's scales: row lane / 4 of run lane / 2 % 2, 64-column group lane % 2.
DEVICE uint32_t fp4_scale_word(const RepackParams& p, int tile, int step) {
    const int lane = static_cast<int>(lane_id()), run = lane / 2 % 2, group = step * 2 + lane % 2;
    const int row = tile % p.expert_tiles * p.row_stride + lane / 4;
    const int n = p.scale_row[run] + tile / p.expert_tiles * p.expert_rows + row;
    if (row >= p.n_rows[run] || group * 64 >= p.k) return 0;
    const size_t scale_tile = static_cast<size_t>(n / 128) * (p.k / 64) + group;
    return load_4(p.scales[run] + scale_tile * 512 + n % 32 * 16 + n % 128 / 32 * 4);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) repack(const __grid_constant__ RepackParams p) {
    using L = Tile<FORMAT>;
    grid_dependency_wait();
    grid_dependency_launch();
    const int lane = static_cast<int>(lane_id());
    const int n_blocks = p.n_tiles * p.k_steps;
    for (int block = blockIdx.x * (THREADS / WARP_LANES) + warp_index(); block < n_blocks;
         block += gridDim.x * (THREADS / WARP_LANES)) {
        const int tile = block / p.k_steps, step = block % p.k_steps;
        uint8_t* out = p.out + static_cast<size_t>(block) * L::BLOCK_BYTES;
#pragma unroll 1
        for (int group = 0; group < L::GROUPS; ++group) {
            uint32_t words[L::WORDS];
            if constexpr (FORMAT == NVFP4) {
                pack_fp4(words, p, tile, step * L::STEP + group * 64);
            } else {
                pack_words(words, p, tile, step * L::STEP + group * 64);
            }
#pragma unroll
            for (int piece = 0; piece < L::PIECES; ++piece)
                store_16(out + (group * L::PIECES + piece) * 512 + lane * 16,
                         make_uint4(words[4 * piece], words[4 * piece + 1], words[4 * piece + 2], words[4 * piece + 3]));
            if constexpr (L::REST > 0) {
#pragma unroll
                for (int r = 0; r < L::REST; ++r)
                    store_4(out + L::REST_AT + ((lane * L::GROUPS + group) * L::REST + r) * 4, words[4 * L::PIECES + r]);
            }
        }
        if constexpr (FORMAT == NVFP4) {
            store_4(out + L::SCALES_AT + lane * 4, fp4_scale_word(p, tile, step));
        } else if constexpr (L::SCALE_BYTES > 0) {
            // Word i of the scales: row g = i / 4 of run i / 2 % 2, group i % 2.
            const int run = lane / 2 % 2, row = tile % p.expert_tiles * p.row_stride + lane / 4;
            const size_t at = static_cast<size_t>(tile / p.expert_tiles) * p.expert_rows + row;
            uint16_t scale = 0;
            if (row < p.n_rows[run])
                scale = reinterpret_cast<const uint16_t*>(p.scales[run])[at * p.groups + step * 2 + lane % 2];
            reinterpret_cast<uint16_t*>(out + L::SCALES_AT)[lane] = scale;
        }
    }
}
