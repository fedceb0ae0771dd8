// Gated DeltaNet of one round: fold what is pending into the state, then evaluate this round's columns without writing it.
//   c_t = silu(sum_j taps[j] p_{t-3+j}) of q, k, v;  S <- alpha S;  u = beta (v - S k);  S <- S + u k^T;  o = S q
//   out = rms(o) w silu(z)
// qk [T][2 KEY_HEADS 128] (q | k), vz [T][2 VALUE_HEADS 128] (v | z), taps [4][channels], norm [128], out [T][value
// width]: bf16; a, b [T][VALUE_HEADS], a_log, dt_bias [VALUE_HEADS]: fp32. Column i of row b is line n_columns b + i; out is
// zero in lines of columns that are not evaluated.
// State S fp32 [slot][value head][value 128][key 128], history bf16 [slot][3][channels], records: gdn_step.cuh. All pointers
// and strides are multiples of 16 bytes. 256 threads: a block holds a head in registers. Grid: up to VALUE_HEADS * rows blocks;
// with RING a block takes one head after the other, and the state of the following one arrives in shared memory meanwhile.
// What the pending columns need was written launches ago and is read ahead of the dependency wait.
// Reference: backends/reference/gdn.py in bfloat16; out within 1 bf16 ulp where the convolution's are equal.
#include "common.cuh"
#include "gdn_step.cuh"

struct GdnDecodeParams {
    const RowState* rows;
    const uint16_t* qk;
    const uint16_t* vz;
    const float* a;
    const float* b;
    const uint16_t* taps;
    const float* a_log;
    const float* dt_bias;
    const uint16_t* norm;
    unsigned char* state;    // this layer of slot 0
    unsigned char* history;  // likewise
    unsigned char* record;   // likewise
    uint16_t* out;
    uint64_t state_slot_stride;  // bytes
    uint64_t record_slot_stride;
    int qk_stride;  // elements
    int vz_stride;
    int gate_stride;
    int out_stride;
    int n_rows;
    int n_columns;  // lines per row
    int n_ahead;    // blocks that run at a time; 0: states are not fetched ahead
    float norm_eps;
};

namespace {

constexpr int WARPS = THREADS / WARP_LANES;
static_assert(MAX_COLUMNS >= 1 && MAX_COLUMNS <= WARPS, "a warp writes a column of the result");
constexpr int PART_VECTORS = GDN_DIM / 8, LINE_VECTORS = 4 * PART_VECTORS;  // of 16 bytes: [query | key | value | z]

// One row's head: where its state, history and record are, and what is to be done.
struct Head {
    int row, head, n_columns;
    int n_pending, log_first, log_record;
    bool writes_state;
    float decay_rate, dt_bias;
    float* matrix;
    uint16_t* history;
    GdnRecord record;
    const uint16_t* pending_window;  // behind the folded columns
    uint16_t* window;

    DEVICE Head(const GdnDecodeParams& p, const RowState& state, int unit)
        : row(unit / VALUE_HEADS),
          head(unit % VALUE_HEADS),
          n_columns(state.n_columns),
          n_pending(state.carried + state.fold_columns),
          log_first(state.log_first),
          log_record(state.log_record),
          writes_state(n_pending > 0 && state.keeps_state == 0),
          decay_rate(expf_precise(p.a_log[head])),
          dt_bias(p.dt_bias[head]),
          matrix(reinterpret_cast<float*>(p.state + state.slot * p.state_slot_stride) + head * GDN_DIM * GDN_DIM),
          history(reinterpret_cast<uint16_t*>(p.history + state.slot * p.state_slot_stride)),
          record(p.record + state.slot * p.record_slot_stride),
          pending_window(record.window(state.fold_buffer, state.fold_columns)),
          window(record.window(state.record_buffer, 0)) {}

    DEVICE int place(int column) const { return log_place(log_record, column); }
};

// Rows of 384 channels are [query | key | value] of the head. What a head still needs while the following one's copies
// arrive is there twice.
struct Shared {
    alignas(16) float state[RING ? GDN_DIM * GDN_DIM : 4];  // of the following head
    GdnPending pending;
    alignas(16) float query[MAX_COLUMNS][GDN_DIM], key[MAX_COLUMNS][GDN_DIM];
    float value[MAX_COLUMNS][GDN_DIM];  // then the outputs
    float correction[MAX_COLUMNS][GDN_DIM];
    float key_query[MAX_COLUMNS];
    GdnGates gates[MAX_COLUMNS];
    float raw_gates[2][MAX_COLUMNS][2];  // projections a, b
    alignas(16) uint16_t taps[GDN_TAPS][3 * GDN_DIM];
    uint16_t window[GDN_HISTORY + MAX_COLUMNS][3 * GDN_DIM];  // history, then this round's projections
    uint16_t z[2][MAX_COLUMNS][GDN_DIM];
    uint16_t norm[GDN_DIM];
    alignas(16) unsigned char heads[2][round_up(sizeof(Head), 16)];

