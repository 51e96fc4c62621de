// The threads of a block of prefill_fa3.cu that load: queries, keys and values come in boxes of tensor maps, 64 columns wide.
#include "include/fa3_tile.cuh"

// The rows from `row` on into a tile of shared memory; they complete on the barrier.
template <class Tile>
__device__ __forceinline__ void load_boxes(u32 smem, const TensorMap& map, int row, int head, int batch, u32 barrier_smem) {
#pragma unroll
    for (int block = 0; block < Tile::BLOCKS; ++block)
        copy_box(smem + block * Tile::BLOCK_BYTES, map, barrier_smem, block * Tile::BLOCK, row, head, batch);
}

// Keys, or values, from `key` on.
template <class Tile, class QueryTile> __device__ __forceinline__ void load_keys(
    const TensorMap& map, const PrefillParams& p, const QueryTile& tile, int key, u32 smem, u32 barrier_smem) {
    load_boxes<Tile>(smem, map, tile.seq.k_begin + key, tile.head / p.group, p.cu_seqlens_k ? 0 : tile.batch, barrier_smem);
}

// By one thread: which tiles of queries there are, their rows, and their keys.
template <class C> __device__ __forceinline__ void load_queries_and_keys(const Fa3Params& p, u32 smem) {
    typename C::Slots slots{smem + C::SLOTS_SMEM};
    Ring<typename C::QStages> queries{smem + C::Q_SMEM};
    Ring<typename C::KStages> keys{smem + C::K_SMEM};
    TileQueue<C> queue(p);
    WorkItem work;
    Sequence seq;
    while (queue.next(work, seq)) {
        slots.put(work, seq);
        const QueryTile<C> tile(p.prefill, work.batch, work.head, work.m_tile * C::M, seq);
        for (int n = tile.last; n >= tile.first; --n) {
            keys.wait_empty();
            mbarrier_expect(keys.full(), C::KTile::BYTES);
            load_keys<typename C::KTile>(p.k_map, p.prefill, tile, n * C::N, keys.stage_smem(), keys.full());
            keys.advance();
            if (n != tile.last) continue;
            queries.wait_empty();
            mbarrier_expect(queries.full(), C::WARPGROUPS * C::QTile::BYTES);
            for (int w = 0; w < C::WARPGROUPS; ++w)
                load_boxes<typename C::QTile>(queries.stage_smem() + w * C::QTile::BYTES, p.q_map, seq.q_begin + tile.row + 64 * w, tile.head,
                                              p.prefill.cu_seqlens_q ? 0 : tile.batch, queries.full());
            queries.advance();
        }
    }
    work.batch = -1;
    slots.put(work, seq);
}

// By another one: their values.
template <class C> __device__ __forceinline__ void load_values(const Fa3Params& p, u32 smem) {
    typename C::Slots slots{smem + C::SLOTS_SMEM};
    Ring<typename C::VStages> values{smem + C::V_SMEM};
    while (true) {
        const QueryTile<C> tile = slots.template read<false>(p.prefill);
        if (tile.batch < 0) break;
        mbarrier_arrive(slots.empty());
        slots.advance();
        for (int n = tile.last; n >= tile.first; --n) {
            values.wait_empty();
            mbarrier_expect(values.full(), C::VTile::BYTES);
            load_keys<typename C::VTile>(p.v_map, p.prefill, tile, n * C::N, values.stage_smem(), values.full());
            values.advance();
        }
    }
}
