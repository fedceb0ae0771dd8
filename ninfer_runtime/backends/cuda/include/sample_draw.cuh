// One draw at a temperature above 0: top-k, softmax, min-p, top-p, one uniform number. By one block.
#pragma once

// What a column came to.
constexpr int DREW = 0;
constexpr int SAW_NOT_FINITE = 1;
constexpr int NOTHING_ALLOWED = 2;

struct Draw {
    int token;
    int outcome;
};

// How many are sorted where all take part: nearly all draws end among them.
constexpr int WIDE_PREFIX = PREFIX / 4;

// Whether more ids take part than are sorted; then the sum over all of them is needed.
DEVICE bool is_wide(int top_k) { return top_k <= 0 || top_k > PREFIX; }

// Finite also in float32: 0 times it stays 0.
DEVICE double inverse_of(double temperature) { return minimum(1.0 / temperature, 1e38); }

// Cumulative weights exp((value - largest) / temperature) of the first n sorted candidates -> s.weight, their sum
// returned. By one warp; n at most PREFIX.
DEVICE double cumulate(Selection& s, int n, double largest, double temperature) {
    const int per_lane = ceil_div(n, WARP_LANES), begin = static_cast<int>(lane_id()) * per_lane;
    const int end = minimum(begin + per_lane, n);
    double sum = 0.0;
    for (int i = begin; i < end; ++i) {
        sum += exp((s.value[i] - largest) / temperature);
        s.weight[i] = sum;
    }
    double before = sum;
#pragma unroll
    for (int delta = 1; delta < WARP_LANES; delta *= 2) {
        const double other = shfl_up(before, delta);
        if (static_cast<int>(lane_id()) >= delta) before += other;
    }
    const double total = shfl(before, WARP_LANES - 1);
    before -= sum;
    for (int i = begin; i < end; ++i) s.weight[i] += before;
    warp_sync();
    return total;
}

// First of n sorted candidates whose cumulative weight, on top of `above`, exceeds the target; the last if none does.
DEVICE int first_above(Selection& s, int n, double above, double target) {
    int found = n - 1;
    for (int i = static_cast<int>(lane_id()); i < n - 1; i += WARP_LANES)
        if (above + s.weight[i] > target) {
            found = i;
            break;
        }
    return warp_min(found);
}

// How many of n sorted candidates min-p and top-p keep, of weights that add up to `total`. By one warp.
DEVICE int kept_of(Selection& s, const RowInput& in, int n, double largest, double total) {
    int n_kept = n;
    for (int i = static_cast<int>(lane_id()); i < n; i += WARP_LANES) {
        const double weight = exp((s.value[i] - largest) / in.temperature);
        const bool likely = weight / total >= in.min_p * (1.0 / total);
        const bool early = in.top_p >= 1.0 || (s.weight[i] - weight) / total < in.top_p;
        if (i > 0 && !(likely && early)) {
            n_kept = i;
            break;
        }
    }
    return warp_min(n_kept);
}

