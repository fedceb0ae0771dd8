// Around the draft layer: which tokens it reads and where they lie, its input columns, the rows its drafts come from.
// The column of token i: bf16(rms(embedding of i) (1 + w)) | bf16(rms(hidden row of i - 1) (1 + w)), [T][STRIDE], zero from
// 2 HIDDEN on. A hidden row is bf16(rms(x) (1 + w_final)). HIDDEN a multiple of 4; arrays 16-byte aligned.
// Reference: backends/reference/mtp.py and drafting.py; bf16 values within 1 ulp, everything else exact.
#include "common.cuh"
#include "draft.cuh"

struct DraftBeginParams {
    const unsigned char* input;  // RoundHeader, RowInput[8]
    const RowState* rows;        // as the sampler left them
    const int* tokens;           // int32 [B * q], the round's inputs
    RowOutput* outputs;
    RowState* draft_rows;
    DraftState* states;
    HeldDrafts* held;            // [slots]
    int* draft_tokens;           // int32 [B * (q + 1)]
    int n_rows;
    int n_columns;               // q
};

struct DraftNextParams {
    RowState* draft_rows;
    DraftState* states;
    int* draft_tokens;  // int32 [B]
    int n_rows;
};

struct DraftInputsParams {
    float* x;                     // fp32 [T][HIDDEN]: embeddings, then zeros
    const float* residual;        // fp32 [..][HIDDEN], the decoder's
    const uint16_t* final_norm;
    const uint16_t* embedding_norm;
    const uint16_t* hidden_norm;
    const RowState* rows;         // MODE_ROUND
    const RowState* draft_rows;   // MODE_ROUND, MODE_CHAIN
    uint16_t* hidden;             // bf16 [slots][HIDDEN], of the last folded token
    uint16_t* records;            // bf16 [slots][2][MAX_COLUMNS][HIDDEN], MODE_ROUND
    uint16_t* last;               // bf16 [HIDDEN], of the last token, MODE_PROMPT
    const uint16_t* chained;      // bf16 [B][CHAIN_STRIDE], the layer's own output, MODE_CHAIN
    uint16_t* out;
    int n_columns;                // q, MODE_ROUND
    int n_tokens;                 // MODE_PROMPT
    int n_read;                   // columns of the chunk, one more than tokens when drafts follow, MODE_PROMPT
    int slot;                     // MODE_PROMPT
    float eps;
};

struct DraftHiddenParams {
    const float* x;  // fp32 [T][HIDDEN], the draft layer's output
    const uint16_t* norm;
    const DraftState* states;
    uint16_t* out;   // bf16 [B][CHAIN_STRIDE]
    float eps;
};

struct DraftSpreadParams {
    const float* logits;  // fp32 [B][in_stride], rows of the draft head
    const int* row_of;    // int32 [n_ids], -1: the head does not have it
    float* out;           // fp32 [B][out_stride]
    int n_ids;
    int in_stride;
    int out_stride;
};

struct DraftFoldParams {
    const int* entries;  // [n][4]: slot, columns, buffer, 0
    uint16_t* hidden;
    const uint16_t* records;
};

// After the draws of a round: what each row may fold is read, and one column more where drafts follow. One warp per row.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    draft_begin(const __grid_constant__ DraftBeginParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int b = warp_index(), lane = static_cast<int>(lane_id());
    if (b >= p.n_rows) return;
    const RowInput& in = reinterpret_cast<const RowInput*>(p.input + sizeof(RoundHeader))[b];
    const RowState row = p.rows[b];
    RowOutput& output = p.outputs[b];
    const int columns = row.n_columns > 0 ? row.columns : 0;
    int n_wanted = 0;
    if (columns > 0 && row.status == STATUS_RUNNING)
        n_wanted = maximum(0, minimum(minimum(in.n_drafts, MAX_DRAFTS), row.budget - row.emitted - 1));
    const int anchor = columns > 0 ? output.token_ids[row.emitted - 1] : 0;
    if (lane <= p.n_columns) {
        int token = 0;
        if (lane < columns) token = p.tokens[b * p.n_columns + lane];
        if (lane == columns && n_wanted > 0) token = anchor;
        p.draft_tokens[b * (p.n_columns + 1) + lane] = token;
    }
    DraftState& state = p.states[b];
    if (lane < row.emitted) state.uncounted[lane] = output.token_ids[lane];
    if (lane < MAX_DRAFTS) output.drafts[lane] = 0;
    if (lane != 0) return;
    output.n_drafts = 0;
    state.slot = row.slot;
    state.n_wanted = n_wanted;
    state.n_drafts = 0;
    state.next_index = row.start + columns + 1;
    state.column = b * (p.n_columns + 1) + columns;
    state.is_active = n_wanted > 0;
    state.n_uncounted = row.emitted;
    RowState read = {};
    read.slot = row.slot;
    read.start = row.start;
    read.n_columns = columns + (n_wanted > 0);
    read.rope_delta = row.rope_delta - 1;  // the position of the token before
    p.draft_rows[b] = read;
    HeldDrafts& held = p.held[row.slot];
    held.index = columns > 0 ? row.start + columns : -1;
    held.anchor = anchor;
    held.n_drafts = held.has_ratio = 0;
}

