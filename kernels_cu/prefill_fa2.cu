// FlashAttention-2's forward pass with mma.sync, for sm_75 and every later GPU.
//
// A block computes M query rows of one head; each of its warps owns M / WARPS of them and all the keys, so that softmax needs
// no other warp. Keys and values come in tiles of N rows, from the last visible to the first; a tile that no row of the block may
// see is never loaded, and only tiles that some row sees in part are masked.
//
// Costs, per warp and tile of 32 rows x 64 keys at D = 128: 256 mma (1 MFLOP), 80 ldmatrix, 16 cp.async, and in softmax 4.5 issue
// slots a score (max, fma, ex2, add, half a conversion) = 288, and 128 to rescale: about 800 issue slots, where the tensor cores are
// busy for about 1,600 clocks. Shared memory delivers 40 KiB for it (80 ldmatrix of 512 bytes, 320 clocks of the multiprocessor for
// each of its 8 warps). So tensor cores are the ceiling as long as two warps a scheduler hide each other's softmax: two blocks
// of 4 warps a multiprocessor, hence at most 256 registers.
#include "include/epilogue.cuh"
#include "include/walk.cuh"

// What an instance fixes. STAGES: tiles of K and of V in shared memory. ALTERNATE: see below. LOAD: see TileLoader.
template <
    class In_, class Out_, int DQK_, int DV_, int M_, int N_, int WARPS_, int STAGES_, bool ALTERNATE_, bool Q_IN_RMEM_, int LOAD_, int MASK_,
    int SCORE_>
struct PrefillFa2 {
    using In = In_;
    using Out = Out_;
    static constexpr int DQK = DQK_, DV = DV_, M = M_, N = N_, STAGES = STAGES_, LOAD = LOAD_, MASK = MASK_, SCORE = SCORE_;
    static constexpr bool ALTERNATE = ALTERNATE_, Q_IN_RMEM = Q_IN_RMEM_;
    static constexpr int THREADS = 32 * WARPS_;
    static constexpr int FIRST_LOADER = ALTERNATE ? THREADS / 2 : 0;  // threads from here on copy keys and values
    static constexpr int WARP_ROWS = M / WARPS_;
    static constexpr int MT = WARP_ROWS / 16, NT = N / 8, OT = DV / 8;  // mma tiles of a warp: rows, keys, value columns
    using QTile = SmemTile<M, DQK>;
    using KTile = SmemTile<N, DQK>;
    using VTile = SmemTile<N, DV>;
    using OTile = SmemTile<M, DV>;
    static constexpr int K_SMEM = QTile::BYTES, V_SMEM = K_SMEM + STAGES * KTile::BYTES;  // offsets
    static constexpr int PIPELINE_BYTES = V_SMEM + STAGES * VTile::BYTES;
    static constexpr int STAGING_BYTES = SizeOf<Out>::bytes == 2 ? OTile::BYTES : 0;  // of the epilogue, in the same memory
    static constexpr int BLOCK_SMEM = PIPELINE_BYTES > STAGING_BYTES ? PIPELINE_BYTES : STAGING_BYTES;
    static constexpr int SMEM_BYTES = BLOCK_SMEM + (ALTERNATE ? 128 : 0);  // there, Block lies in shared memory: it spares registers
    static_assert(M % (16 * WARPS_) == 0 && (STAGES == 2 || (STAGES == 1 && !ALTERNATE)), "");
};

