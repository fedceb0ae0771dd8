// Partial results of softmax(q k / 16) v for the columns of a round, keys and values in pages, D = 256: norm and rotation of
// q and k, append of the new tokens, split-KV; one wave of blocks, each with an equal share of the (row, KV head, STAGE_KEYS
// keys) units. attention_combine.cu merges them.
// qk, gv bf16 [T][stride], 16-byte aligned, strides multiples of 8; T = n_rows * row_columns, of which COLUMNS of each row
// are taken. INT8: q as 16-bit integers per
// 64 dims (two s8 products), v as fp16; FP6: fp16 products, exact values of k scaled per 64 dims; BF16: bf16 products. fp32
// accumulation and softmax to base 2. Where `rotates`, q, k and v are times the Walsh-Hadamard matrix.
// Reference backends/reference/attention.py; tolerance 1 % of the largest output, see specs/kernels.md.
#include "common.cuh"
#include "attention.cuh"
#include "attention_round.cuh"

constexpr int TILES = ceil_div(ROWS, 16);
constexpr int WARPS = 8;                        // of a team; teams have their own tiles, and share keys and values
constexpr int TEAMS = THREADS / (WARPS * WARP_LANES);
constexpr int TEAM_TILES = TILES / TEAMS;
constexpr int CHUNKS = KEY_BYTES / 16;  // per key
constexpr int SCALE_BYTES = KV_QUANTIZED ? STAGE_KEYS * GROUPS * 2 : 0;
constexpr int KEY_STRIDE = KEY_BYTES + (KV_FP6 ? 16 : 0);  // of keys in a stage: rows of FP6 lie 20 banks apart
constexpr int SCALES_AT = STAGE_KEYS * KEY_STRIDE;
constexpr int PLANE_BYTES = SCALES_AT + SCALE_BYTES;
constexpr int PARTS = 2;  // halves of the head that different warps multiply
constexpr int KEY_TILES = STAGE_KEYS / 8;
constexpr int WARP_KEY_TILES = KEY_TILES * PARTS / WARPS;
constexpr int ROW_KEYS = STAGE_KEYS / 16;       // of one row that a lane weighs
constexpr int SCORE_STRIDE = STAGE_KEYS + 8;    // floats: rows 8 banks apart
constexpr int WEIGHT_STRIDE = STAGE_KEYS + 8;   // 16-bit words: rows 4 or 20 banks apart
constexpr int QUERY_BYTES = 16 * TILES * 2 * HEAD_DIM;
constexpr int QUERY_SCALE_BYTES = KV_INT8 ? 16 * TILES * 4 : 0;
constexpr int SCORE_BYTES = PARTS * 16 * TILES * SCORE_STRIDE * 4;
// Shared memory: two K planes, two V planes; queries, or scores and weights; new tokens; queries' scales; turns; state.
constexpr int SHARED_SCORES = 4 * PLANE_BYTES;
constexpr int SHARED_WEIGHTS = SHARED_SCORES + SCORE_BYTES;
constexpr int WEIGHT_BYTES = 16 * TILES * WEIGHT_STRIDE * 2;
constexpr int SHARED_NEW =
    SHARED_SCORES + (QUERY_BYTES > SCORE_BYTES + WEIGHT_BYTES ? QUERY_BYTES : SCORE_BYTES + WEIGHT_BYTES);
constexpr int NEW_BYTES = 2 * COLUMNS * (KEY_BYTES + (KV_QUANTIZED ? GROUPS * 2 : 0));
constexpr int SHARED_QUERY_SCALES = SHARED_NEW + NEW_BYTES;
constexpr int SHARED_TURNS = SHARED_QUERY_SCALES + QUERY_SCALE_BYTES;
constexpr int SHARED_STATE = round_up(SHARED_TURNS + COLUMNS * PAIRS * 8, 16);
constexpr int STATE_BYTES = 512;
constexpr float WEIGHT_SHIFT = KV_QUANTIZED ? 14.0f : 0.0f;  // fp16 weights up to 2^14: small ones keep their digits
// As many as registers allow without spills, found with the compiler.
constexpr int UNROLL_V = TEAM_TILES == 3 ? 1 : TEAM_TILES == 2 || RATIO == 6 ? 4 : 2;

static_assert(THREADS == TEAMS * WARPS * WARP_LANES && TILES == TEAMS * TEAM_TILES, "every team has as many tiles");
static_assert(PAGE_TOKENS % STAGE_KEYS == 0, "a stage lies in one page");
static_assert(ROWS <= 48 && WARP_KEY_TILES >= 1, "at most three tiles, eight keys per warp or more");

// Divisions are of unsigned numbers throughout: of signed ones they take three instructions.
DEVICE int team_warp() { return static_cast<int>(threadIdx.x / WARP_LANES % WARPS); }

DEVICE int first_tile() { return static_cast<int>(threadIdx.x / WARP_LANES / WARPS * TEAM_TILES); }

// Where 16 bytes of a key or value lie in a stage.
DEVICE uint32_t k_place(uint32_t key, uint32_t chunk) { return key * KEY_STRIDE + 16 * (KV_FP6 ? chunk : chunk ^ (key & 1) << 2); }

