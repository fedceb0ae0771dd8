// Pages of every plane and layer of a KV pool, target = source. Planes are 256-byte aligned, pages multiples of 16 bytes.
// Grid (pairs, planes, layers); reference backends/reference/state.py copy_pages, exact.
#include "common.cuh"

struct CopyPagesParams {
    uint8_t* pool;
    const int* pairs;  // [n][2]: source, target
    uint64_t layer_bytes;
    uint64_t plane_offsets[4];
    uint32_t plane_page_bytes[4];
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) copy_pages(const __grid_constant__ CopyPagesParams p) {
    grid_dependency_wait();
    grid_dependency_launch();
    const uint32_t page_bytes = p.plane_page_bytes[blockIdx.y];
    uint8_t* const plane = p.pool + blockIdx.z * p.layer_bytes + p.plane_offsets[blockIdx.y];
    const uint8_t* const source = plane + static_cast<uint64_t>(p.pairs[2 * blockIdx.x]) * page_bytes;
    uint8_t* const target = plane + static_cast<uint64_t>(p.pairs[2 * blockIdx.x + 1]) * page_bytes;
    for (uint32_t byte = 16 * threadIdx.x; byte < page_bytes; byte += 16 * THREADS) store_16(target + byte, load_16(source + byte));
}