    DEVICE Head& own(int turn) { return *reinterpret_cast<Head*>(heads[turn]); }
};
static_assert(sizeof(Shared) <= BLOCK_SHARED, "dynamic shared memory of the launch");

DEVICE float* matrix_of(const GdnDecodeParams& p, int unit) {
    unsigned char* const slot = p.state + p.rows[unit / VALUE_HEADS].slot * p.state_slot_stride;
    return reinterpret_cast<float*>(slot) + unit % VALUE_HEADS * GDN_DIM * GDN_DIM;
}

// The state of the block that takes the place of one that runs now.
DEVICE void fetch_ahead(const GdnDecodeParams& p, int n_units) {
    const int unit = static_cast<int>(blockIdx.x) + p.n_ahead;
    if (p.n_ahead > 0 && unit < n_units) prefetch_state(matrix_of(p, unit));
}

DEVICE void copy_state(float* shared, const float* matrix) {
    deal<GDN_DIM * GDN_DIM / 4>([&](int i) { cp_async_16(shared + 4 * i, matrix + 4 * i); });
}

// Starts the copies of what is older than the round: the head's history, taps and pending columns.
DEVICE void copy_old(Shared& shared, const GdnDecodeParams& p, const Head& own) {
    const GdnChannels channels(own.head);
    // The history that this round continues: after a fold the columns behind the folded ones, which no block writes.
    const uint16_t* const history = own.n_pending > 0 ? own.pending_window : own.history;
    copy_pending(shared.pending, own.record, own.log_first, own.n_pending, own.head);
    deal<(GDN_HISTORY + GDN_TAPS) * GDN_HEAD_VECTORS>([&](int i) {
        const int j = i / GDN_HEAD_VECTORS, vector = i % GDN_HEAD_VECTORS, k = j - GDN_HISTORY;
        const uint16_t* const source = j < GDN_HISTORY ? history + j * GDN_CHANNELS : p.taps + k * GDN_CHANNELS;
        cp_async_16((j < GDN_HISTORY ? shared.window[j] : shared.taps[k]) + 8 * vector, source + channels.vector(vector));
    });
}

// The history to where it belongs from now on.
DEVICE void put_history(const Shared& shared, const Head& own) {
    const GdnChannels channels(own.head);
    deal<GDN_HISTORY * GDN_HEAD_VECTORS>([&](int i) {
        const int j = i / GDN_HEAD_VECTORS, vector = i % GDN_HEAD_VECTORS, at = j * GDN_CHANNELS + channels.vector(vector);
        if (!channels.owns(vector)) return;
        const uint4 words = *reinterpret_cast<const uint4*>(&shared.window[j][8 * vector]);
        if (own.writes_state) store_16(own.history + at, words);
        if (own.n_columns > 0) store_16(own.window + at, words);
    });
}

// This round's projections into shared memory, by copies that the caller waits for or at once.
template <bool ASYNC>
DEVICE void stage_columns(Shared& shared, const GdnDecodeParams& p, const Head& own, int turn) {
    const GdnChannels channels(own.head);
    const int line = own.row * p.n_columns, n_vectors = own.n_columns * LINE_VECTORS;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < n_vectors; i += THREADS) {
        const int c = i / LINE_VECTORS, vector = i % LINE_VECTORS;
        const int part = vector / PART_VECTORS, within = 8 * (vector % PART_VECTORS);
        const uint16_t* const qk = p.qk + static_cast<int64_t>(line + c) * p.qk_stride + channels.first(part & 1);
        const uint16_t* const vz = p.vz + static_cast<int64_t>(line + c) * p.vz_stride + own.head * GDN_DIM;
        uint16_t* const window = &shared.window[GDN_HISTORY + c][8 * vector];
        uint16_t* const target = part == 3 ? &shared.z[turn][c][within] : window;
        const uint16_t* const source = (part < 2 ? qk : vz + (part - 2) * GDN_VALUE_WIDTH) + within;
        if constexpr (ASYNC)
            cp_async_16(target, source);
        else
            *reinterpret_cast<uint4*>(target) = load_16(source);
    }
    const int gate = THREADS - 1 - static_cast<int>(threadIdx.x), c = gate / 2;
    if (c < own.n_columns) {
        const float* const source = (gate % 2 == 0 ? p.a : p.b) + (line + c) * p.gate_stride + own.head;
        if constexpr (ASYNC)
            cp_async_4(&shared.raw_gates[turn][c][gate % 2], source);
        else
            shared.raw_gates[turn][c][gate % 2] = *source;
    }
}

