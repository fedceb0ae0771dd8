// out = bf16(softmax(q k / 16) v) * sigmoid(gate), causal, for T new tokens over all cached keys 0 .. start + T, D = 256.
// q (normalised, rotated) and gate bf16 [T][stride], keys and values in pages; rows of a tile: (token, head of the KV
// group). A block multiplies 128 rows by 32 keys at a time; work is dealt evenly to one wave of blocks in units of
// (KV head, tile, 32 keys). FP6 codes become fp16 in shared memory, BF16 words stay; INT8 has attention_prefill_int8.cu.
// Where keys and values are rotated, the queries are too, and the result is left in fp32 for prefill_unrotate. fp32
// accumulation, softmax to base 2.
// Reference backends/reference/attention.py; tolerance 1 % of a head's norm, see specs/kernels.md.
#include "common.cuh"
#include "attention_prefill.cuh"

static_assert(!KV_INT8, "INT8 has a kernel of its own");

constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int PLANE_BYTES = TILE_KEYS * ROW_BYTES;
constexpr int SHARED_V = 2 * PLANE_BYTES;
constexpr int SHARED_WEIGHTS = 4 * PLANE_BYTES;
constexpr int SHARED_FACTORS = SHARED_WEIGHTS + 2 * WEIGHT_BYTES;
constexpr int SHARED_RAW = SHARED_FACTORS + 2 * TILE_ROWS * 4;  // FP6 codes on their way: K, then V
constexpr int RAW_BYTES = TILE_KEYS * KEY_BYTES;
constexpr int COPY_BYTES = KV_FP6 ? 8 : 16;  // a thread's 32 dims of FP6 are 24 bytes
constexpr int THREAD_CHUNKS = TILE_KEYS * KEY_BYTES / COPY_BYTES / THREADS;
// Steps between the request of a tile and the step that finishes it: coded bytes wait in `raw`, words go to their place.
constexpr int AHEAD = KV_FP6 ? 1 : 0;

DEVICE void mma_16bit(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if KV_FP6
    mma_f16(d, a, b0, b1);
#else
    mma_bf16(d, a, b0, b1);
#endif
}

// 16-byte chunk of a row of a K or V tile. Eight rows of one chunk lie in different banks; so do, of one row, the eight
// chunks that eight neighbouring threads write at once: with FP6 they differ in bits 2, 3 and 4 of the chunk.
DEVICE int chunk_offset(int key, int chunk) {
    const int place = KV_FP6 ? chunk >> 2 | (chunk & 3) << 3 : chunk;
    return key * ROW_BYTES + 16 * (place ^ (key & 7));
}

// chunk_offset(key, 2 * step + odd) without the key's row, for key % 8 == key7: one exclusive or per distinct constant.
DEVICE int fragment_offset(int key7, int step, int odd) {
    if (KV_FP6) return (16 * key7 ^ 16 * (step >> 1)) + 128 * odd + 256 * (step & 1);
    return (16 * (key7 ^ odd) ^ 32 * (step & 3)) + 128 * (step >> 2);
}

// One plane's next tile on its way: each thread finishes the bytes that it requested itself.
struct Request {
#if KV_FP6
    uint16_t scale;  // of all its chunks
#endif

    template <bool IS_K>
    DEVICE void begin(const AttentionPrefillParams& p, int head, int unit, int page, const uint8_t* codes,
                      const uint16_t* scales, uint8_t* plane, uint8_t* raw, const volatile int* nought) {
        const int first_key = unit * TILE_KEYS;
        const int token_in_page = first_key % PAGE_TOKENS;
        const int64_t row = kv_row(page, N_KV_HEADS, head, token_in_page);
        const int n_keys = p.start + p.n_tokens - first_key, thread = static_cast<int>(threadIdx.x) + *nought;
#if KV_FP6
        // 32 dims of a key: 24 bytes; of a value 16 and then 8. Bytes of keys that are not there stay what they were.
        const int key = thread / 8, part = thread % 8;
        const uint8_t* const from = codes + (row + key) * KEY_BYTES + (IS_K ? 24 * part : part / 2 * 48 + part % 2 * 16);
        const int third = IS_K ? 16 : 32 - 8 * (part % 2);
        if (key < n_keys) {
#pragma unroll
            for (int n = 0; n < THREAD_CHUNKS; ++n) cp_async_8(raw + 8 * (thread + n * THREADS), from + (n < 2 ? 8 * n : third));
        }
        scale = 0;
        if (key < n_keys) scale = scales[scale_index(row, token_in_page, part / 2) + key];
#else
        const uint8_t* const from = codes + row * HEAD_DIM * 2;
#pragma unroll
        for (int n = 0; n < THREAD_CHUNKS; ++n) {
            const int index = thread + n * THREADS, key = index / 32;
            cp_async_16_zfill(plane + chunk_offset(key, index % 32), from + 16 * index, key < n_keys);
        }
#endif
    }

