// What the launches of a backward pass in float32 or float64 get, by value, and where its rows' statistics are.
// cuflash/backends/cuda_backward_fp.py mirrors it (PARAMS) and every instance asserts the size.
#include "include/fp_rows.cuh"
#include "include/schedule.cuh"

struct FpBackwardParams : PrefillParams {  // out and lse are those of the forward pass, and read; m_tiles: of rows, or of keys
    const void* dout;     // (batch, q_rows, heads_q, head_dim_v); packed sequences as in PrefillParams
    const void* dlse;     // (batch, heads_q, q_rows), or null
    void *dq, *dk, *dv;   // shapes of q, k and v
    void* dbias;          // the bias's shape, 0 before; or null. In float64 with strides of 0 where it is `shared`
    // Of each row, (batch, heads_q, q_rows), packed (heads_q, q_rows). The weight of a key is 2^((x - base) * unit) * inverse, with
    // logits x of which 1 is `unit` in log2 units. A row that sees nothing has inverse 0.
    void *row_base, *row_inverse;
    void* row_delta;      // sum of weights times dP, minus dlse
    void* row_sink;       // gradient of the logit of the head's sink, the row's share; or null
    Strides dout_stride, dlse_stride, dq_stride, dk_stride, dv_stride, dbias_stride;
    double factor;        // of dq and dk: the scale
    i32 dq_vector, keys_vector;  // rows of dq, of dk and dv, can be written 16 bytes at a time
    i32 trusted;          // out is of the type that is computed in
    i32 shared;           // logits share elements of the bias, to whose gradient all of them add
    i32 longest;          // rows of a sequence that have statistics: all, unless somebody gave a max_seqlen_q that is too small
};

// A row's place in arrays like lse.
__device__ __forceinline__ i64 row_place(const FpBackwardParams& p, int batch, const Sequence& seq, int head, int row) {
    return (i64(p.cu_seqlens_q ? 0 : batch) * p.heads_q + head) * p.q_rows + seq.q_begin + row;
}

// Keys that there are in memory, which is as many as have gradients.
__device__ __forceinline__ int key_rows(const FpBackwardParams& p, int batch, const Sequence& seq) {
    return p.cu_seqlens_k ? clamp(index_at(p, p.cu_seqlens_k, 2, batch + 1), seq.k_begin, p.k_rows) - seq.k_begin : p.k_rows;
}

// The rows of a warp's sums, times `factor`, for whose layout see fp_products.cuh. Row r goes to `row_gmem(r)` unless that is null;
// `zero(r)`: as zeros.
template <class T, int MT, int OT, class Row, class Zero>
__device__ __forceinline__ void store_sums(
    const T (&sums)[MT][OT][4], int lane, i64 column_stride, int columns, bool vector, T factor, Row row_gmem, Zero zero
) {
    constexpr int SIZE = Chunk<T>::SIZE;
#pragma unroll
    for (int r = 0; r < 2 * MT; ++r) {
        T* to = row_gmem(r);
        if (!to) continue;
        const bool cleared = zero(r);
#pragma unroll
        for (int ot = 0; ot < OT; ot += SIZE)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                T x[SIZE];
#pragma unroll
                for (int e = 0; e < SIZE; ++e) x[e] = cleared ? T(0) : sums[r / 2][ot + e][r % 2 * 2 + c] * factor;
                store_numbers<T, T>(to, column_stride, 8 * ot + SIZE * (lane % 4 * 2 + c), columns, vector, x);
            }
    }
}

// Whether a number of row r of a warp's sums is infinite or NaN.
template <class T, int MT, int OT> __device__ __forceinline__ bool is_strange(const T (&sums)[MT][OT][4], int r) {
    T watched = 0;
#pragma unroll
    for (int ot = 0; ot < OT; ++ot) watched += sums[r / 2][ot][r % 2 * 2] * T(0) + sums[r / 2][ot][r % 2 * 2 + 1] * T(0);
    return !(watched == T(0));
}
