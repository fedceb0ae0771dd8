// New tokens of a prompt chunk: k = rope(norm(k)) and v into their pages, q = rope(norm(q)) back in place as bf16; all
// three times the Walsh-Hadamard matrix where `rotates`.
// qk, gv bf16 [T][stride], 16-byte aligned, strides multiples of 8; positions int32 [3][T]. One block per token, a warp
// per head. Reference backends/reference/attention.py; codes at most one step off, see specs/kernels.md.
#include "common.cuh"
#include "attention.cuh"

struct KvAppendParams {
    uint16_t* qk;
    const uint16_t* gv;
    const uint16_t* q_norm;
    const uint16_t* k_norm;
    const RopeTable* rope;
    const int* positions;
    const int* pages;
    uint8_t* k;
    uint8_t* v;
    uint16_t* k_scales;
    uint16_t* v_scales;
    int n_tokens;
    int start;
    int qk_stride;
    int gv_stride;
    int rotates;
    float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) kv_append(const __grid_constant__ KvAppendParams p) {
    STATIC_SHARED(Turn, turns[PAIRS]);
    const int token = static_cast<int>(blockIdx.x), lane = lane_id();
    grid_dependency_wait();
    grid_dependency_launch();
    for (int pair = static_cast<int>(threadIdx.x); pair < PAIRS; pair += THREADS)
        turns[pair] = turn_of(static_cast<float>(p.positions[p.rope->axis[pair] * p.n_tokens + token]) *
                              p.rope->frequency[pair]);
    __syncthreads();
    const int page = p.pages[(p.start + token) / PAGE_TOKENS], token_in_page = (p.start + token) % PAGE_TOKENS;
    uint16_t* const qk = p.qk + static_cast<int64_t>(token) * p.qk_stride + LANE_DIMS * lane;
    const uint16_t* const gv = p.gv + static_cast<int64_t>(token) * p.gv_stride + LANE_DIMS * lane;
    for (int task = warp_index(); task < N_HEADS + 2 * N_KV_HEADS; task += THREADS / WARP_LANES) {
        const bool is_q = task < N_HEADS, is_v = task >= N_HEADS + N_KV_HEADS;
        float x[LANE_DIMS];
        decode_bf16(x, load_16(is_v ? gv + (task - N_KV_HEADS) * HEAD_DIM : qk + task * HEAD_DIM));
        if (!is_v) {
            normalize_head(x, load_16((is_q ? p.q_norm : p.k_norm) + LANE_DIMS * lane), p.eps);
            rotate_head(x, turns);
        }
        if (p.rotates) hadamard(x);
        if (is_q) {
            store_16(qk + task * HEAD_DIM, encode_bf16(x));
            continue;
        }
        const int64_t row = kv_row(page, N_KV_HEADS, (task - N_HEADS) % N_KV_HEADS, token_in_page);
        const uint16_t scale = is_v ? store_codes<false>(x, p.v + row * KEY_BYTES, nullptr)
                                    : store_codes<true>(x, p.k + row * KEY_BYTES, nullptr);
        if (KV_QUANTIZED && lane % (SCALE_GROUP / LANE_DIMS) == 0)
            (is_v ? p.v_scales : p.k_scales)[scale_index(row, token_in_page, lane / (SCALE_GROUP / LANE_DIMS))] = scale;
    }
}
