// dQ of the backward pass with mma.sync without additions by several blocks: where results must agree bit for bit from run to run.
//
// A block has M query rows of one head, of which each warp owns some, and walks over the tiles of N keys that they may see: S = Q K^T and
// dP = dO V^T once more, then dQ += dS K, whose operand dS is made of registers. Together with backward_fa2.cu, which then has four
// products, these are seven products instead of five.
//
// Or, FINDS_DELTA, it stays with the first two products and replaces delta = rowsum(dO * O) by the sum of P * dP: the same but for digits
// that O does not have in 16 bits. Gradients of a bias in float32 show them, and sums of gradients over keys, which cancel but for them.
#include "include/backward_products.cuh"
#include "include/backward_weights.cuh"
#include "include/epilogue.cuh"

// STAGES: tiles of keys and of values in shared memory.
template <class In_, int DQK_, int DV_, int M_, int N_, int WARPS_, int STAGES_, int LOAD_, int MASK_, int SCORE_, bool FINDS_DELTA_>
struct BackwardFa2Dq {
    using In = In_;
    static constexpr int DQK = DQK_, DV = DV_, M = M_, N = N_, STAGES = STAGES_, LOAD = LOAD_, MASK = MASK_, SCORE = SCORE_;
    static constexpr bool FINDS_DELTA = FINDS_DELTA_, HIDES = (MASK & MASK_ARRAY) != 0 || bias_bytes(SCORE) != 0;
    using Order = KeyOrder<HIDES>;
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS, ROWS = M / WARPS, KEYS = N;
    static constexpr int MT = ROWS / 16, NT = KEYS / 8, OT = DQK / 8;
    using QTile = SmemTile<M, DQK>;
    using OTile = SmemTile<M, DV>;  // of dO
    using KTile = SmemTile<N, DQK>;
    using VTile = SmemTile<N, DV>;
    static constexpr int Q_SMEM = 0, DO_SMEM = Q_SMEM + QTile::BYTES, K_SMEM = DO_SMEM + OTile::BYTES;
    static constexpr int V_SMEM = K_SMEM + STAGES * KTile::BYTES, SMEM_BYTES = V_SMEM + STAGES * VTile::BYTES;
    static_assert(MT * 16 * WARPS == M && N % (HIDES ? 32 : 16) == 0 && (STAGES == 1 || STAGES == 2), "");
};

// What the threads of a block agree on.
template <class C> struct QueryBlock {
    const BackwardParams& p;
    int batch, head, row;  // the first row, within the sequence
    Sequence seq;
    Visibility<C::MASK> visible;  // narrowed to the keys that some row of the block sees
    u32 smem;

    // As BackwardBlock does it.
    __device__ __forceinline__ void clear_keys(int thread, int tile) const {
        using Loader = TileLoader<typename C::KTile, C::THREADS, C::LOAD, C::HIDES>;
        Loader::template clear_not_finite<typename C::In>(thread, K_smem(tile));
    }

    // The last rows first: under a causal mask they see the most keys.
    __device__ __forceinline__ QueryBlock(const BackwardParams& p, u32 block, u32 smem)
        : p(p), visible(p.prefill, KeyRange{0, 0}), smem(smem) {
        const u32 m_tiles = (u32(p.prefill.m_tiles) * u32(p.tile_rows) + C::M - 1) / C::M, pair = block / m_tiles;
        batch = int(pair / u32(p.prefill.heads_q)), head = int(pair % u32(p.prefill.heads_q));
        row = int(m_tiles - 1 - block % m_tiles) * C::M;
        seq = sequence(p.prefill, batch);
        visible = Visibility<C::MASK>(p.prefill, seq);
        visible.narrow(visible.of_any(seq.position + row, seq.position + min(row + C::M, seq.q_length) - 1));
    }

    __device__ __forceinline__ u32 K_smem(int tile) const { return smem + C::K_SMEM + tile % C::STAGES * C::KTile::BYTES; }
    __device__ __forceinline__ u32 V_smem(int tile) const { return smem + C::V_SMEM + tile % C::STAGES * C::VTile::BYTES; }

    __device__ __forceinline__ void load_queries(int thread) const {
        const PrefillParams& f = p.prefill;
        const TileLoader<typename C::QTile, C::THREADS, C::LOAD> q(f.q, f.q_stride, batch, seq.q_begin, head, f.head_dim);
        const TileLoader<typename C::OTile, C::THREADS, C::LOAD> dout(p.dout, p.dout_stride, batch, seq.q_begin, head, f.head_dim_v);
        q.load(thread, smem + C::Q_SMEM, row, 0, seq.q_length);
        dout.load(thread, smem + C::DO_SMEM, row, 0, seq.q_length);
    }

    __device__ __forceinline__ void load_keys(int thread, int tile) const {
        const PrefillParams& f = p.prefill;
        const int h = head / f.group;
        const TileLoader<typename C::KTile, C::THREADS, C::LOAD, C::HIDES> k(f.k, f.k_stride, batch, seq.k_begin, h, f.head_dim);
        const TileLoader<typename C::VTile, C::THREADS, C::LOAD, C::HIDES> v(f.v, f.v_stride, batch, seq.k_begin, h, f.head_dim_v);
        k.load(thread, K_smem(tile), tile * C::N, visible.begin, visible.end);
        v.load(thread, V_smem(tile), tile * C::N, visible.begin, visible.end);
        copies_commit();
    }
};