// Between two drafts: the last one is the next column. One warp per row.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    draft_next(const __grid_constant__ DraftNextParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int b = warp_index();
    if (b >= p.n_rows || lane_id() != 0) return;
    DraftState& state = p.states[b];
    const bool is_active = state.n_drafts > 0 && state.n_drafts < state.n_wanted;
    state.is_active = is_active;
    state.column = b;
    p.draft_rows[b].start = state.next_index - 1;
    p.draft_rows[b].n_columns = is_active;
    p.draft_tokens[b] = is_active ? state.uncounted[state.n_uncounted - 1] : 0;
}

#ifdef HIDDEN
constexpr int UNITS = HIDDEN / 4;
constexpr int UNITS_PER_THREAD = ceil_div(UNITS, THREADS);
static_assert(HIDDEN % 4 == 0 && STRIDE % 4 == 0 && STRIDE >= 2 * HIDDEN, "whole units of four");

struct Line {
    float value[UNITS_PER_THREAD][4];

    DEVICE static int unit_of(int u) { return u * THREADS + static_cast<int>(threadIdx.x); }

    DEVICE void load(const float* from) {
#pragma unroll
        for (int u = 0; u < UNITS_PER_THREAD; ++u) {
            const uint4 words = unit_of(u) < UNITS ? load_16(from + 4 * unit_of(u)) : uint4{0, 0, 0, 0};
            value[u][0] = __uint_as_float(words.x), value[u][1] = __uint_as_float(words.y);
            value[u][2] = __uint_as_float(words.z), value[u][3] = __uint_as_float(words.w);
        }
    }

    DEVICE void load(const uint16_t* from) {
#pragma unroll
        for (int u = 0; u < UNITS_PER_THREAD; ++u) {
            const uint2 words = unit_of(u) < UNITS ? load_8(from + 4 * unit_of(u)) : uint2{0, 0};
            value[u][0] = bf16_lo(words.x), value[u][1] = bf16_hi(words.x);
            value[u][2] = bf16_lo(words.y), value[u][3] = bf16_hi(words.y);
        }
    }

    DEVICE void store(uint16_t* to) const {
#pragma unroll
        for (int u = 0; u < UNITS_PER_THREAD; ++u)
            if (unit_of(u) < UNITS)
                store_8(to + 4 * unit_of(u), {pack_bf16(value[u][0], value[u][1]), pack_bf16(value[u][2], value[u][3])});
    }

    // value = bf16(value / rms * (1 + weight)), by the whole block.
    DEVICE void normalize(const uint16_t* weight, float eps, float* scratch) {
        float sum = 0.0f;
#pragma unroll
        for (int u = 0; u < UNITS_PER_THREAD; ++u)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += value[u][i] * value[u][i];
        const float scale = 1.0f / sqrtf(block_sum(sum, scratch) / HIDDEN + eps);
#pragma unroll
        for (int u = 0; u < UNITS_PER_THREAD; ++u) {
            if (unit_of(u) >= UNITS) continue;
            const uint2 w = load_8(weight + 4 * unit_of(u));
            const float one[4] = {bf16_lo(w.x), bf16_hi(w.x), bf16_lo(w.y), bf16_hi(w.y)};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                value[u][i] = bf16_to_float(float_to_bf16(value[u][i] * scale * (1.0f + one[i])));
        }
    }
};

constexpr int MODE_ROUND = 0, MODE_PROMPT = 1, MODE_CHAIN = 2;
static_assert(MODE == MODE_ROUND || MODE == MODE_PROMPT || MODE == MODE_CHAIN, "numbered as in ops/draft.py");

