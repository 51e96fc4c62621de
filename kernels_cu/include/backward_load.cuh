// The warps of a block of backward_fa3.cu that load: keys and values, then tiles of queries and of dO with what is known of their rows.
#include "include/backward_tile.cuh"
#include "include/layout.cuh"
#include "include/ptx.cuh"

// The rows from `row` on into a tile of shared memory, in boxes of 64 columns; they complete on the barrier.
template <class Tile>
__device__ __forceinline__ void load_rows(u32 smem, const TensorMap& map, int row, int head, int batch, u32 barrier_smem) {
#pragma unroll
    for (int block = 0; block < Tile::BLOCKS; ++block)
        copy_box(smem + block * Tile::BLOCK_BYTES, map, barrier_smem, block * Tile::BLOCK, row, head, batch);
}

// By a warp: 0 into rows of a tile outside begin..end - 1, where other things may be: 0 * x is NaN where x is not finite.
template <class Tile> __device__ __forceinline__ void clear_outside(u32 smem, int begin, int end) {
#pragma unroll 1
    for (int i = thread_index() % 32; i < Tile::ROWS * Tile::CHUNKS; i += 32) {
        const int row = i / Tile::CHUNKS;
        if (row >= begin && row < end) continue;
#pragma unroll
        for (int block = 0; block < Tile::BLOCKS; ++block)
            store_smem(smem + block * Tile::BLOCK_BYTES + Tile::offset(row, i % Tile::CHUNKS), make_uint4(0, 0, 0, 0));
    }
    async_proxy_fence();
    __syncwarp();
}

// By a warp: a tile of rows of one head into a stage, and its numbers of each row. Rows outside begin..end - 1 of the tile become 0, if
// `clear`; `tail` is a barrier of the warp's own for what is not yet as it should be.
template <class Tile, class Stages, class Tail> __device__ __forceinline__ void load_stage(
    const Ring<Stages>& stages, Ring<Tail>& tail, const TensorMap& map, int row, int head, int batch, u32 numbers_smem,
    const float* numbers, bool clear, int begin, int end) {
    stages.wait_empty();
    const u32 barrier = clear ? tail.full() : stages.full();
    if (thread_index() % 32 == 0) {
        mbarrier_expect(barrier, Tile::BYTES + Tile::ROWS * 4);
        load_rows<Tile>(stages.stage_smem(), map, row, head, batch, barrier);
        copy_bytes(numbers_smem + stages.stage * Tile::ROWS * 4, numbers, Tile::ROWS * 4, barrier);
    }
    if (!clear) return;
    tail.wait_full();
    tail.advance();
    clear_outside<Tile>(stages.stage_smem(), begin, end);
    if (thread_index() % 32 == 0) mbarrier_arrive(stages.full());
}

// By a warp: keys, or values, to a barrier that waits for both.
template <class C, class Tile> __device__ __forceinline__ void load_keys(
    const BackwardFa3Params& p, const KeyTile<C>& keys, const TensorMap& map, u32 smem, const Ring<typename C::KStages>& stage,
    Ring<typename C::TailStages>& tail) {
    const Sequence& seq = keys.seq;
    const KeyRange live = keys.live_keys();
    const bool clear = keys.key < live.begin ||
        (keys.key + C::N > live.end && seq.k_begin + live.end < p.backward.prefill.k_rows);
    const u32 barrier = clear ? tail.full() : stage.full();
    const bool lead = thread_index() % 32 == 0;
    stage.wait_empty();
    if (lead) {
        mbarrier_expect(barrier, Tile::BYTES);
        load_rows<Tile>(smem, map, seq.k_begin + keys.key, keys.head, p.backward.prefill.cu_seqlens_k ? 0 : keys.batch, barrier);
    }
    if (!clear) return;
    tail.wait_full();
    tail.advance();
    clear_outside<Tile>(smem, live.begin - keys.key, live.end - keys.key);
    if (lead) mbarrier_arrive(stage.full());
}

// By a warp: K of all tiles of keys, and of their tiles of queries Q with the log-sum-exp.
template <class C> __device__ __forceinline__ void load_queries(const BackwardFa3Params& p, u32 smem, u32 tiles) {
    Ring<typename C::TailStages> tail{smem + C::TAIL_SMEM};
    Ring<typename C::KStages> stage{smem + C::K_SMEM};
    Ring<typename C::QStages> queries{smem + C::Q_SMEM};
    const PrefillParams& f = p.backward.prefill;
    const bool packed = f.cu_seqlens_q != nullptr;
#pragma unroll 1
    for (u32 n = block_index(); n < tiles; n += gridDim.x) {
        const KeyTile<C> keys(p.backward, n);
        if (keys.last < keys.first) continue;
        load_keys<C, typename C::KTile>(p, keys, p.k_map, smem + C::K_SMEM, stage, tail);
        stage.advance();
#pragma unroll 1
        for (int head = keys.head * f.group; head < (keys.head + 1) * f.group; ++head) {
            const float* lse = p.backward.row_lse + head * p.backward.places + first_place_of(p.backward, keys.batch, keys.seq);
#pragma unroll 1
            for (int m = keys.first; m <= keys.last; ++m) {
                const int end = keys.seq.q_length - m * C::M;
                load_stage<typename C::QTile>(queries, tail, p.q_map, keys.seq.q_begin + m * C::M, head, packed ? 0 : keys.batch,
                                              smem + C::LSE_SMEM, lse + m * C::M, packed && end < C::M, 0, end);
                queries.advance();
            }
        }
    }
}

// By another one: V, and dO with delta.
template <class C> __device__ __forceinline__ void load_douts(const BackwardFa3Params& p, u32 smem, u32 tiles) {
    Ring<typename C::TailStages> tail{smem + C::TAIL_SMEM + 16};
    Ring<typename C::KStages> stage{smem + C::K_SMEM};
    Ring<typename C::GStages> douts{smem + C::G_SMEM};
    const PrefillParams& f = p.backward.prefill;
    const bool packed = f.cu_seqlens_q != nullptr;
#pragma unroll 1
    for (u32 n = block_index(); n < tiles; n += gridDim.x) {
        const KeyTile<C> keys(p.backward, n);
        if (keys.last < keys.first) continue;
        load_keys<C, typename C::VTile>(p, keys, p.v_map, smem + C::V_SMEM, stage, tail);
        stage.advance();
        const KeyRange live = keys.live_rows();
#pragma unroll 1
        for (int head = keys.head * f.group; head < (keys.head + 1) * f.group; ++head) {
            const float* delta = p.backward.row_delta + head * p.backward.places + first_place_of(p.backward, keys.batch, keys.seq);
#pragma unroll 1
            for (int m = keys.first; m <= keys.last; ++m) {
                const int begin = live.begin - m * C::M, end = live.end - m * C::M;
                const bool clear = begin > 0 || (end < C::M && (packed || live.end < keys.seq.q_length));
                load_stage<typename C::GTile>(douts, tail, p.dout_map, keys.seq.q_begin + m * C::M, head, packed ? 0 : keys.batch,
                                              smem + C::DELTA_SMEM, delta + m * C::M, clear, begin, end);
                douts.advance();
            }
        }
    }
}
