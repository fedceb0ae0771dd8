// Gated DeltaNet, one token at a time: the arithmetic that rounds (gdn_decode.cu) and flushes (gdn_fold.cu) share.
//   S <- alpha S;  u = beta (v - S k);  S <- S + u k^T;  o = S q          S[value][key], fp32, one head
// Every operation here is rounded by itself or an explicit fma, in an order that does not depend on the caller: the
// state after n columns has the same bits however they were cut into rounds.
//
// A block of 256 threads holds a head in registers, 64 numbers each: lane (group = lane / 8, part = lane % 8) of a warp has
// rows 16 warp + 4 group + {0..3} at keys 32 i + 4 part + {0..3}, i = 0..3.
#pragma once

#include "common.cuh"
#include "gdn.cuh"
#include "round.cuh"

constexpr int GDN_LANE_ROWS = 4, GDN_LANE_KEYS = 16;
static_assert(THREADS * GDN_LANE_ROWS * GDN_LANE_KEYS == GDN_DIM * GDN_DIM, "the block's registers hold the head");

using GdnRows = float[GDN_LANE_ROWS][GDN_LANE_KEYS];

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
    int row, part;  // first of the lane's rows; which keys

    DEVICE GdnLane() {
        const uint32_t lane = lane_id();
        row = static_cast<int>(threadIdx.x / WARP_LANES * 16 + lane / 8 * GDN_LANE_ROWS);
        part = static_cast<int>(lane % 8);
    }
    DEVICE int offset() const { return row * GDN_DIM + 4 * part; }
    // Which of its rows the lane answers for, as its neighbour does.
    DEVICE int own_row() const { return part / 2; }
};

DEVICE void load_state(GdnRows& s, const float* head, GdnLane at) {
    head += at.offset();
#pragma unroll
    for (int r = 0; r < GDN_LANE_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* const from = head + r * GDN_DIM + 32 * i;
            const uint4 x = HINTS >= 1 ? load_once_16(from) : load_16(from);
            s[r][4 * i] = __uint_as_float(x.x), s[r][4 * i + 1] = __uint_as_float(x.y);
            s[r][4 * i + 2] = __uint_as_float(x.z), s[r][4 * i + 3] = __uint_as_float(x.w);
        }
}

// A head that was copied into shared memory.
DEVICE void take_state(GdnRows& s, const float* shared, GdnLane at) {
    shared += at.offset();
#pragma unroll
    for (int r = 0; r < GDN_LANE_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Float4 x = *reinterpret_cast<const Float4*>(shared + r * GDN_DIM + 32 * i);
#pragma unroll
            for (int e = 0; e < 4; ++e) s[r][4 * i + e] = x.v[e];
        }
}

DEVICE void store_state(const GdnRows& s, float* head, GdnLane at) {
    head += at.offset();
#pragma unroll
    for (int r = 0; r < GDN_LANE_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float* const to = head + r * GDN_DIM + 32 * i;
            const uint4 x = {__float_as_uint(s[r][4 * i]), __float_as_uint(s[r][4 * i + 1]),
                             __float_as_uint(s[r][4 * i + 2]), __float_as_uint(s[r][4 * i + 3])};
            if (HINTS >= 2)
                store_once_16(to, x);
            else
                store_16(to, x);
        }
}

// The lane's keys of a vector of 128 numbers in shared memory.
DEVICE void load_keys(float (&k)[GDN_LANE_KEYS], const float* x, GdnLane at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Float4 four = *reinterpret_cast<const Float4*>(x + 32 * i + 4 * at.part);
#pragma unroll
        for (int e = 0; e < 4; ++e) k[4 * i + e] = four.v[e];
    }
}

// Lanes whose number has the bit keep `high` of the pair, the others `low`; what they do not keep goes to their partner.
// A mask chooses: of a condition the compiler makes branches, with the shuffle in both of them.
DEVICE float halved(float low, float high, int part, int bit) {
    const uint32_t is_high = (part & bit) != 0 ? 0xffffffffu : 0u, l = __float_as_uint(low), h = __float_as_uint(high);
    const float kept = __uint_as_float(lop3<0xca>(is_high, h, l)), given = __uint_as_float(lop3<0xca>(is_high, l, h));
    return kept + shfl_xor(given, bit);
}

// The lane's part of S x for each of its rows.
DEVICE void partial_products(float (&sum)[GDN_LANE_ROWS], const GdnRows& s, const float (&x)[GDN_LANE_KEYS]) {
#pragma unroll
    for (int j = 0; j < GDN_LANE_KEYS; ++j)
#pragma unroll
        for (int r = 0; r < GDN_LANE_ROWS; ++r) sum[r] = j == 0 ? mul_rn(s[r][0], x[0]) : fmaf(s[r][j], x[j], sum[r]);
}

