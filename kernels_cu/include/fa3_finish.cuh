// The end of a tile of queries of prefill_fa3.cu: out and log-sum-exp, from registers to memory.
#include "include/fa3_repair.cuh"

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

// A pointer so many numbers further. Left to itself the compiler works multiples of strides out once, before the loop over keys, and keeps
// them through it in uniform registers that the loop needs. HERE: the addition is opaque to it, and made here and now.
template <bool HERE> __device__ __forceinline__ u16* further(u16* from, i64 numbers) {
    if constexpr (!HERE) return from + numbers;
    i64 bytes = 2 * numbers;
    asm("" : "+l"(bytes));
    return reinterpret_cast<u16*>(reinterpret_cast<u64>(from) + bytes);
}

// Results to memory, by way of shared memory, so that eight lanes write 128 neighbouring bytes of a row, 16 bytes each: out allows that, or
// cuda_fa3.py declines (why_not_out). Returns whether the lane may hold a result that is not finite, for repair() to see to.
template <class C> __device__ __forceinline__ bool store(const Warpgroup<C>& g, const QueryTile<C>& tile, u32 smem) {
    const PrefillParams& p = g.p;
    const int thread = thread_index();
    const int lane = thread % 32, piece = lane % 8, first_row = thread % 128 / 32 * 16, first_query = g.first_query(tile);
    const auto here = [&](int query) { return u32(query) < u32(tile.seq.q_length); };
    using Tile = typename C::OutTile;
    const u32 out_smem = smem + C::OUT_SMEM + (thread / 32 - 4) * Tile::BYTES;
    const auto row_of = [&](int i) { return first_row + lane / 8 + 4 * i; };
    const auto out = [&](int i) {
        return static_cast<u16*>(p.out) + tile.batch * p.out_stride.batch + tile.query_head(p, row_of(i)) * p.out_stride.head +
            (tile.seq.q_begin + tile.query(p, first_query, row_of(i))) * p.out_stride.row + 8 * piece;
    };
    u16* const first_out = out(0);
    float product = 1.0f;  // sum of products of two: not finite if a number is not, nor where such a product is too large, which is rare
#pragma unroll
    for (int column = 0; column < C::DV; column += 64) {
#pragma unroll
        for (int k = 0; k < (C::DV - column < 64 ? C::DV - column : 64) / 16; ++k) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&o)[4] = g.O_rmem[0][column / 8 + 2 * k + i / 2];
                const float a = o[i % 2 * 2], b = o[i % 2 * 2 + 1];
                x[i] = pack2<typename C::Out>(a, b);
                if (C::CUTS) product = fmaf(a, b, product);
            }
            stmatrix_x4(out_smem + Tile::offset(lane % 16, 2 * k + lane / 16), x);
        }
        __syncwarp();
        uint4 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = load_smem_16(out_smem + Tile::offset(lane / 8 + 4 * i, piece));
        u16* to = first_out;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (C::PACKED && i > 0) to = out(i);
            const bool there = here(tile.query(p, first_query, row_of(i))) && column + 8 * piece < p.head_dim_v;
            if (there) *reinterpret_cast<uint4*>(to + column) = x[i];
            to = further<C::DV <= 128>(to, 4 * p.out_stride.row);
        }
        __syncwarp();
    }
    if (p.lse && lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = g.own_row() + 8 * r, query = tile.query(p, first_query, row);
            const i64 head = tile.batch * p.lse_stride.batch + tile.query_head(p, row) * p.lse_stride.head;
            const i64 at = head + (tile.seq.q_begin + query) * p.lse_stride.row;
            if (here(query)) p.lse[at] = g.state.finish(g.state.reference[r], g.state.sum[r]);
        }
    }
    return !(fabsf(product) < infinity());
}