    template <bool IS_K>
    DEVICE void finish(uint8_t* plane, const uint8_t* raw, const volatile int* nought) const {
#if KV_FP6
        const int thread = static_cast<int>(threadIdx.x) + *nought, key = thread / 8, part = thread % 8;
        const uint32_t factor = scale | static_cast<uint32_t>(scale) << 16;
        uint32_t packed[6];
#pragma unroll
        for (int n = 0; n < THREAD_CHUNKS; ++n) {
            const uint2 two = *reinterpret_cast<const uint2*>(raw + 8 * (thread + n * THREADS));
            packed[2 * n] = two.x, packed[2 * n + 1] = two.y;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t word[8];
            if (IS_K) {
                const uint32_t unit[3] = {packed[3 * half], packed[3 * half + 1], packed[3 * half + 2]};
                unpack_fp6_key(unit, word);
            } else {
                const uint32_t mantissas[2] = {prmt(packed[4 + half], 0, 0x4140), prmt(packed[4 + half], 0, 0x4342)};
#pragma unroll
                for (int i = 0; i < 8; ++i) word[i] = fp6_pair(packed[2 * half + i / 4], mantissas[i / 4], i % 4);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) word[i] = scaled_fp6(word[i], factor);
            const int chunk = 4 * part + 2 * half;
            *reinterpret_cast<uint4*>(plane + chunk_offset(key, chunk)) = {word[0], word[1], word[2], word[3]};
            *reinterpret_cast<uint4*>(plane + chunk_offset(key, chunk + 1)) = {word[4], word[5], word[6], word[7]};
        }
#endif
    }
};

// The queries of rows 16 warp + g and + 8 of a tile.
struct Scorer {
    uint32_t query[HEAD_DIM / 16][4];

    DEVICE void load(const AttentionPrefillParams& p, int head, int tile) {
        const int t = lane_id() % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile * TILE_ROWS + 16 * warp_index() + static_cast<int>(lane_id()) / 4 + 8 * half;
            const int token = row / RATIO;
            const uint16_t* const from =
                p.qk + static_cast<int64_t>(token) * p.qk_stride + (head * RATIO + row % RATIO) * HEAD_DIM + 2 * t;
#pragma unroll
            for (int step = 0; step < HEAD_DIM / 16; ++step) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint32_t word = token < p.n_tokens ? load_4(from + 16 * step + 8 * i) : 0;
                    query[step][half + 2 * i] = KV_FP6 ? pack_half(bf16_lo(word), bf16_hi(word)) : word;
                }
            }
        }
    }

    DEVICE void score(float (&s)[TILE_KEYS / 8][4], const uint8_t* k_plane) const {
        const int key7 = lane_id() % 8, matrix = lane_id() / 8;
        const uint8_t* const row = k_plane + (matrix / 2 * 8 + key7) * ROW_BYTES;
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
        uint32_t b[3][TILE_KEYS / 16][4];  // of this step and the next two: the loads' latency is the longest thing here
        load_keys(b[0], row, key7, matrix, 0);
        load_keys(b[1], row, key7, matrix, 1);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            if (step + 2 < HEAD_DIM / 16) load_keys(b[(step + 2) % 3], row, key7, matrix, step + 2);
#pragma unroll
            for (int pair = 0; pair < TILE_KEYS / 16; ++pair) {
                mma_16bit(s[2 * pair], query[step], b[step % 3][pair][0], b[step % 3][pair][1]);
                mma_16bit(s[2 * pair + 1], query[step], b[step % 3][pair][2], b[step % 3][pair][3]);
            }
        }
    }

    DEVICE static void load_keys(uint32_t (&b)[TILE_KEYS / 16][4], const uint8_t* row, int key7, int matrix, int step) {
#pragma unroll
        for (int pair = 0; pair < TILE_KEYS / 16; ++pair)
            ldmatrix_x4(b[pair], row + 16 * pair * ROW_BYTES + fragment_offset(key7, step, matrix % 2));
    }

};

// 64 rows by 64 dims of the sum of weighted values.
struct Mixer {
    float acc[4][8][4];

    DEVICE static int first_row() { return warp_index() / 4 * 64; }
    DEVICE static int first_dim() { return warp_index() % 4 * 64; }

