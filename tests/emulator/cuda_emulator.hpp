// CUDA on a CPU, for tests: one translation unit is this header, one kernel source and EMULATOR_ENTRY(kernel).
//
// Blocks run one after another, from the last to the first. A block's threads are fibers on one OS thread; a fiber runs
// until its warp meets (mma, ldmatrix, shuffle, ballot, warp_sync) or its block does (__syncthreads), so code between
// two meetings runs lane by lane: what one lane reads of another's work without a meeting is stale or poison. Warps run
// in ascending order in one phase between barriers and in descending order in the next, for the same reason.
//
// A mistake ends the launch, not the process: fail() keeps the message and goes back to the host for good.
#pragma once

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#if !defined(__x86_64__) || defined(EMULATOR_PORTABLE)
#include <ucontext.h>
#endif

namespace emulator {

constexpr int LANES = 32;
constexpr int MAX_THREADS = 1024;
constexpr int MAX_WARPS = MAX_THREADS / LANES;
constexpr int MAX_BARRIERS = 16;
constexpr int MAX_COPIES = 256;
constexpr int MAX_GROUPS = 64;
constexpr size_t MAX_STATIC_SHARED = 4096;
constexpr size_t SHARED_BYTES = 256 << 10;
constexpr size_t PAGE = 4096;
constexpr size_t STACK_BYTES = 64 << 10;
// Not a multiple of a page: equal depths of different stacks must not compete for the same cache sets.
constexpr size_t STACK_STRIDE = STACK_BYTES + 17 * 64;
constexpr uint64_t CANARY = 0x5ca1ab1e0ddba11ull;
constexpr long MAX_POLLS = 1 << 22;

struct Index3 {
    unsigned x, y, z;
};

// ---- fibers

#if defined(__x86_64__) && !defined(EMULATOR_PORTABLE)

struct Context {
    void* stack_pointer;
};

#if defined(__AVX512F__)
#define EMULATOR_WIDE_CLOBBERS                                                                                     \
    , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", \
        "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#else
#define EMULATOR_WIDE_CLOBBERS
#endif

// Everything is a clobber, so the compiler saves what is live; a jump instead of call and ret keeps them predictable.
inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
    void** save = &from.stack_pointer;
    void* load = to.stack_pointer;
    asm volatile(
        "pushq %%rbp\n\t"
        "leaq 1f(%%rip), %%rax\n\t"
        "pushq %%rax\n\t"
        "movq %%rsp, (%0)\n\t"
        "movq %1, %%rsp\n\t"
        "popq %%rax\n\t"
        "jmp *%%rax\n"
        "1:\n\t"
        "popq %%rbp"
        : "+D"(save), "+S"(load)
        :
        : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc", "xmm0",
          "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
          "xmm14", "xmm15" EMULATOR_WIDE_CLOBBERS);
}

inline void prepare_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
    auto top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15});
    top[-1] = nullptr;  // where a function finds its return address: 8 below a multiple of 16
    top[-2] = reinterpret_cast<void*>(entry);
    context.stack_pointer = top - 2;
}

#else

struct Context {
    ucontext_t saved;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }

inline void prepare_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context.saved);
    context.saved.uc_stack.ss_sp = stack;
    context.saved.uc_stack.ss_size = bytes;
    context.saved.uc_link = nullptr;
    makecontext(&context.saved, entry, 0);
}

#endif

// ---- state of the running block

enum class Meeting : uint32_t { MMA_BF16, MMA_F16, MMA_S8, MMA_FP4, LDMATRIX_X4, LDMATRIX_X4_TRANS, LDMATRIX_X2, LDMATRIX_X2_TRANS,
                                SHUFFLE, BALLOT, WARP_SYNC, BARRIER, BARRIER_ARRIVE, EXIT };

inline const char* meeting_name(uint32_t meeting) {
    static const char* const names[] = {"mma_bf16", "mma_f16", "mma_s8", "mma_fp4", "ldmatrix_x4", "ldmatrix_x4_trans",
                                        "ldmatrix_x2", "ldmatrix_x2_trans", "a shuffle", "ballot", "warp_sync",
                                        "a barrier", "barrier_arrive", "the end of the kernel"};
    return names[meeting & 0xff];
}

// What the lanes of one warp bring to a meeting, and what they take away.
struct Slot {
    alignas(64) float a[16][64];
    alignas(64) float b[64][8];
    alignas(64) float c[16][8];
    alignas(64) int ci[16][8];
    alignas(64) uint64_t words[LANES];
    alignas(64) uint32_t results[LANES][4];
};

