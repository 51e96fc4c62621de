// From raw scores q.k to logits: functions of (score, query position i, key j), the same for every kernel.
#include "include/params.cuh"
#include "include/ptx.cuh"

// Compile-time kinds, combined by |. All but SCORE_PLAIN yield logits in log2 units.
constexpr int SCORE_PLAIN = 0;    // scale > 0: it costs nothing, being folded into the exponential
constexpr int SCORE_SCALED = 1;   // a scale of any sign, multiplied first: a negative one turns the maximum into the minimum
constexpr int SCORE_SOFTCAP = 2;  // softcap * tanh(scale * s / softcap)
constexpr int SCORE_ALIBI = 4;    // - slope * |i - j|

// tanh to 2e-7 of max(|x|, 1): through exp2 it would lose the small arguments, which take the series.
__device__ __forceinline__ float tanh_exact(float x) {
    const float x2 = x * x;
    const float series = x * fmaf(x2, fmaf(x2, fmaf(x2, -17.0f / 315.0f, 2.0f / 15.0f), -1.0f / 3.0f), 1.0f);
    const float whole = fmaf(-2.0f, reciprocal_fast(1.0f + exp2_fast(2.0f * LOG2E * x)), 1.0f);
    return fabsf(x) < 0.25f ? series : whole;
}

template <int SCORE> struct ScoreTransform {
    float scale, softcap, slope;

    // scale: of the argument of tanh if there is a softcap (then softcap is in log2 units), else into log2 units.
    __device__ __forceinline__ ScoreTransform(const PrefillParams& p, int batch, int head)
        : scale(p.scale), softcap(p.softcap), slope(0.0f) {
        if constexpr ((SCORE & SCORE_ALIBI) != 0) slope = p.alibi_slopes[i64(batch) * p.heads_q + head];
    }

    __device__ __forceinline__ float operator()(float s, int i, int j) const {
        if constexpr (SCORE == SCORE_PLAIN) return s;
        float x = s * scale;
        if constexpr ((SCORE & SCORE_SOFTCAP) != 0) x = softcap * tanh_exact(x);
        if constexpr ((SCORE & SCORE_ALIBI) != 0) x -= slope * fabsf(float(i - j));
        return x;
    }
};

// The scores of a warp; see apply_mask for position and key.
template <int SCORE, int MT, int NT>
__device__ __forceinline__ void apply_score(float (&s)[MT][NT][4], const ScoreTransform<SCORE>& score, int position, int key) {
    if constexpr (SCORE != SCORE_PLAIN) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    s[mt][nt][c] = score(s[mt][nt][c], position + 16 * mt + c / 2 * 8, key + 8 * nt + c % 2);
    }
}
