// How a block gets from its first tile of keys to its last: what it knows, and what its warps do with a tile.
#include "include/epilogue.cuh"
#include "include/keys_values.cuh"
#include "include/mask.cuh"
#include "include/products.cuh"
#include "include/score.cuh"
#include "include/softmax_state.cuh"

// What all threads of a block agree on, with the way of keys and values into shared memory. Tiles go from `last` down to `first`.
template <class C> struct Block {
    KeysValues<C> kv;
    Matrix<C::MASK_BYTES> mask;
    Matrix<C::BIAS_BYTES> bias;
    Visibility<C::MASK> visible;  // narrowed to the keys that some row of the block sees
    ScoreTransform<C::SCORE> score;
    u32 smem;
    int position;  // of the first row; see first_position()
    int row;       // the first row, within the sequence
    int mask_key;  // the key of the mask's first column
    int first, last;
    bool careful;  // with V: see arrive(), is_careful()

    __device__ __forceinline__ Block(const PrefillParams& p, const WorkItem& work, const Sequence& seq, u32 smem, bool careful)
        : kv(p, work, seq), mask(p.mask, p.mask_stride, work.batch, work.head, p.matrix_rows, p.mask_columns, p.mask_vector),
          bias(p.bias, p.bias_stride, work.batch, work.head, p.matrix_rows, p.bias_columns, p.bias_vector),
          visible(p, seq), score(p, work.batch, work.head), smem(smem), position(work.m_tile * C::M + seq.position),
          row(work.m_tile * C::M), mask_key(p.mask_tail ? seq.kv_length - p.mask_columns : 0), careful(careful) {
        const int rows = min(C::M, seq.q_length - work.m_tile * C::M);  // that exist
        visible.narrow(visible.of_any(position, position + rows - 1));
        first = visible.begin / C::N;
        last = (visible.end - 1) / C::N;
    }

    __device__ __forceinline__ u32 K_smem(int tile) const { return smem + C::K_SMEM + tile % C::STAGES * C::KTile::BYTES; }
    __device__ __forceinline__ u32 V_smem(int tile) const { return smem + C::V_SMEM + tile % C::STAGES * C::VTile::BYTES; }

    __device__ __forceinline__ KeyRange keys() const { return {visible.begin, visible.end}; }

    __device__ __forceinline__ void load_k(int thread, int tile) const {
        if (tile >= first) kv.load_k(thread, smem, K_smem(tile), tile, keys());
        copies_commit();
    }

    // Of a tile, the values come after the keys.
    __device__ __forceinline__ void load_v(int thread, int tile) const {
        if (tile >= first) kv.load_v(thread, smem, V_smem(tile), tile, keys());
        copies_commit();
    }

    __device__ __forceinline__ void start(int thread) {
        kv.start(thread, smem, last, keys(), position, careful);
        load_k(thread, last);
        if (C::STAGES == 2) load_v(thread, last);
        else kv.prefetch_v(thread, last, keys());
    }

    // What is asked for once a tile: with pages, it waits in shared memory.
    __device__ __forceinline__ int first_position() const {
        if constexpr (C::PAGED) return load_smem_4(kv.parked(smem, kv.POSITION));
        else return position;
    }

    __device__ __forceinline__ bool is_careful() const {
        if constexpr (C::PAGED) return load_smem_4(kv.parked(smem, kv.CAREFUL)) != 0;
        else return careful;
    }

    // Whether some row of the block, the first of which stands at `position`, may not see some key of the tile.
    __device__ __forceinline__ bool cut(int tile, int position) const {
        return C::HIDES || !visible.all(position, position + C::M - 1, tile * C::N, tile * C::N + C::N);
    }

    // Whether bias and mask let a row of the sequence see a key.
    __device__ __forceinline__ bool shows(int row, int key) const {
        if constexpr (C::MASK_BYTES != 0)
            if (mask.element(row, key - mask_key, 1) == 0) return false;
        if constexpr (C::BIAS_BYTES != 0) return bias_value(row, key) != -infinity();
        else return true;
    }

    __device__ __forceinline__ float bias_value(int row, int key) const {
        if constexpr (C::BIAS_BYTES == 2) return unpack2<typename C::In>(bias.element(row, key, 0)).x;
        else return __int_as_float(bias.element(row, key, 0));
    }

    // Wait for all copies; V of the tile may be among them. A careful block then puts 0 in the place of its numbers that are not
    // finite, if some row does not see them: 0 * v would be NaN there.
    __device__ __forceinline__ void arrive(int thread, int tile, bool with_v) const {
        copies_wait<0>();
        if (C::CUTS && with_v && is_careful() && cut(tile, first_position()))
            KeysValues<C>::VLoader::template clear_not_finite<typename C::In>(thread, V_smem(tile));  // its own copies
        block_barrier<C::THREADS>();
    }

    // Wait for K (with 2 stages, also for V) of a tile, and load what takes the place of the tile before.
    __device__ __forceinline__ void begin(int thread, int tile) {
        arrive(thread, tile, C::STAGES == 2);
        if constexpr (C::STAGES == 1) {
            load_v(thread, tile);
        } else if constexpr (C::PAGED) {
            if (tile > first) kv.load(thread, smem, K_smem(tile - 1), V_smem(tile - 1), tile - 1, keys());
            copies_commit();
        } else {
            load_k(thread, tile - 1), load_v(thread, tile - 1);
        }
    }

    // Nobody needs K of the tile any more: with 1 stage, wait for V and load the next K.
    __device__ __forceinline__ void middle(int thread, int tile) {
        if (C::STAGES == 2) {
            exchange();
        } else {
            kv.template look_ahead<1>(thread, smem, tile, keys());
            arrive(thread, tile, true);
            load_k(thread, tile - 1);
        }
    }

    // What the warps of a row have written for each other is there.
    static __device__ __forceinline__ void exchange() {
        if (C::GROUPS > 1) block_barrier<C::THREADS>();
    }

    __device__ __forceinline__ void end(int thread, int tile) { kv.template look_ahead<2>(thread, smem, tile, keys()); }

    // A tile that this warp has no use for, but others have.
    __device__ __forceinline__ void pass(int thread, int tile) {
        begin(thread, tile);
        middle(thread, tile);
        exchange();
        end(thread, tile);
    }

    // out += v for the numbers of V that a careful block took out, in the rows that see them; out is in shared memory, in 16 bits.
    __device__ __forceinline__ void add_not_finite(int thread, int rows) const {
#pragma unroll 1
        for (int column = 2 * thread; column < C::DV; column += 2 * C::THREADS)
#pragma unroll 1
            for (int key = visible.begin; key < visible.end; ++key) {
                if (!cut(key / C::N, position)) continue;
                const float2 v = not_finite2<typename C::In>(kv.value(key, column) | kv.value(key, column + 1) << 16);
                const u32 taken = (v.x != 0.0f ? 0xffffu : 0u) | (v.y != 0.0f ? 0xffff0000u : 0u);
                if (taken == 0) continue;
#pragma unroll 1
                for (int row = 0; row < rows; ++row) {
                    if (!visible.all(position + row, position + row, key, key + 1)) continue;
                    if constexpr (C::HIDES)
                        if (!shows(this->row + row, key)) continue;
                    const u32 at = smem + column / C::OTile::BLOCK * C::OTile::BLOCK_BYTES +
                                   C::OTile::offset(row, column % C::OTile::BLOCK / 8) + column % 8 * 2;
                    const u32 before = load_smem_4(at);
                    const float2 out = not_finite2<typename C::Out>(before);  // what is finite does not count beside v
                    store_smem(at, (before & ~taken) | (pack2<typename C::Out>(out.x + v.x, out.y + v.y) & taken));
                }
            }
    }
};

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
