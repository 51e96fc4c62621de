// The backward pass of FlashAttention-2 with mma.sync, for sm_75 and every later GPU: dK and dV, and sums for dQ. After Dao 2023; weights
// are computed again from the log-sum-exp of their rows.
//
// A block has N keys of one key/value head and keeps their dK and dV in registers, while it walks over the tiles of M queries, of all heads
// that share the keys, which may see some of them. A step has five products. Warps share the first two by rows and keys, S = Q K^T and
// dP = dO V^T; they turn them into weights P and gradients of scores dS, which go through shared memory in 16 bits. Then they share
// dV += P^T dO and dK += dS^T Q by keys and columns, and dQ = dS K by rows and columns: that is added in float32 to what other blocks find.
// Additions come in no fixed order; where they must, backward_fa2_dq.cu computes dQ, and this kernel the other four products.
//
// Costs of a step of 64 queries x 128 keys at D = 128, 8 warps: 2,560 mma and 1,216 ldmatrix, which read shared memory for 4,864 clocks
// while the tensor cores of sm_80 need 5,120. Weights and gradients take 8 issue slots for each of a lane's 32 scores: 512 a scheduler.
#include "include/backward_block.cuh"
#include "include/backward_products.cuh"
#include "include/backward_weights.cuh"

// What an instance fixes. STAGES: tiles of queries and of dO in shared memory. KEYS: keys whose scores a warp has, of ROWS rows. KEY_WARPS:
// warps that share the keys of dK and dV, the others share their columns; ROW_WARPS: likewise the rows of dQ.
template <
    class In_, int DQK_, int DV_, int M_, int N_, int WARPS_, int STAGES_, int KEYS_, int KEY_WARPS_, int ROW_WARPS_, int LOAD_, int MASK_,
    int SCORE_, bool ADDS_DQ_>
struct BackwardFa2 {
    using In = In_;
    static constexpr int DQK = DQK_, DV = DV_, M = M_, N = N_, STAGES = STAGES_, LOAD = LOAD_, MASK = MASK_, SCORE = SCORE_;
    static constexpr bool ADDS_DQ = ADDS_DQ_, HIDES = (MASK & MASK_ARRAY) != 0 || bias_bytes(SCORE) != 0;
    using Order = KeyOrder<HIDES>;
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int KEYS = KEYS_, KEY_PARTS = N / KEYS, ROW_PARTS = M / 16 < WARPS / KEY_PARTS ? M / 16 : WARPS / KEY_PARTS;
    static constexpr int ROWS = M / ROW_PARTS, MT = ROWS / 16;
    static constexpr int SCORE_WARPS = KEY_PARTS * ROW_PARTS;  // if there are more warps, some do the same work
    static constexpr int KEY_WARPS = KEY_WARPS_, OWN_KEYS = N / KEY_WARPS, ROW_WARPS = ROW_WARPS_, OWN_ROWS = M / ROW_WARPS;
    using KShare = ColumnShare<DQK, WARPS / KEY_WARPS>;  // columns of dK, of dV, of dQ
    using VShare = ColumnShare<DV, WARPS / KEY_WARPS>;
    using QShare = ColumnShare<DQK, WARPS / ROW_WARPS>;
    using KTile = SmemTile<N, DQK>;
    using VTile = SmemTile<N, DV>;
    using QTile = SmemTile<M, DQK>;
    using OTile = SmemTile<M, DV>;  // of dO
    using PTile = SmemTile<M, N>;   // of P and of dS
    static constexpr int K_SMEM = 0, V_SMEM = K_SMEM + KTile::BYTES, Q_SMEM = V_SMEM + VTile::BYTES;
    static constexpr int DO_SMEM = Q_SMEM + STAGES * QTile::BYTES, P_SMEM = DO_SMEM + STAGES * OTile::BYTES;
    static constexpr int DS_SMEM = P_SMEM + PTile::BYTES, ROWS_SMEM = DS_SMEM + PTile::BYTES;
    static constexpr int SMEM_BYTES = ROWS_SMEM + STAGES * 8 * M;
    static_assert(ROW_PARTS * MT * 16 == M && KEY_PARTS * KEYS == N && SCORE_WARPS <= WARPS && KEYS % (HIDES ? 32 : 16) == 0, "");
    static_assert(OWN_KEYS % 16 == 0 && (OWN_KEYS / 16 & (OWN_KEYS / 16 - 1)) == 0 && OWN_ROWS % 16 == 0, "");
    static_assert(WARPS % KEY_WARPS == 0 && WARPS % ROW_WARPS == 0 && (STAGES == 1 || STAGES == 2), "");
};

