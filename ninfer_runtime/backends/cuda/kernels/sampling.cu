// From the logits of a round to what its rows emit: draws of all columns side by side, then the rule of each row.
// logits fp32 [T][logits_stride], 16-byte aligned rows where VECTOR_LOADS; masks uint32 [T][mask_words];
// counts int32 [slots][counts_stride], stride a multiple of 4. Column c = b * q + i (include/round.cuh).
// token = the first candidate, in descending order, where the cumulative weight exceeds u * (weight of those kept).
// sample_scan: one warp per CHUNK ids and column -> largest value, sums of exponentials, NaN for a logit not finite.
// sample_draw: one block per column -> token and logprobs; the last block of a row to arrive applies its rule.
// DRAFT: one column per row, drawn as the target will draw it; -infinity among the logits is an id that is not proposed.
// RATIO: drafts of rows with sorted candidates are drawn from their own distribution, which is kept, and accepted by ratio.
// Reference: backends/reference/sampling.py, rounds.py; tokens equal except where 1e-6 of the mass decides (1e-12 for
// top_k 1 .. PREFIX); logprobs 1e-5.
#include "common.cuh"
#ifndef DRAFT
#define DRAFT 0
#endif
#ifndef RATIO
#define RATIO 0
#endif
#include "draft.cuh"
#include "philox.cuh"
#include "sample_column.cuh"
#include "sample_select.cuh"
#include "sample_draw.cuh"
#if RATIO
#include "sample_ratio.cuh"
#endif

struct SampleParams {
    const float* logits;
    const unsigned char* input;   // RoundHeader, RowInput[8], ..
    const BiasEntry* bias;
    const uint32_t* masks;
    const int* counts;
    const int* tokens;            // resolved inputs, int32 [T]
    RowState* rows;
    RowOutput* outputs;
    DraftState* states;           // DRAFT
    HeldDrafts* held;             // DRAFT, [slots]
    Proposal* proposals;          // RATIO, [slots][MAX_DRAFTS]
    double* best;                 // [T][n_chunks]
    int* best_ids;
    float* raw_largest;           // over raw logits
    float* raw_sum;               // of exp(logit - raw_largest)
    float* scaled_sum;            // of exp((value - best) / temperature)
    Draw* draws;                  // [T]
    uint32_t* arrived;            // [8], zero between rounds
    float* chosen;                // logprobs [8][MAX_COLUMNS]
    int* top_ids;                 // [8][MAX_COLUMNS][n_top_limit]
    float* top;
    int n_columns;                // q
    int n_ids;                    // addressable
    int n_chunks;
    int logits_stride;
    int counts_stride;
    int mask_words;
    int n_top_limit;
};

#if DRAFT
using Row = DraftState;
#else
using Row = RowState;
#endif

DEVICE const Row& row_of(const SampleParams& p, int b) {
#if DRAFT
    return p.states[b];
#else
    return p.rows[b];
#endif
}

DEVICE const RoundHeader& header_of(const SampleParams& p) { return *reinterpret_cast<const RoundHeader*>(p.input); }

DEVICE const RowInput& input_of(const SampleParams& p, int b) {
    return reinterpret_cast<const RowInput*>(p.input + sizeof(RoundHeader))[b];
}

// Whether column i of a row draws: every column of a verify row, the last of a known one.
DEVICE bool draws_at(const RowState& row, int i) { return i < row.n_columns && (row.verify || i == row.n_columns - 1); }
DEVICE bool draws_at(const DraftState& row, int) { return row.is_active != 0; }

DEVICE uint64_t index_behind(const RowState& row, int i) { return static_cast<uint64_t>(row.start + i + 1); }
DEVICE uint64_t index_behind(const DraftState& row, int) { return static_cast<uint64_t>(row.next_index); }

DEVICE Column column_of(const SampleParams& p, const Row& row, const RowInput& in, int c, int i) {
    Column column;
    column.logits = p.logits + static_cast<int64_t>(c) * p.logits_stride;
    const bool has_penalties = in.presence != 0.0 || in.frequency != 0.0;
    column.counts = has_penalties ? p.counts + static_cast<int64_t>(row.slot) * p.counts_stride : nullptr;
    column.bias = p.bias + in.bias_begin;
    column.presence = in.presence;
    column.frequency = in.frequency;
    column.n_bias = in.n_bias;
#if DRAFT
    column.mask = nullptr;
    column.drafts = row.uncounted;
    column.n_drafts = row.n_uncounted;
#else
    column.mask = header_of(p).has_mask ? p.masks + static_cast<int64_t>(c) * p.mask_words : nullptr;
    column.drafts = p.tokens + (c - i) + 1;
    column.n_drafts = row.verify ? i : 0;
#endif
    column.n_ids = p.n_ids;
    return column;
}

