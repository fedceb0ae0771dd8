// Gated DeltaNet of one round: fold what is pending into the state, then evaluate this round's columns without writing it.
//   c_t = silu(sum_j taps[j] p_{t-3+j}) of q, k, v;  S <- alpha S;  u = beta (v - S k);  S <- S + u k^T;  o = S q
//   out = rms(o) w silu(z)
// qk [T][2 KEY_HEADS 128] (q | k), vz [T][2 VALUE_HEADS 128] (v | z), taps [4][channels], norm [128], out [T][value
// width]: bf16; a, b [T][VALUE_HEADS], a_log, dt_bias [VALUE_HEADS]: fp32. Column i of row b is line n_columns b + i; out is
// zero in lines of columns that are not evaluated.
// State S fp32 [slot][value head][value 128][key 128], history bf16 [slot][3][channels], records: gdn_step.cuh. All pointers
// and strides are multiples of 16 bytes. Grid: (VALUE_HEADS, rows), 512 / PASSES threads: with two
// passes more heads are under way at a time, each reads half of its state a second time, from L2.
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
    unsigned char* record;   // likewise, buffer 0
    uint16_t* out;
    uint64_t state_slot_stride;  // bytes
    uint64_t record_slot_stride;
    uint64_t record_buffer_stride;
    int qk_stride;  // elements
    int vz_stride;
    int gate_stride;
    int out_stride;
    int n_columns;  // lines per row
    float norm_eps;
};

