// From raw scores to logits of what is visible, in float32 or float64 as exact as they are: the kinds of score.cuh and mask.cuh.
#include "include/mask.cuh"
#include "include/reals.cuh"
#include "include/score.cuh"

template <int SCORE, class Real> struct ExactScore {
    using T = typename Real::T;
    T scale, softcap, slope;

    // scale: of the argument of tanh if there is a softcap (then softcap is in log2 units), else into log2 units.
    __device__ __forceinline__ ExactScore(const PrefillParams& p, int batch, int head) : scale(p.scale64), softcap(p.softcap64), slope(0) {
        if constexpr ((SCORE & SCORE_ALIBI) != 0) slope = reinterpret_cast<const T*>(p.alibi_slopes)[i64(batch) * p.heads_q + head];
    }

    __device__ __forceinline__ T operator()(T s, int i, int j) const {
        if constexpr (SCORE == SCORE_PLAIN) return s;  // the exponential has the scale
        T x = s * scale;
        if constexpr ((SCORE & SCORE_SOFTCAP) != 0) x = softcap * Real::tanh(x);
        if constexpr ((SCORE & SCORE_ALIBI) != 0) x = Real::fma(-slope, Real::abs(T(i - j)), x);
        return x;
    }
};

// The scores of a warp, for whose layout see fp_products.cuh: `position` is that of the lane's first row, `key` its first key.
template <int SCORE, class Real, int MT, int NT>
__device__ __forceinline__ void exact_score(
    typename Real::T (&s)[MT][NT][4], const ExactScore<SCORE, Real>& score, int position, int key
) {
    if constexpr (SCORE != SCORE_PLAIN) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[mt][nt][c] = score(s[mt][nt][c], position + 16 * mt + c / 2 * 8, key + 8 * nt + c % 2);
    }
}
