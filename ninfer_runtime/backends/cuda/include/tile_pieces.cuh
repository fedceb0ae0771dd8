// Work of a persistent grid on tiles of sums, and what becomes of the sums. Tiles x stages lie in one line: whole waves
// of tiles first, one tile per block; then the rest in equal spans of stages. A block that starts inside a tile leaves
// its sums to the tile's owner, which is the block with the lower index that starts the tile, ends with it, and adds
// them in index order. The grid is resident as a whole.
//
// Params: out, partials, flags, n_rows, n_tile_rows, first_pair, out_stride, out_float, factor, n_pairs, n_tokens,
// token_tiles, stages, whole_tiles, shared_tiles as in linear_large.cu, for QUANTIZED also out_divisor.
#pragma once

#include "common.cuh"
#include "quantize_fp4.cuh"
#include "tile_sums.cuh"

enum Epilogue { STORE, SWIGLU, RESIDUAL };  // as in ops/linear_large.py

constexpr int MAX_MATRICES = 6;

// What a warp computes: two tile rows of one matrix (the second is a repetition when the matrix has an odd number).
struct Assignment {
    int matrix;  // -1: nothing, only copies
    int tile_row;
};

template <int N_MATRICES, typename Params>
DEVICE Assignment assignment(const Params& p, int row_tile) {
    const int pair = row_tile * (THREADS / WARP_LANES) + warp_index();
    if (pair >= p.n_pairs) return {-1, 0};
    int matrix = 0;
#pragma unroll
    for (int m = 1; m < N_MATRICES; ++m)
        if (pair >= p.first_pair[m]) matrix = m;
    return {matrix, 2 * (pair - p.first_pair[matrix])};
}

// A piece of work of a block: stages [begin, end) of a tile.
struct Piece {
    int tile, begin, end;
    int tile_end;  // in the line of shared stages
};

template <typename Params>
DEVICE int span_begin(const Params& p, int block) {
    return static_cast<int>(static_cast<int64_t>(p.shared_tiles) * p.stages * block / gridDim.x);
}

// The index-th one; begin >= end behind the last.
template <typename Params>
DEVICE Piece piece_of(const Params& p, int index) {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const int whole = p.whole_tiles / blocks;
    if (index < whole) return {index * blocks + block, 0, p.stages, 0};
    const int first = span_begin(p, block), last = span_begin(p, block + 1);
    const int in_line = first / p.stages + index - whole;
    const int start = in_line * p.stages;
    const int begin = maximum(first, start) - start;
    return {p.whole_tiles + in_line, begin, minimum(last - start, p.stages), start + p.stages};
}

// ---- handing sums over: [register quadruple][thread] float4

template <int N, typename Params>
DEVICE float* partial_of(const Params& p, int block) {
    return p.partials + (static_cast<int64_t>(block) * 2 * N * THREADS + threadIdx.x) * 4;
}

template <int N, typename Params>
DEVICE void leave(const Params& p, const SumsOf<N>& sums) {
    float* to = partial_of<N>(p, blockIdx.x);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
            store_16(to + (m * N + n) * THREADS * 4,
                     make_uint4(__float_as_uint(sums[m][n][0]), __float_as_uint(sums[m][n][1]),
                                __float_as_uint(sums[m][n][2]), __float_as_uint(sums[m][n][3])));
    __syncthreads();
    if (threadIdx.x == 0) store_release(p.flags + blockIdx.x, 1);
}

template <int N, typename Params>
DEVICE void collect(const Params& p, int block, SumsOf<N>& sums) {
    if (threadIdx.x == 0)
        while (load_acquire(p.flags + block) == 0) {
        }
    __syncthreads();
    const float* from = partial_of<N>(p, block);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const uint4 part = load_16(from + (m * N + n) * THREADS * 4);
            sums[m][n][0] += __uint_as_float(part.x);
            sums[m][n][1] += __uint_as_float(part.y);
            sums[m][n][2] += __uint_as_float(part.z);
            sums[m][n][3] += __uint_as_float(part.w);
        }
    __syncthreads();
    if (threadIdx.x == 0) store_release(p.flags + block, 0);
}

// A piece that starts its tile: the sums of the blocks that hold the rest of it, which come next in index order.
template <int N, typename Params>
DEVICE void collect_rest(const Params& p, const Piece& piece, SumsOf<N>& sums) {
    int done = piece.end;
    for (int other = static_cast<int>(blockIdx.x) + 1; done < p.stages; ++other) {
        collect<N>(p, other, sums);
        done += minimum(span_begin(p, other + 1), piece.tile_end) - span_begin(p, other);
    }
}

// ---- epilogues

