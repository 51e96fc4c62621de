// How the warps of a block on sm_90 that do different things tell each other: barriers in shared memory, and registers on loan.
#include "include/ptx.cuh"

// A barrier is 8 bytes. It has completed a phase whenever `count` threads have arrived; phases have parity 0, 1, 0, ...
__device__ __forceinline__ void mbarrier_init(u32 barrier_smem, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(count) : "memory");
}

// Before the other threads hear of new barriers.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(u32 barrier_smem) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_smem) : "memory");
}

// Wait until the phase of this parity is completed, if it is the current one.
__device__ __forceinline__ void mbarrier_wait(u32 barrier_smem, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier_smem), "r"(parity) : "memory");
}

// Tensor cores read shared memory on a way of their own: they see what this thread has written, if it tells others after this.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Change the number of registers of each thread of this warpgroup, within what the block got at its start.
template <int REGISTERS> __device__ __forceinline__ void registers_raise() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> __device__ __forceinline__ void registers_lower() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
