// y[token][row] = rstd[token] sum_k weight[row][k] x[token][k] for up to 48 tokens: weights in "tiles" (tiles.cuh),
// x bf16 [T][x_stride], zero from K to x_stride. Up to MATRICES matrices of the same K in any mix of FORMATS.
// Alignment: tiles 64 bytes, x and its rows 16, outputs 4. Codes and products are exact, sums fp32, scales multiply
// sums of a group (NVFP4: the codes, exactly, and a factor the finished sums). Reference: backends/reference/linear.py; tolerance against float64 1e-5 |w||x| and one rounding.
//
// A row block is WARPS * MT tile rows, MT per warp; all warps walk the same columns. The line of (row block, step) units
// of all matrices is cut into one span per block of the grid (the host weighs units by their bytes). A block that begins
// inside a row block leaves those sums in the workspace for the block that begins the row block: that one has a lower
// index, does this row block last, and adds the others' sums in the order of their indices.
//
// Up to SUMS_TILES tiles of tokens the operands keep their bias: mma starts from -bias * (sum of the group's x), which the
// threads that stage the activations compute; above, subtracting from the codes costs less.
//
// Weights: a ring of STAGES steps per warp in shared memory, which only its warp fills and reads; the first stages are
// requested before the kernel ahead has ended. Activations: X_COLUMNS columns at a time in two buffers that all warps
// share, through registers, one barrier per X_COLUMNS. A token's row there is 64 bytes off a multiple of 128, so that
// the 16-byte reads of a phase (two tokens, four lanes each) touch all banks.
#include "tiles.cuh"

#ifndef FORMATS
#define FORMATS 1  // bit f: format f occurs
#endif
#ifndef NT
#define NT 1  // tiles of 8 tokens
#endif
#ifndef MT
#define MT 1
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef X_COLUMNS
#define X_COLUMNS 0  // 0: activations from global memory (L1) straight to registers
#endif
#ifndef EPILOGUE
#define EPILOGUE 0
#endif

#ifndef RELEASE_EARLY
#define RELEASE_EARLY 1
#endif

enum Epilogue { STORE, SWIGLU, RESIDUAL, MIXED };  // as in ops/linear_small.py; MIXED: STORE or SWIGLU by matrix
enum Kind { BF16_ROWS, FLOAT_ROWS, PAIRS };        // of a matrix's results; PAIRS: gate and up, where MIXED

constexpr int MATRICES = 4;
constexpr int WARPS = THREADS / WARP_LANES;
constexpr int ROW_TILES = WARPS * MT;
constexpr int TOKENS = NT * 8;
constexpr int SUMS_TILES = 2;
constexpr bool DIRECT = X_COLUMNS == 0;
constexpr bool WITH_SUMS = NT <= SUMS_TILES && !DIRECT;
[[maybe_unused]] constexpr int GROUPS_AT_ONCE = NT == 1 ? 2 : 1;  // registers
constexpr uint32_t EMPTY = 0xffffffffu;              // what the workspace holds between launches

// A step of the ring: a block of tiles.cuh, for BF16 half of one, 32 columns.
template <int F>
struct Step {
    static constexpr int COLUMNS = F == BF16 ? 32 : Tile<F>::STEP;
    static constexpr int GROUPS = F == BF16 ? 1 : Tile<F>::GROUPS;
    static constexpr int BYTES = F == BF16 ? 1024 : Tile<F>::BLOCK_BYTES;
};

__host__ __device__ constexpr int minimum_of(int a, int b) { return a < b ? a : b; }

__host__ __device__ constexpr int step_bytes(int format) {
    return format == Q4   ? Step<Q4>::BYTES
           : format == Q5 ? Step<Q5>::BYTES
           : format == Q6 ? Step<Q6>::BYTES
           : format == W8 ? Step<W8>::BYTES
           : format == BF16 ? Step<BF16>::BYTES
                            : Step<NVFP4>::BYTES;
}

__host__ __device__ constexpr int largest_step() {
    int bytes = 0;
    for (int format = Q4; format <= NVFP4; ++format)
        if ((FORMATS >> format & 1) && step_bytes(format) > bytes) bytes = step_bytes(format);
    return bytes;
}
constexpr int SLOT = largest_step();
constexpr bool ONE_FORMAT = (FORMATS & (FORMATS - 1)) == 0;
constexpr bool WITH_FACTOR = FORMATS >> NVFP4 & 1;
constexpr int STAGE_BYTES = MT * SLOT;
constexpr int X_ROW_BYTES = X_COLUMNS * 2 + 64;
constexpr int X_ROW_PIECES = DIRECT ? 1 : X_COLUMNS / 8;
constexpr int X_GROUPS = X_COLUMNS / 64;
constexpr int GROUP_SUMS_BYTES = WITH_SUMS ? NT * 64 : 0;  // float4 per two tokens: their sums, twice
constexpr int X_BYTES = DIRECT ? 0 : TOKENS * X_ROW_BYTES + X_GROUPS * GROUP_SUMS_BYTES;
constexpr int X_PIECES = DIRECT ? 1 : ceil_div(TOKENS * X_ROW_PIECES, THREADS);  // 16-byte pieces of a thread

