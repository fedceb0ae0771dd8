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
    unsigned char* carried;  // CarriedColumns of slot 0; null: no recurrent state
    uint64_t carried_stride; // bytes
    int n_carried;           // that a state may lack behind this round
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

// Which columns the slot's state lacks, and whether it goes on lacking them. fold_buffer: -1 where it lacks none.
DEVICE void resolve_log(RowState& row, const RoundBeginParams& p) {
    CarriedColumns& carried = *reinterpret_cast<CarriedColumns*>(p.carried + row.slot * p.carried_stride);
    const bool lacks_some = row.fold_buffer >= 0;
    const int first = lacks_some ? carried.first : 0;
    row.carried = lacks_some ? carried.n : 0;
    const int n = row.carried + row.fold_columns, behind = (first + n) % LOG_COLUMNS;
    // A frozen row leaves no record that a history could be taken from.
    const bool keeps = n <= p.n_carried && row.n_columns > 0;
    row.fold_buffer = maximum(row.fold_buffer, 0);
    row.log_first = static_cast<uint8_t>(first);
    row.log_record = static_cast<uint8_t>(behind);
    row.keeps_state = keeps;
    carried.first = keeps ? first : behind;
    carried.n = keeps ? n : 0;
}

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
        if (p.carried != nullptr) resolve_log(row, p);
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
