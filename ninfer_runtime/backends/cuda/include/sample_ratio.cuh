// Drafts that were drawn from a distribution of their own: how that is kept, and how the target accepts them. By one block,
// for rows whose candidates are sorted (top_k 1 .. PREFIX). Reference: backends/reference/drafts.py.
#pragma once

static_assert(PREFIX <= MAX_PROPOSED, "a proposal holds every candidate");

// Candidates of the column, sorted, s.weight their cumulative weights; returns how many are kept.
DEVICE int sorted_candidates(const Column& column, Selection& s, const RowInput& in, float largest, int n_chunks) {
    const int n = select_top(column, s, in.top_k, largest, n_chunks);
    if (warp_index() == 0) {
        const double sum = cumulate(s, n, s.value[0], in.temperature);
        const int n_kept = kept_of(s, in, n, s.value[0], sum);
        if (lane_id() == 0) s.index = n_kept;
    }
    __syncthreads();
    return s.index;
}

DEVICE double weight_at(const Selection& s, int i, double temperature) {
    return exp((s.value[i] - s.value[0]) / temperature);
}

// The first of n candidates whose cumulative s.weight exceeds u of the whole.
DEVICE int draw_sorted(Selection& s, int n, double u) {
    if (warp_index() == 0) {
        const int index = first_above(s, n, 0.0, u * s.weight[n - 1]);
        if (lane_id() == 0) s.token = s.id[index];
    }
    __syncthreads();
    return s.token;
}

// A draft of the token at `position`, and what it was drawn from.
DEVICE int propose(const Column& column, Selection& s, const RowInput& in, float largest, int n_chunks, uint64_t position,
                   Proposal& proposal) {
    const int n = sorted_candidates(column, s, in, largest, n_chunks);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += THREADS) {
        proposal.ids[i] = s.id[i];
        proposal.probabilities[i] = weight_at(s, i, in.temperature) / s.weight[n - 1];
    }
    if (threadIdx.x == 0) proposal.n = n;
    return draw_sorted(s, n, philox_uniform(in.seed, position, PURPOSE_DRAFT));
}

DEVICE double share_of(const Proposal& proposal, int id) {
    for (int i = 0; i < proposal.n; ++i)
        if (proposal.ids[i] == id) return proposal.probabilities[i];
    return 0.0;
}

// The token at `position`: the draft with probability min(1, p / q), otherwise a draw from what q left of p.
DEVICE int draw_by_ratio(const Column& column, Selection& s, const RowInput& in, float largest, int n_chunks,
                         uint64_t position, int draft, const Proposal& proposal) {
    const int n = sorted_candidates(column, s, in, largest, n_chunks);
    if (threadIdx.x == 0) s.total = 0.0;
    __syncthreads();
    const double whole = s.weight[n - 1];
    for (int i = static_cast<int>(threadIdx.x); i < n; i += THREADS)
        if (s.id[i] == draft) s.total = weight_at(s, i, in.temperature) / whole;
    __syncthreads();
    if (philox_uniform(in.seed, position, PURPOSE_ACCEPT) < s.total / share_of(proposal, draft)) return draft;
    double excess[ceil_div(PREFIX, THREADS)];
#pragma unroll
    for (int k = 0; k < ceil_div(PREFIX, THREADS); ++k) {
        const int i = k * THREADS + static_cast<int>(threadIdx.x);
        excess[k] = i < n ? maximum(weight_at(s, i, in.temperature) / whole - share_of(proposal, s.id[i]), 0.0) : 0.0;
    }
    const double u = philox_uniform(in.seed, position, PURPOSE_CORRECTION);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ceil_div(PREFIX, THREADS); ++k) {
        const int i = k * THREADS + static_cast<int>(threadIdx.x);
        if (i < n) s.value[i] = excess[k];
    }
    __syncthreads();
    if (warp_index() == 0) {
        double left = 0.0;
        for (int i = static_cast<int>(lane_id()); i < n; i += WARP_LANES) left += s.value[i];
        left = warp_sum(left);
        // Where rounding leaves nothing of it: p itself, whose cumulative weights are still there.
        if (left > 0.0) {
            double sum = 0.0;
            for (int begin = 0; begin < n; begin += WARP_LANES) {
                const int i = begin + static_cast<int>(lane_id());
                double up_to = i < n ? s.value[i] : 0.0;
#pragma unroll
                for (int delta = 1; delta < WARP_LANES; delta *= 2) {
                    const double other = shfl_up(up_to, delta);
                    if (static_cast<int>(lane_id()) >= delta) up_to += other;
                }
                if (i < n) s.weight[i] = sum + up_to;
                sum += shfl(up_to, WARP_LANES - 1);
            }
        }
    }
    __syncthreads();
    return draw_sorted(s, n, u);
}