// A warp's share of a block.
template <class C> struct BackwardWarp {
    using In = typename C::In;
    using KTile = typename C::KTile;
    using VTile = typename C::VTile;
    using QTile = typename C::QTile;
    using OTile = typename C::OTile;
    using PTile = typename C::PTile;
    float dK_rmem[C::OWN_KEYS / 16][2 * C::KShare::OWN][4], dV_rmem[C::OWN_KEYS / 16][2 * C::VShare::OWN][4];

    __device__ __forceinline__ BackwardWarp() { clear(dK_rmem), clear(dV_rmem); }

    // P and dS of the step to shared memory.
    __device__ __forceinline__ void scores(const BackwardBlock<C>& block, const QueryTile& t, int stage) const {
        const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % C::SCORE_WARPS;
        const int row = warp / C::KEY_PARTS * C::ROWS, column = warp % C::KEY_PARTS * C::KEYS;  // the warp's first ones in the tiles
        const int first_row = t.tile * C::M + row + lane / 4, position = block.seq.position + first_row, first_key = block.key + column;
        const PrefillParams& f = block.p.prefill;
        const int query_head = block.query_head(t), lane_key = first_key + lane % 4 * C::Order::LANE;
        BackwardWeights<C> w;
        w.fetch(f, block.seq, block.batch, query_head, first_row, first_key, lane_key);
        clear(w.S_rmem);
        multiply_rows<In, QTile, KTile, C::DQK>(
            w.S_rmem, fragment_a<QTile>(block.Q_smem(stage), row, thread),
            fragment_b<KTile>(block.smem + C::K_SMEM, thread) + column * KTile::ROW_BYTES);
        read_rows(w.lse, block.lse_smem(stage), row + lane / 4);
        read_rows(w.delta, block.delta_smem(stage), row + lane / 4);
        const int warp_position = block.seq.position + t.tile * C::M + row;
        const bool cut = !block.visible.all(warp_position, warp_position + C::ROWS - 1, first_key, first_key + C::KEYS);
        const ScoreTransform<C::SCORE> score(f, block.batch, query_head);
        w.weigh(f, score, block.visible, position, lane_key, cut);
        store(w.S_rmem, block.smem + C::P_SMEM, row, column / 8, thread);
        w.cap_weights();
        clear(w.dP_rmem);
        multiply_rows<In, OTile, VTile, C::DV>(
            w.dP_rmem, fragment_a<OTile>(block.dO_smem(stage), row, thread),
            fragment_b<VTile>(block.smem + C::V_SMEM, thread) + column * VTile::ROW_BYTES);
        w.differentiate(C::HIDES || cut);
        if (thread / 32 < C::SCORE_WARPS)
            w.add_dbias(block.p, block.batch, query_head, first_row, block.rows.end, lane_key, block.keys.end);
        w.cap_gradients();
        store(w.dP_rmem, block.smem + C::DS_SMEM, row, column / 8, thread);
    }

    // dV += P^T dO, dK += dS^T Q
    __device__ __forceinline__ void keys(const BackwardBlock<C>& block, int stage) {
        constexpr int GROUPS = C::WARPS / C::KEY_WARPS;
        const int thread = thread_index(), group = thread / 32 % GROUPS, key16 = thread / 32 / GROUPS * (C::OWN_KEYS / 16);
        multiply_columns<In, PTile, OTile, true, typename C::VShare, C::M>(
            dV_rmem, fragment_a_by_depth<PTile>(block.smem + C::P_SMEM, key16, thread),
            fragment_b_by_depth<OTile>(block.dO_smem(stage), group, thread), group);
        multiply_columns<In, PTile, QTile, true, typename C::KShare, C::M>(
            dK_rmem, fragment_a_by_depth<PTile>(block.smem + C::DS_SMEM, key16, thread),
            fragment_b_by_depth<QTile>(block.Q_smem(stage), group, thread), group);
    }

    // dQ = dS K, added to what the other blocks find.
    __device__ __forceinline__ void queries(const BackwardBlock<C>& block, const QueryTile& t) const {
        constexpr int GROUPS = C::WARPS / C::ROW_WARPS;
        const int thread = thread_index(), lane = thread % 32, group = thread / 32 % GROUPS, row = thread / 32 / GROUPS * C::OWN_ROWS;
        float dQ_rmem[C::OWN_ROWS / 16][2 * C::QShare::OWN][4];
        clear(dQ_rmem);
        multiply_columns<In, PTile, KTile, false, typename C::QShare, C::N>(
            dQ_rmem, fragment_a<PTile>(block.smem + C::DS_SMEM, row, thread),
            fragment_b_by_depth<KTile>(block.smem + C::K_SMEM, group, thread), group);
        float* to = block.p.dq_sum + (block.place(t) + row + lane / 4) * C::DQK + 16 * group + lane % 4 * 2;
#pragma unroll
        for (int mt = 0; mt < C::OWN_ROWS / 16; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n < C::QShare::OWN; ++n) {
                    if (!C::QShare::has(group, n)) continue;
#pragma unroll
                    for (int eight = 0; eight < 2; ++eight) {
                        const float(&x)[4] = dQ_rmem[mt][2 * n + eight];
                        add_gmem(to + (16 * mt + 8 * half) * C::DQK + 16 * GROUPS * n + 8 * eight, x[2 * half], x[2 * half + 1]);
                    }
                }
    }

    // dK and dV of the tile, in 16 bits, in the place of K and V.
    __device__ __forceinline__ void stage_results(u32 smem, float scale) {
        constexpr int GROUPS = C::WARPS / C::KEY_WARPS;
        const int thread = thread_index(), group = thread / 32 % GROUPS, row = thread / 32 / GROUPS * C::OWN_KEYS;
        stage<KTile, typename C::KShare>(dK_rmem, smem + C::K_SMEM, row, group, thread % 32, scale);
        stage<VTile, typename C::VShare>(dV_rmem, smem + C::V_SMEM, row, group, thread % 32, 1.0f);
    }

  private:
    // Numbers of the lane's rows.
    static __device__ __forceinline__ void read_rows(float (&x)[2 * C::MT], u32 smem, int row) {
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) x[r] = __uint_as_float(load_smem_4(smem + 4 * (row + 8 * r)));
    }

    static __device__ __forceinline__ void store(const float (&x)[C::MT][C::KEYS / 8][4], u32 smem, int row, int chunk, int thread) {
        constexpr int CHUNKS = C::KEYS / 8;
        if (C::SCORE_WARPS == C::WARPS || thread / 32 < C::SCORE_WARPS)
            store_fragments<In, PTile, 2, (CHUNKS & (CHUNKS - 1)) == 0>(x, smem, row, chunk, thread % 32);
    }

    template <class Tile, class Share, int MT, int NT>
    static __device__ __forceinline__ void stage(float (&x)[MT][NT][4], u32 smem, int row, int group, int lane, float scale) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int n = 0; n < Share::OWN; ++n) {
                if (!Share::has(group, n)) continue;
                float pair[1][2][4];
#pragma unroll
                for (int i = 0; i < 8; ++i) pair[0][i / 4][i % 4] = scale * x[mt][2 * n + i / 4][i % 4];
                store_fragments<In, Tile, 2, true>(pair, smem, row + 16 * mt, 2 * (group + Share::GROUPS * n), lane);
            }
    }
};

