// y[token][row] = rstd[token] sum_k weight[row][k] x[token][k] for up to 8 tokens: weights in "tiles" (tiles.cuh),
// x bf16 [T][x_stride], zero from K to x_stride. Up to MATRICES matrices of the same K in any mix of FORMATS.
// Alignment: tiles 64 bytes, x and its rows 16, outputs 4. Codes and products are exact, sums fp32, scales multiply
// sums of a group. Reference: backends/reference/linear.py; tolerance against float64 1e-5 |w||x| and one rounding.
//
// The line of (tile row, step) pairs of all matrices is cut into spans of about equal bytes, one per warp of the grid and
// none of two matrices; a span lies together in memory. No warp meets another in the main loop: every warp has its own
// ring in shared memory, which the first steps fill before the launch ahead has ended; activations come through L1. A
// warp that begins inside a tile row leaves that sum in its place of the workspace, first of all; the warp that begins
// the tile row, earlier in the line, ends its span with it, adds the others' sums in order, and finishes the rows.
// Places are empty (all bits one) between launches, so a word that is not empty is the sum.
#include "tiles.cuh"

#ifndef FORMATS
#define FORMATS 1  // bit f: format f occurs
#endif
#ifndef EPILOGUE
#define EPILOGUE 0
#endif

enum Epilogue { STORE, SWIGLU, RESIDUAL };  // as in ops/linear_small.py

constexpr int MATRICES = 4;
constexpr int WARPS = THREADS / WARP_LANES;
constexpr int TOKENS = 8;
constexpr uint32_t EMPTY = 0xffffffffu;

constexpr int RING_BYTES = (BLOCK_SHARED / WARPS) / 64 * 64;  // of a warp

// How many blocks a warp's ring holds.
template <int F>
constexpr int STAGES = RING_BYTES / Tile<F>::BLOCK_BYTES;

struct LinearStreamParams {
    const uint8_t* tiles[MATRICES];
    void* out[MATRICES];  // STORE: bf16 or fp32 [T][out_stride]; SWIGLU: bf16
    const uint16_t* x;
    const float* ss;           // fp32 [n_parts][T], parts of sum x^2; null: rstd = 1
    const uint32_t* spans;     // [warps of the grid + 1] first steps
    float* workspace;          // [warps of the grid][32][4]
    float* residual;           // RESIDUAL: fp32 [T][n], added to
    uint16_t* normed;          // bf16 [T][normed_stride] = bf16(residual (1 + next_norm)); may be null
    const uint16_t* next_norm;
    float* ss_out;             // fp32 [tile rows][T]
    int format[MATRICES];
    int n_out[MATRICES];       // rows of the result
    int n_tiles[MATRICES];
    int k_steps[MATRICES];     // of a tile row
    int first_step[MATRICES];  // of absent matrices: past the end
    int out_stride[MATRICES];
    int out_float[MATRICES];   // STORE: nonzero for fp32
    int n_columns;
    int x_stride;
    int n_parts;
    int normed_stride;
    float inverse_hidden;
    float epsilon;
};

struct Sums {
    float even[4];
    float odd[4];
};

DEVICE void add_scaled(float (&sum)[4], const float (&part)[4], float scale, float scale8) {
    sum[0] = fmaf(scale, part[0], sum[0]);
    sum[1] = fmaf(scale, part[1], sum[1]);
    sum[2] = fmaf(scale8, part[2], sum[2]);
    sum[3] = fmaf(scale8, part[3], sum[3]);
}

// The activations of a step: what this lane's token has in columns 8t.. and 32 + 8t.. of each group.
template <int F>
struct Columns {
    uint4 low[Tile<F>::GROUPS];
    uint4 high[Tile<F>::GROUPS];

    DEVICE void load(const uint16_t* x, bool has_token) {
#pragma unroll
        for (int group = 0; group < Tile<F>::GROUPS; ++group) {
            low[group] = uint4{0, 0, 0, 0};
            high[group] = uint4{0, 0, 0, 0};
            if (has_token) {
                low[group] = load_16(x + group * 64);
                high[group] = load_16(x + group * 64 + 32);
            }
        }
    }
};