DEVICE void keep_better(double& value, int& id, double other, int other_id) {
    if (!comes_before(other, other_id, value, id)) return;
    value = other;
    id = other_id;
}

DEVICE void warp_best(double& value, int& id) {
#pragma unroll
    for (int mask = WARP_LANES / 2; mask > 0; mask >>= 1) {
        const double other = shfl_xor(value, mask);
        keep_better(value, id, other, shfl_xor(id, mask));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sample_scan(const __grid_constant__ SampleParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int c = static_cast<int>(blockIdx.y), b = c / p.n_columns, i = c % p.n_columns;
    const int chunk = static_cast<int>(blockIdx.x) * WARPS + warp_index();
    if (chunk >= p.n_chunks) return;
    constexpr int SEGMENTS = CHUNK / SEGMENT;
    // Before anything else: nearly every column is wanted, and where its logits lie depends on nothing that is loaded.
    float raw[SEGMENTS][4];
    const int first = chunk * CHUNK + 4 * static_cast<int>(lane_id());
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s)
        load_logits(p.logits + static_cast<int64_t>(c) * p.logits_stride, first + s * SEGMENT, p.n_ids, raw[s]);
    const Row& row = row_of(p, b);
    if (!draws_at(row, i)) return;
    const RowInput& in = input_of(p, b);
    const Column column = column_of(p, row, in, c, i);
    bool is_finite = true;
    float largest = -infinite();
    int largest_id = NO_ID;
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int id = first + s * SEGMENT + j;
            is_finite = is_finite && (id >= p.n_ids || (DRAFT ? raw[s][j] : fabsf(raw[s][j])) < infinite());
            if (raw[s][j] > largest) {
                largest = raw[s][j];
                largest_id = id;
            }
        }
    double best = static_cast<double>(largest);
    int best_id = largest_id;
    if (!column.is_raw()) {
        best = -static_cast<double>(infinite());
        best_id = NO_ID;
        for_chunk(column, chunk, [&](int id, const float(&)[4], const double(&value)[4]) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (value[j] > best) {
                    best = value[j];
                    best_id = id + j;
                }
        });
    }
    warp_best(best, best_id);
    is_finite = ballot(!is_finite) == 0;
    const int64_t at = static_cast<int64_t>(c) * p.n_chunks + chunk;
    if (lane_id() == 0) {
        p.best[at] = is_finite ? best : static_cast<double>(__uint_as_float(0x7fc00000u));
        p.best_ids[at] = best_id;
    }
    if (!DRAFT && header_of(p).n_top >= 0) {
        largest = warp_max(largest);
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum += expf(raw[s][j] - largest);
        sum = warp_sum(sum);
        if (lane_id() == 0) {
            p.raw_largest[at] = largest;
            p.raw_sum[at] = sum;
        }
    }
    if (in.temperature > 0.0 && is_wide(in.top_k)) {
        const float inverse = static_cast<float>(inverse_of(in.temperature));
        const float reference = best_id == NO_ID ? 0.0f : static_cast<float>(best);
        float sum = 0.0f;
        for_chunk(column, chunk, [&](int, const float(&near)[4], const double(&)[4]) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sum += weight_of(near[j], reference, inverse);
        });
        sum = warp_sum(sum);
        if (lane_id() == 0) p.scaled_sum[at] = sum;
    }
}

// The largest value of the column and its id, to every thread; id -1 when a logit is not finite.
DEVICE void best_of_chunks(const SampleParams& p, Selection& s, int c, double& value, int& id) {
    value = -static_cast<double>(infinite());
    id = NO_ID;
    bool is_finite = true;
    const int64_t begin = static_cast<int64_t>(c) * p.n_chunks;
    for (int chunk = static_cast<int>(threadIdx.x); chunk < p.n_chunks; chunk += THREADS) {
        const double best = p.best[begin + chunk];
        is_finite = is_finite && best == best;
        keep_better(value, id, best, p.best_ids[begin + chunk]);
        s.chunk_key[chunk] = key_of(static_cast<float>(best));
    }
    warp_best(value, id);
    is_finite = ballot(!is_finite) == 0;
    if (lane_id() == 0) {
        s.scratch[warp_index()] = value;
        s.warp_count[warp_index()] = is_finite ? static_cast<uint32_t>(id) : 0xffffffffu;
    }
    __syncthreads();
    value = s.scratch[0];
    id = static_cast<int>(s.warp_count[0]);
    for (int warp = 1; warp < WARPS; ++warp) {
        const int other = static_cast<int>(s.warp_count[warp]);
        if (id < 0 || other < 0)
            id = -1;
        else
            keep_better(value, id, s.scratch[warp], other);
    }
    __syncthreads();
}