// All tiles of queries.
template <class C> __device__ __forceinline__ void walk(const BackwardBlock<C>& block, BackwardWarp<C>& warp) {
    QueryTile t = block.first();
    int stage = 0;
    block.load_keys(thread_index());
    block.load_queries(thread_index(), t, stage);
    if constexpr (C::HIDES) {
        copies_wait<0>();
        block.clear_keys(thread_index());
    }
    while (true) {
        const QueryTile next = block.after(t);
        const bool more = block.there(next);
        copies_wait<0>();
        block_barrier<C::THREADS>();  // its queries are there, and nobody needs those of the tile before, nor their P and dS
        if (C::STAGES == 2 && more) block.load_queries(thread_index(), next, stage ^ 1);
        block.clear_blind_rows(thread_index(), t, stage);
        warp.scores(block, t, stage);
        block_barrier<C::THREADS>();
        warp.keys(block, stage);
        if (C::STAGES == 1 && more) {
            block_barrier<C::THREADS>();
            block.load_queries(thread_index(), next, stage);
        }
        if constexpr (C::ADDS_DQ) warp.queries(block, t);
        if (!more) break;
        t = next, stage ^= C::STAGES - 1;
    }
}

template <class C> __device__ __forceinline__ void backward_fa2(const BackwardParams& p, unsigned char* smem_pointer) {
    const u32 smem = smem_address(smem_pointer);
    BackwardWarp<C> warp;
    {
        const KeyBlock tile(p, block_index(), C::N);
        const Sequence seq = sequence(p.prefill, tile.batch);
        if (tile.key >= key_capacity(p.prefill, tile.batch, seq)) return;
        const BackwardBlock<C> block(p, tile, seq, smem);
        if (!block.rows.empty()) walk(block, warp);
    }
    block_barrier<C::THREADS>();  // nobody reads K any more
    warp.stage_results(smem, p.scale);
    block_barrier<C::THREADS>();
    const KeyBlock tile(p, block_index(), C::N);  // once more: it took no registers meanwhile
    const Sequence seq = sequence(p.prefill, tile.batch);
    const int rows = min(C::N, key_capacity(p.prefill, tile.batch, seq) - tile.key);
    store_keys<typename C::KTile, C>(smem + C::K_SMEM, p.dk, p.dk_stride, tile, seq, rows, p.prefill.head_dim);
    store_keys<typename C::VTile, C>(smem + C::V_SMEM, p.dv, p.dv_stride, tile, seq, rows, p.prefill.head_dim_v);
}