static_assert(NT >= 1 && NT <= 6 && MT >= 1 && STAGES >= 2 && X_COLUMNS % 128 == 0, "geometry");
static_assert(THREADS % X_ROW_PIECES == 0 || X_ROW_PIECES % THREADS == 0, "rows of activations over threads");
static_assert(2 * X_BYTES + WARPS * STAGES * STAGE_BYTES <= 101376, "shared memory");

struct LinearSmallParams {
    const uint8_t* tiles[MATRICES];
    void* out[MATRICES];  // STORE: bf16 or fp32 [T][out_stride]; SWIGLU: bf16
    const uint16_t* x;
    const float* ss;           // fp32 [n_parts][T], parts of sum x^2; null: rstd = 1
    float* workspace;          // per block WARPS * MT * NT * 4 * 32; EMPTY between launches
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
    int out_kind[MATRICES];    // STORE, MIXED: Kind
    float factor[MATRICES];    // of sums; 1 but for NVFP4
    int held[5];               // of linear_direct.cu
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

// A run of steps of one row block.
struct Segment {
    int matrix;
    int tile;   // first tile row of this warp
    int tiles;  // how many it has: 0..MT
    int step;
    int length;
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

DEVICE Segment segment_at(const LinearSmallParams& p, int unit, int end) {
    Segment s;
    s.matrix = 0;
#pragma unroll
    for (int m = 1; m < MATRICES; ++m)
        if (unit >= p.first_unit[m]) s.matrix = m;
    const int local = unit - p.first_unit[s.matrix];
    const int k_steps = p.k_steps[s.matrix];
    const int row_block = local / k_steps;
    s.step = local - row_block * k_steps;
    s.length = minimum(k_steps - s.step, end - unit);
    s.tile = row_block * ROW_TILES + warp_index() * MT;
    s.tiles = minimum(maximum(p.n_tiles[s.matrix] - s.tile, 0), MT);
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

// The copying side of a warp's ring; goes through the block's span STAGES - 1 steps ahead.
struct WeightStream {
    const uint8_t* at;  // this lane's first piece of the next step's block
    int left;           // steps until open() is due
    int unit;           // where the next segment begins
    int tiles;          // of this warp; 0 behind the end of the span
    int n_bytes;
    int row_bytes;

    DEVICE void open(const LinearSmallParams& p, int end) {
        tiles = 0;
        left = 0x7fffffff;
        if (unit >= end) return;
        const Segment s = segment_at(p, unit, end);
        unit += s.length;
        left = s.length;
        tiles = s.tiles;
        n_bytes = ONE_FORMAT ? SLOT : step_bytes(p.format[s.matrix]);
        row_bytes = p.k_steps[s.matrix] * n_bytes;
        at = p.tiles[s.matrix] + static_cast<size_t>(s.tile) * row_bytes + s.step * n_bytes + lane_id() * 16;
    }

    // Requests the next step into a slot, given by this lane's first piece; one group per call.
    DEVICE void request(unsigned char* to) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            if (m < tiles) {
#pragma unroll
                for (int n = 0; n < ceil_div(SLOT, 512); ++n)
                    if (n < 2 || static_cast<int>(lane_id()) * 16 + n * 512 < (ONE_FORMAT ? SLOT : n_bytes))
                        cp_async_16(to + m * SLOT + n * 512, at + m * row_bytes + n * 512);
            }
        }
        at += ONE_FORMAT ? SLOT : n_bytes;
        cp_async_commit();
    }
};

DEVICE float pair_sum(uint32_t pair) { return bf16_lo(pair) + bf16_hi(pair); }

// One thread's share of X_COLUMNS columns of all tokens, on its way from global to shared memory.
struct Activations {
    uint4 pieces[X_PIECES];

    DEVICE void fetch(const LinearSmallParams& p, int column) {
#pragma unroll
        for (int i = 0; i < X_PIECES; ++i) {
            const int index = static_cast<int>(threadIdx.x) + i * THREADS;
            const int token = index / X_ROW_PIECES, at = column + index % X_ROW_PIECES * 8;
            if (token < p.n_columns && at < p.k_padded) pieces[i] = load_16(p.x + token * p.x_stride + at);
        }
    }

