// How a block gets from its first tile of keys to its last: what it knows, what its warps do with a tile, and two orders to do it in.
#include "include/mask.cuh"
#include "include/products.cuh"
#include "include/score.cuh"
#include "include/softmax_state.cuh"

// What all threads of a block agree on, with the way of keys and values into shared memory. Tiles go from `last` down to `first`.
template <class C> struct Block {
    static constexpr int LOADERS = C::THREADS - C::FIRST_LOADER;
    TileLoader<typename C::KTile, C::FIRST_LOADER, LOADERS, C::LOAD> k_loader;
    TileLoader<typename C::VTile, C::FIRST_LOADER, LOADERS, C::LOAD> v_loader;
    Visibility<C::MASK> visible;  // narrowed to the keys that some row of the block sees
    ScoreTransform<C::SCORE> score;
    int position;  // of the first row
    int first, last;

    __device__ __forceinline__ Block(const PrefillParams& p, const WorkItem& work, const Sequence& seq, const Visibility<C::MASK>& visible)
        : k_loader(p.k, p.k_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim),
          v_loader(p.v, p.v_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim_v),
          visible(visible), score(p, work.batch, work.head), position(work.m_tile * C::M + seq.position),
          first(visible.begin / C::N), last((visible.end - 1) / C::N) {}

    static __device__ __forceinline__ u32 K_smem(u32 smem, int tile) { return smem + C::K_SMEM + tile % C::STAGES * C::KTile::BYTES; }
    static __device__ __forceinline__ u32 V_smem(u32 smem, int tile) { return smem + C::V_SMEM + tile % C::STAGES * C::VTile::BYTES; }

    __device__ __forceinline__ void load_k(u32 smem, int tile) const {
        if (tile >= first) k_loader.load(K_smem(smem, tile), tile * C::N, visible.begin, visible.end);
    }

    __device__ __forceinline__ void load_v(u32 smem, int tile) const {
        if (tile >= first) v_loader.load(V_smem(smem, tile), tile * C::N, visible.begin, visible.end);
    }
};

// A warp's share of a block, and its three operations on a tile. Thread numbers are read anew at each use: registers are scarce.
template <class C> struct WarpAttention {
    const PrefillParams& p;
    u32 smem;
    u32 Q_rmem[C::Q_IN_RMEM ? C::DQK / 16 : 1][C::MT][4];
    float O_rmem[C::MT][C::OT][4];
    float S_rmem[C::MT][C::NT][4];
    u32 P_rmem[C::ALTERNATE ? C::N / 16 : 1][C::MT][4];
    SoftmaxState<2 * C::MT> state;

    __device__ __forceinline__ WarpAttention(const PrefillParams& p, u32 smem) : p(p), smem(smem) {
        state.init();
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
                for (int c = 0; c < 4; ++c) O_rmem[mt][ot][c] = 0.0f;
    }

    static __device__ __forceinline__ int first_row() { return thread_index() / 32 * C::WARP_ROWS; }

    __device__ __forceinline__ u32 Q_frag() const { return fragment_a<typename C::QTile>(smem, first_row(), thread_index()); }

    __device__ __forceinline__ void keep_q() {
        if constexpr (C::Q_IN_RMEM) {
#pragma unroll
            for (int k = 0; k < C::DQK / 16; ++k)
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) ldmatrix_x4(Q_rmem[k][mt], C::QTile::fragment(Q_frag(), mt, k));
        }
    }

    // S = Q K^T
    __device__ __forceinline__ void scores(int tile) {
        multiply_qk<C>(S_rmem, Q_rmem, Q_frag(), fragment_b<typename C::KTile>(Block<C>::K_smem(smem, tile), thread_index()));
    }

    // S -> P, with the rows' references raised and O brought to them
    __device__ __forceinline__ void softmax(const Block<C>& block, int tile) {
        const int here = thread_index(), key = tile * C::N, lane_key = key + here % 4 * 2;
        const int position = block.position + first_row(), lane_position = position + here % 32 / 4;
        apply_score<C::SCORE>(S_rmem, block.score, lane_position, lane_key);
        if (!block.visible.all(position, position + C::WARP_ROWS - 1, key, key + C::N))
            apply_mask<C::MASK>(S_rmem, block.visible, lane_position, lane_key);
        state.update(S_rmem, O_rmem, p.logit_scale);
        if constexpr (C::ALTERNATE) {
#pragma unroll
            for (int k = 0; k < C::N / 16; ++k) round_weights<C>(P_rmem[k], S_rmem, k);
        }
    }

    // O += P V
    __device__ __forceinline__ void values(int tile) {
        const u32 V_frag = fragment_a<typename C::VTile>(Block<C>::V_smem(smem, tile), 0, thread_index());
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k) {
            if constexpr (!C::ALTERNATE) round_weights<C>(P_rmem[0], S_rmem, k);
            multiply_pv<C>(O_rmem, P_rmem[C::ALTERNATE ? k : 0], V_frag, k);
        }
    }
};

