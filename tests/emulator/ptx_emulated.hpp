// The functions of ptx.cuh on the emulator: same names, same fragments, same rounding.
#pragma once

DEVICE uint32_t lane_id() { return static_cast<uint32_t>(emulator::current->lane); }

DEVICE uint32_t thread_index_anew() { return threadIdx.x; }

DEVICE uint32_t shared_address(const void* shared) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - emulator::dynamic_shared());
}

// ---- numbers

DEVICE float bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }

DEVICE float bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE float bf16_to_float(uint16_t word) { return __uint_as_float(static_cast<uint32_t>(word) << 16); }

DEVICE uint16_t float_to_bf16(float value) {
    uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

DEVICE uint32_t pack_bf16(float lo, float hi) {
    return float_to_bf16(lo) | static_cast<uint32_t>(float_to_bf16(hi)) << 16;
}

DEVICE float half_to_float(uint16_t word) {
    if ((word & 0x7fff) > 0x7c00) return __uint_as_float(0x7fffffffu);
#if defined(__F16C__) && !defined(EMULATOR_PORTABLE)
    float value;
    asm("vmovd %1, %0\n\tvcvtph2ps %0, %0" : "=x"(value) : "r"(static_cast<uint32_t>(word)));
    return value;
#else
    uint32_t sign = static_cast<uint32_t>(word & 0x8000) << 16, exponent = word >> 10 & 31, fraction = word & 0x3ff;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return __uint_as_float(sign | __float_as_uint(magnitude));
#endif
}

DEVICE uint16_t float_to_half(float value) {
    uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
#if defined(__F16C__) && !defined(EMULATOR_PORTABLE)
    uint32_t word;
    asm("vcvtps2ph $0, %1, %%xmm0\n\tvmovd %%xmm0, %0" : "=r"(word) : "x"(value) : "xmm0");
    return static_cast<uint16_t>(word);
#else
    uint32_t sign = bits >> 16 & 0x8000u;
    float magnitude = fabsf(value);
    if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
    // A sum whose last place is that of the target rounds to it.
    if (magnitude < 0x1p-14f) return static_cast<uint16_t>(sign | (__float_as_uint(magnitude + 0.5f) - __float_as_uint(0.5f)));
    uint32_t rounded = (bits & 0x7fffffffu) + 0xfffu + (bits >> 13 & 1u);
    return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
#endif
}

DEVICE uint32_t pack_half(float lo, float hi) {
    return float_to_half(lo) | static_cast<uint32_t>(float_to_half(hi)) << 16;
}

DEVICE float half_lo(uint32_t pair) { return half_to_float(static_cast<uint16_t>(pair & 0xffffu)); }

DEVICE float half_hi(uint32_t pair) { return half_to_float(static_cast<uint16_t>(pair >> 16)); }

namespace emulator_numbers {

// An inexact result rounded so that its last bit is odd can be rounded once more without a double rounding.
template <typename Real, typename Bits>
DEVICE Real sum_to_odd(Real p, Real c) {
    Real sum = p + c;
    if (!(fabs(sum) < static_cast<Real>(1) / 0.0f)) return sum;
    Real part = sum - p;
    Real error = (p - (sum - part)) + (c - part);
    Bits bits = emulator_bits<Bits>(sum);
    if (error != 0 && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
    return emulator_bits<Real>(bits);
}

DEVICE float narrow_to_odd(double value) {
    float near = static_cast<float>(value);
    if (value != value || static_cast<double>(near) == value) return near;
    uint32_t bits = __float_as_uint(near);
    if ((bits & 1u) == 0) bits += fabs(static_cast<double>(near)) < fabs(value) ? 1 : -1;
    return __uint_as_float(bits);
}

DEVICE uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
    float x = __uint_as_float(a << 16), y = __uint_as_float(b << 16), z = __uint_as_float(c << 16);
    float product = __fmul_rn(x, y);
    float size = fabsf(product);
    if ((size > 0x1p-100f && size < 0x1p120f) || product != product || x == 0.0f || y == 0.0f)
        return float_to_bf16(sum_to_odd<float, uint32_t>(product, z));
    double wide = static_cast<double>(x) * static_cast<double>(y);
    return float_to_bf16(narrow_to_odd(sum_to_odd<double, uint64_t>(wide, z)));
}

DEVICE uint32_t fma_f16(uint32_t a, uint32_t b, uint32_t c) {
    float product = __fmul_rn(half_lo(a), half_lo(b));
    return float_to_half(sum_to_odd<float, uint32_t>(product, half_lo(c)));
}

DEVICE float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

}  // namespace emulator_numbers

DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    return emulator_numbers::fma_bf16(a, b, c) | emulator_numbers::fma_bf16(a >> 16, b >> 16, c >> 16) << 16;
}

DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, b, 0x80008000u); }

DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, 0x3f803f80u, b); }

DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    return emulator_numbers::fma_f16(a, b, c) | emulator_numbers::fma_f16(a >> 16, b >> 16, c >> 16) << 16;
}

DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) { return fma_f16x2(a, b, 0x80008000u); }

DEVICE uint32_t add_f16x2(uint32_t a, uint32_t b) { return fma_f16x2(a, 0x3c003c00u, b); }

DEVICE int float_to_int_rn(float value) { return __float2int_rn(value); }

DEVICE float exp2_approx(float x) { return emulator_numbers::flush(exp2f(emulator_numbers::flush(x))); }

DEVICE float rcp_approx(float x) { return emulator_numbers::flush(1.0f / emulator_numbers::flush(x)); }

DEVICE float rsqrt_approx(float x) { return 1.0f / sqrtf(emulator_numbers::flush(x)); }

DEVICE float expf_precise(float x) { return expf(x); }

DEVICE float logf_precise(float x) { return logf(x); }

template <int IMM>
DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d = 0;
    if (IMM & 0x01) d |= ~a & ~b & ~c;
    if (IMM & 0x02) d |= ~a & ~b & c;
    if (IMM & 0x04) d |= ~a & b & ~c;
    if (IMM & 0x08) d |= ~a & b & c;
    if (IMM & 0x10) d |= a & ~b & ~c;
    if (IMM & 0x20) d |= a & ~b & c;
    if (IMM & 0x40) d |= a & b & ~c;
    if (IMM & 0x80) d |= a & b & c;
    return d;
}

DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t d = 0;
    for (int i = 0; i < 4; ++i) {
        uint32_t pick = selector >> 4 * i;
        uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (pick & 7)) & 0xffu;
        if (pick & 8) byte = byte & 0x80 ? 0xffu : 0u;
        d |= byte << 8 * i;
    }
    return d;
}

DEVICE uint32_t lower_twice(uint32_t a) { return (a & 0xffffu) * 0x10001u; }

DEVICE uint32_t upper_twice(uint32_t a) { return (a >> 16) * 0x10001u; }

DEVICE int dp4a(uint32_t a, uint32_t b, int c) {
    for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
    return c;
}

static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) { return prmt(a, b, selector & 0x7777u); }

static inline int __dp4a(int a, int b, int c) { return dp4a(static_cast<uint32_t>(a), static_cast<uint32_t>(b), c); }

// ---- matrix multiply-accumulate: lane l holds rows l/4 and l/4 + 8, columns 2 (l%4) and up

namespace emulator_matrices {

using emulator::Meeting;
using emulator::Slot;

template <typename T>
DEVICE void put_pair(T* target, T first, T second) {
    target[0] = first;
    target[1] = second;
}

template <Meeting KIND>
DEVICE void mma_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    constexpr bool BF16 = KIND == Meeting::MMA_BF16;
    Slot& slot = emulator::open_slot();
    const int row = emulator::current->lane / 4, column = 2 * (emulator::current->lane % 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        float lo = BF16 ? bf16_lo(a[i]) : half_lo(a[i]), hi = BF16 ? bf16_hi(a[i]) : half_hi(a[i]);
        put_pair(&slot.a[row + 8 * (i % 2)][column + 8 * (i / 2)], lo, hi);
    }
    slot.b[column][row] = BF16 ? bf16_lo(b0) : half_lo(b0);
    slot.b[column + 1][row] = BF16 ? bf16_hi(b0) : half_hi(b0);
    slot.b[column + 8][row] = BF16 ? bf16_lo(b1) : half_lo(b1);
    slot.b[column + 9][row] = BF16 ? bf16_hi(b1) : half_hi(b1);
    put_pair(&slot.c[row][column], d[0], d[1]);
    put_pair(&slot.c[row + 8][column], d[2], d[3]);
    emulator::meet(KIND, slot);
    d[0] = slot.c[row][column];
    d[1] = slot.c[row][column + 1];
    d[2] = slot.c[row + 8][column];
    d[3] = slot.c[row + 8][column + 1];
}

