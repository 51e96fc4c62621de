// FlashAttention-2's forward pass with mma.sync, for sm_75 and every later GPU.
//
// A block computes M query rows of one head; each of its warps owns M / WARPS of them and all the keys, so that softmax needs
// no other warp; or (GROUPS = 2, for large heads) two warps own twice as many rows together, and of the keys and the value columns
// half each. Keys and values come in tiles of N rows, from the last visible to the first; a tile that no row of the block may
// see is never loaded, and only tiles that some row sees in part are masked.
//
// Costs, per warp and tile of 32 rows x 64 keys at D = 128: 256 mma (2 MFLOP), 80 ldmatrix, 16 cp.async; softmax takes 4.5 issue slots
// for each of a lane's 64 scores (max, fma, ex2, add, half a conversion), 288, and 128 to rescale. Together about 900 issue slots, while
// at 8 clocks an mma the tensor cores are busy for 2,048 clocks: they are the ceiling as long as two warps a scheduler hide each
// other's softmax. Hence two blocks of 4 warps a multiprocessor, and at most 255 registers a thread.
//
// At D = 256 the 255 registers hold O of 16 rows only, and each K and V that a warp reads from shared memory (128 bytes a clock) serves
// 16 rows: 144 ldmatrix a warp for 256 mma, with the copies 5,632 clocks of the 4,096 that the mma of 8 warps take. GROUPS = 2 reads
// 32 rows of Q, half of K, all of P and half of V: 104 ldmatrix, 4,352 clocks, for two more barriers a tile.
#include "include/warp_attention.cuh"

// What an instance fixes. STAGES: tiles of K and of V in shared memory. LOAD: see TileLoader.
template <
    class In_, class Out_, int DQK_, int DV_, int M_, int N_, int WARPS_, int STAGES_, int GROUPS_, bool Q_IN_RMEM_, int LOAD_, int MASK_,
    int SCORE_, int PAGE_ROWS_ = 0, bool FLAT_ = false>
struct PrefillFa2 {
    using In = In_;
    using Out = Out_;
    static constexpr int DQK = DQK_, DV = DV_, M = M_, N = N_, STAGES = STAGES_, LOAD = LOAD_, MASK = MASK_, SCORE = SCORE_;
    static constexpr int PAGE_ROWS = PAGE_ROWS_;  // what page sizes are multiples of; 0: there are no pages
    static constexpr bool Q_IN_RMEM = Q_IN_RMEM_, PAGED = PAGE_ROWS > 0, FLAT = FLAT_;
    static constexpr int MASK_BYTES = (MASK & MASK_ARRAY) != 0 ? 1 : 0, BIAS_BYTES = bias_bytes(SCORE);  // of an element, if there is one
    static constexpr bool HIDES = MASK_BYTES + BIAS_BYTES != 0;  // an array can hide any key from any row
    static constexpr bool CUTS = HIDES || MASK != MASK_LENGTH;   // rows of a block may see different keys
    using Order = KeyOrder<HIDES>;
    static constexpr int THREADS = 32 * WARPS_;
    static constexpr int GROUPS = GROUPS_;
    static constexpr int WARP_ROWS = M * GROUPS / WARPS_, KEYS = N / GROUPS;  // rows and keys whose scores a warp computes
    static constexpr int MT = WARP_ROWS / 16, NT = KEYS / 8, OT = DV / GROUPS / 8;  // mma tiles of a warp: rows, keys, value columns
    // Few registers are left beside S and O: what follows from the thread's number is worked out anew for every tile.
    static constexpr bool ROOM = SCORE == SCORE_PLAIN && LOAD > 2 && !HIDES && !PAGED && (GROUPS == 1 || (MASK & MASK_LEFT) == 0);
    static constexpr bool TIGHT = 4 * MT * (NT + OT) >= (ROOM ? 192 : 128);
    using QTile = SmemTile<M, DQK>;
    using KTile = SmemTile<N, DQK>;
    using VTile = SmemTile<N, DV>;
    using PTile = SmemTile<M, (GROUPS > 1 ? N : 64)>;  // only there if warps share rows
    using OTile = SmemTile<M, DV>;
    static constexpr int K_SMEM = QTile::BYTES, V_SMEM = K_SMEM + STAGES * KTile::BYTES;  // offsets
    static constexpr int P_SMEM = V_SMEM + STAGES * VTile::BYTES, TOP_SMEM = P_SMEM + (GROUPS > 1 ? PTile::BYTES : 0);
    static constexpr int ROWS_SMEM = TOP_SMEM + (GROUPS > 1 ? 4 * GROUPS * M : 0);
    static constexpr int PIPELINE_BYTES = ROWS_SMEM + KeysValues<PrefillFa2>::BYTES;
    static constexpr int SMEM_BYTES = PIPELINE_BYTES > OTile::BYTES ? PIPELINE_BYTES : OTile::BYTES;  // out passes through it in the end
    static_assert(MT * 16 * WARPS_ == M * GROUPS && NT % 2 == 0 && OT % 2 == 0 && (STAGES == 1 || STAGES == 2), "");
    static_assert(GROUPS == 1 || OTile::BYTES <= TOP_SMEM, "out is staged while sums are still being read");
};