    // minus_bias: of the format that these columns will be multiplied with.
    DEVICE void store(const LinearSmallParams& p, unsigned char* buffer, float minus_bias) const {
#pragma unroll
        for (int i = 0; i < X_PIECES; ++i) {
            const int index = static_cast<int>(threadIdx.x) + i * THREADS;
            const int token = index / X_ROW_PIECES, piece = index % X_ROW_PIECES;
            if (token < p.n_columns)
                *reinterpret_cast<uint4*>(buffer + token * X_ROW_BYTES + piece * 16) = pieces[i];
            if constexpr (WITH_SUMS) {
                if ((index - static_cast<int>(lane_id())) / X_ROW_PIECES >= p.n_columns) continue;  // the whole warp
                float sum = (pair_sum(pieces[i].x) + pair_sum(pieces[i].y)) +
                            (pair_sum(pieces[i].z) + pair_sum(pieces[i].w));
#pragma unroll
                for (int mask = 1; mask < 8; mask <<= 1) sum += shfl_xor(sum, mask);
                if (token < p.n_columns && piece % 8 == 0) {
                    float* to = reinterpret_cast<float*>(buffer + TOKENS * X_ROW_BYTES +
                                                         piece / 8 * GROUP_SUMS_BYTES + token / 2 * 16);
                    to[token % 2] = sum * minus_bias;
                    to[token % 2 + 2] = sum * minus_bias;
                }
            }
        }
    }
};

DEVICE float minus_bias_of(int format) {
    return format == Q4 ? -tile_bias<Q4>() : format == Q5 ? -tile_bias<Q5>() : -tile_bias<Q6>();
}

using Sums = float[MT][NT][4];

DEVICE void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < NT * 4; ++i) sums[m][i / 4][i % 4] = 0.0f;
}

DEVICE void add_scaled(Sums& sums, Sums& parts, const float (&scale)[MT], const float (&scale8)[MT]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            sums[m][n][0] += scale[m] * parts[m][n][0];
            sums[m][n][1] += scale[m] * parts[m][n][1];
            sums[m][n][2] += scale8[m] * parts[m][n][2];
            sums[m][n][3] += scale8[m] * parts[m][n][3];
        }
    }
}

// Where a lane reads a step's activations: its token row and piece in the first tile of tokens, and its two tokens' sums.
// Rows of missing tokens hold anything: they make columns that nobody reads.
struct Columns {
    const unsigned char* row;
    const unsigned char* sums;

    DEVICE uint4 operand(int n, int half) const {
        return *reinterpret_cast<const uint4*>(row + n * 8 * X_ROW_BYTES + half * 64);
    }
};

// The two mma of 32 columns for the n-th tile of tokens.
DEVICE void multiply_half(Sums& sums, const uint32_t (&a)[MT][2][4], int n, const uint4& b) {
#pragma unroll
    for (int m = 0; m < MT; ++m) mma_bf16(sums[m][n], a[m][0], b.x, b.y);
#pragma unroll
    for (int m = 0; m < MT; ++m) mma_bf16(sums[m][n], a[m][1], b.z, b.w);
}

// A lane's weights of an NVFP4 step; tile row m's block is at slot + m * SLOT.
struct Fp4Step {
    static constexpr bool READ_AHEAD = NT <= 2;  // the words of both groups at once: registers

    uint4 blocks[MT];
    uint32_t words[READ_AHEAD ? 2 : 1][MT][Tile<NVFP4>::WORDS];
    uint32_t scales[MT][2];  // of the group in work

    DEVICE void read_words(const unsigned char* slot, int group, int lane) {
#pragma unroll
        for (int m = 0; m < MT; ++m) tile_words<NVFP4>(words[READ_AHEAD ? group : 0][m], slot + m * SLOT, group, lane);
    }

    DEVICE void read(const unsigned char* slot, int lane) {
#pragma unroll
        for (int m = 0; m < MT; ++m) blocks[m] = fp4_block_scales(slot + m * SLOT, lane);
        read_words(slot, 0, lane);
        if constexpr (READ_AHEAD) read_words(slot, 1, lane);
    }

    DEVICE void begin_group(int group, int lane) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            scales[m][0] = fp4_scales(group ? blocks[m].y : blocks[m].x, lane);
            scales[m][1] = fp4_scales(group ? blocks[m].w : blocks[m].z, lane);
        }
    }

    DEVICE void operands(uint32_t (&a)[MT][2][4], int group, int half) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) fp4_operand(a[m][j], words[READ_AHEAD ? group : 0][m], 2 * half + j, scales[m]);
    }
};