DEVICE uint32_t v_place(uint32_t key, uint32_t chunk) {
    const uint32_t pair = key >> 1 & 3;
    return key * KEY_BYTES + 16 * (KV_FP6 ? chunk ^ pair : KV_INT8 ? chunk ^ pair << 1 : chunk ^ (key & 7));
}

// A unit of work: STAGE_KEYS keys of one KV head of one row.
struct Cursor {
    int row;
    int head;
    int unit;
    int start;
    int n_columns;
    int n_units;

    DEVICE void enter_row(const RowSpan* spans, int index) {
        row = index;
        start = n_columns = n_units = 0;
        if (row < MAX_ROWS) start = spans[row].start, n_columns = spans[row].n_columns, n_units = spans[row].n_units;
    }

    DEVICE void seek(const RowSpan* spans, int index) {
        enter_row(spans, 0);
        while (index >= N_KV_HEADS * n_units) {
            index -= N_KV_HEADS * n_units;
            enter_row(spans, row + 1);
        }
        head = index / n_units;
        unit = index % n_units;
    }

    DEVICE void advance(const RowSpan* spans) {
        if (++unit < n_units) return;
        unit = 0;
        if (++head < N_KV_HEADS) return;
        head = 0;
        do enter_row(spans, row + 1);
        while (n_units == 0 && row < MAX_ROWS);
    }

    DEVICE int first_key() const { return unit * STAGE_KEYS; }
};

struct Source {
    int page_entry;     // of the page table
    int head;
    int token_in_page;
    int n_keys;         // that are in the cache; the others become zeros
};

// What a block keeps in shared memory, behind one address, beside planes and rows.
struct State {
    uint32_t nought;  // 0, which the compiler does not know: what depends on it is not kept in registers
    RowSpan spans[MAX_ROWS];
    Cursor current;     // the segment being worked on: in registers it would be spilled
    Cursor ahead;       // of the unit whose source was found last; thread 0 moves it, to spare registers
    Source sources[4];  // of unit u in u % 4
    alignas(8) uint8_t moves[TEAMS * WARPS];  // per warp: a factor is not 1
    alignas(16) float factors[16 * TILES];
};
static_assert(sizeof(State) + 16 <= STATE_BYTES, "as ops/attention_decode.py has it");

DEVICE Source source_of(const AttentionDecodeParams& p, const Cursor& at) {
    const int first = at.first_key();
    return {at.row * p.pages_per_row + first / PAGE_TOKENS, at.head, first % PAGE_TOKENS, at.start - first};
}

// Chunk `thread + N * THREADS` and those behind it; `to` and `from` are where chunk `thread` lies.
template <int N, int FLIP, bool WHOLE>
DEVICE void request_chunks(uint8_t* row, uint32_t place, const uint8_t* from, int n_keys) {
    constexpr int N_CHUNKS = STAGE_KEYS * CHUNKS, PASS_KEYS = THREADS / CHUNKS;
    if constexpr (N * THREADS < N_CHUNKS) {
        uint8_t* const to = row + (place ^ (N % 2 == 0 ? 0 : FLIP));
        constexpr int AT = N * PASS_KEYS * KEY_BYTES;
        if (WHOLE)
            cp_async_16_at<AT, AT>(to, from);
        else
            cp_async_16_zfill_at<AT, AT>(to, from, N * PASS_KEYS < n_keys);
        request_chunks<N + 1, FLIP, WHOLE>(row, place, from, n_keys);
    }
}

template <bool IS_K>
DEVICE void request_plane(uint8_t* plane, const int* page_table, const uint8_t* codes, const uint16_t* scales,
                          const Source& source, const volatile uint32_t* nought) {
    constexpr uint32_t N_CHUNKS = STAGE_KEYS * CHUNKS;
    const uint32_t thread = threadIdx.x + *nought;
    const int n_keys = source.n_keys;
    const int64_t row =
        static_cast<int64_t>(page_table[source.page_entry] * N_KV_HEADS + source.head) * PAGE_TOKENS + source.token_in_page;
    const uint8_t* const from = codes + row * KEY_BYTES + 16 * thread;
    if constexpr (THREADS % CHUNKS == 0) {
        // A pass of the block is eight keys or more: what is left of a place's dependence on the key is one bit.
        constexpr int FLIP = !IS_K && !KV_QUANTIZED && THREADS / CHUNKS % 8 != 0 ? 64 : 0;
        const uint32_t key = thread / CHUNKS;
        const uint32_t place = IS_K ? k_place(key, thread % CHUNKS) : v_place(key, thread % CHUNKS);
        if (n_keys >= STAGE_KEYS)
            request_chunks<0, FLIP, true>(plane, place, from, n_keys);
        else
            request_chunks<0, FLIP, false>(plane, place, from, n_keys - static_cast<int>(key));
    } else {
#pragma unroll
        for (uint32_t n = 0; n < (N_CHUNKS + THREADS - 1) / THREADS; ++n) {
            const uint32_t index = thread + n * THREADS, key = index / CHUNKS, chunk = index % CHUNKS;
            if (N_CHUNKS % THREADS != 0 && index >= N_CHUNKS) break;
            cp_async_16_zfill(plane + (IS_K ? k_place(key, chunk) : v_place(key, chunk)), from + 16 * n * THREADS,
                              static_cast<int>(key) < n_keys);
        }
    }
    if (KV_QUANTIZED && thread < SCALE_BYTES / 16) {  // 16 bytes: eight keys of a group
        const uint32_t group = thread / (STAGE_KEYS / 8), key = thread % (STAGE_KEYS / 8) * 8;
        const int64_t head_row = row - source.token_in_page;
        cp_async_16_zfill(plane + SCALES_AT + 16 * thread,
                          scales + head_row * GROUPS + (group * PAGE_TOKENS + source.token_in_page + key),
                          static_cast<int>(key) < n_keys);
    }
}

