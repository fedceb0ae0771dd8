// What products of up to 48 tokens share: parameters, spans, rings of weights, hand-over of sums, epilogues.
//
// A row block is ROW_WARPS * MT tile rows (16 rows each). PHASES warps share a tile row and take its steps in turn. The
// line of (row block, step) units of all matrices is cut into one span per block of the grid (the host weighs units by
// their bytes). A block that begins inside a row block leaves those sums in the workspace for the block that begins the
// row block: that one has a lower index, does this row block last, and adds the others' sums in the order of indices.
// Words of the workspace are all ones between launches, so a word that is not is the sum: no fence and no counter.
//
// Weights: a ring of STAGES steps per warp in shared memory, which only its warp fills and reads; the first stages are
// requested before the kernel ahead has ended.
#pragma once

#include "tiles.cuh"

#ifndef FORMATS
#define FORMATS 1  // bit f: format f occurs
#endif
#ifndef EPILOGUE
#define EPILOGUE 0
#endif
#ifndef NT
#define NT 1  // tiles of 8 tokens
#endif
#ifndef FEW
#define FEW 0  // 1: at most four tokens; every second column of a mma, one per lane
#endif
#ifndef MT
#define MT 1
#endif
#ifndef PHASES
#define PHASES 1
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef RELEASE_EARLY
#define RELEASE_EARLY 1
#endif

enum Epilogue { STORE, SWIGLU, RESIDUAL };  // as in ops/linear_small.py

constexpr int MATRICES = 4;
constexpr int WARPS = THREADS / WARP_LANES;
constexpr int ROW_WARPS = WARPS / PHASES;
constexpr int ROW_TILES = ROW_WARPS * MT;
constexpr int LANE_TOKENS = FEW ? 1 : 2;    // of a tile of tokens
constexpr int VALUES = 2 * LANE_TOKENS;     // a lane's sums of a tile row and tile of tokens
constexpr int TOKENS = FEW ? 4 : NT * 8;
constexpr uint32_t EMPTY = 0xffffffffu;     // what the workspace holds between launches

static_assert(NT >= 1 && NT <= 6 && MT >= 1 && STAGES >= 2 && (!FEW || NT == 1), "geometry");
static_assert(WARPS % PHASES == 0 && (PHASES & (PHASES - 1)) == 0, "warps of a tile row");

// A step of the ring: a block of tiles.cuh, for BF16 half of one, 32 columns.
template <int F>
struct Step {
    static constexpr int COLUMNS = F == BF16 ? 32 : Tile<F>::STEP;
    static constexpr int GROUPS = F == BF16 ? 1 : Tile<F>::GROUPS;
    static constexpr int BYTES = F == BF16 ? 1024 : Tile<F>::BLOCK_BYTES;
};

__host__ __device__ constexpr int step_bytes(int format) {
    return format == Q4     ? Step<Q4>::BYTES
           : format == Q5   ? Step<Q5>::BYTES
           : format == Q6   ? Step<Q6>::BYTES
           : format == W8   ? Step<W8>::BYTES
           : format == BF16 ? Step<BF16>::BYTES
                            : Step<NVFP4>::BYTES;
}

__host__ __device__ constexpr int step_columns(int format) {
    return format == BF16 ? Step<BF16>::COLUMNS : format == W8 ? Step<W8>::COLUMNS : Step<Q4>::COLUMNS;
}

__host__ __device__ constexpr int largest_step() {
    int bytes = 0;
    for (int format = Q4; format <= NVFP4; ++format)
        if ((FORMATS >> format & 1) && step_bytes(format) > bytes) bytes = step_bytes(format);
    return bytes;
}
constexpr int SLOT = largest_step();

__host__ __device__ constexpr int largest_columns() {
    int columns = 0;
    for (int format = Q4; format <= NVFP4; ++format)
        if ((FORMATS >> format & 1) && step_columns(format) > columns) columns = step_columns(format);
    return columns;
}
constexpr bool ONE_FORMAT = (FORMATS & (FORMATS - 1)) == 0;
constexpr bool WITH_FACTOR = FORMATS >> NVFP4 & 1;
constexpr int STAGE_BYTES = MT * SLOT;
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
// Sums of the warps of later phases; up to 8 tokens twice: a row block's are read while the next one's are written.
constexpr int PHASE_WORDS = ROW_WARPS * (PHASES - 1) * MT * NT * VALUES * WARP_LANES;
constexpr int PHASE_BUFFERS = NT == 1 ? 2 : 1;

