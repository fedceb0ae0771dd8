// A ring of stages of 128 columns in shared memory, of weights and of quantized rows, for products whose operands are read
// as they lie: [each warp's two blocks of weights][codes of each token][what belongs to a token's codes].
//
// BLOCK bytes of a tile row in a stage; CODES and EXTRA bytes of a token: in memory a row is its codes, then its extras.
// Codes of 128 bytes lie with their 16-byte chunk c at c ^ 4 (token & 1), so that 8 lanes of a phase read all banks.
#pragma once

#include "common.cuh"
#include "tile_pieces.cuh"

struct RingParams {
    const uint8_t* tiles[MAX_MATRICES];
    void* out[MAX_MATRICES];  // STORE: bf16 or fp32 [T][out_stride]; SWIGLU: bf16, or quantized; RESIDUAL: fp32, added to
    const uint8_t* x;
    float* partials;  // per block: tokens of a tile * 256 sums
    uint32_t* flags;  // per block; 0 between launches
    int64_t row_bytes;
    int n_rows[MAX_MATRICES];  // of the output: half the matrix's for SWIGLU
    int n_tile_rows[MAX_MATRICES];
    int first_pair[MAX_MATRICES];  // pairs of tile rows before this matrix
    int out_stride[MAX_MATRICES];  // elements; quantized: bytes
    int out_float[MAX_MATRICES];   // STORE: nonzero for fp32
    float factor[MAX_MATRICES];    // of sums
    float out_divisor;             // of what is quantized
    int n_pairs;
    int n_tokens;
    int token_tiles;
    int stages;  // of a tile: ceil(k / 128)
    int whole_tiles;
    int shared_tiles;
};

template <int BLOCK, int CODES, int EXTRA, int N_TOKENS>
struct RingLayout {
    static constexpr int WARP_BYTES = 2 * BLOCK;
    static constexpr int TOKENS_AT = THREADS / WARP_LANES * WARP_BYTES;
    static constexpr int EXTRAS_AT = TOKENS_AT + N_TOKENS * CODES;
    static constexpr int STAGE_BYTES = EXTRAS_AT + N_TOKENS * EXTRA;
    static constexpr int WEIGHT_CHUNKS = WARP_BYTES / 16;
    static constexpr int CHUNKS = CODES / 16;                      // of a token
    static constexpr int PASS_TOKENS = THREADS / CHUNKS;           // that one chunk of every thread covers
    static constexpr int PASSES = N_TOKENS / PASS_TOKENS;
    static_assert(BLOCK % 16 == 0 && CODES % 16 == 0 && (EXTRA == 8 || EXTRA == 16), "whole chunks");
    static_assert(N_TOKENS % PASS_TOKENS == 0 && N_TOKENS <= THREADS && PASS_TOKENS % 2 == 0, "geometry");

    // Byte of a token's chunk from the first token's on.
    static DEVICE int chunk_at(int token, int chunk) {
        return token * CODES + (CODES == 128 ? chunk ^ 4 * (token & 1) : chunk) * 16;
    }
};

// The copying side: the warp's own weights, and this thread's part of the tokens.
template <typename Layout, int BLOCK, int CODES, int EXTRA, int N_TOKENS>
struct RingCopies {
    const uint8_t* weights;  // this lane's first chunk of the next stage; null: none
    int second_row;          // bytes from where the second tile row's block would follow the first's to where it lies
    const uint8_t* codes;    // this thread's chunk of its first token
    const uint8_t* extras;
    int pass_bytes[Layout::PASSES];  // to its other tokens

    template <typename Params>
    DEVICE RingCopies(const Params& p, const uint8_t* tiles, const Assignment& a, int token_tile, int stage) {
        const int lane = static_cast<int>(lane_id()), thread = static_cast<int>(threadIdx.x);
        weights = nullptr;
        second_row = 0;
        if (a.matrix >= 0) {
            weights = tiles + (static_cast<int64_t>(a.tile_row) * p.stages + stage) * BLOCK + lane * 16;
            second_row = a.tile_row + 1 < p.n_tile_rows[a.matrix] ? (p.stages - 1) * BLOCK : -BLOCK;
        }
        // Tokens that do not exist repeat the last one; their sums are not written.
        const int last = p.n_tokens - 1, first_token = token_tile * N_TOKENS + thread / Layout::CHUNKS;
        const int token = minimum(first_token, last);
        codes = p.x + token * p.row_bytes + stage * CODES + thread % Layout::CHUNKS * 16;
#pragma unroll
        for (int i = 0; i < Layout::PASSES; ++i)
            pass_bytes[i] =
                static_cast<int>((minimum(first_token + Layout::PASS_TOKENS * i, last) - token) * p.row_bytes);
        const int own = minimum(token_tile * N_TOKENS + thread % N_TOKENS, last);
        extras = p.x + own * p.row_bytes + p.stages * CODES + stage * EXTRA;
    }

