// All inline PTX of the project, one function per instruction; sm_80 and newer.
// Warp-wide functions take the full mask: all 32 lanes call them together.
// Fragments of mma and ldmatrix are laid out as in the PTX ISA, "Warp level matrix multiply-accumulate".
#pragma once

#ifdef NINFER_EMULATOR
#include "ptx_emulated.hpp"
#else

constexpr uint32_t FULL_MASK = 0xffffffffu;

DEVICE uint32_t lane_id() {
    uint32_t lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// threadIdx.x, read where this stands: what follows from it is computed again instead of kept in registers.
DEVICE uint32_t thread_index_anew() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

DEVICE uint32_t shared_address(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }

// ---- matrix multiply-accumulate

// d[16x8] += a[16x16] b[16x8], bf16 in, fp32 out.
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16x8] += a[16x16] b[16x8], fp16 in, fp32 out.
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16x8] += a[16x32] b[32x8], signed bytes in, int32 out.
DEVICE void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16x8] += a[16x64] b[64x8], both E2M1, eight columns of k per register, each block of 16 along k times its E4M3 scale;
// sm_120a and its family only. scale_a: four scales of row m come from lane 4 (m % 8) + 2 PAIR_A + m / 8, byte j those of
// k 16 j .. 16 j + 15; scale_b: those of column n from lane 4 n + LANE_B. Other lanes' words are not looked at, so one
// register holds the scales of two operands A, or of four operands B.
template <int PAIR_A, int LANE_B>
DEVICE void mma_fp4(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scale_a,
                    uint32_t scale_b) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {0,%12}, %11, {0,%13};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b), "n"(PAIR_A),
          "n"(LANE_B));
}

// Four 8x8 matrices of 16-bit words; lane l gives the address of row l%8 of matrix l/8, 16-byte aligned.
DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

// Two matrices: the addresses of lanes 0..15 count, the others must still be in shared memory.
DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(shared))
                 : "memory");
}

DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(shared))
                 : "memory");
}

// ---- asynchronous copies into shared memory

// Created once per kernel by the compiler: bytes read once should not push others out of L2.
DEVICE uint64_t evict_first_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// A copy where wanted, without a branch: in front of a block's copies stand three instructions that do nothing.
DEVICE void cp_async_16_if(void* shared, const void* global, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(static_cast<int>(wanted))
                 : "memory");
}

// Zeros instead of a copy where not valid; global is not read then.
DEVICE void cp_async_16_zfill(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// The same at constant distances from two addresses, which take no instructions of their own.
template <int SHARED, int GLOBAL>
DEVICE void cp_async_16_at(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0+%2], [%1+%3], 16;" ::"r"(shared_address(shared)), "l"(global), "n"(SHARED),
                 "n"(GLOBAL)
                 : "memory");
}

template <int SHARED, int GLOBAL>
DEVICE void cp_async_16_zfill_at(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0+%3], [%1+%4], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0), "n"(SHARED), "n"(GLOBAL)
                 : "memory");
}

DEVICE void cp_async_8(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

DEVICE void cp_async_4(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most GROUPS of this thread's newest groups are still under way; other threads' need a barrier as well.
template <int GROUPS>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// ---- programmatic dependent launch

// Until the kernels before this one have ended and their writes are seen.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel after this one may start; what it needs it still waits for.
DEVICE void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- loads and stores

// Read-only bytes that are read once; 16-byte aligned.
DEVICE uint4 load_stream_16(const void* global) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(global), "l"(evict_first_policy()));
    return v;
}

template <typename T>
DEVICE T load_global(const void* global) {
    __builtin_assume(__isGlobal(global));
    return *static_cast<const T*>(global);
}

template <typename T>
DEVICE void store_global(void* global, T value) {
    __builtin_assume(__isGlobal(global));
    *static_cast<T*>(global) = value;
}

DEVICE uint4 load_16(const void* global) { return load_global<uint4>(global); }

DEVICE uint2 load_8(const void* global) { return load_global<uint2>(global); }

DEVICE uint32_t load_4(const void* global) { return load_global<uint32_t>(global); }

DEVICE void store_16(void* global, uint4 value) { store_global(global, value); }

DEVICE void store_8(void* global, uint2 value) { store_global(global, value); }

DEVICE void store_4(void* global, uint32_t value) { store_global(global, value); }

