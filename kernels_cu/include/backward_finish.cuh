// The end of a tile of keys of backward_fa3.cu: dK and dV, from registers to memory.
#include "include/backward_warpgroup.cuh"

// The warp's sums, times a factor, through memory of its own to rows of an array.
template <class C, int D> __device__ __forceinline__ void store_rows(
    const BackwardWarpgroup<C>& g, const KeyTile<C>& keys, const float (&sum)[D / 8][4], float factor, void* to, const Strides& s,
    int columns) {
    using Tile = SmemTile<16, D>;
    static_assert(Tile::BYTES <= C::PART_BYTES, "");
    const int lane = thread_index() % 32, first_key = keys.key + g.number * 64 + thread_index() % 128 / 32 * 16;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&o)[4] = sum[2 * k + i / 2];
            x[i] = pack2<typename C::In>(o[i % 2 * 2] * factor, o[i % 2 * 2 + 1] * factor);
        }
        const int chunk = 2 * k + lane / 16;
        stmatrix_x4(g.part_smem() + chunk / 8 * Tile::BLOCK_BYTES + Tile::offset(lane % 16, chunk % 8), x);
    }
    __syncwarp();
    const i64 entry = g.p.prefill.cu_seqlens_k ? 0 : keys.batch;
    u16* const first = static_cast<u16*>(to) + entry * s.batch + i64(keys.head) * s.head + i64(keys.seq.k_begin + first_key) * s.row;
#pragma unroll
    for (int i = 0; i < 16 * D / 8 / 32; ++i) {
        const int chunk = lane % 8 + (i % (D / 64)) * 8, row = lane / 8 + i / (D / 64) * 4;
        const uint4 x = load_smem_16(g.part_smem() + chunk / 8 * Tile::BLOCK_BYTES + Tile::offset(row, chunk % 8));
        if (first_key + row < keys.capacity && 8 * chunk < columns) *reinterpret_cast<uint4*>(first + row * s.row + 8 * chunk) = x;
    }
    __syncwarp();
}

template <class C> __device__ __forceinline__ void store(const BackwardWarpgroup<C>& g, const KeyTile<C>& keys) {
    if (g.lead) additions_wait();  // the memory is that of dQ
    __syncwarp();
    store_rows<C, C::DV>(g, keys, g.dV_rmem, 1.0f, g.p.dv, g.p.dv_stride, g.p.prefill.head_dim_v);
    store_rows<C, C::DQK>(g, keys, g.dK_rmem, g.p.scale, g.p.dk, g.p.dk_stride, g.p.prefill.head_dim);
}
