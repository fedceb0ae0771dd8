// attention_prefill over INT8 keys and values: out = bf16(softmax(q k / 16) v) * sigmoid(gate), causal, for T new tokens
// over all cached keys 0 .. start + T, D = 256. q (normalised, rotated) and gate bf16 [T][stride]; parameters, tiles and the
// division of work as in attention_prefill.cu. Queries become 16-bit integers with one scale per row, multiplied as high and
// low bytes by the codes of K (s8 products, exact sums over 64 dims); codes of V become fp16 times scale in the registers of
// the one warp that multiplies them. fp32 accumulation, softmax to base 2.
// Reference backends/reference/attention.py; tolerance 1 % of a head's norm, see specs/kernels.md.
#include "common.cuh"
#include "attention_prefill.cuh"

constexpr int HELD_LOWS = 2;  // groups whose low bytes of queries are kept in registers; there are none for the others
constexpr int K_SLOTS = 3, V_SLOTS = 4;  // planes that are read, wait, or are on their way
constexpr int SCALES_AT = TILE_KEYS * HEAD_DIM;
constexpr int PLANE_BYTES = SCALES_AT + TILE_KEYS * GROUPS * 2;
constexpr int SHARED_V = K_SLOTS * PLANE_BYTES;
constexpr int SHARED_WEIGHTS = (K_SLOTS + V_SLOTS) * PLANE_BYTES;
constexpr int SHARED_FACTORS = SHARED_WEIGHTS + 2 * WEIGHT_BYTES;
constexpr int SHARED_LOWS = SHARED_FACTORS + 2 * TILE_ROWS * 4;
constexpr int SHARED_SOFTMAX = SHARED_LOWS + (GROUPS - HELD_LOWS) * TILE_ROWS * SCALE_GROUP;
constexpr int SHARED_QUERY_SCALES = SHARED_SOFTMAX + THREADS * 16;
constexpr int SHARED_PARKED = SHARED_QUERY_SCALES + THREADS * 8;
constexpr int KEY_CHUNKS = HEAD_DIM / 16;
constexpr int BATCH = 2;      // times eight keys that are multiplied beside each other
constexpr float QUERY_STEPS = 127.0f * 256.0f;
constexpr float LEAST_QUERY = 1e-30f;  // rows whose largest element is smaller count as zeros

// Where 16 bytes of a key or value lie in a plane; keys 8 apart lie 8 rows apart.
template <bool IS_K>
DEVICE uint32_t place(uint32_t key, uint32_t chunk) {
    return key * HEAD_DIM + 16 * (IS_K ? chunk ^ (key & 4) : chunk ^ (key >> 1 & 3) << 1);
}

DEVICE int k_plane(int unit) { return static_cast<int>(static_cast<uint32_t>(unit) % K_SLOTS) * PLANE_BYTES; }

DEVICE int v_plane(int unit) { return SHARED_V + static_cast<int>(static_cast<uint32_t>(unit) % V_SLOTS) * PLANE_BYTES; }

DEVICE uint32_t page_of(int unit) { return static_cast<uint32_t>(unit) / PAGE_UNITS; }

