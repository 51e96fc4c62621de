// FlashAttention-2's forward pass in float32 and float64, for sm_75 and every later GPU.
//
// A block computes M query rows of one head; each of its warps owns 16 or 32 of them and all the keys, so that softmax needs no other
// warp. Keys and values come in tiles of N rows, from the last visible to the first. What multiplies is a parameter (Kind); masks,
// scores and softmax are those of the 16-bit kernels, in float32 or float64.
//
// Few queries over many keys are the same with one warp a block and parts of the keys (PARTS): reading takes the time, and to hide it
// many small blocks are needed.
//
// Costs, per warp and tile of 16 rows x 32 keys at D = 128 (0.26 MFLOP), on sm_90; shared memory: 32 + 64 loads of 512 bytes, 4 clocks
// each of a unit that four warps share. Global memory is no limit: a block of 128 rows does 32 FLOP for each byte of K and V it reads.
// Measured on an H200 at 8,192 keys, D = 64 and 128.
//   Tf32x3  384 mma of 8 clocks if float32's TF32 runs at half of the rate of wgmma, as 16-bit mma.sync does: 3,072. 2,280 issue slots,
//           of them 768 to split K and V into two parts, 320 sums, 300 softmax; 32 rows a warp halve those 768. At most 80 TFLOP/s;
//           45 to 55 expected, 57 measured, and 52 with 16 rows a warp, which D = 128 has registers for.
//   Tf32    128 mma, 1,024 clocks; some 1,500 slots with K and V rounded in registers, which costs less than one more pass over shared
//           memory. At most 240; 120 to 150 expected, 141 and 139 measured: two warps a scheduler, which is what the registers allow, and
//           each of them multiplies or takes exponentials, so that the tensor cores wait for a part of the time.
//   Dmma    64 mma of 64 clocks, 4,096; exponentials and sums take 16 slots of 2 clocks for each of a lane's 16 scores and are in the
//           same unit, 600. At most 55; 35 to 45 expected, 34 and 40 measured.
//   Simt    4,096 multiply-adds of 1 clock (float32) and 480 loads and shuffles. At most 60; 35 to 45 expected, 35 and 36 measured.
#include "include/fp_exact.cuh"
#include "include/fp_saved.cuh"
#include "include/fp_simt.cuh"

// A chunk of shared memory rounded for tensor cores.
struct RoundChunk {
    __device__ __forceinline__ void operator()(u32 smem) const {
#if CUFLASH_ARCH >= 800
        const Chunk<float> c = load_chunk<float>(smem);
        store_smem(smem, make_uint4(to_tf32(c.x[0]), to_tf32(c.x[1]), to_tf32(c.x[2]), to_tf32(c.x[3])));
#endif
    }
};

// What an instance fixes. DV: value columns of a block; SLICES blocks do all of them, each with the scores anew. STAGES: tiles of K and
// of V in shared memory. WHOLE_CHUNKS: see NumberLoader. PAGED: keys and values lie in pages.
// PARTS: keys are split over the grid, and combine_fp.cu merges the results of the parts.
template <
    class Kind_, class Real_, class Out_, int DQK_, int DV_, int SLICES_, int M_, int N_, int WARPS_, int STAGES_, bool WHOLE_CHUNKS_,
    int MASK_, int SCORE_, bool PAGED_ = false, bool PARTS_ = false>
