// y[token][row] = rstd[token] sum_k weight[row][k] x[token][k] for up to 48 tokens: weights in "tiles" (tiles.cuh),
// x bf16 [T][x_stride], zero from K to x_stride. Up to MATRICES matrices of the same K in any mix of FORMATS.
// Alignment: tiles 64 bytes, x and its rows 16, outputs 4. Codes and products are exact, sums fp32, scales multiply
// sums of a group (NVFP4: the codes, exactly, and a factor the finished sums). Reference: backends/reference/linear.py;
// tolerance against float64 1e-5 |w||x| and one rounding. Work and hand-over: linear_small.cuh.
//
// Activations go from global memory (L1) straight to registers as operand B, and warps do not meet in the main loop; or
// (SHARED_X) through a ring that the block's warps share. With one tile of tokens the operands keep their bias: sums start
// from -bias * (sum of the group's x), which GROUP_SUMS = 1 computes once per block (and so brings the block's x into L1),
// GROUP_SUMS = 0 with mma; above, subtracting from the codes costs less.
#include "linear_small.cuh"

#ifndef GROUP_SUMS
#define GROUP_SUMS 0
#endif
#ifndef X_AHEAD
#define X_AHEAD 1  // 1: activations of the step (above 8 tokens: group) to come are requested while one is multiplied
#endif
#ifndef SHARED_X
#define SHARED_X 0  // 1: the block's warps share activations: a ring of STAGES steps, one barrier per step
#endif

constexpr int X_SLOT = SHARED_X ? TOKENS * 2 * largest_columns() : 0;
constexpr int X_BYTES = STAGES * X_SLOT;
static_assert(!SHARED_X || (PHASES == 1 && NT > 1), "shared activations");
constexpr bool IN_TURNS = X_AHEAD && !SHARED_X && NT == 1;
constexpr bool ANY_BIAS = (FORMATS & (1 << Q4 | 1 << Q5 | 1 << Q6)) != 0;
constexpr bool WITH_SUMS = GROUP_SUMS && NT == 1 && ANY_BIAS;

// Where a lane reads activations: its token of every tile, and its 16 bytes of 32 columns.
struct Rows {
    const uint8_t* at[NT];

    DEVICE void advance(int n_bytes) {
#pragma unroll
        for (int n = 0; n < NT; ++n) at[n] += n_bytes;
    }
};

// x of 32 columns.
struct Columns {
    uint4 piece[NT];

    DEVICE void load(const Rows& rows, int column) {
#pragma unroll
        for (int n = 0; n < NT; ++n) piece[n] = load_16(rows.at[n] + column * 2);
    }
};

// Copies activations into the block's ring. A token's row of a step are its columns, 16-byte piece c at c ^ 4 for odd
// tokens, so that the eight lanes of a phase (two tokens, four pieces) read all banks; BF16's 64 bytes do so as they are.
struct TokenStream {
    int column;    // of the next step
    int columns;   // of a step
    int left;      // steps until open() is due
    int unit;      // where the next segment begins
    int slot;      // byte of the next step's slot

    DEVICE void open(const LinearSmallParams& p, int begin, int end) {
        columns = 0;  // behind the end of the span
        left = 0x7fffffff;
        if (unit >= end) return;
        const Segment s = segment_at(p, unit, begin, end);
        unit += s.length;
        left = s.length;
        columns = step_columns(p.format[s.matrix]);
        column = s.step * columns;
    }

    DEVICE void request(const LinearSmallParams& p, unsigned char* ring) {
        const int shift = columns == 128 ? 4 : columns == 64 ? 3 : 2;  // pieces of a row
        const int n_pieces = columns == 0 ? 0 : p.n_columns << shift;
#pragma unroll
        for (int i = 0; i < ceil_div(X_SLOT / 16, THREADS); ++i) {
            const int index = static_cast<int>(threadIdx.x) + i * THREADS;
            const int token = index >> shift, piece = index & ((1 << shift) - 1);
            const int at = columns > 32 ? piece ^ (token & 1) * 4 : piece;
            if (index < n_pieces)
                cp_async_16(ring + slot + (token * (1 << shift) + at) * 16,
                            p.x + token * p.x_stride + column + piece * 8);
        }
        column += columns;
        slot = slot == (STAGES - 1) * X_SLOT ? 0 : slot + X_SLOT;
    }
};

