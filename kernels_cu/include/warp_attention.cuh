// What a warp of prefill_fa2.cu does with a tile of keys and values.
#include "include/block.cuh"
#include "include/epilogue.cuh"
#include "include/products.cuh"
#include "include/softmax_state.cuh"

// A warp's share of a block, and its operations on a tile.
template <class C> struct WarpAttention {
    const PrefillParams& p;
    u32 Q_rmem[C::Q_IN_RMEM ? C::DQK / 16 : 1][C::MT][4];
    float O_rmem[C::MT][C::OT][4];
    float S_rmem[C::MT][C::NT][4];
    MatrixTile<C::MASK_BYTES, C::MT, C::KEYS> mask_tile;
    MatrixTile<C::BIAS_BYTES, C::MT, C::KEYS> bias_tile;
    SoftmaxState<2 * C::MT> state;

    __device__ __forceinline__ WarpAttention(const PrefillParams& p) : p(p) { init(); }

    __device__ __forceinline__ void init() {
        state.init();
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
                for (int c = 0; c < 4; ++c) O_rmem[mt][ot][c] = 0.0f;
    }

    // A warp's rows, of the block's, and which keys and value columns of theirs it has.
    static __device__ __forceinline__ int row(int thread) { return thread / 32 / C::GROUPS * C::WARP_ROWS; }
    static __device__ __forceinline__ int group(int thread) { return C::GROUPS > 1 ? thread / 32 % C::GROUPS : 0; }

    static __device__ __forceinline__ u32 Q_frag(u32 smem, int thread) { return fragment_a<typename C::QTile>(smem, row(thread), thread); }

    // Where a lane's first row is in the array of tops of a group.
    static __device__ __forceinline__ u32 tops(u32 smem, int group, int thread) {
        return smem + C::TOP_SMEM + 4 * (group * C::M + row(thread) + thread % 32 / 4);
    }

    __device__ __forceinline__ void keep_q(u32 smem, int thread) {
        if constexpr (C::Q_IN_RMEM) {
#pragma unroll
            for (int k = 0; k < C::DQK / 16; ++k)
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) ldmatrix_x4(Q_rmem[k][mt], C::QTile::fragment(Q_frag(smem, thread), mt, k));
        }
    }

    // Read what mask and bias have for the tile.
    __device__ __forceinline__ void fetch(const Block<C>& block, int thread, int tile) {
        const int row = block.row + WarpAttention::row(thread) + thread % 32 / 4, key = tile * C::N + group(thread) * C::KEYS;
        const int lane_key = key + thread % 4 * C::Order::LANE;
        if constexpr (C::MASK_BYTES != 0) mask_tile.load(block.mask, row, key - block.mask_key, lane_key - block.mask_key, 1);
        if constexpr (C::BIAS_BYTES != 0) bias_tile.load(block.bias, row, key, lane_key, 0);
    }

    // S = Q K^T
    __device__ __forceinline__ void scores(const Block<C>& block, int thread, int tile) {
        const u32 K_frag = fragment_b<typename C::KTile>(block.K_smem(tile), thread) + group(thread) * C::KEYS * C::KTile::ROW_BYTES;
        if constexpr (C::GROUPS == 1) {
            multiply_qk<C>(S_rmem, Q_rmem, Q_frag(block.smem, thread), K_frag);
        } else {
            if (sees(block, thread, tile)) {
                multiply_qk<C>(S_rmem, Q_rmem, Q_frag(block.smem, thread), K_frag);
                mask(block, thread, tile);
            } else {
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
                    for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                        for (int c = 0; c < 4; ++c) S_rmem[mt][nt][c] = -infinity();
            }
            float top[2 * C::MT];
            tops_of_scores(top);
            if (thread % 4 == 0)
#pragma unroll
                for (int r = 0; r < 2 * C::MT; ++r) store_smem(tops(block.smem, group(thread), thread) + 32 * r, __float_as_uint(top[r]));
        }
    }

    // Whether a row of the warp sees a key of its part of the tile. Of a row's warps at least one does.
    __device__ __forceinline__ bool sees(const Block<C>& block, int thread, int tile) const {
        const int key = tile * C::N + group(thread) * C::KEYS, position = block.first_position() + row(thread);
        const KeyRange any = block.visible.of_any(position, position + C::WARP_ROWS - 1);
        return C::MASK == MASK_LENGTH || (any.begin < key + C::KEYS && any.end > key);
    }

    // Scores -> logits, unless they stay what they are; -inf where they are invisible
    template <bool LOGITS = true> __device__ __forceinline__ void mask(const Block<C>& block, int thread, int tile) {
        const int key = tile * C::N + group(thread) * C::KEYS, lane_key = key + thread % 4 * C::Order::LANE;
        const int position = block.first_position() + row(thread), lane_position = position + thread % 32 / 4;
        if constexpr (LOGITS)
            apply_score<C::SCORE, typename C::Order, typename C::In>(S_rmem, block.score, bias_tile, lane_position, lane_key);
        if constexpr (C::MASK_BYTES != 0) apply_mask(S_rmem, mask_tile);
        if (!block.visible.all(position, position + C::WARP_ROWS - 1, key, key + C::KEYS))
            apply_mask<C::MASK, typename C::Order>(S_rmem, block.visible, lane_position, lane_key);
    }

    // The largest score of each row of the tile
    __device__ __forceinline__ void tops_of_scores(float (&top)[2 * C::MT]) {
        state.tops(top, S_rmem);
        if constexpr (C::BIAS_BYTES != 0) bring_nearer(S_rmem, top, state.reference);
    }

    // S -> P, with the rows' references raised and O brought to them
    __device__ __forceinline__ void softmax(const Block<C>& block, int thread, int tile) {
        if constexpr (C::SCORE == SCORE_SOFTCAP && C::GROUPS == 1) {
            const float largest = largest_size(S_rmem);
            const bool series = !__any_sync(0xffffffffu, largest > p.softcap_limit);
            if (!series) apply_tanh_pair(S_rmem, p.scale * (1.0f / TANH_UNIT));
            mask<false>(block, thread, tile);
            if (series) {
                update_capped(S_rmem, O_rmem, state, largest, p);
            } else {
                float top[2 * C::MT];
                state.tops(top, S_rmem);
                state.update(S_rmem, O_rmem, top, p.logit_scale);
            }
            return;
        }
        float top[2 * C::MT];
        if constexpr (C::GROUPS == 1) {
            mask(block, thread, tile);
            tops_of_scores(top);
        } else {
#pragma unroll
            for (int r = 0; r < 2 * C::MT; ++r) {
                top[r] = -infinity();
#pragma unroll
                for (int g = 0; g < C::GROUPS; ++g)
                    top[r] = fmaxf(top[r], __uint_as_float(load_smem_4(tops(block.smem, g, thread) + 32 * r)));
            }
        }
        state.update(S_rmem, O_rmem, top, p.logit_scale);
        if constexpr (C::GROUPS > 1)
            store_fragments<typename C::In, typename C::PTile, 2, (C::NT & (C::NT - 1)) == 0>(
                S_rmem, block.smem + C::P_SMEM, row(thread), group(thread) * C::NT, thread % 32);
    }

    // O += P V; and read what mask and bias have for the next tile, if there is one, where those of this tile were.
    __device__ __forceinline__ void values(const Block<C>& block, int thread, int tile, bool next) {
        // The 16-column block of a group is the one that its number turns the first one into.
        const u32 V_frag = fragment_a<typename C::VTile>(block.V_smem(tile), 0, thread) ^ (group(thread) << 5);
        const u32 P_frag = fragment_a<typename C::PTile>(block.smem + C::P_SMEM, row(thread), thread);
        constexpr bool AT_ONCE = C::HIDES && C::GROUPS == 1;  // round all weights first: what is fetched needs room
        u32 P_rmem[AT_ONCE ? C::N / 16 : 1][C::MT][4];
        if constexpr (AT_ONCE) {
#pragma unroll
            for (int k = 0; k < C::N / 16; ++k) round_weights<C>(P_rmem[k], S_rmem, k);
        }
        if (C::HIDES && next) fetch(block, thread, tile - 1);
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k) {
            u32(&a)[C::MT][4] = P_rmem[AT_ONCE ? k : 0];
            if constexpr (C::GROUPS > 1) {
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) ldmatrix_x4(a[mt], C::PTile::fragment(P_frag, mt, k));
            } else if constexpr (!AT_ONCE) {
                round_weights<C>(a, S_rmem, k);
            }
            multiply_pv<C>(O_rmem, a, V_frag, k);
        }
    }

    // Whether this thread's part of O is not finite somewhere: from values, or from 0 * values that nobody sees.
    __device__ __forceinline__ bool not_finite() const {
        float watched[4] = {};  // sums of products of two: not finite any more after one that is not (or some that are above 1e19)
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    watched[ot % 2 * 2 + c] = fmaf(O_rmem[mt][ot][2 * c], O_rmem[mt][ot][2 * c + 1], watched[ot % 2 * 2 + c]);
        return !(fabsf(watched[0]) + fabsf(watched[1]) + fabsf(watched[2]) + fabsf(watched[3]) < infinity());
    }

    // Natural log-sum-exp of row first + i of the lane's.
    __device__ __forceinline__ float lse(int first, int i) const {
        float reference, sum;
        state.pick(first, i, reference, sum);
        if constexpr (C::BIAS_BYTES != 0)
            if (fabsf(reference) > FAR && sum != 0.0f) return farther(reference) + logf(sum);
        return state.finish(reference, sum);
    }

    // Add up the sums of a row's lanes, and show them to its other warps, in the place of the tops.
    __device__ __forceinline__ void share_sums(u32 smem, int thread) {
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            state.reduce(r);
            if (C::GROUPS > 1 && thread % 4 == 0) store_smem(tops(smem, group(thread), thread) + 32 * r, __float_as_uint(state.sum[r]));
        }
    }

    // After a barrier.
    __device__ __forceinline__ void gather_sums(u32 smem, int thread) {
        if constexpr (C::GROUPS > 1) {
#pragma unroll
            for (int r = 0; r < 2 * C::MT; ++r) {
                state.sum[r] = 0.0f;
#pragma unroll
                for (int g = 0; g < C::GROUPS; ++g) state.sum[r] += __uint_as_float(load_smem_4(tops(smem, g, thread) + 32 * r));
            }
        }
    }
};
