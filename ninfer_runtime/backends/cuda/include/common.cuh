// What every kernel source includes, and the only thing: integer types, shared memory, small device functions.
// No toolkit and no standard header: the sources compile with NVRTC alone, and as C++ under the tests' emulator.
#pragma once

#ifdef NINFER_EMULATOR

#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(emulator::dynamic_shared())
#define STATIC_SHARED(type, declarator) __shared__ type declarator

#else

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;

// The block's dynamic shared memory from its first byte on, 128-byte aligned.
#define DYNAMIC_SHARED(type, name)                         \
    extern __shared__ __align__(128) unsigned char name##_bytes[]; \
    type* const name = reinterpret_cast<type*>(name##_bytes)
// STATIC_SHARED(float, scratch[32]); in a kernel's own body, at most 4 KB in all.
#define STATIC_SHARED(type, declarator) __shared__ type declarator

#endif

#define DEVICE __device__ __forceinline__

static_assert(sizeof(uint64_t) == 8 && sizeof(void*) == 8, "64-bit addresses");

constexpr int WARP_LANES = 32;

#include "ptx.cuh"

template <typename T>
DEVICE T minimum(T a, T b) {
    return b < a ? b : a;
}

template <typename T>
DEVICE T maximum(T a, T b) {
    return a < b ? b : a;
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

DEVICE int warp_index() { return static_cast<int>(threadIdx.x) / WARP_LANES; }

DEVICE int block_index() {
    return static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
}

// Butterflies over 16, 8, 4, 2, 1: every lane ends with the same bits.
template <typename T>
DEVICE T warp_sum(T value) {
#pragma unroll
    for (int mask = WARP_LANES / 2; mask > 0; mask >>= 1) value += shfl_xor(value, mask);
    return value;
}

template <typename T>
DEVICE T warp_max(T value) {
#pragma unroll
    for (int mask = WARP_LANES / 2; mask > 0; mask >>= 1) value = maximum(value, shfl_xor(value, mask));
    return value;
}

template <typename T>
DEVICE T warp_min(T value) {
#pragma unroll
    for (int mask = WARP_LANES / 2; mask > 0; mask >>= 1) value = minimum(value, shfl_xor(value, mask));
    return value;
}

// Sum over the block in one fixed order, returned to every thread. scratch: one T per warp, in shared memory.
// The barrier in front lets the same scratch serve call after call.
template <typename T>
DEVICE T block_sum(T value, T* scratch) {
    value = warp_sum(value);
    __syncthreads();
    if (lane_id() == 0) scratch[warp_index()] = value;
    __syncthreads();
    T total = scratch[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / WARP_LANES; ++warp) total += scratch[warp];
    return total;
}

template <typename T>
DEVICE T block_max(T value, T* scratch) {
    value = warp_max(value);
    __syncthreads();
    if (lane_id() == 0) scratch[warp_index()] = value;
    __syncthreads();
    T largest = scratch[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / WARP_LANES; ++warp) largest = maximum(largest, scratch[warp]);
    return largest;
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

// log(1 + exp(x)); above 20 the result is x to the last bit, as in torch.
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
