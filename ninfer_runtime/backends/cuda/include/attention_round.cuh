// What the attention of a round and its merge share: parameters, and how the work of the rows is counted.
#pragma once
#include "attention.cuh"
#include "round.cuh"

struct AttentionDecodeParams {
    const RowState* rows;
    const int* page_table;
    const uint16_t* qk;
    const uint16_t* gv;
    const uint16_t* q_norm;
    const uint16_t* k_norm;
    const RopeTable* rope;
    uint8_t* k;
    uint8_t* v;
    uint16_t* k_scales;
    uint16_t* v_scales;
    float* partial;  // [slot][ROWS][HEAD_DIM], not divided by the sums
    float* stats;    // [slot][ROWS][2]: largest score to base 2, sum of the weights
    uint16_t* out;
    int n_rows;
    int pages_per_row;
    int qk_stride;
    int gv_stride;
    int out_stride;
    int n_parts;
    int lowest;      // index of the first key that is seen
    int rotates;
    float eps;
    int row_columns;   // of a row in qk, gv and out; the launch takes COLUMNS of them
    int first_column;  // from this one on: those before it are cached by now
};

constexpr int ROWS = RATIO * COLUMNS;  // query rows per KV head, row = column * RATIO + head of the group

// What the division of work needs of a row, in shared memory: one load per row instead of one after the other.
struct RowSpan {
    int start;
    int n_columns;
    int n_units;
};

DEVICE void load_spans(const AttentionDecodeParams& p, RowSpan* spans) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < MAX_ROWS) {
        RowSpan span = {0, 0, 0};
        if (row < p.n_rows) {
            span.start = p.rows[row].start + p.first_column;
            span.n_columns = minimum(p.rows[row].n_columns - p.first_column, COLUMNS);
        }
        if (span.n_columns > 0) span.n_units = ceil_div(span.start + span.n_columns, STAGE_KEYS);
        spans[row] = span;
    }
    __syncthreads();
}

// Units of the rows below `end`, all KV heads.
DEVICE int count_units(const RowSpan* spans, int end) {
    int total = 0;
    for (int row = 0; row < end; ++row) total += N_KV_HEADS * spans[row].n_units;
    return total;
}
