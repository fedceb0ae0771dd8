// The largest values of one column, exactly and in order, by one block: radix steps on order-preserving float bits,
// then a sort of what is left. Everything that takes part is counted in integers, so nothing depends on timing.
#pragma once

constexpr int BINS = 2048;
constexpr int BIN_BITS = 11;
constexpr int WARPS = THREADS / WARP_LANES;
constexpr int BINS_PER_THREAD = BINS / THREADS;
static_assert(BINS == 1 << BIN_BITS && BINS % THREADS == 0, "whole bins per thread");
static_assert((CAPACITY & (CAPACITY - 1)) == 0 && CAPACITY >= 64, "the sort needs a power of two");
static_assert(PREFIX <= CAPACITY / 2, "a group and what lies above it fit");

// Weights exp((value - largest) / temperature) are added up as integers: up to 2^20 ids, none above 1.
constexpr float MASS_ONE = 17592186044416.0f;  // 2^44

constexpr uint32_t LOWEST_KEY = 0x00800000u;  // the most negative finite float; -inf lies below

struct Selection {
    double value[CAPACITY];       // candidates, sorted where a function says so
    double weight[CAPACITY / 2];  // and their cumulative weights
    uint32_t mass_low[BINS];
    uint32_t mass_high[BINS];
    uint64_t warp_mass[WARPS];
    double scratch[WARPS];
    double total;                 // results of one warp or thread that the block reads behind a barrier
    int id[CAPACITY];
    uint32_t count[BINS];
    uint32_t chunk_key[MAX_CHUNKS];
    int chunk_list[MAX_CHUNKS];
    uint32_t warp_count[WARPS];
    uint32_t n_found;
    uint32_t n_chunks;
    int token;
    int index;
    uint32_t bin;
    uint32_t above;
    uint32_t inside;
    uint64_t above_mass;
};
static_assert(sizeof(Selection) <= SELECTION_BYTES, "ops/sampling.py reserves it");

// What is sought on the way down from the largest value: the rank-th element, or where the mass reaches a target.
struct Goal {
    bool by_mass;
    uint32_t rank;
    uint64_t mass;
};

// Elements whose keys lie in [low, high]; `above` of them, with `above_mass`, lie above.
struct Group {
    uint32_t low, high, above, inside;
    uint64_t above_mass;
};

// Sum over the threads before this one.
template <typename T>
DEVICE T exclusive_sum(T value, T* scratch) {
    T sum = value;
#pragma unroll
    for (int delta = 1; delta < WARP_LANES; delta *= 2) {
        const T other = shfl_up(sum, delta);
        if (static_cast<int>(lane_id()) >= delta) sum += other;
    }
    __syncthreads();
    if (lane_id() == WARP_LANES - 1) scratch[warp_index()] = sum;
    __syncthreads();
    T before = 0;
    for (int warp = 0; warp < warp_index(); ++warp) before += scratch[warp];
    return before + sum - value;
}

DEVICE uint64_t mass_in(const Selection& s, int bin) {
    return static_cast<uint64_t>(s.mass_high[bin]) << 32 | s.mass_low[bin];
}

// Two 32-bit additions: shared memory has no 64-bit one.
DEVICE void add_mass(Selection& s, uint32_t bin, uint64_t mass) {
    const uint32_t low = static_cast<uint32_t>(mass);
    uint32_t high = static_cast<uint32_t>(mass >> 32);
    high += atomicAdd(&s.mass_low[bin], low) > ~low;
    if (high != 0) atomicAdd(&s.mass_high[bin], high);
}

// The first bin from the top where the goal is reached; if it is nowhere, the last one that adds to the count or mass
// sought; -> s.bin, above, inside.
template <bool WITH_MASS>
DEVICE void find_bin(Selection& s, Goal goal, uint32_t above, uint64_t above_mass) {
    const int top = BINS - 1 - static_cast<int>(threadIdx.x) * BINS_PER_THREAD;
    uint32_t count = 0;
    uint64_t mass = 0;
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) {
        count += s.count[top - i];
        if constexpr (WITH_MASS) mass += mass_in(s, top - i);
    }
    uint32_t count_before = above + exclusive_sum(count, s.warp_count);
    uint64_t mass_before = above_mass;
    if constexpr (WITH_MASS) mass_before += exclusive_sum(mass, s.warp_mass);
    if (threadIdx.x == THREADS - 1) {
        s.inside = count_before + count;
        s.above_mass = mass_before + mass;
    }
    __syncthreads();
    goal.rank = minimum(goal.rank, s.inside);
    goal.mass = minimum(goal.mass, s.above_mass);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) {
        const uint32_t here = s.count[top - i];
        uint64_t mass_here = 0;
        if constexpr (WITH_MASS) mass_here = mass_in(s, top - i);
        const bool was_reached = goal.by_mass ? mass_before >= goal.mass && count_before > 0 : count_before >= goal.rank;
        const bool is_reached = goal.by_mass ? mass_before + mass_here >= goal.mass : count_before + here >= goal.rank;
        if (here > 0 && !was_reached && is_reached) {
            s.bin = static_cast<uint32_t>(top - i);
            s.above = count_before;
            s.inside = here;
            s.above_mass = mass_before;
        }
        count_before += here;
        mass_before += mass_here;
    }
    __syncthreads();
}

