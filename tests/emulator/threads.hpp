// The threads of one CUDA block, or of a cluster of blocks, as fibers of one host thread, and the barriers between them.
//
// A fiber runs until it has to wait for others; then the next one that is ready goes on. The last thread of a warp that comes to an
// instruction of the whole warp does the work for all 32 lanes. Whatever is wrong ends the launch with a message: the kernel's
// fibers are left as they are, nothing in them needs a destructor.
#pragma once
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>

#include "emulator.hpp"

namespace emulator {

constexpr int WARP = 32, MOST_THREADS = 1024, STACK_BYTES = 128 << 10;

constexpr int BARRIERS = 16, MOST_BLOCKS = 2;  // of a block; of a cluster

enum class State { READY, WAITS_FOR_WARP, WAITS_FOR_BLOCK, WAITS_FOR_PHASE, DONE };

struct Thread {
    ucontext_t first;   // where it begins
    jmp_buf next;       // where it goes on
    bool started;
    State state;
    const char* at;     // the barrier or warp instruction that it has come to
    unsigned waits_on;  // number of the barrier, or address of the mbarrier
    int products;       // of wgmma that are under way
    alignas(8) unsigned in[32];  // its operands of a warp instruction
    alignas(8) unsigned out[8];  // its results
};

inline Thread threads[MOST_THREADS];
inline int arrived[MOST_THREADS / WARP];  // threads of each warp at its instruction
inline int thread_count;                  // threads of the cluster, which run together: blocks of it, one after the other
inline int block_threads;                 // of each of its blocks
inline int bulk_copies;                   // into their shared memory that are under way
inline bool vote, votes;                  // of __syncthreads_or: while it gathers, and the result
inline jmp_buf launch_point;              // of emulator_launch(), which gets one of these
enum Outcome { BLOCK_DONE = 1, FAILED = 2 };
inline char* message;
inline int message_size;

// The number of the current thread's block in its cluster.
inline int rank() { return current / block_threads; }

// End the launch.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    const int length = snprintf(message, message_size, "block %u, thread %d: ", block + rank(), current % block_threads);
    va_list values;
    va_start(values, format);
    vsnprintf(message + length, message_size - length, format, values);
    va_end(values);
    _longjmp(launch_point, FAILED);
}

[[noreturn]] inline void resume(int thread) {
    current = thread;
    Thread& t = threads[thread];
    if (t.started) _longjmp(t.next, 1);
    t.started = true;
    setcontext(&t.first);
    fail("setcontext() failed");
}

// Leave the current thread for the next one that is ready.
[[noreturn]] inline void run_next() {
    int done = -1, waiting = -1;
    for (int i = 1; i <= thread_count; ++i) {
        const int thread = (current + i) % thread_count;
        if (threads[thread].state == State::READY) resume(thread);
        (threads[thread].state == State::DONE ? done : waiting) = thread;
    }
    if (waiting < 0) {
        if (bulk_copies) fail("the block ends while %d bulk copies into its shared memory are under way", bulk_copies);
        _longjmp(launch_point, BLOCK_DONE);
    }
    current = waiting;
    if (done >= 0) fail("deadlock: it waits at %s, and thread %d has left the kernel", threads[waiting].at, done);
    for (int other = 0; other < thread_count; ++other)
        if (threads[other].state != threads[waiting].state || strcmp(threads[other].at, threads[waiting].at) != 0)
            fail("deadlock: it waits at %s, and thread %d at %s", threads[waiting].at, other, threads[other].at);
    fail("deadlock: it waits at %s", threads[waiting].at);
}

__attribute__((noinline)) inline void wait(State state) {
    threads[current].state = state;
    if (_setjmp(threads[current].next) == 0) run_next();
}

// ---- who knows of whom ----------------------------------------------------------------------------------------------------

// A thread's time is cut into intervals 1, 2, ..., one of which ends whenever it lets others know. known[t][u] is the last interval
// of thread u that lies before what thread t does now; known[t][t] is its own.
inline int known[MOST_THREADS][MOST_THREADS];
inline int known_to_tensor_cores[MOST_THREADS][MOST_THREADS];  // at the thread's last fence.proxy.async

inline void learn(int* own, const int* others) {
    for (int i = 0; i < thread_count; ++i) own[i] = others[i] > own[i] ? others[i] : own[i];
}

// The current thread lets those know who will learn from `all`.
inline void tell(int* all) {
    learn(all, known[current]);
    ++known[current][current];
}

// These threads let each other know.
inline void meet(int first, int count) {
    int all[MOST_THREADS] = {};
    for (int thread = first; thread < first + count; ++thread) learn(all, known[thread]);
    for (int thread = first; thread < first + count; ++thread) {
        learn(known[thread], all);
        ++known[thread][thread];
    }
}