// Sum over the chunks of part * exp(largest - peak), largest taken per chunk.
template <typename Largest>
DEVICE double combined_sum(const SampleParams& p, Selection& s, int c, const float* parts, double peak,
                           double inverse_temperature, Largest largest) {
    double sum = 0.0;
    const int64_t begin = static_cast<int64_t>(c) * p.n_chunks;
    for (int chunk = static_cast<int>(threadIdx.x); chunk < p.n_chunks; chunk += THREADS) {
        const double here = largest(begin + chunk);
        if (here > -static_cast<double>(infinite()))
            sum += static_cast<double>(parts[begin + chunk]) * exp((here - peak) * inverse_temperature);
    }
    return block_sum(sum, s.scratch);
}

// Natural logs of the softmax over raw logits: of the drawn token, and of the n_top most likely ones.
DEVICE void write_logprobs(const SampleParams& p, Selection& s, const Column& column, int c, int slot, int token,
                           int n_top) {
    Column raw = column;
    raw.counts = nullptr;
    raw.mask = nullptr;
    raw.n_bias = 0;
    const int64_t begin = static_cast<int64_t>(c) * p.n_chunks;
    float peak = -infinite();
    for (int chunk = static_cast<int>(threadIdx.x); chunk < p.n_chunks; chunk += THREADS) {
        peak = maximum(peak, p.raw_largest[begin + chunk]);
        s.chunk_key[chunk] = key_of(p.raw_largest[begin + chunk]);
    }
    peak = block_max(peak, reinterpret_cast<float*>(s.scratch));
    const double total = combined_sum(p, s, c, p.raw_sum, static_cast<double>(peak), 1.0,
                                      [&](int64_t at) { return static_cast<double>(p.raw_largest[at]); });
    const double log_total = static_cast<double>(peak) + log(total);
    if (threadIdx.x == 0) p.chosen[slot] = static_cast<float>(static_cast<double>(raw.logits[token]) - log_total);
    if (n_top <= 0) return;
    const int n = select_top(raw, s, n_top, peak, p.n_chunks);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += THREADS) {
        p.top_ids[slot * p.n_top_limit + i] = s.id[i];
        p.top[slot * p.n_top_limit + i] = static_cast<float>(s.value[i] - log_total);
    }
}

#if DRAFT
// One draft more, or none any more: a proposer whose logits are not finite is not asked again.
DEVICE void end_draft(const SampleParams& p, int b, Draw draw) {
    DraftState& state = p.states[b];
    if (!state.is_active) return;
    if (draw.outcome != DREW) {
        state.n_wanted = state.n_drafts;
        return;
    }
    const int at = state.n_drafts;
    p.held[state.slot].token_ids[at] = draw.token;
    p.held[state.slot].n_drafts = at + 1;
#if RATIO
    p.held[state.slot].has_ratio = has_distributions(input_of(p, b));
#endif
    p.outputs[b].drafts[at] = draw.token;
    p.outputs[b].n_drafts = at + 1;
    state.uncounted[state.n_uncounted] = draw.token;
    ++state.n_uncounted;
    ++state.n_drafts;
    ++state.next_index;
}
#else
// The draw behind a column, or its draft where a measurement wants that taken.
DEVICE Draw draw_behind(const SampleParams& p, const RowState& row, int b, int i) {
    Draw draw = p.draws[b * p.n_columns + i];
    const float forced = header_of(p).forced;
    if (forced > 0.0f && row.verify && i + 1 < row.n_columns && draw.outcome == DREW &&
        philox_uniform(static_cast<uint64_t>(row.slot), static_cast<uint64_t>(row.start + i), PURPOSE_FORCED) < forced)
        draw.token = p.tokens[b * p.n_columns + i + 1];
    return draw;
}

