// Gated DeltaNet prefill, first of four: convolution and gates.
//   q, k, v = silu(sum_j taps[j] p_{t-3+j});  factors of normalisation;  G, beta     gdn_prefill.cuh has formulas, layouts
// qk [T][2 KEY_HEADS 128], vz [T][2 VALUE_HEADS 128], taps [4][channels], history [3][channels]: bf16; a, b
// [T][VALUE_HEADS], a_log, dt_bias: fp32; pointers and strides multiples of 16 bytes. Tokens behind the last become
// zeros with beta = 0 and G as before.
// Grid: (2 KEY_HEADS + VALUE_HEADS, chunks), 256 threads: query, key and value heads, 8 tokens per warp.
// Reference: backends/reference/gdn.py; convolutions within 1 bf16 ulp.
#include "common.cuh"
#include "gdn_prefill.cuh"

struct GdnConvolveParams {
    const uint16_t* qk;
    const uint16_t* vz;
    const float* a;
    const float* b;
    const uint16_t* taps;
    const float* a_log;
    const float* dt_bias;
    const uint16_t* history;
    GdnWorkspace workspace;
    int qk_stride;  // elements
    int vz_stride;
    int gate_stride;
    int n_tokens;
};

namespace {

constexpr int ROWS = CHUNK * WARP_LANES / THREADS;  // per warp

// log2 of the decays, summed up over the chunk, and beta; one warp, two tokens per lane.
DEVICE void prepare_gates(const GdnConvolveParams& p, int first, int head, int64_t block) {
    const int lane = static_cast<int>(lane_id());
    const float rate = expf_precise(p.a_log[head]), dt_bias = p.dt_bias[head];
    float decay[2] = {0.0f, 0.0f}, beta[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int t = first + 2 * lane + i;
        if (t >= p.n_tokens) continue;
        const int64_t at = static_cast<int64_t>(t) * p.gate_stride + head;
        decay[i] = gdn_log_decay(p.a[at], rate, dt_bias) * 1.44269504f;
        beta[i] = sigmoid(p.b[at]);
    }
    float total = decay[0] + decay[1];
#pragma unroll
    for (int delta = 1; delta < WARP_LANES; delta *= 2) {
        const float below = shfl_up(total, delta);
        if (lane >= delta) total += below;
    }
    store_global(p.workspace.decay + block * CHUNK + 2 * lane, make_float2(total - decay[1], total));
    store_global(p.workspace.beta + block * CHUNK + 2 * lane, make_float2(beta[0], beta[1]));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gdn_prefill_convolve(const __grid_constant__ GdnConvolveParams p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int lane = static_cast<int>(lane_id()), part = static_cast<int>(blockIdx.x);
    const int first = static_cast<int>(blockIdx.y) * CHUNK, row = warp_index() * ROWS;
    const bool is_value = part >= 2 * KEY_HEADS, is_key = !is_value && part >= KEY_HEADS;
    const int head = is_value ? part - 2 * KEY_HEADS : part % KEY_HEADS;
    const int64_t block = static_cast<int64_t>(blockIdx.y) * (is_value ? VALUE_HEADS : KEY_HEADS) + head;
    const GdnWorkspace& to = p.workspace;

    const int channel = part * GDN_DIM + 4 * lane;
    const uint16_t* const source = is_value ? p.vz + head * GDN_DIM + 4 * lane : p.qk + channel;
    const int stride = is_value ? p.vz_stride : p.qk_stride;
    uint2 columns[GDN_HISTORY + ROWS];
#pragma unroll
    for (int i = 0; i < GDN_HISTORY + ROWS; ++i) {
        const int t = first + row + i - GDN_HISTORY;
        const uint16_t* at = source + static_cast<int64_t>(t) * stride;
        if (t < 0) at = p.history + (t + GDN_HISTORY) * GDN_CHANNELS + channel;
        columns[i] = t < p.n_tokens ? load_8(at) : uint2{0, 0};
    }
    float w[GDN_TAPS][4];
#pragma unroll
    for (int j = 0; j < GDN_TAPS; ++j) unpack_4(load_8(p.taps + j * GDN_CHANNELS + channel), w[j]);
    if (is_value && warp_index() == 0) prepare_gates(p, first, head, block);

    unsigned char* const target =
        (is_value ? to.u : is_key ? to.key : to.query) + block * KEY_BLOCK + row * (GDN_DIM * 2) + 8 * lane;
    float squares[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float total[4] = {}, x[4];
#pragma unroll
        for (int j = 0; j < GDN_TAPS; ++j) {
            unpack_4(columns[i + j], x);
#pragma unroll
            for (int e = 0; e < 4; ++e) total[e] = fmaf(w[j][e], x[e], total[e]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) total[e] = silu_fast(total[e]);
        const uint2 words = first + row + i < p.n_tokens ? pack_4(total) : uint2{0, 0};
        store_8(target + i * (GDN_DIM * 2), words);
        unpack_4(words, x);
        squares[i] = dot_4(x, x);
    }
    if (is_value) return;
    float scale = 0.0f;  // of row `lane`
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const float sum = warp_sum(squares[i]);
        if (lane == i) scale = rsqrt_approx(sum + GDN_L2_EPS) * (is_key ? 1.0f : GDN_QUERY_SCALE);
    }
    if (lane < ROWS) (is_key ? to.key_scale : to.query_scale)[block * CHUNK + row + lane] = scale;
}