// Their sum over the eight lanes, of the row that the lane answers for. A lane gives away half of the sums that it still
// has and adds what it gets to the other half.
DEVICE float product_of_row(const float (&sum)[GDN_LANE_ROWS], GdnLane at) {
    const float low = halved(sum[0], sum[2], at.part, 4), high = halved(sum[1], sum[3], at.part, 4);
    const float both = halved(low, high, at.part, 2);
    return both + shfl_xor(both, 1);
}

// S <- alpha S + u k^T; u: of the lane's rows.
DEVICE void advance_state(GdnRows& s, const float (&k)[GDN_LANE_KEYS], float alpha, const float (&u)[GDN_LANE_ROWS]) {
#pragma unroll
    for (int j = 0; j < GDN_LANE_KEYS; ++j)
#pragma unroll
        for (int r = 0; r < GDN_LANE_ROWS; ++r) s[r][j] = fmaf(k[j], u[r], mul_rn(alpha, s[r][j]));
}

// ---- records: what a round leaves behind so that its columns can be folded into the state later

// One layer's part of a slot's record. Two windows bf16 [3 + columns][channels]: the history before a round, then its
// projections. The log, a ring of LOG_COLUMNS columns in fp32: keys [columns][key heads][128] normalised, corrections u
// [columns][value heads][128], alpha [columns][value heads]. A fold repeats only S <- alpha S + u k^T, from the same
// numbers: the same bits, in this round or in a later one.
class GdnRecord {
  public:
    DEVICE explicit GdnRecord(unsigned char* base) : base_(base) {}
    DEVICE uint16_t* window(int buffer, int column) const {
        return reinterpret_cast<uint16_t*>(base_) + (buffer * WINDOW_LINES + column) * GDN_CHANNELS;
    }
    DEVICE float* key(int place, int key_head) const { return floats((place * KEY_HEADS + key_head) * GDN_DIM); }
    DEVICE float* correction(int place, int head) const {
        return floats(CORRECTION + (place * VALUE_HEADS + head) * GDN_DIM);
    }
    DEVICE float* alpha(int place, int head) const { return floats(ALPHA + place * VALUE_HEADS + head); }

  private:
    static constexpr int WINDOW_LINES = GDN_HISTORY + MAX_COLUMNS;
    static constexpr int WINDOWS = 2 * WINDOW_LINES * GDN_CHANNELS * 2;  // bytes
    static constexpr int CORRECTION = LOG_COLUMNS * GDN_KEY_WIDTH;        // floats behind the windows
    static constexpr int ALPHA = CORRECTION + LOG_COLUMNS * GDN_VALUE_WIDTH;

    DEVICE float* floats(int index) const { return reinterpret_cast<float*>(base_ + WINDOWS) + index; }

    unsigned char* base_;
};

// Column i of a range of the log that begins at `first`.
DEVICE int log_place(int first, int i) {
    const int place = first + i;
    return place < LOG_COLUMNS ? place : place - LOG_COLUMNS;
}

DEVICE void put_4(float* shared, int lane, const float (&x)[4]) {
    *reinterpret_cast<Float4*>(shared + 4 * lane) = Float4{{x[0], x[1], x[2], x[3]}};
}

// The head's 512 lines: on their way while the record is copied.
DEVICE void prefetch_state(const float* head) {
    deal<GDN_DIM * GDN_DIM / 32>([&](int i) { prefetch_l2(head + 32 * i); });
}

// A head's part of the log in shared memory.
struct GdnPending {
    alignas(16) float key[MOST_PENDING][GDN_DIM], correction[MOST_PENDING][GDN_DIM];
    float alpha[MOST_PENDING];
};

// Starts the copies; the caller waits for them.
DEVICE void copy_pending(GdnPending& pending, const GdnRecord& record, int first, int n_columns, int head) {
    constexpr int VECTORS = GDN_DIM / 4;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < 2 * VECTORS * n_columns; i += THREADS) {
        const int c = i / (2 * VECTORS), at = i % VECTORS * 4, place = log_place(first, c);
        if (i / VECTORS % 2 == 0)
            cp_async_16(pending.key[c] + at, record.key(place, head / GDN_RATIO) + at);
        else
            cp_async_16(pending.correction[c] + at, record.correction(place, head) + at);
        if (i % (2 * VECTORS) == 0) cp_async_4(&pending.alpha[c], record.alpha(place, head));
    }
}

// Fold columns that every thread sees in shared memory.
DEVICE void fold_columns(GdnRows& s, int n_columns, const GdnPending& pending, GdnLane at) {
#pragma unroll 1
    for (int c = 0; c < n_columns; ++c) {
        float k[GDN_LANE_KEYS];
        load_keys(k, pending.key[c], at);
        const Float4 u = *reinterpret_cast<const Float4*>(&pending.correction[c][at.row]);
        advance_state(s, k, pending.alpha[c], u.v);
    }
}
