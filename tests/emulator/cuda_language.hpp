// The words of CUDA C++ that kernels use without any header: qualifiers, indices, vector types, built-in functions.
// What is missing here the emulator does not have; warp-wide functions are those of ptx.cuh.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// In a section of its own, to be found and poisoned before each block.
#define __shared__ static __attribute__((section("emulator_shared")))

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

#define EMULATOR_VECTORS(T, name, two_bytes, four_bytes)                                            \
    struct alignas(two_bytes) name##2 { T x, y; };                                                  \
    struct name##3 { T x, y, z; };                                                                  \
    struct alignas(four_bytes) name##4 { T x, y, z, w; };                                           \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                               \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                       \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

EMULATOR_VECTORS(signed char, char, 2, 4)
EMULATOR_VECTORS(unsigned char, uchar, 2, 4)
EMULATOR_VECTORS(short, short, 4, 8)
EMULATOR_VECTORS(unsigned short, ushort, 4, 8)
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(unsigned int, uint, 8, 16)
EMULATOR_VECTORS(long long, longlong, 16, 16)
EMULATOR_VECTORS(unsigned long long, ulonglong, 16, 16)
EMULATOR_VECTORS(float, float, 8, 16)
EMULATOR_VECTORS(double, double, 16, 16)

static inline void __syncthreads() { emulator::synchronize_block(); }
static inline void __syncwarp(unsigned = ~0u) { emulator::meet(emulator::Meeting::WARP_SYNC, emulator::open_slot()); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __nanosleep(unsigned) {}

template <typename To, typename From>
static inline To emulator_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return emulator_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
static inline float __int_as_float(int x) { return emulator_bits<float>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
static inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
static inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int bit = 0; bit < 32; ++bit) y |= (x >> bit & 1u) << (31 - bit);
    return y;
}
static inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(hi) << 32 | lo) >> (shift & 31));
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(hi) << 32 | lo) << (shift & 31) >> 32);
}

#define EMULATOR_MIN_MAX(T)                                        \
    static inline T min(T a, T b) { return b < a ? b : a; }        \
    static inline T max(T a, T b) { return a < b ? b : a; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

using std::isfinite;
using std::isinf;
using std::isnan;
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// volatile keeps a product from becoming part of an fma, which is what these names are for.
static inline float __fmul_rn(float a, float b) {
    volatile float product = a * b;
    return product;
}
static inline float __fadd_rn(float a, float b) {
    volatile float x = a, y = b;
    return x + y;
}
static inline float __fsub_rn(float a, float b) { return __fadd_rn(a, -b); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fdividef(float a, float b) { return a / b; }
#define __expf(x) expf(x)  // the C library has a function of this name
#define __logf(x) logf(x)  // the C library has a function of this name
#define __log2f(x) log2f(x)  // the C library has a function of this name
static inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }

// Conversions of CUDA saturate and give 0 for NaN.
static inline int emulator_to_int(double rounded) {
    if (rounded != rounded) return 0;
    return rounded >= 2147483647.0 ? 2147483647 : rounded <= -2147483648.0 ? -2147483647 - 1 : static_cast<int>(rounded);
}
static inline unsigned emulator_to_uint(double rounded) {
    if (!(rounded > 0.0)) return 0;
    return rounded >= 4294967295.0 ? 4294967295u : static_cast<unsigned>(rounded);
}
static inline int __float2int_rn(float x) { return emulator_to_int(nearbyintf(x)); }
static inline int __float2int_rz(float x) { return emulator_to_int(truncf(x)); }
static inline int __float2int_rd(float x) { return emulator_to_int(floorf(x)); }
static inline int __float2int_ru(float x) { return emulator_to_int(ceilf(x)); }
static inline unsigned __float2uint_rn(float x) { return emulator_to_uint(nearbyintf(x)); }
static inline unsigned __float2uint_rz(float x) { return emulator_to_uint(truncf(x)); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

// No atomics on floats: their order is not fixed.
#define EMULATOR_ATOMIC(name, T, new_value)               \
    static inline T name(T* address, T value) {           \
        T before = *emulator::checked<T>(address);        \
        *address = new_value;                             \
        return before;                                    \
    }
#define EMULATOR_ATOMICS(T)                                               \
    EMULATOR_ATOMIC(atomicAdd, T, before + value)                         \
    EMULATOR_ATOMIC(atomicMin, T, value < before ? value : before)        \
    EMULATOR_ATOMIC(atomicMax, T, before < value ? value : before)        \
    EMULATOR_ATOMIC(atomicAnd, T, before & value)                         \
    EMULATOR_ATOMIC(atomicOr, T, before | value)                          \
    EMULATOR_ATOMIC(atomicXor, T, before ^ value)                         \
    EMULATOR_ATOMIC(atomicExch, T, value)                                 \
    static inline T atomicCAS(T* address, T compare, T value) {           \
        T before = *emulator::checked<T>(address);                        \
        if (before == compare) *address = value;                          \
        return before;                                                    \
    }
EMULATOR_ATOMICS(int)
EMULATOR_ATOMICS(unsigned)
EMULATOR_ATOMICS(unsigned long)  // uint64_t of the C library
EMULATOR_ATOMICS(unsigned long long)

template <typename T>
static inline T __ldg(const T* address) { return *address; }