// A warp's rows.
template <class C> struct QueryWarp {
    using In = typename C::In;
    float dQ_rmem[C::MT][C::OT][4];
    BackwardWeights<C> w;
    float found[2 * C::MT];  // the lane's share of the sums of P * dP
    u32 weighs;              // a bit for each of the lane's rows: whether it has had a P that is not 0
    bool blind;              // some row sees nothing, or is none

    __device__ __forceinline__ QueryWarp() : weighs(0) {
        clear(dQ_rmem);
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) found[r] = 0.0f;
    }

    static __device__ __forceinline__ int row() { return thread_index() / 32 * C::ROWS; }

    __device__ __forceinline__ void read_rows(const QueryBlock<C>& block) {
        const int first = block.row + row() + thread_index() % 32 / 4;
        const i64 place = block.head * block.p.places + first_place_of(block.p, block.batch, block.seq) + first;
        bool any = false;
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            const bool there = first + 8 * r < block.seq.q_length;
            w.lse[r] = there ? block.p.row_lse[place + 8 * r] : infinity();
            w.delta[r] = there ? block.p.row_delta[place + 8 * r] : 0.0f;
            any = any || w.lse[r] == infinity();
        }
        blind = __any_sync(0xffffffffu, any);
    }

    __device__ __forceinline__ void step(const QueryBlock<C>& block, const ScoreTransform<C::SCORE>& score, int tile) {
        using KTile = typename C::KTile;
        const PrefillParams& f = block.p.prefill;
        const int thread = thread_index(), lane = thread % 32, key = tile * C::N, lane_key = key + lane % 4 * C::Order::LANE;
        const int first = block.row + row(), position = block.seq.position + first;
        w.fetch(f, block.seq, block.batch, block.head, first + lane / 4, key, lane_key);
        clear(w.S_rmem);
        multiply_rows<In, typename C::QTile, KTile, C::DQK>(
            w.S_rmem, fragment_a<typename C::QTile>(block.smem + C::Q_SMEM, row(), thread), fragment_b<KTile>(block.K_smem(tile), thread));
        if (blind) w.close_eyes();
        const bool cut = !block.visible.all(position, position + C::ROWS - 1, key, key + C::KEYS);
        w.weigh(f, score, block.visible, position + lane / 4, lane_key, cut);
        if constexpr (!C::FINDS_DELTA) w.cap_weights();
        clear(w.dP_rmem);
        multiply_rows<In, typename C::OTile, typename C::VTile, C::DV>(
            w.dP_rmem, fragment_a<typename C::OTile>(block.smem + C::DO_SMEM, row(), thread),
            fragment_b<typename C::VTile>(block.V_smem(tile), thread));
        if constexpr (C::FINDS_DELTA) {
            w.add_products(found, weighs);
            return;
        }
        w.differentiate(C::HIDES || cut || blind);
        w.cap_gradients();
        const u32 K_frag = fragment_a<KTile>(block.K_smem(tile), 0, thread);
#pragma unroll
        for (int k = 0; k < C::KEYS / 16; ++k) {
            u32 a[C::MT][4];
            round_weights<C>(a, w.dP_rmem, k);
#pragma unroll
            for (int n = 0; n < C::OT / 2; ++n) {
                u32 b[4];
                ldmatrix_x4_transposed(b, KTile::fragment(K_frag, k, n));
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) {
                    mma_16x8x16<In>(dQ_rmem[mt][2 * n], a[mt], b[0], b[1]);
                    mma_16x8x16<In>(dQ_rmem[mt][2 * n + 1], a[mt], b[2], b[3]);
                }
            }
        }
    }

    // delta, less dLSE, of all rows that have a log-sum-exp. That becomes infinite for those whose keys all weigh nothing: what they have is
    // the sink, and whatever dO holds must not matter.
    __device__ __forceinline__ void write_delta(const QueryBlock<C>& block) {
        const BackwardParams& p = block.p;
        const int lane = thread_index() % 32, first = block.row + row() + lane / 4;
        const i64 place = block.head * p.places + first_place_of(p, block.batch, block.seq) + first;
        const i64 entry = p.prefill.cu_seqlens_q ? 0 : block.batch;
        const float* dlse = p.dlse + entry * p.dlse_stride.batch + block.head * p.dlse_stride.head;
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            float x = found[r];
            x += shuffle_xor<1>(x);
            x += shuffle_xor<2>(x);
            const u32 of_row = __ballot_sync(0xffffffffu, (weighs >> r & 1) != 0) >> lane / 4 * 4 & 15;  // of its four lanes
            if (lane % 4 != 0 || w.lse[r] == infinity()) continue;
            if (of_row == 0) p.row_lse[place + 8 * r] = infinity();
            if (p.dlse) x -= dlse[(block.seq.q_begin + first + 8 * r) * p.dlse_stride.row];
            p.row_delta[place + 8 * r] = x;
        }
    }
};