struct PrefillFp {
    using Kind = Kind_;
    using Real = Real_;
    using T = typename Real::T;
    using Out = Out_;
    static constexpr int DQK = DQK_, DV = DV_, SLICES = SLICES_, M = M_, N = N_, STAGES = STAGES_, MASK = MASK_, SCORE = SCORE_;
    using Params = typename Choose<PARTS_, PartParams, PrefillParams>::Type;
    static constexpr bool WHOLE_CHUNKS = WHOLE_CHUNKS_, PAGED = PAGED_, PARTS = PARTS_;
    static constexpr int THREADS = 32 * WARPS_;
    static constexpr int WARP_ROWS = M / WARPS_;
    static constexpr int MT = WARP_ROWS / 16, NT = N / 8, OT = DV / 8;  // 16 x 8 tiles of a warp: rows, keys, value columns
    static constexpr bool ROUNDS = is_tf32<Kind>;  // queries are rounded in shared memory, once
    static constexpr int QK_UNROLL = ROUNDS && DQK % 64 == 0 ? 2 : 1, SIMT_UNROLL = 2, COUNT = 4 / MT;
    static constexpr bool SPLITS = is_tf32x3<Kind>;
    using QTile = NumberTile<T, M, DQK>;
    using KTile = NumberTile<T, N, DQK>;
    using VTile = NumberTile<T, N, DV>;
    using QLoader = NumberLoader<T, QTile, THREADS, WHOLE_CHUNKS>;
    static constexpr int K_SMEM = QTile::BYTES, V_SMEM = K_SMEM + STAGES * KTile::BYTES;  // offsets
    static constexpr int SAVED_SMEM = V_SMEM + STAGES * VTile::BYTES;
    static constexpr int SMEM_BYTES = SAVED_SMEM + (sizeof(T) == 4 ? 8 * M : 0);
    static constexpr bool SAVES = sizeof(T) == 4 && same<Out, T>;  // see fp_saved.cuh; narrower results have no use for it
    static constexpr int SAVE_TILES = (is_simt<Kind> ? 512 : 1024) / N;
    static_assert(M % (16 * WARPS_) == 0 && (STAGES == 1 || STAGES == 2), "");
};

// What all threads of a block agree on, with the way of keys and values into shared memory. Tiles go from `last` down to `first`.
template <class C> struct FpBlock {
    using KLoader = FpKvLoader<C, typename C::KTile, 0x7fff7fffu>;  // NaN in both types
    using VLoader = FpKvLoader<C, typename C::VTile, 0>;
    KLoader k_loader;
    VLoader v_loader;
    Visibility<C::MASK> visible;  // narrowed to the keys that some row of the block sees
    u32 smem;
    int position;  // of the first row
    int first, last;

    __device__ __forceinline__ FpBlock(const typename C::Params& p, const FpWork<C>& work, u32 smem)
        : k_loader(p, p.k, p.k_stride, work, work.seq, 0, p.head_dim),
          v_loader(p, p.v, p.v_stride, work, work.seq, work.first_column, p.head_dim_v - work.first_column),
          visible(p, work.seq), smem(smem), position(work.position()) {
        visible.narrow(work.keys(p));
        first = visible.begin / C::N;
        last = visible.end > visible.begin ? (visible.end - 1) / C::N : first - 1;
    }

    __device__ __forceinline__ u32 K_smem(int tile) const { return smem + C::K_SMEM + tile % C::STAGES * C::KTile::BYTES; }
    __device__ __forceinline__ u32 V_smem(int tile) const { return smem + C::V_SMEM + tile % C::STAGES * C::VTile::BYTES; }

    __device__ __forceinline__ void load_k(int thread, int tile) const {
        if (tile >= first) k_loader.load(thread, K_smem(tile), tile * C::N, visible.begin, visible.end);
        copies_commit();
    }

    __device__ __forceinline__ void load_v(int thread, int tile) const {
        if (tile >= first) v_loader.load(thread, V_smem(tile), tile * C::N, visible.begin, visible.end);
        copies_commit();
    }

    // Wait for K (with 2 stages, also for V) of a tile, and load what takes the place of the tile before.
    __device__ __forceinline__ void begin(int thread, int tile) const {
        copies_wait<0>();
        if (C::ROUNDS && tile == last) C::QLoader::for_own(thread, smem, RoundChunk());  // its own copies
        __syncthreads();
        if (C::STAGES == 1) load_v(thread, tile);
        else load_k(thread, tile - 1), load_v(thread, tile - 1);
    }

    // Nobody needs K of the tile any more: with 1 stage, wait for V and load the next K.
    __device__ __forceinline__ void middle(int thread, int tile) const {
        if (C::STAGES == 2) return;
        copies_wait<0>();
        __syncthreads();
        load_k(thread, tile - 1);
    }
};

