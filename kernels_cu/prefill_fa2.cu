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
#include "include/layout.cuh"
#include "include/mask.cuh"
#include "include/mma.cuh"
#include "include/score.cuh"
#include "include/softmax_state.cuh"

// What an instance fixes. STAGES: tiles of K and of V in shared memory. LOAD: see TileLoader.
template <class In_, class Out_, int DQK_, int DV_, int M_, int N_, int WARPS_, int STAGES_, bool Q_IN_RMEM_, int LOAD_, int MASK_, int SCORE_>
struct PrefillFa2 {
    using In = In_;
    using Out = Out_;
    static constexpr int DQK = DQK_, DV = DV_, M = M_, N = N_, STAGES = STAGES_, LOAD = LOAD_, MASK = MASK_, SCORE = SCORE_;
    static constexpr bool Q_IN_RMEM = Q_IN_RMEM_;
    static constexpr int THREADS = 32 * WARPS_;
    static constexpr int WARP_ROWS = M / WARPS_;
    static constexpr int MT = WARP_ROWS / 16, NT = N / 8, OT = DV / 8;  // mma tiles of a warp: rows, keys, value columns
    using QTile = SmemTile<M, DQK>;
    using KTile = SmemTile<N, DQK>;
    using VTile = SmemTile<N, DV>;
    using OTile = SmemTile<M, DV>;
    static constexpr int K_SMEM = QTile::BYTES, V_SMEM = K_SMEM + STAGES * KTile::BYTES;  // offsets
    static constexpr int PIPELINE_BYTES = V_SMEM + STAGES * VTile::BYTES;
    static constexpr int STAGING_BYTES = SizeOf<Out>::bytes == 2 ? OTile::BYTES : 0;  // of the epilogue, in the same memory
    static constexpr int SMEM_BYTES = PIPELINE_BYTES > STAGING_BYTES ? PIPELINE_BYTES : STAGING_BYTES;
    static_assert(M % (16 * WARPS_) == 0 && (STAGES == 1 || STAGES == 2), "");
};

// S_rmem = Q K^T of a warp: 16 head columns at a time.
template <class C>
__device__ __forceinline__ void multiply_qk(
    float (&S_rmem)[C::MT][C::NT][4], const u32 (&Q_rmem)[C::Q_IN_RMEM ? C::DQK / 16 : 1][C::MT][4], u32 Q_frag, u32 K_frag
) {
#pragma unroll
    for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
            for (int c = 0; c < 4; ++c) S_rmem[mt][nt][c] = 0.0f;
#pragma unroll
    for (int k = 0; k < C::DQK / 16; ++k) {
        u32 a[C::MT][4];
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt) {
            if constexpr (C::Q_IN_RMEM) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[mt][i] = Q_rmem[k][mt][i];
            } else {
                ldmatrix_x4(a[mt], C::QTile::fragment(Q_frag, mt, k));
            }
        }
