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

// First bias entry whose id is at least `id`.
DEVICE int first_bias(const Column& column, int id) {
    int low = 0, high = column.n_bias;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (column.bias[middle].token_id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Bias, penalties, mask, in this order; float64 as in the reference. [bias_begin, bias_end): entries near `id`.
DEVICE void adjust(const Column& column, int id, int bias_begin, int bias_end, const float (&raw)[4],
                   double (&value)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = static_cast<double>(raw[i]);
    if (id >= column.n_ids) return;
    for (int entry = bias_begin; entry < bias_end; ++entry) {
        const BiasEntry bias = column.bias[entry];
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

// Calls visit(id, near, value) for every segment of one chunk, warp-wide: the lane's four ids from `id` on, as float32
// (rounded where adjusted) and as float64. The latter is 0 where the column is raw: near is exact there.
template <typename Visit>
DEVICE void for_chunk(const Column& column, int chunk, Visit visit) {
    const int first = chunk * CHUNK + 4 * static_cast<int>(lane_id());
    float near[CHUNK / SEGMENT][4];
#pragma unroll
    for (int s = 0; s < CHUNK / SEGMENT; ++s) load_logits(column.logits, first + s * SEGMENT, column.n_ids, near[s]);
    const bool is_raw = column.is_raw();
    int bias_begin = 0, bias_end = 0;
    if (column.n_bias > 0) {
        bias_begin = first_bias(column, chunk * CHUNK);
        bias_end = first_bias(column, (chunk + 1) * CHUNK);
    }
#pragma unroll
    for (int s = 0; s < CHUNK / SEGMENT; ++s) {
        double value[4] = {};
        if (!is_raw) {
            adjust(column, first + s * SEGMENT, bias_begin, bias_end, near[s], value);
#pragma unroll
            for (int i = 0; i < 4; ++i) near[s][i] = static_cast<float>(value[i]);
        }
        visit(first + s * SEGMENT, near[s], value);
    }
}
