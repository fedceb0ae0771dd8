// One kernel with one mistake, chosen by MISTAKE, to see that the emulator finds it.
#include "common.cuh"

struct MistakeParams {
    uint32_t* out;
    int n;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) mistake(const __grid_constant__ MistakeParams p) {
    DYNAMIC_SHARED(uint32_t, smem);
    const int t = static_cast<int>(threadIdx.x);
#if MISTAKE == 0  // none
    smem[t] = static_cast<uint32_t>(t);
    __syncthreads();
    p.out[t] = smem[(t + 1) % THREADS];
#elif MISTAKE == 1  // no barrier between write and read
    smem[t] = static_cast<uint32_t>(t);
    p.out[t] = smem[(t + 1) % THREADS];
#elif MISTAKE == 2  // half a warp shuffles, half votes
    p.out[t] = t % 32 < 16 ? shfl_xor(static_cast<uint32_t>(t), 1) : ballot(true);
#elif MISTAKE == 3  // one warp misses the barrier
    if (t >= 32) __syncthreads();
    p.out[t] = 1;
#elif MISTAKE == 4  // lanes leave before the others shuffle
    if (t % 32 > p.n) return;
    p.out[t] = shfl_xor(static_cast<uint32_t>(t), 1);
#elif MISTAKE == 5  // writes one element too far
    p.out[t + 1] = 0;
#elif MISTAKE == 6  // reads far outside
    p.out[t] = p.out[t + (1 << 28)];
#elif MISTAKE == 7  // misaligned vector
    store_16(p.out + 1, load_16(p.out));
#elif MISTAKE == 8  // past the shared memory
    smem[THREADS + 64 * t] = 1;
#elif MISTAKE == 9  // never ends
    volatile int zero = 0;
    while (zero == 0) zero = 0;
#elif MISTAKE == 10  // waits for a block that runs later
    while (load_acquire(p.out) != 7) {
    }
#elif MISTAKE == 11  // ldmatrix from device memory
    uint32_t r[4];
    ldmatrix_x4(r, p.out);
    p.out[t] = r[0];
#elif MISTAKE == 12  // reads shared memory that nobody wrote
    STATIC_SHARED(uint32_t, fixed[4]);
    p.out[t] = smem[t] & fixed[t % 4];
#elif MISTAKE == 13  // divides by zero
    p.out[t] = 1000 / (p.n - static_cast<int>(p.out[t]));
#elif MISTAKE == 14  // no commit in front of the wait
    cp_async_16(smem + 4 * t, p.out + 4 * t);
    cp_async_wait<0>();
    p.out[t] = smem[4 * t];
#elif MISTAKE == 15  // lanes read each other's words without warp_sync
    smem[t] = static_cast<uint32_t>(t);
    p.out[t] = smem[t ^ 1];
#elif MISTAKE == 16  // reads in front of the wait for earlier kernels
    smem[t] = p.out[t];
    grid_dependency_wait();
    p.out[t] = smem[t];
#elif MISTAKE == 17  // writes in front of it
    p.out[t] = static_cast<uint32_t>(t);
    grid_dependency_wait();
#elif MISTAKE == 19  // none: lets the next kernel start after its own wait
    grid_dependency_wait();
    grid_dependency_launch();
#elif MISTAKE == 20  // none: lets it start before
    grid_dependency_launch();
    grid_dependency_wait();
#elif MISTAKE == 18  // a copy into a buffer that other warps still read
    smem[t] = static_cast<uint32_t>(t);
    __syncthreads();
    p.out[t] = smem[THREADS - 1 - t];
    if (t < THREADS / 4) cp_async_16(smem + 4 * t, p.out + 4 * t);
    cp_async_commit();
    cp_async_wait<0>();
#endif
}
