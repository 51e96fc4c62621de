// The end of a tile of keys of backward_fa3.cu: dK and dV, from registers to memory.
#include "include/backward_warpgroup.cuh"
#include "include/backward_wide.cuh"

// The warp's sums, times a factor, through memory of its own to rows of an array.
template <class C, class Group, int N> __device__ __forceinline__ void store_rows(
    const Group& g, const KeyTile<C>& keys, const float (&sum)[N][4], float factor, void* to, const Strides& s, int columns) {
    constexpr int D = 8 * N;
    using Tile = SmemTile<16, D>;
    static_assert(Tile::BYTES <= C::PART_BYTES, "");
    const int lane = thread_index() % 32, first_key = keys.key + g.first_key();
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
    u16* const first = static_cast<u16*>(to) + entry * s.batch + i64(keys.head) * s.head + i64(keys.seq.k_begin + first_key) * s.row +
        g.first_column();
#pragma unroll
    for (int i = 0; i < 16 * D / 8 / 32; ++i) {
        const int chunk = lane % 8 + (i % (D / 64)) * 8, row = lane / 8 + i / (D / 64) * 4;
        const uint4 x = load_smem_16(g.part_smem() + chunk / 8 * Tile::BLOCK_BYTES + Tile::offset(row, chunk % 8));
        if (first_key + row < keys.capacity && g.first_column() + 8 * chunk < columns)
            *reinterpret_cast<uint4*>(first + row * s.row + 8 * chunk) = x;
    }
    __syncwarp();
}

template <class C, class Group> __device__ __forceinline__ void store(const Group& g, const KeyTile<C>& keys) {
    g.wait_for_part(g.times());  // the memory is that of dQ
    store_rows(g, keys, g.dV_rmem, 1.0f, g.p.dv, g.p.dv_stride, g.p.prefill.head_dim_v);
    store_rows(g, keys, g.dK_rmem, g.p.scale, g.p.dk, g.p.dk_stride, g.p.prefill.head_dim);
}
