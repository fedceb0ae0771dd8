// Gated DeltaNet prefill, last of three: outputs of a chunk and head from the state before it, and the gated norm.
//   O_i = 2^G_i q_i S0 + sum_{j <= i} 2^(G_i - G_j) (q_i . k_j) v'_j;   out = rms(O_i) w silu(z_i)
// vz [T][2 VALUE_HEADS 128] (v | z), norm [128], out [T][VALUE_HEADS 128]: bf16, strides in elements, multiples of 8.
// Grid: (VALUE_HEADS, chunks), 128 threads, 16 tokens per warp. gdn_prefill.cuh has formulas and layouts.
// Reference: backends/reference/gdn.py, relative error 1 %.
#include "common.cuh"
#include "gdn_prefill.cuh"

struct GdnOutputParams {
    const uint16_t* vz;
    const uint16_t* norm;
    uint16_t* out;
    GdnWorkspace workspace;
    int vz_stride;
    int out_stride;
    int n_tokens;
    float norm_eps;
};

namespace {

static_assert(THREADS / WARP_LANES * 16 == CHUNK, "a warp has 16 tokens");

struct Shared {
    unsigned char query[KEY_BLOCK];  // later the result
    unsigned char key[KEY_BLOCK];    // later z
    unsigned char state[STATE_BLOCK], values[U_BLOCK];
    float decay[CHUNK], query_scale[CHUNK], key_scale[CHUNK];
};
static_assert(sizeof(Shared) <= BLOCK_SHARED, "dynamic shared memory of the launch");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gdn_prefill_output(const __grid_constant__ GdnOutputParams p) {
    DYNAMIC_SHARED(Shared, shared);
    grid_dependency_launch();
    grid_dependency_wait();
    const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(lane_id()), warp = warp_index();
    const int head = static_cast<int>(blockIdx.x), first = static_cast<int>(blockIdx.y) * CHUNK;
    const int64_t block = static_cast<int64_t>(blockIdx.y) * VALUE_HEADS + head;
    const int64_t key_block = static_cast<int64_t>(blockIdx.y) * KEY_HEADS + head / GDN_RATIO;
    const GdnWorkspace& from = p.workspace;
    copy_rows(shared->query, from.query + key_block * KEY_BLOCK);
    copy_rows(shared->key, from.key + key_block * KEY_BLOCK);
    copy_linear<SCALAR_BLOCK>(shared->decay, from.decay + block * CHUNK);
    copy_linear<SCALAR_BLOCK>(shared->query_scale, from.query_scale + key_block * CHUNK);
    copy_linear<SCALAR_BLOCK>(shared->key_scale, from.key_scale + key_block * CHUNK);
    cp_async_commit();
    copy_linear<STATE_BLOCK>(shared->state, from.state + block * STATE_BLOCK);
    copy_linear<U_BLOCK>(shared->values, from.u + block * U_BLOCK);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();

    // Rows of the warp: tokens 16 warp + g | + 8, for lane = 4 g + t.
    uint32_t q[8][4];
#pragma unroll
    for (int step = 0; step < 8; ++step)
        ldmatrix_x4(q[step], swizzled(shared->query, 16 * warp + lane % 16, 2 * step + lane / 16));
    float row_decay[2], row_scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = 16 * warp + 8 * half + lane / 4;
        row_decay[half] = shared->decay[i];
        row_scale[half] = shared->query_scale[i];
    }
    uint32_t weights[4][4];  // A operand: of tokens 16 step .. + 15
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        if (pair > warp) break;
        float products[2][4] = {};
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            uint32_t b[4];
            ldmatrix_x4(b, swizzled(shared->key, 16 * pair + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
            mma_bf16(products[0], q[step], b[0], b[1]);
            mma_bf16(products[1], q[step], b[2], b[3]);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = 16 * pair + 8 * tile + lane % 4 * 2 + e;
                const float decay = shared->decay[j], scale = shared->key_scale[j];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool seen = j <= 16 * warp + 8 * half + lane / 4;
                    const float factor = row_scale[half] * scale * exp2_approx(row_decay[half] - decay);
                    products[tile][2 * half + e] = seen ? products[tile][2 * half + e] * factor : 0.0f;
                }
            }
        const uint4 piece = piece_of(products[0], products[1]);
        weights[pair][0] = piece.x, weights[pair][1] = piece.z, weights[pair][2] = piece.y, weights[pair][3] = piece.w;
    }
    __syncthreads();  // the keys have been read, z takes their place
    const uint16_t* const z = p.vz + GDN_VALUE_WIDTH + head * GDN_DIM + 8 * (thread % 16);
#pragma unroll
    for (int row = thread / 16; row < CHUNK; row += THREADS / 16) {
        const int t = first + row;
        cp_async_16_zfill(swizzled(shared->key, row, thread % 16),
                          z + static_cast<int64_t>(minimum(t, p.n_tokens - 1)) * p.vz_stride, t < p.n_tokens);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();

    float o[16][4] = {};
#pragma unroll
    for (int step = 0; step < 8; ++step)
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
            const uint4 b = *reinterpret_cast<const uint4*>(shared->state + (8 * tile + step) * PIECE + 16 * lane);
            mma_bf16(o[2 * tile], q[step], b.x, b.y);
            mma_bf16(o[2 * tile + 1], q[step], b.z, b.w);
        }
    const float carried[2] = {row_scale[0] * exp2_approx(row_decay[0]), row_scale[1] * exp2_approx(row_decay[1])};
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] *= carried[e / 2];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        if (step > warp) break;
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
            const uint4 b = *reinterpret_cast<const uint4*>(shared->values + (4 * tile + step) * PIECE + 16 * lane);
            mma_bf16(o[2 * tile], weights[step], b.x, b.y);
            mma_bf16(o[2 * tile + 1], weights[step], b.z, b.w);
        }
    }

    float rms[2] = {};
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) rms[e / 2] = fmaf(o[n][e], o[n][e], rms[e / 2]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rms[half] += shfl_xor(rms[half], 1);
        rms[half] += shfl_xor(rms[half], 2);
        rms[half] = rsqrt_approx(rms[half] * (1.0f / GDN_DIM) + p.norm_eps);
    }
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const uint32_t w = load_4(p.norm + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 16 * warp + 8 * half + lane / 4, within = lane % 4 * 4;
            const uint32_t z = *reinterpret_cast<const uint32_t*>(swizzled(shared->key, i, n) + within);
            const float y0 = o[n][2 * half] * rms[half] * bf16_lo(w) * silu_fast(bf16_lo(z));
            const float y1 = o[n][2 * half + 1] * rms[half] * bf16_hi(w) * silu_fast(bf16_hi(z));
            *reinterpret_cast<uint32_t*>(swizzled(shared->query, i, n) + within) = pack_bf16(y0, y1);
        }
    }
    warp_sync();  // a warp writes out its own 16 rows
#pragma unroll
    for (int i = lane; i < 16 * 16; i += WARP_LANES) {
        const int row = 16 * warp + (i >> 4), t = first + row;
        if (t >= p.n_tokens) continue;
        const uint4 words = *reinterpret_cast<const uint4*>(swizzled(shared->query, row, i & 15));
        store_16(p.out + static_cast<int64_t>(t) * p.out_stride + head * GDN_DIM + 8 * (i & 15), words);
    }
}
