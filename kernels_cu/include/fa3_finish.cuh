// The end of a tile of queries of prefill_fa3.cu: out and log-sum-exp, from registers to memory.
#include "include/fa3_repair.cuh"

// Of a matrix whose rows have four lanes each and whose columns come in groups of 8, lane q has two columns of each of four groups; it gets
// group q.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4], int q) {
    const u32 a0 = shuffle_xor<1>(q & 1 ? x[0] : x[1]), a1 = shuffle_xor<1>(q & 1 ? x[2] : x[3]);
    if (q & 1) x[0] = a0, x[2] = a1;
    else x[1] = a0, x[3] = a1;
    const u32 b0 = shuffle_xor<2>(q & 2 ? x[0] : x[2]), b1 = shuffle_xor<2>(q & 2 ? x[1] : x[3]);
    if (q & 2) x[0] = b0, x[1] = b1;
    else x[2] = b0, x[3] = b1;
}

// Divide by the sums, with the sink.
template <class C> __device__ __forceinline__ void normalize(Warpgroup<C>& g, const QueryTile<C>& tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        g.state.reduce(r);
        const bool empty = g.state.sum[r] == 0.0f;  // NaN is not empty
        float factor = 1.0f, sink_factor;
        if (g.p.sinks) g.state.merge(r, g.p.sinks[tile.query_head(g.p, g.own_row() + 8 * r)], 1.0f, factor, sink_factor);
        g.state.scale_row(g.O_rmem, r, empty ? 0.0f : factor * reciprocal_fast(g.state.sum[r]));
    }
}

// Rows of numbers are 16-byte pieces; see why_not_out in cuda_fa3.py. Whether a number is not finite that must perhaps be, see repair().
template <class C> __device__ __forceinline__ bool store(const Warpgroup<C>& g, const QueryTile<C>& tile) {
    const PrefillParams& p = g.p;
    const int q = thread_index() % 4;
    float zero = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = tile.query(p, g.first_query(tile), g.own_row() + 8 * r), head = tile.query_head(p, g.own_row() + 8 * r);
        const bool here = query >= 0 && query < tile.seq.q_length;
        const i64 at = tile.seq.q_begin + query;
        u16* out = static_cast<u16*>(p.out) + tile.batch * p.out_stride.batch + at * p.out_stride.row + head * p.out_stride.head + 8 * q;
#pragma unroll
        for (int column = 0; column < C::DV; column += 32) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float a = g.O_rmem[0][column / 8 + i][2 * r], b = g.O_rmem[0][column / 8 + i][2 * r + 1];
                x[i] = pack2<typename C::Out>(a, b);
                if (C::CUTS) zero = fmaf(a + b, 0.0f, zero);
            }
            transpose_quad(x, q);
            if (here && column + 8 * q < p.head_dim_v) *reinterpret_cast<uint4*>(out + column) = make_uint4(x[0], x[1], x[2], x[3]);
        }
        if (p.lse && here && q == 0)
            p.lse[tile.batch * p.lse_stride.batch + head * p.lse_stride.head + at * p.lse_stride.row] =
                g.state.finish(g.state.reference[r], g.state.sum[r]);
    }
    return zero != 0.0f;
}
