// FlashAttention-3's forward pass, for sm_90a.
#include "include/fa3_finish.cuh"
#include "include/fa3_load.cuh"

template <
    class In_, class Out_, int DQK_, int DV_, int WARPGROUPS_, int N_, int STAGES_, bool TURNS_, bool ONE_WAIT_, int MASK_, int SCORE_,
    int PAGE_ROWS_ = 0, bool FLAT_ = false, bool PACKED_ = false>
struct PrefillFa3 {
    using In = In_;
    using Out = Out_;
    static constexpr int DQK = DQK_, DV = DV_, N = N_, WARPGROUPS = WARPGROUPS_, M = 64 * WARPGROUPS, STAGES = STAGES_;
    static constexpr int MASK = MASK_, SCORE = SCORE_;
    static constexpr int PAGE_ROWS = PAGE_ROWS_;  // rows of a box: page sizes are multiples of it; 0: there are no pages
    static_assert(PAGE_ROWS == 0 || (PAGE_ROWS % 16 == 0 && N % PAGE_ROWS == 0), "");
    static constexpr bool TURNS = TURNS_, ONE_WAIT = ONE_WAIT_, FLAT = FLAT_;
    // Of two warpgroups each hands its turn over when its scores are there, which ONE_WAIT does not wait for: it would keep it for ever.
    static_assert(!(TURNS && ONE_WAIT) || WARPGROUPS > 2, "");
    static constexpr bool PACKED = PACKED_;  // rows are (query, head) of a group, see group_shift()
    static constexpr bool CUTS = MASK != MASK_LENGTH;  // rows of a block may see different keys
    static constexpr int THREADS = 128 * (WARPGROUPS + 1);
    // Of a thread that computes, and of one that loads. Loading pages takes some more: of three warpgroups each thread gives 8 up for it.
    static constexpr bool GIVE_TO_LOADERS = WARPGROUPS == 3 && PAGE_ROWS > 0;
    static constexpr int REGISTERS = WARPGROUPS == 4 ? 112 : GIVE_TO_LOADERS ? 152 : WARPGROUPS == 3 ? 160 : 232;
    static constexpr int LOADER_REGISTERS = GIVE_TO_LOADERS ? 56 : WARPGROUPS == 2 ? 40 : 32;
    using QTile = SmemTile<64, (DQK + 63) / 64 * 64>;  // of a warpgroup
    using KTile = SmemTile<N, (DQK + 63) / 64 * 64>;
    using VTile = SmemTile<N, (DV + 63) / 64 * 64>;
    using OutTile = SmemTile<16, 64>;  // of a warp, whose results take it 64 columns at a time
    static constexpr int Q_SMEM = 0, K_SMEM = Q_SMEM + WARPGROUPS * QTile::BYTES, V_SMEM = K_SMEM + STAGES * KTile::BYTES;
    static constexpr int OUT_SMEM = V_SMEM + STAGES * VTile::BYTES;
    static constexpr int SLOTS_SMEM = OUT_SMEM + 4 * WARPGROUPS * OutTile::BYTES, BARRIERS_SMEM = SLOTS_SMEM + 2 * 32;
    static constexpr int SMEM_BYTES = BARRIERS_SMEM + 16 * (2 + WARPGROUPS + 2 * STAGES + 1);
    using SlotStages = Stages<2, 32, BARRIERS_SMEM - SLOTS_SMEM>;
    using QStages = Stages<WARPGROUPS, QTile::BYTES, BARRIERS_SMEM + 16 * 2 - Q_SMEM>;  // each has its own
    using KStages = Stages<STAGES, KTile::BYTES, BARRIERS_SMEM + 16 * (2 + WARPGROUPS) - K_SMEM>;
    using VStages = Stages<STAGES, VTile::BYTES, BARRIERS_SMEM + 16 * (2 + WARPGROUPS + STAGES) - V_SMEM>;
    using TailStages = Stages<1, 0, BARRIERS_SMEM + 16 * (2 + WARPGROUPS + 2 * STAGES) - V_SMEM>;
    using Slots = TileSlots<PrefillFa3>;
};

template <class C> __device__ __forceinline__ void prefill_fa3(const Fa3Params& p, unsigned char* smem_pointer) {
    const u32 smem = smem_address(smem_pointer);
    const int warpgroup = uniform(thread_index() / 128);
    if (thread_index() == 0) {
        constexpr int WARPS = 4 * C::WARPGROUPS;
        typename C::Slots{smem + C::SLOTS_SMEM}.init(1, WARPS + 3);
        Ring<typename C::QStages>{smem + C::Q_SMEM}.init(1, 4);
        Ring<typename C::KStages>{smem + C::K_SMEM}.init(1, WARPS);
        Ring<typename C::VStages>{smem + C::V_SMEM}.init(1, WARPS);
        Ring<typename C::TailStages>{smem + C::V_SMEM}.init(1, 1);
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_lower<C::LOADER_REGISTERS>();
        if (thread_index() == 0) hand_out_tiles<C>(p, smem);
        else if (thread_index() / 32 == 1) load_keys<C>(p, smem);
        else if (thread_index() / 32 == 2) load_values<C>(p, smem);
        else if (thread_index() / 32 == 3) load_queries<C>(p, smem);
    } else {
        registers_raise<C::REGISTERS>();
        Warpgroup<C> group(p.prefill, warpgroup - 1, smem);
        typename C::Slots slots{smem + C::SLOTS_SMEM};
#pragma unroll 1
        while (true) {
            if (!group.attend(slots.read(p.prefill))) break;
            const QueryTile<C> tile = slots.read(p.prefill);  // once more: it took no registers meanwhile
            normalize(group, tile);
            repair(group, tile, store(group, tile, smem));
            slots.done();
        }
    }
}
