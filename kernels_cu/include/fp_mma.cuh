// D += A B for one warp and 16 x 8 x 16 numbers in float32 or float64, on tensor cores.
//
// Lane l, g = l / 4, t = l % 4, h = 0, 1:
//   a[4h], a[4h+1], a[4h+2], a[4h+3]  A[g][k(t, 2h)], A[g+8][k(t, 2h)], A[g][k(t, 2h+1)], A[g+8][k(t, 2h+1)]
//   b[2h], b[2h+1] B[k(t, 2h)][g], B[k(t, 2h+1)][g]      d[0], d[1] D[g][2t, 2t+1]      d[2], d[3] D[g+8][2t, 2t+1]
// Which 16 depths the four k of the four t are does not matter as long as A and B agree: the caller chooses them such that loads are
// wide, and that the D of two neighbouring products is the A of the next one without a shuffle.
#include "include/types.cuh"

struct Tf32 {};    // float rounded to 11 bits
struct Tf32x3 {};  // float as the sum of two such numbers: three products, as good as float
struct Dmma {};    // double

template <class Kind> constexpr bool is_tf32 = false;
template <> constexpr bool is_tf32<Tf32> = true;
template <class Kind> constexpr bool is_tf32x3 = false;
template <> constexpr bool is_tf32x3<Tf32x3> = true;

// Weights are multiplied by it on their way to the tensor core. TF32 has as many exponents as float, but 13 bits less: its denormals
// end 2^13 above those of float. Weights of this size keep all of theirs.
template <class Kind> constexpr float weight_scale = 1.0f;
template <> constexpr float weight_scale<Tf32x3> = 8192.0f;

#if CUFLASH_ARCH >= 800

// Rounded to 11 bits, ties away from 0; infinite and NaN stay so.
__device__ __forceinline__ u32 to_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// The same in two instructions instead of three, but some NaN become 0: their rest is NaN.
__device__ __forceinline__ u32 large_part(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }

// x - large_part(x) is exact; of its at most 12 bits, the tensor core drops the last one if there are 12.
__device__ __forceinline__ u32 small_part(float x, u32 large) { return __float_as_uint(x - __uint_as_float(large)); }

// 8 of the 16 depths.
__device__ __forceinline__ void mma_16x8x8_tf32(float (&d)[4], const u32 (&a)[8], const u32 (&b)[4], int half) {
    const int i = 4 * half, j = 2 * half;
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[i]), "r"(a[i + 1]), "r"(a[i + 2]), "r"(a[i + 3]), "r"(b[j]), "r"(b[j + 1]));
}

__device__ __forceinline__ void mma_8x8x4_f64(double& d0, double& d1, double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};" : "+d"(d0), "+d"(d1) : "d"(a), "d"(b));
}

__device__ __forceinline__ void mma_16x8x16_f64(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
#if CUFLASH_ARCH >= 900
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
          "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        mma_8x8x4_f64(d[0], d[1], a[2 * i], b[i]);
        mma_8x8x4_f64(d[2], d[3], a[2 * i + 1], b[i]);
    }
#endif
}

// What the numbers of an operand are for the tensor core, and products of MT operands A with COUNT operands B. Each instruction
// is issued for all of them in turn: one that needs the result of the instruction right before would wait.
template <class Kind> struct Mma;

template <> struct Mma<Tf32> {
    using A = u32[8];
    using B = u32[4];
    static __device__ __forceinline__ void prepare(A& to, const float (&from)[8]) {  // weights: of NaN the row's sum knows
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = __float_as_uint(from[i]) + 0x1000u;
    }
    // Queries from shared memory, where they are rounded already.
    static __device__ __forceinline__ void prepare_rounded(A& to, const float (&from)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = __float_as_uint(from[i]);
    }
    // Keys and values: the tensor core drops 13 bits, which makes a number smaller by 2^-11.5 of it on average; what is gained by
    // as much before is cut without bias, at most 1.3 times as far off as rounded, and unlike an added bit keeps every NaN.
    static __device__ __forceinline__ void prepare_rounded(B& to, const float (&from)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = __float_as_uint(from[i] * 1.00034526698f);
    }
    template <int MT, int TILES, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[MT][TILES][4], int first, const A (&a)[MT], const B (&b)[COUNT]) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) mma_16x8x8_tf32(d[mt][first + i], a[mt], b[i], half);
    }
};

// Tensor cores round sums towards 0. Hence the sum of these 16 depths, small terms first, and one proper addition.
template <> struct Mma<Tf32x3> {
    struct A {
        u32 large[8], small[8];
    };
    struct B {
        u32 large[4], small[4];
    };
    static __device__ __forceinline__ void prepare(A& to, const float (&from)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) split(to.large[i], to.small[i], from[i] * weight_scale<Tf32x3>);
    }
    static __device__ __forceinline__ void prepare_rounded(A& to, const float (&from)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) split(to.large[i], to.small[i], from[i]);
    }
    static __device__ __forceinline__ void prepare_rounded(B& to, const float (&from)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) split(to.large[i], to.small[i], from[i]);
    }
    static __device__ __forceinline__ void split(u32& large, u32& small, float x) {
        large = large_part(x);
        small = small_part(x, large);
    }
    template <int MT, int TILES, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[MT][TILES][4], int first, const A (&a)[MT], const B (&b)[COUNT]) {
        float sum[MT][COUNT][4] = {};
#pragma unroll
        for (int product = 0; product < 3; ++product)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt)
                        mma_16x8x8_tf32(sum[mt][i], product == 0 ? a[mt].small : a[mt].large, product == 1 ? b[i].small : b[i].large, half);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int c = 0; c < 4; ++c) d[mt][first + i][c] += sum[mt][i][c];
    }
};

template <> struct Mma<Dmma> {
    using A = double[8];
    using B = double[4];
    static __device__ __forceinline__ void prepare(A& to, const double (&from)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = from[i];
    }
    static __device__ __forceinline__ void prepare_rounded(A& to, const double (&from)[8]) { prepare(to, from); }
    static __device__ __forceinline__ void prepare_rounded(B& to, const double (&from)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = from[i];
    }
    template <int MT, int TILES, int COUNT>
    static __device__ __forceinline__ void multiply(double (&d)[MT][TILES][4], int first, const A (&a)[MT], const B (&b)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) mma_16x8x16_f64(d[mt][first + i], a[mt], b[i]);
    }
};
#endif
