// The exact merge of partial results over disjoint keys: each output is weighted by its share of the normaliser. combine.cu merges parts
// that decode.cu left in memory of its own; this one takes the results of whole attention calls. A warp has a row.
//
// A row reads all that it needs before it writes, and no other row's: out and lse may be arrays that come in.
#include "include/element.cuh"
#include "include/params.cuh"
#include "include/reals.cuh"

constexpr int MERGE_PARTS = 16;     // of a launch, at most
constexpr int MERGE_THREADS = 128;  // of a block

struct MergeParams {
    const void* outs[MERGE_PARTS];  // (batch, rows, heads, head_dim) each
    const void* lses[MERGE_PARTS];  // (batch, heads, rows) each, natural logarithms of the type that is computed in
    void* out;
    void* lse;
    const void* shared;   // (batch), or null: keys of part 0 that a sequence has, 0 or as many as sequence 0; i64, or i32
    const void* lengths;  // (batch), with `shared`: keys that it has altogether; i64, or i32
    Strides out_strides[MERGE_PARTS], lse_strides[MERGE_PARTS], out_stride, lse_stride;
    i32 parts, batch, rows, heads, head_dim;
    i32 least;  // keys that a sequence must have behind those of part 0: else its first queries would not see all of these
    i32 shared_i32, lengths_i32;
};

__device__ __forceinline__ i64 merge_index(const void* p, bool narrow, int at) {
    return narrow ? i64(static_cast<const i32*>(p)[at]) : static_cast<const i64*>(p)[at];
}

template <class T, class Real> __device__ __forceinline__ void merge_states(const MergeParams& p) {
    using Number = typename Real::T;
    const i64 at = (i64(blockIdx.x) * MERGE_THREADS + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (at >= i64(p.batch) * p.rows * p.heads) return;
    const int head = int(at % p.heads), row = int(at / p.heads % p.rows), batch = int(at / p.heads / p.rows);

    int begin = 0;
    bool valid = true;  // whether the result is a number
    if (p.shared) {
        const i64 own = merge_index(p.shared, p.shared_i32, batch);
        if (own <= 0) begin = 1;
        else valid = own == merge_index(p.shared, p.shared_i32, 0) && merge_index(p.lengths, p.lengths_i32, batch) - own >= p.least;
    }
    Number top = -infinity(), total = 0;
    for (int n = begin; n < p.parts; ++n) {
        const Strides& s = p.lse_strides[n];
        const Number x = static_cast<const Number*>(p.lses[n])[batch * s.batch + head * s.head + row * s.row];
        valid = valid && x < infinity();  // nor is NaN
        top = Real::max(top, x);
    }
    for (int n = begin; n < p.parts; ++n) {
        const Strides& s = p.lse_strides[n];
        const Number x = static_cast<const Number*>(p.lses[n])[batch * s.batch + head * s.head + row * s.row];
        if (x > -infinity()) total += Real::exp2((x - top) * Number(1.4426950408889634));
    }
    const Number none = __int_as_float(0x7fffffff), inverse = 1 / total;
    for (int column = lane; column < p.head_dim; column += 32) {
        Number sum = 0;
        for (int n = begin; n < p.parts; ++n) {
            const Strides &s = p.lse_strides[n], &o = p.out_strides[n];
            const Number x = static_cast<const Number*>(p.lses[n])[batch * s.batch + head * s.head + row * s.row];
            if (!(x > -infinity())) continue;  // its output may be anything
            const Number weight = Real::exp2((x - top) * Number(1.4426950408889634)) * inverse;
            sum = Real::fma(weight, Element<T>::load(p.outs[n], batch * o.batch + row * o.row + head * o.head + column * o.column), sum);
        }
        const Strides& o = p.out_stride;
        Element<T>::store(p.out, batch * o.batch + row * o.row + head * o.head + column * o.column, valid ? sum : none);
    }
    __syncwarp();  // all lanes have read
    if (lane == 0 && p.lse)
        static_cast<Number*>(p.lse)[batch * p.lse_stride.batch + head * p.lse_stride.head + row * p.lse_stride.row] =
            !valid ? none : total > 0 ? top + Real::log(total) : -infinity();
}
