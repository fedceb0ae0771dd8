// Gated DeltaNet, one token at a time: the arithmetic that rounds (gdn_decode.cu) and flushes (gdn_fold.cu) share.
//   S <- alpha S;  u = beta (v - S k);  S <- S + u k^T;  o = S q          S[value][key], fp32, one head
// Every operation here is rounded by itself or an explicit fma, in an order that does not depend on the caller: the
// state after n columns has the same bits however they were cut into rounds.
//
// A block of 512 / PASSES threads holds 128 / PASSES rows of a head in registers. Lane (group = lane / 8, part = lane % 8)
// of a warp holds rows 8 warp + 2 group + {0, 1} of them at keys 32 i + 4 part + {0..3}, i = 0..3.
#pragma once

#include "common.cuh"
#include "gdn.cuh"
#include "round.cuh"

constexpr int GDN_PASS_ROWS = GDN_DIM / PASSES;
static_assert(THREADS == 4 * GDN_PASS_ROWS, "four threads hold a row");

// f(i) for i < N, dealt to the threads of the block.
template <int N, typename Function>
DEVICE void deal(Function f) {
#pragma unroll
    for (int round = 0; round < ceil_div(N, THREADS); ++round) {
        const int i = static_cast<int>(threadIdx.x) + round * THREADS;
        if (N % THREADS == 0 || i < N) f(i);
    }
}

struct GdnLane {
    int row, part;  // first of the lane's two rows in a pass; which keys

    DEVICE GdnLane() {
        const uint32_t lane = lane_id();
        row = static_cast<int>(threadIdx.x / WARP_LANES * 8 + lane / 8 * 2);
        part = static_cast<int>(lane % 8);
    }
    DEVICE int offset() const { return row * GDN_DIM + 4 * part; }
};

DEVICE void load_state(float (&s)[2][16], const float* head, int pass, GdnLane at) {
    head += at.offset() + pass * GDN_PASS_ROWS * GDN_DIM;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Float4 x = load_global<Float4>(head + r * GDN_DIM + 32 * i);
#pragma unroll
            for (int e = 0; e < 4; ++e) s[r][4 * i + e] = x.v[e];
        }
}

DEVICE void store_state(const float (&s)[2][16], float* head, int pass, GdnLane at) {
    head += at.offset() + pass * GDN_PASS_ROWS * GDN_DIM;
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

// u = beta (v - alpha S k): alpha is taken out of the product, so the state need not be decayed first. value: of the rows.
DEVICE void correction(const float (&s)[2][16], const float* key, const float* value, GdnGates gates, GdnLane at,
                       float (&u)[2]) {
    float predicted[2];
    state_times(s, key, at, predicted);
#pragma unroll
    for (int r = 0; r < 2; ++r)
        u[r] = mul_rn(gates.beta, sub_rn(value[r], mul_rn(gates.alpha, predicted[r])));
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

// The head's 512 lines: on their way while the record is copied.
DEVICE void prefetch_state(const float* head) {
    deal<GDN_DIM * GDN_DIM / 32>([&](int i) { prefetch_l2(head + 32 * i); });
}

// A head's part of a record in shared memory.
struct GdnPending {
    alignas(16) float key[MAX_COLUMNS][GDN_DIM], correction[MAX_COLUMNS][GDN_DIM];
    float alpha[MAX_COLUMNS];
};

DEVICE void load_pending(GdnPending& pending, const GdnRecord& record, int n_columns, int head) {
    constexpr int VECTORS = GDN_DIM / 4;
    deal<2 * MAX_COLUMNS * VECTORS>([&](int i) {
        const int c = i / (2 * VECTORS), at = i % VECTORS * 4;
        if (c >= n_columns) return;
        const bool is_key = i / VECTORS % 2 == 0;
        const float* const source = is_key ? record.key(c, head / GDN_RATIO) : record.correction(c, head);
        *reinterpret_cast<Float4*>((is_key ? pending.key[c] : pending.correction[c]) + at) = load_global<Float4>(source + at);
        if (i % (2 * VECTORS) == 0) pending.alpha[c] = *record.alpha(c, head);
    });
}

// Fold columns that every thread sees in shared memory.
DEVICE void fold_columns(float (&s)[2][16], int n_columns, const GdnPending& pending, int pass, GdnLane at) {
    const int row = pass * GDN_PASS_ROWS + at.row;
#pragma unroll 1
    for (int c = 0; c < n_columns; ++c) {
        const float u[2] = {pending.correction[c][row], pending.correction[c][row + 1]};
        advance_state(s, pending.key[c], pending.alpha[c], u, at);
    }
}