    DEVICE void clear() {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int n = 0; n < 8; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
        }
    }

    DEVICE void shrink(const float* factors) {
        const int g = lane_id() / 4;
        float factor[4][2];
        bool any = false;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                factor[m][half] = factors[first_row() + 16 * m + 8 * half + g];
                any = any || factor[m][half] != 1.0f;
            }
        }
        if (ballot(any) == 0) return;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[m][n][i] *= factor[m][i / 2];
            }
        }
    }

    DEVICE void add(const uint8_t* weights, const uint8_t* v_plane) {
        const int key7 = lane_id() % 8, matrix = lane_id() / 8;
        const uint8_t* const rows = weights + (first_row() + matrix % 2 * 8 + key7) * TILE_KEYS * 2;
        const uint8_t* const keys = v_plane + (matrix % 2 * 8 + key7) * ROW_BYTES;
#pragma unroll
        for (int step = 0; step < TILE_KEYS / 16; ++step) {
            const int chunk = 16 * (matrix / 2 ^ key7 >> 1) ^ 32 * step;
            uint32_t a[4][4];
#pragma unroll
            for (int m = 0; m < 4; ++m) ldmatrix_x4(a[m], rows + 16 * m * TILE_KEYS * 2 + chunk);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, keys + 16 * step * ROW_BYTES +
                                         fragment_offset(key7, 4 * (warp_index() % 4) + pair, matrix / 2));
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    mma_16bit(acc[m][2 * pair], a[m], b[0], b[1]);
                    mma_16bit(acc[m][2 * pair + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_prefill(const __grid_constant__ AttentionPrefillParams p) {
    DYNAMIC_SHARED(uint8_t, shared);
    STATIC_SHARED(int, nought[1]);  // holds 0, which the compiler does not know: what depends on it is not kept in registers
    STATIC_SHARED(int, page_ids[PAGE_RING]);
    STATIC_SHARED(int, parked[2]);  // slot and left, which the loop over keys has no registers for
    uint8_t* const v_planes = shared + SHARED_V;
    uint8_t* const weights = shared + SHARED_WEIGHTS;
    float* const factors = reinterpret_cast<float*>(shared + SHARED_FACTORS);
    uint8_t* const raw = shared + SHARED_RAW;
    const int part = static_cast<int>(blockIdx.x), per_head = head_units(p), total = N_KV_HEADS * per_head;
    const int n_parts = minimum(p.n_parts, total);
    grid_dependency_wait();
    grid_dependency_launch();
    if (part >= n_parts) return;
    const int begin = part_begin(part, n_parts, total);
    int left = part_begin(part + 1, n_parts, total) - begin;
    int head = begin / per_head, unit = begin % per_head, tile = 0;
    while (unit >= tile_units(p, tile)) unit -= tile_units(p, tile++);

    if (threadIdx.x == 0) nought[0] = 0;
    __syncthreads();
    while (left > 0) {
        const int end = minimum(tile_units(p, tile), unit + left);
        const int slot = unit == 0 && end == tile_units(p, tile) ? WHOLE : 2 * part + (unit == 0 ? 1 : 0);
        left -= end - unit;
        if (threadIdx.x == 0) parked[0] = slot, parked[1] = left;
        const int last_page = (end - 1) / PAGE_UNITS;
        if (threadIdx.x < PAGE_RING) {
            const int index = unit / PAGE_UNITS + static_cast<int>(threadIdx.x);
            page_ids[index % PAGE_RING] = p.pages[minimum(index, last_page)];
        }
        Request k_request, v_request;
        const int first_page = p.pages[unit / PAGE_UNITS];
        k_request.begin<true>(p, head, unit, first_page, p.k, p.k_scales, shared + unit % 2 * PLANE_BYTES, raw, nought);
        cp_async_commit();
        Scorer scorer;
        scorer.load(p, head, tile);
        TileSoftmax<false> softmax;
        softmax.clear();
        cp_async_wait<0>();
        k_request.finish<true>(shared + unit % 2 * PLANE_BYTES, raw, nought);
        __syncthreads();
        if (AHEAD == 1) {
            if (unit + 1 < end)
                k_request.begin<true>(p, head, unit + 1, page_ids[(unit + 1) / PAGE_UNITS % PAGE_RING], p.k, p.k_scales, shared, raw,
                                nought);
            v_request.begin<false>(p, head, unit, first_page, p.v, p.v_scales, v_planes, raw + RAW_BYTES, nought);
            cp_async_commit();
        }
        Mixer mixer;
        mixer.clear();

        // The weights of tile `unit` times its values, beside the scores of the next; then the next V and K are ready.
        bool mixes = false;
#pragma unroll 1
        for (--unit; unit < end; ++unit, mixes = true) {
            const int now = unit & 1, next = 1 - now;
            uint8_t* const k_free = shared + now * PLANE_BYTES;
            uint8_t* const v_free = v_planes + next * PLANE_BYTES;
            if (threadIdx.x == 0 && (unit + 6) % PAGE_UNITS == 0 && unit + 6 < end)
                cp_async_4(page_ids + (unit + 6) / PAGE_UNITS % PAGE_RING, p.pages + (unit + 6) / PAGE_UNITS);
            if (AHEAD == 0) {
                if (unit + 2 < end)
                    k_request.begin<true>(p, head, unit + 2, page_ids[(unit + 2) / PAGE_UNITS % PAGE_RING], p.k, p.k_scales, k_free,
                                    raw, nought);
                if (unit + 1 < end)
                    v_request.begin<false>(p, head, unit + 1, page_ids[(unit + 1) / PAGE_UNITS % PAGE_RING], p.v, p.v_scales, v_free,
                                    raw, nought);
                cp_async_commit();
            }
            // Half of the warps score first, the others mix first: one's softmax runs beside the other's products.
#pragma unroll 1
            for (int turn = 0; turn < 2; ++turn) {
                if (unit + 1 < end && turn == warp_index() / (WARPS / 2)) {
                    float s[TILE_KEYS / 8][4];
                    scorer.score(s, shared + next * PLANE_BYTES);
                    softmax.weigh(s, {SCORE_SCALE, SCORE_SCALE}, weights + next * WEIGHT_BYTES, factors + next * TILE_ROWS,
                                  (unit + 1) * TILE_KEYS, p.start, tile);
                }
                if (turn == 0 && AHEAD == 1) {
                    cp_async_wait<0>();
                    if (unit + 2 < end) k_request.finish<true>(k_free, raw, nought);
                    if (unit + 1 < end) v_request.finish<false>(v_free, raw + RAW_BYTES, nought);
                    if (unit + 3 < end)
                        k_request.begin<true>(p, head, unit + 3, page_ids[(unit + 3) / PAGE_UNITS % PAGE_RING], p.k, p.k_scales,
                                        k_free, raw, nought);
                    if (unit + 2 < end)
                        v_request.begin<false>(p, head, unit + 2, page_ids[(unit + 2) / PAGE_UNITS % PAGE_RING], p.v, p.v_scales,
                                        v_free, raw + RAW_BYTES, nought);
                    cp_async_commit();
                }
                if (mixes && turn == 0) {
                    mixer.shrink(factors + now * TILE_ROWS);
                    mixer.add(weights + now * WEIGHT_BYTES, v_planes + now * PLANE_BYTES);
                }
            }
            if (AHEAD == 0) cp_async_wait<0>();
            __syncthreads();
        }

        float* const references = factors;
        float* const sums = factors + TILE_ROWS;
        softmax.publish(references, sums);
        __syncthreads();
        const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Mixer::first_row() + 16 * m + 8 * half + g, dim = Mixer::first_dim() + 2 * t;
                const int tile_row = tile * TILE_ROWS + row, token = tile_row / RATIO;
                const float(&acc)[8][4] = mixer.acc[m];
                if (parked[0] != WHOLE) {
                    float* const to = p.partial + (static_cast<int64_t>(parked[0]) * TILE_ROWS + row) * HEAD_DIM + dim;
#pragma unroll
                    for (int n = 0; n < 8; ++n)
                        store_8(to + 8 * n, {__float_as_uint(acc[n][2 * half]), __float_as_uint(acc[n][2 * half + 1])});
                } else if (token < p.n_tokens && p.mixed != nullptr) {
                    float* const to = p.mixed + row_begin(token, N_HEADS * HEAD_DIM, head, tile_row) + dim;
                    const float scale = 1.0f / sums[row];
#pragma unroll
                    for (int n = 0; n < 8; ++n)
                        store_8(to + 8 * n, {__float_as_uint(acc[n][2 * half] * scale),
                                             __float_as_uint(acc[n][2 * half + 1] * scale)});
                } else if (token < p.n_tokens) {
                    const uint16_t* const gates = p.gv + row_begin(token, p.gv_stride, head, tile_row) + dim;
                    uint16_t* const to = p.out + row_begin(token, p.out_stride, head, tile_row) + dim;
                    uint32_t gate[8];
#pragma unroll
                    for (int n = 0; n < 8; ++n) gate[n] = load_4(gates + 8 * n);
                    const float scale = 1.0f / sums[row];
#pragma unroll
                    for (int n = 0; n < 8; ++n)
                        store_4(to + 8 * n, gated(acc[n][2 * half] * scale, acc[n][2 * half + 1] * scale, gate[n]));
                }
            }
        }
        if (parked[0] != WHOLE && threadIdx.x < TILE_ROWS)
            store_8(p.stats + (parked[0] * TILE_ROWS + threadIdx.x) * 2,
                    {__float_as_uint(references[threadIdx.x]), __float_as_uint(sums[threadIdx.x])});
        left = parked[1];
        __syncthreads();
        unit = 0;
        if (++tile == n_tiles(p)) tile = 0, ++head;
    }
}