// A unit's keys (by the first half of the threads) or values (by the second half) on their way: codes and scales. Of its tokens
// `n_keys` are there, or all; the others become zeros, and their scales may be anything.
template <bool IS_K>
DEVICE void request(const AttentionPrefillParams& p, int head, int unit, int page, int n_keys, uint8_t* shared,
                    const volatile uint32_t* nought) {
    constexpr int PASS_KEYS = THREADS / 2 / KEY_CHUNKS, PASS = PASS_KEYS * HEAD_DIM;
    static_assert(TILE_KEYS == 4 * PASS_KEYS && PASS_KEYS % 8 == 0, "four passes");
    const uint32_t thread = threadIdx.x % (THREADS / 2) + *nought, key = thread / KEY_CHUNKS;
    const uint32_t token_in_page = static_cast<uint32_t>(unit) % PAGE_UNITS * TILE_KEYS;
    const int head_page = page * N_KV_HEADS + head;
    const uint8_t* const from = (IS_K ? p.k : p.v) + static_cast<int64_t>(head_page) * (PAGE_TOKENS * HEAD_DIM) +
                                (token_in_page * HEAD_DIM + 16 * thread);
    uint8_t* const plane = shared + (IS_K ? k_plane(unit) : v_plane(unit));
    uint8_t* const to = plane + place<IS_K>(key, thread % KEY_CHUNKS);
    if (n_keys >= TILE_KEYS) {
        cp_async_16_at<0, 0>(to, from);
        cp_async_16_at<PASS, PASS>(to, from);
        cp_async_16_at<2 * PASS, 2 * PASS>(to, from);
        cp_async_16_at<3 * PASS, 3 * PASS>(to, from);
    } else {
        const int behind = n_keys - static_cast<int>(key);
        cp_async_16_zfill_at<0, 0>(to, from, behind > 0);
        cp_async_16_zfill_at<PASS, PASS>(to, from, behind > PASS_KEYS);
        cp_async_16_zfill_at<2 * PASS, 2 * PASS>(to, from, behind > 2 * PASS_KEYS);
        cp_async_16_zfill_at<3 * PASS, 3 * PASS>(to, from, behind > 3 * PASS_KEYS);
    }
    if (thread < TILE_KEYS * GROUPS / 8) {  // 16 bytes: eight keys of a group
        const uint32_t group = thread / (TILE_KEYS / 8), first = thread % (TILE_KEYS / 8) * 8;
        const int64_t at =
            static_cast<int64_t>(head_page) * (PAGE_TOKENS * GROUPS) + (group * PAGE_TOKENS + token_in_page + first);
        cp_async_16_zfill(plane + SCALES_AT + 16 * thread, (IS_K ? p.k_scales : p.v_scales) + at,
                          static_cast<int>(first) < n_keys);
    }
}

// The scales of values that are not there: a weight of 0 times NaN would be NaN. By the threads that requested them.
DEVICE void clear_scales(int unit, int n_keys, uint8_t* shared) {
    const int thread = static_cast<int>(threadIdx.x) - THREADS / 2;
    if (n_keys >= TILE_KEYS || thread < 0 || thread >= TILE_KEYS * GROUPS / 8) return;
    uint16_t* const scales = reinterpret_cast<uint16_t*>(shared + v_plane(unit) + SCALES_AT) + 8 * thread;
    for (int i = 0; i < 8; ++i)
        if (thread % (TILE_KEYS / 8) * 8 + i >= n_keys) scales[i] = 0;
}

// The queries of rows 16 warp + g and + 8 of a tile, as A operands of byte products. A lane takes 16 dims at a time, and of
// the keys likewise: which column of the product a byte becomes does not matter as long as both sides agree.
struct Queries {
    uint32_t high[GROUPS][2][4];
    uint32_t low[HELD_LOWS][2][4];

    // lows, scale: shared memory of the lane: four words for each of the two products of the groups that are not held; the
    // factors of its rows' scores, to base 2.
    DEVICE void load(const AttentionPrefillParams& p, int head, int tile, uint32_t thread, uint32_t* lows, float* scale) {
        const uint32_t t = thread % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile * TILE_ROWS + static_cast<int>(thread / WARP_LANES * 16 + thread % WARP_LANES / 4) + 8 * half;
            const bool is_there = row / RATIO < p.n_tokens;
            const uint16_t* const from = p.qk + row_begin(row / RATIO, p.qk_stride, head, row) + 16 * t;
            uint32_t word[GROUPS][8];
            float largest = 0.0f;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    uint4 words = {0, 0, 0, 0};
                    if (is_there) words = load_16(from + SCALE_GROUP * group + 8 * i);
                    word[group][4 * i] = words.x, word[group][4 * i + 1] = words.y;
                    word[group][4 * i + 2] = words.z, word[group][4 * i + 3] = words.w;
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) {  // NaN stays
                    const float a = fabsf(bf16_lo(word[group][i])), b = fabsf(bf16_hi(word[group][i]));
                    largest = a <= largest ? largest : a;
                    largest = b <= largest || largest != largest ? largest : b;
                }
            }
