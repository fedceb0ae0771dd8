// What a round hands from kernel to kernel, and what travels to and from the host. Mirrored in ops/round_state.py.
// Column c of a round with B rows and q columns is column i of row b: c = b * q + i.
#pragma once

constexpr int MAX_ROWS = 8;
constexpr int MAX_COLUMNS = 6;
constexpr int MAX_STOP_IDS = 64;
constexpr int LOG_COLUMNS = 12;
constexpr int MOST_PENDING = 8;

// RowStatus of backends/base.py.
constexpr int STATUS_RUNNING = 0;
constexpr int STATUS_STOP_ID = 1;
constexpr int STATUS_BUDGET = 2;
constexpr int STATUS_NOT_FINITE = 3;
constexpr int STATUS_FROZEN = 4;

// One resolved row; an array of MAX_ROWS, written by round_begin and read by everything in the round.
struct RowState {
    int slot;
    int start;          // index of column 0
    int n_columns;      // 0: the row is frozen: its pending record is folded, nothing is evaluated
    int rope_delta;
    int fold_columns;   // columns of the slot's pending record to fold before this round's columns
    int fold_buffer;    // which of the slot's two record buffers holds them
    int record_buffer;  // which one receives this round's record
    int budget;         // tokens the row may still emit, at its start
    int verify;         // 1: columns 1.. are drafts, 0: they are known tokens
    int status;         // these four: 0 (or FROZEN) at the start, the outcome at the end
    int emitted;
    int accepted;
    int columns;
    int n_ratio;        // drafts that the slot holds with what they were drawn from, evaluated or not
    int carried;        // columns of earlier records that the slot's state still lacks; they come before fold_columns
    uint8_t log_first;  // where in the slot's log of columns those that the state lacks begin
    uint8_t log_record; // where this round's begin
    uint8_t keeps_state;  // 1: what is folded is not written back, the state goes on lacking it
    uint8_t reserved;
};
static_assert(sizeof(RowState) == 64, "mirrored by ops/round_state.py");

// Which columns of a slot's log its state lacks before those of the newest round; the log is a ring of LOG_COLUMNS.
struct CarriedColumns {
    int first;
    int n;
};
static_assert(sizeof(CarriedColumns) == 8, "mirrored by ops/gdn_state.py");

// First bytes of the packed input.
struct RoundHeader {
    int has_previous;  // rows continue from the result buffer: column 0, start, budget, fold_columns, counts
    int verify;
    int has_mask;
    int n_top;         // -1: no logprobs; otherwise how many of the most likely ids besides the drawn one
    int own_drafts;    // columns 1.. are what the slots hold
    float forced;      // measurements only: the probability that a draft is taken whatever was drawn; 0: off
    int reserved[10];
};
static_assert(sizeof(RoundHeader) == 64, "mirrored by ops/round_state.py");

// One row as the host packs it, and its sampling parameters. Float64 as in the reference.
struct RowInput {
    uint64_t seed;
    double temperature;
    double top_p;
    double min_p;
    double presence;
    double frequency;
    int slot;
    int n_columns;
    int start;
    int rope_delta;
    int budget;
    int fold_columns;
    int fold_buffer;
    int record_buffer;
    int top_k;          // 0 or below: off
    int n_stop_ids;
    int bias_begin;     // range of the bias entries, ids ascending
    int n_bias;
    int token_ids[MAX_COLUMNS];
    int n_drafts;       // to make behind what the row emits
    int reserved;
    int stop_ids[MAX_STOP_IDS];
};
static_assert(sizeof(RowInput) == 384, "mirrored by ops/round_state.py");

struct BiasEntry {
    double value;
    int token_id;
    int reserved;
};
static_assert(sizeof(BiasEntry) == 16, "mirrored by ops/round_state.py");

// One row as the host reads it back, and as a following round continues from it.
struct RowOutput {
    int status;
    int start;
    int emitted;
    int accepted;
    int columns;                  // inputs a full commit folds
    int budget;                   // in force at the start of the round
    int empty_mask;               // 1: a column that was reached may draw nothing
    int drafted;                  // drafts that were evaluated
    int token_ids[MAX_COLUMNS];   // 0 from `emitted` on
    int n_drafts;                 // that the slot holds now
    int drafts[MAX_COLUMNS - 1];  // 0 from `n_drafts` on
    int padding[4];
};
static_assert(sizeof(RowOutput) == 96, "mirrored by ops/round_state.py");
