// Gated DeltaNet prefill, first of three: everything of a chunk of 64 tokens that does not need the state.
//   q, k, v = silu(conv(p));  G, beta;  A_ij = beta_i (k_i . k_j) 2^(G_i - G_j);  T = (I + A)^-1;
//   U = T diag(beta) V;  W = T diag(beta 2^G) K                  gdn_prefill.cuh has the formulas and layouts
// qk [T][2 KEY_HEADS 128], vz [T][2 VALUE_HEADS 128], taps [4][channels], history [3][channels]: bf16; a, b
// [T][VALUE_HEADS], a_log, dt_bias: fp32; pointers and strides multiples of 16 bytes. Tokens behind the last count as
// zeros with beta = 0 and G as before. T is made in fp32, and enters the products as the sum of two bf16 numbers.
// Grid: (VALUE_HEADS / GROUP, chunks), 256 threads; a block does the GROUP value heads of one key head, one by one.
// Reference: backends/reference/gdn.py, relative error of outputs and state 1 %.
#include "common.cuh"
#include "gdn_prefill.cuh"

struct GdnChunksParams {
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

constexpr int WARPS = THREADS / WARP_LANES;
constexpr int ROW_PITCH = GDN_DIM + 8;  // elements; ldmatrix without bank conflicts
constexpr int MATRIX_PITCH = CHUNK + 8;
constexpr int ROWS_PER_WARP = CHUNK / WARPS;
static_assert(WARPS == 8 && GDN_RATIO % GROUP == 0 && GROUP <= WARPS, "work is dealt to eight warps");

struct Shared {
    uint16_t key[CHUNK][ROW_PITCH], value[CHUNK][ROW_PITCH];
    alignas(16) float matrix[CHUNK][MATRIX_PITCH];  // A, then T in its place, 0 above the diagonal
    union {
        alignas(16) uint16_t split[2][CHUNK][MATRIX_PITCH];  // T with scaled columns: rounded, and the rest
        alignas(16) float product[CHUNK / 2][CHUNK / 2 + 4];
    };
    float decay[GROUP][CHUNK], beta[GROUP][CHUNK];
    float key_scale[CHUNK];
};
static_assert(sizeof(Shared) <= BLOCK_SHARED, "dynamic shared memory of the launch");

struct Chunk {
    int first, n_tokens;  // token 0 of the chunk, tokens of the call

