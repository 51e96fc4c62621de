// The exact merge of partial results over disjoint keys: each output is weighted by its share of the normaliser. combine.cu merges parts
// that decode.cu left in memory of its own; this one takes the results of whole attention calls. A warp has a row.
//
// A row reads all that it needs before it writes, and no other row's: out and lse may be arrays that come in.
#include "include/element.cuh"
#include "include/params.cuh"
#include "include/reals.cuh"

constexpr int MERGE_PARTS = 16;     // of a launch, at most
constexpr int MERGE_THREADS = 128;  // of a block
static_assert(MERGE_PARTS <= 32, "a lane has the log-sum-exp of a part");

struct MergeParams {
    const void* outs[MERGE_PARTS];  // (batch, rows, heads, head_dim) each
    const void* lses[MERGE_PARTS];  // (batch, heads, rows) each, natural logarithms of the type that is computed in
    void* out;
    void* lse;            // or null
    const void* shared;   // (batch), or null: keys of part 0 that a sequence has, 0 or as many as sequence 0; i64, or i32
    const void* lengths;  // (batch), with `shared`: keys that it has altogether; i64, or i32
    Strides out_strides[MERGE_PARTS], lse_strides[MERGE_PARTS], out_stride, lse_stride;
    i64 out_groups[MERGE_PARTS], lse_groups[MERGE_PARTS];  // strides from one group of heads to the next; within a group: `head`
    i32 parts, batch, rows, heads, head_dim;
    i32 group;  // heads of a group in the parts; 1: there are none
    i32 least;  // keys that a sequence, and sequence 0, must have behind those of part 0: its first queries see all of these, none is new
    i32 shared_i32, lengths_i32;
};

__device__ __forceinline__ i64 merge_index(const void* p, bool narrow, int at) {
    return narrow ? i64(static_cast<const i32*>(p)[at]) : static_cast<const i64*>(p)[at];
}

template <class T, class Real> __device__ __forceinline__ void merge_states(const MergeParams& p) {
    using Number = typename Real::T;
    constexpr Number LOG2E_FULL = Number(1.4426950408889634);
    const i64 at = (i64(blockIdx.x) * MERGE_THREADS + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (at >= i64(p.batch) * p.rows * p.heads) return;  // the whole warp
    const int head = int(at % p.heads), row = int(at / p.heads % p.rows), batch = int(at / p.heads / p.rows);
    const int group = head / p.group, in_group = head - group * p.group;

    // Lane n has part n.
    Number x = -infinity();
    if (lane < p.parts) {
        const Strides& s = p.lse_strides[lane];
        x = static_cast<const Number*>(p.lses[lane])[batch * s.batch + group * p.lse_groups[lane] + in_group * s.head + row * s.row];
    }
    bool valid = true;  // whether the result is a number
    if (p.shared) {
        const i64 own = merge_index(p.shared, p.shared_i32, batch);
        if (own <= 0) x = lane == 0 ? Number(-infinity()) : x;
        else
            valid = own == merge_index(p.shared, p.shared_i32, 0) && merge_index(p.lengths, p.lengths_i32, batch) - own >= p.least &&
                    merge_index(p.lengths, p.lengths_i32, 0) - own >= p.least;  // where they are read
    }
    valid = !__any_sync(0xffffffffu, !(valid && x < infinity()));  // nor is NaN
    Number top = x;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) top = Real::max(top, __shfl_xor_sync(0xffffffffu, top, lanes));
    Number share = x > -infinity() ? Real::exp2((x - top) * LOG2E_FULL) : Number(0), total = share;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
    share /= total;
    const u32 there = __ballot_sync(0xffffffffu, x > -infinity());  // the output of others may be anything

    const Number none = __int_as_float(0x7fffffff);
#pragma unroll 1
    for (int first = 0; first < p.head_dim; first += 128) {  // four columns a lane, so that their loads go out together
        Number sum[4] = {0, 0, 0, 0};
        for (int n = 0; n < p.parts; ++n) {
            const Number weight = __shfl_sync(0xffffffffu, share, n);
            if (!(there >> n & 1)) continue;
            const Strides& s = p.out_strides[n];
            const void* o = from_element<T>(p.outs[n], batch * s.batch + row * s.row + group * p.out_groups[n] + in_group * s.head);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = first + 32 * i + lane;
                if (column < p.head_dim) sum[i] = Real::fma(weight, Element<T>::load(o, column * s.column), sum[i]);
            }
        }
        const Strides& s = p.out_stride;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = first + 32 * i + lane;
            if (column < p.head_dim)
                Element<T>::store(p.out, batch * s.batch + row * s.row + head * s.head + column * s.column, valid ? sum[i] : none);
        }
    }
    if (lane == 0 && p.lse)
        static_cast<Number*>(p.lse)[batch * p.lse_stride.batch + head * p.lse_stride.head + row * p.lse_stride.row] =
            !valid ? none : total > 0 ? top + Real::log(total) : -infinity();
}