DEVICE void clear_bins(Selection& s, bool with_mass) {
    for (int bin = static_cast<int>(threadIdx.x); bin < BINS; bin += THREADS) {
        s.count[bin] = 0;
        if (with_mass) s.mass_low[bin] = s.mass_high[bin] = 0;
    }
    __syncthreads();
}

// Smallest shift that brings a span of keys into BINS bins.
DEVICE int shift_for(uint32_t span) {
    const int bits = 32 - __clz(static_cast<int>(span));
    return maximum(bits - BIN_BITS, 0);
}

DEVICE float weight_of(float value, float largest, float inverse_temperature) {
    return expf((value - largest) * inverse_temperature);
}

DEVICE uint64_t mass_of(float value, float largest, float inverse_temperature) {
    return static_cast<uint64_t>(weight_of(value, largest, inverse_temperature) * MASS_ONE);
}

// Keys of the chunks that have something to draw.
struct ChunkKeys {
    uint32_t n_valid, lowest, highest;
};

DEVICE ChunkKeys chunk_keys(Selection& s, int n_chunks) {
    ChunkKeys keys = {0, 0xffffffffu, 0};
    for (int chunk = static_cast<int>(threadIdx.x); chunk < n_chunks; chunk += THREADS) {
        const uint32_t key = s.chunk_key[chunk];
        if (key < LOWEST_KEY) continue;
        ++keys.n_valid;
        keys.lowest = minimum(keys.lowest, key);
        keys.highest = maximum(keys.highest, key);
    }
    keys = ChunkKeys{warp_sum(keys.n_valid), warp_min(keys.lowest), warp_max(keys.highest)};
    __syncthreads();
    if (lane_id() == 0) {
        s.warp_count[warp_index()] = keys.n_valid;
        s.warp_mass[warp_index()] = static_cast<uint64_t>(keys.highest) << 32 | keys.lowest;
    }
    __syncthreads();
    keys = ChunkKeys{0, 0xffffffffu, 0};
    for (int warp = 0; warp < WARPS; ++warp) {
        keys.n_valid += s.warp_count[warp];
        keys.lowest = minimum(keys.lowest, static_cast<uint32_t>(s.warp_mass[warp]));
        keys.highest = maximum(keys.highest, static_cast<uint32_t>(s.warp_mass[warp] >> 32));
    }
    return keys;
}

// Bins of equal width between `low` and the largest value; bin 0 takes what lies below. Monotone, as rounding is.
struct LinearBins {
    float low, scale;

    DEVICE uint32_t bin_of(float value) const {
        if (value < low) return 0;
        return minimum(1u + static_cast<uint32_t>((value - low) * scale), static_cast<uint32_t>(BINS - 1));
    }

    // Lowest key up to `high` + 1 whose value is in `bin` or above.
    DEVICE uint32_t first_key(uint32_t bin, uint32_t high) const {
        uint32_t below = LOWEST_KEY, n = high + 1u - LOWEST_KEY;
        while (n > 0) {
            const uint32_t half = n / 2;
            if (bin_of(value_of(below + half)) < bin) {
                below += half + 1;
                n -= half + 1;
            } else {
                n = half;
            }
        }
        return below;
    }
};

// Counts, and with WITH_MASS weighs, the elements of a group by bin.
template <bool WITH_MASS, typename BinOf>
DEVICE void fill_bins(const Column& column, Selection& s, uint32_t low, uint32_t high, float largest, float inverse,
                      int n_chunks, BinOf bin_of) {
    clear_bins(s, WITH_MASS);
    for (int chunk = warp_index(); chunk < n_chunks; chunk += 2 * WARPS)
        for_chunks<2>(column, chunk, WARPS, n_chunks, [&](int, const float(&near)[4], const double(&)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t key = key_of(near[i]);
                if (key < low || key > high) continue;
                const uint32_t bin = bin_of(near[i], key);
                atomicAdd(&s.count[bin], 1u);
                if constexpr (WITH_MASS) add_mass(s, bin, mass_of(near[i], largest, inverse));
            }
        });
    __syncthreads();
}

