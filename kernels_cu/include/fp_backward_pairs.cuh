// From scores and dP of a tile to weights and gradients of scores, element by element: for tiles of [rows][keys] as for [keys][rows].
#include "include/fp_backward_products.cuh"
#include "include/fp_backward_rows.cuh"
#include "include/shared_sums.cuh"

template <int MASK, int SCORE, class Real> struct Pairs {
    using T = typename Real::T;
    using Arrays = ScoreArrays<MASK, SCORE, Real>;
    using Bias = typename Arrays::Bias;

    const FpBackwardParams& p;
    ExactScore<SCORE, Real> score;
    Arrays arrays;
    Visibility<MASK> visible;
    T unit;  // 1 of the scores in log2 units
    int rows, position;  // of the sequence

    __device__ __forceinline__ Pairs(const FpBackwardParams& p, const Sequence& seq, int batch, int head)
        : p(p), score(p, batch, head), arrays(p, seq, batch, head), visible(p, seq), unit(p.logit_scale64), rows(seq.q_length),
          position(seq.position) {}

    // Keys that the row at a position sees, if there is such a row.
    __device__ __forceinline__ KeyRange keys(int i) const { return i - position < rows ? visible.of_all(i, i) : KeyRange{0, 0}; }

    // A pair's raw score and dP, in place its weight and the gradient of its raw score without the scale, or the marks of hidden ones.
    // `outer` gets the gradient of the logit.
    template <class Outer>
    __device__ __forceinline__ void differentiate(
        T& s, T& dp, int i, int j, bool seen, T bias, const RowNumbers<T>& row, Outer outer
    ) const {
        const T x = score(s, i, j, bias);
        const bool hidden = !seen || x == -infinity();
        const T weight = Real::exp2(Real::mul(x - row.base, unit)) * row.inverse;
        T ds = weight * (dp - row.delta);
        outer(hidden ? T(0) : ds);
        if constexpr ((SCORE & SCORE_SOFTCAP) != 0) {
            const T y = Real::tanh(s * score.scale);
            ds *= (T(1) - y) * (T(1) + y);
        }
        s = hidden ? HIDDEN<T> : weight;
        dp = hidden ? HIDDEN<T> : ds + T(0);  // -0 becomes 0
    }

    // A tile whose lane's first row stands at position i, its first key being j. `all`: all of its rows see all of its keys.
    template <int MT, int NT>
    __device__ __forceinline__ void of_rows(
        T (&s)[MT][NT][4], T (&dp)[MT][NT][4], int i, int j, bool all, const RowNumbers<T> (&numbers)[2 * MT], void* dbias_gmem
    ) const {
#pragma unroll
        for (int r = 0; r < 2 * MT; ++r) {
            const int at = i + 8 * r, row = at - position;
            const KeyRange range = keys(at);
            const int count = max(range.end - range.begin, 0), first = j - range.begin;
            T bias[NT][2] = {};
            bool shown[NT][2];
            arrays.load(bias, shown, at, j);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int key = 8 * nt + c;
                    bool seen = all || u32(first + key) < u32(count);
                    if constexpr (Arrays::MASKED) seen = seen && shown[nt][c];
                    differentiate(
                        s[r / 2][nt][r % 2 * 2 + c], dp[r / 2][nt][r % 2 * 2 + c], at, j + key, seen, bias[nt][c], numbers[r], [&](T ds) {
                            if constexpr (Arrays::BIASED) {
                                if (!dbias_gmem) return;
                                const bool there = row < min(rows, p.matrix_rows) && j + key < p.bias_columns;
                                const Strides& stride = p.dbias_stride;
                                const i64 place = row * stride.row + (j + key) * stride.column;
                                if (p.shared)
                                    add_shared(
                                        static_cast<double*>(dbias_gmem) + place, there ? ds : T(0), stride.row == 0, stride.column == 0);
                                else if (there && ds != T(0)) static_cast<Bias*>(dbias_gmem)[place] = Bias(ds);
                            }
                        });
                }
        }
    }

    // The same of a tile turned round: keys j, j + 8, ... and rows at i, i + 1, i + 8, ... `numbers(n)`: of the row at i + n.
    template <int MT, int NT, class Numbers>
    __device__ __forceinline__ void of_keys(T (&s)[MT][NT][4], T (&dp)[MT][NT][4], int i, int j, bool all, Numbers numbers) const {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int at = i + 8 * nt + c;
                const KeyRange range = keys(at);
                const int count = max(range.end - range.begin, 0), first = j - range.begin;
                const RowNumbers<T> row = numbers(8 * nt + c);
#pragma unroll
                for (int r = 0; r < 2 * MT; ++r) {
                    const int key = j + 8 * r;
                    const bool here = all || u32(first + 8 * r) < u32(count);
                    const bool seen = here && (!Arrays::MASKED || arrays.shows(at, key));
                    const T bias = Arrays::BIASED && here ? arrays.bias(at, key) : T(0);
                    differentiate(s[r / 2][nt][r % 2 * 2 + c], dp[r / 2][nt][r % 2 * 2 + c], at, key, seen, bias, row, [](T) {});
                }
            }
    }
};
