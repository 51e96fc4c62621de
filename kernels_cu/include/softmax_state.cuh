// Online softmax of the rows that a lane holds a share of: an algebra of init, update, merge and finish.
//
// A state stands for weights 2^(x - reference) of logits x in log2 units: their sum, and elsewhere their weighted sum of values,
// the accumulator. The reference follows the running maximum, from which it may stay behind by Real::SLACK; it cancels in the end.
#include "include/reals.cuh"

// FIRST..LAST: the bits by which the lanes differ that share a row.
template <int ROWS, class Real = Fast32, int FIRST = 1, int LAST = 2> struct SoftmaxState {
    using T = typename Real::T;
    T reference[ROWS];  // Real::LOWEST until a key is visible: -inf - -inf would be NaN
    T sum[ROWS];        // this lane's share

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) reference[r] = Real::LOWEST, sum[r] = 0;
    }

    // The largest score of each row of a tile. Row r: tile r / 2, elements 2 (r % 2) and 2 (r % 2) + 1. max passes over NaN;
    // its weight will be NaN nevertheless.
    template <int MT, int NT> static __device__ __forceinline__ void tops(T (&top)[ROWS], const T (&s)[MT][NT][4]) {
        lane_tops(top, s);
        share(top);
    }

    // The same of the lane's scores; and the largest of the lanes'.
    template <int MT, int NT> static __device__ __forceinline__ void lane_tops(T (&top)[ROWS], const T (&s)[MT][NT][4]) {
        static_assert(ROWS == 2 * MT, "");
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            top[r] = -infinity();
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) top[r] = Real::max(top[r], Real::max(s[r / 2][nt][r % 2 * 2], s[r / 2][nt][r % 2 * 2 + 1]));
        }
    }

    static __device__ __forceinline__ void share(T (&top)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int lanes = FIRST; lanes <= LAST; lanes *= 2) top[r] = Real::max(top[r], __shfl_xor_sync(0xffffffffu, top[r], lanes));
    }

    // Whether raise() would change a row of the warp, given the lanes' own tops.
    __device__ __forceinline__ bool rises(const T (&top)[ROWS], T scale) const {
        bool above = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) above = above || !(Real::mul(top[r], scale) <= reference[r] + Real::SLACK);
        return __any_sync(0xffffffffu, above);
    }

    // Bring the references up to the tops of a tile's scores (logit x = scale * s, scale > 0), with the sums; `rescale` gets a row and the
    // factor of its accumulators. A row whose top is above its reference by no more than Real::SLACK keeps it, so that after the first
    // tiles the accumulators are left alone. Its largest weight may then be up to 2^SLACK instead of 1: float32 has room for it, and
    // in 16 bits weights have about the same relative error at any size, but for 1, which has none (WarpgroupSoftmax::SLACK says what
    // that is worth).
    template <class Rescale> __device__ __forceinline__ void raise(const T (&top)[ROWS], T scale, Rescale rescale) {
        T raised[ROWS];
        bool raise = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const T x = Real::mul(top[r], scale);
            const bool stay = x <= reference[r] + Real::SLACK;
            raised[r] = stay ? reference[r] : x;
            raise = raise || !stay;
        }
        if (__any_sync(0xffffffffu, raise)) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const T factor = Real::exp2(reference[r] - raised[r]);
                reference[r] = raised[r];
                sum[r] *= factor;
                rescale(r, factor);
            }
        }
    }

    template <int MT, int OT> static __device__ __forceinline__ void scale_row(T (&acc)[MT][OT][4], int r, T factor) {
#pragma unroll
        for (int ot = 0; ot < OT; ++ot) acc[r / 2][ot][r % 2 * 2] *= factor, acc[r / 2][ot][r % 2 * 2 + 1] *= factor;
    }

    template <int MT, int OT> __device__ __forceinline__ void raise(T (&acc)[MT][OT][4], const T (&top)[ROWS], T scale) {
        raise(top, scale, [&](int r, T factor) { scale_row(acc, r, factor); });
    }

    // The same, and turn the scores s of the tile into weights.
    template <int MT, int NT, int OT>
    __device__ __forceinline__ void update(T (&s)[MT][NT][4], T (&acc)[MT][OT][4], const T (&top)[ROWS], T scale) {
        raise(acc, top, scale);
        weigh(s, scale);
    }

    // Whether a reference of the warp is so large that its rounding error must not stay in an exponent.
    __device__ __forceinline__ bool is_large() const {
        bool large = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) large = large || (Real::abs(reference[r]) >= Real::LARGE && reference[r] != Real::LOWEST);
        return __any_sync(0xffffffffu, large);
    }

    // Turn the scores s of a tile into weights.
    template <int MT, int NT> __device__ __forceinline__ void weigh(T (&s)[MT][NT][4], T scale) { weigh(s, scale, is_large()); }

    template <int MT, int NT> __device__ __forceinline__ void weigh(T (&s)[MT][NT][4], T scale, bool large) {
        // One fused multiply-add an element leaves the rounding error of the reference in the exponent: harmless below
        // LARGE, an overflow far above. There the product is rounded like the reference was. A row that has seen no key is not large: its
        // neighbours in the warp would lose digits.
        if (large) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int c = 0; c < 4; ++c) s[mt][nt][c] = Real::mul(s[mt][nt][c], scale);
            scale = 1;
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int r = 2 * mt + c / 2;
                    s[mt][nt][c] = Real::exp2(Real::fma(s[mt][nt][c], scale, -reference[r]));
                    sum[r] += s[mt][nt][c];
                }
    }

    // The state of the union of two sets of keys; the factors bring the two accumulators to the common reference.
    __device__ __forceinline__ void merge(int r, T other_reference, T other_sum, T& factor, T& other_factor) {
        const T raised = Real::max(reference[r], other_reference);
        factor = Real::exp2(reference[r] - raised);
        other_factor = Real::exp2(other_reference - raised);
        reference[r] = raised;
        sum[r] = sum[r] * factor + other_sum * other_factor;
    }

    // Sum up the lanes' shares.
    __device__ __forceinline__ void reduce(int r) {
#pragma unroll
        for (int lanes = FIRST; lanes <= LAST; lanes *= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], lanes);
    }

    // Reference and reduced sum of row first + i, i < 4: registers have no index at run time.
    __device__ __forceinline__ void pick(int first, int i, T& of, T& total) const {
        of = reference[first], total = sum[first];
#pragma unroll
        for (int r = 1; r < 4 && first + r < ROWS; ++r)
            if (i == r) of = reference[first + r], total = sum[first + r];
    }

    // Natural log-sum-exp; -inf if the row has seen nothing.
    static __device__ __forceinline__ T finish(T reference, T sum) { return Real::fma(reference, Real::LN2, Real::log(sum)); }
};
