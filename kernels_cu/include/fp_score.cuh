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

    __device__ __forceinline__ T operator()(T s, int i, int j, T bias) const {
        if constexpr (SCORE == SCORE_PLAIN) return s;  // the exponential has the scale
        T x = s * scale;
        if constexpr ((SCORE & SCORE_SOFTCAP) != 0) x = softcap * Real::tanh(x);
        if constexpr (bias_bytes(SCORE) != 0) x += bias;
        if constexpr ((SCORE & SCORE_ALIBI) != 0) x = Real::fma(-slope, Real::abs(T(i - j)), x);
        if constexpr (bias_bytes(SCORE) != 0) x = bias == -infinity() ? T(-infinity()) : x;  // also of NaN
        return x;
    }
};

// Two neighbouring elements of an array.
template <class T> struct alignas(2 * sizeof(T)) Pair {
    T x[2];
};

// Bias and mask of one (batch, head), over (query position i, key j). They are read where they are needed: they cost a wait for memory.
template <int MASK, int SCORE, class Real> struct ScoreArrays {
    using T = typename Real::T;
    static constexpr bool MASKED = (MASK & MASK_ARRAY) != 0, BIASED = bias_bytes(SCORE) != 0;
    template <bool IS_FLOAT, class F> struct Choice { using Type = F; };
    template <class F> struct Choice<true, F> { using Type = float; };
    using Bias = typename Choice<(SCORE & SCORE_BIAS32) != 0, T>::Type;
    // Natural logits below it are lost in log2 units, in which softmax would take a row without others for an empty one.
    static constexpr T LOWEST = T(0.999) * Real::LN2 * Real::LOWEST;

    const PrefillParams& p;
    const Bias* bias_gmem;  // row 0, column 0
    const u8* mask_gmem;
    int mask_key;           // the key of the mask's column 0
    int position;           // of row 0

    __device__ __forceinline__ ScoreArrays(const PrefillParams& p, const Sequence& seq, int batch, int head)
        : p(p), position(seq.position) {
        if constexpr (BIASED)
            bias_gmem = static_cast<const Bias*>(p.bias) + batch * p.bias_stride.batch + head * p.bias_stride.head;
        if constexpr (MASKED) {
            mask_gmem = p.mask + batch * p.mask_stride.batch + head * p.mask_stride.head;
            mask_key = p.mask_tail ? seq.kv_length - p.mask_columns : 0;
        }
    }

    // Rows that do not exist count as the last one: nobody wants their scores.
    __device__ __forceinline__ int row(int i) const { return min(i - position, p.matrix_rows - 1); }

    __device__ __forceinline__ T bias(int i, int j) const {
        if constexpr (!BIASED) return 0;
        else return u32(j) < u32(p.bias_columns) ? T(bias_gmem[row(i) * p.bias_stride.row + j * p.bias_stride.column]) : T(0);
    }

    // Whether the mask lets i see j.
    __device__ __forceinline__ bool shows(int i, int j) const {
        if constexpr (!MASKED) return true;
        else {
            const int column = j - mask_key;
            return u32(column) >= u32(p.mask_columns) || mask_gmem[row(i) * p.mask_stride.row + column * p.mask_stride.column] != 0;
        }
    }

    // Biases of NT pairs of keys j + 8 nt (+ 1) of a row, and whether the mask lets i see them.
    template <int NT> __device__ __forceinline__ void load(T (&b)[NT][2], bool (&seen)[NT][2], int i, int j) const {
        if constexpr (BIASED) {
            if (p.bias_vector && j + 8 * NT - 6 <= p.bias_columns) {
                const Bias* from = bias_gmem + row(i) * p.bias_stride.row + j;
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    const Pair<Bias> pair = *reinterpret_cast<const Pair<Bias>*>(from + 8 * nt);
                    b[nt][0] = pair.x[0], b[nt][1] = pair.x[1];
                }
            } else {
#pragma unroll
                for (int c = 0; c < 2 * NT; ++c) b[c / 2][c % 2] = bias(i, j + c / 2 * 8 + c % 2);
            }
        }
        if constexpr (MASKED) {
            if (p.mask_vector && j + 8 * NT - 6 <= p.mask_columns) {
                const u8* from = mask_gmem + row(i) * p.mask_stride.row + j;
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    const u32 pair = *reinterpret_cast<const u16*>(from + 8 * nt);
                    seen[nt][0] = (pair & 0xff) != 0, seen[nt][1] = pair >> 8 != 0;
                }
            } else {
#pragma unroll
                for (int c = 0; c < 2 * NT; ++c) seen[c / 2][c % 2] = shows(i, j + c / 2 * 8 + c % 2);
            }
        }
    }
};

// The scores of a warp, for whose layout see fp_products.cuh: `position` is that of the lane's first row, `key` its first key.
template <int MASK, int SCORE, class Real, int MT, int NT>
__device__ __forceinline__ void exact_score(
    typename Real::T (&s)[MT][NT][4], const ExactScore<SCORE, Real>& score, const ScoreArrays<MASK, SCORE, Real>& arrays, int position,
    int key
) {
    using T = typename Real::T;
    using Arrays = ScoreArrays<MASK, SCORE, Real>;
    if constexpr (Arrays::MASKED || Arrays::BIASED) {
#pragma unroll
        for (int row = 0; row < 2 * MT; ++row) {
            T bias[NT][2];
            bool seen[NT][2];
            arrays.load(bias, seen, position + 8 * row, key);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    T& x = s[row / 2][nt][row % 2 * 2 + c];
                    x = score(x, position + 8 * row, key + 8 * nt + c, bias[nt][c]);
                    if (Arrays::MASKED && !seen[nt][c]) x = -infinity();
                }
        }
    } else if constexpr (SCORE != SCORE_PLAIN) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) s[mt][nt][c] = score(s[mt][nt][c], position + 16 * mt + c / 2 * 8, key + 8 * nt + c % 2, T(0));
    }
}