// One block per column. A round also keeps the hidden rows of its columns, and folds that of its pending record.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    draft_inputs(const __grid_constant__ DraftInputsParams p) {
    STATIC_SHARED(float, scratch[THREADS / WARP_LANES]);
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t column = blockIdx.x;
    bool is_read = true;
    Line line;
    if constexpr (MODE == MODE_ROUND) {
        const int b = static_cast<int>(column) / (p.n_columns + 1), i = static_cast<int>(column) % (p.n_columns + 1);
        const RowState& row = p.rows[b];
        uint16_t* const records = p.records + static_cast<int64_t>(row.slot) * 2 * MAX_COLUMNS * HIDDEN;
        is_read = i < p.draft_rows[b].n_columns;
        if (i == 0) {
            uint16_t* const own = p.hidden + static_cast<int64_t>(row.slot) * HIDDEN;
            if (row.fold_columns > 0) {
                line.load(records + (row.fold_buffer * MAX_COLUMNS + row.fold_columns - 1) * HIDDEN);
                line.store(own);
            } else {
                line.load(own);
            }
        } else {
            if (i > row.n_columns) is_read = false;
            line.load(p.residual + static_cast<int64_t>(b * p.n_columns + i - 1) * HIDDEN);
            line.normalize(p.final_norm, p.eps, scratch);
            if (i <= row.n_columns) line.store(records + (row.record_buffer * MAX_COLUMNS + i - 1) * HIDDEN);
        }
    } else if constexpr (MODE == MODE_PROMPT) {
        is_read = column < p.n_read;
        if (column == 0) {
            line.load(p.hidden + static_cast<int64_t>(p.slot) * HIDDEN);
        } else {
            line.load(p.residual + (column - 1) * HIDDEN);
            line.normalize(p.final_norm, p.eps, scratch);
            if (column == p.n_tokens) line.store(p.last);
        }
    } else {
        is_read = p.draft_rows[column].n_columns > 0;
        line.load(p.chained + column * CHAIN_STRIDE);
    }
    if (!is_read) return;
    line.normalize(p.hidden_norm, p.eps, scratch);
    line.store(p.out + column * STRIDE + HIDDEN);
    float* const x = p.x + column * HIDDEN;
    line.load(x);
    line.normalize(p.embedding_norm, p.eps, scratch);
    line.store(p.out + column * STRIDE);
#pragma unroll
    for (int u = 0; u < UNITS_PER_THREAD; ++u)
        if (Line::unit_of(u) < UNITS) store_16(x + 4 * Line::unit_of(u), {0, 0, 0, 0});
    for (int at = 2 * HIDDEN + 4 * static_cast<int>(threadIdx.x); at < STRIDE; at += 4 * THREADS)
        store_8(p.out + column * STRIDE + at, {0, 0});
}

// The row that each row's next draft comes from. One block per row.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    draft_hidden(const __grid_constant__ DraftHiddenParams p) {
    STATIC_SHARED(float, scratch[THREADS / WARP_LANES]);
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t b = blockIdx.x;
    const DraftState& state = p.states[b];
    uint16_t* const out = p.out + b * CHAIN_STRIDE;
    if (state.is_active) {
        Line line;
        line.load(p.x + static_cast<int64_t>(state.column) * HIDDEN);
        line.normalize(p.norm, p.eps, scratch);
        line.store(out);
    }
    for (int at = HIDDEN + 4 * static_cast<int>(threadIdx.x); at < CHAIN_STRIDE; at += 4 * THREADS) store_8(out + at, {0, 0});
}

// Hidden rows of pending records, where no round folds them. One block per entry.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    draft_fold(const __grid_constant__ DraftFoldParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int* const entry = p.entries + 4 * blockIdx.x;
    const int64_t record = (static_cast<int64_t>(entry[0]) * 2 + entry[2]) * MAX_COLUMNS + entry[1] - 1;
    Line line;
    line.load(p.records + record * HIDDEN);
    line.store(p.hidden + static_cast<int64_t>(entry[0]) * HIDDEN);
}
#endif

// Logits of a head over some ids as logits of all; -infinity: not proposed. Grid (parts of the ids, rows).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    draft_spread(const __grid_constant__ DraftSpreadParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int id = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
    if (id >= p.n_ids) return;
    const int row = p.row_of[id];
    p.out[static_cast<int64_t>(blockIdx.y) * p.out_stride + id] =
        row < 0 ? __uint_as_float(0xff800000u) : p.logits[static_cast<int64_t>(blockIdx.y) * p.in_stride + row];
}