template <int N>
DEVICE void load_matrices(Meeting kind, uint32_t (&r)[N], const void* shared) {
    if (!emulator::is_shared(shared, 16) || reinterpret_cast<uintptr_t>(shared) % 16 != 0)
        emulator::fail("ldmatrix from %p: not a 16-byte aligned row in shared memory", shared);
    Slot& slot = emulator::open_slot();
    const int lane = emulator::current->lane;
    if (lane < 8 * N) emulator::watch_read(shared, 16);
    slot.words[lane] = reinterpret_cast<uintptr_t>(shared);
    emulator::meet(kind, slot);
    for (int i = 0; i < N; ++i) r[i] = slot.results[lane][i];
}

}  // namespace emulator_matrices

DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator_matrices::mma_16<emulator::Meeting::MMA_BF16>(d, a, b0, b1);
}

DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator_matrices::mma_16<emulator::Meeting::MMA_F16>(d, a, b0, b1);
}

DEVICE void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::Slot& slot = emulator::open_slot();
    const int row = emulator::current->lane / 4, quad = emulator::current->lane % 4;
#pragma GCC unroll 4
    for (int byte = 0; byte < 4; ++byte) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            slot.a[row + 8 * (i % 2)][4 * quad + 16 * (i / 2) + byte] = static_cast<int8_t>(a[i] >> 8 * byte);
        slot.b[4 * quad + byte][row] = static_cast<int8_t>(b0 >> 8 * byte);
        slot.b[4 * quad + 16 + byte][row] = static_cast<int8_t>(b1 >> 8 * byte);
    }
    for (int i = 0; i < 4; ++i) slot.ci[row + 8 * (i / 2)][2 * quad + i % 2] = d[i];
    emulator::meet(emulator::Meeting::MMA_S8, slot);
    for (int i = 0; i < 4; ++i) d[i] = slot.ci[row + 8 * (i / 2)][2 * quad + i % 2];
}

template <int PAIR_A, int LANE_B>
DEVICE void mma_fp4(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scale_a,
                    uint32_t scale_b) {
    static_assert(PAIR_A >= 0 && PAIR_A < 2 && LANE_B >= 0 && LANE_B < 4, "what the assembler takes");
    static const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    emulator::Slot& slot = emulator::open_slot();
    const int lane = emulator::current->lane, row = lane / 4, quad = lane % 4;
    for (int i = 0; i < 8; ++i) {
        for (int r = 0; r < 4; ++r)
            slot.a[row + 8 * (r % 2)][8 * quad + 32 * (r / 2) + i] = values[a[r] >> 4 * i & 15];
        slot.b[8 * quad + i][row] = values[b0 >> 4 * i & 15];
        slot.b[8 * quad + 32 + i][row] = values[b1 >> 4 * i & 15];
    }
    slot.words[lane] = scale_a | static_cast<uint64_t>(scale_b) << 32;
    for (int i = 0; i < 4; ++i) slot.c[row + 8 * (i / 2)][2 * quad + i % 2] = d[i];
    emulator::meet(emulator::barrier_meeting(emulator::Meeting::MMA_FP4, PAIR_A, LANE_B), slot);
    for (int i = 0; i < 4; ++i) d[i] = slot.c[row + 8 * (i / 2)][2 * quad + i % 2];
}

DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* shared) {
    emulator_matrices::load_matrices(emulator::Meeting::LDMATRIX_X4, r, shared);
}

DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared) {
    emulator_matrices::load_matrices(emulator::Meeting::LDMATRIX_X4_TRANS, r, shared);
}

DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* shared) {
    emulator_matrices::load_matrices(emulator::Meeting::LDMATRIX_X2, r, shared);
}

DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared) {
    emulator_matrices::load_matrices(emulator::Meeting::LDMATRIX_X2_TRANS, r, shared);
}

// ---- asynchronous copies

DEVICE void cp_async_16(void* shared, const void* global) { emulator::queue_copy(shared, global, 16, true); }

DEVICE void cp_async_16_if(void* shared, const void* global, bool wanted) {
    if (wanted) cp_async_16(shared, global);
}

DEVICE void cp_async_16_zfill(void* shared, const void* global, bool valid) {
    emulator::queue_copy(shared, global, 16, valid);
}

template <int SHARED, int GLOBAL>
DEVICE void cp_async_16_at(void* shared, const void* global) {
    cp_async_16(static_cast<uint8_t*>(shared) + SHARED, static_cast<const uint8_t*>(global) + GLOBAL);
}

template <int SHARED, int GLOBAL>
DEVICE void cp_async_16_zfill_at(void* shared, const void* global, bool valid) {
    cp_async_16_zfill(static_cast<uint8_t*>(shared) + SHARED, static_cast<const uint8_t*>(global) + GLOBAL, valid);
}

DEVICE void cp_async_8(void* shared, const void* global) { emulator::queue_copy(shared, global, 8, true); }

