// The first kernel of a round: rows as packed by the host, or as the previous round left them, become RowState.
// input: RoundHeader, RowInput[8] (64-byte aligned); previous: RowOutput[8]; rows: RowState[8]; tokens: int32 [B * q];
// counts: int32 [slots][counts_stride], occurrences of generated tokens.
// One warp per row. Reference: backends/reference/program.py `_task` and book.py `continuation`, exact.
#include "common.cuh"
#include "draft.cuh"

struct RoundBeginParams {
    const unsigned char* input;
    const RowOutput* previous;
    RowState* rows;
    int* tokens;
    int* counts;
    const HeldDrafts* held;  // [slots]; null: the program does not draft
    int counts_stride;
    int n_rows;
    int n_columns;
};

struct CountTokensParams {
    int* counts;
    int counts_stride;
    int n_rows;
    int slots[MAX_ROWS];
    int n_tokens[MAX_ROWS];
    int token_ids[MAX_ROWS][MAX_COLUMNS];
};

struct CountListParams {
    int* counts;          // of one slot
    const int* token_ids;
    int n_tokens;
};

// Lane i adds all occurrences of token_ids[i], unless an earlier lane has the same id.
DEVICE void count_tokens(int* counts, const int* token_ids, int n_tokens, int lane) {
    if (lane >= n_tokens) return;
    const int token = token_ids[lane];
    int occurrences = 0;
    bool is_first = true;
    for (int i = 0; i < n_tokens; ++i) {
        if (token_ids[i] != token) continue;
        is_first = is_first && i >= lane;
        ++occurrences;
    }
    if (is_first) counts[token] += occurrences;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    round_begin(const __grid_constant__ RoundBeginParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int b = warp_index(), lane = static_cast<int>(lane_id());
    if (b >= p.n_rows) return;
    const RoundHeader& header = *reinterpret_cast<const RoundHeader*>(p.input);
    const RowInput& in = reinterpret_cast<const RowInput*>(p.input + sizeof(RoundHeader))[b];
    const RowOutput& before = p.previous[b];
    const bool follows = header.has_previous != 0;
    const bool is_frozen = follows && before.status != STATUS_RUNNING;
    const int start = follows ? before.start + before.columns : in.start;
    const int first = follows && !is_frozen ? before.token_ids[before.emitted - 1] : in.token_ids[0];
    int n_columns = is_frozen ? 0 : in.n_columns;
    const int* drafts = in.token_ids + 1;
    int n_ratio = 0;
    if (header.own_drafts && !is_frozen) {
        const HeldDrafts& held = p.held[in.slot];
        const bool fits = held.index == start && held.anchor == first && (!held.has_ratio || has_distributions(in));
        const int n_held = fits ? held.n_drafts : 0;
        drafts = held.token_ids;
        n_columns = minimum(n_columns, 1 + n_held);
        n_ratio = held.has_ratio ? n_held : 0;
    }
    if (lane < p.n_columns) p.tokens[b * p.n_columns + lane] = lane >= n_columns ? 0 : lane == 0 ? first : drafts[lane - 1];
    if (lane == 0) {
        RowState row = {};
        row.slot = in.slot;
        row.start = start;
        row.n_columns = n_columns;
        row.rope_delta = in.rope_delta;
        row.fold_columns = follows ? before.columns : in.fold_columns;  // also of rows that have just ended
        row.fold_buffer = in.fold_buffer;
        row.record_buffer = in.record_buffer;
        row.budget = follows ? before.budget - before.emitted : in.budget;
        row.verify = header.verify;
        row.n_ratio = n_ratio;
        row.status = is_frozen ? STATUS_FROZEN : STATUS_RUNNING;
        p.rows[b] = row;
    }
    if (follows)
        count_tokens(p.counts + static_cast<int64_t>(in.slot) * p.counts_stride, before.token_ids, before.emitted, lane);
}

// A commit that the host decided: n_tokens[b] tokens of row b are counted. One warp per row.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    count_rows(const __grid_constant__ CountTokensParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int b = warp_index();
    if (b >= p.n_rows) return;
    count_tokens(p.counts + static_cast<int64_t>(p.slots[b]) * p.counts_stride, p.token_ids[b], p.n_tokens[b],
                 static_cast<int>(lane_id()));
}

// Adds a whole list to one slot; integers, so the order of the additions does not matter.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    count_list(const __grid_constant__ CountListParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int i = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
    if (i < p.n_tokens) atomic_add_acq_rel(reinterpret_cast<uint32_t*>(p.counts) + p.token_ids[i], 1);
}