// Bytes that no kernel meets again soon: they should not push others out of L2.
DEVICE uint4 load_once_16(const void* global) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(global), "l"(evict_first_policy()));
    return v;
}

DEVICE void store_once_16(void* global, uint4 value) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(global), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w), "l"(evict_first_policy())
                 : "memory");
}

DEVICE void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// ---- memory shared between blocks of one grid

DEVICE float load_relaxed(const float* global) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(global) : "memory");
    return v;
}

DEVICE void store_relaxed(float* global, float value) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}

DEVICE uint32_t load_acquire(const uint32_t* global) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(global) : "memory");
    return v;
}

DEVICE void store_release(uint32_t* global, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// Returns the value before the addition.
DEVICE uint32_t atomic_add_acq_rel(uint32_t* global, uint32_t value) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(global), "r"(value) : "memory");
    return before;
}

// ---- barriers of a part of the block; id 1..15, 0 is __syncthreads()

DEVICE void barrier_sync(int id, int n_threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

DEVICE void barrier_arrive(int id, int n_threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

// ---- bits and small numbers

// Bit i of IMM is the result for input bits a = i>>2, b = i>>1, c = i: (a & b) | c is 0xea, (a & b) ^ c is 0x6a.
template <int IMM>
DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(IMM));
    return d;
}

// Byte i of the result is byte (selector >> 4i) & 7 of b:a; with bit 3 of that nibble, its sign eight times.
DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// A half of a word in both halves: a modifier of the operand of what uses it.
DEVICE uint32_t lower_twice(uint32_t a) {
    uint32_t d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(d) : "r"(a));
    return d;
}

DEVICE uint32_t upper_twice(uint32_t a) {
    uint32_t d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(d) : "r"(a));
    return d;
}

// c + the sum of the four products of signed bytes.
DEVICE int dp4a(uint32_t a, uint32_t b, int c) {
    int d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// sm_80 has only the fma: -0 and 1 keep the results, and the signs of zeros.
DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, b, 0x80008000u); }

DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, 0x3f803f80u, b); }

DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE uint32_t add_f16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Round to nearest even; lo in bits 0..15.
DEVICE uint32_t pack_bf16(float lo, float hi) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

DEVICE float bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }

DEVICE float bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE float bf16_to_float(uint16_t word) { return __uint_as_float(static_cast<uint32_t>(word) << 16); }

DEVICE uint16_t float_to_bf16(float value) {
    uint16_t word;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(word) : "f"(value));
    return word;
}

DEVICE float half_to_float(uint16_t word) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(word));
    return value;
}

DEVICE uint16_t float_to_half(float value) {
    uint16_t word;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(word) : "f"(value));
    return word;
}

DEVICE uint32_t pack_half(float lo, float hi) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

DEVICE float half_lo(uint32_t pair) { return half_to_float(static_cast<uint16_t>(pair & 0xffffu)); }

DEVICE float half_hi(uint32_t pair) { return half_to_float(static_cast<uint16_t>(pair >> 16)); }

// Nearest even, saturating; 0 for NaN.
DEVICE int float_to_int_rn(float value) { return __float2int_rn(value); }

// ---- arithmetic: approximations flush subnormals, relative error about 2^-22

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float expf_precise(float x) { return expf(x); }

DEVICE float logf_precise(float x) { return logf(x); }

// ---- between the lanes of a warp; T is a 4 or 8 byte number

template <typename T>
DEVICE T shfl_xor(T value, int mask) {
    return __shfl_xor_sync(FULL_MASK, value, mask);
}

template <typename T>
DEVICE T shfl(T value, int lane) {
    return __shfl_sync(FULL_MASK, value, lane);
}

// Lanes without a partner keep their own value.
template <typename T>
DEVICE T shfl_up(T value, int delta) {
    return __shfl_up_sync(FULL_MASK, value, delta);
}

template <typename T>
DEVICE T shfl_down(T value, int delta) {
    return __shfl_down_sync(FULL_MASK, value, delta);
}

DEVICE uint32_t ballot(bool predicate) { return __ballot_sync(FULL_MASK, predicate); }

// Largest and smallest of all lanes' words, in every lane.
DEVICE uint32_t reduce_max(uint32_t value) {
    uint32_t largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
}

DEVICE uint32_t reduce_min(uint32_t value) {
    uint32_t smallest;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(smallest) : "r"(value));
    return smallest;
}

DEVICE void warp_sync() { __syncwarp(FULL_MASK); }

#endif
