// FlashAttention-1's forward pass (Dao et al. 2022, arXiv 2205.14135) with mma.sync, for sm_75 and every later GPU: the step of the
// ladder between naive attention and prefill_fa2.cu, with the same copies, products and masks.
//
// A block computes M query rows of one head, and its warps share the keys: of every tile of N keys, each warp has N / WARPS and all
// the rows. So a warp knows softmax and output of its own keys alone. After every tile the warps show each other these partial
// results in shared memory, where K and V were, and add them up: each its share of the value columns, divided by the sums so far.
// (The paper walks over the queries for each tile of keys, with O in global memory in between; with O in registers the sums are the same.)
//
// Costs, per tile of 32 rows x 128 keys at D = 128 (2 MFLOP), of a block of 4 warps. Tensor cores: 128 mma a warp, 8 clocks each, 1,024.
// Shared memory, 128 bytes a clock: 48 ldmatrix a warp, 768 clocks; copies of K and V, 512; partial results, 64 KiB to write and to
// read, 1,024; together 2,304, so that the tensor cores are busy for less than half of the time at best. prefill_fa2 takes no
// partial results to shared memory, has K and V for 128 rows at once, and rescales O only where a maximum grows.
#include "include/block.cuh"
#include "include/epilogue.cuh"
#include "include/products.cuh"
#include "include/softmax_state.cuh"

// What an instance fixes. LOAD: see TileLoader.
template <class In_, class Out_, int DQK_, int DV_, int M_, int N_, int WARPS_, int LOAD_, int MASK_, int SCORE_> struct PrefillFa1 {
    using In = In_;
    using Out = Out_;
    static constexpr int DQK = DQK_, DV = DV_, M = M_, N = N_, WARPS = WARPS_, LOAD = LOAD_, MASK = MASK_, SCORE = SCORE_;
    static constexpr int THREADS = 32 * WARPS, KEYS = N / WARPS;  // keys of a tile that a warp has
    static constexpr int MT = M / 16, NT = KEYS / 8, OT = DV / 8;  // mma tiles of a warp: rows, keys, value columns
    static constexpr int OWN = OT / WARPS;  // of the value columns, those whose sums a warp has
    static constexpr int STAGES = 1, GROUPS = 1, MASK_BYTES = 0, BIAS_BYTES = 0;  // as Block and the products want to know
    static constexpr bool Q_IN_RMEM = false, PAGED = false, FLAT = false, HIDES = false;
    static constexpr bool CUTS = MASK != MASK_LENGTH;  // rows of a block may see different keys
    using Order = KeyOrder<false>;
    using QTile = SmemTile<M, DQK>;
    using KTile = SmemTile<N, DQK>;
    using VTile = SmemTile<N, DV>;
    using OTile = SmemTile<M, DV>;
    static constexpr int PARTIAL_BYTES = 4 * WARPS * M * DV, TILE_BYTES = KTile::BYTES + VTile::BYTES;
    static constexpr int K_SMEM = QTile::BYTES, V_SMEM = K_SMEM + KTile::BYTES, PARTIAL_SMEM = K_SMEM;  // offsets
    static constexpr int STATE_SMEM = K_SMEM + (PARTIAL_BYTES > TILE_BYTES ? PARTIAL_BYTES : TILE_BYTES);
    static constexpr int SMEM_BYTES = STATE_SMEM + 8 * WARPS * M;
    static_assert(M % 16 == 0 && KEYS % 16 == 0 && OT % WARPS == 0 && OTile::BYTES <= STATE_SMEM, "");
};