// All tiles of the block. A warp computes those that its own rows may see.
template <class C> __device__ __forceinline__ void walk(Block<C>& block, WarpAttention<C>& warp) {
    int tile = block.last, first = block.first;
    if constexpr ((C::MASK & MASK_BAND) != 0) {
        const int own_position = block.position + warp.row(threadIdx.x);
        const KeyRange own = block.visible.of_any(own_position, own_position + C::WARP_ROWS - 1);
        const int last = own.empty() ? -1 : (own.end - 1) / C::N;
        first = max(first, own.begin / C::N);
#pragma unroll 1
        for (; tile >= block.first && tile > last; --tile) block.pass(thread_index<C::TIGHT>(), tile);
    }
    if (C::HIDES && tile >= first) warp.fetch(block, thread_index(), tile);
#pragma unroll 1
    for (; tile >= first; --tile) {
        const int thread = thread_index<C::TIGHT>();
        block.begin(thread, tile);
        warp.scores(block, thread, tile);
        block.middle(thread, tile);
        warp.softmax(block, thread, tile);
        block.exchange();
        warp.values(block, thread, tile, tile > first);
        block.end(thread, tile);
    }
    if constexpr ((C::MASK & MASK_LEFT) != 0) {
#pragma unroll 1
        for (; tile >= block.first; --tile) block.pass(thread_index<C::TIGHT>(), tile);
    }
}

// Divide by the sums; write out and log-sum-exp. Where the rows are is worked out again: registers are scarce in the main loop.
// No warp needs shared memory for anything else any more.
template <class C> __device__ __forceinline__ void finish(const PrefillParams& p, WarpAttention<C>& warp, u32 smem, bool careful) {
    auto& state = warp.state;
    const WorkItem work = work_item<C::FLAT>(p, block_index());
    const Sequence seq = sequence(p, work.batch);
    const int first_row = work.m_tile * C::M, rows = min(C::M, seq.q_length - first_row);
    const int thread = thread_index(), lane = thread % 32, warp_row = warp.row(thread), group = warp.group(thread);
    float inverse[2 * C::MT];
    bool empty[2 * C::MT], any_empty = false;
#pragma unroll
    for (int r = 0; r < 2 * C::MT; ++r) {
        float factor = 1.0f, sink_factor;
        empty[r] = state.sum[r] == 0.0f;  // NaN is not empty
        any_empty = any_empty || empty[r];
        if (p.sinks) state.merge(r, p.sinks[work.head], 1.0f, factor, sink_factor);
        inverse[r] = factor / state.sum[r];
    }
    const bool some_empty = __any_sync(0xffffffffu, any_empty);
#pragma unroll
    for (int r = 0; r < 2 * C::MT; ++r)
#pragma unroll
        for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = warp.O_rmem[r / 2][ot][r % 2 * 2 + c];
                x *= inverse[r];
                if (some_empty && empty[r]) x = 0.0f;
            }
    store_fragments<typename C::Out, typename C::OTile, 2 * C::GROUPS, true>(warp.O_rmem, smem, warp_row, 2 * group, lane);
    __syncthreads();
    if (C::CUTS && careful) {
        Block<C>(p, work, seq, smem, true).add_not_finite(thread, rows);
        __syncthreads();
    }
    const i64 out_offset = work.batch * p.out_stride.batch + (seq.q_begin + first_row) * p.out_stride.row + work.head * p.out_stride.head;
    store_rows<typename C::OTile, C::THREADS>(
        smem, static_cast<u16*>(p.out) + out_offset, p.out_stride, rows, p.head_dim_v, p.out_vector);
    if (p.lse && group == 0) {
        const i64 offset = work.batch * p.lse_stride.batch + work.head * p.lse_stride.head;
#pragma unroll
        for (int first = 0; first < 2 * C::MT; first += 4) {  // the four lanes of a row have its numbers alike: each takes another row
            const int row = warp_row + 8 * (first + lane % 4) + lane / 4;
            if (first + lane % 4 < 2 * C::MT && row < rows)
                p.lse[offset + (seq.q_begin + first_row + row) * p.lse_stride.row] = warp.lse(first, lane % 4);
        }
    }
}

template <class C> __device__ __forceinline__ void prefill_fa2(const PrefillParams& p, unsigned char* smem) {
    WarpAttention<C> warp(p);
    bool careful = false;
    while (true) {
        // Which block this is is worked out for every walk: little of it need stay in registers.
        const WorkItem work = work_item<C::FLAT>(p, block_index());
        const Sequence seq = sequence(p, work.batch);
        const int first_row = work.m_tile * C::M;
        if (first_row >= seq.q_length) return;
        Block<C> block(p, work, seq, smem_address(smem), careful);
        if (block.visible.begin >= block.visible.end) break;
        const TileLoader<typename C::QTile, C::THREADS, C::LOAD> q_loader(p.q, p.q_stride, work.batch, seq.q_begin, work.head, p.head_dim);
        q_loader.load(thread_index(), block.smem, first_row, 0, seq.q_length);
        block.start(thread_index());
        if constexpr (C::Q_IN_RMEM) {
            copies_wait<C::STAGES - 1>();
            __syncthreads();
            warp.keep_q(block.smem, thread_index());
        }
        walk(block, warp);
        warp.share_sums(block.smem, thread_index());
        // Where rows see different keys, 0 * v of an infinite or NaN v may have reached rows that do not see it: once more, with care.
        const bool again = __syncthreads_or(C::CUTS && !careful && warp.not_finite());
        if (!C::CUTS || !again) {
            warp.gather_sums(block.smem, thread_index());
            break;
        }
        careful = true;
        warp.init();
    }
    finish(p, warp, smem_address(smem), careful);
}
