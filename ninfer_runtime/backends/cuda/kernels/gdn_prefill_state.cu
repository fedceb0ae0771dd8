// Gated DeltaNet prefill, second of three: the state from chunk to chunk, and what it makes of U.
//   V' = U - W S0;   S = 2^G_64 S0 + sum_j 2^(G_64 - G_j) k_j v'_j^T / |k_j|      gdn_prefill.cuh has formulas, layouts
// A warp keeps 16 values x 128 keys of a head in registers, transposed, so that its accumulators are the next product's
// A operand: warps share nothing but the operands that the block loads. State fp32 [head][value][key], in place; the
// states before each chunk go to the workspace in bf16, V' replaces U. Also moves the convolution's history on.
// Grid: (VALUE_HEADS, 128 / (16 WARPS)). Reference: backends/reference/gdn.py, relative error of the state 1 %.
#include "common.cuh"
#include "gdn_prefill.cuh"

struct GdnStateParams {
    const uint16_t* qk;
    const uint16_t* vz;
    float* state;
    uint16_t* history;
    GdnWorkspace workspace;
    int qk_stride;  // elements
    int vz_stride;
    int n_tokens;
};

namespace {

constexpr int WARPS = THREADS / WARP_LANES;
constexpr int WARP_U = 4 * PIECE;
constexpr int STAGES = 2;

struct Stage {
    unsigned char w[W_BLOCK], key[KEY_BLOCK], u[WARPS * WARP_U];
    float decay[CHUNK], key_scale[CHUNK];
};
static_assert(STAGES * sizeof(Stage) <= BLOCK_SHARED, "dynamic shared memory of the launch");
static_assert(GDN_DIM % (16 * WARPS) == 0, "a warp has 16 values");

DEVICE void load_stage(Stage& stage, const GdnStateParams& p, int chunk, int head, int first_tile) {
    const GdnWorkspace& from = p.workspace;
    const int64_t block = static_cast<int64_t>(chunk) * VALUE_HEADS + head;
    const int64_t key_block = static_cast<int64_t>(chunk) * KEY_HEADS + head / GDN_RATIO;
    copy_linear<W_BLOCK>(stage.w, from.w + block * W_BLOCK);
    copy_linear<WARPS * WARP_U>(stage.u, from.u + block * U_BLOCK + first_tile * WARP_U);
    copy_rows(stage.key, from.key + key_block * KEY_BLOCK);
    copy_linear<SCALAR_BLOCK>(stage.decay, from.decay + block * CHUNK);
    copy_linear<SCALAR_BLOCK>(stage.key_scale, from.key_scale + key_block * CHUNK);
}

// The last three columns of history and projections together; a thread moves the same 8 channels of all three.
DEVICE void advance_history(const GdnStateParams& p) {
    const int n_threads = static_cast<int>(gridDim.x * gridDim.y) * THREADS;
    const int first = (static_cast<int>(blockIdx.y) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * THREADS;
    for (int i = first + static_cast<int>(threadIdx.x); i < GDN_CHANNELS / 8; i += n_threads) {
        const int channel = 8 * i;
        const bool is_value = channel >= 2 * GDN_KEY_WIDTH;
        const uint16_t* const source = is_value ? p.vz + channel - 2 * GDN_KEY_WIDTH : p.qk + channel;
        const int stride = is_value ? p.vz_stride : p.qk_stride;
        uint4 words[GDN_HISTORY];
#pragma unroll
        for (int j = 0; j < GDN_HISTORY; ++j) {
            const int t = p.n_tokens - GDN_HISTORY + j;
            words[j] = load_16(t < 0 ? p.history + (t + GDN_HISTORY) * GDN_CHANNELS + channel
                                     : source + static_cast<int64_t>(t) * stride);
        }
#pragma unroll
        for (int j = 0; j < GDN_HISTORY; ++j) store_16(p.history + j * GDN_CHANNELS + channel, words[j]);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gdn_prefill_state(const __grid_constant__ GdnStateParams p) {
    DYNAMIC_SHARED(Stage, stages);
    grid_dependency_launch();
    grid_dependency_wait();
    const int head = static_cast<int>(blockIdx.x), lane = static_cast<int>(lane_id()), warp = warp_index();
    const int first_tile = static_cast<int>(blockIdx.y) * WARPS, tile = first_tile + warp;
    const int n_chunks = ceil_div(p.n_tokens, CHUNK);
    load_stage(stages[0], p, 0, head, first_tile);
    cp_async_commit();
    advance_history(p);

    // c0 c1 | c2 c3 of tile n: values g | g + 8, keys 8 n + 2 t + {0, 1}, for lane = 4 g + t.
    float* const matrix = p.state + (static_cast<int64_t>(head) * GDN_DIM + 16 * tile + lane / 4) * GDN_DIM + lane % 4 * 2;
    float s[16][4];
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 x = load_global<float2>(matrix + half * 8 * GDN_DIM + 8 * n);
            s[n][2 * half] = x.x, s[n][2 * half + 1] = x.y;
        }

#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; ++chunk) {
        Stage& stage = stages[chunk % STAGES];
        if (chunk + 1 < n_chunks) load_stage(stages[(chunk + 1) % STAGES], p, chunk + 1, head, first_tile);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const int64_t block = static_cast<int64_t>(chunk) * VALUE_HEADS + head;

        float v[8][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint4 u = *reinterpret_cast<const uint4*>(stage.u + (4 * warp + step) * PIECE + 16 * lane);
            v[2 * step][0] = bf16_lo(u.x), v[2 * step][1] = bf16_hi(u.x);
            v[2 * step + 1][0] = bf16_lo(u.y), v[2 * step + 1][1] = bf16_hi(u.y);
            v[2 * step][2] = bf16_lo(u.z), v[2 * step][3] = bf16_hi(u.z);
            v[2 * step + 1][2] = bf16_lo(u.w), v[2 * step + 1][3] = bf16_hi(u.w);
        }
        unsigned char* const states = p.workspace.state + block * STATE_BLOCK + tile * (8 * PIECE) + 16 * lane;
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            const uint4 piece = piece_of(s[2 * step], s[2 * step + 1]);
            store_16(states + step * PIECE, piece);
            const uint32_t a[4] = {piece.x, piece.z, piece.y, piece.w};
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const uint4 w = *reinterpret_cast<const uint4*>(stage.w + (4 * step + pair) * PIECE + 16 * lane);
                mma_bf16(v[2 * pair], a, w.x, w.y);
                mma_bf16(v[2 * pair + 1], a, w.z, w.w);
            }
        }
        unsigned char* const values = p.workspace.u + block * U_BLOCK + tile * WARP_U + 16 * lane;
#pragma unroll
        for (int step = 0; step < 4; ++step) store_16(values + step * PIECE, piece_of(v[2 * step], v[2 * step + 1]));

        const float last = stage.decay[CHUNK - 1], decay = exp2_approx(last);
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] *= decay;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            float scaled[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int j = 16 * step + 8 * half + lane % 4 * 2 + e;
                    const float factor = exp2_approx(last - stage.decay[j]) * stage.key_scale[j];
                    scaled[half][e] = v[2 * step + half][e] * factor;
                    scaled[half][e + 2] = v[2 * step + half][e + 2] * factor;
                }
            const uint4 piece = piece_of(scaled[0], scaled[1]);
            const uint32_t a[4] = {piece.x, piece.z, piece.y, piece.w};
#pragma unroll
            for (int pair = 0; pair < 8; ++pair) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, swizzled(stage.key, 16 * step + lane % 16, 2 * pair + lane / 16));
                mma_bf16(s[2 * pair], a, b[0], b[1]);
                mma_bf16(s[2 * pair + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_global(matrix + half * 8 * GDN_DIM + 8 * n, make_float2(s[n][2 * half], s[n][2 * half + 1]));
}
