// What a kernel needs in order to compile for the host: the CUDA C++ that it uses, and PTX instructions as functions, named like the
// mnemonic with _ for each dot, with operands in PTX order, destinations by reference. translate.py turns asm statements into calls
// of them; ptx.cpp and sm90.cpp have the bodies. No header of the standard library: an instance compiles in a quarter of a second.
#pragma once

namespace emulator {
extern int current;     // the thread that runs, of those that run together
extern unsigned block;  // the first of their blocks
unsigned thread_index();
unsigned block_index();
extern unsigned grid_blocks;
}  // namespace emulator

// ---- CUDA C++ -----------------------------------------------------------------------------------------------------------

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __builtin_assume(condition)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct __align__(8) float2 {
    float x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
struct __align__(8) uint2 {
    unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static const struct {
    struct {
        operator unsigned() const { return emulator::thread_index(); }
    } x;
} threadIdx = {};
static const struct {
    struct {
        operator unsigned() const { return emulator::block_index(); }
    } x;
} blockIdx = {};
static const struct {
    struct {
        operator unsigned() const { return emulator::grid_blocks; }
    } x;
} gridDim = {};

extern "C" {
float expf(float) noexcept;
float fabsf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float logf(float) noexcept;
float tanhf(float) noexcept;
double exp(double) noexcept;
double fabs(double) noexcept;
double fma(double, double, double) noexcept;
double fmax(double, double) noexcept;
double fmin(double, double) noexcept;
double log(double) noexcept;
double tanh(double) noexcept;
}
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
inline float __fmul_rn(float a, float b) { return a * b; }  // the compiler is told not to fuse
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
template <class To, class From> To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline int __double2loint(double x) { return int(bits_as<unsigned long long>(x)); }
inline double __hiloint2double(int high, int low) { return bits_as<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low); }

decltype(sizeof 0) __cvta_generic_to_shared(const void*);
void __syncthreads();
int __syncthreads_or(int);
bool __any_sync(unsigned, bool);
inline bool __all_sync(unsigned mask, bool yes) { return !__any_sync(mask, !yes); }
void __syncwarp();
inline void __threadfence() {}  // blocks run one after the other
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
unsigned __ballot_sync(unsigned, bool);
unsigned __reduce_or_sync(unsigned, unsigned);
float __shfl_xor_sync(unsigned, float, int);
double __shfl_xor_sync(unsigned, double, int);
unsigned __shfl_xor_sync(unsigned, unsigned, int);
float __shfl_sync(unsigned, float, int);
unsigned __shfl_sync(unsigned, unsigned, int);
double __shfl_sync(unsigned, double, int);

// ---- PTX ----------------------------------------------------------------------------------------------------------------

namespace ptx {

using b16 = unsigned short;
using b32 = unsigned;

inline b32 tid_x() { return emulator::thread_index(); }
inline b32 ctaid_x() { return emulator::block_index(); }
b32 cluster_ctarank();
template <class T> void mov_u32(T& d, b32 a) { d = a; }
inline void mov_b32(b32& d, b16 low, b16 high) { d = low | b32(high) << 16; }
inline void mov_b32(b16& low, b16& high, b32 a) { low = a, high = a >> 16; }

void cvt_rn_f16x2_f32(b32& d, float high, float low);
void cvt_rn_bf16x2_f32(b32& d, float high, float low);
void cvt_rn_f16_f32(b16& d, float a);
void cvt_f32_f16(float& d, b16 a);
void cvt_rn_f16x2_e4m3x2(b32& d, b16 a);
void mul_f16x2(b32& d, b32 a, b32 b);
void prmt_b32(b32& d, b32 a, b32 b, b32 selector);
void fma_rn_f16x2(b32& d, b32 a, b32 b, b32 c);
void fma_rn_bf16x2(b32& d, b32 a, b32 b, b32 c);
void cvt_rna_tf32_f32(b32& d, float a);
void ex2_approx_f32(float& d, float a);
void ex2_approx_ftz_f32(float& d, float a);
void rcp_approx_ftz_f32(float& d, float a);

void cp_async_cg_shared_global(b32 to, const void* from, int bytes, int read);
void cp_async_ca_shared_global(b32 to, const void* from, int bytes, int read);
void cp_async_cg_shared_global_L2_128B(b32 to, const void* from, int bytes);
inline void cp_async_cg_shared_global_L2_cache_hint(b32 to, const void* from, int bytes, unsigned long long) {
    cp_async_cg_shared_global_L2_128B(to, from, bytes);
}
inline void cp_async_cg_shared_global_L2_cache_hint(b32 to, const void* from, int bytes, int read, unsigned long long) {
    cp_async_cg_shared_global(to, from, bytes, read);
}
void barrier_sync(int barrier, int count);
void barrier_arrive(int barrier, int count);
void bar_sync(int barrier, int count);
void bar_arrive(int barrier, int count);
void cp_async_commit_group();
void cp_async_wait_group(int left);
void ld_global_nc_b32(b32& x, const void* from);
void prefetch_global_L2(const void* from);
void ld_global_nc_v2_b32(b32& x, b32& y, const void* from);
void ld_global_nc_v4_b32(b32& x, b32& y, b32& z, b32& w, const void* from);
void ld_global_cg_v2_f32(float& x, float& y, const void* from);
void ld_global_cg_v4_f32(float& x, float& y, float& z, float& w, const void* from);
void red_global_add_f32(float* to, float x);
void red_global_add_f64(double* to, double x);
void red_global_add_v2_f32(float* to, float x, float y);
void atom_acq_rel_gpu_global_inc_u32(b32& before, void* counter, b32 last);
void st_release_gpu_global_u32(void* to, b32 x);
void ld_acquire_gpu_global_u32(b32& x, const void* from);
void ld_shared_v2_f32(float& x, float& y, b32 from);
void st_shared_v4_f32(b32 to, float x, float y, float z, float w);
void ld_shared_b32(b32& x, b32 from);
void ld_shared_v4_b32(b32& x, b32& y, b32& z, b32& w, b32 from);
void st_shared_b32(b32 to, b32 x);
void st_shared_v2_b32(b32 to, b32 x, b32 y);
void st_shared_v4_b32(b32 to, b32 x, b32 y, b32 z, b32 w);

void movmatrix_sync_aligned_m8n8_trans_b16(b32& d, b32 a);
void ldmatrix_sync_aligned_m8n8_x4_shared_b16(b32& d0, b32& d1, b32& d2, b32& d3, b32 row);
void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(b32& d0, b32& d1, b32& d2, b32& d3, b32 row);
void stmatrix_sync_aligned_m8n8_x4_shared_b16(b32 row, b32 s0, b32 s1, b32 s2, b32 s3);
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& d0, float& d1, float& d2, float& d3, b32 a0, b32 a1, b32 a2, b32 a3, b32 b0, b32 b1, float c0, float c1, float c2, float c3);
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& d0, float& d1, float& d2, float& d3, b32 a0, b32 a1, b32 a2, b32 a3, b32 b0, b32 b1, float c0, float c1, float c2, float c3);
void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(
    float& d0, float& d1, float& d2, float& d3, b32 a0, b32 a1, b32 b0, float c0, float c1, float c2, float c3);
