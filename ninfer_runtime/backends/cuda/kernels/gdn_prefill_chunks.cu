// Gated DeltaNet prefill, second of four: everything of a chunk of 64 tokens that does not need the state.
//   A_ij = beta_i (k_i . k_j) 2^(G_i - G_j);  T = (I + A)^-1;  U = T diag(beta) V;  W = T diag(beta 2^G) K
// gdn_prefill.cuh has formulas and layouts. T is made in fp32 and enters the products as the sum of two bf16 numbers.
// Grid: (VALUE_HEADS, chunks), 256 threads. Reference: backends/reference/gdn.py, relative error 1 %.
#include "common.cuh"
#include "gdn_prefill.cuh"

struct GdnChunksParams {
    GdnWorkspace workspace;
};

namespace {

constexpr int MATRIX_PITCH = CHUNK + 8;
static_assert(THREADS == 256, "work is dealt to eight warps");

struct Shared {
    unsigned char key[KEY_BLOCK], value[KEY_BLOCK];
    alignas(16) float matrix[CHUNK][MATRIX_PITCH];  // A, then T in its place, 0 above the diagonal
    union {
        alignas(16) uint16_t split[2][CHUNK][MATRIX_PITCH];  // T with scaled columns: rounded, and the rest
        alignas(16) float product[CHUNK / 2][CHUNK / 2 + 4];
    };
    alignas(16) float decay[CHUNK];
    alignas(16) float beta[CHUNK];
    alignas(16) float key_scale[CHUNK];
};
static_assert(sizeof(Shared) <= BLOCK_SHARED, "dynamic shared memory of the launch");

// A: the warp's 16 rows and 32 columns; 0 on and above the diagonal.
DEVICE void write_matrix(Shared& shared) {
    const int lane = static_cast<int>(lane_id()), row = warp_index() / 2 * 16, column = warp_index() % 2 * 32;
    float products[4][4] = {};
    if (column < row + 16) {
#pragma unroll
        for (int step = 0; step < GDN_DIM / 16; ++step) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, swizzled(shared.key, row + lane % 16, 2 * step + lane / 16));
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const int token = column + 16 * pair + lane / 16 * 8 + lane % 8;
                ldmatrix_x4(b, swizzled(shared.key, token, 2 * step + lane / 8 % 2));
                mma_bf16(products[2 * pair], a, b[0], b[1]);
                mma_bf16(products[2 * pair + 1], a, b[2], b[3]);
            }
        }
    }
    float decay[2], scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = row + 8 * half + lane / 4;
        decay[half] = shared.decay[i];
        scale[half] = shared.beta[i] * shared.key_scale[i];
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
        const int j = column + 8 * tile + lane % 4 * 2;
        float x[2][2] = {};
        if (column + 8 * tile < row + 16) {
            const float2 column_decay = *reinterpret_cast<const float2*>(&shared.decay[j]);
            const float2 column_scale = *reinterpret_cast<const float2*>(&shared.key_scale[j]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = row + 8 * half + lane / 4;
                const float* const sums = &products[tile][2 * half];
                x[half][0] = sums[0] * (scale[half] * column_scale.x * exp2_approx(decay[half] - column_decay.x));
                x[half][1] = sums[1] * (scale[half] * column_scale.y * exp2_approx(decay[half] - column_decay.y));
                if (j >= i) x[half][0] = 0.0f;
                if (j + 1 >= i) x[half][1] = 0.0f;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float2*>(&shared.matrix[row + 8 * half + lane / 4][j]) = make_float2(x[half][0], x[half][1]);
    }
}