// What one row emits, from its columns' draws; one warp.
DEVICE void end_row(const SampleParams& p, int b) {
    RowState& row = p.rows[b];
    const RowInput& in = input_of(p, b);
    const int n = row.n_columns, budget = row.budget;
    const bool verify = row.verify != 0;
    RowOutput out = {};
    out.status = row.status;
    out.start = row.n_columns > 0 ? row.start : 0;
    out.budget = budget;
    int own_token = 0;  // lane i: the i-th token emitted
    for (int i = verify ? 0 : n - 1; i >= 0 && i < n; ++i) {
        const Draw draw = draw_behind(p, row, b, i);
        if (draw.outcome != DREW) {
            out.status = STATUS_NOT_FINITE;
            out.empty_mask = draw.outcome == NOTHING_ALLOWED;
            break;
        }
        if (static_cast<int>(lane_id()) == out.emitted) own_token = draw.token;
        ++out.emitted;
        bool is_stop = false;
        for (int at = static_cast<int>(lane_id()); at < in.n_stop_ids; at += WARP_LANES)
            is_stop = is_stop || in.stop_ids[at] == draw.token;
        if (ballot(is_stop) != 0)
            out.status = STATUS_STOP_ID;
        else if (out.emitted >= budget)
            out.status = STATUS_BUDGET;
        const bool is_draft_right = verify && i + 1 < n && p.tokens[b * p.n_columns + i + 1] == draw.token;
        out.accepted += is_draft_right;
        if (out.status != STATUS_RUNNING || !is_draft_right) break;
    }
    out.columns = verify ? out.emitted : (out.emitted > 0 ? n : 0);
    if (lane_id() < MAX_COLUMNS) p.outputs[b].token_ids[lane_id()] = own_token;
    if (lane_id() != 0) return;
    RowOutput& written = p.outputs[b];
    written.status = out.status;
    written.start = out.start;
    written.emitted = out.emitted;
    written.accepted = out.accepted;
    written.columns = out.columns;
    written.budget = out.budget;
    written.empty_mask = out.empty_mask;
    written.drafted = verify ? maximum(n - 1, 0) : 0;
    row.status = out.status;
    row.emitted = out.emitted;
    row.accepted = out.accepted;
    row.columns = out.columns;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sample_draw(const __grid_constant__ SampleParams p) {
    DYNAMIC_SHARED(Selection, selection);
    Selection& s = *selection;
    grid_dependency_launch();
    grid_dependency_wait();
    const int c = static_cast<int>(blockIdx.x), b = c / p.n_columns, i = c % p.n_columns;
    const Row& row = row_of(p, b);
    if (draws_at(row, i)) {
        const RowInput& in = input_of(p, b);
        const Column column = column_of(p, row, in, c, i);
        double largest;
        int token;
        best_of_chunks(p, s, c, largest, token);
        int outcome = token < 0 ? SAW_NOT_FINITE : token == NO_ID ? NOTHING_ALLOWED : DREW;
        if (outcome == DREW) {
            if (in.temperature > 0.0) {
                double total = 0.0;
                const double inverse = inverse_of(in.temperature);
                if (is_wide(in.top_k))
                    total = combined_sum(p, s, c, p.scaled_sum, largest, inverse,
                                         [&](int64_t at) { return static_cast<double>(static_cast<float>(p.best[at])); });
                const uint64_t position = index_behind(row, i);
                uint64_t purpose = PURPOSE_TARGET;
                bool is_drawn = false;
#if RATIO && DRAFT
                if (has_distributions(in)) {
                    Proposal& proposal = p.proposals[row.slot * MAX_DRAFTS + row.n_drafts];
                    token = propose(column, s, in, static_cast<float>(largest), p.n_chunks, position, proposal);
                    is_drawn = true;
                }
#elif RATIO
                if (i < row.n_ratio) {
                    const Proposal& proposal = p.proposals[row.slot * MAX_DRAFTS + i];
                    token = draw_by_ratio(column, s, in, static_cast<float>(largest), p.n_chunks, position,
                                          p.held[row.slot].token_ids[i], proposal);
                    is_drawn = true;
                }
                if (row.n_ratio > 0) purpose = PURPOSE_BONUS;
#endif
                const double u = philox_uniform(in.seed, position, purpose);
                if (!is_drawn) token = draw_token(column, s, in, static_cast<float>(largest), total, u, p.n_chunks);
            }
#if !DRAFT
            const int n_top = header_of(p).n_top;
            if (n_top >= 0) {
                const int slot = b * MAX_COLUMNS + (row.verify ? i : 0);
                write_logprobs(p, s, column, c, slot, token, n_top);
            }
#endif
        }
        if (threadIdx.x == 0) p.draws[c] = Draw{token, outcome};
    }
#if DRAFT
    __syncthreads();
    if (threadIdx.x == 0) end_draft(p, b, p.draws[c]);
#else
    __syncthreads();
    if (threadIdx.x == 0) s.index = atomic_add_acq_rel(p.arrived + b, 1u) == static_cast<uint32_t>(p.n_columns - 1);
    __syncthreads();
    if (s.index == 0) return;
    if (threadIdx.x == 0) p.arrived[b] = 0;
    if (warp_index() == 0) end_row(p, b);
#endif
}