struct Lane;

enum class WarpState { RUNNABLE, WAITING, DONE };

struct Warp {
    uint32_t meeting;
    int arrived;
    uint32_t lanes_here;
    int parity;
    WarpState state;
    int barrier;
    Lane* resume;
    Slot slots[2];  // lanes still take results out of one while the first ones fill the other
};

struct Copy {
    void* target;
    const void* source;
    int bytes;
};

struct Lane {
    Context context;
    Index3 thread;
    int lane;
    Lane* next;
    Warp* warp;
    bool waited;  // for the kernels ahead
    uint32_t copies_begin, copies_end, groups_begin, groups_end;
    uint32_t group_ends[MAX_GROUPS];
    Copy copies[MAX_COPIES];
};

struct Barrier {
    int arrived, expected;
};

// A range of device memory; marks: of reads, then of writes, one uint32 per 4 bytes.
struct Region {
    uint64_t start, end, marks;
};

// As ctypes sees it: device.py, _Launch.
struct Launch {
    const void* params;
    const char* name;
    char* error;
    const Region* regions;
    uint64_t n_regions;
    uint64_t params_bytes;
    uint64_t error_bytes;
    uint64_t fault_address;
    uint32_t grid[3];
    uint32_t threads;
    uint32_t shared_bytes;
    uint32_t cpu_seconds;
    uint32_t pdl;
    uint32_t serial;        // number of this launch
    uint32_t first_serial;  // launches from this one on may still be running
    uint32_t other_serial;
    uint32_t released_early;  // out: a thread let the next kernel start before it had waited for those ahead
};

static Lane lanes[MAX_THREADS];
static Warp warps[MAX_WARPS];
static Barrier barriers[MAX_BARRIERS];
static Context host;
static Lane* current;  // null while the host runs
static Launch* launch;
static bool failed;
static long polls;
static void (*kernel_body)();
static unsigned char* stacks;
static unsigned char* shared_region;
static pthread_t owner;

static Index3 block, grid_size, block_size;

extern "C" {
extern unsigned char __start_emulator_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_emulator_shared[] __attribute__((weak, visibility("hidden")));
}

inline size_t static_shared_bytes() { return __stop_emulator_shared - __start_emulator_shared; }

inline size_t dynamic_bytes() { return (launch->shared_bytes + 127) / 128 * 128; }

// The end lies at a page that cannot be touched.
inline unsigned char* dynamic_shared() { return shared_region + SHARED_BYTES - dynamic_bytes(); }

inline bool is_shared(const void* pointer, size_t bytes) {
    auto p = static_cast<const unsigned char*>(pointer);
    if (p >= dynamic_shared() && p + bytes <= dynamic_shared() + launch->shared_bytes) return true;
    return p >= __start_emulator_shared && p + bytes <= __stop_emulator_shared;
}

inline __attribute__((noinline)) void write_error(const char* format, va_list arguments) {
    char* out = launch->error;
    size_t left = launch->error_bytes;
    int n = snprintf(out, left, "kernel %s, block (%u, %u, %u)", launch->name, block.x, block.y, block.z);
    if (current != nullptr) {
        int thread = static_cast<int>(current - lanes);
        n += snprintf(out + n, left - n, ", thread %d (warp %d, lane %d)", thread, thread / LANES, thread % LANES);
    }
    n += snprintf(out + n, left - n, ": ");
    vsnprintf(out + n, left - n, format, arguments);
    failed = true;
}

// Ends the launch; called on a fiber it does not return.
inline __attribute__((noinline, format(printf, 1, 2))) void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_error(format, arguments);
    va_end(arguments);
    if (current != nullptr) {
        static Context abandoned;
        switch_context(abandoned, host);
    }
}

}  // namespace emulator

#include "watch.hpp"

namespace emulator {

// ---- meetings

typedef float Row __attribute__((vector_size(32)));

template <int K>
inline void multiply(Slot& slot, Row (&d)[16]) {
    const Row* b = reinterpret_cast<const Row*>(slot.b);
    for (int row = 0; row < 16; row += 4) {
        Row d0 = d[row], d1 = d[row + 1], d2 = d[row + 2], d3 = d[row + 3];
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) {
            d0 += slot.a[row][k] * b[k];
            d1 += slot.a[row + 1][k] * b[k];
            d2 += slot.a[row + 2][k] * b[k];
            d3 += slot.a[row + 3][k] * b[k];
        }
        d[row] = d0, d[row + 1] = d1, d[row + 2] = d2, d[row + 3] = d3;
    }
}