DEVICE void record_columns(const Shared& shared, const Head& own) {
    const GdnChannels channels(own.head);
    const int n_vectors = own.n_columns * GDN_HEAD_VECTORS;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < n_vectors; i += THREADS) {
        const int c = GDN_HISTORY + i / GDN_HEAD_VECTORS, vector = i % GDN_HEAD_VECTORS;
        if (channels.owns(vector))
            store_16(own.window + c * GDN_CHANNELS + channels.vector(vector),
                     *reinterpret_cast<const uint4*>(&shared.window[c][8 * vector]));
    }
}

// Four channels per lane of a column's query (part 0), key (1) or value (2), after convolution and silu.
DEVICE void convolved(float (&x)[4], const Shared& shared, int c, int part) {
    const int channel = part * GDN_DIM + 4 * static_cast<int>(lane_id());
    unpack_4(convolve_4(&shared.window[c][channel], &shared.taps[0][channel], 3 * GDN_DIM), x);
}

// One warp: a column's query, key and their product.
DEVICE void prepare_keys(Shared& shared, const Head& own, int c) {
    const int lane = static_cast<int>(lane_id());
    float x[4], key[4];
    convolved(x, shared, c, 0);
    convolved(key, shared, c, 1);
    const float product = warp_sum(dot_4(key, x));
    const float scale = mul_rn(l2_normalize(x), GDN_QUERY_SCALE), key_scale = l2_normalize(key);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = mul_rn(x[i], GDN_QUERY_SCALE);
    put_4(shared.query[c], lane, x);
    put_4(shared.key[c], lane, key);
    if (own.head % GDN_RATIO == 0)
        store_global(own.record.key(own.place(c), own.head / GDN_RATIO) + 4 * lane, Float4{{key[0], key[1], key[2], key[3]}});
    if (lane == 0) shared.key_query[c] = mul_rn(product, mul_rn(scale, key_scale));
}

DEVICE void prepare_value(Shared& shared, int c) {
    float x[4];
    convolved(x, shared, c, 2);
    put_4(shared.value[c], static_cast<int>(lane_id()), x);
}

// A lane per column.
DEVICE void prepare_gates(Shared& shared, const Head& own, int turn) {
    const int c = static_cast<int>(lane_id());
    if (c >= own.n_columns) return;
    const float log_decay = -mul_rn(own.decay_rate, softplus(shared.raw_gates[turn][c][0] + own.dt_bias));
    const GdnGates gates = {expf_precise(log_decay), sigmoid(shared.raw_gates[turn][c][1])};
    shared.gates[c] = gates;
    *own.record.alpha(own.place(c), own.head) = gates.alpha;
}

// Everything of the columns that does not depend on the state, a task per warp.
DEVICE void prepare_columns(Shared& shared, const Head& own, int turn) {
    const int n_columns = own.n_columns;
#pragma unroll 1
    for (int task = warp_index(); task <= 2 * n_columns; task += WARPS) {
        if (task == 2 * n_columns)
            prepare_gates(shared, own, turn);
        else if (task < n_columns)
            prepare_keys(shared, own, task);
        else
            prepare_value(shared, task - n_columns);
    }
    record_columns(shared, own);
}

// Outputs and corrections, column after column: u = beta (v - alpha S k), o = alpha S q + (k . q) u. alpha is taken out of
// the products, so the state need not be decayed first, and the last column needs no new state.
DEVICE void evaluate(GdnRows& s, Shared& shared, int n_columns, GdnLane at) {
    const int row = at.row + at.own_row(), first_lane = static_cast<int>(lane_id()) & ~7;
    const bool has_output = at.part % 2 != 0;
#pragma unroll 1
    for (int c = 0; c < n_columns; ++c) {
        const GdnGates gates = shared.gates[c];
        float k[GDN_LANE_KEYS], q[GDN_LANE_KEYS], sum[GDN_LANE_ROWS], query_sum[GDN_LANE_ROWS], u[GDN_LANE_ROWS];
        load_keys(k, shared.key[c], at);
        partial_products(sum, s, k);
        const float predicted = mul_rn(gates.alpha, product_of_row(sum, at));
        const float own_u = mul_rn(gates.beta, sub_rn(shared.value[c][row], predicted));
        load_keys(q, shared.query[c], at);
        partial_products(query_sum, s, q);
#pragma unroll
        for (int r = 0; r < GDN_LANE_ROWS; ++r) u[r] = shfl(own_u, first_lane + 2 * r);
        const float output = fmaf(shared.key_query[c], own_u, mul_rn(gates.alpha, product_of_row(query_sum, at)));
        if (has_output)
            shared.value[c][row] = output;
        else
            shared.correction[c][row] = own_u;
        if (c + 1 < n_columns) advance_state(s, k, gates.alpha, u);
    }
}