struct LinearSmallParams {
    const uint8_t* tiles[MATRICES];
    void* out[MATRICES];  // STORE: bf16 or fp32 [T][out_stride]; SWIGLU: bf16
    const uint16_t* x;
    const float* ss;           // fp32 [n_parts][T], parts of sum x^2; null: rstd = 1
    float* workspace;          // per block ROW_TILES * NT * VALUES * 32; EMPTY between launches
    float* residual;           // RESIDUAL: fp32 [T][n], added to
    uint16_t* normed;          // bf16 [T][normed_stride] = bf16(residual (1 + next_norm)); may be null
    const uint16_t* next_norm;
    float* ss_out;             // fp32 [tile rows][T]
    int format[MATRICES];
    int n_out[MATRICES];       // rows of the result
    int n_tiles[MATRICES];
    int k_steps[MATRICES];
    uint32_t k_steps_inverse[MATRICES];  // 2^32 / k_steps, rounded up
    int first_unit[MATRICES];  // of absent matrices: past the end
    uint32_t unit_weight[MATRICES];
    uint32_t first_weight[MATRICES];  // weight of the units before the matrix
    int out_stride[MATRICES];
    int out_float[MATRICES];   // STORE: nonzero for fp32
    float factor[MATRICES];    // of sums; 1 but for NVFP4
    int n_units;
    uint32_t span_weight;      // of a block; the first span_rest blocks have one more
    uint32_t span_rest;
    int n_columns;
    int x_stride;
    int k_padded;
    int n_parts;
    int normed_stride;
    float inverse_hidden;
    float epsilon;
};

DEVICE int phase_of_warp() { return warp_index() % PHASES; }

// A run of steps of one row block, and this warp's share of it.
struct Segment {
    int matrix;
    int tile;    // first tile row of this warp
    int tiles;   // how many it has: 0..MT
    int step;
    int length;
    int first;   // of its steps, from `step` on; then every PHASES-th
    int steps;   // how many it has
};

// The first unit of a block's span: the nearest to its share of the weight. A span weighs at least the heaviest unit, so
// no span is empty.
DEVICE int span_begin(const LinearSmallParams& p, int block) {
    if (block >= static_cast<int>(gridDim.x)) return p.n_units;
    const uint32_t target = block * p.span_weight + minimum(static_cast<uint32_t>(block), p.span_rest);
    int m = 0;
#pragma unroll
    for (int i = 1; i < MATRICES; ++i)
        if (target >= p.first_weight[i]) m = i;
    const uint32_t weight = p.unit_weight[m];
    return p.first_unit[m] + static_cast<int>((target - p.first_weight[m] + weight / 2) / weight);
}

// begin: of the block's span, whose steps the phases take in turn.
DEVICE Segment segment_at(const LinearSmallParams& p, int unit, int begin, int end) {
    Segment s;
    s.matrix = 0;
#pragma unroll
    for (int m = 1; m < MATRICES; ++m)
        if (unit >= p.first_unit[m]) s.matrix = m;
    const int local = unit - p.first_unit[s.matrix];
    const int k_steps = p.k_steps[s.matrix];
    const uint64_t scaled = static_cast<uint64_t>(static_cast<uint32_t>(local)) * p.k_steps_inverse[s.matrix];
    const int row_block = k_steps == 1 ? local : static_cast<int>(scaled >> 32);
    s.step = local - row_block * k_steps;
    s.length = minimum(k_steps - s.step, end - unit);
    s.tile = row_block * ROW_TILES + warp_index() / PHASES * MT;
    s.tiles = minimum(maximum(p.n_tiles[s.matrix] - s.tile, 0), MT);
    s.first = (phase_of_warp() - (unit - begin)) & (PHASES - 1);
    s.steps = maximum(s.length - s.first + PHASES - 1, 0) / PHASES;
    return s;
}

// The same address, which the compiler cannot compute again where it is used.
DEVICE unsigned char* in_register(unsigned char* shared) {
#ifdef NINFER_EMULATOR
    return shared;
#else
    return static_cast<unsigned char*>(__cvta_shared_to_generic(shfl(shared_address(shared), lane_id())));
#endif
}

// The copying side of a warp's ring; goes through the warp's steps STAGES - 1 ahead.
struct WeightStream {
    const uint8_t* at;  // this lane's first piece of the next step's block
    int left;           // steps until open() is due
    int unit;           // where the next segment begins
    int tiles;          // of this warp; 0 behind the end of the span
    int n_bytes;
    int row_bytes;

