// Gated DeltaNet of one round: fold what is pending into the state, then evaluate this round's columns without writing it.
//   c_t = silu(sum_j taps[j] p_{t-3+j}) of q, k, v;  S <- alpha S;  u = beta (v - S k);  S <- S + u k^T;  o = S q
//   out = rms(o) w silu(z)
// qk [T][2 KEY_HEADS 128] (q | k), vz [T][2 VALUE_HEADS 128] (v | z), taps [4][channels], norm [128], out [T][value
// width]: bf16; a, b [T][VALUE_HEADS], a_log, dt_bias [VALUE_HEADS]: fp32. Column i of row b is line n_columns b + i; out is
// zero in lines of columns that are not evaluated.
// State S fp32 [slot][value head][value 128][key 128], history bf16 [slot][3][channels], records: gdn_step.cuh. All pointers
// and strides are multiples of 16 bytes. Grid: (VALUE_HEADS, rows), 256 threads: a block holds a head in registers. Blocks that
// find all SMs full have their state brought into L2 by those that run before them.
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
    int n_columns;  // lines per row
    int n_ahead;    // blocks that run at a time; 0: states are not fetched ahead
    float norm_eps;
};

namespace {

constexpr int WARPS = THREADS / WARP_LANES;
static_assert(MAX_COLUMNS >= 1 && MAX_COLUMNS <= WARPS, "a warp writes a column of the result");
constexpr int PART_VECTORS = GDN_DIM / 8, LINE_VECTORS = 4 * PART_VECTORS;  // of 16 bytes: [query | key | value | z]

// Rows of 384 channels are [query | key | value] of the head.
struct Shared {
    union {
        GdnPending pending;  // until the state in registers has them
        struct {
            alignas(16) float query[MAX_COLUMNS][GDN_DIM], key[MAX_COLUMNS][GDN_DIM], value[MAX_COLUMNS][GDN_DIM];
            GdnGates gates[MAX_COLUMNS];
            float key_query[MAX_COLUMNS];
        } columns;
    };
    alignas(16) float out[MAX_COLUMNS][GDN_DIM], correction[MAX_COLUMNS][GDN_DIM];
    alignas(16) uint16_t taps[GDN_TAPS][3 * GDN_DIM];
    uint16_t window[GDN_HISTORY + MAX_COLUMNS][3 * GDN_DIM];  // history, then this round's projections
    uint16_t z[MAX_COLUMNS][GDN_DIM];
    uint16_t norm[GDN_DIM];
};
static_assert(sizeof(Shared) <= BLOCK_SHARED, "dynamic shared memory of the launch");

// What the row says of the block's head.
struct Head {
    int row, head, n_columns;
    int n_pending, log_first, log_record;
    bool writes_state;
    float* matrix;
    uint16_t* history;
    GdnRecord record;
    const uint16_t* pending_window;  // behind the folded columns
    uint16_t* window;

    DEVICE Head(const GdnDecodeParams& p, const RowState& state)
        : row(static_cast<int>(blockIdx.y)),
          head(static_cast<int>(blockIdx.x)),
          n_columns(state.n_columns),
          n_pending(state.carried + state.fold_columns),
          log_first(state.log_first),
          log_record(state.log_record),
          writes_state(n_pending > 0 && state.keeps_state == 0),
          matrix(reinterpret_cast<float*>(p.state + state.slot * p.state_slot_stride) + head * GDN_DIM * GDN_DIM),
          history(reinterpret_cast<uint16_t*>(p.history + state.slot * p.state_slot_stride)),
          record(p.record + state.slot * p.record_slot_stride),
          pending_window(record.window(state.fold_buffer, state.fold_columns)),
          window(record.window(state.record_buffer, 0)) {}

