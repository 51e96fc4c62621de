// How a block gets from its first tile of keys to its last: what it knows, and what its warps do with a tile.
#include "include/mask.cuh"
#include "include/products.cuh"
#include "include/score.cuh"
#include "include/softmax_state.cuh"

// What all threads of a block agree on, with the way of keys and values into shared memory. Tiles go from `last` down to `first`.
template <class C> struct Block {
    TileLoader<typename C::KTile, C::THREADS, C::LOAD> k_loader;
    TileLoader<typename C::VTile, C::THREADS, C::LOAD> v_loader;
    Visibility<C::MASK> visible;  // narrowed to the keys that some row of the block sees
    ScoreTransform<C::SCORE> score;
    u32 smem;
    int position;  // of the first row
    int first, last;

    __device__ __forceinline__ Block(const PrefillParams& p, const WorkItem& work, const Sequence& seq, u32 smem)
        : k_loader(p.k, p.k_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim),
          v_loader(p.v, p.v_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim_v),
          visible(p, seq), score(p, work.batch, work.head), smem(smem), position(work.m_tile * C::M + seq.position) {
        const int rows = min(C::M, seq.q_length - work.m_tile * C::M);  // that exist
        visible.narrow(visible.of_any(position, position + rows - 1));
        first = visible.begin / C::N;
        last = (visible.end - 1) / C::N;
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

    __device__ __forceinline__ void start(int thread) const {
        load_k(thread, last);
        if (C::STAGES == 2) load_v(thread, last);
    }

    // Whether some row of the block does not see some key of the tile.
    __device__ __forceinline__ bool cut(int tile) const {
        return !visible.all(position, position + C::M - 1, tile * C::N, tile * C::N + C::N);
    }

    // Wait for all copies. If V of the tile is among them and has numbers that are not finite, and the tile is cut, put 0 in their
    // place: 0 * v would be NaN in rows that do not see v. Returns, to all threads alike, whether it was so.
    __device__ __forceinline__ bool arrive(int thread, int tile, bool with_v) const {
        copies_wait<0>();
        if constexpr (C::MASK != MASK_LENGTH) {
            if (with_v && cut(tile)) {
                const bool rare = __syncthreads_or(v_loader.template not_finite<typename C::In>(thread, V_smem(tile)));
                if (rare) {
                    v_loader.template clear_not_finite<typename C::In>(thread, V_smem(tile));
                    __syncthreads();
                }
                return rare;
            }
        }
        __syncthreads();
        return false;
    }

    // Wait for K (with 2 stages, also for V) of a tile, and load what takes the place of the tile before.
    __device__ __forceinline__ bool begin(int thread, int tile) const {
        const bool rare = arrive(thread, tile, C::STAGES == 2);
        if (C::STAGES == 1) load_v(thread, tile);
        else load_k(thread, tile - 1), load_v(thread, tile - 1);
        return rare;
    }

    // Nobody needs K of the tile any more: with 1 stage, wait for V and load the next K.
    __device__ __forceinline__ bool middle(int thread, int tile) const {
        if (C::STAGES == 2) return false;
        const bool rare = arrive(thread, tile, true);
        load_k(thread, tile - 1);
        return rare;
    }

    // A tile that this warp has no use for, but others have.
    __device__ __forceinline__ bool pass(int thread, int tile) const {
        const bool rare = begin(thread, tile);
        return middle(thread, tile) || rare;
    }
};

// A warp's share of a block, and its operations on a tile.
template <class C> struct WarpAttention {
    const PrefillParams& p;
    u32 Q_rmem[C::Q_IN_RMEM ? C::DQK / 16 : 1][C::MT][4];
    float O_rmem[C::MT][C::OT][4];
    float S_rmem[C::MT][C::NT][4];
    SoftmaxState<2 * C::MT> state;

    __device__ __forceinline__ WarpAttention(const PrefillParams& p) : p(p) {
        state.init();
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
                for (int c = 0; c < 4; ++c) O_rmem[mt][ot][c] = 0.0f;
    }

    static __device__ __forceinline__ u32 Q_frag(u32 smem, int thread) {
        return fragment_a<typename C::QTile>(smem, thread / 32 * C::WARP_ROWS, thread);
    }

    __device__ __forceinline__ void keep_q(u32 smem, int thread) {
        if constexpr (C::Q_IN_RMEM) {
#pragma unroll
            for (int k = 0; k < C::DQK / 16; ++k)
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) ldmatrix_x4(Q_rmem[k][mt], C::QTile::fragment(Q_frag(smem, thread), mt, k));
        }
    }

    // S = Q K^T
    __device__ __forceinline__ void scores(const Block<C>& block, int thread, int tile) {
        multiply_qk<C>(S_rmem, Q_rmem, Q_frag(block.smem, thread), fragment_b<typename C::KTile>(block.K_smem(tile), thread));
    }

    // S -> P, with the rows' references raised and O brought to them
    __device__ __forceinline__ void softmax(const Block<C>& block, int thread, int tile) {
        const int key = tile * C::N, lane_key = key + thread % 4 * 2;
        const int position = block.position + thread / 32 * C::WARP_ROWS, lane_position = position + thread % 32 / 4;
        apply_score<C::SCORE>(S_rmem, block.score, lane_position, lane_key);
        if (!block.visible.all(position, position + C::WARP_ROWS - 1, key, key + C::N))
            apply_mask<C::MASK>(S_rmem, block.visible, lane_position, lane_key);
        state.update(S_rmem, O_rmem, p.logit_scale);
    }

    // O += P V
    __device__ __forceinline__ void values(const Block<C>& block, int thread, int tile) {
        const u32 V_frag = fragment_a<typename C::VTile>(block.V_smem(tile), 0, thread);
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k) {
            u32 P_rmem[C::MT][4];
            round_weights<C>(P_rmem, S_rmem, k);
            multiply_pv<C>(O_rmem, P_rmem, V_frag, k);
        }
    }

    // O += v for the numbers of V that `arrive` took out, in the rows that see them. It is rare: speed does not matter.
    __device__ __forceinline__ void add_not_finite(const Block<C>& block, int thread) {
        const int position = block.position + thread / 32 * C::WARP_ROWS + thread % 32 / 4;
        const auto& v = block.v_loader;
#pragma unroll 1
        for (int key = block.visible.begin; key < block.visible.end; ++key) {
            if (!block.cut(key / C::N)) continue;
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int column = 8 * ot + thread_index() % 4 * 2 + c;  // read anew, or all columns' offsets are kept
                    const volatile u16* number = v.first_gmem + key * v.row_stride + column * v.column_stride;
                    const float x = not_finite2<typename C::In>(column < v.columns ? u32(*number) : 0u).x;
                    if (!__any_sync(0xffffffffu, x != 0.0f)) continue;  // a branch, so that the loads do not pile up in registers
#pragma unroll
                    for (int r = 0; r < 2 * C::MT; ++r)
                        if (block.visible.all(position + 8 * r, position + 8 * r, key, key + 1)) O_rmem[r / 2][ot][r % 2 * 2 + c] += x;
                }
        }
    }
};