// From all values down to a group of at most PREFIX elements, or of one key, that holds the goal. The first step has
// bins of equal width from the largest value down to `floor`, since few keys lie near zero and many values do.
template <bool WITH_MASS>
DEVICE Group descend(const Column& column, Selection& s, Goal goal, float largest, float floor, float inverse,
                     int n_chunks) {
    Group g = {LOWEST_KEY, key_of(largest), 0, 0, 0};
    const LinearBins linear = {floor, static_cast<float>(BINS - 2) / (largest - floor)};
    // Values too far apart, or too close, for a float's arithmetic are left to the bits.
    bool is_linear = linear.scale > 1e-30f && linear.scale < 1e30f;
    for (;;) {
        const int shift = shift_for(g.high - g.low);
        fill_bins<WITH_MASS>(column, s, g.low, g.high, largest, inverse, n_chunks, [&](float value, uint32_t key) {
            return is_linear ? linear.bin_of(value) : (key - g.low) >> shift;
        });
        find_bin<WITH_MASS>(s, goal, g.above, g.above_mass);
        if (is_linear) {
            g.low = linear.first_key(s.bin, g.high);
            if (s.bin < BINS - 1) g.high = linear.first_key(s.bin + 1, g.high) - 1u;
        } else {
            g.low += s.bin << shift;
            g.high = minimum(g.high, g.low + ((1u << shift) - 1u));
        }
        g.above = s.above;
        g.inside = s.inside;
        g.above_mass = s.above_mass;
        if (g.inside <= PREFIX || g.low == g.high) return g;
        is_linear = false;
    }
}

// All elements with keys in [low, high] become candidates, in no order; returns how many there are, which may be more
// than CAPACITY: then the rest is missing. Only chunks whose largest key is at least `low` are looked at.
DEVICE int gather(const Column& column, Selection& s, uint32_t low, uint32_t high, int n_chunks) {
    __syncthreads();
    if (threadIdx.x == 0) s.n_found = s.n_chunks = 0;
    __syncthreads();
    for (int chunk = static_cast<int>(threadIdx.x); chunk < n_chunks; chunk += THREADS)
        if (s.chunk_key[chunk] >= low) s.chunk_list[atomicAdd(&s.n_chunks, 1u)] = chunk;
    __syncthreads();
    for (int entry = warp_index(); entry < static_cast<int>(s.n_chunks); entry += WARPS)
        for_chunk(column, s.chunk_list[entry], [&](int id, const float(&near)[4], const double(&value)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t key = key_of(near[i]);
                if (key < low || key > high) continue;
                const uint32_t at = atomicAdd(&s.n_found, 1u);
                if (at >= CAPACITY) continue;
                s.value[at] = value[i];
                s.id[at] = id + i;
            }
        });
    __syncthreads();
    return static_cast<int>(s.n_found);
}

// Of the elements with this very key, in the order of their ids: numbers first .. first + n - 1 go to position `to`.
DEVICE void gather_ties(const Column& column, Selection& s, uint32_t key, uint32_t first, uint32_t n, int to,
                        int n_chunks) {
    uint32_t seen = 0;
    for (int begin = 0; begin < n_chunks && seen < first + n; begin += WARPS) {
        const int chunk = begin + warp_index();
        uint32_t here = 0;
        if (chunk < n_chunks)
            for_chunk(column, chunk, [&](int, const float(&near)[4], const double(&)[4]) {
#pragma unroll
                for (int i = 0; i < 4; ++i) here += key_of(near[i]) == key;
            });
        // Segments of a chunk lie one after the other, lanes side by side: ranks are counted segment by segment.
        here = warp_sum(here);
        uint32_t rank = seen + shfl(exclusive_sum(lane_id() == 0 ? here : 0u, s.warp_count), 0);
        if (chunk < n_chunks)
            for_chunk(column, chunk, [&](int id, const float(&near)[4], const double(&value)[4]) {
                uint32_t own = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) own += key_of(near[i]) == key;
                uint32_t before = own;
#pragma unroll
                for (int delta = 1; delta < WARP_LANES; delta *= 2) {
                    const uint32_t other = shfl_up(before, delta);
                    if (static_cast<int>(lane_id()) >= delta) before += other;
                }
                uint32_t at = rank + before - own;
                rank += shfl(before, WARP_LANES - 1);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (key_of(near[i]) != key) continue;
                    if (at >= first && at < first + n) {
                        s.value[to + at - first] = value[i];
                        s.id[to + at - first] = id + i;
                    }
                    ++at;
                }
            });
        if (threadIdx.x == THREADS - 1) s.n_found = rank;
        __syncthreads();
        seen = s.n_found;
    }
    __syncthreads();
}

