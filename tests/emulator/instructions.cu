// One small kernel per promise of ptx.cuh; every lane's operands and results are plain arrays [thread][words].
// The layouts are checked in test_instructions.py against the PTX ISA; one block of THREADS threads.
#include "common.cuh"

struct ProbeParams {
    const uint32_t* a;
    const uint32_t* b;
    const uint32_t* c;
    uint32_t* out;
    int n;
};

#define PROBE(name) extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) name(const __grid_constant__ ProbeParams p)

DEVICE int thread() { return static_cast<int>(threadIdx.x); }

PROBE(probe_mma_bf16) {
    const int t = thread();
    const uint32_t a[4] = {p.a[4 * t], p.a[4 * t + 1], p.a[4 * t + 2], p.a[4 * t + 3]};
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(p.c[4 * t + i]);
    mma_bf16(d, a, p.b[2 * t], p.b[2 * t + 1]);
    for (int i = 0; i < 4; ++i) p.out[4 * t + i] = __float_as_uint(d[i]);
}

PROBE(probe_mma_f16) {
    const int t = thread();
    const uint32_t a[4] = {p.a[4 * t], p.a[4 * t + 1], p.a[4 * t + 2], p.a[4 * t + 3]};
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(p.c[4 * t + i]);
    mma_f16(d, a, p.b[2 * t], p.b[2 * t + 1]);
    for (int i = 0; i < 4; ++i) p.out[4 * t + i] = __float_as_uint(d[i]);
}

PROBE(probe_mma_s8) {
    const int t = thread();
    const uint32_t a[4] = {p.a[4 * t], p.a[4 * t + 1], p.a[4 * t + 2], p.a[4 * t + 3]};
    int d[4];
    for (int i = 0; i < 4; ++i) d[i] = static_cast<int>(p.c[4 * t + i]);
    mma_s8(d, a, p.b[2 * t], p.b[2 * t + 1]);
    for (int i = 0; i < 4; ++i) p.out[4 * t + i] = static_cast<uint32_t>(d[i]);
}

// a: four 8x8 matrices of 16-bit words, row after row. out: x4, x4_trans, x2, x2_trans, each [32 lanes][4 or 2].
PROBE(probe_ldmatrix) {
    DYNAMIC_SHARED(uint32_t, smem);
    const int t = thread();
    for (int i = t; i < 128; i += THREADS) smem[i] = p.a[i];
    __syncthreads();
    uint32_t r[4], q[2];
    ldmatrix_x4(r, smem + 4 * t);
    for (int i = 0; i < 4; ++i) p.out[4 * t + i] = r[i];
    ldmatrix_x4_trans(r, smem + 4 * t);
    for (int i = 0; i < 4; ++i) p.out[128 + 4 * t + i] = r[i];
    ldmatrix_x2(q, smem + 4 * (t % 16));
    for (int i = 0; i < 2; ++i) p.out[256 + 2 * t + i] = q[i];
    ldmatrix_x2_trans(q, smem + 4 * (t % 16));
    for (int i = 0; i < 2; ++i) p.out[320 + 2 * t + i] = q[i];
}

// out: [5][32]: xor 5, lane n, up 3, down 3, ballot of odd words; then [32][2] of xor 1 on 64 bits; then warp sums.
PROBE(probe_shuffle) {
    const int t = thread();
    const float value = __uint_as_float(p.a[t]);
    p.out[t] = __float_as_uint(shfl_xor(value, 5));
    p.out[32 + t] = shfl(p.a[t], p.n);
    p.out[64 + t] = static_cast<uint32_t>(shfl_up(static_cast<int>(p.a[t]), 3));
    p.out[96 + t] = __float_as_uint(shfl_down(value, 3));
    p.out[128 + t] = ballot(p.a[t] & 1u);
    const uint64_t wide = shfl_xor(static_cast<uint64_t>(p.a[t]) << 32 | static_cast<uint32_t>(t), 1);
    p.out[160 + 2 * t] = static_cast<uint32_t>(wide);
    p.out[161 + 2 * t] = static_cast<uint32_t>(wide >> 32);
    p.out[224 + t] = __float_as_uint(warp_sum(static_cast<float>(t)));
    p.out[256 + t] = __float_as_uint(warp_max(value));
}

// One result per function and element: out[function][n].
PROBE(probe_numbers) {
    for (int i = block_index() * THREADS + thread(); i < p.n; i += THREADS * static_cast<int>(gridDim.x)) {
        const uint32_t a = p.a[i], b = p.b[i], c = p.c[i];
        const float x = __uint_as_float(a), y = __uint_as_float(b);
        const uint32_t results[] = {
            float_to_bf16(x),
            float_to_half(x),
            __float_as_uint(bf16_to_float(static_cast<uint16_t>(a))),
            __float_as_uint(half_to_float(static_cast<uint16_t>(a))),
            pack_bf16(x, y),
            pack_half(x, y),
            __float_as_uint(bf16_hi(a)),
            __float_as_uint(half_hi(a)),
            fma_bf16x2(a, b, c),
            mul_bf16x2(a, b),
            add_bf16x2(a, b),
            fma_f16x2(a, b, c),
            mul_f16x2(a, b),
            add_f16x2(a, b),
            lop3<0xea>(a, b, c),
            lop3<0x96>(a, b, c),
            prmt(a, b, c),
            static_cast<uint32_t>(dp4a(a, b, static_cast<int>(c))),
            static_cast<uint32_t>(float_to_int_rn(x)),
            __umulhi(a, b),
            __float_as_uint(exp2_approx(x)),
            __float_as_uint(rcp_approx(x)),
            __float_as_uint(rsqrt_approx(x)),
        };
        for (int k = 0; k < static_cast<int>(sizeof(results) / sizeof(results[0])); ++k) p.out[k * p.n + i] = results[k];
    }
}

// Three groups of one 16-byte copy per thread; WAIT_GROUPS may stay under way. Thread t reads its own three vectors.
PROBE(probe_cp_async) {
    DYNAMIC_SHARED(uint32_t, smem);
    const int t = thread();
    for (int group = 0; group < 3; ++group) {
        uint32_t* target = smem + 4 * (THREADS * group + t);
        const uint32_t* source = p.a + 4 * (THREADS * group + t);
        if (group == 0)
            cp_async_16(target, source);
        else if (group == 1)
            cp_async_16_zfill(target, source, t % 2 == 0);
        else
            cp_async_16(target, source);
        cp_async_commit();
    }
    cp_async_wait<WAIT_GROUPS>();
    for (int group = 0; group < 3; ++group)
        for (int i = 0; i < 4; ++i) p.out[4 * (THREADS * group + t) + i] = smem[4 * (THREADS * group + t) + i];
}

// Two halves of the block hand values over through barrier 1, and the block's sum through block_sum.
PROBE(probe_barriers) {
    DYNAMIC_SHARED(uint32_t, smem);
    STATIC_SHARED(float, scratch[32]);
    const int t = thread();
    if (t < THREADS / 2) {
        smem[t] = p.a[t];
        barrier_arrive(1, THREADS);
    } else {
        barrier_sync(1, THREADS);
        p.out[t - THREADS / 2] = smem[THREADS - 1 - t];
    }
    const float first = block_sum(static_cast<float>(t), scratch), second = block_sum(1.0f, scratch);
    p.out[THREADS / 2 + t] = __float_as_uint(first + second);
}

// The order in which blocks run, and one ticket each.
PROBE(probe_block_order) {
    if (thread() == 0) p.out[1 + block_index()] = atomic_add_acq_rel(p.out, 1u);
}
