// Launches, and the functions of CUDA C++ that need the other threads.
#include "emulator.hpp"
#include "memory.hpp"
#include "sm90.hpp"

int emulator::current;
unsigned emulator::block, emulator::grid_blocks;

unsigned emulator::thread_index() { return current % block_threads; }
unsigned emulator::block_index() { return block + rank(); }

decltype(sizeof 0) __cvta_generic_to_shared(const void* p) { return static_cast<const unsigned char*>(p) - smem; }

void __syncthreads() { emulator::block_barrier("__syncthreads"); }
int __syncthreads_or(int yes) { return emulator::block_barrier("__syncthreads_or", yes != 0); }

bool __any_sync(unsigned, bool yes) {
    using namespace emulator;
    threads[current].in[0] = yes;
    with_warp("__any_sync", [](Thread* lanes) {
        unsigned any = 0;
        for (int lane = 0; lane < WARP; ++lane) any |= lanes[lane].in[0];
        for (int lane = 0; lane < WARP; ++lane) lanes[lane].out[0] = any;
    });
    return threads[current].out[0] != 0;
}

void __syncwarp() {
    using namespace emulator;
    with_warp("__syncwarp", [](Thread*) { meet(current / WARP * WARP, WARP); });
}

unsigned __ballot_sync(unsigned, bool yes) {
    using namespace emulator;
    threads[current].in[0] = yes;
    with_warp("__ballot_sync", [](Thread* lanes) {
        unsigned all = 0;
        for (int lane = 0; lane < WARP; ++lane) all |= lanes[lane].in[0] << lane;
        for (int lane = 0; lane < WARP; ++lane) lanes[lane].out[0] = all;
    });
    return threads[current].out[0];
}

unsigned __reduce_or_sync(unsigned, unsigned x) {
    using namespace emulator;
    threads[current].in[0] = x;
    with_warp("__reduce_or_sync", [](Thread* lanes) {
        unsigned all = 0;
        for (int lane = 0; lane < WARP; ++lane) all |= lanes[lane].in[0];
        for (int lane = 0; lane < WARP; ++lane) lanes[lane].out[0] = all;
    });
    return threads[current].out[0];
}

template <class T> static T exchanged(const char* name, T x, int from) {  // what lane `from` has
    using namespace emulator;
    constexpr int WORDS = sizeof(T) / 4;
    memcpy(&threads[current].in[0], &x, sizeof x);
    threads[current].in[WORDS] = from % WARP;
    with_warp(name, [](Thread* lanes) {
        for (int lane = 0; lane < WARP; ++lane) memcpy(lanes[lane].out, lanes[lanes[lane].in[WORDS]].in, sizeof(T));
    });
    memcpy(&x, &threads[current].out[0], sizeof x);
    return x;
}

float __shfl_xor_sync(unsigned, float x, int mask) { return exchanged("__shfl_xor_sync", x, emulator::current ^ mask); }
double __shfl_xor_sync(unsigned, double x, int mask) { return exchanged("__shfl_xor_sync", x, emulator::current ^ mask); }
unsigned __shfl_xor_sync(unsigned, unsigned x, int mask) { return exchanged("__shfl_xor_sync", x, emulator::current ^ mask); }
float __shfl_sync(unsigned, float x, int lane) { return exchanged("__shfl_sync", x, lane); }
unsigned __shfl_sync(unsigned, unsigned x, int lane) { return exchanged("__shfl_sync", x, lane); }
double __shfl_sync(unsigned, double x, int lane) { return exchanged("__shfl_sync", x, lane); }

namespace emulator {

struct Launch {  // mirrored in emulate.py
    unsigned blocks;
    int threads, cluster, shared_bytes, range_count;
    const Range* ranges;
    char* message;  // of the failure, if the launch fails
    int message_size;
};

}  // namespace emulator

// Whether all blocks ran to their ends. `entry` calls the kernel with its argument.
extern "C" bool emulator_launch(void (*entry)(const void*), const void* params, const emulator::Launch* launch) {
    using namespace emulator;
    const Launch& l = *launch;
    static char signal_stack[64 << 10];
    static volatile unsigned next;
    constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
    kernel = entry, kernel_params = params, message = l.message, message_size = l.message_size;
    grid_blocks = l.blocks, shared_bytes = l.shared_bytes, ranges = l.ranges, range_count = l.range_count;
    static struct sigaction old_actions[4];
    static stack_t old_stack;
    stack_t stack = {};
    stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &old_actions[i]);

    static volatile bool good;
    good = true;
    for (next = 0; good && next < l.blocks; next = next + l.cluster) {
        block = next;
        const int outcome = _setjmp(launch_point);
        if (outcome == 0) {
            start_threads(l.cluster, l.threads);
            reset_memory(l.cluster);
            reset_sm90();
            resume(0);
        }
        good = outcome == BLOCK_DONE;
    }

    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &old_actions[i], nullptr);
    sigaltstack(&old_stack, nullptr);
    return good;
}