// Turns of the row's columns; text positions: all axes equal.
DEVICE void compute_turns(const AttentionDecodeParams& p, int row, Turn* turns) {
    const int first = p.rows[row].start + p.rows[row].rope_delta + p.first_column;
    for (int index = static_cast<int>(threadIdx.x); index < COLUMNS * PAIRS; index += THREADS)
        turns[index] = turn_of(static_cast<float>(first + index / PAIRS) * p.rope->frequency[index % PAIRS]);
}

// A query row as the products want it: INT8 codes of 16 bits as high and low bytes, each [16 * TILES][HEAD_DIM], and one
// scale; FP6: fp16 words; BF16 words.
DEVICE void store_query(const float (&x)[LANE_DIMS], uint8_t* queries, float* scales, int row) {
    const uint32_t lane = lane_id();
#if KV_INT8
    constexpr float QUERY_STEPS = 127.0f * 256.0f;
    const float largest = magnitude<HEAD_DIM>(x);
    const float inverse = largest == 0.0f ? 0.0f : QUERY_STEPS / largest;
    uint32_t high[2] = {0, 0}, low[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) {
        const int code = float_to_int_rn(x[i] * inverse), rounded = code + 128;  // bytes: code - rounded's, and rounded's
        high[i / 4] |= (static_cast<uint32_t>(rounded) >> 8 & 0xff) << i % 4 * 8;
        low[i / 4] |= (static_cast<uint32_t>(code) & 0xff) << i % 4 * 8;
    }
    uint8_t* const target = queries + row * HEAD_DIM + LANE_DIMS * lane;
    *reinterpret_cast<uint2*>(target) = {high[0], high[1]};
    *reinterpret_cast<uint2*>(target + 16 * TILES * HEAD_DIM) = {low[0], low[1]};
    if (lane == 0) scales[row] = largest * (SCORE_SCALE / QUERY_STEPS);
#elif KV_FP6
    *reinterpret_cast<uint4*>(queries + 2 * (row * HEAD_DIM + LANE_DIMS * lane)) = {
        pack_half(x[0], x[1]), pack_half(x[2], x[3]), pack_half(x[4], x[5]), pack_half(x[6], x[7])};
#else
    *reinterpret_cast<uint4*>(queries + 2 * (row * HEAD_DIM + LANE_DIMS * lane)) = encode_bf16(x);
#endif
}

// A new token's key or value through the codec: into its page, and into `fresh` for the stage that it belongs to.
DEVICE void store_new(const AttentionDecodeParams& p, const float (&x)[LANE_DIMS], const Cursor& at, int column,
                      bool is_k, uint8_t* fresh) {
    const uint32_t lane = lane_id();
    const int token = at.start + column, index = (is_k ? 0 : COLUMNS) + column;
    const int64_t row = kv_row(p.page_table[at.row * p.pages_per_row + token / PAGE_TOKENS], N_KV_HEADS, at.head,
                               token % PAGE_TOKENS);
    uint8_t* const copy = fresh + index * KEY_BYTES;
    const uint16_t scale = is_k ? store_codes<true>(x, p.k + row * KEY_BYTES, copy)
                                : store_codes<false>(x, p.v + row * KEY_BYTES, copy);
    if (KV_QUANTIZED && lane % (SCALE_GROUP / LANE_DIMS) == 0) {
        const int group = lane / (SCALE_GROUP / LANE_DIMS);
        reinterpret_cast<uint16_t*>(fresh + 2 * COLUMNS * KEY_BYTES)[index * GROUPS + group] = scale;
        (is_k ? p.k_scales : p.v_scales)[scale_index(row, token % PAGE_TOKENS, group)] = scale;
    }
}

