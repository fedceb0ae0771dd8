// Gated DeltaNet, one token at a time: the arithmetic that rounds (gdn_decode.cu) and flushes (gdn_fold.cu) share.
//   S <- alpha S;  u = beta (v - S k);  S <- S + u k^T;  o = S q          S[value][key], fp32, one head
// Every operation here is rounded by itself or an explicit fma, in an order that does not depend on the caller: the
// state after n columns has the same bits however they were cut into rounds.
//
// A block of 512 threads holds one head in registers. Lane (group = lane / 8, part = lane % 8) of a warp holds rows
// 8 warp + 2 group + {0, 1} at keys 32 i + 4 part + {0..3}, i = 0..3.
#pragma once

#include "common.cuh"
#include "round.cuh"

constexpr int GDN_DIM = 128;
constexpr int GDN_TAPS = 4;
constexpr int GDN_HISTORY = GDN_TAPS - 1;
constexpr float GDN_L2_EPS = 1e-6f;
constexpr float GDN_QUERY_SCALE = 0.088388347648318447f;  // 128^-0.5
constexpr int GDN_STEP_THREADS = 512;

// KEY_HEADS and VALUE_HEADS are the compiler's -D.
constexpr int GDN_RATIO = VALUE_HEADS / KEY_HEADS;
constexpr int GDN_KEY_WIDTH = KEY_HEADS * GDN_DIM;
constexpr int GDN_VALUE_WIDTH = VALUE_HEADS * GDN_DIM;
constexpr int GDN_CHANNELS = 2 * GDN_KEY_WIDTH + GDN_VALUE_WIDTH;
static_assert(VALUE_HEADS % KEY_HEADS == 0, "consecutive value heads share a key head");

// Never contracted into an fma.
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }

struct alignas(16) Float4 {
    float v[4];
};

// Four bf16 of one lane.
DEVICE void unpack_4(uint2 words, float (&x)[4]) {
    x[0] = bf16_lo(words.x), x[1] = bf16_hi(words.x), x[2] = bf16_lo(words.y), x[3] = bf16_hi(words.y);
}

DEVICE uint2 pack_4(const float (&x)[4]) { return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])}; }

DEVICE float dot_4(const float (&a)[4], const float (&b)[4]) {
    return fmaf(a[3], b[3], fmaf(a[2], b[2], fmaf(a[1], b[1], mul_rn(a[0], b[0]))));
}

// x / sqrt(sum x^2 + eps) of 128 numbers, four per lane of a warp.
DEVICE void l2_normalize(float (&x)[4]) {
    const float scale = rsqrt_approx(warp_sum(dot_4(x, x)) + GDN_L2_EPS);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = mul_rn(x[i], scale);
}

DEVICE float silu_fast(float x) { return x * rcp_approx(1.0f + exp2_approx(x * -1.44269504f)); }

// silu(sum_j taps[j] columns[j]) in bf16, of four channels; the last tap multiplies the current token. Both in shared
// memory, rows of `stride` channels.
DEVICE uint2 convolve_4(const uint16_t* columns, const uint16_t* taps, int stride) {
    float total[4] = {}, x[4], w[4];
#pragma unroll
    for (int j = 0; j < GDN_TAPS; ++j) {
        unpack_4(*reinterpret_cast<const uint2*>(columns + j * stride), x);
        unpack_4(*reinterpret_cast<const uint2*>(taps + j * stride), w);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] = fmaf(w[i], x[i], total[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = silu_fast(total[i]);
    return pack_4(total);
}

struct GdnGates {
    float alpha, beta;
};

// g = -exp(a_log) softplus(a + dt_bias), the logarithm of alpha.
DEVICE float gdn_log_decay(float a, float a_log, float dt_bias) {
    return -mul_rn(expf_precise(a_log), softplus(a + dt_bias));
}

// ---- one head in the registers of a block

struct GdnLane {
    int row, part;  // first of the lane's two rows; which keys

    DEVICE GdnLane() {
        const uint32_t lane = lane_id();
        row = static_cast<int>(threadIdx.x / WARP_LANES * 8 + lane / 8 * 2);
        part = static_cast<int>(lane % 8);
    }
    DEVICE int offset() const { return row * GDN_DIM + 4 * part; }
};

DEVICE void load_state(float (&s)[2][16], const float* head, GdnLane at) {
    head += at.offset();
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Float4 x = load_global<Float4>(head + r * GDN_DIM + 32 * i);
#pragma unroll
            for (int e = 0; e < 4; ++e) s[r][4 * i + e] = x.v[e];
        }
}

DEVICE void store_state(const float (&s)[2][16], float* head, GdnLane at) {
    head += at.offset();
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store_global(head + r * GDN_DIM + 32 * i,
                         Float4{{s[r][4 * i], s[r][4 * i + 1], s[r][4 * i + 2], s[r][4 * i + 3]}});
}

// S x of the lane's two rows, the same bits in the eight lanes of a group. x: 128 floats in shared memory.
DEVICE void state_times(const float (&s)[2][16], const float* x, GdnLane at, float (&sum)[2]) {
    x += 4 * at.part;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Float4 k = *reinterpret_cast<const Float4*>(x + 32 * i);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                sum[r] = i + e == 0 ? mul_rn(s[r][0], k.v[0]) : fmaf(s[r][4 * i + e], k.v[e], sum[r]);
    }
#pragma unroll
    for (int mask = 4; mask > 0; mask >>= 1)
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] += shfl_xor(sum[r], mask);
}