    // Queues one stage and goes on to the next.
    DEVICE void copy(unsigned char* slot) {
        const int lane = static_cast<int>(lane_id()), thread = static_cast<int>(threadIdx.x);
        if (weights != nullptr) {
            unsigned char* to = slot + warp_index() * Layout::WARP_BYTES + lane * 16;
#pragma unroll
            for (int first = 0; first < Layout::WEIGHT_CHUNKS; first += WARP_LANES) {
                const int chunk = first + lane;
                if (first + WARP_LANES <= Layout::WEIGHT_CHUNKS || chunk < Layout::WEIGHT_CHUNKS)
                    cp_async_16(to + first * 16, weights + first * 16 + (chunk >= BLOCK / 16 ? second_row : 0));
            }
            weights += BLOCK;
        }
        unsigned char* to = slot + Layout::TOKENS_AT +
                            Layout::chunk_at(thread / Layout::CHUNKS, thread % Layout::CHUNKS);
#pragma unroll
        for (int i = 0; i < Layout::PASSES; ++i)
            cp_async_16(to + i * Layout::PASS_TOKENS * CODES, codes + pass_bytes[i]);
        if (thread < N_TOKENS) {
            unsigned char* extra = slot + Layout::EXTRAS_AT + thread * EXTRA;
            if constexpr (EXTRA == 8)
                cp_async_8(extra, extras);
            else
                cp_async_16(extra, extras);
        }
        codes += CODES;
        extras += EXTRA;
    }
};

// Copies of a piece, the first STAGES - 1 of its stages under way.
template <typename Layout, typename Copies, int N_STAGES, int N_MATRICES>
DEVICE Copies start_ring(const RingParams& p, unsigned char* ring, int index) {
    const Piece piece = piece_of(p, index);
    const int n = piece.end - piece.begin;
    const Assignment a = assignment<N_MATRICES>(p, piece.tile / p.token_tiles);
    const uint8_t* tiles = p.tiles[N_MATRICES == 1 ? 0 : maximum(a.matrix, 0)];
    Copies copies(p, tiles, n > 0 ? a : Assignment{-1, 0}, piece.tile % p.token_tiles, piece.begin);
#pragma unroll
    for (int i = 0; i < N_STAGES - 1; ++i) {
        if (i < n) copies.copy(ring + i * Layout::STAGE_BYTES);
        cp_async_commit();
    }
    return copies;
}

// Everything that a block does; multiply(slot, sums) adds a stage's products to the warp's sums.
template <typename Layout, typename Copies, int N_STAGES, int N_MATRICES, int EPILOGUE_, int QUANTIZED_, int N,
          typename Multiply>
DEVICE void run_pieces(const RingParams& p, unsigned char* ring, const Multiply& multiply) {
    // The copies of the next piece are under way while one is finished.
    Copies copies = start_ring<Layout, Copies, N_STAGES, N_MATRICES>(p, ring, 0);
    for (int index = 0;; ++index) {
        SumsOf<N> sums;
        clear<N>(sums);
        {
            const Piece piece = piece_of(p, index);
            if (piece.begin >= piece.end) break;
            const bool idle = assignment<N_MATRICES>(p, piece.tile / p.token_tiles).matrix < 0;
            int slot = 0, next = (N_STAGES - 1) * Layout::STAGE_BYTES;
#pragma unroll 1
            for (int left = piece.end - piece.begin; left > 0; --left) {
                cp_async_wait<N_STAGES - 2>();
                __syncthreads();
                if (left >= N_STAGES) copies.copy(ring + next);
                cp_async_commit();
                if (!idle) multiply(ring + slot, sums);
                next = slot;
                slot = slot == (N_STAGES - 1) * Layout::STAGE_BYTES ? 0 : slot + Layout::STAGE_BYTES;
            }
            cp_async_wait<0>();
            __syncthreads();  // the next piece's copies overwrite what the slowest warp still reads
        }
        copies = start_ring<Layout, Copies, N_STAGES, N_MATRICES>(p, ring, index + 1);
        const Piece piece = piece_of(p, index);
        if (piece.begin > 0) {
            leave<N>(p, sums);
            continue;
        }
        collect_rest<N>(p, piece, sums);
        const Assignment a = assignment<N_MATRICES>(p, piece.tile / p.token_tiles);
        if (a.matrix >= 0)
            finish<EPILOGUE_, QUANTIZED_, N>(p, a, piece.tile % p.token_tiles * N * 8, sums);
    }
}