// Where a goal lies in the order of all candidates: the id there, and the weight up to and including it.
DEVICE void locate(const Column& column, Selection& s, const RowInput& in, Goal goal, double target, float largest,
                   int n_chunks) {
    const float inverse = static_cast<float>(inverse_of(in.temperature));
    // Below the floor a weight is less than the last bit of a mass.
    const float floor = largest - static_cast<float>(31.0 * in.temperature);
    const Group g = descend<true>(column, s, goal, largest, floor, inverse, n_chunks);
    const double above = static_cast<double>(g.above_mass) / static_cast<double>(MASS_ONE);
    if (g.inside <= PREFIX) {
        const int n = gather(column, s, g.low, g.high, n_chunks);
        sort_candidates(s, n);
        if (warp_index() == 0) {
            cumulate(s, n, static_cast<double>(largest), in.temperature);
            int at = static_cast<int>(goal.rank - g.above) - 1;
            if (goal.by_mass) at = first_above(s, n, above, target);
            at = minimum(at, n - 1);
            if (lane_id() == 0) {
                s.total = above + s.weight[at];
                s.token = s.id[at];
            }
        }
    } else {  // one key, more often than can be sorted: all have the same weight
        const double weight = exp((static_cast<double>(value_of(g.low)) - largest) / in.temperature);
        uint32_t at = goal.rank - g.above - 1u;
        if (goal.by_mass) {
            const double steps = weight > 0.0 ? (target - above) / weight : 0.0;
            at = steps > 0.0 ? static_cast<uint32_t>(minimum(steps, 4294967040.0)) : 0u;
        }
        at = minimum(at, g.inside - 1u);
        gather_ties(column, s, g.low, at, 1, 0, n_chunks);
        if (threadIdx.x == 0) {
            s.total = above + weight * (static_cast<double>(at) + 1.0);
            s.token = s.id[0];
        }
    }
    __syncthreads();
}

// Weight of all candidates that min-p keeps.
DEVICE double likely_weight(const Column& column, Selection& s, const RowInput& in, float largest, int n_chunks) {
    const float inverse = static_cast<float>(inverse_of(in.temperature)), least = static_cast<float>(in.min_p);
    uint64_t mass = 0;
    for (int chunk = warp_index(); chunk < n_chunks; chunk += 2 * WARPS)
        for_chunks<2>(column, chunk, WARPS, n_chunks, [&](int, const float(&near)[4], const double(&)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (weight_of(near[i], largest, inverse) >= least) mass += mass_of(near[i], largest, inverse);
        });
    return static_cast<double>(block_sum(mass, s.warp_mass)) / static_cast<double>(MASS_ONE);
}

// The token for the uniform number u. total: weight of all ids where is_wide(top_k).
DEVICE int draw_token(const Column& column, Selection& s, const RowInput& in, float largest, double total, double u,
                      int n_chunks) {
    const bool is_cut = in.min_p > 0.0 || in.top_p < 1.0;
    double kept = 0.0;
    // How far down the order: 0 the top_k limit, 1 what top-p keeps, 2 the draw itself. Nearly all draws end among the
    // sorted candidates of step 1.
    for (int step = in.top_k > PREFIX ? 0 : 1; step < 3; ++step) {
        Goal goal = {step > 0, static_cast<uint32_t>(in.top_k), 0};
        double target = 0.0;
        if (step == 1) {
            const bool wide = is_wide(in.top_k);
            const int n = select_top(column, s, wide ? WIDE_PREFIX : in.top_k, largest, n_chunks);
            if (warp_index() == 0) {
                const double sum = cumulate(s, n, s.value[0], in.temperature);
                const bool is_all = !wide || n < WIDE_PREFIX;  // nothing else takes part
                const double all = is_all ? sum : total;
                const int n_kept = kept_of(s, in, n, s.value[0], all);
                int index = -1;
                if (is_all || n_kept < n)
                    index = first_above(s, n_kept, 0.0, u * s.weight[n_kept - 1]);
                else if (!is_cut && u * all < sum)
                    index = first_above(s, n, 0.0, u * all);
                if (lane_id() == 0) {
                    s.index = index;
                    s.token = index < 0 ? NO_ID : s.id[index];
                }
            }
            __syncthreads();
            if (s.index >= 0) return s.token;
            kept = total;
            if (in.min_p > 0.0) kept = minimum(kept, likely_weight(column, s, in, largest, n_chunks));
            if (in.top_p >= 1.0) continue;
            target = in.top_p * total;
        }
        if (step == 2) target = u * kept;
        goal.mass = static_cast<uint64_t>(target * static_cast<double>(MASS_ONE));
        locate(column, s, in, goal, target, largest, n_chunks);
        if (step == 0) total = s.total;
        if (step == 1) kept = minimum(kept, s.total);
        __syncthreads();
    }
    return s.token;
}