template <int F>
DEVICE void multiply(const uint32_t (&words)[Tile<F>::WORDS], uint2 scales, int group, const Columns<F>& x, Sums& sums) {
    const uint4 low = x.low[group], high = x.high[group];
    uint32_t a[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) tile_operand<F>(a[j], words, j);
    float(&sum)[4] = group == 0 ? sums.even : sums.odd;
    if constexpr (F == BF16) {
        mma_bf16(sums.even, a[0], low.x, low.y);
        mma_bf16(sums.odd, a[2], high.x, high.y);
        mma_bf16(sums.even, a[1], low.z, low.w);
        mma_bf16(sums.odd, a[3], high.z, high.w);
    } else {
        float first[4] = {0.0f, 0.0f, 0.0f, 0.0f}, second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        mma_bf16(first, a[0], low.x, low.y);
        mma_bf16(second, a[2], high.x, high.y);
        mma_bf16(first, a[1], low.z, low.w);
        mma_bf16(second, a[3], high.z, high.w);
        if constexpr (F == W8) {
            add_scaled(sum, first, half_lo(scales.x), half_lo(scales.y));
            add_scaled(sum, second, half_hi(scales.x), half_hi(scales.y));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) first[i] += second[i];
            add_scaled(sum, first, group == 0 ? half_lo(scales.x) : half_hi(scales.x),
                       group == 0 ? half_lo(scales.y) : half_hi(scales.y));
        }
    }
}

DEVICE void store_value(const LinearStreamParams& p, int matrix, int token, int row, float value) {
    const int at = token * p.out_stride[matrix] + row;
    if (EPILOGUE == STORE && p.out_float[matrix]) {
        static_cast<float*>(p.out[matrix])[at] = value;
    } else {
        static_cast<uint16_t*>(p.out[matrix])[at] = float_to_bf16(value);
    }
}

// What the residual epilogue of one tile row reads; requested long before it is needed.
struct Residuals {
    float x[4];
    float weight[2];

    DEVICE void load(const LinearStreamParams& p, int tile, int lane) {
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile * 16 + half * 8 + g;
            const bool has_row = row < p.n_out[0];
            weight[half] = has_row && p.normed != nullptr ? 1.0f + bf16_to_float(p.next_norm[row]) : 0.0f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = 2 * t + i;
                x[2 * half + i] = has_row && token < p.n_columns ? p.residual[token * p.n_out[0] + row] : 0.0f;
            }
        }
    }
};

// Writes a finished tile row: sum[0..1] are row g for tokens 2t + 0..1, sum[2..3] row g + 8.
DEVICE void finish(const LinearStreamParams& p, int matrix, int tile, const float* rstd, const Residuals& before,
                   const float (&sum)[4], int lane) {
    const int g = lane >> 2, t = lane & 3, n_out = p.n_out[matrix];
    if constexpr (EPILOGUE == RESIDUAL) {
        float squares[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 2 * t + i % 2, row = tile * 16 + i / 2 * 8 + g;
            if (token >= p.n_columns || row >= n_out) continue;
            const float x = before.x[i] + sum[i];
            p.residual[token * n_out + row] = x;
            squares[i % 2] += x * x;
            if (p.normed != nullptr) p.normed[token * p.normed_stride + row] = float_to_bf16(x * before.weight[i / 2]);
        }
#pragma unroll
        for (int mask = 4; mask < WARP_LANES; mask <<= 1) {
            squares[0] += shfl_xor(squares[0], mask);
            squares[1] += shfl_xor(squares[1], mask);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (g == 0 && 2 * t + i < p.n_columns) p.ss_out[tile * p.n_columns + 2 * t + i] = squares[i];
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = 2 * t + i;
            if (token >= p.n_columns) continue;
            const float scale = p.ss != nullptr ? rstd[token] : 1.0f;
            const float first = sum[i] * scale, second = sum[i + 2] * scale;
            if constexpr (EPILOGUE == SWIGLU) {
                const int row = tile * 8 + g;
                if (row < n_out) store_value(p, matrix, token, row, silu(first) * second);
            } else {
                const int row = tile * 16 + g;
                if (row < n_out) store_value(p, matrix, token, row, first);
                if (row + 8 < n_out) store_value(p, matrix, token, row + 8, second);
            }
        }
    }
}

// A warp's span.
struct Run {
    int matrix;
    int tile;
    int step;   // of the tile row
    int steps;  // how many from there on
};

