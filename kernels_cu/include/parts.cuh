// Results of rows whose keys were read in parts: partial results in float32, their exact merge, and the way into out and LSE.
//
// A part of a row is a reference and a sum (see SoftmaxState) and an accumulator of DV numbers. C is the configuration of decode.cu.
#include "include/deal.cuh"
#include "include/softmax_state.cuh"

// Which queries and heads the rows of a block are: the query heads of a key/value head stand side by side, query after query.
struct PackedRows {
    int batch, head_kv, first;  // first: the block's first row

    __device__ __forceinline__ PackedRows(const DecodeParams& p, int m, int batch, int head)
        : batch(batch), head_kv(int(u32(head) / u32(p.row_blocks))), first((head - head_kv * p.row_blocks) * m) {}

    __device__ __forceinline__ int query(const DecodeParams& p, int row) const { return int(u32(first + row) / u32(p.group)); }
    __device__ __forceinline__ int head(const DecodeParams& p, int row) const {
        return head_kv * p.group + first + row - query(p, row) * p.group;
    }
};

struct Accumulated {  // of four columns of a row
    float x[4];
    float reference, sum;

    __device__ __forceinline__ void raise(float raised) {
        const float factor = exp2_fast(reference - raised);
        reference = raised, sum *= factor;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= factor;
    }

    __device__ __forceinline__ void add(float4 y, float factor) {
        x[0] = fmaf(y.x, factor, x[0]), x[1] = fmaf(y.y, factor, x[1]), x[2] = fmaf(y.z, factor, x[2]), x[3] = fmaf(y.w, factor, x[3]);
    }
};

// Divide by the sum, with the sink in it; round, and write the columns that exist, and the row's log-sum-exp with its first ones.
template <class C>
__device__ __forceinline__ void write_result(const DecodeParams& p, const PackedRows& rows, int row, int column, const Accumulated& a) {
    const int query = rows.query(p, row), head = rows.head(p, row);
    SoftmaxState<2> state;
    state.reference[0] = a.reference, state.sum[0] = a.sum;
    const bool empty = a.sum == 0.0f;  // NaN is not
    float factor = 1.0f, sink_factor;
    if (p.sinks) state.merge(0, p.sinks[head], 1.0f, factor, sink_factor);
    const float inverse = factor / state.sum[0];
    if (column == 0 && p.lse)
        p.lse[rows.batch * p.lse_stride.batch + head * p.lse_stride.head + query * p.lse_stride.row] =
            state.finish(state.reference[0], state.sum[0]);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = empty ? 0.0f : a.x[i] * inverse;
    const uint2 words = make_uint2(pack2<typename C::Out>(x[0], x[1]), pack2<typename C::Out>(x[2], x[3]));
    u16* to = static_cast<u16*>(p.out) + rows.batch * p.out_stride.batch + query * p.out_stride.row + head * p.out_stride.head;
    if (p.out_vector) {  // then the head size is a multiple of 8
        if (column < p.head_dim_v) *reinterpret_cast<uint2*>(to + column) = words;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (column + i < p.head_dim_v) to[(column + i) * p.out_stride.column] = u16((i < 2 ? words.x : words.y) >> (i % 2 * 16));
}

// Merge the parts of some rows of a block, in the order of the parts, and write the results. Parts are read in batches, whose loads are under
// way together.
template <class C>
__device__ __forceinline__ void merge_parts(const DecodeParams& p, const PackedRows& rows, const Parts& parts, int first_row, int end_row) {
    constexpr int PER_ROW = C::DV / 4, BATCH = 8;
    end_row = min(end_row, p.rows - rows.first);
#pragma unroll 1
    for (int i = first_row * PER_ROW + thread_index(); i < end_row * PER_ROW; i += C::WORKERS) {
        const int row = i / PER_ROW, column = i % PER_ROW * 4;
        Accumulated a{{0.0f, 0.0f, 0.0f, 0.0f}, Fast32::LOWEST, 0.0f};
#pragma unroll 1
        for (int first = 0; first < parts.count; first += BATCH) {
            float2 state[BATCH];
            float4 x[BATCH];
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {  // behind the last part, that one again
                const i64 at = i64(parts.slot(min(first + n, parts.count - 1))) * C::M + row;
                state[n] = load_gmem_l2(p.part_state + at);
                x[n] = load_gmem_l2(reinterpret_cast<const float4*>(p.part_out + at * C::DV + column));
            }
            float raised = a.reference;
#pragma unroll
            for (int n = 0; n < BATCH; ++n) raised = fmaxf(raised, state[n].x);
            a.raise(raised);
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {
                if (first + n >= parts.count) break;
                const float factor = exp2_fast(state[n].x - raised);
                a.sum = fmaf(state[n].y, factor, a.sum);
                a.add(x[n], factor);
            }
        }
        write_result<C>(p, rows, row, column, a);
    }
}
