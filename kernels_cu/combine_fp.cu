// The second kernel of a split by prefill_fp.cu: the exact merge of the parts of a row, which is a block's. Its threads share the columns,
// 16 bytes each, and where these are fewer than threads the parts as well: it is waiting for memory that takes the time.
#include "include/fp_work.cuh"

constexpr int COMBINE_THREADS = 128;  // no fewer than a row has chunks of 16 bytes

// The largest number of all threads, and their sum. `shared`: of each warp; free again behind the next barrier.
template <class Real> __device__ __forceinline__ typename Real::T block_max(typename Real::T x, typename Real::T* shared) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = Real::max(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    return Real::max(Real::max(shared[0], shared[1]), Real::max(shared[2], shared[3]));
}

template <class T> __device__ __forceinline__ T block_sum(T x, T* shared) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    return shared[0] + shared[1] + (shared[2] + shared[3]);
}

template <class Real, class Out> __device__ __forceinline__ void combine_fp(const PartParams& p) {
    using T = typename Real::T;
    constexpr int SIZE = Chunk<T>::SIZE;
    constexpr double LOG2E_FULL = 1.4426950408889634;
    static_assert(COMBINE_THREADS == 128, "four warps");
    __shared__ double tops[4];
    __shared__ T totals[4], weights[COMBINE_THREADS], sums[COMBINE_THREADS][SIZE];

    const int chunks = (p.head_dim_v + SIZE - 1) / SIZE, slices = COMBINE_THREADS / chunks;
    const int thread = threadIdx.x, slice = thread / chunks, column = thread % chunks * SIZE;
    const i64 rows = i64(p.batch) * p.q_rows * p.heads_q, place = blockIdx.x;
    const PartState* state = p.part_state + place;
    const T* out = static_cast<const T*>(p.part_out) + place * p.head_dim_v;
    const bool vector = p.head_dim_v % SIZE == 0;

    double top = -infinity();
    T total = 0, sum[SIZE] = {};  // of this thread's parts
#pragma unroll 1
    for (int first = 0; first < p.parts; first += COMBINE_THREADS) {
        const int here = min(COMBINE_THREADS, p.parts - first);
        PartState own{-infinity(), 0.0};
        if (thread < here) own = state[(first + thread) * rows];
        const double raised = fmax(top, block_max<Exact64>(own.reference, tops));  // they pass over NaN, its weight is NaN
        const T weight = own.reference == -infinity() ? T(0) : Real::exp2(T((own.reference - raised) * LOG2E_FULL)) * T(own.sum);
        const T fall = top == -infinity() ? T(0) : Real::exp2(T((top - raised) * LOG2E_FULL));
        top = raised;
        total = total * fall + weight;
        weights[thread] = weight;
        __syncthreads();
#pragma unroll
        for (int e = 0; e < SIZE; ++e) sum[e] *= fall;
        if (slice < slices) {
#pragma unroll 4
            for (int n = slice; n < here; n += slices) {
                T part[SIZE];
                load_numbers<T>(part, out + (first + n) * rows * p.head_dim_v, 1, column, p.head_dim_v, vector);
#pragma unroll
                for (int e = 0; e < SIZE; ++e) sum[e] = Real::fma(weights[n], part[e], sum[e]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < SIZE; ++e) sums[thread][e] = sum[e];
    total = block_sum(total, totals);
    if (slice > 0) return;
    for (int other = 1; other < slices; ++other)
#pragma unroll
        for (int e = 0; e < SIZE; ++e) sum[e] += sums[thread + other * chunks][e];

    const u32 line = u32(place) / u32(p.heads_q), head = u32(place) % u32(p.heads_q);
    const int row = int(line % u32(p.q_rows)), batch = int(line / u32(p.q_rows));
    if (p.sinks || column == 0) {
        const RowEnd end(p, p.queries == 1 ? int(head) * p.q_rows + row : int(head), top, total, 1.0, 1.0);
#pragma unroll
        for (int e = 0; e < SIZE; ++e) sum[e] = end.weighted(sum[e]);
        if (column == 0 && p.lse) *row_gmem<T>(p.lse, p.lse_stride, batch, row, head) = T(end.lse);
    } else {
        const T factor = total == T(0) ? T(0) : T(1) / total;
#pragma unroll
        for (int e = 0; e < SIZE; ++e) sum[e] *= factor;
    }
    auto* to = row_gmem<typename Stored<Out>::Type>(p.out, p.out_stride, batch, row, head);
    store_numbers<Out, T>(to, p.out_stride.column, column, p.head_dim_v, p.out_vector != 0, sum);
}