namespace {

constexpr int WARPS = THREADS / WARP_LANES;
static_assert(MAX_COLUMNS >= 1 && MAX_COLUMNS <= WARPS, "a warp writes a column of the result");
constexpr int PART_VECTORS = GDN_DIM / 8, LINE_VECTORS = 4 * PART_VECTORS;  // of 16 bytes: [query | key | value | z]

// Rows of 384 channels are [query | key | value] of the head.
struct Shared {
    union {
        GdnPending pending;  // until it is folded
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
    int head;
};
static_assert(sizeof(Shared) <= BLOCK_SHARED, "dynamic shared memory of the launch");

// Addresses are made from the row again wherever they are needed: 64 registers hold no more than the step.
DEVICE GdnRecord record_of(const GdnDecodeParams& p, int buffer) {
    return GdnRecord(p.record + p.rows[blockIdx.y].slot * p.record_slot_stride + buffer * p.record_buffer_stride);
}

DEVICE float* matrix_of(const GdnDecodeParams& p) {
    unsigned char* const slot = p.state + p.rows[blockIdx.y].slot * p.state_slot_stride;
    return reinterpret_cast<float*>(slot) + blockIdx.x * GDN_DIM * GDN_DIM;
}

// History and taps of the head's channels into shared memory, the history also to where it belongs from now on.
DEVICE void stage_history(Shared& shared, const GdnDecodeParams& p, int slot, int pending) {
    const int row = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
    const GdnChannels channels(static_cast<int>(blockIdx.x));
    // The history that this round continues: after a fold the columns behind the folded ones, which no block writes.
    uint16_t* const own_history = reinterpret_cast<uint16_t*>(p.history + slot * p.state_slot_stride);
    deal<(GDN_HISTORY + GDN_TAPS) * GDN_HEAD_VECTORS>([&](int i) {
        const int j = i / GDN_HEAD_VECTORS, vector = i % GDN_HEAD_VECTORS, channel = channels.vector(vector);
        const uint16_t* source = p.taps + (j - GDN_HISTORY) * GDN_CHANNELS;
        if (j < GDN_HISTORY)
            source = (pending > 0 ? record_of(p, p.rows[row].fold_buffer).window(pending) : own_history) + j * GDN_CHANNELS;
        const uint4 words = load_16(source + channel);
        if (j < GDN_HISTORY && channels.owns(vector)) {
            if (pending > 0) store_16(own_history + j * GDN_CHANNELS + channel, words);
            if (p.rows[row].n_columns > 0) store_16(record_of(p, p.rows[row].record_buffer).window(j) + channel, words);
        }
        *reinterpret_cast<uint4*>((j < GDN_HISTORY ? shared.window[j] : shared.taps[j - GDN_HISTORY]) + 8 * vector) = words;
    });
    if (thread < GDN_DIM / 8) *reinterpret_cast<uint4*>(&shared.norm[8 * thread]) = load_16(p.norm + 8 * thread);
}

// This round's projections into shared memory and into the record; the last warp computes the gates, a lane per column.
DEVICE void stage_columns(Shared& shared, const GdnDecodeParams& p, int n_columns, const GdnChannels& channels) {
    const int line = static_cast<int>(blockIdx.y) * p.n_columns, head = shared.head;
    const GdnRecord record = record_of(p, p.rows[blockIdx.y].record_buffer);
    deal<MAX_COLUMNS * LINE_VECTORS>([&](int i) {
        const int c = i / LINE_VECTORS, vector = i % LINE_VECTORS;
        if (c >= n_columns) return;
        const int part = vector / PART_VECTORS, within = 8 * (vector % PART_VECTORS);
        const uint16_t* source = part < 2 ? p.qk + static_cast<int64_t>(line + c) * p.qk_stride + channels.first(part)
                                          : p.vz + static_cast<int64_t>(line + c) * p.vz_stride +
                                                (part - 2) * GDN_VALUE_WIDTH + head * GDN_DIM;
        const uint4 words = load_16(source + within);
        if (part == 3) {
            *reinterpret_cast<uint4*>(&shared.z[c][within]) = words;
        } else {
            *reinterpret_cast<uint4*>(&shared.window[GDN_HISTORY + c][8 * vector]) = words;
            if (channels.owns(vector)) store_16(record.window(GDN_HISTORY + c) + channels.first(part) + within, words);
        }
    });
    const int own = static_cast<int>(threadIdx.x) - (THREADS - WARP_LANES);
    if (own >= 0 && own < n_columns) {
        const int at = (line + own) * p.gate_stride + head;
        const float log_decay = gdn_log_decay(p.a[at], p.a_log[head], p.dt_bias[head]);
        const GdnGates gates = {expf_precise(log_decay), sigmoid(p.b[at])};
        shared.columns.gates[own] = gates;
        *record.alpha(own, head) = gates.alpha;
    }
}

// Four channels per lane of a column's query (part 0), key (1) or value (2), after convolution and silu.
DEVICE void convolved(float (&x)[4], const Shared& shared, int c, int part) {
    const int channel = part * GDN_DIM + 4 * static_cast<int>(lane_id());
    unpack_4(convolve_4(&shared.window[c][channel], &shared.taps[0][channel], 3 * GDN_DIM), x);
}

// One warp: a column's query and its product with the key (part 0), its key (1) or its value (2).
DEVICE void prepare_column(Shared& shared, const GdnDecodeParams& p, int c, int part, const GdnChannels& channels) {
    const int lane = static_cast<int>(lane_id());
    float x[4], key[4];
    convolved(x, shared, c, part);
    if (part == 2) {
        put_4(shared.columns.value[c], lane, x);
        return;
    }
    if (part == 1) {
        l2_normalize(x);
        put_4(shared.columns.key[c], lane, x);
        if (channels.owns_key) {
            float* const recorded = record_of(p, p.rows[blockIdx.y].record_buffer).key(c, shared.head / GDN_RATIO);
            store_global(recorded + 4 * lane, Float4{{x[0], x[1], x[2], x[3]}});
        }
        return;
    }
    convolved(key, shared, c, 1);
    const float product = warp_sum(dot_4(key, x)), key_square = warp_sum(dot_4(key, key));
    const float scale = mul_rn(l2_normalize(x), GDN_QUERY_SCALE);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = mul_rn(x[i], GDN_QUERY_SCALE);
    put_4(shared.columns.query[c], lane, x);
    if (lane == 0) shared.columns.key_query[c] = mul_rn(product, mul_rn(scale, rsqrt_approx(key_square + GDN_L2_EPS)));
}

// Outputs and corrections of the rows in registers, column after column.
DEVICE void evaluate(float (&s)[2][16], Shared& shared, int n_columns, int pass, GdnLane at) {
    const int row = pass * GDN_PASS_ROWS + at.row;
#pragma unroll 1
    for (int c = 0; c < n_columns; ++c) {
        const GdnGates gates = shared.columns.gates[c];
        float u[2], decayed[2];
        correction(s, shared.columns.key[c], &shared.columns.value[c][row], gates, at, u);
        state_times(s, shared.columns.query[c], at, decayed);
        // o = alpha S q + (k . q) u: the last column needs no new state.
        if (at.part == 0) {
            const float key_query = shared.columns.key_query[c];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                shared.correction[c][row + r] = u[r];
                shared.out[c][row + r] = fmaf(key_query, u[r], mul_rn(gates.alpha, decayed[r]));
            }
        }
        if (c + 1 < n_columns) advance_state(s, shared.columns.key[c], gates.alpha, u, at);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gdn_decode(const __grid_constant__ GdnDecodeParams p) {
    DYNAMIC_SHARED(Shared, shared);
    grid_dependency_launch();
    const int row = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
    if (thread == 0) shared->head = static_cast<int>(blockIdx.x);
    const int slot = p.rows[row].slot, pending = p.rows[row].fold_columns;
    const GdnLane at;
    prefetch_state(matrix_of(p));

    stage_history(*shared, p, slot, pending);
    if (pending > 0)
        load_pending(shared->pending, record_of(p, p.rows[row].fold_buffer), pending, static_cast<int>(blockIdx.x));
    __syncthreads();
    float s[2][16];
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
        load_state(s, matrix_of(p), pass, at);
        if (pending > 0) {
            fold_columns(s, pending, shared->pending, pass, at);
            store_state(s, matrix_of(p), pass, at);
        }
    }
    __syncthreads();
    // What follows is derived anew, from shared memory: 64 registers hold no more than the step.
    const int head = shared->head, n_columns = p.rows[row].n_columns;
    const int lane = static_cast<int>(lane_id()), warp = warp_index();
    const GdnChannels channels(head);

    // Every block waits, also one without columns: the kernels behind rely on this one ending after those before it.
    grid_dependency_wait();
    if (n_columns > 0) stage_columns(*shared, p, n_columns, channels);
    __syncthreads();
#pragma unroll 1
    for (int task = warp; task < 3 * n_columns; task += WARPS) prepare_column(*shared, p, task / 3, task % 3, channels);
    __syncthreads();

    // The rows of the last pass are still in registers.
#pragma unroll 1
    for (int pass = PASSES - 1; pass >= 0; --pass) {
        if (pass < PASSES - 1) load_state(s, matrix_of(p), pass, at);
        evaluate(s, *shared, n_columns, pass, at);
    }
    __syncthreads();

    if (warp >= p.n_columns) return;
    uint16_t* const out = p.out + static_cast<int64_t>(row * p.n_columns + warp) * p.out_stride + head * GDN_DIM + 4 * lane;
    if (warp >= n_columns) {
        store_8(out, uint2{0, 0});
        return;
    }
    float* const recorded = record_of(p, p.rows[row].record_buffer).correction(warp, head) + 4 * lane;
    store_global(recorded, *reinterpret_cast<const Float4*>(&shared->correction[warp][4 * lane]));
    float w[4], z[4], y[4];
    unpack_4(*reinterpret_cast<const uint2*>(&shared->norm[4 * lane]), w);
    unpack_4(*reinterpret_cast<const uint2*>(&shared->z[warp][4 * lane]), z);
    const Float4 o = *reinterpret_cast<const Float4*>(&shared->out[warp][4 * lane]);
    const float scale = rsqrt_approx(warp_sum(dot_4(o.v, o.v)) * (1.0f / GDN_DIM) + p.norm_eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = o.v[i] * scale * w[i] * silu_fast(z[i]);
    store_8(out, pack_4(y));
}