// (I + A)^-1 of two of the four 16x16 blocks on the diagonal, half a warp each, a column per lane.
DEVICE void invert_diagonal(Shared& shared, int pair) {
    const int lane = static_cast<int>(lane_id()), column = lane % 16, first = 32 * pair + lane / 16 * 16;
    float t[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum[2] = {i == column ? 1.0f : 0.0f, 0.0f};
#pragma unroll
        for (int l = 0; l < i; l += 4) {
            const Float4 a = *reinterpret_cast<const Float4*>(&shared.matrix[first + i][first + l]);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (l + e < i) sum[e % 2] = fmaf(-a.v[e], t[l + e], sum[e % 2]);
        }
        t[i] = sum[0] + sum[1];
    }
    warp_sync();
#pragma unroll
    for (int i = 0; i < 16; ++i) shared.matrix[first + i][first + column] = t[i];
}

template <int WIDTH>
struct alignas(4 * WIDTH) Columns {
    float v[WIDTH];
};

// out[c..c+WIDTH) = sign * sum_l x_row[l] y[l][c..c+WIDTH), l < LENGTH.
template <int LENGTH, int WIDTH, int Y_PITCH>
DEVICE void row_times_matrix(const float* x_row, const float* y, int column, float sign, float* out) {
    Columns<WIDTH> sum = {};
#pragma unroll
    for (int l = 0; l < LENGTH; l += 4) {
        const Float4 x = *reinterpret_cast<const Float4*>(x_row + l);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Columns<WIDTH> row = *reinterpret_cast<const Columns<WIDTH>*>(y + (l + i) * Y_PITCH + column);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) sum.v[e] = fmaf(x.v[i], row.v[e], sum.v[e]);
        }
    }
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) sum.v[e] *= sign;
    *reinterpret_cast<Columns<WIDTH>*>(out + column) = sum;
}

// The inverse of the whole from those of its diagonal blocks: T21 = -T22 A21 T11, for sizes 16 and 32.
DEVICE void invert_rest(Shared& shared) {
    constexpr int PITCH = MATRIX_PITCH, PRODUCT_PITCH = CHUNK / 2 + 4;
    const int thread = static_cast<int>(threadIdx.x);
    {
        const int first = thread / 128 * 32, i = thread % 128 / 8, column = thread % 8 * 2;
        float* const block = &shared.matrix[first][first];
        float* const product = shared.product[thread / 128 * 16];
        row_times_matrix<16, 2, PITCH>(block + (16 + i) * PITCH, block, column, 1.0f, product + i * PRODUCT_PITCH);
        __syncthreads();
        row_times_matrix<16, 2, PRODUCT_PITCH>(block + (16 + i) * PITCH + 16, product, column, -1.0f,
                                                      block + (16 + i) * PITCH);
        __syncthreads();
    }
    const int i = thread / 8, column = thread % 8 * 4;
    float* const block = &shared.matrix[0][0];
    row_times_matrix<32, 4, PITCH>(block + (32 + i) * PITCH, block, column, 1.0f, shared.product[i]);
    __syncthreads();
    row_times_matrix<32, 4, PRODUCT_PITCH>(block + (32 + i) * PITCH + 32, shared.product[0], column, -1.0f,
                                                  block + (32 + i) * PITCH);
    __syncthreads();
}

// Columns of T times beta_j, for W also times 2^G_j / |k_j|, as two bf16 numbers each.
DEVICE void split_matrix(Shared& shared, bool for_keys) {
    const int column = static_cast<int>(threadIdx.x) % 16 * 4, first = static_cast<int>(threadIdx.x) / 16;
    Float4 scale = *reinterpret_cast<const Float4*>(&shared.beta[column]);
    if (for_keys) {
        const Float4 norm = *reinterpret_cast<const Float4*>(&shared.key_scale[column]);
        const Float4 decay = *reinterpret_cast<const Float4*>(&shared.decay[column]);
#pragma unroll
        for (int e = 0; e < 4; ++e) scale.v[e] *= norm.v[e] * exp2_approx(decay.v[e]);
    }
#pragma unroll
    for (int row = first; row < CHUNK; row += THREADS / 16) {
        Float4 x = *reinterpret_cast<const Float4*>(&shared.matrix[row][column]);
#pragma unroll
        for (int e = 0; e < 4; ++e) x.v[e] *= scale.v[e];
        const uint2 rounded = pack_4(x.v);
        const float rest[4] = {x.v[0] - bf16_lo(rounded.x), x.v[1] - bf16_hi(rounded.x), x.v[2] - bf16_lo(rounded.y),
                               x.v[3] - bf16_hi(rounded.y)};
        *reinterpret_cast<uint2*>(&shared.split[0][row][column]) = rounded;
        *reinterpret_cast<uint2*>(&shared.split[1][row][column]) = pack_4(rest);
    }
}

