// The warps of a block of prefill_fa3.cu that load: queries, keys and values come in boxes of tensor maps, 64 columns wide.
#include "include/boxes.cuh"
#include "include/fa3_tile.cuh"

// Tile n of keys, or of values, of those of a tile of queries; `head` is theirs. With pages, it comes in boxes of PAGE_ROWS rows, all of
// which are in one page; keys of which there are none come as 0. BAD: what the numbers of keys become whose page does not exist, as bits of
// two: NaN for keys, so that the rows that see them become NaN, and 0 for values, so that others do not.
template <class C, class Tile, u32 BAD> __device__ __forceinline__ void load_tile(
    const Fa3Params& p, const TensorMap& map, const QueryTile<C>& tile, int head, int n, u32 smem, u32 barrier_smem) {
    if constexpr (C::PAGE_ROWS == 0) {
        mbarrier_expect(barrier_smem, Tile::BYTES);
        load_boxes<Tile>(smem, map, tile.seq.k_begin + n * C::N, head, p.prefill.cu_seqlens_k ? 0 : tile.batch, barrier_smem);
    } else {
        const int first = n * C::N;
        const auto page_at = [&](int key) {
            const bool seen = key + C::PAGE_ROWS > tile.visible.begin && key < tile.visible.end;
            return seen ? page_entry(p.prefill, tile.batch, key) : NO_KEYS;
        };
        const auto row_smem = [&](int key) { return smem + (key - first) * Tile::ROW_BYTES; };
        int bytes = 0;
#pragma unroll 1
        for (int key = first; key < first + C::N; key += C::PAGE_ROWS) {  // each entry is read once: it may change meanwhile
            const int page = page_at(key);
            if (page != NO_PAGE) {
                load_boxes<Tile>(row_smem(key), map, key - page_of(p.prefill, key) * p.prefill.page_size, head, page, barrier_smem);
                bytes += C::PAGE_ROWS * Tile::BLOCKS * Tile::ROW_BYTES;
                continue;
            }
#pragma unroll 1
            for (int at = 0; at < C::PAGE_ROWS * Tile::BLOCKS * Tile::CHUNKS; ++at) {
                const int place = at % Tile::BLOCKS * Tile::BLOCK_BYTES + at / Tile::BLOCKS * 16;
                store_smem(row_smem(key) + place, make_uint4(BAD, BAD, BAD, BAD));
            }
        }
        if (bytes != Tile::BYTES) async_proxy_fence();
        mbarrier_expect(barrier_smem, bytes);
    }
}

// By one thread: which tiles of queries there are. It is a tile ahead of the others, who need not wait for its divisions and its counting;
// were it further ahead, a block with long tiles would keep others from what it cannot begin yet.
template <class C> __device__ __forceinline__ void hand_out_tiles(const Fa3Params& p, u32 smem) {
    typename C::Slots slots{smem + C::SLOTS_SMEM};
    TileQueue<C> queue{p};
    WorkItem work;
    Sequence seq;
    do {
        slots.wait_empty();
        if (!queue.next(work, seq)) work.batch = -1;
        slots.put(p.prefill, work, seq);
    } while (work.batch >= 0);
}

// By a warp: their queries, 64 rows as soon as their warpgroup is done with those before.
template <class C> __device__ __forceinline__ void load_queries(const Fa3Params& p, u32 smem) {
    using Q = typename C::QTile;
    typename C::Slots slots{smem + C::SLOTS_SMEM};
    Ring<typename C::QStages> queries{smem + C::Q_SMEM};
    while (true) {
        const QueryTile<C> tile = slots.read(p.prefill);
        if (tile.batch < 0) break;
        slots.done();
        if (tile.sees_none()) continue;
        const int batch = p.prefill.cu_seqlens_q ? 0 : tile.batch;
        for (int w = 0; w < C::WARPGROUPS; ++w) {
            queries.wait_empty();
            if (thread_index() % 32 == 0) {
                const int row = tile.seq.q_begin + tile.query(p.prefill, tile.first_query, 64 * w);
                mbarrier_expect(queries.full(), Q::BYTES);
                if constexpr (C::PACKED) {
#pragma unroll
                    for (int block = 0; block < Q::BLOCKS; ++block)
                        copy_box(queries.stage_smem() + block * Q::BLOCK_BYTES, p.q_map, queries.full(), block * Q::BLOCK, 0, row,
                                 tile.head, batch);
                } else {
                    load_boxes<Q>(queries.stage_smem(), p.q_map, row, tile.head, batch, queries.full());
                }
            }
            queries.advance();
        }
    }
}

// By another one: their keys.
template <class C> __device__ __forceinline__ void load_keys(const Fa3Params& p, u32 smem) {
    typename C::Slots slots{smem + C::SLOTS_SMEM};
    Ring<typename C::KStages> keys{smem + C::K_SMEM};
    const bool lead = thread_index() % 32 == 0;
    while (true) {
        const QueryTile<C> tile = slots.read(p.prefill);
        if (tile.batch < 0) break;
        slots.done();
        const int head = tile.key_head(p.prefill);
        for (int n = tile.last_keys; n >= tile.first_keys; --n) {
            keys.wait_empty();
            if (lead) load_tile<C, typename C::KTile, 0x7fff7fff>(p, p.k_map, tile, head, n, keys.stage_smem(), keys.full());
            keys.advance();
        }
    }
}

// By a third one: their values. Where the array goes on beside the keys of the sequence, 0 takes the place of what is there: 0 * v is NaN
// where v is not finite.
template <class C> __device__ __forceinline__ void load_values(const Fa3Params& p, u32 smem) {
    using V = typename C::VTile;
    typename C::Slots slots{smem + C::SLOTS_SMEM};
    Ring<typename C::VStages> values{smem + C::V_SMEM};
    Ring<typename C::TailStages> tail{smem + C::V_SMEM};  // its barrier alone: of values that are not yet as they should be
    const int lane = thread_index() % 32;
    while (true) {
        const QueryTile<C> tile = slots.read(p.prefill);
        if (tile.batch < 0) break;
        slots.done();
        const int head = tile.key_head(p.prefill);
        const bool goes_on = C::PAGE_ROWS > 0 || tile.seq.k_begin + tile.seq.kv_length < p.prefill.k_rows;
        for (int n = tile.last_keys; n >= tile.first_keys; --n) {
            const int begin = tile.seq.kv_start - n * C::N, end = tile.seq.kv_length - n * C::N;  // rows of the tile: the sequence's
            const bool clear = begin > 0 || (goes_on && end < C::N);
            values.wait_empty();
            if (lane == 0) load_tile<C, V, 0>(p, p.v_map, tile, head, n, values.stage_smem(), clear ? tail.full() : values.full());
            if (clear) {
                tail.wait_full();
                tail.advance();
                clear_outside<V>(lane, values.stage_smem(), begin, end);
                if (lane == 0) mbarrier_arrive(values.full());
            }
            values.advance();
        }
    }
}
