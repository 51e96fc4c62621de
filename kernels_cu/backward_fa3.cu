// The backward pass on Hopper (sm_90a), 16-bit numbers, head sizes up to 256: TMA copies, products of warpgroups (wgmma) from shared
// memory, and warps that only load. After Shah et al. 2024, FlashAttention-3; recomputation from the log-sum-exp as in Dao et al. 2022.
#include "include/backward_finish.cuh"

// M: queries of a step. A block has 128 keys, 64 of each of two warpgroups; or, where heads are WIDE, 64 keys of both.
// IN_ORDER: tiles of keys add to dQ one after the other, so that every run gives the same bits.
template <class In_, int DQK_, int DV_, int M_, int STAGES, int MASK_, bool IN_ORDER_> struct BackwardFa3 {
    using In = In_;
    static constexpr int DQK = DQK_, DV = DV_, M = M_, MASK = MASK_;
    static constexpr bool WIDE = DQK > 128, IN_ORDER = IN_ORDER_;
    static constexpr int N = WIDE ? 64 : 128, OWN = WIDE ? M / 2 : M;  // keys; queries of a warpgroup's scores
    static constexpr bool DQ_BY_QUERIES = DQK == 64;
    static constexpr int DQ_QUERIES = DQ_BY_QUERIES ? M / 2 : M;
    static constexpr int THREADS = 384, REGISTERS = 232, LOADER_REGISTERS = 40;
    using QTile = SmemTile<M, DQK>;
    using GTile = SmemTile<M, DV>;
    using KTile = SmemTile<N, DQK>;
    using VTile = SmemTile<N, DV>;
    using STile = SmemTile<N, M>;  // gradients of scores; WIDE: weights as well
    static constexpr int G_STAGES = WIDE ? 1 : STAGES;
    static constexpr int K_SMEM = 0, V_SMEM = K_SMEM + KTile::BYTES, Q_SMEM = V_SMEM + VTile::BYTES;
    static constexpr int G_SMEM = Q_SMEM + STAGES * QTile::BYTES, S_SMEM = G_SMEM + G_STAGES * GTile::BYTES;
    static constexpr int LSE_SMEM = S_SMEM + (WIDE ? 4 : 2) * STile::BYTES, DELTA_SMEM = LSE_SMEM + STAGES * M * 4;
    static constexpr int PART_BYTES = M * (WIDE ? 128 : DQK) / 8 * 4;  // of dQ, of a warp at a time
    static constexpr int DQ_SMEM = DELTA_SMEM + G_STAGES * M * 4, BARRIERS_SMEM = DQ_SMEM + 8 * PART_BYTES;
    static constexpr int TAIL_SMEM = BARRIERS_SMEM + 16 * (STAGES + G_STAGES + 3), BLOCK_SMEM = TAIL_SMEM + 32;
    static constexpr int PARTS_SMEM = BLOCK_SMEM + 16, SEEN_SMEM = PARTS_SMEM + 16, SMEM_BYTES = SEEN_SMEM + 1024;
    using QStages = Stages<STAGES, QTile::BYTES, BARRIERS_SMEM - Q_SMEM>;
    using GStages = Stages<G_STAGES, GTile::BYTES, BARRIERS_SMEM + 16 * STAGES - G_SMEM>;
    using SStages = Stages<2, STile::BYTES, BARRIERS_SMEM + 16 * (STAGES + G_STAGES) - S_SMEM>;
    using KStages = Stages<1, 0, BARRIERS_SMEM + 16 * (STAGES + G_STAGES + 2) - K_SMEM>;  // of both keys and values
    using PartStages = Stages<1, 0, PARTS_SMEM - DQ_SMEM>;  // of dQ, if in order
    using TailStages = Stages<1, 0, 0>;
};

template <class C> __device__ __forceinline__ void backward_fa3(const BackwardFa3Params& p, unsigned char* smem_pointer) {
    const u32 smem = smem_address(smem_pointer);
    const int warpgroup = uniform(thread_index() / 128);
    if (thread_index() == 0) {
        Ring<typename C::QStages>{smem + C::Q_SMEM}.init(1, 8);
        Ring<typename C::GStages>{smem + C::G_SMEM}.init(1, 8);
        Ring<typename C::SStages>{smem + C::S_SMEM}.init(8, 8);
        Ring<typename C::KStages>{smem + C::K_SMEM}.init(2, 8);
        for (int warp = 0; warp < 2; ++warp) Ring<typename C::TailStages>{smem + C::TAIL_SMEM + 16 * warp}.init(1, 1);
    }
    if (C::IN_ORDER && thread_index() == 0) Ring<typename C::PartStages>{smem + C::DQ_SMEM}.init(8, 1);
    // Blocks have numbers in the order in which they begin, so that none waits for one that has not.
    if (C::IN_ORDER && thread_index() == 0) store_smem(smem + C::BLOCK_SMEM, count_up(p.backward.dq_turns, ~0u));
    __syncthreads();
    const u32 block = C::IN_ORDER ? uniform(load_smem_4(smem + C::BLOCK_SMEM)) : block_index();
    const u32 tiles = u32(p.backward.prefill.batch) * u32(p.backward.prefill.heads_kv) * u32(p.backward.n_tiles);
    if (warpgroup == 0) {
        registers_lower<C::LOADER_REGISTERS>();
        if (thread_index() / 32 == 0) load_queries<C>(p, smem, block, tiles);
        else if (thread_index() / 32 == 1) load_douts<C>(p, smem, block, tiles);
        else if (C::IN_ORDER && thread_index() / 32 == 2) add_in_order<C>(p.backward, smem, block, tiles);
    } else {
        registers_raise<C::REGISTERS>();
        typename Choose<C::WIDE, BackwardWide<C>, BackwardWarpgroup<C>>::Type group(p.backward, warpgroup - 1, smem);
        u32 turn = 0;
#pragma unroll 1
        for (u32 tile = uniform(block); tile < tiles; tile += gridDim.x) {
            const KeyTile<C> keys(p.backward, tile);
            group.differentiate(keys, turn);
            turn += keys.first <= keys.last;
            store(group, KeyTile<C>(p.backward, tile));  // once more: it took no registers meanwhile
        }
        group.end();
    }
}