// Where a warp stands at a tile.
template <class C> struct WarpStep {
    int thread, lane, row, position, key;  // row: the warp's first in the block; position: of that row
    bool needed;                           // some row of the warp sees some key of the tile

    __device__ __forceinline__ WarpStep(const FpBlock<C>& block, int thread, int tile)
        : thread(thread), lane(thread % 32), row(thread / 32 * C::WARP_ROWS), position(block.position + row), key(tile * C::N),
          needed(true) {
        if constexpr (C::MASK != MASK_LENGTH) {
            const KeyRange own = block.visible.of_any(position, position + C::WARP_ROWS - 1);
            needed = own.begin < key + C::N && key < own.end;
        }
    }
};

// Divide by the sums; write out and log-sum-exp. Rows that are not finite, or too small for TF32, are done again, one by one, and so are
// those without a weight that have seen logits which are too `low`, a bit for each of the lane's rows. Where the rows are is worked out
// again: registers are scarce in the main loop.
template <class C>
__device__ __forceinline__ void finish(
    const typename C::Params& p, SoftmaxState<2 * C::MT, typename C::Real>& state, typename C::T (&O_rmem)[C::MT][C::OT][4], u32 low
) {
    using T = typename C::T;
    using Out = typename C::Out;
    const FpWork<C> work(p, block_index());
    const auto out = work.out(p);
    constexpr int SIZE = Chunk<T>::SIZE;
    const int thread = thread_index(), lane = thread % 32, first_row = work.first_row() + thread / 32 * C::WARP_ROWS;
    u32 again = 0, tiny = 0;  // a bit for each of the warp's rows
    static_assert(C::WARP_ROWS <= 32, "");
#pragma unroll
    for (int r = 0; r < 2 * C::MT; ++r) {
        const int row = first_row + 8 * r + lane / 4;
        const bool here = row < work.seq.q_length;
        state.reduce(r);
        const bool empty = state.sum[r] == T(0);  // NaN is not empty
        const RowEnd end(p, work.sink(), state.reference[r], state.sum[r], weight_scale<typename C::Kind>);
        T watched = state.sum[r] * T(0), largest = 0;  // the first becomes NaN with a number that is not finite
#pragma unroll
        for (int ot = 0; ot < C::OT; ot += SIZE)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                T x[SIZE];
#pragma unroll
                for (int e = 0; e < SIZE; ++e) {
                    const T o = O_rmem[r / 2][ot + e][r % 2 * 2 + c];
                    watched += o * T(0);
                    x[e] = empty ? T(0) : end.weighted(o);
                    if constexpr (C::SPLITS) largest = C::Real::max(largest, C::Real::abs(x[e]));
                }
                const int column = 8 * ot + SIZE * (lane % 4 * 2 + c);
                if (here)
                    store_numbers<Out, T>(
                        out.at(row), out.column_stride, column, p.head_dim_v - work.first_column, out.vector, x);
            }
        if (here && lane % 4 == 0 && work.first_column == 0) work.put_statistics(p, row, end);
        const u32 bit = here && !empty ? 1u << (8 * r + lane / 4) : 0u;
        if (!(watched == T(0))) again |= bit;
        if (here && empty && (low >> r & 1) != 0) again |= 1u << (8 * r + lane / 4);
        if constexpr (C::SPLITS) {
            largest = C::Real::max(largest, shuffle_xor<1>(largest));
            largest = C::Real::max(largest, shuffle_xor<2>(largest));
            if (largest < TINY) tiny |= bit;
        }
    }
    if constexpr (C::SPLITS) {
        if (__any_sync(0xffffffffu, tiny != 0) && any_tiny_value<C>(p)) again |= tiny;
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) again |= __shfl_xor_sync(0xffffffffu, again, lanes);
    __syncwarp();  // what other lanes wrote to these rows is in its place