    DEVICE void open(const LinearSmallParams& p, int begin, int end) {
        tiles = 0;
        left = 0x7fffffff;
        while (unit < end) {
            const Segment s = segment_at(p, unit, begin, end);
            unit += s.length;
            if (PHASES > 1 && s.steps == 0) continue;
            left = s.steps;
            tiles = s.tiles;
            n_bytes = ONE_FORMAT ? SLOT : step_bytes(p.format[s.matrix]);
            row_bytes = p.k_steps[s.matrix] * n_bytes;
            at = p.tiles[s.matrix] + static_cast<size_t>(s.tile) * row_bytes + (s.step + s.first) * n_bytes +
                 lane_id() * 16;
            return;
        }
    }

    // Requests the next step into a slot, given by this lane's first piece; one group per call.
    DEVICE void request(unsigned char* to) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int n = 0; n < ceil_div(SLOT, 512); ++n) {
                const bool is_inside =
                    n < 2 || static_cast<int>(lane_id()) * 16 + n * 512 < (ONE_FORMAT ? SLOT : n_bytes);
                cp_async_16_if(to + m * SLOT + n * 512, at + m * row_bytes + n * 512, m < tiles && is_inside);
            }
        }
        at += PHASES * (ONE_FORMAT ? SLOT : n_bytes);
        cp_async_commit();
    }
};

// sums[m][n][i]: tile row m, tile of tokens n; i / LANE_TOKENS: row g or g + 8; i % LANE_TOKENS: the lane's token.
using Sums = float[MT][NT][VALUES];

DEVICE void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < NT * VALUES; ++i) sums[m][i / VALUES][i % VALUES] = 0.0f;
}

// The lane's token i of a tile of tokens.
DEVICE int lane_token(int n, int i) {
    const int t = static_cast<int>(lane_id()) & 3;
    return FEW ? t : n * 8 + 2 * t + i;
}

// ---- the rms division

// Adds the parts of sum x^2; scratch: a word per thread. Behind a barrier find_rstd() may be called.
DEVICE void add_parts(const LinearSmallParams& p, float* scratch) {
    int shift = 0;
    while ((1 << shift) < p.n_columns) ++shift;
    const int tid = static_cast<int>(threadIdx.x), token = tid & ((1 << shift) - 1), stride = THREADS >> shift;
    float sum = 0.0f;
    if (token < p.n_columns) {
        const float* from = p.ss + token;
#pragma unroll 1
        for (int i = tid >> shift; i < p.n_parts; i += 4 * stride) {
            float parts[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                parts[j] = 0.0f;
                if (i + j * stride < p.n_parts) parts[j] = from[(i + j * stride) * p.n_columns];
            }
            sum += (parts[0] + parts[1]) + (parts[2] + parts[3]);
        }
    }
#pragma unroll 1
    for (int mask = 1 << shift; mask < WARP_LANES; mask <<= 1) sum += shfl_xor(sum, mask);
    scratch[tid] = sum;
}

DEVICE float find_rstd(const LinearSmallParams& p, const float* scratch, int token) {
    constexpr int STRIDE = TOKENS > 32 ? 64 : 32;
    const int stride = TOKENS > 32 && p.n_columns <= 32 ? 32 : STRIDE;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = token; i < THREADS; i += stride) sum += scratch[i];
    return 1.0f / sqrtf(sum * p.inverse_hidden + p.epsilon);
}

// ---- hand-over of sums

DEVICE float* workspace_of(const LinearSmallParams& p, int block) {
    const int place = block * ROW_WARPS + warp_index() / PHASES;
    return p.workspace + place * (MT * NT * VALUES * WARP_LANES) + lane_id();
}

DEVICE void leave_sums(const LinearSmallParams& p, const Segment& s, const Sums& sums) {
    float* to = workspace_of(p, blockIdx.x);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        if (m >= s.tiles) break;
#pragma unroll
        for (int i = 0; i < NT * VALUES; ++i) {
            const float value = sums[m][i / VALUES][i % VALUES];
            // The one NaN that would look like an empty word becomes another.
            const float stored = value == value ? value : __uint_as_float(0x7fc00000u);
            store_relaxed(to + (m * NT * VALUES + i) * WARP_LANES, stored);
        }
    }
}

