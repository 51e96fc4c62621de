// One wrapper per PTX instruction that C++ has no word for. Shared-memory addresses are 32-bit.
#include "include/types.cuh"

__device__ __forceinline__ u32 smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// blockIdx.x and threadIdx.x read anew: what is derived from them need not stay in registers meanwhile.
__device__ __forceinline__ u32 block_index() {
    u32 x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

template <bool ANEW = true> __device__ __forceinline__ int thread_index() {
    if constexpr (!ANEW) return threadIdx.x;
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// A barrier of THREADS of the block, or all, to which its warps may come at different places of the program; bar.sync, as __syncthreads()
// uses it, promises that they come to one.
template <int THREADS, int NUMBER = 0> __device__ __forceinline__ void block_barrier() {
    asm volatile("barrier.sync %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
}

// The same by its number; and to let it count this thread without waiting there.
template <int THREADS> __device__ __forceinline__ void block_barrier(int number) {
    asm volatile("barrier.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

template <int THREADS> __device__ __forceinline__ void block_barrier_arrive(int number) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// ---- copies from global to shared memory: asynchronous from sm_80 on ----------------------------------------------------

// To the L2 cache: what nobody else will read is the first to leave (EVICT_FIRST, as createpolicy encodes it from sm_90 on).
constexpr u64 READ_ONCE = 0x12f0000000000000ull;

// BYTES (4, 8 or 16) bytes, or as many zeros where `keep` is false; then nothing is read. ONCE: they are read once, if they are 16.
template <int BYTES, bool ONCE = false> __device__ __forceinline__ void copy_or_zero(u32 dst_smem, const void* src_gmem, bool keep) {
#if CUFLASH_ARCH >= 800
    const int bytes = keep ? BYTES : 0;
    if constexpr (BYTES == 16 && ONCE && CUFLASH_ARCH >= 900)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                     ::"r"(dst_smem), "l"(src_gmem), "r"(bytes), "l"(READ_ONCE) : "memory");
    else if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst_smem), "l"(src_gmem), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst_smem), "l"(src_gmem), "n"(BYTES), "r"(bytes) : "memory");
#else
    u32 x[BYTES / 4] = {};
    if (keep) {
        if constexpr (BYTES == 16)
            asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(src_gmem));
        else if constexpr (BYTES == 8)
            asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(src_gmem));
        else
            asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x[0]) : "l"(src_gmem));
    }
    if constexpr (BYTES == 16)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst_smem), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    else if constexpr (BYTES == 8)
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(dst_smem), "r"(x[0]), "r"(x[1]) : "memory");
    else
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst_smem), "r"(x[0]) : "memory");
#endif
}

template <bool ONCE = false> __device__ __forceinline__ void copy_16(u32 dst_smem, const void* src_gmem) {
#if CUFLASH_ARCH >= 800
    if constexpr (ONCE && CUFLASH_ARCH >= 900)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                     ::"r"(dst_smem), "l"(src_gmem), "l"(READ_ONCE) : "memory");
    else
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst_smem), "l"(src_gmem) : "memory");
#else
    copy_or_zero<16>(dst_smem, src_gmem, true);
#endif
}

__device__ __forceinline__ void prefetch_l2(const void* p_gmem) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p_gmem)); }

// Read-only data that is used once.
__device__ __forceinline__ void load_gmem(u32& a, u32& b, const void* gmem) {
    asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(gmem));
}

__device__ __forceinline__ void load_gmem(u32& a, u32& b, u32& c, u32& d, const void* gmem) {
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(gmem));
}

// What other blocks of the grid have written: past the L1 cache.
__device__ __forceinline__ float2 load_gmem_l2(const float2* gmem) {
    float2 x;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(gmem) : "memory");
    return x;
}

__device__ __forceinline__ float4 load_gmem_l2(const float4* gmem) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(gmem) : "memory");
    return x;
}

// A number to what other blocks add to as well; and x and y to two neighbours, whose place is a multiple of 8 bytes.
__device__ __forceinline__ void add_gmem(float* gmem, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(gmem), "f"(x) : "memory");
}

__device__ __forceinline__ void add_gmem(double* gmem, double x) {
    asm volatile("red.global.add.f64 [%0], %1;" ::"l"(gmem), "d"(x) : "memory");
}

__device__ __forceinline__ void add_gmem(float* gmem, float x, float y) {
#if CUFLASH_ARCH >= 900
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(gmem), "f"(x), "f"(y) : "memory");
#else
    add_gmem(gmem, x), add_gmem(gmem + 1, y);
#endif
}

// The counter before; it goes up by 1, and from `last` back to 0. What the thread knows to be written, those know who count after it.
__device__ __forceinline__ u32 count_up(u32* counter_gmem, u32 last) {
    u32 x;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(x) : "l"(counter_gmem), "r"(last) : "memory");
    return x;
}

// A number that one thread has written with `publish`, with all that was known to it to be written, is read by another with `look_up`.
__device__ __forceinline__ void publish(u32* gmem, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(gmem), "r"(x) : "memory");
}

__device__ __forceinline__ u32 look_up(const u32* gmem) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
    return x;
}

__device__ __forceinline__ void copies_commit() {
#if CUFLASH_ARCH >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most N of this thread's groups are under way.
template <int N> __device__ __forceinline__ void copies_wait() {
#if CUFLASH_ARCH >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// ---- shared memory <-> registers ----------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&d)[4], u32 smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(smem) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&d)[4], u32 smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(smem) : "memory");
}

// The way back.
__device__ __forceinline__ void stmatrix_x4(u32 smem, const u32 (&s)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(smem), "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3]) : "memory");
}

// An 8x8 matrix of 16-bit numbers, of which lane l has numbers 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; then of column l / 4.
__device__ __forceinline__ u32 transpose_8x8(u32 x) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
    return d;
}

__device__ __forceinline__ void store_smem(u32 smem, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(x) : "memory"); }

__device__ __forceinline__ void store_smem(u32 smem, uint2 x) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(smem), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void store_smem(u32 smem, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ void store_smem(u32 smem, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

__device__ __forceinline__ uint4 load_smem_16(u32 smem) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(smem) : "memory");
    return x;
}

__device__ __forceinline__ float2 load_smem_8(u32 smem) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(smem) : "memory");
    return x;
}

__device__ __forceinline__ u32 load_smem_4(u32 smem) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(smem) : "memory");
    return x;
}

// ---- arithmetic: one instruction each, whatever -ftz says ---------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {  // 2 ulp; results below 2^-126 are 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp2_full(float x) {  // 2 ulp, denormals kept
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Byte i of the result is byte `selector >> 4 i & 7` of a, from 4 on of b.
__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

template <int LANES, class T> __device__ __forceinline__ T shuffle_xor(T x) { return __shfl_xor_sync(0xffffffffu, x, LANES); }

// The same in all lanes, and seen to be so: the compiler makes products wait for each other next to a branch that might part a warpgroup.
__device__ __forceinline__ int uniform(int x) { return int(__shfl_sync(0xffffffffu, u32(x), 0)); }