// sums += (two mma per 32 columns) * scales for one step; tile row m's block is at slot + m * SLOT. Requests the step
// STAGES - 1 ahead into `freed` behind its own first reads, which would wait for the copies' addresses otherwise.
template <int F>
DEVICE void multiply(const unsigned char* slot, const Columns& x, WeightStream& stream, unsigned char* freed, Sums& sums) {
    constexpr bool BIASED = WITH_SUMS && tile_bias<F>() != 0;
    constexpr int GROUPS = Step<F>::GROUPS;
    constexpr bool READ_AHEAD = GROUPS_AT_ONCE == 2;  // the words of all groups; with one tile of tokens, activations too
    const int lane = static_cast<int>(lane_id());
    if constexpr (F == BF16) {
        uint4 a[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                a[m][j] = *reinterpret_cast<const uint4*>(slot + m * SLOT + j * 512 + lane * 16);
        stream.request(freed);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint4 b = x.operand(n, 0);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma_bf16(sums[m][n], {a[m][0].x, a[m][0].y, a[m][0].z, a[m][0].w}, b.x, b.y);
                mma_bf16(sums[m][n], {a[m][1].x, a[m][1].y, a[m][1].z, a[m][1].w}, b.z, b.w);
            }
        }
    } else if constexpr (F == NVFP4) {
        Fp4Step step;
        step.read(slot, lane);
        stream.request(freed);
#pragma unroll GROUPS_AT_ONCE
        for (int group = 0; group < GROUPS; ++group) {
            if (group > 0 && !Fp4Step::READ_AHEAD) step.read_words(slot, group, lane);
            step.begin_group(group, lane);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t a[MT][2][4];
                step.operands(a, group, half);
#pragma unroll
                for (int n = 0; n < NT; ++n) multiply_half(sums, a, n, x.operand(n, 2 * group + half));
            }
        }
    } else {
        uint2 scales[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) scales[m] = tile_scales<F>(slot + m * SLOT, lane);
        uint32_t all_words[READ_AHEAD ? GROUPS : 1][MT][Tile<F>::WORDS];
        uint4 all_x[NT == 1 ? GROUPS * 2 : 1];
        if constexpr (READ_AHEAD) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
#pragma unroll
                for (int m = 0; m < MT; ++m) tile_words<F>(all_words[group][m], slot + m * SLOT, group, lane);
            if constexpr (NT == 1) {
#pragma unroll
                for (int half = 0; half < GROUPS * 2; ++half) all_x[half] = x.operand(0, half);
            }
            stream.request(freed);
        }
#pragma unroll GROUPS_AT_ONCE
        for (int group = 0; group < GROUPS; ++group) {
            auto& words = all_words[READ_AHEAD ? group : 0];
            if constexpr (!READ_AHEAD) {
#pragma unroll
                for (int m = 0; m < MT; ++m) tile_words<F>(words[m], slot + m * SLOT, group, lane);
                if (group == 0) stream.request(freed);
            }
            Sums parts;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float4 start = {0.0f, 0.0f, 0.0f, 0.0f};
                if constexpr (BIASED)
                    start = *reinterpret_cast<const float4*>(x.sums + group * GROUP_SUMS_BYTES + n * 64);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    parts[m][n][0] = start.x;
                    parts[m][n][1] = start.y;
                    parts[m][n][2] = start.z;
                    parts[m][n][3] = start.w;
                }
            }
            float scale[MT], scale8[MT];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t a[MT][2][4];
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) tile_operand<F, !BIASED>(a[m][j], words[m], 2 * half + j);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 b = NT == 1 && READ_AHEAD ? all_x[2 * group + half] : x.operand(n, 2 * group + half);
#pragma unroll
                    for (int m = 0; m < MT; ++m) mma_bf16(parts[m][n], a[m][0], b.x, b.y);
#pragma unroll
                    for (int m = 0; m < MT; ++m) mma_bf16(parts[m][n], a[m][1], b.z, b.w);
                }
                if (F != W8 && half == 0) continue;
                const bool second = F == W8 ? half == 1 : group == 1;  // of the step's two scales
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    scale[m] = second ? half_hi(scales[m].x) : half_lo(scales[m].x);
                    scale8[m] = second ? half_hi(scales[m].y) : half_lo(scales[m].y);
                }
                add_scaled(sums, parts, scale, scale8);
                if (F == W8 && half == 0) clear(parts);
            }
        }
    }
}

// DIRECT: activations of the unit to come, on their way from global memory: 16-byte pieces of this lane's token rows. A
// unit is a step, with several tiles of tokens a 64-column group: registers.
constexpr int UNIT_PIECES = NT == 1 ? 4 : 2;

struct DirectColumns {
    uint4 pieces[NT][UNIT_PIECES];

    // COUNT pieces, 32 columns each, from a column on.
    template <int COUNT>
    DEVICE void fetch(const uint8_t* const (&rows)[NT], int column) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) pieces[n][i] = load_16(rows[n] + column * 2 + i * 64);
    }

    // The unit at a column; behind the end of a row block, the next one's first, of whichever format.
    template <int COUNT>
    DEVICE void fetch_next(const uint8_t* const (&rows)[NT], int column, int end) {
        if (column < end) {
            fetch<COUNT>(rows, column);
        } else {
            fetch<UNIT_PIECES>(rows, 0);
        }
    }
};

