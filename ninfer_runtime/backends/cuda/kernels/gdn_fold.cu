// Flush into the states of all layers what they lack: S and history as gdn_decode leaves them before its own columns, bit
// for bit. entries: one per slot; nothing is lacking behind it, which the host must remember: CarriedColumns stay.
// States, histories and records as in gdn_decode.cu. Grid: (VALUE_HEADS, layers, entries), 256 threads; blocks bring the
// states of those that take their places into L2. Reference: backends/reference/gdn.py `replay`.
#include "common.cuh"
#include "gdn_step.cuh"

// The slot's newest round: how many of its columns count, and in which window they are.
struct GdnFoldEntry {
    int slot, n_columns, buffer, reserved;
};

struct GdnFoldParams {
    const GdnFoldEntry* entries;
    unsigned char* state;    // layer 0 of slot 0
    unsigned char* history;  // likewise
    unsigned char* record;   // likewise
    uint64_t state_slot_stride;  // bytes
    uint64_t state_layer_stride;
    uint64_t record_slot_stride;
    uint64_t record_layer_stride;
    uint64_t carried_offset;  // of CarriedColumns in a slot's records
    int n_ahead;              // blocks that run at a time
};

namespace {

DEVICE uint64_t own_offset(const GdnFoldParams& p) {
    return p.entries[blockIdx.z].slot * p.state_slot_stride + blockIdx.y * p.state_layer_stride;
}

DEVICE float* matrix_of(const GdnFoldParams& p) {
    return reinterpret_cast<float*>(p.state + own_offset(p)) + blockIdx.x * GDN_DIM * GDN_DIM;
}

DEVICE void fetch_ahead(const GdnFoldParams& p) {
    const int block = block_index() + p.n_ahead, layer = block / VALUE_HEADS % static_cast<int>(gridDim.y);
    const int entry = block / VALUE_HEADS / static_cast<int>(gridDim.y);
    if (entry >= static_cast<int>(gridDim.z)) return;
    const unsigned char* const state =
        p.state + p.entries[entry].slot * p.state_slot_stride + layer * p.state_layer_stride;
    prefetch_state(reinterpret_cast<const float*>(state) + block % VALUE_HEADS * GDN_DIM * GDN_DIM);
}

}  // namespace

static_assert(sizeof(GdnPending) <= BLOCK_SHARED, "dynamic shared memory of the launch");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gdn_fold(const __grid_constant__ GdnFoldParams p) {
    DYNAMIC_SHARED(GdnPending, pending);
    grid_dependency_launch();
    grid_dependency_wait();
    const GdnFoldEntry entry = p.entries[blockIdx.z];
    unsigned char* const records = p.record + entry.slot * p.record_slot_stride;
    const CarriedColumns carried = *reinterpret_cast<const CarriedColumns*>(records + p.carried_offset);
    const int n_columns = carried.n + entry.n_columns;
    if (n_columns == 0) return;
    const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    const GdnRecord record(records + blockIdx.y * p.record_layer_stride);
    const GdnChannels channels(head);
    const GdnLane at;
    copy_pending(*pending, record, carried.first, n_columns, head);
    cp_async_commit();
    GdnRows s;
    load_state(s, matrix_of(p), at);
    fetch_ahead(p);
    if (thread < GDN_HISTORY * GDN_HEAD_VECTORS && channels.owns(thread % GDN_HEAD_VECTORS)) {
        const int j = thread / GDN_HEAD_VECTORS, channel = channels.vector(thread % GDN_HEAD_VECTORS);
        store_16(reinterpret_cast<uint16_t*>(p.history + own_offset(p)) + j * GDN_CHANNELS + channel,
                 load_16(record.window(entry.buffer, entry.n_columns + j) + channel));
    }
    cp_async_wait<0>();
    __syncthreads();
    fold_columns(s, n_columns, *pending, at);
    store_state(s, matrix_of(p), at);
}