inline void finish_mma(Slot& slot) { multiply<16>(slot, *reinterpret_cast<Row(*)[16]>(slot.c)); }

// 32 products of signed bytes sum up to less than 2^24: exact in fp32.
inline void finish_mma_s8(Slot& slot) {
    Row d[16] = {};
    multiply<32>(slot, d);
    for (int row = 0; row < 16; ++row)
        for (int n = 0; n < 8; ++n)
            slot.ci[row][n] = static_cast<int>(static_cast<uint32_t>(slot.ci[row][n]) + static_cast<uint32_t>(static_cast<int>(d[row][n])));
}

// An E4M3 number without a sign.
inline float scale_value(uint32_t word) {
    const uint32_t exponent = word >> 3 & 15, fraction = word & 7;
    if (exponent == 15 && fraction == 7) return __builtin_nanf("");
    return exponent == 0 ? static_cast<float>(fraction) * 0x1p-9f
                         : __builtin_ldexpf(static_cast<float>(8 + fraction), static_cast<int>(exponent) - 10);
}

// words of lanes: scales of A, those of B above them. Operands times their scales are exact, and so are products.
inline void finish_mma_fp4(Slot& slot, int pair_a, int lane_b) {
    for (int block = 0; block < 4; ++block) {
        for (int m = 0; m < 16; ++m) {
            const auto scales = static_cast<uint32_t>(slot.words[4 * (m % 8) + 2 * pair_a + m / 8]);
            const float scale = scale_value(scales >> 8 * block & 0xff);
            for (int k = 16 * block; k < 16 * block + 16; ++k) slot.a[m][k] *= scale;
        }
        for (int n = 0; n < 8; ++n) {
            const auto scales = static_cast<uint32_t>(slot.words[4 * n + lane_b] >> 32);
            const float scale = scale_value(scales >> 8 * block & 0xff);
            for (int k = 16 * block; k < 16 * block + 16; ++k) slot.b[k][n] *= scale;
        }
    }
    multiply<64>(slot, *reinterpret_cast<Row(*)[16]>(slot.c));
}

inline void finish_ldmatrix(Slot& slot, int matrices, bool transposed) {
    set_quiet(true);  // each lane has answered for its own row
    for (int m = 0; m < matrices; ++m) {
        for (int lane = 0; lane < LANES; ++lane) {
            int row = lane / 4, column = 2 * (lane % 4);
            if (transposed) {
                auto upper = reinterpret_cast<const uint16_t*>(slot.words[8 * m + column]);
                auto lower = reinterpret_cast<const uint16_t*>(slot.words[8 * m + column + 1]);
                slot.results[lane][m] = upper[row] | static_cast<uint32_t>(lower[row]) << 16;
            } else {
                memcpy(&slot.results[lane][m], reinterpret_cast<const uint16_t*>(slot.words[8 * m + row]) + column, 4);
            }
        }
    }
    set_quiet(false);
}

inline void count_at_barrier(int id, int n_threads) {
    Barrier& barrier = barriers[id];
    if (barrier.arrived != 0 && barrier.expected != n_threads)
        fail("barrier %d is for %d threads here and for %d elsewhere", id, n_threads, barrier.expected);
    barrier.expected = n_threads;
    barrier.arrived += LANES;
    watch_arrival(id, static_cast<int>(current->warp - warps));
    if (barrier.arrived < barrier.expected) return;
    barrier.arrived = 0;
    watch_release(id);
    for (Warp& warp : warps)
        if (warp.state == WarpState::WAITING && warp.barrier == id) warp.state = WarpState::RUNNABLE;
}

inline void leave_to_host(Warp& warp, WarpState state) {
    warp.state = state;
    warp.resume = current;
    Lane* self = current;
    current = nullptr;
    switch_context(self->context, host);
}

// id and n_threads of a barrier, and an instruction's constants, are part of what lanes must agree on.
inline uint32_t barrier_meeting(Meeting kind, int id, int n_threads) {
    return static_cast<uint32_t>(kind) | static_cast<uint32_t>(id) << 8 | static_cast<uint32_t>(n_threads) << 16;
}