// What a segment takes from the projections, a warp per head: the group's query rows, and the keys and values of the
// columns first_new .. end_new - 1. Rows of columns that are not evaluated hold anything: nothing reads their results.
DEVICE void take_projections(const AttentionDecodeParams& p, const Cursor& at, const Turn* turns, int first_new, int end_new,
                             uint8_t* queries, float* scales, uint8_t* fresh) {
    const int lane = lane_id();
    const int n_queries = RATIO * at.n_columns, n_new = maximum(0, end_new - first_new), n_tasks = n_queries + 2 * n_new;
    const uint4 q_weight = load_16(p.q_norm + LANE_DIMS * lane), k_weight = load_16(p.k_norm + LANE_DIMS * lane);
    const auto column_of = [&](int task) {
        return task < n_queries ? task / RATIO : first_new + (task - n_queries) % n_new;
    };
    const auto load = [&](int task) -> uint4 {
        if (task >= n_tasks) return {0, 0, 0, 0};
        const int64_t column = at.row * p.row_columns + p.first_column + column_of(task);
        const int head = task < n_queries ? at.head * RATIO + task % RATIO : N_HEADS + at.head;
        const uint16_t* const from = task < n_queries + n_new ? p.qk + column * p.qk_stride : p.gv + column * p.gv_stride;
        return load_16(from + head * HEAD_DIM + LANE_DIMS * lane);
    };
    uint4 words = load(warp_index());
#pragma unroll 1
    for (int task = warp_index(); task < n_tasks; task += TEAMS * WARPS) {
        const uint4 following = load(task + TEAMS * WARPS);
        const int column = column_of(task);
        const bool is_q = task < n_queries, is_v = task >= n_queries + n_new;
        float x[LANE_DIMS];
        decode_bf16(x, words);
        if (!is_v) {
            normalize_head(x, is_q ? q_weight : k_weight, p.eps);
            rotate_head(x, turns + column * PAIRS);
        }
        if (p.rotates) hadamard(x);
        if (is_q)
            store_query(x, queries, scales, task);
        else
            store_new(p, x, at, column, !is_v, fresh);
        words = following;
    }
}

// The new tokens that lie in the stage whose first key is `first_key`, from `fresh`.
template <bool IS_K>
DEVICE void insert_new(const uint8_t* fresh, uint8_t* plane, int first_key, int start, int n_columns) {
    const int shift = first_key - start;  // stage key j is column j + shift
    const int first = maximum(0, -shift), n_new = minimum(n_columns - shift, STAGE_KEYS) - first;
    const uint8_t* const codes = fresh + (IS_K ? 0 : COLUMNS) * KEY_BYTES;
    for (int i = static_cast<int>(threadIdx.x); i < n_new * CHUNKS; i += THREADS) {
        const int key = first + i / CHUNKS, chunk = i % CHUNKS;
        uint8_t* const to = plane + (IS_K ? k_place(key, chunk) : v_place(key, chunk));
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(codes + (key + shift) * KEY_BYTES + 16 * chunk);
    }
#if KV_QUANTIZED
    // From the first new key on: scales next to the last cached one may have come along with anything in them.
    const uint16_t* const scales =
        reinterpret_cast<const uint16_t*>(fresh + 2 * COLUMNS * KEY_BYTES) + (IS_K ? 0 : COLUMNS) * GROUPS;
    for (int i = static_cast<int>(threadIdx.x); i < STAGE_KEYS * GROUPS; i += THREADS) {
        const int group = i / STAGE_KEYS, key = i % STAGE_KEYS;
        if (key < first) continue;
        reinterpret_cast<uint16_t*>(plane + SCALES_AT)[i] =
            key < first + n_new ? scales[(key + shift) * GROUPS + group] : static_cast<uint16_t>(0);
    }
#endif
}

// The A fragments of one tile and one half of the head. A lane takes 16 bytes of a row at a time, and of the keys
// likewise: which column of the product a byte becomes does not matter as long as both sides agree.
struct Query {
#if KV_INT8
    static constexpr int STEPS = GROUPS / PARTS;
    uint32_t low[STEPS][2][4];
    uint32_t word[STEPS][2][4];
#elif KV_FP6
    static constexpr int STEPS = GROUPS / PARTS;
    uint32_t word[2 * STEPS][2][4];
#else
    static constexpr int STEPS = HEAD_DIM / PARTS / 32;
    uint32_t word[STEPS][2][4];
#endif

    // nought: makes new numbers of the words, so that they stand in the order of an operand and are not moved at each use.
    DEVICE static void load_pair(uint32_t (&word)[2][4], const uint8_t* row, int stride, uint32_t nought) {
        const uint4 a = *reinterpret_cast<const uint4*>(row), b = *reinterpret_cast<const uint4*>(row + 8 * stride);
        word[0][0] = a.x ^ nought, word[0][1] = b.x ^ nought, word[0][2] = a.y ^ nought, word[0][3] = b.y ^ nought;
        word[1][0] = a.z ^ nought, word[1][1] = b.z ^ nought, word[1][2] = a.w ^ nought, word[1][3] = b.w ^ nought;
    }

    DEVICE void load(const uint8_t* queries, int tile, int part, uint32_t nought) {
        const int g = lane_id() / 4, t = lane_id() % 4, row = 16 * tile + g;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int index = part * STEPS + step;
#if KV_INT8
            const uint8_t* const at = queries + row * HEAD_DIM + index * SCALE_GROUP + 16 * t;
            load_pair(word[step], at, HEAD_DIM, nought);
            load_pair(low[step], at + 16 * TILES * HEAD_DIM, HEAD_DIM, nought);
#elif KV_FP6
            const uint8_t* const at = queries + 2 * (row * HEAD_DIM + index * SCALE_GROUP + 16 * t);
            load_pair(word[2 * step], at, 2 * HEAD_DIM, nought);
            load_pair(word[2 * step + 1], at + 16, 2 * HEAD_DIM, nought);
#else
            load_pair(word[step], queries + 2 * row * HEAD_DIM + 64 * index + 16 * t, 2 * HEAD_DIM, nought);
#endif
        }
    }
};