#pragma unroll
            for (int mask = 1; mask <= 2; mask <<= 1) {
                const float other = shfl_xor(largest, mask);
                largest = other <= largest || largest != largest ? largest : other;
            }
            const bool is_zero = largest < LEAST_QUERY;
            const float inverse = is_zero ? 0.0f : QUERY_STEPS / largest;
            scale[half] = is_zero ? 1.0f : largest * (SCORE_SCALE / QUERY_STEPS);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    uint32_t upper = 0, lower = 0;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const uint32_t pair = word[group][2 * w + i / 2];
                        const int code = float_to_int_rn((i % 2 == 0 ? bf16_lo(pair) : bf16_hi(pair)) * inverse);
                        upper |= (static_cast<uint32_t>(code + 128) >> 8 & 0xff) << 8 * i;
                        lower |= (static_cast<uint32_t>(code) & 0xff) << 8 * i;
                    }
                    high[group][w / 2][half + 2 * (w % 2)] = upper;
                    if (group < HELD_LOWS)
                        low[group < HELD_LOWS ? group : 0][w / 2][half + 2 * (w % 2)] = lower;
                    else
                        lows[low_offset(group, w / 2) + half + 2 * (w % 2)] = lower;
                }
            }
        }
    }

    DEVICE static int low_offset(int group, int product) {
        return (2 * (group - HELD_LOWS) + product) * WARPS * WARP_LANES * 4;
    }

    // BATCH times eight keys at a time: twice as many sums of two products each are under way. Column c of product n is key
    // 4c + n, so that a lane has the scores of eight keys in a row.
    DEVICE void score(float (&s)[TILE_KEYS / 8][4], const uint8_t* plane, const uint32_t* lows) const {
        const int g = lane_id() / 4, t = lane_id() % 4;
        const uint8_t* const row = plane + 4 * g * HEAD_DIM + 16 * t;
        const uint8_t* const scales = plane + SCALES_AT + 16 * t;
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const uint8_t* const keys = row + (64 * group ^ 64 * (g & 1));  // place
            const uint4 words4 = *reinterpret_cast<const uint4*>(scales + 2 * group * TILE_KEYS);
            const uint32_t pairs[4] = {words4.x, words4.y, words4.z, words4.w};
            uint32_t remainder[2][4];
#pragma unroll
            for (int product = 0; product < 2; ++product) {
                uint4 words = {0, 0, 0, 0};
                if (group >= HELD_LOWS) words = *reinterpret_cast<const uint4*>(lows + low_offset(group, product));
                const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    remainder[product][i] = group < HELD_LOWS ? low[group < HELD_LOWS ? group : 0][product][i] : word[i];
            }
#pragma unroll
            for (int first = 0; first < TILE_KEYS / 8; first += BATCH) {
                int upper[BATCH][4] = {}, lower[BATCH][4] = {};
                uint4 k[BATCH];
#pragma unroll
                for (int n = 0; n < BATCH; ++n) k[n] = *reinterpret_cast<const uint4*>(keys + (first + n) * HEAD_DIM);
#pragma unroll
                for (int n = 0; n < BATCH; ++n) mma_s8(upper[n], high[group][0], k[n].x, k[n].y);
#pragma unroll
                for (int n = 0; n < BATCH; ++n) mma_s8(lower[n], remainder[0], k[n].x, k[n].y);
#pragma unroll
                for (int n = 0; n < BATCH; ++n) mma_s8(upper[n], high[group][1], k[n].z, k[n].w);
#pragma unroll
                for (int n = 0; n < BATCH; ++n) mma_s8(lower[n], remainder[1], k[n].z, k[n].w);
#pragma unroll
                for (int n = 0; n < BATCH; ++n) {
                    float key_scale[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint32_t pair = pairs[(first + n) / 2 + 2 * i];
                        key_scale[i] = (first + n) % 2 == 0 ? half_lo(pair) : half_hi(pair);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        s[first + n][i] = fmaf(static_cast<float>(256 * upper[n][i] + lower[n][i]), key_scale[i % 2],
                                               s[first + n][i]);
                }
            }
        }
    }
};