// What a warp carries from step to step.
struct Walk {
    WeightStream stream;
    TokenStream tokens;        // SHARED_X
    unsigned char* shared_x;   // its ring
    int x_slot;                // byte of the step's slot there
    unsigned char* ring;       // of this warp
    int slot;                  // byte of the step's slot there; the one before takes the next request
    int token_bytes[NT];       // where this lane's token begins in x, and its 16 bytes of 32 columns
    const float* sums;         // WITH_SUMS: this lane's token, [groups][TOKENS]
};

DEVICE float pair_sum(uint32_t pair) { return bf16_lo(pair) + bf16_hi(pair); }

// Sums of x over the groups that n_units steps from `column` on may touch; behind the last group comes the first.
DEVICE void sum_groups(const LinearSmallParams& p, int column, int n_units, float* sums) {
    constexpr int BATCH = 4;
    int shift = 0;
    while ((1 << shift) < p.n_columns) ++shift;
    const int all = p.k_padded / 64, first = column / 64;
    const int n_groups = minimum(all, ceil_div(n_units * 128, 64) + 1);
    const int n_pieces = (n_groups << shift) * 8, lane = static_cast<int>(lane_id());
#pragma unroll 1
    for (int base = static_cast<int>(threadIdx.x) - lane; base < n_pieces; base += BATCH * THREADS) {
        uint4 pieces[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int piece = base + b * THREADS + lane, token = piece >> 3 & ((1 << shift) - 1);
            const int at = first + (piece >> 3 >> shift), group = at >= all ? at - all : at;
            pieces[b] = uint4{0, 0, 0, 0};
            if (piece < n_pieces && token < p.n_columns)
                pieces[b] = load_16(p.x + token * p.x_stride + group * 64 + (piece & 7) * 8);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int piece = base + b * THREADS + lane, token = piece >> 3 & ((1 << shift) - 1);
            const int at = first + (piece >> 3 >> shift), group = at >= all ? at - all : at;
            float sum = (pair_sum(pieces[b].x) + pair_sum(pieces[b].y)) + (pair_sum(pieces[b].z) + pair_sum(pieces[b].w));
#pragma unroll
            for (int mask = 1; mask < 8; mask <<= 1) sum += shfl_xor(sum, mask);
            if (piece < n_pieces && token < p.n_columns && (piece & 7) == 0) sums[group * TOKENS + token] = sum;
        }
    }
}

// sums += scale * parts of a tile row; parts in the order of a mma's results.
template <int N>
DEVICE void add_scaled(float (&sums)[N], const float (&parts)[4], float scale, float scale8) {
#pragma unroll
    for (int k = 0; k < LANE_TOKENS; ++k) {
        sums[k] += scale * parts[k];
        sums[k + LANE_TOKENS] += scale8 * parts[k + 2];
    }
}

DEVICE void add_parts_of(Sums& sums, const float (&parts)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) add_scaled(sums[m][n], parts[m][n], 1.0f, 1.0f);
}

// One step: sums += (two mma per 32 columns) * scales. Requests the step STAGES - 1 ahead behind its own first reads.
// x: where the step's activations are, or X_AHEAD: those behind `ahead`, which holds the step's (with several tiles of
// tokens its first group's); those `following` bytes on go to `next`. group_sums: the step's first group.
constexpr int AHEAD_PIECES = !X_AHEAD ? 1 : NT == 1 ? 4 : 2;