template <class C> __device__ __forceinline__ void walk(const QueryBlock<C>& block, QueryWarp<C>& warp) {
    const int last = (block.visible.end - 1) / C::N;
    const ScoreTransform<C::SCORE> score(block.p.prefill, block.batch, block.head);
    int tile = block.visible.begin / C::N;
    block.load_queries(thread_index());
    block.load_keys(thread_index(), tile);
    warp.read_rows(block);
#pragma unroll 1
    for (; tile <= last; ++tile) {
        copies_wait<0>();
        if constexpr (C::HIDES && !C::FINDS_DELTA) block.clear_keys(thread_index(), tile);
        block_barrier<C::THREADS>();  // its keys are there, and nobody needs those of the tile before
        if (C::STAGES == 2 && tile < last) block.load_keys(thread_index(), tile + 1);
        warp.step(block, score, tile);
        if (C::STAGES == 1 && tile < last) {
            block_barrier<C::THREADS>();
            block.load_keys(thread_index(), tile + 1);
        }
    }
}

// dQ of the block, from registers.
template <class C> __device__ __forceinline__ void store_dq(const QueryBlock<C>& block, QueryWarp<C>& warp, int rows) {
    const BackwardParams& p = block.p;
#pragma unroll
    for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
        for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
            for (int c = 0; c < 4; ++c) warp.dQ_rmem[mt][ot][c] *= p.scale;
    block_barrier<C::THREADS>();  // nobody reads Q any more
    store_fragments<typename C::In, typename C::QTile, 2, true>(warp.dQ_rmem, block.smem + C::Q_SMEM, warp.row(), 0, thread_index() % 32);
    block_barrier<C::THREADS>();
    u16* to = static_cast<u16*>(p.dq) + block.batch * p.dq_stride.batch + i64(block.seq.q_begin + block.row) * p.dq_stride.row +
              block.head * p.dq_stride.head;
    const int columns = p.prefill.head_dim;
    store_rows<typename C::QTile, C::THREADS>(
        block.smem + C::Q_SMEM, to, p.dq_stride, rows, columns, rows_in_sixteens(to, p.dq_stride, columns));
}

template <class C> __device__ __forceinline__ void backward_fa2_dq(const BackwardParams& p, unsigned char* smem_pointer) {
    const QueryBlock<C> block(p, block_index(), smem_address(smem_pointer));
    const int rows = min(C::M, block.seq.q_length - block.row);
    if (rows <= 0) return;
    QueryWarp<C> warp;
    if (block.visible.begin < block.visible.end) walk(block, warp);
    if constexpr (C::FINDS_DELTA) {
        if (block.visible.begin < block.visible.end) warp.write_delta(block);
    } else {
        store_dq(block, warp, rows);
    }
}