#pragma unroll
        for (int n = 0; n < C::N / 16; ++n) {
            u32 b[4];  // 16 keys x 16 columns
            ldmatrix_x4(b, C::KTile::fragment(K_frag, n, k));
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                mma_16x8x16<typename C::In>(S_rmem[mt][2 * n], a[mt], b[0], b[1]);
                mma_16x8x16<typename C::In>(S_rmem[mt][2 * n + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

// O_rmem += P V of a warp: 16 keys at a time; the weights are rounded to 16 bits where they lie.
template <class C>
__device__ __forceinline__ void multiply_pv(float (&O_rmem)[C::MT][C::OT][4], const float (&P_rmem)[C::MT][C::NT][4], u32 V_frag) {
    using In = typename C::In;
#pragma unroll
    for (int k = 0; k < C::N / 16; ++k) {
        u32 a[C::MT][4];
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &P_rmem[mt][2 * k + i / 2][i % 2 * 2];
                a[mt][i] = pack2<In>(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < C::DV / 16; ++n) {
            u32 b[4];  // 16 keys x 16 columns, transposed on the way
            ldmatrix_x4_transposed(b, C::VTile::fragment(V_frag, k, n));
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                mma_16x8x16<In>(O_rmem[mt][2 * n], a[mt], b[0], b[1]);
                mma_16x8x16<In>(O_rmem[mt][2 * n + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

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

// The tiles of keys and values that a block walks through, from `last` down to `first`, and their way into shared memory. Every
// thread copies its share of each.
template <class C> struct KeyValuePipeline {
    TileLoader<typename C::KTile, C::THREADS, C::LOAD> k_loader;
    TileLoader<typename C::VTile, C::THREADS, C::LOAD> v_loader;
    u32 K_smem, V_smem;
    KeyRange keys;
    int first, last;

    __device__ __forceinline__ KeyValuePipeline(const PrefillParams& p, const WorkItem& work, const Sequence& seq, KeyRange keys, u32 smem)
        : k_loader(p.k, p.k_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim),
          v_loader(p.v, p.v_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim_v),
          K_smem(smem + C::K_SMEM), V_smem(smem + C::V_SMEM), keys(keys), first(keys.begin / C::N), last((keys.end - 1) / C::N) {}

    __device__ __forceinline__ u32 stage(int tile) const { return C::STAGES == 2 ? tile & 1 : 0; }

    __device__ __forceinline__ void load_k(int tile) const {
        k_loader.load(K_smem + stage(tile) * C::KTile::BYTES, tile * C::N, keys.begin, keys.end);
    }

    __device__ __forceinline__ void load_v(int tile) const {
        v_loader.load(V_smem + stage(tile) * C::VTile::BYTES, tile * C::N, keys.begin, keys.end);
    }

    // Load the first tile, together with whatever the thread has begun to copy.
    __device__ __forceinline__ void start() const {
        load_k(last);
        copies_commit();
        if (C::STAGES == 2) load_v(last), copies_commit();
    }

    // Wait for K (with 2 stages, also for V) of a tile, and start what takes the place of the tile before.
    __device__ __forceinline__ void begin(int tile) const {
        copies_wait<0>();
        __syncthreads();
        if (C::STAGES == 1) load_v(tile), copies_commit();
        else if (tile > first) load_k(tile - 1), load_v(tile - 1), copies_commit();
    }

    // Nobody needs K of the tile any more: with 1 stage, wait for V and load the next K.
    __device__ __forceinline__ void middle(int tile) const {
        if (C::STAGES == 2) return;
        copies_wait<0>();
        __syncthreads();
        if (tile > first) load_k(tile - 1), copies_commit();
    }

    // A tile that this warp has no use for, but others have.
    __device__ __forceinline__ void pass(int tile) const {
        begin(tile);
        middle(tile);
    }
};

template <class C> __device__ __forceinline__ void prefill_fa2(const PrefillParams& p, void* smem) {
    const WorkItem work = work_item(p, blockIdx.x);
    const Sequence seq = sequence(p, work.batch);
    const int first_row = work.m_tile * C::M;
    if (first_row >= seq.q_length) return;
    const int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * C::WARP_ROWS;

    float O_rmem[C::MT][C::OT][4];
#pragma unroll
    for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
        for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
            for (int c = 0; c < 4; ++c) O_rmem[mt][ot][c] = 0.0f;
    SoftmaxState<2 * C::MT> state;
    state.init();

    Visibility<C::MASK> visible(p, seq);
    const int position = first_row + seq.position;  // of the block's first row
    const KeyRange keys = visible.of_any(position, position + min(C::M, seq.q_length - first_row) - 1);
    visible.narrow(keys);
    const u32 Q_smem = smem_address(smem);
    if (!keys.empty()) {
        const TileLoader<typename C::QTile, C::THREADS, C::LOAD> q_loader(
            p.q, p.q_stride, work.batch, seq.q_begin, work.head, p.head_dim);
        const KeyValuePipeline<C> pipeline(p, work, seq, keys, Q_smem);
        const ScoreTransform<C::SCORE> score(p, work.batch, work.head);
        q_loader.load(Q_smem, first_row, 0, seq.q_length);
        pipeline.start();

        // Where this lane's rows of ldmatrix begin: A and transposed B take 16 rows x 2 chunks, B 2 chunks of 8 rows, then of the next 8.
        const u32 Q_frag = Q_smem + C::QTile::offset(warp_row + lane % 16, lane / 16);
        u32 Q_rmem[C::Q_IN_RMEM ? C::DQK / 16 : 1][C::MT][4];
        if constexpr (C::Q_IN_RMEM) {
            copies_wait<C::STAGES - 1>();
            __syncthreads();
#pragma unroll
            for (int k = 0; k < C::DQK / 16; ++k)
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) ldmatrix_x4(Q_rmem[k][mt], C::QTile::fragment(Q_frag, mt, k));
        }

        // Of the block's tiles, a warp computes those that its own rows may see.
        int tile = pipeline.last, first = pipeline.first;
        if constexpr ((C::MASK & MASK_BAND) != 0) {
            const KeyRange own = visible.of_any(position + warp_row, position + warp_row + C::WARP_ROWS - 1);
            const int last = own.empty() ? -1 : (own.end - 1) / C::N;
            first = max(first, own.begin / C::N);
#pragma unroll 1
            for (; tile >= pipeline.first && tile > last; --tile) pipeline.pass(tile);
        }
#pragma unroll 1
        for (; tile >= first; --tile) {
            pipeline.begin(tile);
            const u32 stage = pipeline.stage(tile);
            // Where the warp's rows and the lane's share of S and of ldmatrix are; worked out here, to spare registers.
            const int here = thread_index(), key = tile * C::N, lane_key = key + here % 4 * 2;
            const int warp_position = position + here / 32 * C::WARP_ROWS, lane_position = warp_position + here % 32 / 4;
            const u32 K_frag = pipeline.K_smem + C::KTile::offset(here / 16 % 2 * 8 + here % 8, here / 8 % 2);
            const u32 V_frag = pipeline.V_smem + C::VTile::offset(here % 16, here / 16 % 2);
            float S_rmem[C::MT][C::NT][4];
            multiply_qk<C>(S_rmem, Q_rmem, Q_frag, K_frag + stage * C::KTile::BYTES);
            pipeline.middle(tile);
            apply_score<C::SCORE>(S_rmem, score, lane_position, lane_key);
            if (!visible.all(warp_position, warp_position + C::WARP_ROWS - 1, key, key + C::N))
                apply_mask<C::MASK>(S_rmem, visible, lane_position, lane_key);
            state.update(S_rmem, O_rmem, p.logit_scale);
            multiply_pv<C>(O_rmem, S_rmem, V_frag + stage * C::VTile::BYTES);
        }
        if constexpr ((C::MASK & MASK_BAND) != 0) {
#pragma unroll 1
            for (; tile >= pipeline.first; --tile) pipeline.pass(tile);
        }
    }
    finish<C>(p, state, O_rmem, Q_smem);
}
