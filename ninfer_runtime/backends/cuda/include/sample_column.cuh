// One column of a round as the sampler sees it: raw logits, and what bias, penalties and mask make of them.
#pragma once

DEVICE float infinite() { return __uint_as_float(0x7f800000u); }

constexpr int NO_ID = 0x7fffffff;
constexpr int SEGMENT = 4 * WARP_LANES;  // ids that a warp loads at once, four per lane

// counts, mask: null where they do not apply. drafts: the inputs after column 0 that lead to this column; when the
// column counts at all, each was drawn by the column before it, so it is one more occurrence.
struct Column {
    const float* logits;
    const int* counts;
    const uint32_t* mask;
    const BiasEntry* bias;
    const int* drafts;
    double presence;
    double frequency;
    int n_bias;
    int n_drafts;
    int n_ids;

    DEVICE bool is_raw() const { return counts == nullptr && mask == nullptr && n_bias == 0; }
};

// Larger value first, lower id first on ties.
DEVICE bool comes_before(double value, int id, double other, int other_id) {
    return value > other || (value == other && id < other_id);
}

// Order-preserving bits of a float that is not NaN; both zeros have the same.
DEVICE uint32_t key_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits ^ (bits & 0x80000000u ? 0xffffffffu : 0x80000000u);
}

DEVICE float value_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Four logits from `id` on (a multiple of 4), -inf behind the last id.
DEVICE void load_logits(const float* logits, int id, int n_ids, float (&raw)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = -infinite();
#if VECTOR_LOADS
    if (id < n_ids) {
        const uint4 words = load_16(logits + id);
        raw[0] = __uint_as_float(words.x);
        raw[1] = __uint_as_float(words.y);
        raw[2] = __uint_as_float(words.z);
        raw[3] = __uint_as_float(words.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (id + i >= n_ids) raw[i] = -infinite();
#else
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (id + i < n_ids) raw[i] = logits[id + i];
#endif
}

// First bias entry whose id is at least `id`; the warp probes 32 places at once.
DEVICE int first_bias(const Column& column, int id) {
    int begin = 0, n = column.n_bias;
    while (n > 0) {
        const int step = ceil_div(n, WARP_LANES), at = static_cast<int>(lane_id()) * step;
        const int n_below = __popc(ballot(at < n && column.bias[begin + at].token_id < id));
        if (n_below == 0) return begin;
        begin += (n_below - 1) * step + 1;
        n = minimum(step - 1, n - (n_below - 1) * step - 1);
    }
    return begin;
}

// Bias, penalties, mask, in this order; float64 as in the reference. Bias entries from `first_entry` on may apply, those
// for ids from `end` on do not.
DEVICE void adjust(const Column& column, int id, int first_entry, int end, const float (&raw)[4], double (&value)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = static_cast<double>(raw[i]);
    if (id >= column.n_ids) return;
    for (int entry = first_entry; entry < column.n_bias; ++entry) {
        const BiasEntry bias = column.bias[entry];
        if (bias.token_id >= end) break;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (bias.token_id == id + i) value[i] += bias.value;
    }
    if (column.counts != nullptr) {
        const uint4 stored = load_16(column.counts + id);
        int seen[4] = {static_cast<int>(stored.x), static_cast<int>(stored.y), static_cast<int>(stored.z),
                       static_cast<int>(stored.w)};
        for (int draft = 0; draft < column.n_drafts; ++draft) {
            const int token = column.drafts[draft];
#pragma unroll
            for (int i = 0; i < 4; ++i) seen[i] += token == id + i;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (seen[i] != 0) value[i] -= column.presence + column.frequency * seen[i];
    }
    if (column.mask != nullptr) {
        const uint32_t allowed = column.mask[id / 32] >> (id % 32);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if ((allowed >> i & 1u) == 0) value[i] = -static_cast<double>(infinite());
    }
}

// Calls visit(id, near, value) for every segment of N chunks, `stride` apart, warp-wide: the lane's four ids from `id`
// on, as float32 (rounded where adjusted) and as float64. N chunks of raw logits are loaded at once.
template <int N, typename Visit>
DEVICE void for_chunks(const Column& column, int first_chunk, int stride, int n_chunks, Visit visit) {
    constexpr int SEGMENTS = CHUNK / SEGMENT;
    const int lane = 4 * static_cast<int>(lane_id());
    if (column.is_raw()) {
        float near[N][SEGMENTS][4];
#pragma unroll
        for (int c = 0; c < N; ++c)
#pragma unroll
            for (int s = 0; s < SEGMENTS; ++s) {
                const int id = (first_chunk + c * stride) * CHUNK + s * SEGMENT + lane;
                load_logits(column.logits, id, column.n_ids, near[c][s]);
            }
#pragma unroll
        for (int c = 0; c < N; ++c)
#pragma unroll
            for (int s = 0; s < SEGMENTS; ++s) {
                const float(&here)[4] = near[c][s];
                const int id = (first_chunk + c * stride) * CHUNK + s * SEGMENT + lane;
                double value[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) value[i] = static_cast<double>(here[i]);
                visit(id, here, value);
            }
        return;
    }
#pragma unroll 1
    for (int chunk = first_chunk; chunk < minimum(first_chunk + N * stride, n_chunks); chunk += stride) {
        const int first_entry = column.n_bias > 0 ? first_bias(column, chunk * CHUNK) : 0;
#pragma unroll 1
        for (int s = 0; s < SEGMENTS; ++s) {
            const int id = chunk * CHUNK + s * SEGMENT + lane;
            float near[4];
            double value[4];
            load_logits(column.logits, id, column.n_ids, near);
            adjust(column, id, first_entry, (chunk + 1) * CHUNK, near, value);
#pragma unroll
            for (int i = 0; i < 4; ++i) near[i] = static_cast<float>(value[i]);
            visit(id, near, value);
        }
    }
}

template <typename Visit>
DEVICE void for_chunk(const Column& column, int chunk, Visit visit) {
    for_chunks<1>(column, chunk, 1, chunk + 1, visit);
}