// All rows of a tile by 32 dims of the sum of weighted values: column c of product j is dim 4 c + j.
struct Mixer {
    float acc[TILE_ROWS / 16][4][4];

    DEVICE void clear() {
#pragma unroll
        for (int m = 0; m < TILE_ROWS / 16; ++m) {
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[m][j][0] = acc[m][j][1] = acc[m][j][2] = acc[m][j][3] = 0.0f;
        }
    }

    DEVICE void shrink(const float* factors) {
        const int g = lane_id() / 4;
#pragma unroll
        for (int m = 0; m < TILE_ROWS / 16; ++m) {
            const float factor[2] = {factors[16 * m + g], factors[16 * m + 8 + g]};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[m][j][i] *= factor[i / 2];
            }
        }
    }

    DEVICE void add(const uint8_t* weights, const uint8_t* plane) {
        const int warp = threadIdx.x / WARP_LANES, g = lane_id() / 4, t = lane_id() % 4;
        const int row8 = lane_id() % 8, matrix = lane_id() / 8;
        const uint8_t* const rows = weights + (matrix % 2 * 8 + row8) * TILE_KEYS * 2;
        const uint8_t* const values = plane + 2 * t * HEAD_DIM + 16 * (2 * warp + g / 4 ^ 2 * t) + 4 * (g % 4);  // place
        const uint8_t* const scales = plane + SCALES_AT + 2 * (warp / 2 * TILE_KEYS + 2 * t);
#pragma unroll
        for (int step = 0; step < TILE_KEYS / 16; ++step) {
            uint32_t b[4][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int key = 16 * step + 8 * i;  // + 2 t
                const uint32_t first = *reinterpret_cast<const uint32_t*>(values + key * HEAD_DIM);
                const uint32_t second = *reinterpret_cast<const uint32_t*>(values + (key + 1) * HEAD_DIM);
                const uint32_t factor = *reinterpret_cast<const uint32_t*>(scales + 2 * key);
                const uint32_t low = prmt(first, second, 0x5140);   // two keys of dims 0, 1
                const uint32_t high = prmt(first, second, 0x7362);  // of dims 2, 3
                b[0][i] = mul_f16x2(half_codes(low, 0x4140), factor);
                b[1][i] = mul_f16x2(half_codes(low, 0x4342), factor);
                b[2][i] = mul_f16x2(half_codes(high, 0x4140), factor);
                b[3][i] = mul_f16x2(half_codes(high, 0x4342), factor);
            }
            const uint8_t* const chunk = rows + (16 * (matrix / 2 ^ row8 >> 1) ^ 32 * step);  // weight_offset
#pragma unroll
            for (int m = 0; m < TILE_ROWS / 16; ++m) {
                uint32_t a[4];
                ldmatrix_x4(a, chunk + 16 * m * TILE_KEYS * 2);
#pragma unroll
                for (int j = 0; j < 4; ++j) mma_f16(acc[m][j], a, b[j][0], b[j][1]);
            }
        }
    }
};