    DEVICE int place(int column) const { return log_place(log_record, column); }
};

// The state of the block that takes the place of one that runs now.
DEVICE void fetch_ahead(const GdnDecodeParams& p) {
    const int block = block_index() + p.n_ahead, row = block / VALUE_HEADS;
    if (p.n_ahead == 0 || row >= static_cast<int>(gridDim.y)) return;
    const unsigned char* const slot = p.state + p.rows[row].slot * p.state_slot_stride;
    prefetch_state(reinterpret_cast<const float*>(slot) + block % VALUE_HEADS * GDN_DIM * GDN_DIM);
}

// Starts the copies of what is older than the round: the head's history, taps, norm and pending columns.
DEVICE void copy_old(Shared& shared, const GdnDecodeParams& p, const Head& own, const GdnChannels& channels) {
    // The history that this round continues: after a fold the columns behind the folded ones, which no block writes.
    const uint16_t* const history = own.n_pending > 0 ? own.pending_window : own.history;
    copy_pending(shared.pending, own.record, own.log_first, own.n_pending, own.head);
    deal<(GDN_HISTORY + GDN_TAPS) * GDN_HEAD_VECTORS>([&](int i) {
        const int j = i / GDN_HEAD_VECTORS, vector = i % GDN_HEAD_VECTORS, k = j - GDN_HISTORY;
        const uint16_t* const source = j < GDN_HISTORY ? history + j * GDN_CHANNELS : p.taps + k * GDN_CHANNELS;
        cp_async_16((j < GDN_HISTORY ? shared.window[j] : shared.taps[k]) + 8 * vector, source + channels.vector(vector));
    });
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < PART_VECTORS) cp_async_16(&shared.norm[8 * thread], p.norm + 8 * thread);
    cp_async_commit();
}

// The history to where it belongs from now on.
DEVICE void put_history(const Shared& shared, const Head& own, const GdnChannels& channels) {
    deal<GDN_HISTORY * GDN_HEAD_VECTORS>([&](int i) {
        const int j = i / GDN_HEAD_VECTORS, vector = i % GDN_HEAD_VECTORS, at = j * GDN_CHANNELS + channels.vector(vector);
        if (!channels.owns(vector)) return;
        const uint4 words = *reinterpret_cast<const uint4*>(&shared.window[j][8 * vector]);
        if (own.writes_state) store_16(own.history + at, words);
        if (own.n_columns > 0) store_16(own.window + at, words);
    });
}

// This round's projections into shared memory; the last warp computes the gates, a lane per column.
DEVICE void stage_columns(Shared& shared, const GdnDecodeParams& p, const Head& own, const GdnChannels& channels,
                          float decay_rate, float dt_bias) {
    const int line = own.row * p.n_columns, c_gate = static_cast<int>(threadIdx.x) - (THREADS - WARP_LANES);
    const bool has_gates = c_gate >= 0 && c_gate < own.n_columns;
    const int gate = has_gates ? (line + c_gate) * p.gate_stride + own.head : 0;
    const float a = has_gates ? p.a[gate] : 0.0f, b = has_gates ? p.b[gate] : 0.0f;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < own.n_columns * LINE_VECTORS; i += THREADS) {
        const int c = i / LINE_VECTORS, vector = i % LINE_VECTORS;
        const int part = vector / PART_VECTORS, within = 8 * (vector % PART_VECTORS);
        const uint16_t* const qk = p.qk + static_cast<int64_t>(line + c) * p.qk_stride + channels.first(part & 1);
        const uint16_t* const vz = p.vz + static_cast<int64_t>(line + c) * p.vz_stride + own.head * GDN_DIM;
        uint16_t* const window = &shared.window[GDN_HISTORY + c][8 * vector];
        cp_async_16(part == 3 ? &shared.z[c][within] : window,
                    (part < 2 ? qk : vz + (part - 2) * GDN_VALUE_WIDTH) + within);
    }
    cp_async_commit();
    if (has_gates) {
        const GdnGates gates = {expf_precise(-mul_rn(decay_rate, softplus(a + dt_bias))), sigmoid(b)};
        shared.columns.gates[c_gate] = gates;
        *own.record.alpha(own.place(c_gate), own.head) = gates.alpha;
    }
    cp_async_wait<0>();
}