// Divide by the sums; write out and log-sum-exp. Where the rows are is worked out again: registers are scarce in the main loop.
template <class C>
__device__ __forceinline__ void finish(const PrefillParams& p, SoftmaxState<2 * C::MT>& state, float (&O_rmem)[C::MT][C::OT][4], u32 smem) {
    const WorkItem work = work_item(p, block_index());
    const Sequence seq = sequence(p, work.batch);
    const int first_row = work.m_tile * C::M, rows = min(C::M, seq.q_length - first_row);
    const int lane = thread_index() % 32, warp_row = thread_index() / 32 * C::WARP_ROWS;
#pragma unroll
    for (int r = 0; r < 2 * C::MT; ++r) {
        state.reduce(r);
        float factor = 1.0f, sink_factor;
        const bool empty = state.sum[r] == 0.0f;  // NaN is not empty
        if (p.sinks) state.merge(r, p.sinks[work.head], 1.0f, factor, sink_factor);
        const float inverse = factor / state.sum[r];
#pragma unroll
        for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = O_rmem[r / 2][ot][r % 2 * 2 + c];
                x = empty ? 0.0f : x * inverse;
            }
        const int row = warp_row + 8 * r + lane / 4;
        if (p.lse && lane % 4 == 0 && row < rows)
            p.lse[work.batch * p.lse_stride.batch + work.head * p.lse_stride.head + (seq.q_begin + first_row + row) * p.lse_stride.row] =
                state.finish(r);
    }

    const i64 out_offset = work.batch * p.out_stride.batch + (seq.q_begin + first_row) * p.out_stride.row + work.head * p.out_stride.head;
    if constexpr (SizeOf<typename C::Out>::bytes == 2) {
        __syncthreads();  // the staging lies over Q, K and V
        store_rows_16bit<typename C::Out, typename C::OTile, C::THREADS>(
            O_rmem, smem, static_cast<u16*>(p.out) + out_offset, p.out_stride, rows, p.head_dim_v, p.out_vector, warp_row, lane);
    } else {
        store_rows_fp32(O_rmem, static_cast<float*>(p.out) + out_offset, p.out_stride, rows, p.head_dim_v, warp_row, lane);
    }
}

template <bool ALTERNATE, class C> struct WalkOf { using type = WalkTogether<C>; };
template <class C> struct WalkOf<true, C> { using type = WalkInTurns<C>; };

template <class C> __device__ __forceinline__ void prefill_fa2(const PrefillParams& p, unsigned char* smem) {
    using Walk = typename WalkOf<C::ALTERNATE, C>::type;
    const WorkItem work = work_item(p, blockIdx.x);
    const Sequence seq = sequence(p, work.batch);
    const int first_row = work.m_tile * C::M;
    if (first_row >= seq.q_length) return;

    Visibility<C::MASK> visible(p, seq);
    const int position = first_row + seq.position, rows = min(C::M, seq.q_length - first_row);
    const KeyRange keys = visible.of_any(position, position + rows - 1);
    visible.narrow(keys);
    WarpAttention<C> warp(p, smem_address(smem));
    if (!keys.empty()) {
        const TileLoader<typename C::QTile, 0, C::THREADS, C::LOAD> q_loader(p.q, p.q_stride, work.batch, seq.q_begin, work.head, p.head_dim);
        const Block<C> block(p, work, seq, visible);
        q_loader.load(warp.smem, first_row, 0, seq.q_length);
        Walk::start(block, warp.smem);
        const Block<C>* agreed = &block;
        if constexpr (C::ALTERNATE) {
            static_assert(sizeof(Block<C>) <= C::SMEM_BYTES - C::BLOCK_SMEM, "");
            agreed = reinterpret_cast<const Block<C>*>(smem + C::BLOCK_SMEM);
            if (threadIdx.x == 0) *reinterpret_cast<Block<C>*>(smem + C::BLOCK_SMEM) = block;
        }
        if constexpr (C::Q_IN_RMEM) {
            copies_wait<C::STAGES - 1>();
            __syncthreads();
            warp.keep_q();
        }
        // Of the block's tiles, a warp computes those that its own rows may see.
        int first = block.first, last = block.last;
        if constexpr ((C::MASK & MASK_BAND) != 0) {
            const int own_position = position + warp.first_row();
            const KeyRange own = visible.of_any(own_position, own_position + C::WARP_ROWS - 1);
            first = max(first, own.begin / C::N);
            last = own.empty() ? -1 : (own.end - 1) / C::N;
        }
        Walk::run(*agreed, warp, block.first, block.last, first, last);
    }
    finish<C>(p, warp.state, warp.O_rmem, warp.smem);
}