// What a warp does with a tile. `total` stands for all tiles so far and is the same in all warps.
template <class C> struct KeySplit {
    using State = SoftmaxState<2 * C::MT>;
    float O_rmem[C::MT][C::OWN][4];  // value columns from 8 * OWN * warp on, normalised after every tile
    State total;

    __device__ __forceinline__ void init() {
        total.init();
#pragma unroll
        for (int i = 0; i < C::MT * C::OWN * 4; ++i) O_rmem[i / 4 / C::OWN][i / 4 % C::OWN][i % 4] = 0.0f;
    }

    // Where a lane's four numbers of an mma tile of a warp's partial output are: 512 bytes a tile, so that no two lanes share a bank;
    // and where the reference of a row is, with the sum of its weights SUM bytes further on.
    static __device__ __forceinline__ u32 part(u32 smem, int warp, int mt, int ot, int lane) {
        return smem + C::PARTIAL_SMEM + 16 * (32 * ((warp * C::MT + mt) * C::OT + ot) + lane);
    }
    static __device__ __forceinline__ u32 state(u32 smem, int warp, int row) { return smem + C::STATE_SMEM + 4 * (warp * C::M + row); }
    static constexpr int SUM = 4 * C::WARPS * C::M;

    // Weights of the warp's keys, relative to the largest of them, as if there were no other keys; their sums are shown.
    static __device__ __forceinline__ void weigh(
        const PrefillParams& p, const Block<C>& block, int thread, int tile, float (&S_rmem)[C::MT][C::NT][4]
    ) {
        State own;
        const int warp_key = thread / 32 * C::KEYS, key = tile * C::N + warp_key, lane_key = key + thread % 4 * C::Order::LANE;
        const int lane_position = block.position + thread % 32 / 4;
        const u32 K_frag = fragment_b<typename C::KTile>(block.K_smem(tile), thread) + warp_key * C::KTile::ROW_BYTES;
        const u32 no_q[1][C::MT][4] = {};
        float no_acc[C::MT][1][4] = {}, top[2 * C::MT];
        multiply_qk<C>(S_rmem, no_q, fragment_a<typename C::QTile>(block.smem, 0, thread), K_frag);
        apply_score<C::SCORE, typename C::Order, typename C::In>(
            S_rmem, block.score, MatrixTile<0, C::MT, C::KEYS>(), lane_position, lane_key);
        if (!block.visible.all(block.position, block.position + C::M - 1, key, key + C::KEYS))
            apply_mask<C::MASK, typename C::Order>(S_rmem, block.visible, lane_position, lane_key);
        own.init();
        State::tops(top, S_rmem);
        own.update(S_rmem, no_acc, top, p.logit_scale);
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            const u32 at = state(block.smem, thread / 32, 8 * r + thread % 32 / 4);
            own.reduce(r);
            if (thread % 4 == 0) store_smem(at, __float_as_uint(own.reference[r])), store_smem(at + SUM, __float_as_uint(own.sum[r]));
        }
    }

    // part += the weighted sum of the warp's values, all columns.
    static __device__ __forceinline__ void multiply(
        const Block<C>& block, int thread, int tile, const float (&P_rmem)[C::MT][C::NT][4], float (&part_rmem)[C::MT][C::OT][4]
    ) {
        const u32 V_frag = fragment_a<typename C::VTile>(block.V_smem(tile), thread / 32 * C::KEYS, thread);
#pragma unroll
        for (int k = 0; k < C::KEYS / 16; ++k) {
            u32 a[C::MT][4];
            round_weights<C>(a, P_rmem, k);
            multiply_pv<C>(part_rmem, a, V_frag, k);
        }
    }

    static __device__ __forceinline__ void show(u32 smem, int thread, const float (&part_rmem)[C::MT][C::OT][4]) {
        const int warp = thread / 32, lane = thread % 32;
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot) {
                const float(&x)[4] = part_rmem[mt][ot];
                const uint4 bits = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
                store_smem(part(smem, warp, mt, ot, lane), bits);
            }
    }

    // O = (before * sum before + what the warps show) / sum, all brought to the largest reference.
    __device__ __forceinline__ void gather(u32 smem, int thread) {
        const int warp = thread / 32, lane = thread % 32;
        float before[2 * C::MT], factor[2 * C::MT][C::WARPS];
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            float reference[C::WARPS], top = total.reference[r];
#pragma unroll
            for (int w = 0; w < C::WARPS; ++w) {
                reference[w] = __uint_as_float(load_smem_4(state(smem, w, 8 * r + lane / 4)));
                top = fmaxf(top, reference[w]);
            }
            before[r] = total.sum[r] * Fast32::exp2(total.reference[r] - top);
            total.reference[r] = top;
            total.sum[r] = before[r];
#pragma unroll
            for (int w = 0; w < C::WARPS; ++w) {
                factor[r][w] = Fast32::exp2(reference[w] - top);
                total.sum[r] = fmaf(factor[r][w], __uint_as_float(load_smem_4(state(smem, w, 8 * r + lane / 4) + SUM)), total.sum[r]);
            }
            const float inverse = total.sum[r] == 0.0f ? 0.0f : reciprocal_fast(total.sum[r]);
            before[r] *= inverse;
#pragma unroll
            for (int w = 0; w < C::WARPS; ++w) factor[r][w] *= inverse;
        }
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int ot = 0; ot < C::OWN; ++ot) {
                float(&x)[4] = O_rmem[mt][ot];
#pragma unroll
                for (int c = 0; c < 4; ++c) x[c] *= before[2 * mt + c / 2];
#pragma unroll
                for (int w = 0; w < C::WARPS; ++w) {
                    const uint4 bits = load_smem_16(part(smem, w, mt, warp * C::OWN + ot, lane));
                    x[0] = fmaf(__uint_as_float(bits.x), factor[2 * mt][w], x[0]);
                    x[1] = fmaf(__uint_as_float(bits.y), factor[2 * mt][w], x[1]);
                    x[2] = fmaf(__uint_as_float(bits.z), factor[2 * mt + 1][w], x[2]);
                    x[3] = fmaf(__uint_as_float(bits.w), factor[2 * mt + 1][w], x[3]);
                }
            }
    }

    __device__ __forceinline__ bool not_finite() const {
        bool found = false;
#pragma unroll
        for (int i = 0; i < C::MT * C::OWN * 4; ++i)
            found = found || !(fabsf(O_rmem[i / 4 / C::OWN][i / 4 % C::OWN][i % 4]) < infinity());
        return found;
    }
};