template <int F>
DEVICE void multiply(const LinearSmallParams& p, Walk& walk, Rows& x, int following, Columns (&ahead)[AHEAD_PIECES],
                     Columns (&next)[AHEAD_PIECES], const float* group_sums, Sums& sums) {
    constexpr int GROUPS = Step<F>::GROUPS, GROUP_PIECES = Step<F>::COLUMNS / 32 / GROUPS;
    constexpr int TOGETHER = NT == 1 ? GROUPS : 1;  // groups that are multiplied in turns: chains of mma
    constexpr int TAKEN = TOGETHER * GROUP_PIECES;
    const int lane = static_cast<int>(lane_id());
    const unsigned char* slot = walk.ring + walk.slot;
    const auto request = [&]() {
        if (SHARED_X) walk.tokens.request(p, walk.shared_x);
        const int freed = (walk.slot == 0 ? STAGES * STAGE_BYTES : walk.slot) - STAGE_BYTES;
        walk.stream.request(walk.ring + freed + lane * 16);
    };
    const unsigned char* shared_row = walk.shared_x + walk.x_slot + (lane >> 2) * Step<F>::COLUMNS * 2 + (lane & 3) * 16;
    const int odd = F == BF16 ? 0 : (lane >> 2 & 1) * 64;
    // Activations of TOGETHER groups; those of the ones behind are requested.
    const auto take = [&](int group, Columns (&taken)[TAKEN]) {
        const bool is_last = group + TOGETHER >= GROUPS;
        if (!SHARED_X && X_AHEAD && is_last) x.advance(following);
#pragma unroll
        for (int i = 0; i < TAKEN; ++i) {
            if (SHARED_X) {
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    taken[i].piece[n] = *reinterpret_cast<const uint4*>(
                        shared_row + n * 8 * Step<F>::COLUMNS * 2 + (group + i / 2) * 128 + (i % 2 * 64 ^ odd));
            } else if (X_AHEAD) {
                taken[i] = ahead[i % AHEAD_PIECES];
                (is_last ? next : ahead)[i % AHEAD_PIECES].load(x, (is_last ? 0 : (group + TOGETHER) * 64) + 32 * i);
            } else {
                taken[i].load(x, group * 64 + 32 * i);
            }
        }
        if (!SHARED_X && !X_AHEAD && is_last) x.advance(following);
    };
    if constexpr (F == BF16) {
        uint4 words[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                words[m][j] = *reinterpret_cast<const uint4*>(slot + m * SLOT + j * 512 + lane * 16);
        request();
        Columns b[TAKEN];
        take(0, b);
        float parts[MT][NT][4] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    const uint4 v = b[0].piece[n];
                    mma_bf16(parts[m][n], {words[m][j].x, words[m][j].y, words[m][j].z, words[m][j].w}, j ? v.z : v.x,
                             j ? v.w : v.y);
                }
        add_parts_of(sums, parts);
    } else {
        constexpr bool BIASED = NT == 1 && tile_bias<F>() != 0;
        constexpr bool ADD_BIAS = BIASED && WITH_SUMS;  // to parts, not as their start
        constexpr int AHEAD = NT <= 2 ? GROUPS : 1;     // groups whose words are read at once: registers
        constexpr int SPLITS = F == W8 ? 2 : 1;         // scales of a group's columns
        constexpr int M_BLOCK = NT == 1 || NT * MT <= 8 ? MT : NT <= 4 && MT % 2 == 0 ? 2 : 1;  // tile rows at a time
        uint32_t words[AHEAD][MT][Tile<F>::WORDS];
        uint2 scales[F == NVFP4 ? 1 : MT];
        uint4 scales4[F == NVFP4 ? MT : 1];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            if constexpr (F == NVFP4)
                scales4[m] = fp4_block_scales(slot + m * SLOT, lane);
            else
                scales[m] = tile_scales<F>(slot + m * SLOT, lane);
#pragma unroll
            for (int group = 0; group < AHEAD; ++group) tile_words<F>(words[group][m], slot + m * SLOT, group, lane);
        }
        request();
#pragma unroll
        for (int first = 0; first < GROUPS; first += TOGETHER) {
            Columns b[TAKEN];
            take(first, b);
            if (first >= AHEAD) {
#pragma unroll
                for (int m = 0; m < MT; ++m) tile_words<F>(words[first % AHEAD][m], slot + m * SLOT, first, lane);
            }
            float biases[TOGETHER][LANE_TOKENS], start[TOGETHER][4] = {};
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if constexpr (ADD_BIAS) {
#pragma unroll
                    for (int k = 0; k < LANE_TOKENS; ++k)
                        biases[i][k] = group_sums[(first + i) * TOKENS + k] * static_cast<float>(-tile_bias<F>());
                } else if constexpr (BIASED) {
                    constexpr uint32_t MINUS = (0xc300u | tile_bias<F>() % 128) * 0x10001u;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint4 v = b[i * 2 + half].piece[0];
                        mma_bf16(start[i], {MINUS, MINUS, MINUS, MINUS}, v.x, v.y);
                        mma_bf16(start[i], {MINUS, MINUS, MINUS, MINUS}, v.z, v.w);
                    }
                }
            }