// U transposed, 16 values per warp: rows are values, columns tokens.
DEVICE void multiply_values(Shared& shared, unsigned char* block) {
    const int lane = static_cast<int>(lane_id()), warp = warp_index();
    float sums[8][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        uint32_t a[4], b[4];
        ldmatrix_x4_trans(a, swizzled(shared.value, 16 * step + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
        for (int pair = step; pair < 4; ++pair)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                ldmatrix_x4(b, &shared.split[h][16 * pair + lane / 16 * 8 + lane % 8][16 * step + lane / 8 % 2 * 8]);
                mma_bf16(sums[2 * pair], a, b[0], b[1]);
                mma_bf16(sums[2 * pair + 1], a, b[2], b[3]);
            }
    }
#pragma unroll
    for (int step = 0; step < 4; ++step)
        store_16(block + (4 * warp + step) * PIECE + 16 * lane, piece_of(sums[2 * step], sums[2 * step + 1]));
}

// -W, 16 keys per warp: rows are tokens, columns keys.
DEVICE void multiply_by_keys(Shared& shared, unsigned char* block) {
    const int lane = static_cast<int>(lane_id()), warp = warp_index();
    float sums[4][2][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        uint32_t a[4], b[4];
        ldmatrix_x4_trans(b, swizzled(shared.key, 16 * step + lane % 16, 2 * warp + lane / 16));
#pragma unroll
        for (int tile = step; tile < 4; ++tile)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                ldmatrix_x4(a, &shared.split[h][16 * tile + lane % 16][16 * step + lane / 16 * 8]);
                mma_bf16(sums[tile][0], a, b[0], b[1]);
                mma_bf16(sums[tile][1], a, b[2], b[3]);
            }
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[tile][0][e] = -sums[tile][0][e], sums[tile][1][e] = -sums[tile][1][e];
        store_16(block + (4 * warp + tile) * PIECE + 16 * lane, piece_of(sums[tile][0], sums[tile][1]));
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gdn_prefill_chunks(const __grid_constant__ GdnChunksParams p) {
    DYNAMIC_SHARED(Shared, shared);
    grid_dependency_launch();
    grid_dependency_wait();
    const int head = static_cast<int>(blockIdx.x);
    const int64_t block = static_cast<int64_t>(blockIdx.y) * VALUE_HEADS + head;
    const int64_t key_block = static_cast<int64_t>(blockIdx.y) * KEY_HEADS + head / GDN_RATIO;
    const GdnWorkspace& space = p.workspace;
    copy_rows(shared->key, space.key + key_block * KEY_BLOCK);
    copy_linear<SCALAR_BLOCK>(shared->key_scale, space.key_scale + key_block * CHUNK);
    copy_linear<SCALAR_BLOCK>(shared->decay, space.decay + block * CHUNK);
    copy_linear<SCALAR_BLOCK>(shared->beta, space.beta + block * CHUNK);
    cp_async_commit();
    copy_rows(shared->value, space.u + block * U_BLOCK);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    write_matrix(*shared);
    __syncthreads();
    if (warp_index() < 2) invert_diagonal(*shared, warp_index());
    __syncthreads();
    invert_rest(*shared);
    split_matrix(*shared, false);
    cp_async_wait<0>();
    __syncthreads();
    multiply_values(*shared, space.u + block * U_BLOCK);
    __syncthreads();
    split_matrix(*shared, true);
    __syncthreads();
    multiply_by_keys(*shared, space.w + block * W_BLOCK);
}