    DEVICE bool has(int row) const { return first + row < n_tokens; }
};

// Convolution of ROWS_PER_WARP rows of 4 channels per lane, from `row` on: f(row, words).
template <typename Store>
DEVICE void convolve_rows(const GdnChunksParams& p, Chunk chunk, int row, const uint16_t* projections, int stride,
                          int channel, Store store) {
    channel += 4 * static_cast<int>(lane_id());
    uint2 columns[GDN_HISTORY + ROWS_PER_WARP];
#pragma unroll
    for (int i = 0; i < GDN_HISTORY + ROWS_PER_WARP; ++i) {
        const int t = chunk.first + row + i - GDN_HISTORY;
        columns[i] = t < 0              ? load_8(p.history + (t + GDN_HISTORY) * GDN_CHANNELS + channel)
                     : t < p.n_tokens ? load_8(projections + static_cast<int64_t>(t) * stride)
                                        : uint2{0, 0};
    }
    float w[GDN_TAPS][4];
#pragma unroll
    for (int j = 0; j < GDN_TAPS; ++j) unpack_4(load_8(p.taps + j * GDN_CHANNELS + channel), w[j]);
#pragma unroll
    for (int i = 0; i < ROWS_PER_WARP; ++i) {
        float total[4] = {}, x[4];
#pragma unroll
        for (int j = 0; j < GDN_TAPS; ++j) {
            unpack_4(columns[i + j], x);
#pragma unroll
            for (int e = 0; e < 4; ++e) total[e] = fmaf(w[j][e], x[e], total[e]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) total[e] = silu_fast(total[e]);
        store(row + i, chunk.has(row + i) ? pack_4(total) : uint2{0, 0});
    }
}

// Query and key of the chunk: global, key also shared, and the factors that normalise them.
DEVICE void prepare_keys(Shared& shared, const GdnChunksParams& p, Chunk chunk, int key_head, int64_t block, bool writes) {
    const int lane = static_cast<int>(lane_id()), row = warp_index() * ROWS_PER_WARP;
    const GdnWorkspace& to = p.workspace;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
        if (part == 0 && !writes) continue;
        const int channel = part * GDN_KEY_WIDTH + key_head * GDN_DIM;
        unsigned char* const target = (part ? to.key : to.query) + block * KEY_BLOCK + 8 * lane;
        float* const scales = (part ? to.key_scale : to.query_scale) + block * CHUNK;
        convolve_rows(p, chunk, row, p.qk + channel + 4 * lane, p.qk_stride, channel, [&](int r, uint2 words) {
            float x[4];
            unpack_4(words, x);
            float scale = rsqrt_approx(warp_sum(dot_4(x, x)) + GDN_L2_EPS);
            if (part) {
                *reinterpret_cast<uint2*>(&shared.key[r][4 * lane]) = words;
                if (lane == 0) shared.key_scale[r] = scale;
            } else {
                scale *= GDN_QUERY_SCALE;
            }
            if (writes) {
                store_8(target + r * (GDN_DIM * 2), words);
                if (lane == 0) scales[r] = scale;
            }
        });
    }
}

// log2 of the decays, summed up over the chunk, and beta; one warp, two tokens per lane.
DEVICE void prepare_gates(Shared& shared, const GdnChunksParams& p, Chunk chunk, int member, int head, int64_t block) {
    const int lane = static_cast<int>(lane_id());
    float decay[2] = {0.0f, 0.0f}, beta[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = 2 * lane + i;
        if (!chunk.has(row)) continue;
        const int64_t at = static_cast<int64_t>(chunk.first + row) * p.gate_stride + head;
        decay[i] = gdn_log_decay(p.a[at], p.a_log[head], p.dt_bias[head]) * 1.44269504f;
        beta[i] = sigmoid(p.b[at]);
    }
    float total = decay[0] + decay[1];
#pragma unroll
    for (int delta = 1; delta < WARP_LANES; delta *= 2) {
        const float below = shfl_up(total, delta);
        if (lane >= delta) total += below;
    }
    const float sums[2] = {total - decay[1], total};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        shared.decay[member][2 * lane + i] = sums[i];
        shared.beta[member][2 * lane + i] = beta[i];
        p.workspace.decay[block * CHUNK + 2 * lane + i] = sums[i];
    }
}

// k_i . k_j of the warp's 16 rows and 32 columns, not normalised.
DEVICE void multiply_keys(float (&products)[4][4], const Shared& shared) {
    const int lane = static_cast<int>(lane_id()), row = warp_index() / 2 * 16, column = warp_index() % 2 * 32;
#pragma unroll
    for (int step = 0; step < GDN_DIM / 16; ++step) {
        uint32_t a[4], b[4];
        ldmatrix_x4(a, &shared.key[row + lane % 16][16 * step + lane / 16 * 8]);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            ldmatrix_x4(b, &shared.key[column + 16 * pair + lane / 16 * 8 + lane % 8][16 * step + lane / 8 % 2 * 8]);
            mma_bf16(products[2 * pair], a, b[0], b[1]);
            mma_bf16(products[2 * pair + 1], a, b[2], b[3]);
        }
    }
}