// A warp per column: gated norm of the outputs; zeros for columns that are not evaluated.
DEVICE void put_out(const Shared& shared, const GdnDecodeParams& p, const Head& own, int turn) {
    const int lane = static_cast<int>(lane_id()), c = warp_index();
    if (c >= p.n_columns) return;
    const int64_t line = own.row * p.n_columns + c;
    uint16_t* const out = p.out + line * p.out_stride + own.head * GDN_DIM + 4 * lane;
    if (c >= own.n_columns) {
        store_8(out, uint2{0, 0});
        return;
    }
    float w[4], z[4], y[4];
    unpack_4(*reinterpret_cast<const uint2*>(&shared.norm[4 * lane]), w);
    unpack_4(*reinterpret_cast<const uint2*>(&shared.z[turn][c][4 * lane]), z);
    const Float4 o = *reinterpret_cast<const Float4*>(&shared.value[c][4 * lane]);
    const float scale = rsqrt_approx(warp_sum(dot_4(o.v, o.v)) * (1.0f / GDN_DIM) + p.norm_eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = o.v[i] * scale * w[i] * silu_fast(z[i]);
    store_8(out, pack_4(y));
    store_global(own.record.correction(own.place(c), own.head) + 4 * lane,
                 *reinterpret_cast<const Float4*>(&shared.correction[c][4 * lane]));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gdn_decode(const __grid_constant__ GdnDecodeParams p) {
    DYNAMIC_SHARED(Shared, shared);
    grid_dependency_launch();
    const int n_units = VALUE_HEADS * p.n_rows, step = static_cast<int>(gridDim.x), thread = static_cast<int>(threadIdx.x);
    const GdnLane at;
    int unit = static_cast<int>(blockIdx.x), turn = 0;
    if (thread < 2 && unit + thread * step < n_units)
        shared->own(thread) = Head(p, p.rows[(unit + thread * step) / VALUE_HEADS], unit + thread * step);
    GdnRows s;
    load_state(s, matrix_of(p, unit), at);
    if (thread < PART_VECTORS) cp_async_16(&shared->norm[8 * thread], p.norm + 8 * thread);
    __syncthreads();
    copy_old(*shared, p, shared->own(0));
    cp_async_commit();
    if (RING && unit + step < n_units) copy_state(shared->state, matrix_of(p, unit + step));
    cp_async_commit();
    if (!RING) fetch_ahead(p, n_units);
    cp_async_wait<1>();
    __syncthreads();
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
        const Head& own = shared->own(turn);
        put_history(*shared, own);
        if (own.n_pending > 0) {
            fold_columns(s, own.n_pending, shared->pending, at);
            if (own.writes_state) store_state(s, own.matrix, at);
        }
        if (is_first) {
            // Every block waits, also one without columns: the kernels behind rely on this one ending after those before
            // it.
            grid_dependency_wait();
            stage_columns<false>(*shared, p, own, turn);
            __syncthreads();
        }
        prepare_columns(*shared, own, turn);
        __syncthreads();
        const bool has_next = RING && unit + step < n_units;
        if (has_next) {
            copy_old(*shared, p, shared->own(1 - turn));
            stage_columns<true>(*shared, p, shared->own(1 - turn), 1 - turn);
            cp_async_commit();
        }
        evaluate(s, *shared, own.n_columns, at);
        __syncthreads();
        put_out(*shared, p, own, turn);
        if (!has_next) return;
        cp_async_wait<0>();
        __syncthreads();
        take_state(s, shared->state, at);
        unit += step;
        if (unit + step < n_units) {
            __syncthreads();
            copy_state(shared->state, matrix_of(p, unit + step));
            cp_async_commit();
            if (thread == 0)
                shared->own(turn) = Head(p, p.rows[(unit + step) / VALUE_HEADS], unit + step);
        }
        turn = 1 - turn;
    }
}
