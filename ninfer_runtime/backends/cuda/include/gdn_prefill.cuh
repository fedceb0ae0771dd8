// Gated DeltaNet over the tokens of one sequence in chunks of 64: what the three kernels of a prefill hand on.
// With G the sum of log2 of the decays inside a chunk, k, q normalised, q scaled, and S0 the state before the chunk:
//   A_ij = beta_i (k_i . k_j) 2^(G_i - G_j), j < i;   T = (I + A)^-1;   U = T diag(beta) V;   W = T diag(beta 2^G) K
//   V' = U - W S0;   O_i = 2^G_i q_i S0 + sum_{j <= i} 2^(G_i - G_j) (q_i . k_j) v'_j;   S = 2^G_64 S0 + sum_j ...
// Keys, queries and values enter every product as the bf16 numbers that the convolution gave; the factors of
// normalisation and decay are applied to fp32 sums. W, U, V' and S0 are rounded to bf16 once.
//
// Products are mma m16n8k16. W, U, V' and S0 are kept as the warps hold them, "pieces" of 16 bytes per lane, 512 bytes
// per warp: the pair of B fragments {b0, b1 of columns 0..7, b0, b1 of columns 8..15} that the next product takes.
#pragma once

#include "gdn.cuh"

constexpr int CHUNK = 64;
constexpr int PIECE = 32 * 16;  // bytes

constexpr int KEY_BLOCK = CHUNK * GDN_DIM * 2;       // bytes: keys or queries of a chunk and key head, row-major bf16
constexpr int W_BLOCK = CHUNK * GDN_DIM * 2;         // pieces [key step 8][token tile 4]: -W
constexpr int U_BLOCK = CHUNK * GDN_DIM * 2;         // pieces [value tile 8][token step 4]: U, then V'
constexpr int STATE_BLOCK = GDN_DIM * GDN_DIM * 2;   // pieces [value tile 8][key step 8]: S0
constexpr int SCALAR_BLOCK = CHUNK * 4;

// One prefill's workspace; every array begins with [chunk][head].
struct GdnWorkspace {
    unsigned char* query;      // KEY_BLOCK per key head
    unsigned char* key;
    float* query_scale;        // [64] per key head: 128^-0.5 / |q|
    float* key_scale;          // 1 / |k|
    float* decay;              // [64] per value head: G
    unsigned char* w;          // W_BLOCK per value head
    unsigned char* u;          // U_BLOCK
    unsigned char* state;      // STATE_BLOCK
};

// B fragments of two neighbouring 8-column tiles from the accumulators of rows 0..7 | 8..15 (c0 c1 | c2 c3) at two
// neighbouring 8-column tiles: the product's rows become columns.
DEVICE uint4 piece_of(const float (&first)[4], const float (&second)[4]) {
    return {pack_bf16(first[0], first[1]), pack_bf16(second[0], second[1]), pack_bf16(first[2], first[3]),
            pack_bf16(second[2], second[3])};
}

// A row of 128 bf16 in shared memory is 16 vectors; vector v of row r lies at v ^ (r % 8): eight rows, eight banks.
DEVICE unsigned char* swizzled(unsigned char* tile, int row, int vector) {
    return tile + row * (GDN_DIM * 2) + ((vector ^ (row & 7)) << 4);
}

// Copy a block of 64 rows, row-major in global memory, into a swizzled tile; all threads of the block.
DEVICE void copy_rows(unsigned char* tile, const unsigned char* block) {
    constexpr int ROWS = THREADS / 16;  // of 16 vectors, per step; a multiple of 8, so that a thread's swizzle stays
    static_assert(THREADS % 128 == 0 && CHUNK % ROWS == 0, "whole rows");
    const int thread = static_cast<int>(threadIdx.x);
    unsigned char* const shared = swizzled(tile, thread / 16, thread % 16);
    block += 16 * thread;
#pragma unroll
    for (int i = 0; i < CHUNK / ROWS; ++i) cp_async_16(shared + i * ROWS * GDN_DIM * 2, block + i * 16 * THREADS);
}

template <int BYTES>
DEVICE void copy_linear(void* shared, const void* global) {
    const int first = 16 * static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < BYTES; i += 16 * THREADS)
        if (BYTES - i >= 16 * THREADS || first < BYTES - i)
            cp_async_16(static_cast<unsigned char*>(shared) + first + i, static_cast<const unsigned char*>(global) + first + i);
}