inline void finish(uint32_t meeting, Warp& warp, Slot& slot) {
    int id = meeting >> 8 & 0xff, n_threads = static_cast<int>(meeting >> 16);
    switch (static_cast<Meeting>(meeting & 0xff)) {
        case Meeting::MMA_BF16:
        case Meeting::MMA_F16: return finish_mma(slot);
        case Meeting::MMA_S8: return finish_mma_s8(slot);
        case Meeting::MMA_FP4: return finish_mma_fp4(slot, id, n_threads);
        case Meeting::LDMATRIX_X4: return finish_ldmatrix(slot, 4, false);
        case Meeting::LDMATRIX_X4_TRANS: return finish_ldmatrix(slot, 4, true);
        case Meeting::LDMATRIX_X2: return finish_ldmatrix(slot, 2, false);
        case Meeting::LDMATRIX_X2_TRANS: return finish_ldmatrix(slot, 2, true);
        case Meeting::BARRIER_ARRIVE: return count_at_barrier(id, n_threads);
        case Meeting::BARRIER:
            warp.barrier = id;
            warp.state = WarpState::WAITING;
            count_at_barrier(id, n_threads);
            return leave_to_host(warp, warp.state);
        case Meeting::EXIT: return leave_to_host(warp, WarpState::DONE);
        default: return;
    }
}

inline __attribute__((noinline)) void wrong_meeting(const Warp& warp, uint32_t meeting) {
    fail("diverged: it has come to %s while %d lanes of its warp (mask 0x%08x) wait in %s", meeting_name(meeting),
         warp.arrived, warp.lanes_here, meeting_name(warp.meeting));
}

// Returns when all lanes of the warp have come; the last one to come does the work for all.
inline __attribute__((noinline)) void meet(uint32_t meeting, Slot& slot) {
    Lane* self = current;
    Warp& warp = *self->warp;
    if (warp.arrived == 0) {
        warp.meeting = meeting;
        warp.lanes_here = 0;
    } else if (warp.meeting != meeting) {
        wrong_meeting(warp, meeting);
    }
    warp.lanes_here |= 1u << self->lane;
    if (++warp.arrived == LANES) {
        warp.arrived = 0;
        warp.parity ^= 1;
        watch_meeting(static_cast<int>(&warp - warps));
        finish(meeting, warp, slot);
        return;
    }
    current = self->next;
    switch_context(self->context, self->next->context);
}

inline void meet(Meeting meeting, Slot& slot) { meet(static_cast<uint32_t>(meeting), slot); }

inline Slot& open_slot() {
    Warp& warp = *current->warp;
    return warp.slots[warp.parity];
}

inline void synchronize_block() {
    meet(barrier_meeting(Meeting::BARRIER, 0, static_cast<int>(block_size.x)), open_slot());
}

inline void use_barrier(Meeting kind, int id, int n_threads) {
    if (id < 0 || id >= MAX_BARRIERS || n_threads <= 0 || n_threads % LANES != 0 || n_threads > static_cast<int>(block_size.x))
        fail("barrier %d for %d threads: ids are 0..15, threads a multiple of 32 up to the block's %u", id, n_threads, block_size.x);
    meet(barrier_meeting(kind, id, n_threads), open_slot());
}

// ---- asynchronous copies: done at the wait that completes them, poison until then

inline void queue_copy(void* target, const void* source, int bytes, bool valid) {
    if (!is_shared(target, bytes) || reinterpret_cast<uintptr_t>(target) % bytes != 0)
        fail("cp.async of %d bytes to %p: not an aligned place in shared memory", bytes, target);
    if (reinterpret_cast<uintptr_t>(source) % bytes != 0) fail("cp.async from %p: not %d-byte aligned", source, bytes);
    if (valid && is_shared(source, bytes)) fail("cp.async from %p: that is shared memory", source);
    Lane& lane = *current;
    if (lane.copies_end - lane.copies_begin == MAX_COPIES) fail("more than %d cp.async wait to be completed", MAX_COPIES);
    lane.copies[lane.copies_end++ % MAX_COPIES] = {target, valid ? source : nullptr, bytes};
    set_quiet(true);
    memset(target, 0xff, bytes);
    set_quiet(false);
    watch_copy_begin(target, valid ? source : nullptr, bytes);
}

inline void commit_copies() {
    Lane& lane = *current;
    if (lane.groups_end - lane.groups_begin == MAX_GROUPS) fail("more than %d groups of cp.async wait", MAX_GROUPS);
    lane.group_ends[lane.groups_end++ % MAX_GROUPS] = lane.copies_end;
}