#pragma unroll
            for (int m0 = 0; m0 < MT; m0 += M_BLOCK) {
                float parts[TOGETHER][SPLITS][M_BLOCK][NT][4];
                uint32_t pairs[TOGETHER][M_BLOCK][2];  // NVFP4: scales of rows g and g + 8
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                    for (int m = 0; m < M_BLOCK; ++m) {
                        if constexpr (F == NVFP4) {
                            const uint4 both = scales4[m0 + m];
                            pairs[i][m][0] = fp4_scales(first + i ? both.y : both.x, lane);
                            pairs[i][m][1] = fp4_scales(first + i ? both.w : both.z, lane);
                        }
#pragma unroll
                        for (int n = 0; n < SPLITS * NT * 4; ++n)
                            parts[i][n / (NT * 4)][m][n / 4 % NT][n % 4] = start[i][n % 4];
                    }
#pragma unroll
                for (int turn = 0; turn < 4; ++turn) {
                    const int j = SPLITS == 2 ? turn % 2 * 2 + turn / 2 : turn;  // the chains of both halves in turns
#pragma unroll
                    for (int i = 0; i < TOGETHER; ++i) {
                        uint32_t a[M_BLOCK][4];
#pragma unroll
                        for (int m = 0; m < M_BLOCK; ++m) {
                            if constexpr (F == NVFP4)
                                fp4_operand(a[m], words[(first + i) % AHEAD][m0 + m], j, pairs[i][m]);
                            else
                                tile_operand<F, !BIASED>(a[m], words[(first + i) % AHEAD][m0 + m], j);
                        }
#pragma unroll
                        for (int n = 0; n < NT; ++n) {
                            const uint4 v = b[i * 2 + j / 2].piece[n];
#pragma unroll
                            for (int m = 0; m < M_BLOCK; ++m)
                                mma_bf16(parts[i][SPLITS == 2 ? j / 2 : 0][m][n], a[m], j % 2 ? v.z : v.x,
                                         j % 2 ? v.w : v.y);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                    for (int m = 0; m < M_BLOCK; ++m)
#pragma unroll
                        for (int split = 0; split < SPLITS; ++split) {
                            float scale = 1.0f, scale8 = 1.0f;
                            if constexpr (F != NVFP4) {
                                const uint2 both = scales[m0 + m];
                                const bool second = SPLITS == 2 ? split == 1 : first + i == 1;
                                scale = second ? half_hi(both.x) : half_lo(both.x);
                                scale8 = second ? half_hi(both.y) : half_lo(both.y);
                            }
#pragma unroll
                            for (int n = 0; n < NT; ++n) {
                                auto& part = parts[i][split][m][n];
                                if constexpr (ADD_BIAS) {
#pragma unroll
                                    for (int k = 0; k < LANE_TOKENS; ++k) {
                                        part[k] += biases[i][k];
                                        part[k + 2] += biases[i][k];
                                    }
                                }
                                add_scaled(sums[m0 + m][n], part, scale, scale8);
                            }
                        }
            }
        }
    }
}

// Where a segment's activations begin.
DEVICE Rows rows_at(const LinearSmallParams& p, const Walk& walk, int column) {
    Rows x = {};
#pragma unroll
    for (int n = 0; n < (SHARED_X ? 0 : NT); ++n)
        x.at[n] = reinterpret_cast<const uint8_t*>(p.x) + static_cast<uint32_t>(walk.token_bytes[n] + column * 2);
    return x;
}