// Scores over half of the head, to be scaled per row: rows g, g + 8 of each tile, keys 2t, 2t + 1 of the eight from `first` on.
DEVICE void score(float (&s)[TEAM_TILES][4], const Query (&query)[TEAM_TILES], const uint8_t* plane, int first, int part) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const uint8_t* const row = plane + (first + g) * KEY_STRIDE + part * (KEY_BYTES / PARTS) + (KV_FP6 ? 12 : 16) * t;
#pragma unroll
    for (int tile = 0; tile < TEAM_TILES; ++tile) s[tile][0] = s[tile][1] = s[tile][2] = s[tile][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < Query::STEPS; ++step) {
#if KV_QUANTIZED
        const uint32_t scales = *reinterpret_cast<const uint32_t*>(
            plane + SCALES_AT + 2 * ((part * Query::STEPS + step) * STAGE_KEYS + first + 2 * t));
        const float k_scale[2] = {half_lo(scales), half_hi(scales)};
#endif
#if KV_FP6
        uint32_t packed[3], k[8];
#pragma unroll
        for (int i = 0; i < 3; ++i) packed[i] = *reinterpret_cast<const uint32_t*>(row + 48 * step + 4 * i);
        unpack_fp6_key(packed, k);
#pragma unroll
        for (int tile = 0; tile < TEAM_TILES; ++tile) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 4; ++i) mma_f16(sum, query[tile].word[2 * step + i / 2][i % 2], k[2 * i], k[2 * i + 1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[tile][i] = fmaf(sum[i], k_scale[i % 2], s[tile][i]);
        }
#elif KV_INT8
        const uint4 k = *reinterpret_cast<const uint4*>(row + (64 * step ^ 64 * (g & 1)));  // k_place
#pragma unroll
        for (int tile = 0; tile < TEAM_TILES; ++tile) {
            int high[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0};
            mma_s8(high, query[tile].word[step][0], k.x, k.y);
            mma_s8(low, query[tile].low[step][0], k.x, k.y);
            mma_s8(high, query[tile].word[step][1], k.z, k.w);
            mma_s8(low, query[tile].low[step][1], k.z, k.w);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                s[tile][i] = fmaf(static_cast<float>(256 * high[i] + low[i]), k_scale[i % 2], s[tile][i]);
        }
#else
        const uint4 k = *reinterpret_cast<const uint4*>(row + (64 * step ^ 64 * (g & 1)));  // k_place
#pragma unroll
        for (int tile = 0; tile < TEAM_TILES; ++tile) {
            mma_bf16(s[tile], query[tile].word[step][0], k.x, k.y);
            mma_bf16(s[tile], query[tile].word[step][1], k.z, k.w);
        }
#endif
    }
}

// The warp's keys of a stage: scores over its half of the head into scores[part][row][key].
DEVICE void score_unit(float* scores, const Query (&query)[TEAM_TILES], const uint8_t* plane) {
    const int g = lane_id() / 4, t = lane_id() % 4, part = team_warp() % PARTS;
#pragma unroll
    for (int n = 0; n < WARP_KEY_TILES; ++n) {
        const int first = 8 * (WARP_KEY_TILES * (team_warp() / PARTS) + n);
        float s[TEAM_TILES][4];
        score(s, query, plane, first, part);
#pragma unroll
        for (int tile = 0; tile < TEAM_TILES; ++tile) {
            float* const target = scores + (16 * (TILES * part + first_tile() + tile) + g) * SCORE_STRIDE + first + 2 * t;
            *reinterpret_cast<float2*>(target) = {s[tile][0], s[tile][1]};
            *reinterpret_cast<float2*>(target + 8 * SCORE_STRIDE) = {s[tile][2], s[tile][3]};
        }
    }
}

// The running softmax of the rows that a warp weighs: of its team's 2 (warp + 8 n) + lane / 16, sixteen lanes to a row.
struct Softmax {
    float largest[TEAM_TILES];  // score so far
    float sum[TEAM_TILES];      // this lane's part of the weights
    float scale[TEAM_TILES];    // of the scores, to base 2

    DEVICE static int row_of(int n) {
        return 16 * first_tile() + 2 * (team_warp() + WARPS * n) + static_cast<int>(lane_id() / 16);
    }