// multiply() with activations in registers: next holds the step's first unit, and in the end the following step's.
template <int F>
DEVICE void multiply_direct(const unsigned char* slot, const uint8_t* const (&rows)[NT], int column, int column_end,
                            DirectColumns& next, WeightStream& stream, unsigned char* freed, Sums& sums) {
    constexpr int UNIT = NT == 1 ? Step<F>::COLUMNS : minimum_of(Step<F>::COLUMNS, 64);  // columns
    const int lane = static_cast<int>(lane_id());
    if constexpr (F == BF16) {
        const DirectColumns x = next;
        next.fetch_next<UNIT / 32>(rows, column + UNIT, column_end);
        uint4 a[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                a[m][j] = *reinterpret_cast<const uint4*>(slot + m * SLOT + j * 512 + lane * 16);
        stream.request(freed);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint4 b = x.pieces[n][0];
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma_bf16(sums[m][n], {a[m][0].x, a[m][0].y, a[m][0].z, a[m][0].w}, b.x, b.y);
                mma_bf16(sums[m][n], {a[m][1].x, a[m][1].y, a[m][1].z, a[m][1].w}, b.z, b.w);
            }
        }
    } else if constexpr (F == NVFP4) {
        Fp4Step step;
        step.read(slot, lane);
        stream.request(freed);
        DirectColumns x;
#pragma unroll
        for (int group = 0; group < Step<F>::GROUPS; ++group) {
            if (NT > 1 || group == 0) {
                x = next;
                next.fetch_next<UNIT / 32>(rows, column + (group + 1) * UNIT, column_end);
            }
            if (group > 0 && !Fp4Step::READ_AHEAD) step.read_words(slot, group, lane);
            step.begin_group(group, lane);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t a[MT][2][4];
                step.operands(a, group, half);
#pragma unroll
                for (int n = 0; n < NT; ++n) multiply_half(sums, a, n, x.pieces[n][(NT == 1 ? 2 * group : 0) + half]);
            }
        }
    } else {
        constexpr int GROUPS = Step<F>::GROUPS;
        constexpr bool BIASED = NT == 1 && tile_bias<F>() != 0;  // the correction: mma with -bias for every element
        constexpr uint32_t MINUS = (0xc300u | tile_bias<F>() % 128) * 0x10001u;
        const uint32_t minus[4] = {MINUS, MINUS, MINUS, MINUS};
        uint2 scales[MT];
        constexpr int AHEAD = NT <= 2 ? GROUPS : 1;  // groups whose words are read at once: registers
        uint32_t words[AHEAD][MT][Tile<F>::WORDS];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            scales[m] = tile_scales<F>(slot + m * SLOT, lane);
#pragma unroll
            for (int group = 0; group < AHEAD; ++group) tile_words<F>(words[group][m], slot + m * SLOT, group, lane);
        }
        stream.request(freed);
        DirectColumns x;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (NT > 1 || group == 0) {
                x = next;
                next.fetch_next<UNIT / 32>(rows, column + (group + 1) * UNIT, column_end);
            }
            const int piece = NT == 1 ? 2 * group : 0;
            auto& group_words = words[group % AHEAD];
            if (group >= AHEAD) {
#pragma unroll
                for (int m = 0; m < MT; ++m) tile_words<F>(group_words[m], slot + m * SLOT, group, lane);
            }
            Sums parts;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float start[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if constexpr (BIASED) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint4 b = x.pieces[n][piece + half];
                        mma_bf16(start, minus, b.x, b.y);
                        mma_bf16(start, minus, b.z, b.w);
                    }
                }
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) parts[m][n][i] = start[i];
            }
            float scale[MT], scale8[MT];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t a[MT][2][4];
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) tile_operand<F, !BIASED>(a[m][j], group_words[m], 2 * half + j);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 b = x.pieces[n][piece + half];
#pragma unroll
                    for (int m = 0; m < MT; ++m) mma_bf16(parts[m][n], a[m][0], b.x, b.y);
#pragma unroll
                    for (int m = 0; m < MT; ++m) mma_bf16(parts[m][n], a[m][1], b.z, b.w);
                }
                if (F != W8 && half == 0) continue;
                const bool second = F == W8 ? half == 1 : group == 1;  // of the step's two scales
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    scale[m] = second ? half_hi(scales[m].x) : half_lo(scales[m].x);
                    scale8[m] = second ? half_hi(scales[m].y) : half_lo(scales[m].y);
                }
                add_scaled(sums, parts, scale, scale8);
                if (F == W8 && half == 0) clear(parts);
            }
        }
    }
}

// What a block carries from segment to segment.
struct Walk {
    WeightStream stream;
    unsigned char* ring;    // this warp's, and this lane's first piece in it
    unsigned char* shared_x;
    int slot;               // byte of the step's slot in the ring
    int buffer;             // byte of the current activations: 0 or X_BYTES
    int row;                // byte of this lane's token row and piece
    const uint8_t* rows[NT];  // DIRECT: this lane's token rows and piece in global memory
    DirectColumns columns;    // DIRECT: of the step to come
};

