// What the two kernels of backward_fp.cu have in common: what an instance fixes, and how tiles come one after the other.
#include "include/fp_backward_pairs.cuh"

// A block owns M rows, or M keys (OF_KEYS), of which each warp has 16 or 32, and walks over tiles of N of the others. DQK, DV: padded head
// sizes. SLICES blocks share the columns of the gradients, each with the scores anew. STAGES: tiles of others in shared memory.
// WHOLE_CHUNKS: see NumberLoader.
template <
    class Kind_, class Real_, int DQK_, int DV_, int SLICES_, int M_, int N_, int WARPS_, int STAGES_, bool WHOLE_CHUNKS, int MASK_,
    int SCORE_, bool OF_KEYS>
struct BackwardFp {
    using Kind = Kind_;
    using Real = Real_;
    using T = typename Real::T;
    static constexpr int DQK = DQK_, DV = DV_, SLICES = SLICES_, M = M_, N = N_, STAGES = STAGES_, MASK = MASK_, SCORE = SCORE_;
    static constexpr int THREADS = 32 * WARPS_, WARP_ROWS = M / WARPS_;
    static constexpr int MT = WARP_ROWS / 16, NT = N / 8;  // 16 x 8 tiles of a warp
    static __device__ constexpr int slice(int columns) { return (columns + SLICES * 32 - 1) / (SLICES * 32) * 32; }
    static constexpr int QK_COLUMNS = slice(DQK), V_COLUMNS = slice(DV);  // of the gradients of a block
    static constexpr bool FULL = OF_KEYS && MT == 2;  // so many sums that there are no registers to load ahead
    using OfQk = OfColumns<BackwardFp, DQK>;
    using OfV = OfColumns<BackwardFp, DV>;
    using QkLoader = NumberLoader<T, typename OfQk::KTile, THREADS, WHOLE_CHUNKS>;
    using VLoader = NumberLoader<T, typename OfV::KTile, THREADS, WHOLE_CHUNKS>;
    using OwnQkLoader = NumberLoader<T, typename OfQk::QTile, THREADS, WHOLE_CHUNKS>;
    using OwnVLoader = NumberLoader<T, typename OfV::QTile, THREADS, WHOLE_CHUNKS>;
    // Offsets in shared memory: own Q and dO, or K and V; then of each stage K and V, or Q and dO, and those rows' numbers [N][4].
    static constexpr int OWN_V_SMEM = OfQk::QTile::BYTES, STAGES_SMEM = OWN_V_SMEM + OfV::QTile::BYTES;
    static constexpr int V_SMEM = OfQk::KTile::BYTES, NUMBERS_SMEM = V_SMEM + OfV::KTile::BYTES;  // of a stage
    static constexpr int STAGE_BYTES = NUMBERS_SMEM + (OF_KEYS ? 4 * N * int(sizeof(T)) : 0);
    static constexpr int SMEM_BYTES = STAGES_SMEM + STAGES * STAGE_BYTES;
    static_assert(M % (16 * WARPS_) == 0 && WARP_ROWS <= 32 && (STAGES == 1 || STAGES == 2), "");
};

// Where a thread stands, worked out anew for every step: it need not stay in registers meanwhile.
template <class C> struct Lane {
    int lane, warp_row;  // warp_row: the warp's first row or key, counted from the block's

    __device__ __forceinline__ Lane() {
        const int thread = thread_index();
        lane = thread % 32, warp_row = thread / 32 * C::WARP_ROWS;
    }

    __device__ __forceinline__ int row() const { return warp_row + lane / 4; }  // of the lane's, the first
};

// The raw scores and dP of a warp and a tile.
template <class C>
__device__ __forceinline__ void raw_scores(
    typename C::T (&s)[C::MT][C::NT][4], typename C::T (&dp)[C::MT][C::NT][4], u32 smem, u32 stage_smem, const Lane<C>& at, bool with_dp
) {
#pragma unroll
    for (int i = 0; i < C::MT * C::NT * 4; ++i) s[i / (4 * C::NT)][i / 4 % C::NT][i % 4] = dp[i / (4 * C::NT)][i / 4 % C::NT][i % 4] = 0;
    Scores<C, C::DQK, typename C::Kind>::make(s, smem + at.warp_row * C::OfQk::QTile::ROW_BYTES, stage_smem, at.lane);
    if (with_dp)
        Scores<C, C::DV, typename C::Kind>::make(
            dp, smem + C::OWN_V_SMEM + at.warp_row * C::OfV::QTile::ROW_BYTES, stage_smem + C::V_SMEM, at.lane);
}

// Steps 0 to count - 1: load(step, shared memory of its stage), later work(step, the same). With one stage, other blocks of the
// multiprocessor hide the loads. Before the first step what was loaded earlier has arrived as well.
template <class C, class Load, class Work> __device__ __forceinline__ void walk(int count, u32 smem, Load load, Work work) {
    const auto stage = [&](int step) { return smem + C::STAGES_SMEM + step % C::STAGES * C::STAGE_BYTES; };
    if (count > 0) load(0, stage(0));
    copies_commit();
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        copies_wait<0>();
        __syncthreads();
        if (C::STAGES == 2 && step + 1 < count) load(step + 1, stage(step + 1));
        copies_commit();
        work(step, stage(step));
        if (C::STAGES == 1) {
            __syncthreads();
            if (step + 1 < count) load(step + 1, stage(step + 1));
            copies_commit();
        }
    }
    copies_wait<0>();
    __syncthreads();  // the stages are free
}