    // Scores into 16-bit weights; factors[row] of the state is what earlier results shrink by.
    DEVICE void weigh(const float* scores, uint16_t* weights, State& state, int first_key, int start, int lowest) {
        const int lane = static_cast<int>(lane_id() % 16);
        const int n_rows = RATIO * state.current.n_columns;  // the others hold anything
        bool moves = false;
#pragma unroll
        for (int n = 0; n < TEAM_TILES; ++n) {
            const int row = row_of(n);
            const float* const at = scores + row * SCORE_STRIDE + ROW_KEYS * lane;
            float s[ROW_KEYS], now = largest[n];
#pragma unroll
            for (int i = 0; i < ROW_KEYS; ++i) s[i] = (at[i] + at[i + 16 * TILES * SCORE_STRIDE]) * scale[n];
            if (first_key + STAGE_KEYS > start || first_key < lowest) {  // some row may not see them all
                const int key = first_key + ROW_KEYS * lane, last = start + row / RATIO;
#pragma unroll
                for (int i = 0; i < ROW_KEYS; ++i)
                    if (key + i > last || key + i < lowest) s[i] = MASKED;
            }
#pragma unroll
            for (int i = 0; i < ROW_KEYS; ++i) now = fmaxf(now, s[i]);
#pragma unroll
            for (int mask = 8; mask > 0; mask >>= 1) now = fmaxf(now, shfl_xor(now, mask));
            const float factor = exp2_approx(largest[n] - now);
            largest[n] = now;
            sum[n] *= factor;
            if (lane == 0) state.factors[row] = factor;
            moves = moves || (row < n_rows && factor != 1.0f);
#pragma unroll
            for (int i = 0; i < ROW_KEYS; ++i) {
                s[i] = exp2_approx(s[i] - now + WEIGHT_SHIFT);
                sum[n] += s[i];
            }
            uint32_t* const target = reinterpret_cast<uint32_t*>(weights + row * WEIGHT_STRIDE) + ROW_KEYS / 2 * lane;
#pragma unroll
            for (int i = 0; i < ROW_KEYS / 2; ++i)
                target[i] = KV_QUANTIZED ? pack_half(s[2 * i], s[2 * i + 1]) : pack_bf16(s[2 * i], s[2 * i + 1]);
        }
        const bool any = ballot(moves) != 0;
        if (lane_id() == 0) state.moves[threadIdx.x / WARP_LANES] = any ? 1 : 0;
    }

    DEVICE void store(float* stats) {
#pragma unroll
        for (int n = 0; n < TEAM_TILES; ++n) {
            float whole = sum[n];
#pragma unroll
            for (int mask = 8; mask > 0; mask >>= 1) whole += shfl_xor(whole, mask);
            if (lane_id() % 16 == 0 && row_of(n) < ROWS)
                store_8(stats + 2 * row_of(n), {__float_as_uint(largest[n]), __float_as_uint(whole)});
        }
    }
};

// acc = acc * factors + weights[16 * TILES][STAGE_KEYS] v[STAGE_KEYS][the warp's 32 dims]. INT8: output column n of tile j is
// dim 4n + j; BF16: dim 8j + n.
DEVICE void accumulate(float (&acc)[TEAM_TILES][4][4], const uint16_t* weights, const State& state, const uint8_t* plane) {
    const int warp = team_warp(), g = lane_id() / 4, t = lane_id() % 4;
    const uint2 moves = *reinterpret_cast<const uint2*>(state.moves + threadIdx.x / WARP_LANES / WARPS * WARPS);
    if ((moves.x | moves.y) != 0) {
#pragma unroll
        for (int tile = 0; tile < TEAM_TILES; ++tile) {
            const float* const factors = state.factors + 16 * (first_tile() + tile) + g;
            const float low = factors[0], high = factors[8];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                acc[tile][j][0] *= low, acc[tile][j][1] *= low;
                acc[tile][j][2] *= high, acc[tile][j][3] *= high;
            }
        }
    }
    const uint16_t* const rows =
        weights + (16 * first_tile() + lane_id() % 16) * WEIGHT_STRIDE + lane_id() / 16 * 8;  // of ldmatrix
#pragma unroll UNROLL_V
    for (int step = 0; step < STAGE_KEYS / 16; ++step) {
        uint32_t b[4][2];
#if KV_QUANTIZED
        const uint8_t* const scales_at = plane + SCALES_AT + 2 * (warp / 2 * STAGE_KEYS + 16 * step + 2 * t);
        const uint32_t scales[2] = {*reinterpret_cast<const uint32_t*>(scales_at),
                                    *reinterpret_cast<const uint32_t*>(scales_at + 16)};
#endif
#if KV_FP6
        // Column g of products j is dim 8 (g / 2) + 2 j + g % 2 of the warp's 32; v_place.
        const uint8_t* const at = plane + (16 * step + 2 * t) * KEY_BYTES;
        const uint8_t* const upper_at = at + 16 * (3 * (warp / 2) + warp % 2 ^ t) + 2 * g;
        const uint8_t* const mantissa_at = at + 16 * (3 * (warp / 2) + 2 ^ t) + 8 * (warp % 2) + g;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t upper[2], mantissa[2];
#pragma unroll
            for (int key = 0; key < 2; ++key) {
                upper[key] = *reinterpret_cast<const uint16_t*>(upper_at + (8 * i + key) * KEY_BYTES);
                mantissa[key] = mantissa_at[(8 * i + key) * KEY_BYTES];
            }
            const uint32_t uppers = upper[0] | upper[1] << 16, mantissas = mantissa[0] | mantissa[1] << 16;
#pragma unroll
            for (int j = 0; j < 4; ++j) b[j][i] = scaled_fp6(fp6_pair(uppers, mantissas, j), scales[i]);
        }