// How many blocks behind this one have steps of the row block that ends at `row_end`. lane_begin: span_begin of block
// blockIdx.x + lane.
DEVICE int count_others(const LinearSmallParams& p, int lane_begin, int row_end) {
    int others = __popc(ballot(lane_begin < row_end)) - 1;
    for (int first = blockIdx.x + WARP_LANES; others % WARP_LANES == WARP_LANES - 1; first += WARP_LANES) {
        const uint32_t inside = ballot(span_begin(p, first + static_cast<int>(lane_id())) < row_end);
        if (inside == 0) break;
        others += __popc(inside);
    }
    return others;
}

// Adds what the `others` blocks behind this one have left for the row block, in the order of their indices. Several
// words are on their way together: a round trip takes as long as some steps.
DEVICE void add_sums_left(const LinearSmallParams& p, const Segment& s, int others, Sums& sums) {
    constexpr int WORDS = MT * NT * VALUES;
    constexpr int IN_FLIGHT = THREADS * MIN_BLOCKS > 512 ? 16 : THREADS * MIN_BLOCKS > 256 ? 32 : 64;  // registers
    constexpr int BATCH = WORDS >= IN_FLIGHT ? 1 : IN_FLIGHT / WORDS;
    constexpr int STRIDE = ROW_WARPS * WORDS * WARP_LANES;  // from block to block
    float* from = workspace_of(p, blockIdx.x + 1);
#pragma unroll 1
    for (int first = 0; first < others; first += BATCH) {
        const int found = minimum(BATCH, others - first);
        float values[BATCH][WORDS];
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int i = 0; i < WORDS; ++i) {
                    values[b][i] = 0.0f;
                    if (b < found && i / (NT * VALUES) < s.tiles)
                        values[b][i] = load_relaxed(from + b * STRIDE + i * WARP_LANES);
                }
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int i = 0; i < WORDS; ++i) missing |= __float_as_uint(values[b][i]) == EMPTY;
        } while (ballot(missing) != 0);
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                if (b >= found || i / (NT * VALUES) >= s.tiles) continue;
                sums[i / (NT * VALUES)][i / VALUES % NT][i % VALUES] += values[b][i];
                store_relaxed(from + b * STRIDE + i * WARP_LANES, __uint_as_float(EMPTY));
            }
        from += BATCH * STRIDE;
    }
}

// Sums of the PHASES warps of a tile row, added in their order; every thread of the block calls it, and the first phase's
// warps go on with the result. words: PHASE_WORDS of shared memory.
DEVICE void add_phases(float* words, Sums& sums) {
    constexpr int COUNT = MT * NT * VALUES;
    const int phase = phase_of_warp();
    float* row = words + warp_index() / PHASES * ((PHASES - 1) * COUNT * WARP_LANES) + lane_id();
    if (phase > 0) {
        float* own = row + (phase - 1) * (COUNT * WARP_LANES);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) own[i * WARP_LANES] = sums[i / (NT * VALUES)][i / VALUES % NT][i % VALUES];
    }
    __syncthreads();
    if (phase == 0) {
#pragma unroll
        for (int other = 0; other < PHASES - 1; ++other)
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                sums[i / (NT * VALUES)][i / VALUES % NT][i % VALUES] += row[(other * COUNT + i) * WARP_LANES];
    }
    if (PHASE_BUFFERS == 1) __syncthreads();
}

// ---- epilogues

// What the residual epilogue reads, requested before the steps of its row block.
struct ResidualInputs {
    float x[MT][NT][VALUES];
    uint16_t norm[MT][2];

    DEVICE void load(const LinearSmallParams& p, const Segment& s) {
        const int g = static_cast<int>(lane_id()) >> 2;
        const int n_out = p.n_out[0];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = (s.tile + m) * 16 + half * 8 + g;
                norm[m][half] = 0;
                if (row < n_out && p.normed != nullptr) norm[m][half] = p.next_norm[row];
#pragma unroll
                for (int i = 0; i < NT * LANE_TOKENS; ++i) {
                    const int n = i / LANE_TOKENS, k = i % LANE_TOKENS, token = lane_token(n, k);
                    x[m][n][half * LANE_TOKENS + k] = 0.0f;
                    if (row < n_out && token < p.n_columns)
                        x[m][n][half * LANE_TOKENS + k] = p.residual[token * n_out + row];
                }
            }
        }
    }
};