// All warps walk through the tiles together; that one warp's softmax meets another's products is left to chance and to the other
// blocks of the multiprocessor. [first, last]: those of the block's tiles that the warp's rows see.
template <class C> struct WalkTogether {
    // Wait for K (with 2 stages, also for V) of a tile, and load what takes the place of the tile before.
    static __device__ __forceinline__ void begin(const Block<C>& block, u32 smem, int tile) {
        copies_wait<0>();
        __syncthreads();
        if (C::STAGES == 1) block.load_v(smem, tile);
        else block.load_k(smem, tile - 1), block.load_v(smem, tile - 1);
        copies_commit();
    }

    // Nobody needs K of the tile any more: with 1 stage, wait for V and load the next K.
    static __device__ __forceinline__ void middle(const Block<C>& block, u32 smem, int tile) {
        if (C::STAGES == 2) return;
        copies_wait<0>();
        __syncthreads();
        block.load_k(smem, tile - 1);
        copies_commit();
    }

    static __device__ __forceinline__ void start(const Block<C>& block, u32 smem) {
        block.load_k(smem, block.last);
        copies_commit();
        if (C::STAGES == 2) block.load_v(smem, block.last), copies_commit();
    }

    static __device__ __forceinline__ void run(const Block<C>& block, WarpAttention<C>& warp, int block_first, int block_last, int first, int last) {
        int tile = block_last;
#pragma unroll 1
        for (; tile >= block_first && tile > last; --tile) begin(block, warp.smem, tile), middle(block, warp.smem, tile);
#pragma unroll 1
        for (; tile >= first; --tile) {
            begin(block, warp.smem, tile);
            warp.scores(tile);
            middle(block, warp.smem, tile);
            warp.softmax(block, tile);
            warp.values(tile);
        }
#pragma unroll 1
        for (; tile >= block_first; --tile) begin(block, warp.smem, tile), middle(block, warp.smem, tile);
    }
};

// The two halves of the warps take turns: while one multiplies (O += P V of a tile, S = Q K^T of the next), the other, which shares
// the schedulers with it, does its softmax. Half 1 runs one turn behind; it also copies, since softmax leaves it time.
//
//   turn      2t               2t + 1           2t + 2
//   half 0    V(t-1), K(t)     softmax(t)       V(t), K(t+1)
//   half 1    softmax(t-1)     V(t-1), K(t)     softmax(t)
//
// At the start of turn 2t, K(t-1) and V(t-2) are free: K(t+1) and V(t) take their places and have two turns to arrive.
template <class C> struct WalkInTurns {
    static __device__ __forceinline__ bool loads() { return thread_index() >= C::FIRST_LOADER; }

    static __device__ __forceinline__ void start(const Block<C>& block, u32 smem) {
        if (loads()) block.load_k(smem, block.last);
        copies_commit();
        if (loads()) block.load_v(smem, block.last), block.load_k(smem, block.last - 1);
        copies_commit();
    }

    // After the products of a tile.
    static __device__ __forceinline__ void multiplied() {
        copies_wait<0>();
        __syncthreads();
    }

    // Before the softmax of a tile.
    static __device__ __forceinline__ void load(const Block<C>& block, u32 smem, int tile) {
        if (loads()) block.load_v(smem, tile - 1), block.load_k(smem, tile - 2);
        copies_commit();
    }

    // A tile that the warp has no use for.
    static __device__ __forceinline__ void pass(const Block<C>& block, u32 smem, int tile) {
        multiplied();
        load(block, smem, tile);
        __syncthreads();
    }

    static __device__ __forceinline__ void run(const Block<C>& block, WarpAttention<C>& warp, int block_first, int block_last, int first, int last) {
        copies_wait<1>();
        __syncthreads();  // Q and the first K are there
        if (loads()) __syncthreads();
        int tile = block_last;
#pragma unroll 1
        for (; tile >= block_first && tile > last; --tile) pass(block, warp.smem, tile);
        if (tile >= first) {
            warp.scores(tile);
            multiplied();
            load(block, warp.smem, tile);
            warp.softmax(block, tile);
            __syncthreads();
#pragma unroll 1
            for (--tile; tile >= first; --tile) {
                warp.values(tile + 1);
                warp.scores(tile);
                multiplied();
                load(block, warp.smem, tile);
                warp.softmax(block, tile);
                __syncthreads();
            }
            warp.values(tile + 1);
        }
#pragma unroll 1
        for (; tile >= block_first; --tile) pass(block, warp.smem, tile);
        if (!loads()) __syncthreads();
    }
};