// A of one value head from the products of its keys; 0 on and above the diagonal.
DEVICE void write_matrix(Shared& shared, const float (&products)[4][4], int member) {
    const int lane = static_cast<int>(lane_id());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = warp_index() / 2 * 16 + 8 * half + lane / 4;
        const float scale = shared.beta[member][i] * shared.key_scale[i], decay = shared.decay[member][i];
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
            float x[2];
            const int j = warp_index() % 2 * 32 + 8 * tile + lane % 4 * 2;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float factor = scale * shared.key_scale[j + e] * exp2_approx(decay - shared.decay[member][j + e]);
                x[e] = j + e < i ? products[tile][2 * half + e] * factor : 0.0f;
            }
            *reinterpret_cast<float2*>(&shared.matrix[i][j]) = make_float2(x[0], x[1]);
        }
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
DEVICE void split_matrix(Shared& shared, int member, bool for_keys) {
    const int row = static_cast<int>(threadIdx.x) / 4, first = static_cast<int>(threadIdx.x) % 4 * 16;
#pragma unroll
    for (int i = 0; i < 16; i += 8) {
        uint32_t words[2][4];
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            float rounded[2], rest[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int j = first + i + e + h;
                float x = shared.matrix[row][j] * shared.beta[member][j];
                if (for_keys) x *= shared.key_scale[j] * exp2_approx(shared.decay[member][j]);
                rounded[h] = bf16_to_float(float_to_bf16(x));
                rest[h] = x - rounded[h];
            }
            words[0][e / 2] = pack_bf16(rounded[0], rounded[1]);
            words[1][e / 2] = pack_bf16(rest[0], rest[1]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<uint4*>(&shared.split[h][row][first + i]) =
                uint4{words[h][0], words[h][1], words[h][2], words[h][3]};
    }
}

// U transposed, 16 values per warp: rows are values, columns tokens.
DEVICE void multiply_values(const Shared& shared, unsigned char* block) {
    const int lane = static_cast<int>(lane_id()), warp = warp_index();
    float sums[8][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        uint32_t a[4], b[4];
        ldmatrix_x4_trans(a, &shared.value[16 * step + lane / 16 * 8 + lane % 8][16 * warp + lane / 8 % 2 * 8]);
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
DEVICE void multiply_by_keys(const Shared& shared, unsigned char* block) {
    const int lane = static_cast<int>(lane_id()), warp = warp_index();
    float sums[4][2][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        uint32_t a[4], b[4];
        ldmatrix_x4_trans(b, &shared.key[16 * step + lane % 16][16 * warp + lane / 16 * 8]);
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
    const int warp = warp_index(), lane = static_cast<int>(lane_id()), index = static_cast<int>(blockIdx.y);
    const int first_head = static_cast<int>(blockIdx.x) * GROUP, key_head = first_head / GDN_RATIO;
    const Chunk chunk = {index * CHUNK, p.n_tokens};

    prepare_keys(*shared, p, chunk, key_head, static_cast<int64_t>(index) * KEY_HEADS + key_head,
                 first_head % GDN_RATIO == 0);
    if (warp < GROUP) {
        const int head = first_head + warp;
        prepare_gates(*shared, p, chunk, warp, head, static_cast<int64_t>(index) * VALUE_HEADS + head);
    }
    __syncthreads();
    float products[4][4] = {};
    multiply_keys(products, *shared);

#pragma unroll 1
    for (int member = 0; member < GROUP; ++member) {
        const int head = first_head + member;
        const int64_t block = static_cast<int64_t>(index) * VALUE_HEADS + head;
        write_matrix(*shared, products, member);
        __syncthreads();
        // Two warps invert, the others convolve the values; theirs come after.
        if (warp < 2) invert_diagonal(*shared, warp);
        const int rows = (warp + WARPS - 2) % WARPS * ROWS_PER_WARP;
        convolve_rows(p, chunk, rows, p.vz + head * GDN_DIM + 4 * lane, p.vz_stride, 2 * GDN_KEY_WIDTH + head * GDN_DIM,
                      [&](int r, uint2 words) { *reinterpret_cast<uint2*>(&shared->value[r][4 * lane]) = words; });
        __syncthreads();
        invert_rest(*shared);
        split_matrix(*shared, member, false);
        __syncthreads();
        multiply_values(*shared, p.workspace.u + block * U_BLOCK);
        __syncthreads();
        split_matrix(*shared, member, true);
        __syncthreads();
        multiply_by_keys(*shared, p.workspace.w + block * W_BLOCK);
    }
}
