// Behind attention_prefill.cu and attention_prefill_int8.cu: out = bf16(bf16(merge of the parts' results) * sigmoid(gate)) of
// the tiles that several parts worked on; where keys and values are rotated, the merge stays in fp32, and all heads are turned
// back and gated by prefill_unrotate. Reference backends/reference/attention.py; tolerance 1 % of a head's norm.
#include "common.cuh"
#include "attention_prefill.cuh"

// Tiles that several parts worked on. Grid (tiles, KV heads, quarters of a tile's rows), a warp per row.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    prefill_combine(const __grid_constant__ AttentionPrefillParams p) {
    const int tile = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), lane = lane_id();
    const int per_head = head_units(p), total = N_KV_HEADS * per_head, n_parts = minimum(p.n_parts, total);
    int first_unit = head * per_head;
    for (int before = 0; before < tile; ++before) first_unit += tile_units(p, before);
    const int first = part_of(first_unit, n_parts, total);
    const int last = part_of(first_unit + tile_units(p, tile) - 1, n_parts, total);
    grid_dependency_wait();
    grid_dependency_launch();
    if (first == last) return;
    const int n_rows = TILE_ROWS / static_cast<int>(gridDim.z), first_row = static_cast<int>(blockIdx.z) * n_rows;
    for (int row = first_row + warp_index(); row < first_row + n_rows; row += WARPS) {
        const int tile_row = tile * TILE_ROWS + row, token = tile_row / RATIO;
        if (token >= p.n_tokens) continue;
        const uint4 gate = load_16(p.gv + row_begin(token, p.gv_stride, head, tile_row) + LANE_DIMS * lane);
        float largest = NO_SCORE, sum = 0.0f, value[LANE_DIMS] = {};
#pragma unroll 2
        for (int part = first; part <= last; ++part) {
            const int64_t at = (2 * part + (part == first ? 1 : 0)) * static_cast<int64_t>(TILE_ROWS) + row;
            const uint2 stat = load_8(p.stats + 2 * at);
            const uint4 low = load_16(p.partial + at * HEAD_DIM + LANE_DIMS * lane);
            const uint4 high = load_16(p.partial + at * HEAD_DIM + LANE_DIMS * lane + 4);
            const uint32_t word[LANE_DIMS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            const float now = fmaxf(largest, __uint_as_float(stat.x));
            const float mine = exp2_approx(largest - now), its = exp2_approx(__uint_as_float(stat.x) - now);
            largest = now;
            sum = sum * mine + __uint_as_float(stat.y) * its;
#pragma unroll
            for (int i = 0; i < LANE_DIMS; ++i) value[i] = value[i] * mine + __uint_as_float(word[i]) * its;
        }
        const float scale = 1.0f / sum;
        if (p.mixed != nullptr) {
            float* const to = p.mixed + row_begin(token, N_HEADS * HEAD_DIM, head, tile_row) + LANE_DIMS * lane;
            uint32_t word[LANE_DIMS];
#pragma unroll
            for (int i = 0; i < LANE_DIMS; ++i) word[i] = __float_as_uint(value[i] * scale);
            store_16(to, {word[0], word[1], word[2], word[3]});
            store_16(to + 4, {word[4], word[5], word[6], word[7]});
            continue;
        }
        store_16(p.out + row_begin(token, p.out_stride, head, tile_row) + LANE_DIMS * lane,
                 {gated(value[0] * scale, value[1] * scale, gate.x), gated(value[2] * scale, value[3] * scale, gate.y),
                  gated(value[4] * scale, value[5] * scale, gate.z), gated(value[6] * scale, value[7] * scale, gate.w)});
    }
}

// Heads back from rotated ones, gated. A block per token, a warp per head.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    prefill_unrotate(const __grid_constant__ AttentionPrefillParams p) {
    const int64_t token = blockIdx.x;
    const int lane = lane_id();
    grid_dependency_wait();
    grid_dependency_launch();
    for (int head = warp_index(); head < N_HEADS; head += WARPS) {
        const int dim = head * HEAD_DIM + LANE_DIMS * lane;
        const float* const from = p.mixed + token * (N_HEADS * HEAD_DIM) + dim;
        const uint4 gate = load_16(p.gv + token * p.gv_stride + dim), low = load_16(from), high = load_16(from + 4);
        float x[LANE_DIMS] = {__uint_as_float(low.x),  __uint_as_float(low.y),  __uint_as_float(low.z),
                              __uint_as_float(low.w),  __uint_as_float(high.x), __uint_as_float(high.y),
                              __uint_as_float(high.z), __uint_as_float(high.w)};
        hadamard(x);
        store_16(p.out + token * p.out_stride + dim, {gated(x[0], x[1], gate.x), gated(x[2], x[3], gate.y),
                                                      gated(x[4], x[5], gate.z), gated(x[6], x[7], gate.w)});
    }
}
