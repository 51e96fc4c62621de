// The second kernel of a split by prefill_fp.cu: the exact merge of a row's parts, in their order. A thread has 16 bytes of a row.
#include "include/fp_work.cuh"

constexpr int COMBINE_THREADS = 128;  // of a block

template <class Real, class Out> __device__ __forceinline__ void combine_fp(const PartParams& p) {
    using T = typename Real::T;
    constexpr int SIZE = Chunk<T>::SIZE;
    constexpr double LOG2E_FULL = 1.4426950408889634;
    const int chunks = (p.head_dim_v + SIZE - 1) / SIZE;
    const i64 rows = i64(p.batch) * p.q_rows * p.heads_q, i = i64(blockIdx.x) * COMBINE_THREADS + threadIdx.x, place = i / chunks;
    if (place >= rows) return;
    const u32 line = u32(place) / u32(p.heads_q), head = u32(place) % u32(p.heads_q);  // there are fewer than 2^31
    const int row = int(line % u32(p.q_rows)), batch = int(line / u32(p.q_rows));
    const int column = int(i % chunks) * SIZE;

    const PartState* state = p.part_state + place;
    double top = -infinity();
#pragma unroll 8
    for (int n = 0; n < p.parts; ++n) top = fmax(top, state[n * rows].reference);  // passes over NaN
    const T* out = static_cast<const T*>(p.part_out) + place * p.head_dim_v;
    const bool vector = p.head_dim_v % SIZE == 0;
    T total = 0, sum[SIZE] = {};
#pragma unroll 8
    for (int n = 0; n < p.parts; ++n) {
        const PartState x = state[n * rows];
        const T weight = x.reference == -infinity() ? T(0) : Real::exp2(T((x.reference - top) * LOG2E_FULL)) * T(x.sum);
        T part[SIZE];
        load_numbers<T>(part, out + n * rows * p.head_dim_v, 1, column, p.head_dim_v, vector);
        total += weight;
#pragma unroll
        for (int e = 0; e < SIZE; ++e) sum[e] = Real::fma(weight, part[e], sum[e]);
    }
    T factor = total == T(0) ? T(0) : T(1) / total;
    if (p.sinks || column == 0) {
        const RowEnd end(p, p.queries == 1 ? int(head) * p.q_rows + row : int(head), top, total, 1.0, 1.0);
        factor *= T(end.share);
        if (column == 0 && p.lse) *row_gmem<T>(p.lse, p.lse_stride, batch, row, head) = T(end.lse);
    }
#pragma unroll
    for (int e = 0; e < SIZE; ++e) sum[e] *= factor;
    using Type = typename Stored<Out>::Type;
    Type* to = row_gmem<Type>(p.out, p.out_stride, batch, row, head);
    store_numbers<Out, T>(to, p.out_stride.column, column, p.head_dim_v, p.out_vector != 0, sum);
}