template <class C> __device__ __forceinline__ void prefill_fa1(const PrefillParams& p, unsigned char* smem_generic) {
    const WorkItem work = work_item(p, block_index());
    const Sequence seq = sequence(p, work.batch);
    const int first_row = work.m_tile * C::M, rows = min(C::M, seq.q_length - first_row), thread = threadIdx.x, lane = thread % 32;
    const u32 smem = smem_address(smem_generic);
    if (rows <= 0) return;
    KeySplit<C> split;
    bool careful = false;
    while (true) {
        split.init();
        Block<C> block(p, work, seq, smem, careful);
        if (block.visible.begin >= block.visible.end) break;
        const TileLoader<typename C::QTile, C::THREADS, C::LOAD> q_loader(p.q, p.q_stride, work.batch, seq.q_begin, work.head, p.head_dim);
        q_loader.load(thread, smem, first_row, 0, seq.q_length);
#pragma unroll 1
        for (int tile = block.last; tile >= block.first; --tile) {
            const int thread = thread_index();  // what follows from it is worked out anew: registers are scarce
            float S_rmem[C::MT][C::NT][4], part_rmem[C::MT][C::OT][4] = {};
            block.load_k({}, thread, tile);
            block.load_v({}, thread, tile);
            copies_wait<1>();
            __syncthreads();  // K is there, and Q
            split.weigh(p, block, thread, tile, S_rmem);
            block.arrive(thread, tile, true);  // V is there
            split.multiply(block, thread, tile, S_rmem, part_rmem);
            __syncthreads();  // nobody needs K and V any more
            split.show(smem, thread, part_rmem);
            __syncthreads();  // all partial results are there
            split.gather(smem, thread);
            __syncthreads();  // nobody needs them any more
        }
        // Where rows see different keys, 0 * v of an infinite or NaN v may have reached rows that do not see it: once more, with care.
        const bool again = __syncthreads_or(C::CUTS && !careful && split.not_finite());
        if (!C::CUTS || !again) break;
        careful = true;
    }
#pragma unroll
    for (int i = 0; i < C::MT * C::OWN * 4; ++i) {
        float& x = split.O_rmem[i / 4 / C::OWN][i / 4 % C::OWN][i % 4];
        if (split.total.sum[i / 4 / C::OWN * 2 + i % 4 / 2] == 0.0f) x = 0.0f;  // a row that has seen nothing
    }
    store_fragments<typename C::Out, typename C::OTile, 2, false>(split.O_rmem, smem, 0, thread / 32 * C::OWN, lane);
    __syncthreads();
    if (C::CUTS && careful) {
        Block<C>(p, work, seq, smem, true).add_not_finite(thread, rows);
        __syncthreads();
    }
    const i64 out_offset = work.batch * p.out_stride.batch + (seq.q_begin + first_row) * p.out_stride.row + work.head * p.out_stride.head;
    store_rows<typename C::OTile, C::THREADS>(
        smem, static_cast<u16*>(p.out) + out_offset, p.out_stride, rows, p.head_dim_v, p.out_vector);
    if (p.lse && thread < 32 && lane % 4 == 0) {
        float* lse = p.lse + work.batch * p.lse_stride.batch + work.head * p.lse_stride.head + (seq.q_begin + first_row) * p.lse_stride.row;
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r)
            if (8 * r + lane / 4 < rows)
                lse[(8 * r + lane / 4) * p.lse_stride.row] = split.total.finish(split.total.reference[r], split.total.sum[r]);
    }
}