// run_segment without shared activations: the columns of the step to come are read while this step is multiplied.
template <int F>
DEVICE void run_direct(const LinearSmallParams& p, const Segment& s, int end, Walk& walk, Sums& sums) {
    int column = s.step * Step<F>::COLUMNS;
    int steps = s.length;
    while (steps > 0) {
        const int run = minimum(steps, walk.stream.left);
        steps -= run;
        walk.stream.left -= run;
#pragma unroll 1
        for (int i = 0; i < run; ++i) {
            cp_async_wait<STAGES - 2>();
            warp_sync();
            const int freed = walk.slot == 0 ? (STAGES - 1) * STAGE_BYTES : walk.slot - STAGE_BYTES;
            multiply_direct<F>(walk.ring + walk.slot, walk.rows, column, p.k_padded, walk.columns, walk.stream,
                               walk.ring + lane_id() * 16 + freed, sums);
            walk.slot = walk.slot == (STAGES - 1) * STAGE_BYTES ? 0 : walk.slot + STAGE_BYTES;
            column += Step<F>::COLUMNS;
        }
        if (walk.stream.left == 0) walk.stream.open(p, end);
    }
}

// Sums of a segment of format F; next_format: of the segment behind it, negative when it is the block's last.
template <int F>
DEVICE void run_segment(const LinearSmallParams& p, const Segment& s, int next_format, int end, Walk& walk, Sums& sums) {
    constexpr int CHUNK = X_COLUMNS / Step<F>::COLUMNS;
    int column = s.step * Step<F>::COLUMNS;
    for (int done = 0; done < s.length; done += CHUNK) {
        const bool inside = done + CHUNK < s.length;
        Activations ahead;
        column += X_COLUMNS;
        if (inside || next_format >= 0) ahead.fetch(p, inside ? column : 0);
        Columns x;
        x.row = walk.shared_x + walk.buffer + walk.row;
        x.sums = walk.shared_x + walk.buffer + TOKENS * X_ROW_BYTES + (lane_id() & 3) * 16;
        int steps = minimum(CHUNK, s.length - done);
        while (steps > 0) {
            const int run = minimum(steps, walk.stream.left);
            steps -= run;
            walk.stream.left -= run;
#pragma unroll 1
            for (int i = 0; i < run; ++i) {
                cp_async_wait<STAGES - 2>();
                warp_sync();
                const int freed = walk.slot == 0 ? (STAGES - 1) * STAGE_BYTES : walk.slot - STAGE_BYTES;
                multiply<F>(walk.ring + walk.slot, x, walk.stream, walk.ring + lane_id() * 16 + freed, sums);
                walk.slot = walk.slot == (STAGES - 1) * STAGE_BYTES ? 0 : walk.slot + STAGE_BYTES;
                x.row += Step<F>::COLUMNS * 2;
                x.sums += Step<F>::COLUMNS / 64 * GROUP_SUMS_BYTES;
            }
            if (walk.stream.left == 0) walk.stream.open(p, end);
        }
        walk.buffer ^= X_BYTES;
        if (inside || next_format >= 0) {
            ahead.store(p, walk.shared_x + walk.buffer, minus_bias_of(inside ? F : next_format));
        }
        __syncthreads();
    }
}

template <int F>
DEVICE void run(const LinearSmallParams& p, const Segment& s, int next_format, int end, Walk& walk, Sums& sums) {
    if constexpr (DIRECT) {
        run_direct<F>(p, s, end, walk, sums);
    } else {
        run_segment<F>(p, s, next_format, end, walk, sums);
    }
}

DEVICE float* workspace_of(const LinearSmallParams& p, int block) {
    return p.workspace + (block * WARPS + warp_index()) * (MT * NT * 4 * WARP_LANES) + lane_id();
}

DEVICE void leave_sums(const LinearSmallParams& p, const Segment& s, const Sums& sums) {
    float* to = workspace_of(p, blockIdx.x);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        if (m >= s.tiles) break;
#pragma unroll
        for (int i = 0; i < NT * 4; ++i) {
            const float value = sums[m][i / 4][i % 4];
            // The one NaN that would look like an empty word becomes another.
            const float stored = value == value ? value : __uint_as_float(0x7fc00000u);
            store_relaxed(to + (m * NT * 4 + i) * WARP_LANES, stored);
        }
    }
}

// Adds what the `others` blocks behind this one have left for the row block, in the order of their indices. Several
// blocks' words are on their way together: a round trip takes as long as some steps.
DEVICE void add_sums_left(const LinearSmallParams& p, const Segment& s, int others, Sums& sums) {
    constexpr int WORDS = MT * NT * 4;
    constexpr int BATCH = WORDS >= 16 ? 1 : 16 / WORDS;
    float* from = workspace_of(p, blockIdx.x);
    constexpr int BLOCK_WORDS = WARPS * WORDS * WARP_LANES;
    for (int first = 0; first < others; first += BATCH) {
        const int found = minimum(BATCH, others - first);
        float values[BATCH][WORDS];
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int i = 0; i < WORDS; ++i)
                    if (b < found && i / (NT * 4) < s.tiles) values[b][i] = load_relaxed(from + (first + b + 1) * BLOCK_WORDS + i * WARP_LANES);
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int i = 0; i < WORDS; ++i)
                    missing |= b < found && i / (NT * 4) < s.tiles && __float_as_uint(values[b][i]) == EMPTY;
        } while (ballot(missing) != 0);
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                if (b >= found || i / (NT * 4) >= s.tiles) continue;
                sums[i / (NT * 4)][i / 4 % NT][i % 4] += values[b][i];
                store_relaxed(from + (first + b + 1) * BLOCK_WORDS + i * WARP_LANES, __uint_as_float(EMPTY));
            }
    }
}

