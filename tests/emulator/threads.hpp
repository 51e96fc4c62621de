// The threads of one CUDA block as fibers of one host thread, and the barriers between them.
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

enum class State { READY, WAITS_FOR_WARP, WAITS_FOR_BLOCK, DONE };

struct Thread {
    ucontext_t first;   // where it begins
    jmp_buf next;       // where it goes on
    bool started;
    State state;
    const char* at;     // the barrier or warp instruction that it has come to
    alignas(8) unsigned in[32];  // its operands of a warp instruction
    alignas(8) unsigned out[8];  // its results
};

inline Thread threads[MOST_THREADS];
inline int arrived[MOST_THREADS / WARP];  // threads of each warp at its instruction
inline int thread_count;                  // threads of the block
inline int block_arrived, barriers;       // threads at the block's barrier; barriers that the block has passed
inline bool vote, votes;                  // of __syncthreads_or: while it gathers, and the result
inline jmp_buf launch_point;              // of emulator_launch(), which gets one of these
enum Outcome { BLOCK_DONE = 1, FAILED = 2 };
inline char* message;
inline int message_size;

// End the launch.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    const int length = snprintf(message, message_size, "block %u, thread %d: ", block, current);
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
    if (waiting < 0) _longjmp(launch_point, BLOCK_DONE);
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

// A barrier of the whole block; returns whether some thread said yes.
inline bool block_barrier(const char* name, bool yes = false) {
    threads[current].at = name;
    vote |= yes;
    if (++block_arrived < thread_count) {
        wait(State::WAITS_FOR_BLOCK);
    } else {
        check_together(0, thread_count, name);
        votes = vote, vote = false;
        block_arrived = 0;
        ++barriers;
        for (int thread = 0; thread < thread_count; ++thread) threads[thread].state = State::READY;
    }
    return votes;
}

inline void (*kernel)(const void*);
inline const void* kernel_params;

inline void thread_main() {
    kernel(kernel_params);
    threads[current].state = State::DONE;
    run_next();
}

// Bring all threads of the block to the kernel's beginning.
inline void start_threads(int count) {
    static char* stacks = nullptr;
    const size_t bytes = size_t(MOST_THREADS) * STACK_BYTES;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!stacks) stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
    if (stacks == MAP_FAILED) fail("no memory for the stacks of the threads");
    thread_count = count, block_arrived = barriers = 0, vote = false;
    memset(arrived, 0, sizeof arrived);
    for (int i = 0; i < count; ++i) {
        Thread& t = threads[i];
        t.started = false, t.state = State::READY, t.at = "the beginning";
        getcontext(&t.first);
        t.first.uc_stack.ss_sp = stacks + size_t(i) * STACK_BYTES;
        t.first.uc_stack.ss_size = STACK_BYTES;
        t.first.uc_link = nullptr;
        makecontext(&t.first, thread_main, 0);
    }
}

}  // namespace emulator
