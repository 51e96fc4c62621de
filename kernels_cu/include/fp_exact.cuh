// The slow, plain way to compute a row, for those that the fast way cannot do.
#include "include/fp_paged.cuh"
#include "include/fp_score.cuh"
#include "include/fp_work.cuh"
#include "include/softmax_state.cuh"

constexpr float TINY = 7.888609052210118e-31f;  // 2^-100

// A row of a warp's, by the whole warp, key by key and with C++'s arithmetic, straight from global memory. Keys that the row does not
// see or whose logit is -inf do not take part, whatever they hold. It serves rows that came out infinite or NaN: on the fast way
// 0 * infinity is NaN where a key of the same tile is invisible, and infinity has no rest that tensor cores could multiply.
template <class C>
__device__ __forceinline__ void exact_row(const typename C::Params& p, int warp_row) {
    using T = typename C::T;
    using Real = typename C::Real;
    const FpWork<C> work(p, block_index());
    const Sequence& seq = work.seq;
    const int thread = thread_index(), lane = thread % 32, row = work.first_row() + thread / 32 * C::WARP_ROWS + warp_row;
    constexpr int OWN = (C::DV + 31) / 32;  // columns of a lane: lane, lane + 32, ...
    const T* q = row_gmem<T>(p.q, p.q_stride, work.batch, seq.q_begin + row, work.head);
    const KvRows<T, C::PAGED> k(p, p.k, p.k_stride, work, seq);
    KvRows<T, C::PAGED> v(p, p.v, p.v_stride, work, seq);
    v.first_gmem += work.first_column * p.v_stride.column;
    const int columns = min(C::DV, p.head_dim_v - work.first_column), position = row + seq.position;
    const ExactScore<C::SCORE, Real> score(p, work.batch, work.head);
    using Arrays = ScoreArrays<C::MASK, C::SCORE, Real>;
    const Arrays arrays(p, seq, work.batch, work.head);
    const KeyRange seen = work.keys(p, row);
    const T scale = T(p.logit_scale64);

    SoftmaxState<1, Real> state;
    state.init();
    T o[OWN] = {};
#pragma unroll 1
    for (int first = seen.begin; first < seen.end; first += 32) {
        const int key = first + lane;
        T x = -infinity();
        if (key < seen.end && arrays.shows(position, key)) {
            T s = 0;
            const T* row_k = k.at(p, p.k_stride, key);
            if (C::PAGED && row_k == nullptr) {
                s = __int_as_float(0x7fc00000);
            } else {
#pragma unroll 1
                for (int d = 0; d < p.head_dim; ++d) s = Real::fma(q[d * p.q_stride.column], row_k[d * p.k_stride.column], s);
            }
            x = score(s, position, key, arrays.bias(position, key));
            if constexpr (!Arrays::BIASED) x = Real::mul(x, scale);
        }
        T top = x;
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) top = Real::max(top, __shfl_xor_sync(0xffffffffu, top, lanes));
        const T raised = Real::max(state.reference[0], top), base = raised == -infinity() ? T(0) : raised;
        T fall = state.reference[0] - base, own_fall = x - base;
        // With a bias, logits are natural up to here: the lowest that there are would be infinite in log2 units.
        if constexpr (Arrays::BIASED) fall = Real::mul(fall, scale), own_fall = Real::mul(own_fall, scale);
        const T factor = Real::exp2(fall), weight = Real::exp2(own_fall);
        state.reference[0] = raised;
        state.sum[0] = state.sum[0] * factor + weight;  // this lane's share
#pragma unroll
        for (int i = 0; i < OWN; ++i) o[i] *= factor;
        const u32 takes_part = __ballot_sync(0xffffffffu, !(x == -infinity()));
#pragma unroll 1
        for (int other = 0; other < 32; ++other) {
            const T w = __shfl_sync(0xffffffffu, weight, other);
            if ((takes_part >> other & 1) == 0) continue;
            const T* row_v = v.at(p, p.v_stride, first + other);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const int column = lane + 32 * i;
                if (column < columns) o[i] = Real::fma(w, C::PAGED && row_v == nullptr ? T(0) : row_v[column * p.v_stride.column], o[i]);
            }
        }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) state.sum[0] += __shfl_xor_sync(0xffffffffu, state.sum[0], lanes);
    const bool empty = state.sum[0] == T(0);
    const RowEnd end(p, work.sink(), state.reference[0], state.sum[0], 1.0, Arrays::BIASED ? 1.0 : Exact64::LN2);
    using Out = typename C::Out;
    const auto out = work.out(p);
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (lane + 32 * i < columns)
            out.at(row)[(lane + 32 * i) * out.column_stride] = Stored<Out>::from(empty ? T(0) : end.weighted(o[i]));
    if (lane == 0 && work.first_column == 0) work.put_statistics(p, row, end);
}

// Whether a value that the block's rows may see is smaller than TF32 keeps digits of, but not 0. By a whole warp.
template <class C> __device__ __forceinline__ bool any_tiny_value(const typename C::Params& p) {
    const int lane = thread_index() % 32;
    const FpWork<C> work(p, block_index());
    const int columns = min(C::DV, p.head_dim_v - work.first_column);
    const KeyRange seen = work.keys(p);
    KvRows<float, C::PAGED> v(p, p.v, p.v_stride, work, work.seq);
    v.first_gmem += work.first_column * p.v_stride.column;
    bool tiny = false;
#pragma unroll 1
    for (int key = seen.begin; key < seen.end; ++key) {
        const float* row_v = v.at(p, p.v_stride, key);
        if (C::PAGED && row_v == nullptr) continue;
#pragma unroll 1
        for (int column = lane; column < columns; column += 32) {
            const float x = fabsf(row_v[column * p.v_stride.column]);
            tiny |= x > 0.0f && x < TINY;
        }
    }
    return __any_sync(0xffffffffu, tiny);
}
