// out = bf16(bf16(merge of a round's partial results) * sigmoid(gate)), D = 256; partial results as attention_decode.cu left
// them: sums of weighted values relative to 2^largest, in the order of the blocks. ROTATED: the merge times the
// Walsh-Hadamard matrix, whole heads. Columns that are not evaluated become zeros.
// Reference backends/reference/attention.py; tolerance 1 % of the largest output, see specs/kernels.md.
#include "common.cuh"
#include "attention_round.cuh"

// A sum of weighted values whose weights are relative to 2^largest.
struct Merged {
    float largest;
    float sum;
    float value[4];

    DEVICE void add(float other_largest, float other_sum, const float (&other)[4]) {
        const float now = fmaxf(largest, other_largest);
        const float mine = exp2_approx(largest - now), its = exp2_approx(other_largest - now);
        largest = now;
        sum = sum * mine + other_sum * its;
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = value[i] * mine + other[i] * its;
    }
};

// Per block: 16 slots at a time, each by COMBINE_DIMS / 4 lanes. A rotated head is merged whole and turned back.
constexpr int COMBINE_DIMS = ROTATED ? HEAD_DIM : 64;
constexpr int SLOT_LANES = COMBINE_DIMS / 4;
constexpr int SUMS = ROTATED ? 16 : 8;  // that are left to add: without rotation a warp has added its two slots
static_assert(THREADS == 16 * SLOT_LANES, "sixteen slots");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_combine(const __grid_constant__ AttentionDecodeParams p) {
#if ROTATED
    DYNAMIC_SHARED(float, values);
#else
    STATIC_SHARED(float, values[SUMS * COMBINE_DIMS]);
#endif
    STATIC_SHARED(float, stats[SUMS * 2]);
    STATIC_SHARED(RowSpan, spans[MAX_ROWS]);
    const int row_index = static_cast<int>(blockIdx.y) / COLUMNS, i = static_cast<int>(blockIdx.y) % COLUMNS;
    const int column = row_index * p.row_columns + p.first_column + i;
    const int head = static_cast<int>(blockIdx.x) / (HEAD_DIM / COMBINE_DIMS);
    const int first_dim = static_cast<int>(blockIdx.x) % (HEAD_DIM / COMBINE_DIMS) * COMBINE_DIMS;
    const int thread = static_cast<int>(threadIdx.x);
    const int dim = head * HEAD_DIM + first_dim + (ROTATED ? LANE_DIMS : 1) * thread;  // first of this thread when it stores
    uint16_t* const out = p.out + static_cast<int64_t>(column) * p.out_stride;
    const uint16_t* const gates = p.gv + static_cast<int64_t>(column) * p.gv_stride;
    load_spans(p, spans);
    const int total = count_units(spans, p.n_rows), n_parts = minimum(p.n_parts, total);
    const int n_units = spans[row_index].n_units;
    const int first_unit = count_units(spans, row_index) + head / RATIO * n_units;
    const bool stores = thread < (ROTATED ? WARP_LANES : COMBINE_DIMS);
    // Older than the launch before this one.
#if ROTATED
    uint4 gate = {0, 0, 0, 0};
    if (stores) gate = load_16(gates + dim);
#else
    float gate = 0.0f;
    if (stores) gate = bf16_to_float(gates[dim]);
#endif
    grid_dependency_wait();
    grid_dependency_launch();
    if (i >= spans[row_index].n_columns) {
#if ROTATED
        if (stores) store_16(out + dim, {0, 0, 0, 0});
#else
        if (stores) out[dim] = 0;
#endif
        return;
    }
    const int segment = row_index * N_KV_HEADS + head / RATIO, row = i * RATIO + head % RATIO;
    const int last = part_of(first_unit + n_units - 1, n_parts, total) + segment;
    const int lane = lane_id(), warp = warp_index();
    Merged merged = {NO_SCORE, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 4
    for (int64_t slot = part_of(first_unit, n_parts, total) + segment + thread / SLOT_LANES; slot <= last;
         slot += THREADS / SLOT_LANES) {
        const uint2 stat = load_8(p.stats + (slot * ROWS + row) * 2);
        const uint4 word = load_16(p.partial + (slot * ROWS + row) * HEAD_DIM + first_dim + 4 * (thread % SLOT_LANES));
        const float value[4] = {__uint_as_float(word.x), __uint_as_float(word.y), __uint_as_float(word.z),
                                __uint_as_float(word.w)};
        merged.add(__uint_as_float(stat.x), __uint_as_float(stat.y), value);
    }
#if ROTATED
    const int sums = warp / 2, at = 4 * (thread % SLOT_LANES);
    const bool keeps = true;
#else
    float other[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) other[j] = shfl_xor(merged.value[j], 16);
    const float other_largest = shfl_xor(merged.largest, 16), other_sum = shfl_xor(merged.sum, 16);
    merged.add(other_largest, other_sum, other);
    const int sums = warp, at = 4 * lane;
    const bool keeps = lane < 16;
#endif
    if (keeps) {
#pragma unroll
        for (int j = 0; j < 4; ++j) values[sums * COMBINE_DIMS + at + j] = merged.value[j];
        if (at == 0) stats[2 * sums] = merged.largest, stats[2 * sums + 1] = merged.sum;
    }
    __syncthreads();
    float largest = stats[0], sum = 0.0f, value = 0.0f;
    if (thread < COMBINE_DIMS) {
        for (int w = 1; w < SUMS; ++w) largest = fmaxf(largest, stats[2 * w]);
        for (int w = 0; w < SUMS; ++w) {
            const float factor = exp2_approx(stats[2 * w] - largest);
            sum += stats[2 * w + 1] * factor;
            value += values[w * COMBINE_DIMS + thread] * factor;
        }
        value = sum == 0.0f ? 0.0f : value / sum;
    }
#if ROTATED
    __syncthreads();
    if (thread < COMBINE_DIMS) values[thread] = value;
    __syncthreads();
    if (warp > 0) return;
    float x[LANE_DIMS], g[LANE_DIMS];
#pragma unroll
    for (int j = 0; j < LANE_DIMS; ++j) x[j] = values[LANE_DIMS * lane + j];
    hadamard(x);
    decode_bf16(g, gate);
#pragma unroll
    for (int j = 0; j < LANE_DIMS; ++j) x[j] = bf16_to_float(float_to_bf16(x[j])) * sigmoid(g[j]);
    store_16(out + dim, encode_bf16(x));
#else
    if (stores) out[dim] = float_to_bf16(bf16_to_float(float_to_bf16(value)) * sigmoid(gate));
#endif
}