#elif KV_INT8
        uint32_t codes[4];
        const uint8_t* const at = plane + (16 * step + 2 * t) * KEY_BYTES + 16 * (2 * warp + g / 4 ^ 2 * t) + 4 * (g % 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = *reinterpret_cast<const uint32_t*>(at + (i / 2 * 8 + i % 2) * KEY_BYTES);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t factor = scales[i];
            const uint32_t low = prmt(codes[2 * i], codes[2 * i + 1], 0x5140);   // two keys of dims 0, 1
            const uint32_t high = prmt(codes[2 * i], codes[2 * i + 1], 0x7362);  // of dims 2, 3
            b[0][i] = mul_f16x2(half_codes(low, 0x4140), factor);
            b[1][i] = mul_f16x2(half_codes(low, 0x4342), factor);
            b[2][i] = mul_f16x2(half_codes(high, 0x4140), factor);
            b[3][i] = mul_f16x2(half_codes(high, 0x4342), factor);
        }
#else
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int matrix = lane_id() / 8, key = 16 * step + lane_id() % 16;
            uint32_t r[4];
            ldmatrix_x4_trans(r, plane + v_place(key, 4 * warp + 2 * half + matrix / 2));
            b[2 * half][0] = r[0], b[2 * half][1] = r[1], b[2 * half + 1][0] = r[2], b[2 * half + 1][1] = r[3];
        }
#endif
#pragma unroll
        for (int tile = 0; tile < TEAM_TILES; ++tile) {
            uint32_t a[4];
            ldmatrix_x4(a, rows + 16 * tile * WEIGHT_STRIDE + 16 * step);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#if KV_QUANTIZED
                mma_f16(acc[tile][j], a, b[j][0], b[j][1]);
#else
                mma_bf16(acc[tile][j], a, b[j][0], b[j][1]);
#endif
            }
        }
    }
}

DEVICE void store_partial(const float (&acc)[TEAM_TILES][4][4], float* partial) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int tile = 0; tile < TEAM_TILES; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * (first_tile() + tile) + 8 * half + g;
            if (row >= ROWS) continue;
            float* const target = partial + row * HEAD_DIM + 32 * team_warp();
            const float(&a)[4][4] = acc[tile];
            const int i = 2 * half;
#if KV_INT8
            store_16(target + 8 * t, {__float_as_uint(a[0][i]), __float_as_uint(a[1][i]), __float_as_uint(a[2][i]),
                                      __float_as_uint(a[3][i])});
            store_16(target + 8 * t + 4, {__float_as_uint(a[0][i + 1]), __float_as_uint(a[1][i + 1]),
                                          __float_as_uint(a[2][i + 1]), __float_as_uint(a[3][i + 1])});
#elif KV_FP6
#pragma unroll
            for (int j = 0; j < 4; ++j)
                store_8(target + 8 * t + 2 * j, {__float_as_uint(a[j][i]), __float_as_uint(a[j][i + 1])});
#else
#pragma unroll
            for (int j = 0; j < 4; ++j)
                store_8(target + 8 * j + 2 * t, {__float_as_uint(a[j][i]), __float_as_uint(a[j][i + 1])});