// ---- barriers -------------------------------------------------------------------------------------------------------------

// All of these threads must have come to the same place.
inline void check_together(int first, int count, const char* name) {
    for (int other = first; other < first + count; ++other)
        if (strcmp(threads[other].at, name) != 0) fail("it is at %s while thread %d is at %s", name, other, threads[other].at);
}

// An instruction of the whole warp: `work` gets the 32 lanes, which have put their operands in `in`, and fills their `out`.
template <class Work> void with_warp(const char* name, Work work) {
    threads[current].at = name;
    const int warp = current / WARP;
    if (++arrived[warp] < WARP) return wait(State::WAITS_FOR_WARP);
    check_together(warp * WARP, WARP, name);
    arrived[warp] = 0;
    work(&threads[warp * WARP]);
    for (int lane = 0; lane < WARP; ++lane) threads[warp * WARP + lane].state = State::READY;
}

struct Barrier {
    int arrived, count;  // threads
    int told[MOST_THREADS];
};
inline Barrier named[MOST_BLOCKS * BARRIERS + 1];  // of each block, and that of the cluster

// A barrier of so many threads, by its place; returns whether some thread said yes. Who does not wait there goes on, and learns nothing.
inline bool barrier(const char* name, bool yes, int number, int count, bool waits = true) {
    Barrier& b = named[number];
    if (b.arrived > 0 && b.count != count)
        fail("%s %d, %d: others came to it as one of %d threads", name, number % BARRIERS, count, b.count);
    b.count = count;
    if (waits) threads[current].at = name, threads[current].waits_on = number;
    vote |= yes;
    tell(b.told);
    if (++b.arrived < count) {
        if (waits) wait(State::WAITS_FOR_BLOCK);
    } else {
        if (waits) threads[current].state = State::WAITS_FOR_BLOCK;
        const auto here = [number](const Thread& t) { return t.state == State::WAITS_FOR_BLOCK && t.waits_on == unsigned(number); };
        for (int other = 0; other < thread_count; ++other)
            if (waits && here(threads[other]) && strcmp(threads[other].at, name) != 0)
                fail("it is at %s while thread %d is at %s", name, other, threads[other].at);
        votes = vote, vote = false;
        for (int other = 0; other < thread_count; ++other)
            if (here(threads[other])) learn(known[other], b.told), threads[other].state = State::READY;
        b = {};
    }
    return votes;
}

// A barrier of so many threads of the block, by its number.
inline bool block_barrier(const char* name, bool yes = false, int number = 0, int count = block_threads, bool waits = true) {
    if (number < 0 || number >= BARRIERS || count <= 0 || count % WARP != 0 || count > block_threads)
        fail("%s %d, %d: there are barriers 0 to 15, of whole warps of the block's %d threads", name, number, count, block_threads);
    return barrier(name, yes, rank() * BARRIERS + number, count, waits);
}

inline void (*kernel)(const void*);
inline const void* kernel_params;

inline void thread_main() {
    kernel(kernel_params);
    if (threads[current].products) fail("it leaves the kernel while wgmma.mma_async is under way");
    threads[current].state = State::DONE;
    run_next();
}

// Bring all threads of so many blocks to the kernel's beginning.
inline void start_threads(int blocks, int each) {
    const int count = blocks * each;
    block_threads = each;
    static char* stacks = nullptr;
    const size_t bytes = size_t(MOST_THREADS) * STACK_BYTES;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!stacks) stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
    if (stacks == MAP_FAILED) fail("no memory for the stacks of the threads");
    if (blocks > MOST_BLOCKS || count > MOST_THREADS)
        fail("%d blocks and %d threads; %d and %d can run together", blocks, count, MOST_BLOCKS, MOST_THREADS);
    thread_count = count, vote = false;
    memset(arrived, 0, sizeof arrived);
    memset(named, 0, sizeof named);
    for (int i = 0; i < count; ++i) {
        Thread& t = threads[i];
        t.started = false, t.state = State::READY, t.at = "the beginning", t.products = 0;
        memset(known[i], 0, sizeof(int) * count), memset(known_to_tensor_cores[i], 0, sizeof(int) * count);
        known[i][i] = 1;
        getcontext(&t.first);
        t.first.uc_stack.ss_sp = stacks + size_t(i) * STACK_BYTES;
        t.first.uc_stack.ss_size = STACK_BYTES;
        t.first.uc_link = nullptr;
        makecontext(&t.first, thread_main, 0);
    }
}

}  // namespace emulator