// x += sums, the next input before its division by the rms, and parts of sum x^2, for finished rows.
DEVICE void finish_residual(const LinearSmallParams& p, const Segment& s, const ResidualInputs& in, const Sums& sums) {
    const int g = static_cast<int>(lane_id()) >> 2;
    const int n_out = p.n_out[0];
    const float factor = WITH_FACTOR ? p.factor[0] : 1.0f;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        if (m >= s.tiles) break;
        const int tile = s.tile + m;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float squares[LANE_TOKENS] = {};
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                const int token = lane_token(n, i % LANE_TOKENS), row = tile * 16 + i / LANE_TOKENS * 8 + g;
                const float x = in.x[m][n][i] + sums[m][n][i] * factor;
                if (row < n_out) squares[i % LANE_TOKENS] += x * x;
                if (token >= p.n_columns || row >= n_out) continue;
                p.residual[token * n_out + row] = x;
                if (p.normed != nullptr)
                    p.normed[token * p.normed_stride + row] =
                        float_to_bf16(x * (1.0f + bf16_to_float(in.norm[m][i / LANE_TOKENS])));
            }
#pragma unroll
            for (int k = 0; k < LANE_TOKENS; ++k) {
#pragma unroll
                for (int mask = 4; mask < WARP_LANES; mask <<= 1) squares[k] += shfl_xor(squares[k], mask);
                const int token = lane_token(n, k);
                if (g == 0 && token < p.n_columns) p.ss_out[tile * p.n_columns + token] = squares[k];
            }
        }
    }
}

DEVICE void store_value(const LinearSmallParams& p, int matrix, int token, int row, float value) {
    const int at = token * p.out_stride[matrix] + row;
    if (EPILOGUE == STORE && p.out_float[matrix]) {
        static_cast<float*>(p.out[matrix])[at] = value;
    } else {
        static_cast<uint16_t*>(p.out[matrix])[at] = float_to_bf16(value);
    }
}

// What the sums of this lane's tokens of a tile are multiplied by; scratch: of add_parts().
struct Scales {
    float of[LANE_TOKENS];

    DEVICE Scales(const LinearSmallParams& p, const float* scratch, int n) {
#pragma unroll
        for (int k = 0; k < LANE_TOKENS; ++k) of[k] = p.ss != nullptr ? find_rstd(p, scratch, lane_token(n, k)) : 1.0f;
    }
};

// Writes the finished rows. first_scales: of the first tile of tokens.
DEVICE void finish(const LinearSmallParams& p, const Segment& s, const float* scratch, const Scales& first_scales,
                   const Sums& sums) {
    const int g = static_cast<int>(lane_id()) >> 2;
    const int n_out = p.n_out[s.matrix];
    const float factor = WITH_FACTOR ? p.factor[s.matrix] : 1.0f;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const Scales scales = n == 0 ? first_scales : Scales(p, scratch, n);
#pragma unroll
        for (int k = 0; k < LANE_TOKENS; ++k) {
            const int token = lane_token(n, k);
            if (token >= p.n_columns) continue;
            const float scale = scales.of[k] * factor;
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                if (m >= s.tiles) break;
                const float first = sums[m][n][k] * scale, second = sums[m][n][k + LANE_TOKENS] * scale;
                if constexpr (EPILOGUE == SWIGLU) {
                    const int row = (s.tile + m) * 8 + g;
                    if (row < n_out) store_value(p, s.matrix, token, row, silu(first) * second);
                } else {
                    const int row = (s.tile + m) * 16 + g;
                    if (row < n_out) store_value(p, s.matrix, token, row, first);
                    if (row + 8 < n_out) store_value(p, s.matrix, token, row + 8, second);
                }
            }
        }
    }
}

// What becomes of a segment's sums. in: loaded where the row block begins in the segment, with one tile of tokens.
DEVICE void end_segment(const LinearSmallParams& p, const Segment& s, int lane_begin, int unit, const float* scratch,
                        ResidualInputs& in, Sums& sums) {
    if (s.tiles == 0 || phase_of_warp() > 0) return;
    if (s.step > 0) {
        leave_sums(p, s, sums);
        return;
    }
    const int others = count_others(p, lane_begin, unit + p.k_steps[s.matrix]);
    if constexpr (EPILOGUE == RESIDUAL) {
        if (NT > 1) in.load(p, s);  // above: registers
        add_sums_left(p, s, others, sums);
        finish_residual(p, s, in, sums);
    } else {
        const Scales first_scales(p, scratch, 0);  // while the others' sums may be on their way
        add_sums_left(p, s, others, sums);
        finish(p, s, scratch, first_scales, sums);
    }
}