DEVICE TileSoftmax<true>& softmax_of(uint8_t* shared, uint32_t thread) {
    return *reinterpret_cast<TileSoftmax<true>*>(shared + (SHARED_SOFTMAX + 16 * thread));
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_prefill_int8(const __grid_constant__ AttentionPrefillParams p) {
    DYNAMIC_SHARED(uint8_t, shared);
    // One address serves all: head and tile wait here, too, as the loop over keys has no registers for them.
    int* const parked = reinterpret_cast<int*>(shared + SHARED_PARKED);  // slot, left, head, tile, units and tokens
    int* const page_ids = parked + 8;
    int* const moves = page_ids + PAGE_RING;  // [2][WARPS]: a factor is not 1
    // It holds 0, which the compiler does not know: what depends on it is not kept.
    volatile uint32_t* const unknown = reinterpret_cast<uint32_t*>(moves + 2 * WARPS);
    uint8_t* const weights = shared + SHARED_WEIGHTS;
    float* const factors = reinterpret_cast<float*>(shared + SHARED_FACTORS);
    uint32_t* const lows = reinterpret_cast<uint32_t*>(shared + SHARED_LOWS);
    float* const query_scales = reinterpret_cast<float*>(shared + SHARED_QUERY_SCALES);
    const int part = static_cast<int>(blockIdx.x), per_head = head_units(p), total = N_KV_HEADS * per_head;
    const int n_parts = minimum(p.n_parts, total);
    grid_dependency_wait();
    grid_dependency_launch();
    if (part >= n_parts) return;
    const int begin = part_begin(part, n_parts, total);
    int left = part_begin(part + 1, n_parts, total) - begin;
    int head = begin / per_head, unit = begin % per_head, tile = 0;
    while (unit >= tile_units(p, tile)) unit -= tile_units(p, tile++);

    const bool is_first = threadIdx.x < THREADS / 2;
    if (threadIdx.x == 0) *unknown = 0;
    __syncthreads();
    while (left > 0) {
        const int end = minimum(tile_units(p, tile), unit + left);
        const int slot = unit == 0 && end == tile_units(p, tile) ? WHOLE : 2 * part + (unit == 0 ? 1 : 0);
        left -= end - unit;
        if (threadIdx.x == 0) {
            parked[0] = slot, parked[1] = left, parked[2] = head, parked[3] = tile;
            parked[4] = unit, parked[5] = end, parked[6] = p.start + p.n_tokens;
        }
        const int last_page = (end - 1) / PAGE_UNITS;
        if (threadIdx.x < PAGE_RING) {
            const int index = unit / PAGE_UNITS + static_cast<int>(threadIdx.x);
            page_ids[index % PAGE_RING] = p.pages[minimum(index, last_page)];
        }
        const int n_keys = p.start + p.n_tokens - unit * TILE_KEYS;
        for (int ahead = 0; ahead < 2; ++ahead) {
            if (unit + ahead < end) {
                const int page = p.pages[page_of(unit + ahead)], n = n_keys - ahead * TILE_KEYS;
                if (is_first)
                    request<true>(p, head, unit + ahead, page, n, shared, unknown);
                else
                    request<false>(p, head, unit + ahead, page, n, shared, unknown);
            }
            cp_async_commit();
        }
        Queries queries;
        const uint32_t thread = threadIdx.x + *unknown;
        queries.load(p, head, tile, thread, lows + 4 * thread, query_scales + 2 * thread);
        softmax_of(shared, threadIdx.x).clear();
        Mixer mixer;
        mixer.clear();
        cp_async_wait<1>();
        clear_scales(unit, n_keys, shared);
        __syncthreads();

        const volatile int* const limits = parked + 4;
        const auto score_unit = [&](int unit) {
            float s[TILE_KEYS / 8][4];
            queries.score(s, shared + k_plane(unit + *unknown), lows + 4 * (threadIdx.x + *unknown));
            warp_sync();  // what follows is not computed ahead: there are no registers to keep it in
            const int scored = unit + *unknown, buffer = scored & 1;
            const uint32_t own = threadIdx.x + *unknown;
            TileSoftmax<true>& kept = softmax_of(shared, own);
            const float2 own_scale = *reinterpret_cast<const float2*>(shared + (SHARED_QUERY_SCALES + 8 * own));
            TileSoftmax<true> so_far = kept;
            const float scale[2] = {own_scale.x, own_scale.y};
            const bool moved = so_far.weigh(s, scale, weights + buffer * WEIGHT_BYTES, factors + buffer * TILE_ROWS,
                                            scored * TILE_KEYS, p.start, parked[3]);
            kept = so_far;
            const bool any = ballot(moved) != 0;
            if (lane_id() == 0) moves[buffer * WARPS + threadIdx.x / WARP_LANES] = any ? 1 : 0;
        };
        const auto mix_unit = [&](int unit) {
            const int mixed = unit + *unknown, buffer = mixed & 1;
            const uint4* const moved = reinterpret_cast<const uint4*>(moves + buffer * WARPS);
            const uint4 low = moved[0], high = moved[1];
            if ((low.x | low.y | low.z | low.w | high.x | high.y | high.z | high.w) != 0)
                mixer.shrink(factors + buffer * TILE_ROWS);
            mixer.add(weights + buffer * WEIGHT_BYTES, shared + v_plane(mixed));
        };
        // The scores of the keys of `unit`, beside the weights of the unit before times its values.
#pragma unroll 1
        while (unit <= limits[1]) {
            if (threadIdx.x == 0 && (unit + 5) % PAGE_UNITS == 0 && unit + 5 < limits[1])
                cp_async_4(page_ids + page_of(unit + 5) % PAGE_RING, p.pages + page_of(unit + 5));
            // Half of the warps score first, the others mix first: one's softmax and requests run beside the other's products.
            if (is_first) {
                if (unit + 2 < limits[1])
                    request<true>(p, parked[2], unit + 2, page_ids[page_of(unit + 2) % PAGE_RING],
                                  limits[2] - (unit + 2) * TILE_KEYS, shared, unknown);
                cp_async_commit();
                if (unit < limits[1]) score_unit(unit);
            }
            if (unit > limits[0]) mix_unit(unit - 1);
            if (!is_first) {
                if (unit + 2 < limits[1])
                    request<false>(p, parked[2], unit + 2, page_ids[page_of(unit + 2) % PAGE_RING],
                                   limits[2] - (unit + 2) * TILE_KEYS, shared, unknown);
                cp_async_commit();
                if (unit < limits[1]) score_unit(unit);
            }
            cp_async_wait<1>();
            unit += 1 + *unknown;
            if (unit < limits[1]) clear_scales(unit, limits[2] - unit * TILE_KEYS, shared);
            __syncthreads();
        }

        float* const references = factors;
        float* const sums = factors + TILE_ROWS;
        softmax_of(shared, threadIdx.x + *unknown).publish(references, sums);
        __syncthreads();
        const int g = lane_id() / 4, t = lane_id() % 4, dim = 32 * static_cast<int>(threadIdx.x / WARP_LANES) + 8 * t;
        const int destination = parked[0];
        head = parked[2], tile = parked[3], left = parked[1];
#pragma unroll
        for (int m = 0; m < TILE_ROWS / 16; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * m + 8 * half + g, tile_row = tile * TILE_ROWS + row, token = tile_row / RATIO;
                const float(&acc)[4][4] = mixer.acc[m];
                const int i = 2 * half;
                float* to = p.partial + (static_cast<int64_t>(destination) * TILE_ROWS + row) * HEAD_DIM + dim;
                float scale = 1.0f;
                if (destination == WHOLE) {
                    if (token >= p.n_tokens) continue;
                    scale = 1.0f / sums[row];
                    if (p.mixed == nullptr) {
                        const uint4 gate = load_16(p.gv + row_begin(token, p.gv_stride, head, tile_row) + dim);
                        store_16(p.out + row_begin(token, p.out_stride, head, tile_row) + dim,
                                 {gated(acc[0][i] * scale, acc[1][i] * scale, gate.x),
                                  gated(acc[2][i] * scale, acc[3][i] * scale, gate.y),
                                  gated(acc[0][i + 1] * scale, acc[1][i + 1] * scale, gate.z),
                                  gated(acc[2][i + 1] * scale, acc[3][i + 1] * scale, gate.w)});
                        continue;
                    }
                    to = p.mixed + row_begin(token, N_HEADS * HEAD_DIM, head, tile_row) + dim;
                }
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    store_16(to + 4 * n, {__float_as_uint(acc[0][i + n] * scale), __float_as_uint(acc[1][i + n] * scale),
                                          __float_as_uint(acc[2][i + n] * scale), __float_as_uint(acc[3][i + n] * scale)});
            }
        }
        if (destination != WHOLE && threadIdx.x < TILE_ROWS)
            store_8(p.stats + (destination * TILE_ROWS + threadIdx.x) * 2,
                    {__float_as_uint(references[threadIdx.x]), __float_as_uint(sums[threadIdx.x])});
        __syncthreads();
        unit = 0;
        if (++tile == n_tiles(p)) tile = 0, ++head;
    }
}