// Requests the activations of the first step of the block's first segment.
DEVICE void load_first(const LinearSmallParams& p, const Segment& s, const Walk& walk, Columns (&ahead)[AHEAD_PIECES]) {
    if (s.steps == 0) return;
    const int columns = step_columns(p.format[s.matrix]);
    const Rows x = rows_at(p, walk, (s.step + s.first) * columns);
#pragma unroll
    for (int i = 0; i < AHEAD_PIECES; ++i)
        if (32 * i < columns) ahead[i].load(x, 32 * i);
}

// Sums of this warp's steps of a segment. ahead: X_AHEAD: of the block's first segment, what load_first has requested.
template <int F>
DEVICE void run(const LinearSmallParams& p, const Segment& s, int begin, int end, bool is_first, Walk& walk,
                Columns (&ahead)[AHEAD_PIECES], Sums& sums) {
    constexpr int COLUMNS = Step<F>::COLUMNS;
    constexpr int FIRST = COLUMNS / 32 < AHEAD_PIECES ? COLUMNS / 32 : AHEAD_PIECES;
    constexpr int FOLLOWING = PHASES * COLUMNS * 2;
    if (s.steps == 0) return;
    const int column = (s.step + s.first) * COLUMNS;
    Rows x = rows_at(p, walk, column);
    const float* group_sums = walk.sums + column / 64 * TOKENS;
    Columns next[AHEAD_PIECES];
    if (X_AHEAD && !SHARED_X && !is_first) {
#pragma unroll
        for (int i = 0; i < FIRST; ++i) ahead[i].load(x, 32 * i);
    }
    int steps = s.steps;
#pragma unroll 1
    while (steps > 0) {
        int n = minimum(steps, walk.stream.left);
        steps -= n;
        walk.stream.left -= n;
        const auto step = [&](Columns(&now)[AHEAD_PIECES], Columns(&then)[AHEAD_PIECES]) {
            --n;
            cp_async_wait<STAGES - 2>();
            if (SHARED_X)
                __syncthreads();
            else
                warp_sync();
            multiply<F>(p, walk, x, !X_AHEAD || n + steps > 0 ? FOLLOWING : 0, now, then, group_sums, sums);
            walk.slot = walk.slot == (STAGES - 1) * STAGE_BYTES ? 0 : walk.slot + STAGE_BYTES;
            if (SHARED_X) {
                walk.x_slot = walk.x_slot == (STAGES - 1) * X_SLOT ? 0 : walk.x_slot + X_SLOT;
                if (--walk.tokens.left == 0) walk.tokens.open(p, begin, end);
            }
            group_sums += PHASES * COLUMNS / 64 * TOKENS;
        };
        if constexpr (IN_TURNS) {  // two sets of registers instead of copies from one to the other
#pragma unroll 1
            do {
                step(ahead, next);
                if (n == 0) {
#pragma unroll
                    for (int i = 0; i < AHEAD_PIECES; ++i) ahead[i] = next[i];
                    break;
                }
                step(next, ahead);
            } while (n > 0);
        } else {
#pragma unroll 1
            do step(ahead, ahead);
            while (n > 0);
        }
        if (walk.stream.left == 0) walk.stream.open(p, begin, end);
    }
}

