// The thread of a block of prefill_fa3.cu that loads: queries, keys and values come in boxes of tensor maps, 64 columns wide.
#include "include/fa3_tile.cuh"

// The rows from `row` on into a tile of shared memory; they complete on the barrier.
template <class Tile>
__device__ __forceinline__ void load_boxes(u32 smem, const TensorMap& map, int row, int head, int batch, u32 barrier_smem) {
#pragma unroll
    for (int block = 0; block < Tile::BLOCKS; ++block)
        copy_box(smem + block * Tile::BLOCK_BYTES, map, barrier_smem, block * Tile::BLOCK, row, head, batch);
}

template <class C> __device__ __forceinline__ void load_tiles(const Fa3Params& p, u32 smem) {
    typename C::Slots slots{smem + C::SLOTS_SMEM};
    Ring<typename C::QStages> queries{smem + C::Q_SMEM};
    Ring<typename C::KStages> keys{smem + C::K_SMEM};
    Ring<typename C::VStages> values{smem + C::V_SMEM};
    TileQueue<C> queue(p);
    WorkItem work;
    Sequence seq;
    while (queue.next(work, seq)) {
        slots.put(work, seq);
        const QueryTile<C> tile(p.prefill, work.batch, work.head, work.m_tile * C::M, seq);
        const int head_kv = tile.head / p.prefill.group;
        const int q_batch = p.prefill.cu_seqlens_q ? 0 : tile.batch, k_batch = p.prefill.cu_seqlens_k ? 0 : tile.batch;
        for (int n = tile.last; n >= tile.first; --n) {
            const int row = seq.k_begin + n * C::N;
            keys.wait_empty();
            mbarrier_expect(keys.full(), C::KTile::BYTES);
            load_boxes<typename C::KTile>(keys.stage_smem(), p.k_map, row, head_kv, k_batch, keys.full());
            keys.advance();
            if (n == tile.last) {
                queries.wait_empty();
                mbarrier_expect(queries.full(), C::WARPGROUPS * C::QTile::BYTES);
                for (int w = 0; w < C::WARPGROUPS; ++w)
                    load_boxes<typename C::QTile>(queries.stage_smem() + w * C::QTile::BYTES, p.q_map, seq.q_begin + tile.row + 64 * w,
                                                  tile.head, q_batch, queries.full());
                queries.advance();
            }
            values.wait_empty();
            mbarrier_expect(values.full(), C::VTile::BYTES);
            load_boxes<typename C::VTile>(values.stage_smem(), p.v_map, row, head_kv, k_batch, values.full());
            values.advance();
        }
    }
    work.batch = -1;
    slots.put(work, seq);
}