DEVICE void cp_async_4(void* shared, const void* global) { emulator::queue_copy(shared, global, 4, true); }

DEVICE void cp_async_commit() { emulator::commit_copies(); }

template <int GROUPS>
DEVICE void cp_async_wait() {
    emulator::wait_copies(GROUPS);
}

// ---- memory; one kernel runs at a time

DEVICE void grid_dependency_wait() { emulator::current->waited = true; }

DEVICE void grid_dependency_launch() {
    if (emulator::launch->pdl && !emulator::current->waited) emulator::launch->released_early = 1;
}

template <typename T>
DEVICE T load_global(const void* global) {
    return *emulator::checked<T>(global);
}

template <typename T>
DEVICE void store_global(void* global, T value) {
    *const_cast<T*>(emulator::checked<T>(global)) = value;
}

DEVICE uint4 load_stream_16(const void* global) { return load_global<uint4>(global); }

DEVICE uint4 load_16(const void* global) { return load_global<uint4>(global); }

DEVICE uint2 load_8(const void* global) { return load_global<uint2>(global); }

DEVICE uint32_t load_4(const void* global) { return load_global<uint32_t>(global); }

DEVICE void store_16(void* global, uint4 value) { store_global(global, value); }

DEVICE void store_8(void* global, uint2 value) { store_global(global, value); }

DEVICE void store_4(void* global, uint32_t value) { store_global(global, value); }

DEVICE uint4 load_once_16(const void* global) { return load_global<uint4>(global); }

DEVICE void store_once_16(void* global, uint4 value) { store_global(global, value); }

DEVICE void prefetch_l2(const void*) {}

DEVICE float load_relaxed(const float* global) {
    emulator::count_poll();
    return *emulator::checked<float>(global);
}

DEVICE void store_relaxed(float* global, float value) { store_global(global, value); }

DEVICE uint32_t load_acquire(const uint32_t* global) {
    emulator::count_poll();
    return *emulator::checked<uint32_t>(global);
}

DEVICE void store_release(uint32_t* global, uint32_t value) { store_global(global, value); }

DEVICE uint32_t atomic_add_acq_rel(uint32_t* global, uint32_t value) { return atomicAdd(global, value); }

// ---- between threads

DEVICE void barrier_sync(int id, int n_threads) { emulator::use_barrier(emulator::Meeting::BARRIER, id, n_threads); }

DEVICE void barrier_arrive(int id, int n_threads) {
    emulator::use_barrier(emulator::Meeting::BARRIER_ARRIVE, id, n_threads);
}

namespace emulator_shuffles {

// A lane's own value where source is outside the warp.
template <typename T>
DEVICE T exchange(T value, int source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    emulator::Slot& slot = emulator::open_slot();
    const int lane = emulator::current->lane;
    memcpy(&slot.words[lane], &value, sizeof value);
    emulator::meet(emulator::Meeting::SHUFFLE, slot);
    memcpy(&value, &slot.words[source < 0 || source >= emulator::LANES ? lane : source], sizeof value);
    return value;
}

}  // namespace emulator_shuffles

template <typename T>
DEVICE T shfl_xor(T value, int mask) {
    return emulator_shuffles::exchange(value, emulator::current->lane ^ mask);
}

template <typename T>
DEVICE T shfl(T value, int lane) {
    return emulator_shuffles::exchange(value, lane & 31);
}

template <typename T>
DEVICE T shfl_up(T value, int delta) {
    return emulator_shuffles::exchange(value, emulator::current->lane - delta);
}

template <typename T>
DEVICE T shfl_down(T value, int delta) {
    return emulator_shuffles::exchange(value, emulator::current->lane + delta);
}

DEVICE uint32_t reduce_max(uint32_t value) {
    for (int mask = emulator::LANES / 2; mask > 0; mask >>= 1) {
        const uint32_t other = shfl_xor(value, mask);
        if (other > value) value = other;
    }
    return value;
}

DEVICE uint32_t reduce_min(uint32_t value) { return ~reduce_max(~value); }

DEVICE uint32_t ballot(bool predicate) {
    emulator::Slot& slot = emulator::open_slot();
    slot.words[emulator::current->lane] = predicate;
    emulator::meet(emulator::Meeting::BALLOT, slot);
    uint32_t mask = 0;
    for (int lane = 0; lane < emulator::LANES; ++lane) mask |= static_cast<uint32_t>(slot.words[lane]) << lane;
    return mask;
}

DEVICE void warp_sync() { emulator::meet(emulator::Meeting::WARP_SYNC, emulator::open_slot()); }