#pragma unroll 1
    for (int row = 0; row < C::WARP_ROWS; ++row)
        if ((again >> row & 1) != 0) exact_row<C>(p, row);
}

template <class C> __device__ __forceinline__ void prefill_fp(const typename C::Params& p, unsigned char* smem) {
    using T = typename C::T;
    const FpWork<C> work(p, blockIdx.x);
    const Sequence& seq = work.seq;
    if (work.first_row() >= seq.q_length || (work.first_column > 0 && work.first_column >= p.head_dim_v)) return;

    SoftmaxState<2 * C::MT, typename C::Real> state;
    T O_rmem[C::MT][C::OT][4], S_rmem[C::MT][C::NT][4];
    using Arrays = ScoreArrays<C::MASK, C::SCORE, typename C::Real>;
    u32 low = 0;
    state.init();
#pragma unroll
    for (int i = 0; i < C::MT * C::OT * 4; ++i) O_rmem[i / (4 * C::OT)][i / 4 % C::OT][i % 4] = 0;

    const FpBlock<C> block(p, work, smem_address(smem));
    if (block.first <= block.last) {
        const typename C::QLoader q_loader(p.q, p.q_stride, work.batch, seq.q_begin, work.head, 0, p.head_dim);
        q_loader.load(threadIdx.x, block.smem, work.first_row(), 0, seq.q_length);
        block.load_k(threadIdx.x, block.last);
        if (C::STAGES == 2) block.load_v(threadIdx.x, block.last);

        const ExactScore<C::SCORE, typename C::Real> score(p, work.batch, work.head);
        const Arrays arrays(p, seq, work.batch, work.head);
        const T scale = T(p.logit_scale64);
#pragma unroll 1
        for (int tile = block.last; tile >= block.first; --tile) {
            // What follows from the thread's number is worked out anew for every step: it need not stay in registers meanwhile.
            const WarpStep<C> before(block, thread_index(), tile);
            block.begin(before.thread, tile);
            if (before.needed) {
#pragma unroll
                for (int i = 0; i < C::MT * C::NT * 4; ++i) S_rmem[i / (4 * C::NT)][i / 4 % C::NT][i % 4] = 0;
                const u32 Q_smem = block.smem + before.row * C::QTile::ROW_BYTES;
                Products<C, typename C::Kind>::scores(S_rmem, Q_smem, block.K_smem(tile), before.lane);
            }
            const WarpStep<C> step(block, thread_index(), tile);
            block.middle(step.thread, tile);
            if (step.needed) {
                const int lane_position = step.position + step.lane / 4, lane_key = step.key + step.lane % 4 * 2;
                exact_score(S_rmem, score, arrays, lane_position, lane_key);
                if (!block.visible.all(step.position, step.position + C::WARP_ROWS - 1, step.key, step.key + C::N))
                    apply_mask<C::MASK, KeyOrder<false>>(S_rmem, block.visible, lane_position, lane_key);
                T top[2 * C::MT];
                state.tops(top, S_rmem);
                if constexpr (Arrays::BIASED) {
#pragma unroll
                    for (int r = 0; r < 2 * C::MT; ++r)
                        if (top[r] < Arrays::LOWEST && top[r] != -infinity()) low |= 1u << r;
                }
                state.update(S_rmem, O_rmem, top, scale);
                Products<C, typename C::Kind>::values(O_rmem, S_rmem, block.V_smem(tile), step.lane, block.v_loader.columns);
            }
            if constexpr (C::SAVES) {
                if (Saved<C>::due(tile, block.first))
                    Saved<C>::combine(p, smem_address(smem), tile + C::SAVE_TILES <= block.last, true, state, O_rmem);
            }
        }
        if constexpr (C::SAVES)
            if (block.first + C::SAVE_TILES <= block.last) Saved<C>::combine(p, smem_address(smem), true, false, state, O_rmem);
    }
    finish<C>(p, state, O_rmem, low);
}