#endif
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_decode(const __grid_constant__ AttentionDecodeParams p) {
    DYNAMIC_SHARED(uint8_t, shared);
    State& state = *reinterpret_cast<State*>(shared + SHARED_STATE);
    const volatile uint32_t* const unknown = &state.nought;
    uint8_t* const k_planes = shared;
    uint8_t* const v_planes = shared + 2 * PLANE_BYTES;
    uint8_t* const queries = shared + SHARED_SCORES;
    float* const scores = reinterpret_cast<float*>(queries);
    uint16_t* const weights = reinterpret_cast<uint16_t*>(shared + SHARED_WEIGHTS);
    uint8_t* const fresh = shared + SHARED_NEW;
    float* const query_scales = reinterpret_cast<float*>(shared + SHARED_QUERY_SCALES);
    Turn* const turns = reinterpret_cast<Turn*>(shared + SHARED_TURNS);

    const int block = static_cast<int>(blockIdx.x);
    if (threadIdx.x == 0) state.nought = 0;
    load_spans(p, state.spans);
    const int total = count_units(state.spans, p.n_rows), n_parts = minimum(p.n_parts, total);
    if (block >= n_parts) {
        grid_dependency_wait();
        return;
    }
    const int n_units = part_begin(block + 1, n_parts, total) - part_begin(block, n_parts, total);

    // Old tokens' pages do not depend on the launch before this one: request the first units ahead of the wait.
    {
        Cursor next;
        next.seek(state.spans, part_begin(block, n_parts, total));
        if (threadIdx.x == 0) state.current = next;
        const int first_row = next.row;
        Source source = source_of(p, next);
        request_plane<true>(k_planes, p.page_table, p.k, p.k_scales, source, &state.nought);
        cp_async_commit();
        request_plane<false>(v_planes, p.page_table, p.v, p.v_scales, source, &state.nought);
        if (TEAM_TILES > 1) cp_async_commit();
        if (n_units > 1) {
            next.advance(state.spans);
            source = source_of(p, next);
            request_plane<true>(k_planes + PLANE_BYTES, p.page_table, p.k, p.k_scales, source, &state.nought);
        }
        cp_async_commit();
        if (threadIdx.x == 0) state.ahead = next, state.sources[1] = source;
        compute_turns(p, first_row, turns);
    }
    grid_dependency_wait();
    grid_dependency_launch();

    for (int done = 0; done < n_units;) {
        __syncthreads();
        const Cursor at = state.current;
        if (done > 0 && at.head == 0) {  // another row
            compute_turns(p, at.row, turns);
            __syncthreads();
        }
        const int end = minimum(n_units, done + at.n_units - at.unit);
        const int start = at.start, first_key = at.first_key(), end_key = first_key + (end - done) * STAGE_KEYS;
        take_projections(p, at, turns, maximum(0, first_key - at.start), minimum(at.n_columns, end_key - at.start), queries,
                         query_scales, fresh);
        __syncthreads();
        Query query[TEAM_TILES];
        Softmax softmax;
#pragma unroll
        for (int tile = 0; tile < TEAM_TILES; ++tile) {
            query[tile].load(queries, first_tile() + tile, team_warp() % PARTS, *unknown);
            softmax.largest[tile] = NO_SCORE;
            softmax.sum[tile] = 0.0f;
            softmax.scale[tile] = KV_INT8  ? query_scales[Softmax::row_of(tile)]
                                  : KV_FP6 ? SCORE_SCALE * FP6_UNIT
                                           : SCORE_SCALE;
        }
        float acc[TEAM_TILES][4][4] = {};

        if constexpr (TEAM_TILES == 1) {
            // Step j: the values of the segment's unit j are mixed beside the products of q and the keys of unit j + 1.
            for (int j = -1; j < end - done; ++j) {
                const int unit = done + j, v_key = first_key + j * STAGE_KEYS, k_key = v_key + STAGE_KEYS;
                const bool mixes = j >= 0, scores_next = unit + 1 < end;
                uint8_t* const k_plane = k_planes + (unit + 1 & 1) * PLANE_BYTES;
                uint8_t* const v_plane = v_planes + (unit & 1) * PLANE_BYTES;
                cp_async_wait<1>();
                __syncthreads();
                if (threadIdx.x == 0 && scores_next && unit + 3 < n_units) {
                    state.ahead.advance(state.spans);
                    state.sources[(unit + 3) & 3] = source_of(p, state.ahead);
                }
                const bool new_k = scores_next && k_key + STAGE_KEYS > start, new_v = mixes && v_key + STAGE_KEYS > start;
                if (new_k || new_v) {
                    if (new_k) insert_new<true>(fresh, k_plane, k_key, start, state.current.n_columns);
                    if (new_v) insert_new<false>(fresh, v_plane, v_key, start, state.current.n_columns);
                    __syncthreads();
                }
                if (mixes && scores_next) {
                    accumulate(acc, weights, state, v_plane);
                    score_unit(scores, query, k_plane);
                } else if (mixes) {
                    accumulate(acc, weights, state, v_plane);
                } else {
                    score_unit(scores, query, k_plane);
                }
                __syncthreads();
                if (scores_next && unit + 3 < n_units)
                    request_plane<true>(k_plane, p.page_table, p.k, p.k_scales, state.sources[(unit + 3) & 3], &state.nought);
                if ((mixes || unit < 0) && unit + 2 < n_units)
                    request_plane<false>(v_plane, p.page_table, p.v, p.v_scales, state.sources[(unit + 2) & 3], &state.nought);
                cp_async_commit();
                if (scores_next) softmax.weigh(scores, weights, state, k_key, start, p.lowest);
            }
        } else {
            // More rows leave no registers for two things at once: the keys of a unit, then its values.
            for (int unit = done; unit < end; ++unit) {
                const int key = first_key + (unit - done) * STAGE_KEYS;
                uint8_t* const k_plane = k_planes + (unit & 1) * PLANE_BYTES;
                uint8_t* const v_plane = v_planes + (unit & 1) * PLANE_BYTES;
                cp_async_wait<1>();
                __syncthreads();
                if (unit + 1 < n_units)
                    request_plane<false>(v_planes + (unit + 1 & 1) * PLANE_BYTES, p.page_table, p.v, p.v_scales,
                                         state.sources[(unit + 1) & 3], &state.nought);
                cp_async_commit();
                if (threadIdx.x == 0 && unit + 2 < n_units) {
                    state.ahead.advance(state.spans);
                    state.sources[(unit + 2) & 3] = source_of(p, state.ahead);
                }
                if (key + STAGE_KEYS > start) {
                    insert_new<true>(fresh, k_plane, key, start, state.current.n_columns);
                    insert_new<false>(fresh, v_plane, key, start, state.current.n_columns);
                    __syncthreads();
                }
                score_unit(scores, query, k_plane);
                __syncthreads();
                if (unit + 2 < n_units)
                    request_plane<true>(k_plane, p.page_table, p.k, p.k_scales, state.sources[(unit + 2) & 3], &state.nought);
                cp_async_commit();
                softmax.weigh(scores, weights, state, key, start, p.lowest);
                __syncthreads();
                accumulate(acc, weights, state, v_plane);
            }
        }

        const int64_t slot = block + state.current.row * N_KV_HEADS + state.current.head;
        store_partial(acc, p.partial + slot * ROWS * HEAD_DIM);
        softmax.store(p.stats + slot * ROWS * 2);
        __syncthreads();
        if (threadIdx.x == 0) {
            state.current.unit += end - done - 1;
            state.current.advance(state.spans);
        }
        done = end;
    }
}