// u = beta (v - alpha S k): alpha is taken out of the product, so the state need not be decayed first.
DEVICE void correction(const float (&s)[2][16], const float* key, const float* value, GdnGates gates, GdnLane at,
                       float (&u)[2]) {
    float predicted[2];
    state_times(s, key, at, predicted);
#pragma unroll
    for (int r = 0; r < 2; ++r)
        u[r] = mul_rn(gates.beta, sub_rn(value[at.row + r], mul_rn(gates.alpha, predicted[r])));
}

// S <- alpha S + u k^T.
DEVICE void advance_state(float (&s)[2][16], const float* key, float alpha, const float (&u)[2], GdnLane at) {
    warp_sync();  // the key is read again: kept in registers since the product it would not fit
    key += 4 * at.part;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Float4 k = *reinterpret_cast<const Float4*>(key + 32 * i);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int r = 0; r < 2; ++r) s[r][4 * i + e] = fmaf(k.v[e], u[r], mul_rn(alpha, s[r][4 * i + e]));
    }
}

// ---- records: what a round leaves behind so that its columns can be folded into the state later

// One layer's part of one record buffer. window: bf16 [3 + columns][channels], the history before the round, then the
// projections; fp32: key [columns][key heads][128] normalised, correction u [columns][value heads][128], alpha
// [columns][value heads]. A fold repeats only S <- alpha S + u k^T, from the same numbers: the same bits.
class GdnRecord {
  public:
    DEVICE explicit GdnRecord(unsigned char* base) : base_(base) {}
    DEVICE uint16_t* window(int column) const { return reinterpret_cast<uint16_t*>(base_) + column * GDN_CHANNELS; }
    DEVICE float* key(int column, int key_head) const { return floats((column * KEY_HEADS + key_head) * GDN_DIM); }
    DEVICE float* correction(int column, int head) const {
        return floats(CORRECTION + (column * VALUE_HEADS + head) * GDN_DIM);
    }
    DEVICE float* alpha(int column, int head) const { return floats(ALPHA + column * VALUE_HEADS + head); }

  private:
    static constexpr int WINDOW = (GDN_HISTORY + MAX_COLUMNS) * GDN_CHANNELS * 2;  // bytes
    static constexpr int CORRECTION = MAX_COLUMNS * GDN_KEY_WIDTH;                  // floats behind the window
    static constexpr int ALPHA = CORRECTION + MAX_COLUMNS * GDN_VALUE_WIDTH;

    DEVICE float* floats(int index) const { return reinterpret_cast<float*>(base_ + WINDOW) + index; }

    unsigned char* base_;
};

DEVICE void put_4(float* shared, int lane, const float (&x)[4]) {
    *reinterpret_cast<Float4*>(shared + 4 * lane) = Float4{{x[0], x[1], x[2], x[3]}};
}

// One line of the head's 64 KB per thread: on its way while the record is copied.
DEVICE void prefetch_state(const float* head) { prefetch_l2(head + threadIdx.x * (GDN_DIM * GDN_DIM / GDN_STEP_THREADS)); }

// A head's part of a record in shared memory.
struct GdnPending {
    alignas(16) float key[MAX_COLUMNS][GDN_DIM], correction[MAX_COLUMNS][GDN_DIM];
    float alpha[MAX_COLUMNS];
};

DEVICE void load_pending(GdnPending& pending, const GdnRecord& record, int n_columns, int head) {
    constexpr int VECTORS = GDN_DIM / 4;
    static_assert(2 * MAX_COLUMNS * VECTORS <= GDN_STEP_THREADS, "a thread copies one vector");
    const int thread = static_cast<int>(threadIdx.x), c = thread / (2 * VECTORS), i = thread % VECTORS * 4;
    if (c >= n_columns) return;
    const bool is_key = thread / VECTORS % 2 == 0;
    const float* const source = is_key ? record.key(c, head / GDN_RATIO) : record.correction(c, head);
    *reinterpret_cast<Float4*>((is_key ? pending.key[c] : pending.correction[c]) + i) = load_global<Float4>(source + i);
    if (thread % (2 * VECTORS) == 0) pending.alpha[c] = *record.alpha(c, head);
}

// Fold columns that every thread sees in shared memory.
DEVICE void fold_columns(float (&s)[2][16], int n_columns, const GdnPending& pending, GdnLane at) {
#pragma unroll 1
    for (int c = 0; c < n_columns; ++c) {
        const float u[2] = {pending.correction[c][at.row], pending.correction[c][at.row + 1]};
        advance_state(s, pending.key[c], pending.alpha[c], u, at);
    }
}

// A head's channels: its value, and the query and key of its key head, which the first of the value heads that share
// it accounts for.
struct GdnChannels {
    int query, key, value;  // first channel of each part
    bool owns_key;

    DEVICE explicit GdnChannels(int head)
        : query(head / GDN_RATIO * GDN_DIM),
          key(GDN_KEY_WIDTH + query),
          value(2 * GDN_KEY_WIDTH + head * GDN_DIM),
          owns_key(head % GDN_RATIO == 0) {}

    DEVICE int first(int part) const { return part == 0 ? query : part == 1 ? key : value; }
    // Channel of the 8-channel vector `i` in 0..47 of [query | key | value].
    DEVICE int vector(int i) const { return first(i / 16) + i % 16 * 8; }
    DEVICE bool owns(int i) const { return i >= 32 || owns_key; }
};
constexpr int GDN_HEAD_VECTORS = 3 * GDN_DIM / 8;
