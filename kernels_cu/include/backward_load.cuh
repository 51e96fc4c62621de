// The warps of a block of backward_fa3.cu that load, keys and values, then tiles of queries and of dO with what is known of their rows; and
// the one that adds up dQ where that has an order.
#include "include/backward_tile.cuh"
#include "include/boxes.cuh"
#include "include/ptx.cuh"

// By a warp: a tile of rows of one head into a stage, and its numbers of each row. Rows outside begin..end - 1 of the tile become 0, if
// `clear`; `tail` is a barrier of the warp's own for what is not yet as it should be.
template <class Tile, class Stages, class Tail> __device__ __forceinline__ void load_stage(
    const Ring<Stages>& stages, Ring<Tail>& tail, const TensorMap& map, int row, int head, int batch, u32 numbers_smem,
    const float* numbers, bool clear, int begin, int end) {
    stages.wait_empty();
    const u32 barrier = clear ? tail.full() : stages.full();
    if (thread_index() % 32 == 0) {
        mbarrier_expect(barrier, Tile::BYTES + Tile::ROWS * 4);
        load_boxes<Tile>(stages.stage_smem(), map, row, head, batch, barrier);
        copy_bytes(numbers_smem + stages.stage * Tile::ROWS * 4, numbers, Tile::ROWS * 4, barrier);
    }
    if (!clear) return;
    tail.wait_full();
    tail.advance();
    clear_outside<Tile>(thread_index() % 32, stages.stage_smem(), begin, end);
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
        load_boxes<Tile>(smem, map, seq.k_begin + keys.key, keys.head, p.backward.prefill.cu_seqlens_k ? 0 : keys.batch, barrier);
    }
    if (!clear) return;
    tail.wait_full();
    tail.advance();
    clear_outside<Tile>(thread_index() % 32, smem, live.begin - keys.key, live.end - keys.key);
    if (lead) mbarrier_arrive(stage.full());
}

// By a warp: K of all tiles of keys, and of their tiles of queries Q with the log-sum-exp.
template <class C> __device__ __forceinline__ void load_queries(const BackwardFa3Params& p, u32 smem, u32 first, u32 tiles) {
    Ring<typename C::TailStages> tail{smem + C::TAIL_SMEM};
    Ring<typename C::KStages> stage{smem + C::K_SMEM};
    Ring<typename C::QStages> queries{smem + C::Q_SMEM};
    const PrefillParams& f = p.backward.prefill;
    const bool packed = f.cu_seqlens_q != nullptr;
#pragma unroll 1
    for (u32 n = first; n < tiles; n += gridDim.x) {
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
template <class C> __device__ __forceinline__ void load_douts(const BackwardFa3Params& p, u32 smem, u32 first, u32 tiles) {
    Ring<typename C::TailStages> tail{smem + C::TAIL_SMEM + 16};
    Ring<typename C::KStages> stage{smem + C::K_SMEM};
    Ring<typename C::GStages> douts{smem + C::G_SMEM};
    const PrefillParams& f = p.backward.prefill;
    const bool packed = f.cu_seqlens_q != nullptr;
#pragma unroll 1
    for (u32 n = first; n < tiles; n += gridDim.x) {
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

// Until it is the turn of a tile of keys, by one thread. It comes when the one before, whose block has begun before, has had its own; but
// if lengths on the device do not ascend, sequences share places, and it may never come: after seconds everybody goes on, and dQ is wrong
// as it would be without turns. `gave_up`: whether somebody has.
__device__ __forceinline__ void wait_for_turn(u32* gave_up, const u32* turn, u32 own) {
    constexpr u32 MOST = 1 << 22, OFTEN = 1 << 10;
    for (u32 looks = 1; look_up(turn) != own; ++looks) {
        if (looks % OFTEN != 0 || (looks < MOST && look_up(gave_up) == 0)) continue;
        publish(gave_up, 1);
        return;
    }
}

// By a third one: add to dQ, in the order of the tiles of keys, what the warpgroups have written, as often as they call add_part().
template <class C> __device__ __forceinline__ void add_in_order(const BackwardParams& p, u32 smem, u32 first, u32 tiles) {
    constexpr int HALVES = C::WIDE ? 2 : 1;  // a step; of a half, a warpgroup has 4 parts in a row
    Ring<typename C::PartStages> parts{smem + C::DQ_SMEM};
#pragma unroll 1
    for (u32 n = first; n < tiles; n += gridDim.x) {
        const KeyTile<C> keys(p, n);
        if (keys.last < keys.first) continue;
        const u32 own = u32(keys.key / C::N);
        if (!C::WIDE) {  // dQ comes a step late: before the first one there is none
            parts.wait_full();
            if (thread_index() % 32 == 0) mbarrier_arrive(parts.empty());
            __syncwarp();
            parts.advance();
        }
#pragma unroll 1
        for (int head = keys.head * p.prefill.group; head < (keys.head + 1) * p.prefill.group; ++head) {
            const i64 first_tile = (head * p.places + first_place_of(p, keys.batch, keys.seq)) / C::M;
#pragma unroll 1
            for (int step = HALVES * keys.first; step < HALVES * (keys.last + 1); ++step) {
                parts.wait_full();
                if (thread_index() % 32 == 0) {
                    const i64 tile = first_tile + step / HALVES;
                    const int half = step % HALVES;
                    u32* const turn = p.dq_turns + FIRST_TURN + tile * TURNS + half;
                    float* const to = p.dq_sum + tile * (C::M * C::DQK) + half * C::PART_BYTES;
                    wait_for_turn(p.dq_turns + 1, turn, own);
                    async_proxy_fence_gmem();
#pragma unroll
                    for (int group = 0; group < HALVES; ++group)
                        add_bytes(to + group * 2 * C::PART_BYTES, parts.smem + group * 4 * C::PART_BYTES, 8 / HALVES * C::PART_BYTES);
                    additions_wait();
                    mbarrier_arrive(parts.empty());
                    additions_done();
                    publish(turn, own + 1);
                }
                __syncwarp();
                parts.advance();
            }
        }
    }
}