inline void wait_copies(uint32_t groups_left) {
    Lane& lane = *current;
    while (lane.groups_end - lane.groups_begin > groups_left) {
        uint32_t end = lane.group_ends[lane.groups_begin++ % MAX_GROUPS];
        for (; lane.copies_begin != end; ++lane.copies_begin) {
            const Copy& copy = lane.copies[lane.copies_begin % MAX_COPIES];
            set_quiet(true);
            if (copy.source != nullptr)
                memcpy(copy.target, copy.source, copy.bytes);
            else
                memset(copy.target, 0, copy.bytes);
            set_quiet(false);
            watch_copy_end(copy.target, copy.bytes);
        }
    }
}

inline void count_poll() {
    if (++polls > MAX_POLLS) fail("waits for ever for a value in memory; blocks run from the last to the first");
}

template <typename T>
inline const T* checked(const void* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T) != 0)
        fail("address %p is not a multiple of %zu", pointer, sizeof(T));
    return static_cast<const T*>(pointer);
}

// ---- the host's side

// Each fiber serves one thread index of block after block.
inline void fiber_main() {
    for (;;) {
        kernel_body();
        meet(Meeting::EXIT, open_slot());
    }
}

inline void describe_standstill(int n_warps) {
    char text[512];
    int n = 0;
    for (int i = 0; i < n_warps && n < 400; ++i) {
        if (warps[i].state == WarpState::DONE)
            n += snprintf(text + n, sizeof text - n, "%swarp %d has ended", i ? ", " : "", i);
        else
            n += snprintf(text + n, sizeof text - n, "%swarp %d waits at barrier %d", i ? ", " : "", i, warps[i].barrier);
    }
    fail("not every thread reaches the barrier (0 is __syncthreads): %s", text);
}

// A kernel that starts early and never waits could end before the kernels ahead of it, and so release those behind it.
inline bool check_dependency(int n_warps) {
    if (!launch->pdl) return true;
    for (int i = 0; i < n_warps * LANES; ++i)
        if (lanes[i].waited) return true;
    fail("launched with pdl=True, and no thread of the block called grid_dependency_wait()");
    return false;
}

inline bool run_block(int n_warps) {
    memset(dynamic_shared(), 0xff, dynamic_bytes());
    memset(__start_emulator_shared, 0xff, static_shared_bytes());
    memset(barriers, 0, sizeof barriers);
    polls = 0;
    watch_block();
    for (int i = 0; i < n_warps; ++i) {
        warps[i].state = WarpState::RUNNABLE;
        for (int lane = 0; lane < LANES; ++lane) {
            Lane& each = lanes[i * LANES + lane];
            each.waited = false;
            each.copies_begin = each.copies_end = each.groups_begin = each.groups_end = 0;
        }
    }
    for (int phase = 0;; ++phase) {
        bool moved = false, done = true;
        for (int i = 0; i < n_warps; ++i) {
            Warp& warp = warps[phase % 2 == 0 ? i : n_warps - 1 - i];
            if (warp.state == WarpState::RUNNABLE) {
                moved = true;
                current = warp.resume;
                switch_context(host, current->context);
                current = nullptr;
                if (failed) return false;
            }
            done = done && warp.state == WarpState::DONE;
        }
        if (done) return check_dependency(n_warps);
        if (!moved) {
            describe_standstill(n_warps);
            return false;
        }
    }
}