void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(
    float& d0, float& d1, float& d2, float& d3, b32 a0, b32 a1, b32 a2, b32 a3, b32 b0, b32 b1, float c0, float c1, float c2, float c3);
void mma_sync_aligned_m8n8k4_row_col_f64_f64_f64_f64(double& d0, double& d1, double a0, double b0, double c0, double c1);
void mma_sync_aligned_m16n8k16_row_col_f64_f64_f64_f64(
    double& d0, double& d1, double& d2, double& d3, double a0, double a1, double a2, double a3, double a4, double a5, double a6, double a7,
    double b0, double b1, double b2, double b3, double c0, double c1, double c2, double c3);

// ---- PTX of sm_90 -------------------------------------------------------------------------------------------------------

inline void setp_ne_b32(bool& p, b32 a, b32 b) { p = a != b; }
inline void selp_u32(b32& d, b32 a, b32 b, bool p) { d = p ? a : b; }
inline void setmaxnreg_inc_sync_aligned_u32(int) {}
inline void setmaxnreg_dec_sync_aligned_u32(int) {}

void mbarrier_init_shared_cta_b64(b32 barrier, int count);
inline void fence_mbarrier_init_release_cluster() {}
void mbarrier_arrive_shared_cta_b64(b32 barrier);
void mbarrier_arrive_expect_tx_shared_cta_b64(b32 barrier, b32 bytes);
void prefetch_tensormap(const void* map);
void cp_async_bulk_tensor_3d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    b32 to, const void* map, int x, int y, int z, b32 barrier, unsigned long long);
void cp_async_bulk_tensor_4d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    b32 to, const void* map, int x, int y, int z, int u, b32 barrier, unsigned long long);
void cp_async_bulk_tensor_5d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    b32 to, const void* map, int x, int y, int z, int u, int v, b32 barrier, unsigned long long);
void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(b32 to, const void* from, b32 bytes, b32 barrier);
void cp_reduce_async_bulk_global_shared_cta_bulk_group_add_f32(void* to, b32 from, b32 bytes);
inline void cp_async_bulk_commit_group() {}
inline void cp_async_bulk_wait_group_read(int) {}
inline void cp_async_bulk_wait_group(int) {}
inline void fence_proxy_async_global() {}
void cp_async_mbarrier_arrive_noinc_shared_cta_b64(b32 barrier);
void mbarrier_try_wait_parity_shared_cta_b64(bool& done, b32 barrier, b32 parity);
void fence_proxy_async_shared_cta();
void mapa_shared_cluster_u32(b32& there, b32 here, b32 rank);
void ld_shared_cluster_v2_f32(float& x, float& y, b32 from);
void ld_shared_cluster_v4_f32(float& x, float& y, float& z, float& w, b32 from);
inline void barrier_cluster_arrive_release_aligned() {}  // which the other one follows at once
void barrier_cluster_wait_acquire_aligned();

