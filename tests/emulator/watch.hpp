// What a card does not order: found by looking at every access of the kernel (builds with -DEMULATOR_WATCH, where the
// compiler calls __asan_* in front of each; without it all of this is empty).
//
// Shared memory: two threads touch a byte, one of them writes, and neither a barrier (other warps) nor a meeting of the
// warp (same warp) lies between. Each warp counts its meetings and knows, per other warp, the count that barriers have
// told it of (a vector clock); a byte keeps its last write and one read.
// Device memory: a launch with pdl runs ahead of earlier kernels until grid_dependency_wait(); until then it may not
// read what they wrote nor write what they touched. Four bytes share a mark: the number of the launch.
#pragma once

namespace emulator {

#if !defined(EMULATOR_WATCH)

inline void watch_block() {}
inline void watch_meeting(int) {}
inline void watch_arrival(int, int) {}
inline void watch_release(int) {}
inline void watch_copy_begin(void*, const void*, int) {}
inline void watch_copy_end(void*, int) {}
inline void watch_read(const void*, int) {}
inline void set_quiet(bool) {}

#else

#define NOT_WATCHED __attribute__((noinline, no_sanitize("kernel-address")))

constexpr uint32_t IN_FLIGHT = 0xffffffffu;

struct Cell {
    uint32_t write_clock, read_clock;  // 0: never
    uint16_t writer, reader;
};

static Cell dynamic_cells[SHARED_BYTES];
static Cell static_cells[MAX_STATIC_SHARED];
static uint32_t clocks[MAX_WARPS][MAX_WARPS];
static uint32_t barrier_clocks[MAX_BARRIERS][MAX_WARPS];
static bool quiet;
static uint64_t last_region;

NOT_WATCHED inline void set_quiet(bool now) { quiet = now; }

NOT_WATCHED inline void watch_block() {
    memset(dynamic_cells, 0, sizeof(Cell) * launch->shared_bytes);
    memset(static_cells, 0, sizeof(Cell) * static_shared_bytes());
    memset(clocks, 0, sizeof clocks);
    memset(barrier_clocks, 0, sizeof barrier_clocks);
    for (int warp = 0; warp < MAX_WARPS; ++warp) clocks[warp][warp] = 1;
    quiet = false;
}

// In front of whatever the meeting is for.
NOT_WATCHED inline void watch_meeting(int warp) { ++clocks[warp][warp]; }

NOT_WATCHED inline void watch_arrival(int id, int warp) {
    for (int other = 0; other < MAX_WARPS; ++other) {
        uint32_t known = clocks[warp][other] - (other == warp ? 1 : 0);
        if (known > barrier_clocks[id][other]) barrier_clocks[id][other] = known;
    }
}

NOT_WATCHED inline void watch_release(int id) {
    for (int warp = 0; warp < MAX_WARPS; ++warp) {
        if (warps[warp].state != WarpState::WAITING || warps[warp].barrier != id) continue;
        for (int other = 0; other < MAX_WARPS; ++other)
            if (barrier_clocks[id][other] > clocks[warp][other]) clocks[warp][other] = barrier_clocks[id][other];
    }
    memset(barrier_clocks[id], 0, sizeof barrier_clocks[id]);
}

NOT_WATCHED inline bool is_ordered(uint32_t clock, int thread) {
    if (clock == 0) return true;
    if (clock == IN_FLIGHT) return false;
    int self = static_cast<int>(current - lanes), warp = self / LANES;
    if (thread == self) return true;
    if (thread / LANES == warp) return clock < clocks[warp][warp];
    return clock <= clocks[warp][thread / LANES];
}

NOT_WATCHED inline void report_race(size_t byte, bool write, bool other_writes, const Cell& cell) {
    const char* now = write ? "written" : "read";
    if (other_writes && cell.write_clock == IN_FLIGHT)
        fail("shared memory byte %zu is %s while a cp.async of thread %d is under way to it", byte, now, cell.writer);
    int thread = other_writes ? cell.writer : cell.reader;
    fail("race: shared memory byte %zu is %s here and %s by thread %d, with no %s in between", byte, now,
         other_writes ? "written" : "read", thread,
         thread / LANES == (current - lanes) / LANES ? "warp_sync" : "barrier");
}

NOT_WATCHED inline void touch_shared(Cell* cells, size_t first, size_t bytes, bool write) {
    int self = static_cast<int>(current - lanes), warp = self / LANES;
    for (size_t byte = first; byte < first + bytes; ++byte) {
        Cell& cell = cells[byte];
        if (!is_ordered(cell.write_clock, cell.writer)) report_race(byte, write, true, cell);
        if (write) {
            if (!is_ordered(cell.read_clock, cell.reader)) report_race(byte, write, false, cell);
            cell.write_clock = clocks[warp][warp];
            cell.writer = static_cast<uint16_t>(self);
        } else if (is_ordered(cell.read_clock, cell.reader)) {
            cell.read_clock = clocks[warp][warp];
            cell.reader = static_cast<uint16_t>(self);
        }
    }
}

NOT_WATCHED inline void touch_device(uintptr_t address, size_t bytes, bool write) {
    const Region* region = &launch->regions[last_region];
    if (last_region >= launch->n_regions || address < region->start || address >= region->end) {
        for (last_region = 0; last_region < launch->n_regions; ++last_region) {
            region = &launch->regions[last_region];
            if (address >= region->start && address < region->end) break;
        }
        if (last_region == launch->n_regions) return;
    }
    uint32_t* reads = reinterpret_cast<uint32_t*>(region->marks);
    uint32_t* writes = reads + (region->end - region->start + 3) / 4;
    const bool early = launch->pdl && !current->waited;
    for (uintptr_t word = (address - region->start) / 4; word <= (address + bytes - 1 - region->start) / 4; ++word) {
        if (early) {
            uint32_t other = write && reads[word] > writes[word] && reads[word] != launch->serial ? reads[word] : writes[word];
            if (other >= launch->first_serial && other != launch->serial) {
                launch->fault_address = address;
                launch->other_serial = other;
                fail("%s in front of grid_dependency_wait() what an earlier kernel %s", write ? "writes" : "reads",
                     other == writes[word] ? "writes" : "reads");
            }
        }
        (write ? writes : reads)[word] = launch->serial;
    }
}

// Where p lies in shared memory, or null.
NOT_WATCHED inline Cell* shared_cells(uintptr_t p, size_t bytes, size_t& offset) {
    uintptr_t start = reinterpret_cast<uintptr_t>(shared_region) + SHARED_BYTES - (launch->shared_bytes + 127) / 128 * 128;
    if (p >= start && p + bytes <= start + launch->shared_bytes) {
        offset = p - start;
        return dynamic_cells;
    }
    start = reinterpret_cast<uintptr_t>(__start_emulator_shared);
    if (p >= start && p + bytes <= reinterpret_cast<uintptr_t>(__stop_emulator_shared)) {
        offset = p - start;
        return static_cells;
    }
    return nullptr;
}

NOT_WATCHED inline void touch(uintptr_t address, size_t bytes, bool write) {
    if (current == nullptr || quiet) return;
    size_t offset;
    if (Cell* cells = shared_cells(address, bytes, offset))
        touch_shared(cells, offset, bytes, write);
    else
        touch_device(address, bytes, write);
}

NOT_WATCHED inline void watch_read(const void* address, int bytes) {
    touch(reinterpret_cast<uintptr_t>(address), static_cast<size_t>(bytes), false);
}

NOT_WATCHED inline void watch_copy_begin(void* target, const void* source, int bytes) {
    if (source != nullptr) watch_read(source, bytes);
    size_t offset;
    if (Cell* cells = shared_cells(reinterpret_cast<uintptr_t>(target), static_cast<size_t>(bytes), offset)) {
        touch_shared(cells, offset, static_cast<size_t>(bytes), true);
        for (int i = 0; i < bytes; ++i) cells[offset + static_cast<size_t>(i)].write_clock = IN_FLIGHT;
    }
}

NOT_WATCHED inline void watch_copy_end(void* target, int bytes) {
    size_t offset;
    const int warp = static_cast<int>(current - lanes) / LANES;
    if (Cell* cells = shared_cells(reinterpret_cast<uintptr_t>(target), static_cast<size_t>(bytes), offset))
        for (int i = 0; i < bytes; ++i) cells[offset + static_cast<size_t>(i)].write_clock = clocks[warp][warp];
}

#define EMULATOR_HOOKS(size)                                                                                       \
    NOT_WATCHED void __asan_load##size##_noabort(uintptr_t address) { emulator::touch(address, size, false); }  \
    NOT_WATCHED void __asan_store##size##_noabort(uintptr_t address) { emulator::touch(address, size, true); }

}  // namespace emulator

extern "C" {
EMULATOR_HOOKS(1)
EMULATOR_HOOKS(2)
EMULATOR_HOOKS(4)
EMULATOR_HOOKS(8)
EMULATOR_HOOKS(16)
NOT_WATCHED void __asan_loadN_noabort(uintptr_t address, size_t bytes) { emulator::touch(address, bytes, false); }
NOT_WATCHED void __asan_storeN_noabort(uintptr_t address, size_t bytes) { emulator::touch(address, bytes, true); }
void __asan_handle_no_return() {}
}

namespace emulator {

#endif

}  // namespace emulator