DEVICE Run run_at(const LinearStreamParams& p, int begin, int end) {
    Run r;
    r.matrix = 0;
#pragma unroll
    for (int m = 1; m < MATRICES; ++m)
        if (begin >= p.first_step[m]) r.matrix = m;
    const int local = begin - p.first_step[r.matrix];
    r.tile = local / p.k_steps[r.matrix];
    r.step = local - r.tile * p.k_steps[r.matrix];
    r.steps = end - begin;
    return r;
}

struct Warp {
    const float* rstd;
    float* place;       // in the workspace, this lane's
    Residuals before;   // of the tile row that the span ends with
    int before_tile;
    float held[4];      // sum of that tile row, when others have more of it
    int held_matrix;
    int held_tile;
    int held_steps;     // how much of it is in the sum; 0: nothing is held
    int lane;
};

DEVICE void emit(const LinearStreamParams& p, Warp& warp, const Run& r, int from, int to, Sums& sums) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[i] = sums.even[i] + sums.odd[i];
        sums.even[i] = 0.0f;
        sums.odd[i] = 0.0f;
    }
    if (from > 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // The one NaN that would look like an empty word becomes another.
            const float stored = sum[i] == sum[i] ? sum[i] : __uint_as_float(0x7fc00000u);
            store_relaxed(warp.place + i * WARP_LANES, stored);
        }
    } else if (to == p.k_steps[r.matrix]) {
        if (EPILOGUE == RESIDUAL && warp.before_tile != r.tile) {
            Residuals before;
            before.load(p, r.tile, warp.lane);
            finish(p, r.matrix, r.tile, warp.rstd, before, sum, warp.lane);
        } else {
            finish(p, r.matrix, r.tile, warp.rstd, warp.before, sum, warp.lane);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) warp.held[i] = sum[i];
        warp.held_matrix = r.matrix;
        warp.held_tile = r.tile;
        warp.held_steps = to;
    }
}

// Requests the next block of the span into a slot; one group per call, empty behind the end.
template <int F>
DEVICE void request(const uint8_t*& at, int& left, unsigned char* slot, int lane) {
    constexpr int BYTES = Tile<F>::BLOCK_BYTES;
    if (left > 0) {
#pragma unroll
        for (int n = 0; n < ceil_div(BYTES, 512); ++n)
            if ((n + 1) * 512 <= BYTES || lane * 16 < BYTES - n * 512)
                cp_async_16_stream(slot + n * 512 + lane * 16, at + n * 512 + lane * 16);
        at += BYTES;
        --left;
    }
    cp_async_commit();
}

// Sums and stores rstd of all tokens; every thread of the block calls it.
DEVICE void find_rstd(const LinearStreamParams& p, float* scratch, float* rstd, int lane) {
    const int shares = THREADS / p.n_columns;
    float sum = 0.0f;
    if (static_cast<int>(threadIdx.x) < shares * p.n_columns)
        for (int i = threadIdx.x; i < p.n_parts * p.n_columns; i += shares * p.n_columns) sum += p.ss[i];
    scratch[threadIdx.x] = sum;
    __syncthreads();
    for (int token = warp_index(); token < p.n_columns; token += WARPS) {
        float total = 0.0f;
        for (int i = lane; i < shares; i += WARP_LANES) total += scratch[token + i * p.n_columns];
        total = warp_sum(total);
        if (lane == 0) rstd[token] = 1.0f / sqrtf(total * p.inverse_hidden + p.epsilon);
    }
    __syncthreads();
}

DEVICE void add_others(const LinearStreamParams& p, Warp& warp, int index) {
    const int tile_end = p.first_step[warp.held_matrix] + (warp.held_tile + 1) * p.k_steps[warp.held_matrix];
#pragma unroll 1
    for (int other = index + 1; static_cast<int>(p.spans[other]) < tile_end; ++other) {
        if (p.spans[other] == p.spans[other + 1]) continue;
        float* from = p.workspace + other * (4 * WARP_LANES) + warp.lane;
        float values[4];
        bool is_missing;
        do {
            is_missing = false;
#pragma unroll
            for (int i = 0; i < 4; ++i) values[i] = load_relaxed(from + i * WARP_LANES);
#pragma unroll
            for (int i = 0; i < 4; ++i) is_missing |= __float_as_uint(values[i]) == EMPTY;
        } while (ballot(is_missing) != 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            warp.held[i] += values[i];
            store_relaxed(from + i * WARP_LANES, __uint_as_float(EMPTY));
        }
    }
}

