// The statistics of rows in a backward pass: how a row's weights follow from its scores, and its share of the sink's gradient.
//
// Maximum, normaliser and delta are found anew, unless what the forward pass left does: exp(logit - LSE) is off by as much as the LSE was
// rounded, and delta = rowsum(dO * O) by the rounding of O. The limits are those of cpu_backward.py, which says how they came about.
#include "include/fp_backward_params.cuh"
#include "include/fp_score.cuh"
#include "include/reals.cuh"

constexpr double LARGE_LSE = 8.0;
constexpr int FEW_ROWS = 64;   // of a sequence and key/value head
constexpr int FEW_KEYS = 256;  // that a row can see by its position

// See FpBackwardParams.
template <class T> struct RowNumbers {
    T base, inverse, delta;
};

// What of the statistics is found anew.
enum Anew { NOTHING, NORMALISER, ALL };

// A row's sums over the keys that a lane has met, relative to the largest of their logits. In float64, so that sums of thousands of tiles
// keep their digits; there are few of them.
template <class Real> struct RunningRow {
    using T = typename Real::T;
    T top;
    double total, weighted;  // of weights, and of weights times dP

    __device__ __forceinline__ void init() { top = -infinity(), total = weighted = 0.0; }

    // The pairs of a tile of scores x, -inf where they are hidden, with dP or without. Differences of scores are exact where they matter,
    // however large the scores are.
    template <int MT, int NT>
    __device__ __forceinline__ void add(const T (&x)[MT][NT][4], const T (&dp)[MT][NT][4], int r, T unit, bool with_dp) {
        T most = -infinity(), sum = 0, weighted_sum = 0;
#pragma unroll
        for (int c = 0; c < 2 * NT; ++c) most = Real::max(most, x[r / 2][c / 2][r % 2 * 2 + c % 2]);
        if (most > top) rise(most, unit);
#pragma unroll
        for (int c = 0; c < 2 * NT; ++c) {
            const T s = x[r / 2][c / 2][r % 2 * 2 + c % 2];
            const bool hidden = s == -infinity();
            const T weight = hidden ? T(0) : Real::exp2(Real::mul(s - top, unit));
            sum += weight;
            if (with_dp) weighted_sum = hidden ? weighted_sum : Real::fma(weight, dp[r / 2][c / 2][r % 2 * 2 + c % 2], weighted_sum);
        }
        total += sum, weighted += weighted_sum;
    }

    // With what the other three lanes of the row have met.
    __device__ __forceinline__ void reduce(T unit) {
        T most = top;
#pragma unroll
        for (int lanes = 1; lanes <= 2; lanes *= 2) most = Real::max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
        if (most > top) rise(most, unit);
#pragma unroll
        for (int lanes = 1; lanes <= 2; lanes *= 2) {
            total += __shfl_xor_sync(0xffffffffu, total, lanes);
            weighted += __shfl_xor_sync(0xffffffffu, weighted, lanes);
        }
    }

  private:
    __device__ __forceinline__ void rise(T to, T unit) {
        const double factor = Real::exp2(Real::mul(top - to, unit));
        top = to, total *= factor, weighted *= factor;
    }
};

// What is known of a row in the end. In float64, as RowEnd has it.
struct RowResult {
    double base, inverse, delta, sink;  // sink: the row's share of the gradient of the sink's logit
};

__device__ __forceinline__ double sink_of(const FpBackwardParams& p, int head) {
    return p.sinks ? reinterpret_cast<const double*>(p.sinks)[head] : double(-infinity());
}

// From reduced sums over the row's keys. `known`: delta without dlse, which the sums have not if !with_dp. `unit`: 1 of the scores in
// natural logits.
template <class Real>
__device__ __forceinline__ RowResult finish_row(
    const RunningRow<Real>& row, bool with_dp, double known, double sink, double unit, double dlse
) {
    const bool empty = row.total == 0.0;  // NaN is not
    const double logit = row.top * unit, top = empty ? sink : fmax(logit, sink);
    const double weight = empty ? 0.0 : logit == top ? 1.0 : ::exp(logit - top);
    const double sink_weight = sink == -infinity() ? 0.0 : ::exp(sink - top), all = row.total * weight + sink_weight;
    RowResult end{0.0, 0.0, -dlse, 0.0};
    if (!empty) {
        end.base = row.top, end.inverse = weight / all;
        end.delta = (with_dp ? row.weighted * end.inverse : known) - dlse;
    }
    if (sink_weight != 0.0) end.sink = sink_weight / all * -end.delta;
    return end;
}

// From the log-sum-exp and delta of the forward pass. The weights are right to the digits of the log-sum-exp: what T cannot hold of it
// comes with `inverse`.
template <class T>
__device__ __forceinline__ RowResult row_of_forward(double lse, double known, double sink, double unit, double dlse) {
    RowResult end{0.0, 0.0, -dlse, 0.0};
    if (lse == -infinity()) return end;
    end.base = T(lse / unit);
    end.inverse = ::exp(end.base * unit - lse);
    end.delta = known - dlse;
    if (sink != -infinity()) end.sink = ::exp(sink - lse) * -end.delta;
    return end;
}
