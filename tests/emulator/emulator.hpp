// One CUDA block after the other on the host: what the kernels use of CUDA C++, and the launch.
#pragma once
#include "ptx.hpp"

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline struct {
    struct {
        operator unsigned() const { return emulator::current; }
    } x;
} threadIdx;
inline struct {
    struct {
        operator unsigned() const { return emulator::block; }
    } x;
} blockIdx;

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline float __int_as_float(int x) { return ptx::bits<float>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }  // the compiler is told not to fuse
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline size_t __cvta_generic_to_shared(const void* p) { return static_cast<const unsigned char*>(p) - smem; }

inline void __syncthreads() { emulator::block_barrier("__syncthreads"); }
inline int __syncthreads_or(int yes) { return emulator::block_barrier("__syncthreads_or", yes != 0); }

inline bool __any_sync(unsigned, bool yes) {
    using namespace emulator;
    threads[current].in[0] = yes;
    with_warp("__any_sync", [](Thread* lanes) {
        unsigned any = 0;
        for (int lane = 0; lane < WARP; ++lane) any |= lanes[lane].in[0];
        for (int lane = 0; lane < WARP; ++lane) lanes[lane].out[0] = any;
    });
    return threads[current].out[0] != 0;
}

inline float __shfl_xor_sync(unsigned, float x, int mask) {
    using namespace emulator;
    threads[current].in[0] = ptx::bits<unsigned>(x), threads[current].in[1] = mask;
    with_warp("__shfl_xor_sync", [](Thread* lanes) {
        for (int lane = 0; lane < WARP; ++lane) lanes[lane].out[0] = lanes[lane ^ lanes[lane].in[1]].in[0];
    });
    return ptx::bits<float>(threads[current].out[0]);
}

namespace emulator {

struct Launch {  // mirrored in emulate.py
    unsigned blocks;
    int threads, shared_bytes, range_count;
    const Range* ranges;
    char* message;  // of the failure, if the launch fails
    int message_size;
};

// Whether all blocks ran to their ends.
inline bool launch(void (*entry)(), const Launch& l) {
    static char signal_stack[64 << 10];
    static volatile unsigned next;
    constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
    kernel = entry, message = l.message, message_size = l.message_size;
    shared_bytes = l.shared_bytes, ranges = l.ranges, range_count = l.range_count;
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
    for (next = 0; good && next < l.blocks; next = next + 1) {
        block = next;
        const int outcome = _setjmp(launch_point);
        if (outcome == 0) {
            reset_memory();
            start_threads(l.threads);
            resume(0);
        }
        good = outcome == BLOCK_DONE;
    }

    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &old_actions[i], nullptr);
    sigaltstack(&old_stack, nullptr);
    return good;
}

}  // namespace emulator