DEVICE void run_any(const LinearSmallParams& p, const Segment& s, int begin, int end, bool is_first, Walk& walk,
                    Columns (&ahead)[AHEAD_PIECES], Sums& sums) {
    const int format = p.format[s.matrix];
    if constexpr (FORMATS >> Q4 & 1)
        if (format == Q4) run<Q4>(p, s, begin, end, is_first, walk, ahead, sums);
    if constexpr (FORMATS >> Q5 & 1)
        if (format == Q5) run<Q5>(p, s, begin, end, is_first, walk, ahead, sums);
    if constexpr (FORMATS >> Q6 & 1)
        if (format == Q6) run<Q6>(p, s, begin, end, is_first, walk, ahead, sums);
    if constexpr (FORMATS >> W8 & 1)
        if (format == W8) run<W8>(p, s, begin, end, is_first, walk, ahead, sums);
    if constexpr (FORMATS >> BF16 & 1)
        if (format == BF16) run<BF16>(p, s, begin, end, is_first, walk, ahead, sums);
    if constexpr (FORMATS >> NVFP4 & 1)
        if (format == NVFP4) run<NVFP4>(p, s, begin, end, is_first, walk, ahead, sums);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    linear_small(const __grid_constant__ LinearSmallParams p) {
    DYNAMIC_SHARED(unsigned char, shared);  // rings, sums of phases, sums of groups
    STATIC_SHARED(float, scratch[THREADS]);
    static_assert(RING_BYTES + X_BYTES + 4 * PHASE_BUFFERS * PHASE_WORDS <= 101376, "shared memory");
    const int lane = static_cast<int>(lane_id()), g = lane >> 2, t = lane & 3;
    const int lane_begin = span_begin(p, blockIdx.x + lane);
    const int begin = shfl(lane_begin, 0), end = shfl(lane_begin, 1);

    Walk walk;
    walk.ring = in_register(shared + warp_index() * (STAGES * STAGE_BYTES));
    walk.slot = 0;
    walk.stream.unit = begin;
    walk.stream.open(p, begin, end);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
        walk.stream.request(walk.ring + lane * 16 + i * STAGE_BYTES);
        if (--walk.stream.left == 0) walk.stream.open(p, begin, end);
    }
    walk.shared_x = in_register(shared + RING_BYTES);
    float* const phase_words = reinterpret_cast<float*>(shared + RING_BYTES + X_BYTES);
    float* const group_sums = phase_words + PHASE_BUFFERS * PHASE_WORDS;

    Segment s = segment_at(p, begin, begin, end);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int token = minimum(FEW ? g / 2 : n * 8 + g, p.n_columns - 1);
        walk.token_bytes[n] = (token * p.x_stride + t * 8) * 2;
    }

    if (RELEASE_EARLY) grid_dependency_launch();  // the next launch, too, asks for weights while this one waits
    grid_dependency_wait();
    if (!RELEASE_EARLY) grid_dependency_launch();

    Columns ahead[AHEAD_PIECES];
    if (X_AHEAD && !SHARED_X) load_first(p, s, walk, ahead);  // come while the parts of sum x^2 do
    if (WITH_SUMS) sum_groups(p, s.step * step_columns(p.format[s.matrix]), end - begin, group_sums);
    if (EPILOGUE != RESIDUAL && p.ss != nullptr) add_parts(p, scratch);
    if (WITH_SUMS) __syncthreads();
    if (SHARED_X) {
        walk.x_slot = 0;
        walk.tokens.slot = 0;
        walk.tokens.unit = begin;
        walk.tokens.open(p, begin, end);
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) {
            walk.tokens.request(p, walk.shared_x);
            if (--walk.tokens.left == 0) walk.tokens.open(p, begin, end);
        }
        cp_async_commit();
        cp_async_wait<0>();  // the weights came while the kernel ahead ended
    }
    walk.sums = group_sums + (FEW ? t : 2 * t);

    Sums sums;
    clear(sums);
    int unit = begin;
    bool second = false;  // which half of the phases' words
#pragma unroll 1
    while (unit < end) {
        s = segment_at(p, unit, begin, end);
        ResidualInputs in;
        if (EPILOGUE == RESIDUAL && NT == 1 && s.step == 0 && phase_of_warp() == 0) in.load(p, s);
        run_any(p, s, begin, end, unit == begin, walk, ahead, sums);
        if constexpr (PHASES > 1) {
            add_phases(phase_words + (second ? PHASE_WORDS : 0), sums);
            second = PHASE_BUFFERS == 2 && !second;
        } else if (!WITH_SUMS && EPILOGUE != RESIDUAL) {
            if (unit == begin) __syncthreads();  // scratch
        }
        end_segment(p, s, lane_begin, unit - s.step, scratch, in, sums);
        unit += s.length;
        clear(sums);  // of warps without a tile row, too: they have multiplied what lay in their ring
    }
}
