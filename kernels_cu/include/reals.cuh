// The numbers that softmax is computed in, as policies: their type T and its functions.
#include "include/ptx.cuh"

// 2^x for x <= 1, to 0.8 ulp, without a branch, so that many of them go through the pipeline together.
__device__ __forceinline__ double exp2_exact(double x) {
    constexpr double TO_INTEGER = 6755399441055744.0;  // 1.5 * 2^52: the sum's low bits are x rounded
    x = x < -1100.0 ? -1100.0 : x;  // NaN stays; 2^-1075 is 0 already
    const double shifted = x + TO_INTEGER;
    const int n = __double2loint(shifted);
    const double f = x - (shifted - TO_INTEGER);
    // (2^f - 1) / f on [-1/2, 1/2], interpolated at Chebyshev's nodes: 2e-17 of 2^f
    double y = 4.4549605981865186e-10;
    y = fma(y, f, 7.072585949269223e-09);
    y = fma(y, f, 1.0178062445845774e-07);
    y = fma(y, f, 1.321544258792169e-06);
    y = fma(y, f, 1.525273382983612e-05);
    y = fma(y, f, 0.0001540353044173605);
    y = fma(y, f, 0.0013333558146416936);
    y = fma(y, f, 0.009618129107606888);
    y = fma(y, f, 0.0555041086648216);
    y = fma(y, f, 0.24022650695910097);
    y = fma(y, f, 0.6931471805599453);
    y = fma(y, f, 1.0);
    const int half = n >> 1;  // in two steps, so that results below 2^-1022 are rounded once and not lost
    return y * __hiloint2double((1023 + half) << 20, 0) * __hiloint2double((1023 + n - half) << 20, 0);
}

// float for kernels whose products are in 16 bits: results below 2^-126 may be 0.
struct Fast32 {
    using T = float;
    static constexpr T LN2 = 0.6931471805599453f;
    static constexpr T LOWEST = -3.402823466e38f;  // of all finite numbers
    static constexpr T LARGE = 1048576.0f;  // the rounding error of a number below is at most 2^-5
    static constexpr T SLACK = 8;           // of softmax_state.cuh, in log2 units
    static __device__ __forceinline__ T exp2(T x) { return exp2_fast(x); }
    static __device__ __forceinline__ T tanh(T x) { return tanhf(x); }
    static __device__ __forceinline__ T log(T x) { return logf(x); }
    static __device__ __forceinline__ T max(T x, T y) { return fmaxf(x, y); }
    static __device__ __forceinline__ T abs(T x) { return fabsf(x); }
    static __device__ __forceinline__ T mul(T x, T y) { return __fmul_rn(x, y); }  // never fused
    static __device__ __forceinline__ T fma(T x, T y, T z) { return __fmaf_rn(x, y, z); }
};

// float, as good as float is; denormals are kept.
struct Exact32 : Fast32 {
    static constexpr T SLACK = 1;  // an exponent of 8 is rounded 16 times as far as one below 1
    static __device__ __forceinline__ T exp2(T x) { return exp2_full(x); }
};

struct Exact64 {
    using T = double;
    static constexpr T LN2 = 0.6931471805599453;
    static constexpr T LOWEST = -1.7976931348623157e308, LARGE = 562949953421312.0, SLACK = 1;
    static __device__ __forceinline__ T exp2(T x) { return exp2_exact(x); }
    static __device__ __forceinline__ T tanh(T x) { return ::tanh(x); }
    static __device__ __forceinline__ T log(T x) { return ::log(x); }
    static __device__ __forceinline__ T max(T x, T y) { return fmax(x, y); }
    static __device__ __forceinline__ T abs(T x) { return fabs(x); }
    static __device__ __forceinline__ T mul(T x, T y) { return __dmul_rn(x, y); }
    static __device__ __forceinline__ T fma(T x, T y, T z) { return __fma_rn(x, y, z); }
};
