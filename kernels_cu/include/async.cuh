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

// Arrive, and let the phase wait for so many bytes of copies that complete on the barrier.
__device__ __forceinline__ void mbarrier_expect(u32 barrier_smem, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_smem), "r"(bytes) : "memory");
}

// Wait until the phase of this parity is completed, if it is the current one.
__device__ __forceinline__ void mbarrier_wait(u32 barrier_smem, u32 parity) {
    // The loop is in the assembly: one of C++ the compiler takes for threads that part.
    asm volatile("{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE: }"
                 ::"r"(barrier_smem), "r"(parity) : "memory");
}

// Tensor cores and bulk copies have a way of their own to shared memory: they see, or overwrite, what this thread has written, if it tells
// others after this.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Likewise to global memory, of what this thread knows to be written.
__device__ __forceinline__ void async_proxy_fence_gmem() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- boxes of arrays, as tensor maps describe them ----------------------------------------------------------------------

// To the L2 cache, of what a copy reads: as anything else, or to be the last to leave. READ_ONCE (ptx.cuh) is the first.
constexpr u64 READ_AS_USUAL = 0x1000000000000000ull, READ_AGAIN = 0x14f0000000000000ull;

// The map is a member of the kernel's parameters. It is fetched as any memory is: before its first use, not to wait for it then.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// One thread copies a box to a multiple of 128 bytes; of 1024, with a swizzle of 128. Then come the coordinates of the first element, the
// innermost one first; what lies outside the array becomes 0. The barrier is told of all bytes of the box when they are there.
template <u64 HINT = READ_AS_USUAL>
__device__ __forceinline__ void copy_box(u32 dst_smem, const TensorMap& map, u32 barrier_smem, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(dst_smem), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier_smem), "l"(HINT) : "memory");
}
template <u64 HINT = READ_AS_USUAL>
__device__ __forceinline__ void copy_box(u32 dst_smem, const TensorMap& map, u32 barrier_smem, int x, int y, int z, int u) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 ::"r"(dst_smem), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(barrier_smem), "l"(HINT) : "memory");
}
template <u64 HINT = READ_AS_USUAL>
__device__ __forceinline__ void copy_box(u32 dst_smem, const TensorMap& map, u32 barrier_smem, int x, int y, int z, int u, int v) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
                 ::"r"(dst_smem), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "r"(barrier_smem), "l"(HINT) : "memory");
}

// One thread copies so many bytes, a multiple of 16, between addresses that are multiples of 16.
__device__ __forceinline__ void copy_bytes(u32 dst_smem, const void* src_gmem, u32 bytes, u32 barrier_smem) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(dst_smem), "l"(src_gmem), "r"(bytes), "r"(barrier_smem) : "memory");
}

// One thread adds so many bytes of float32 numbers from shared memory to global memory, each by itself, in whatever order others add; as a
// group of the thread's own.
__device__ __forceinline__ void add_bytes(void* dst_gmem, u32 src_smem, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(dst_gmem), "r"(src_smem), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Wait until what the thread adds has been read from shared memory, so that it may be written again.
__device__ __forceinline__ void additions_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// The same, and until it is there.
__device__ __forceinline__ void additions_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Change the number of registers of each thread of this warpgroup, within what the block got at its start.
template <int REGISTERS> __device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Blocks that run together, a cluster, have numbers in it; they wait for each other, and read each other's shared memory.
__device__ __forceinline__ u32 cluster_rank() {
    u32 x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}

// All threads of all of them.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where the block of this number has what is at `smem` in this one.
__device__ __forceinline__ u32 cluster_address(u32 smem, u32 rank) {
    u32 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(smem), "r"(rank));
    return x;
}

__device__ __forceinline__ float2 load_cluster_8(u32 address) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ float4 load_cluster_16(u32 address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
    return x;
}
