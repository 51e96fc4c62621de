// Results of rows whose keys were read in parts: partial results in float32, their exact merge, and the way into out and LSE.
//
// A part of a row is a reference and a sum (see SoftmaxState) and an accumulator of DV numbers. C is the configuration of decode.cu.
#include "include/deal.cuh"
#include "include/softmax_state.cuh"

// Which queries and heads the rows of a block are: the query heads of a key/value head stand side by side, query after query.
struct PackedRows {
    int batch, head_kv, first;  // first: the block's first row

    __device__ __forceinline__ PackedRows(const DecodeParams& p, int m, int batch, int head)
        : batch(batch), head_kv(int(quotient(head, p.row_blocks))), first((head - head_kv * p.row_blocks) * m) {}

    __device__ __forceinline__ int query(const DecodeParams& p, int row) const { return int(quotient(first + row, p.group)); }
    __device__ __forceinline__ int head(const DecodeParams& p, int row, int query) const {
        return head_kv * p.group + first + row - query * p.group;
    }
    __device__ __forceinline__ int head(const DecodeParams& p, int row) const { return head(p, row, query(p, row)); }
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

// What the accumulators of a row are to be multiplied by, with the sink in it; and write the row's log-sum-exp, with its first columns.
__device__ __forceinline__ float finish_row(
    const DecodeParams& p, const PackedRows& rows, int row, float reference, float sum, bool first
) {
    const int query = rows.query(p, row), head = rows.head(p, row, query);
    SoftmaxState<2> state;
    state.reference[0] = reference, state.sum[0] = sum;
    float factor = 1.0f, sink_factor;
    if (p.sinks) state.merge(0, p.sinks[head], 1.0f, factor, sink_factor);
    if (first && p.lse)
        p.lse[rows.batch * p.lse_stride.batch + head * p.lse_stride.head + query * p.lse_stride.row] =
            state.finish(state.reference[0], state.sum[0]);
    return factor / state.sum[0];
}

// Round, and write those of four columns of a row that exist.
template <class C>
__device__ __forceinline__ void write_columns(const DecodeParams& p, const PackedRows& rows, int row, int column, const float (&x)[4]) {
    const int query = rows.query(p, row), head = rows.head(p, row, query);
    const uint2 words = make_uint2(pack2<typename C::Out>(x[0], x[1]), pack2<typename C::Out>(x[2], x[3]));
    u16* to = static_cast<u16*>(p.out) + rows.batch * p.out_stride.batch + query * p.out_stride.row + head * p.out_stride.head;
    if (p.out_vector) {  // then the head size is a multiple of 8
        if (column < p.head_dim_v) *reinterpret_cast<uint2*>(to + column) = words;
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 4; ++i)
        if (column + i < p.head_dim_v) to[(column + i) * p.out_stride.column] = u16((i < 2 ? words.x : words.y) >> (i % 2 * 16));
}

// Both.
template <class C>
__device__ __forceinline__ void write_result(const DecodeParams& p, const PackedRows& rows, int row, int column, const Accumulated& a) {
    const bool empty = a.sum == 0.0f;  // NaN is not
    const float inverse = finish_row(p, rows, row, a.reference, a.sum, column == 0);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = empty ? 0.0f : a.x[i] * inverse;
    write_columns<C>(p, rows, row, column, x);
}

// Merge the parts of some rows of a block, in the order of the parts, and write the results. A warp has a row at a time, of which a lane
// loads four columns of each part, C::PARTS_AT_ONCE on their way together; and of one part the state, whose factor it lets the others know.
template <class C>
__device__ __forceinline__ void merge_parts(const DecodeParams& p, const PackedRows& rows, const Parts& parts, int first_row, int end_row) {
    constexpr int BATCH = 16, AT_ONCE = C::PARTS_AT_ONCE;
    const int lane = thread_index() % 32;
    end_row = min(end_row, p.rows - rows.first);
#pragma unroll 1
    for (int row = first_row + thread_index() / 32; row < end_row; row += C::WORKERS / 32)
#pragma unroll 1
        for (int column = lane * 4; column - lane * 4 < C::DV; column += 128) {
            Accumulated a{{0.0f, 0.0f, 0.0f, 0.0f}, Fast32::LOWEST, 0.0f};
            const float2* state_gmem = p.part_state + row;
            const float4* x_gmem = reinterpret_cast<const float4*>(p.part_out + row * C::DV + column);
#pragma unroll 1
            for (int first = 0; first < parts.count; first += BATCH) {
                const int own = first + lane % BATCH;
                float2 state = {Fast32::LOWEST, 0.0f};
                if (own < parts.count) state = load_gmem_l2(state_gmem + i64(parts.slot(own)) * C::M);
                float4 x[AT_ONCE];
                const auto load = [&](int some) {
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n) {  // what is no part adds nothing: a branch would keep the loads apart
                        const int part = first + some + n;
                        x[n] = {0.0f, 0.0f, 0.0f, 0.0f};
                        if (part < parts.count && column < C::DV) x[n] = load_gmem_l2(x_gmem + i64(parts.slot(part)) * (C::M * C::DV / 4));
                    }
                };
                load(0);
                float raised = fmaxf(a.reference, state.x);
#pragma unroll
                for (int lanes = 1; lanes < BATCH; lanes *= 2) raised = fmaxf(raised, __shfl_xor_sync(0xffffffffu, raised, lanes));
                a.raise(raised);
                const float factor = exp2_fast(state.x - raised);
                float sum = state.y * factor;
#pragma unroll
                for (int lanes = 1; lanes < BATCH; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                a.sum += sum;
#pragma unroll 1
                for (int some = 0; true; load(some)) {
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n) a.add(x[n], __shfl_sync(0xffffffffu, factor, some + n));
                    some += AT_ONCE;
                    if (some >= min(BATCH, parts.count - first)) break;
                }
            }
            if (column < C::DV) write_result<C>(p, rows, row, column, a);
        }
}