// What the residual epilogue reads, requested before the others' sums are waited for.
struct ResidualInputs {
    float x[MT][NT][4];
    uint16_t norm[MT][2];

    DEVICE void load(const LinearSmallParams& p, const Segment& s) {
        const int g = static_cast<int>(lane_id()) >> 2, t = static_cast<int>(lane_id()) & 3;
        const int n_out = p.n_out[0];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = (s.tile + m) * 16 + half * 8 + g;
                norm[m][half] = 0;
                if (row < n_out && p.normed != nullptr) norm[m][half] = p.next_norm[row];
#pragma unroll
                for (int i = 0; i < NT * 2; ++i) {
                    const int token = i / 2 * 8 + 2 * t + i % 2;
                    x[m][i / 2][half * 2 + i % 2] = 0.0f;
                    if (row < n_out && token < p.n_columns)
                        x[m][i / 2][half * 2 + i % 2] = p.residual[token * n_out + row];
                }
            }
        }
    }
};

// x += sums, the next input before its division by the rms, and parts of sum x^2, for finished rows.
DEVICE void finish_residual(const LinearSmallParams& p, const Segment& s, const ResidualInputs& in, const Sums& sums) {
    const int g = static_cast<int>(lane_id()) >> 2, t = static_cast<int>(lane_id()) & 3;
    const int n_out = p.n_out[0];
    const float factor = WITH_FACTOR ? p.factor[0] : 1.0f;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        if (m >= s.tiles) break;
        const int tile = s.tile + m;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float squares[2] = {0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = n * 8 + 2 * t + i % 2, row = tile * 16 + i / 2 * 8 + g;
                const float x = in.x[m][n][i] + sums[m][n][i] * factor;
                if (row < n_out) squares[i % 2] += x * x;
                if (token >= p.n_columns || row >= n_out) continue;
                p.residual[token * n_out + row] = x;
                if (p.normed != nullptr)
                    p.normed[token * p.normed_stride + row] =
                        float_to_bf16(x * (1.0f + bf16_to_float(in.norm[m][i / 2])));
            }
#pragma unroll
            for (int mask = 4; mask < WARP_LANES; mask <<= 1) {
                squares[0] += shfl_xor(squares[0], mask);
                squares[1] += shfl_xor(squares[1], mask);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = n * 8 + 2 * t + i;
                if (g == 0 && token < p.n_columns) p.ss_out[tile * p.n_columns + token] = squares[i];
            }
        }
    }
}

DEVICE void store_value(const LinearSmallParams& p, int matrix, int token, int row, float value) {
    const int at = token * p.out_stride[matrix] + row;
    if ((EPILOGUE == STORE || EPILOGUE == MIXED) && p.out_kind[matrix] == FLOAT_ROWS) {
        static_cast<float*>(p.out[matrix])[at] = value;
    } else {
        static_cast<uint16_t*>(p.out[matrix])[at] = float_to_bf16(value);
    }
}