DEVICE void record_columns(const Shared& shared, const Head& own, const GdnChannels& channels) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < own.n_columns * GDN_HEAD_VECTORS; i += THREADS) {
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

// One warp: a column's query, key and their product, or its value.
DEVICE void prepare_column(Shared& shared, const Head& own, int c, bool is_value, const GdnChannels& channels) {
    const int lane = static_cast<int>(lane_id());
    float x[4], key[4];
    if (is_value) {
        convolved(x, shared, c, 2);
        put_4(shared.columns.value[c], lane, x);
        return;
    }
    convolved(x, shared, c, 0);
    convolved(key, shared, c, 1);
    const float product = warp_sum(dot_4(key, x));
    const float scale = mul_rn(l2_normalize(x), GDN_QUERY_SCALE), key_scale = l2_normalize(key);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = mul_rn(x[i], GDN_QUERY_SCALE);
    put_4(shared.columns.query[c], lane, x);
    put_4(shared.columns.key[c], lane, key);
    if (channels.owns_key)
        store_global(own.record.key(own.place(c), own.head / GDN_RATIO) + 4 * lane, Float4{{key[0], key[1], key[2], key[3]}});
    if (lane == 0) shared.columns.key_query[c] = mul_rn(product, mul_rn(scale, key_scale));
}

// Outputs and corrections, column after column.
DEVICE void evaluate(GdnRows& s, Shared& shared, int n_columns, GdnLane at) {
    const int row = at.row + at.part % GDN_LANE_ROWS;
    const bool has_output = at.part >= GDN_LANE_ROWS;
#pragma unroll 1
    for (int c = 0; c < n_columns; ++c) {
        const GdnGates gates = shared.columns.gates[c];
        float k[GDN_LANE_KEYS];
        load_keys(k, shared.columns.key[c], at);
        const float decayed = mul_rn(gates.alpha, state_products(s, k, shared.columns.query[c], at));
        // u = beta (v - alpha S k), o = alpha S q + (k . q) u: alpha is taken out of the products, so the state need not be
        // decayed first, and the last column needs no new state.
        const float u = mul_rn(gates.beta, sub_rn(shared.columns.value[c][row], decayed));
        const float u_of_row = shfl_xor(u, GDN_LANE_ROWS);
        if (has_output)
            shared.out[c][row] = fmaf(shared.columns.key_query[c], u_of_row, decayed);
        else
            shared.correction[c][row] = u;
        warp_sync();
        if (c + 1 < n_columns) advance_state(s, k, gates.alpha, &shared.correction[c][at.row]);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gdn_decode(const __grid_constant__ GdnDecodeParams p) {
    DYNAMIC_SHARED(Shared, shared);
    grid_dependency_launch();
    const Head own(p, p.rows[blockIdx.y]);
    const GdnChannels channels(own.head);
    const GdnLane at;
    copy_old(*shared, p, own, channels);
    GdnRows s;
    load_state(s, own.matrix, at);
    fetch_ahead(p);
    const float decay_rate = expf_precise(p.a_log[own.head]), dt_bias = p.dt_bias[own.head];
    cp_async_wait<0>();
    __syncthreads();
    put_history(*shared, own, channels);
    if (own.n_pending > 0) {
        fold_columns(s, own.n_pending, shared->pending, at);
        if (own.writes_state) store_state(s, own.matrix, at);
        __syncthreads();
    }

    // Every block waits, also one without columns: the kernels behind rely on this one ending after those before it.
    grid_dependency_wait();
    const int lane = static_cast<int>(lane_id()), warp = warp_index(), n_columns = own.n_columns;
    if (n_columns > 0) stage_columns(*shared, p, own, channels, decay_rate, dt_bias);
    __syncthreads();
#pragma unroll 1
    for (int task = warp; task < 2 * n_columns; task += WARPS) prepare_column(*shared, own, task / 2, task % 2 == 1, channels);
    record_columns(*shared, own, channels);
    __syncthreads();
    evaluate(s, *shared, n_columns, at);
    __syncthreads();

    if (warp >= p.n_columns) return;
    const int64_t line = own.row * p.n_columns + warp;
    uint16_t* const out = p.out + line * p.out_stride + own.head * GDN_DIM + 4 * lane;
    if (warp >= n_columns) {
        store_8(out, uint2{0, 0});
        return;
    }
    float w[4], z[4], y[4];
    unpack_4(*reinterpret_cast<const uint2*>(&shared->norm[4 * lane]), w);
    unpack_4(*reinterpret_cast<const uint2*>(&shared->z[warp][4 * lane]), z);
    const Float4 o = *reinterpret_cast<const Float4*>(&shared->out[warp][4 * lane]);
    const float scale = rsqrt_approx(warp_sum(dot_4(o.v, o.v)) * (1.0f / GDN_DIM) + p.norm_eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = o.v[i] * scale * w[i] * silu_fast(z[i]);
    store_8(out, pack_4(y));
    store_global(own.record.correction(own.place(warp), own.head) + 4 * lane,
                 *reinterpret_cast<const Float4*>(&shared->correction[warp][4 * lane]));
}