// What a block has to know before its first sum is finished; every warp of the block calls it once.
DEVICE void start(const LinearStreamParams& p, Warp& warp, float* scratch, float* rstd, int end) {
    grid_dependency_wait();
    grid_dependency_launch();
    if constexpr (EPILOGUE == RESIDUAL) {
        warp.before_tile = (end - 1) / p.k_steps[0];
        warp.before.load(p, warp.before_tile, warp.lane);
    } else {
        if (p.ss != nullptr) find_rstd(p, scratch, rstd, warp.lane);
    }
}

template <int F>
DEVICE void run_format(const LinearStreamParams& p, Warp& warp, Run r, unsigned char* ring, float* scratch, float* rstd,
                       int end) {
    constexpr int GROUPS = Tile<F>::GROUPS, BYTES = Tile<F>::BLOCK_BYTES;
    static_assert(STAGES<F> >= 2, "shared memory");
    const int k_steps = p.k_steps[r.matrix], lane = warp.lane;
    const uint8_t* at = p.tiles[r.matrix] + (static_cast<size_t>(r.tile) * k_steps + r.step) * BYTES;
    int left = r.steps;
#pragma unroll 1
    for (int i = 0; i < STAGES<F>; ++i) request<F>(at, left, ring + i * BYTES, lane);
    start(p, warp, scratch, rstd, end);
    const bool has_token = (lane >> 2) < p.n_columns;
    const uint16_t* x = p.x + (has_token ? (lane >> 2) * p.x_stride : 0) + 8 * (lane & 3);
    Sums sums = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    int from = r.step, slot = 0;
#pragma unroll 1
    while (r.steps > 0) {
        Columns<F> columns;
        columns.load(x + r.step * Tile<F>::STEP, has_token);
        cp_async_wait<STAGES<F> - 1>();
        warp_sync();
        uint32_t words[GROUPS][Tile<F>::WORDS];
        uint2 scales = {0, 0};
        const unsigned char* block = ring + slot;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) tile_words<F>(words[group], block, group, lane);
        if constexpr (F != BF16) scales = tile_scales<F>(block, lane);
        warp_sync();
        request<F>(at, left, ring + slot, lane);
        slot = slot == (STAGES<F> - 1) * BYTES ? 0 : slot + BYTES;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) multiply<F>(words[group], scales, group, columns, sums);
        --r.steps;
        ++r.step;
        if (r.step == k_steps || r.steps == 0) {
            emit(p, warp, r, from, r.step, sums);
            from = 0;
            if (r.step == k_steps) {
                r.step = 0;
                ++r.tile;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_stream(const __grid_constant__ LinearStreamParams p) {
    DYNAMIC_SHARED(unsigned char, shared);
    STATIC_SHARED(float, scratch[THREADS]);
    STATIC_SHARED(float, rstd[TOKENS]);
    unsigned char* ring = shared + warp_index() * RING_BYTES;
    Warp warp;
    warp.lane = static_cast<int>(lane_id());
    const int index = static_cast<int>(blockIdx.x) * WARPS + warp_index();
    const int begin = static_cast<int>(p.spans[index]), end = static_cast<int>(p.spans[index + 1]);
    warp.rstd = rstd;
    warp.place = p.workspace + index * (4 * WARP_LANES) + warp.lane;
    warp.held_steps = 0;
    warp.before_tile = -1;
    // Warps behind the last step have an empty span there; all warps of a block meet in start().
    const Run r = run_at(p, begin, end);
    const int format = p.format[r.matrix];
    if constexpr (FORMATS >> Q4 & 1)
        if (format == Q4) run_format<Q4>(p, warp, r, ring, scratch, rstd, end);
    if constexpr (FORMATS >> Q5 & 1)
        if (format == Q5) run_format<Q5>(p, warp, r, ring, scratch, rstd, end);
    if constexpr (FORMATS >> Q6 & 1)
        if (format == Q6) run_format<Q6>(p, warp, r, ring, scratch, rstd, end);
    if constexpr (FORMATS >> W8 & 1)
        if (format == W8) run_format<W8>(p, warp, r, ring, scratch, rstd, end);
    if constexpr (FORMATS >> BF16 & 1)
        if (format == BF16) run_format<BF16>(p, warp, r, ring, scratch, rstd, end);
    __syncthreads();
    if (warp.held_steps > 0) {
        add_others(p, warp, index);
        finish(p, warp.held_matrix, warp.held_tile, rstd, warp.before, warp.held, warp.lane);
    }
}