DEVICE void compare_and_swap(Selection& s, int pair, int stride, int size) {
    const int low = 2 * pair - (pair & (stride - 1)), high = low + stride;
    const bool is_descending = (low & size) == 0;
    if (comes_before(s.value[high], s.id[high], s.value[low], s.id[low]) != is_descending) return;
    const double value = s.value[low];
    s.value[low] = s.value[high];
    s.value[high] = value;
    const int id = s.id[low];
    s.id[low] = s.id[high];
    s.id[high] = id;
}

// Bitonic sort of the first n candidates, best first. Up to 128 one warp does it without block barriers.
DEVICE void sort_candidates(Selection& s, int n) {
    int size_all = WARP_LANES;
    while (size_all < n) size_all *= 2;
    for (int i = n + static_cast<int>(threadIdx.x); i < size_all; i += THREADS) {
        s.value[i] = -static_cast<double>(infinite());
        s.id[i] = NO_ID;
    }
    __syncthreads();
    const bool by_one_warp = size_all <= 4 * WARP_LANES;
    if (!by_one_warp || warp_index() == 0) {
        const int step = by_one_warp ? WARP_LANES : THREADS;
        for (int size = 2; size <= size_all; size *= 2)
            for (int stride = size / 2; stride > 0; stride /= 2) {
                for (int pair = static_cast<int>(threadIdx.x); pair < size_all / 2; pair += step)
                    compare_and_swap(s, pair, stride, size);
                if (by_one_warp)
                    warp_sync();
                else
                    __syncthreads();
            }
    }
    __syncthreads();
}

// A key with at least k elements at or above it: at least k chunks have their largest there. 0xffffffff: no such key is
// near enough to the k-th largest element.
DEVICE uint32_t likely_threshold(Selection& s, uint32_t k, const ChunkKeys& keys, int n_chunks) {
    if (2 * k > keys.n_valid) return n_chunks * CHUNK <= CAPACITY ? LOWEST_KEY : 0xffffffffu;
    const int shift = shift_for(keys.highest - keys.lowest);
    clear_bins(s, false);
    for (int chunk = static_cast<int>(threadIdx.x); chunk < n_chunks; chunk += THREADS)
        if (s.chunk_key[chunk] >= LOWEST_KEY) atomicAdd(&s.count[(s.chunk_key[chunk] - keys.lowest) >> shift], 1u);
    __syncthreads();
    find_bin<false>(s, Goal{false, k, 0}, 0, 0);
    return keys.lowest + (s.bin << shift);
}

// The k (1 .. PREFIX) best elements, sorted, lower id first on ties; returns how many there are, fewer than k only if
// no more can be drawn. s.chunk_key holds the chunks' largest keys; `largest` is the largest value.
DEVICE int select_top(const Column& column, Selection& s, int k, float largest, int n_chunks) {
    const ChunkKeys keys = chunk_keys(s, n_chunks);
    uint32_t low = likely_threshold(s, static_cast<uint32_t>(k), keys, n_chunks);
    int n_ties = 0;
    for (int attempt = 0;; ++attempt) {
        int n = low == 0xffffffffu && attempt == 0 ? CAPACITY + 1 : gather(column, s, low, 0xffffffffu, n_chunks);
        if (n <= CAPACITY) {
            if (n_ties > 0) {
                gather_ties(column, s, low - 1u, 0, static_cast<uint32_t>(k - n), n, n_chunks);
                n = k;
            }
            sort_candidates(s, n);
            return minimum(n, k);
        }
        const Group g = descend<false>(column, s, Goal{false, static_cast<uint32_t>(k), 0}, largest,
                                       value_of(keys.lowest), 1.0f, n_chunks);
        // One key, more often than can be sorted, is left out here and taken in the order of its ids.
        n_ties = g.above + g.inside > CAPACITY;
        low = n_ties > 0 ? g.high + 1u : g.low;
    }
}