// fp32, each 8 rows of a token one 32-byte sector. What is added to is read in batches: a store might change it.
template <bool ADD, int N>
DEVICE void finish_float(float* out, int64_t stride, int n_tokens, int first_token, int n_rows, int first_row,
                         const SumsOf<N>& sums) {
    const int g = static_cast<int>(lane_id()) >> 2, t = static_cast<int>(lane_id()) & 3;
    constexpr int BATCH = 4;
#pragma unroll
    for (int n0 = 0; n0 < N; n0 += BATCH) {
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

// Sixteen outputs of a token that lie in eight lanes, `upper` column block + g, `lower` block + 8 + g, rounded to bf16 and
// then as NVFP4. row: the token's quantized row; k: its columns. The row's last block also fills up its last step.
template <int AS>
DEVICE void store_quantized(unsigned char* row, int block, int k, float divisor, bool exists, float upper, float lower) {
    const int g = static_cast<int>(lane_id()) >> 2;
    const uint32_t pair = pack_bf16(upper, lower);
    const float x[2] = {bf16_lo(pair), bf16_hi(pair)};
    uint32_t largest = maximum(__float_as_uint(x[0]) & 0x7fffffffu, __float_as_uint(x[1]) & 0x7fffffffu);
#pragma unroll
    for (int mask = 4; mask < WARP_LANES; mask <<= 1) largest = maximum(largest, shfl_xor(largest, mask));
    const BlockScale scale(largest, divisor);
    const int k_padded = round_up(k, 128);
    const bool last = block + 16 == k;
    if constexpr (AS == AS_BF16) {
        uint16_t* values = reinterpret_cast<uint16_t*>(row);
        const uint32_t products = pack_bf16(scale.product(scale.code(x[0])), scale.product(scale.code(x[1])));
        const uint32_t other = shfl_xor(products, 4);
        // Even lanes: columns g, g + 1 of the upper eight, odd lanes: g - 1, g of the lower eight.
        const uint32_t two = g & 1 ? prmt(other, products, 0x7632u) : prmt(products, other, 0x5410u);
        if (exists) *reinterpret_cast<uint32_t*>(values + block + (g & 1 ? 8 + g - 1 : g)) = two;
        if (exists && last)
            for (int column = k + 2 * g; column < k_padded; column += 16)
                *reinterpret_cast<uint32_t*>(values + column) = 0;
    } else {
        const int shift = 4 * (g / 2 + 4 * (g & 1));
        uint32_t words[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            words[m] = scale.code(x[m]) << shift;
#pragma unroll
            for (int mask = 4; mask < WARP_LANES; mask <<= 1) words[m] |= shfl_xor(words[m], mask);
        }
        unsigned char* scales = row + fp4_code_bytes(k_padded);
        if (exists && g < 2) store_4(row + fp4_word_at(block + 8 * g), g ? words[1] : words[0]);
        if (exists && g == 2) scales[block / 16] = static_cast<unsigned char>(scale.word);
        if (exists && last) {
            for (int column = k + 8 * g; column < k_padded; column += 64) store_4(row + fp4_word_at(column), 0);
            for (int column = k + 16 * g; column < k_padded; column += 128) scales[column / 16] = 0;
        }
    }
}

// EPILOGUE of one warp's sums; QUANTIZED (SWIGLU): rows of out_stride bytes in that form.
template <int EPILOGUE_, int QUANTIZED_, int N, typename Params>
DEVICE void finish(const Params& p, const Assignment& a, int first_token, SumsOf<N>& sums) {
    const float factor = p.factor[a.matrix];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] *= factor;
    const int t = static_cast<int>(lane_id()) & 3;
    const int n_rows = p.n_rows[a.matrix];
    const int64_t stride = p.out_stride[a.matrix];
    if (EPILOGUE_ == RESIDUAL || (EPILOGUE_ == STORE && p.out_float[a.matrix])) {
        finish_float<EPILOGUE_ == RESIDUAL, N>(static_cast<float*>(p.out[a.matrix]), stride, p.n_tokens, first_token,
                                               n_rows, a.tile_row * 16, sums);
        return;
    }
    const bool aligned = (stride & 1) == 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = first_token + n * 8 + 2 * t + i;
            const bool exists = token < p.n_tokens;
            if constexpr (EPILOGUE_ == SWIGLU) {
                const float upper = gated(sums[0][n][i], sums[0][n][2 + i]);
                const float lower = gated(sums[1][n][i], sums[1][n][2 + i]);
                if constexpr (QUANTIZED_ != NOT_QUANTIZED) {
                    store_quantized<QUANTIZED_>(static_cast<unsigned char*>(p.out[a.matrix]) + token * stride,
                                                a.tile_row * 8, n_rows, p.out_divisor, exists, upper, lower);
                } else {
                    store_rows(static_cast<uint16_t*>(p.out[a.matrix]) + token * stride, a.tile_row * 8,
                               a.tile_row * 8 + 8, n_rows, aligned, exists, upper, lower);
                }
            } else {
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    store_rows(static_cast<uint16_t*>(p.out[a.matrix]) + token * stride, (a.tile_row + m) * 16,
                               (a.tile_row + m) * 16 + 8, n_rows, aligned, exists, sums[m][n][i], sums[m][n][2 + i]);
            }
        }
    }
}