inline void wgmma_fence_sync_aligned() {}
void wgmma_commit_group_sync_aligned();
void wgmma_wait_group_sync_aligned(int left);

// What stands in a wgmma.mma_async: D, A in registers or its descriptor, descriptor of B, whether D is added to, signs of A and B, whether
// A (if it has a descriptor) and B have a row for each of the 16 products. Registers by their places: they are read and written later.
struct Wgmma {
    float* d[128];
    const b32* a[4];
    unsigned long long rest[7];
    int d_count = 0, a_count = 0, rest_count = 0;

    void add(float& x) { d[d_count++] = &x; }
    void add(const b32& x) { a[a_count++] = &x; }
    void add(b32&&) = delete;
    void add(unsigned long long x) { rest[rest_count++] = x; }
    void add(int x) { rest[rest_count++] = x; }  // or a predicate
};
void begin_wgmma(const Wgmma& operands, int columns, bool bfloat);

template <int COLUMNS, bool BFLOAT, class... Operands> void wgmma(Operands&&... operands) {
    static_assert(sizeof...(operands) == COLUMNS / 2 + 9 || sizeof...(operands) == COLUMNS / 2 + 7, "");
    Wgmma all;
    (all.add(static_cast<Operands&&>(operands)), ...);
    begin_wgmma(all, COLUMNS, BFLOAT);
}
#define WGMMA(columns)                                                                                               \
    template <class... T> void wgmma_mma_async_sync_aligned_m64n##columns##k16_f32_f16_f16(T&&... operands) {        \
        wgmma<columns, false>(static_cast<T&&>(operands)...);                                                        \
    }                                                                                                                \
    template <class... T> void wgmma_mma_async_sync_aligned_m64n##columns##k16_f32_bf16_bf16(T&&... operands) {      \
        wgmma<columns, true>(static_cast<T&&>(operands)...);                                                         \
    }
WGMMA(8) WGMMA(16) WGMMA(24) WGMMA(32) WGMMA(40) WGMMA(48) WGMMA(56) WGMMA(64)
WGMMA(72) WGMMA(80) WGMMA(88) WGMMA(96) WGMMA(104) WGMMA(112) WGMMA(120) WGMMA(128)
WGMMA(136) WGMMA(144) WGMMA(152) WGMMA(160) WGMMA(168) WGMMA(176) WGMMA(184) WGMMA(192)
WGMMA(200) WGMMA(208) WGMMA(216) WGMMA(224) WGMMA(232) WGMMA(240) WGMMA(248) WGMMA(256)
#undef WGMMA

}  // namespace ptx
