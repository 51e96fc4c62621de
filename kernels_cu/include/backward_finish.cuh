// The end of a tile of keys of backward_fa3.cu: dK and dV, from registers to memory.
#include "include/backward_warpgroup.cuh"

// The thread's sums, times a factor, through the place of the keys or values that the warpgroup alone reads, to rows of an array.
template <class C, class Tile, int D> __device__ __forceinline__ void store_rows(
    const BackwardWarpgroup<C>& g, const KeyTile<C>& keys, const float (&sum)[D / 8][4], float factor, u32 tile_smem, void* to, const Strides& s,
    int columns) {
    const int lane = thread_index() % 32, first_row = g.number * 64 + thread_index() % 128 / 32 * 16;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&o)[4] = sum[2 * k + i / 2];
            x[i] = pack2<typename C::In>(o[i % 2 * 2] * factor, o[i % 2 * 2 + 1] * factor);
        }
        const int chunk = 2 * k + lane / 16;
        stmatrix_x4(tile_smem + chunk / 8 * Tile::BLOCK_BYTES + Tile::offset(first_row + lane % 16, chunk % 8), x);
    }
    __syncwarp();
    const i64 entry = g.p.prefill.cu_seqlens_k ? 0 : keys.batch;
    u16* const first = static_cast<u16*>(to) + entry * s.batch + i64(keys.head) * s.head;
#pragma unroll
    for (int i = 0; i < 16 * D / 8 / 32; ++i) {
        const int chunk = lane % 8 + (i % (D / 64)) * 8, row = first_row + lane / 8 + i / (D / 64) * 4, key = keys.key + row;
        const uint4 x = load_smem_16(tile_smem + chunk / 8 * Tile::BLOCK_BYTES + Tile::offset(row, chunk % 8));
        if (key < keys.capacity && 8 * chunk < columns)
            *reinterpret_cast<uint4*>(first + (keys.seq.k_begin + key) * s.row + 8 * chunk) = x;
    }
    __syncwarp();
}

template <class C> __device__ __forceinline__ void store(const BackwardWarpgroup<C>& g, const KeyTile<C>& keys) {
    using V = typename C::VTile;
    static_assert(C::DV >= C::DQK, "both fit the place of the values");
    block_barrier<128>(3 + g.number);  // until none of the warpgroup reads its values
    const u32 place = g.smem + C::V_SMEM;
    store_rows<C, V, C::DV>(g, keys, g.dV_rmem, 1.0f, place, g.p.dv, g.p.dv_stride, g.p.prefill.head_dim_v);
    store_rows<C, V, C::DQK>(g, keys, g.dK_rmem, g.p.scale, place, g.p.dk, g.p.dk_stride, g.p.prefill.head_dim);
}