inline bool run_grid() {
    int n_warps = static_cast<int>(launch->threads) / LANES;
    grid_size = {launch->grid[0], launch->grid[1], launch->grid[2]};
    block_size = {launch->threads, 1, 1};
    block = {0, 0, 0};
    if (static_shared_bytes() > MAX_STATIC_SHARED) {
        fail("%zu bytes of static shared memory, at most %zu", static_shared_bytes(), MAX_STATIC_SHARED);
        return false;
    }
    for (int i = 0; i < n_warps * LANES; ++i) {
        Lane& lane = lanes[i];
        int warp = i / LANES;
        unsigned char* stack = stacks + i * STACK_STRIDE;
        memcpy(stack, &CANARY, sizeof CANARY);
        prepare_context(lane.context, stack, STACK_BYTES, fiber_main);
        lane.thread = {static_cast<unsigned>(i), 0, 0};
        lane.lane = i % LANES;
        lane.warp = &warps[warp];
        lane.next = &lanes[warp * LANES + (i + 1) % LANES];
    }
    for (int i = 0; i < n_warps; ++i) {
        warps[i].arrived = 0;
        warps[i].parity = 0;
        warps[i].resume = &lanes[i * LANES];
    }
    for (unsigned z = grid_size.z; z-- > 0;)
        for (unsigned y = grid_size.y; y-- > 0;)
            for (unsigned x = grid_size.x; x-- > 0;) {
                block = {x, y, z};
                if (!run_block(n_warps)) return false;
            }
    for (int i = 0; i < n_warps * LANES; ++i) {
        if (memcmp(stacks + i * STACK_STRIDE, &CANARY, sizeof CANARY) != 0) {
            fail("thread %d used more than %zu bytes of stack", i, STACK_BYTES);
            return false;
        }
    }
    return true;
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
constexpr int N_SIGNALS = sizeof SIGNALS / sizeof SIGNALS[0];

inline void on_signal(int signal, siginfo_t* info, void*) {
    if (signal == SIGVTALRM && !pthread_equal(pthread_self(), owner)) {
        pthread_kill(owner, SIGVTALRM);
        return;
    }
    switch (signal) {
        case SIGVTALRM: fail("ran for more than %u s: an endless loop?", launch->cpu_seconds); break;
        case SIGFPE: fail("integer division by zero"); break;
        case SIGILL: fail("illegal instruction"); break;
        default:
            launch->fault_address = reinterpret_cast<uint64_t>(info->si_addr);
            // Such an instruction may not say which address it was.
            if (info->si_code == SI_KERNEL || signal == SIGBUS)
                fail("access to a misaligned or impossible address");
            else if (static_cast<unsigned char*>(info->si_addr) >= shared_region &&
                     static_cast<unsigned char*>(info->si_addr) < shared_region + SHARED_BYTES + PAGE)
                fail("access %td bytes behind the block's %u bytes of dynamic shared memory",
                     static_cast<unsigned char*>(info->si_addr) - dynamic_shared() - launch->shared_bytes,
                     launch->shared_bytes);
            else
                fail("access to address %p", info->si_addr);
    }
}

// Turns a bad access of a kernel into a message while the launch lasts.
class SignalGuard {
public:
    SignalGuard() {
        static unsigned char stack[64 << 10];
        stack_t mine = {};
        mine.ss_sp = stack;
        mine.ss_size = sizeof stack;
        sigaltstack(&mine, &stack_);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < N_SIGNALS; ++i) sigaction(SIGNALS[i], &action, &actions_[i]);
        owner = pthread_self();
        itimerval limit = {};
        limit.it_value.tv_sec = launch->cpu_seconds;
        setitimer(ITIMER_VIRTUAL, &limit, nullptr);
    }

    ~SignalGuard() {
        itimerval off = {};
        setitimer(ITIMER_VIRTUAL, &off, nullptr);
        for (int i = 0; i < N_SIGNALS; ++i) sigaction(SIGNALS[i], &actions_[i], nullptr);
        sigaltstack(&stack_, nullptr);
    }

private:
    stack_t stack_;
    struct sigaction actions_[N_SIGNALS];
};

inline void reserve_memory() {
    if (stacks != nullptr) return;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks = static_cast<unsigned char*>(mmap(nullptr, MAX_THREADS * STACK_STRIDE, PROT_READ | PROT_WRITE, flags, -1, 0));
    auto region = mmap(nullptr, SHARED_BYTES + PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    shared_region = static_cast<unsigned char*>(region);
    mprotect(shared_region + SHARED_BYTES, PAGE, PROT_NONE);
}

template <typename Params>
int run(void (*kernel)(Params), Launch* request) {
    static void (*entry)(Params);
    static const Params* params;
    launch = request;
    failed = false;
    current = nullptr;
    entry = kernel;
    params = static_cast<const Params*>(request->params);
    kernel_body = [] { entry(*params); };
    if (request->params_bytes != sizeof(Params)) {
        fail("its parameter struct has %zu bytes, the caller's %llu", sizeof(Params),
             static_cast<unsigned long long>(request->params_bytes));
        return 1;
    }
    reserve_memory();
    SignalGuard guard;
    return run_grid() ? 0 : 1;
}

}  // namespace emulator

#define EMULATOR_ENTRY(kernel)                                                                             \
    extern "C" __attribute__((visibility("default"))) int emulator_run(emulator::Launch* launch) { \
        return emulator::run(kernel_source::kernel, launch);                                               \
    }

#include "cuda_language.hpp"
