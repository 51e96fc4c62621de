// The gradient of the sinks of 16-bit arrays. A sink weighs exp(sink - lse) in its row and has no value, so that its logit's gradient there
// is -weight * delta, with the delta of backward_fa2_dq.cu. A block sums up the rows of a head, always in the same order.
#include "include/backward_params.cuh"
#include "include/ptx.cuh"

constexpr int SINKS_THREADS = 256;

__device__ __forceinline__ void backward_sinks(const BackwardParams& p) {
    __shared__ __align__(16) double sums_smem[SINKS_THREADS];
    const int thread = int(threadIdx.x), head = int(blockIdx.x);
    const float sink = p.prefill.sinks[head];  // in log2 units, as row_lse is
    const float* lse = p.row_lse + head * p.places;
    const float* delta = p.row_delta + head * p.places;
    double sum = 0.0;
#pragma unroll 4
    for (i64 place = thread; place < p.places; place += SINKS_THREADS) {
        // Infinite where a row has nothing but the sink, or there is none; then delta is 0.
        const float weight = lse[place] == infinity() ? 1.0f : exp2_fast(sink - lse[place]);
        if (weight != 0.0f) sum -= double(weight) * double(delta[place]);
    }
    sums_smem[thread] = sum;
#pragma unroll 1
    for (int half = SINKS_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) sums_smem[thread] += sums_smem[thread + half];
    }
    if (thread == 0) p.dsinks[head] = float(sums_smem[0]);
}