// Writes the finished rows: sums[m][n][0..1] are row g of tile row m for tokens 8n + 2t + 0..1, [2..3] row g + 8.
DEVICE void finish(const LinearSmallParams& p, const Segment& s, const float* rstd, const Sums& sums) {
    const int g = static_cast<int>(lane_id()) >> 2, t = static_cast<int>(lane_id()) & 3;
    const int n_out = p.n_out[s.matrix];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        if (m >= s.tiles) break;
        const int tile = s.tile + m;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = n * 8 + 2 * t + i;
                if (token >= p.n_columns) continue;
                const float scale = (p.ss != nullptr ? rstd[token] : 1.0f) * (WITH_FACTOR ? p.factor[s.matrix] : 1.0f);
                const float first = sums[m][n][i] * scale, second = sums[m][n][i + 2] * scale;
                if (EPILOGUE == SWIGLU || (EPILOGUE == MIXED && p.out_kind[s.matrix] == PAIRS)) {
                    const int row = tile * 8 + g;
                    if (row < n_out) store_value(p, s.matrix, token, row, silu(first) * second);
                } else {
                    const int row = tile * 16 + g;
                    if (row < n_out) store_value(p, s.matrix, token, row, first);
                    if (row + 8 < n_out) store_value(p, s.matrix, token, row + 8, second);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_small(const __grid_constant__ LinearSmallParams p) {
    DYNAMIC_SHARED(unsigned char, shared);
    STATIC_SHARED(float, scratch[THREADS]);
    STATIC_SHARED(float, rstd[TOKENS]);
    const int lane = static_cast<int>(lane_id()), g = lane >> 2, t = lane & 3;
    const int lane_begin = span_begin(p, blockIdx.x + lane);
    const int begin = shfl(lane_begin, 0), end = shfl(lane_begin, 1);

    Walk walk;
    walk.shared_x = in_register(shared);
    walk.ring = walk.shared_x + 2 * X_BYTES + warp_index() * (STAGES * STAGE_BYTES);
    walk.slot = 0;
    walk.buffer = 0;
    // A single tile's missing tokens read the last one: fewer banks.
    walk.row = (NT == 1 ? minimum(g, p.n_columns - 1) : g) * X_ROW_BYTES + t * 16;
    walk.stream.unit = begin;
    walk.stream.open(p, end);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
        walk.stream.request(walk.ring + lane * 16 + i * STAGE_BYTES);
        if (--walk.stream.left == 0) walk.stream.open(p, end);
    }

    if (RELEASE_EARLY) grid_dependency_launch();  // the next launch, too, asks for weights while this one waits
    grid_dependency_wait();
    if (!RELEASE_EARLY) grid_dependency_launch();

    Segment s = segment_at(p, begin, end);
    const int first_column = s.step * (p.k_padded / p.k_steps[s.matrix]);
    Activations first;
    if constexpr (DIRECT) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int token = minimum(n * 8 + g, p.n_columns - 1);
            walk.rows[n] = reinterpret_cast<const uint8_t*>(p.x + token * p.x_stride + t * 8);
        }
        // The last columns of a row may be fewer than a unit's pieces: then the rest is not used.
        walk.columns.fetch<1>(walk.rows, first_column);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 1; i < UNIT_PIECES; ++i)
                if (first_column + 32 * i < p.k_padded)
                    walk.columns.pieces[n][i] = load_16(walk.rows[n] + first_column * 2 + i * 64);
    } else {
        first.fetch(p, first_column);
    }
    if (p.ss != nullptr) {
        const int adders = THREADS / p.n_columns * p.n_columns;  // each adds parts of one token
        float sum = 0.0f;
        if (static_cast<int>(threadIdx.x) < adders)
            for (int i = threadIdx.x; i < p.n_parts * p.n_columns; i += adders) sum += p.ss[i];
        scratch[threadIdx.x] = sum;
    }
    if constexpr (!DIRECT) first.store(p, shared, minus_bias_of(p.format[s.matrix]));
    __syncthreads();
    if (p.ss != nullptr) {
        for (int token = warp_index(); token < p.n_columns; token += WARPS) {
            const int shares = THREADS / p.n_columns;
            float sum = 0.0f;
            for (int i = lane; i < shares; i += WARP_LANES) sum += scratch[token + i * p.n_columns];
            sum = warp_sum(sum);
            if (lane == 0) rstd[token] = 1.0f / sqrtf(sum * p.inverse_hidden + p.epsilon);
        }
    }

    Sums sums;
    clear(sums);
    int unit = begin;
#pragma unroll 1
    while (unit < end) {
        s = segment_at(p, unit, end);
        unit += s.length;
        const int next_format = unit < end ? p.format[segment_at(p, unit, end).matrix] : -1;
        const int format = p.format[s.matrix];
        if constexpr (FORMATS >> Q4 & 1)
            if (format == Q4) run<Q4>(p, s, next_format, end, walk, sums);
        if constexpr (FORMATS >> Q5 & 1)
            if (format == Q5) run<Q5>(p, s, next_format, end, walk, sums);
        if constexpr (FORMATS >> Q6 & 1)
            if (format == Q6) run<Q6>(p, s, next_format, end, walk, sums);
        if constexpr (FORMATS >> W8 & 1)
            if (format == W8) run<W8>(p, s, next_format, end, walk, sums);
        if constexpr (FORMATS >> BF16 & 1)
            if (format == BF16) run<BF16>(p, s, next_format, end, walk, sums);
        if constexpr (FORMATS >> NVFP4 & 1)
            if (format == NVFP4) run<NVFP4>(p, s, next_format, end, walk, sums);
        if constexpr (DIRECT)
            if (unit - s.length == begin) __syncthreads();  // rstd
        if (s.tiles > 0) {
            if (s.step > 0) {
                leave_sums(p, s, sums);
            } else {
                // Blocks with steps of this row block.
                const int row_end = unit + p.k_steps[s.matrix] - s.length;
                int others = __popc(ballot(lane_begin < row_end)) - 1;
                for (int first = blockIdx.x + WARP_LANES; others % WARP_LANES == WARP_LANES - 1; first += WARP_LANES) {
                    const uint32_t inside = ballot(span_begin(p, first + lane) < row_end);
                    if (inside == 0) break;
                    others += __popc(inside);
                }
                if constexpr (EPILOGUE == RESIDUAL) {
                    ResidualInputs in;
                    in.load(p, s);
                    add_sums_left(p, s, others, sums);
                    finish_residual(p, s, in, sums);
                } else {
                    add_sums_left(p, s, others, sums);
                    finish(p, s, rstd, sums);
                }
            }
        }
        clear(sums);  // of warps without a tile row, too: they have multiplied what lay in their ring
    }
}
