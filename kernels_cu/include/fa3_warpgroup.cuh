// What a warpgroup of prefill_fa3.cu does with its 64 query rows.
//
// Products run on their own while the warps compute: warpgroups take turns to start them, so that one has its softmax while the others
// multiply. The scores of a tile of keys and the values of the one before are started together.
#include "include/fa3_tile.cuh"
#include "include/score.cuh"
#include "include/softmax_state.cuh"
#include "include/wgmma.cuh"

template <class C> struct Warpgroup {
    using In = typename C::In;
    using Order = KeyOrder<false>;
    const PrefillParams& p;
    const int number;
    const bool lead;  // the thread speaks for its warp
    Ring<typename C::QStages> queries;
    Ring<typename C::KStages> keys;
    Ring<typename C::VStages> values;
    SoftmaxState<2> state;
    float limit[2];  // scores up to which a row keeps its reference; negative: always look at the tops themselves
    float S_rmem[1][C::N / 8][4], O_rmem[1][C::DV / 8][4];
    u32 P_rmem[C::N / 16][4];
    // How far scores may be above the reference, in log2 units, before a warp's references follow. The largest weight of a row is then
    // mostly 1, which 16 bits hold exactly: with 8 instead, errors are 4 to 10 % larger; with 0, 1 % smaller, but O is multiplied twice as
    // often.
    static constexpr float SLACK = 0.5f;
    static constexpr int PARTS = C::VALUES_FIRST && C::N % 32 == 0 ? C::N / 32 : 1;  // of softmax
    static constexpr int PART = C::N / 8 / PARTS;

    __device__ __forceinline__ Warpgroup(const PrefillParams& p, int number, u32 smem)
        : p(p), number(number), lead(thread_index() % 32 == 0), queries{smem + C::Q_SMEM, number}, keys{smem + C::K_SMEM},
          values{smem + C::V_SMEM} {
        if (C::TURNS && number == 0) block_barrier_arrive<256>(1);
    }

    // The first of the thread's two rows, of the 64; the other one is 8 further.
    static __device__ __forceinline__ int own_row() { return thread_index() % 128 / 32 * 16 + thread_index() % 32 / 4; }

    // The query of the first of its rows.
    __device__ __forceinline__ int first_query(const QueryTile<C>& tile) const { return tile.query(p, tile.row, 64 * number); }

    // All keys of a tile of queries; whether there was one.
    __device__ __forceinline__ bool attend(const QueryTile<C>& tile) {
        if (tile.batch < 0) return false;
        state.init();
#pragma unroll
        for (int ot = 0; ot < C::DV / 8; ++ot)
#pragma unroll
            for (int c = 0; c < 4; ++c) O_rmem[0][ot][c] = 0.0f;
        if (tile.last < tile.first) return true;
        // Tiles of keys that the mask cuts come first and, with a window, last; in a loop of their own the others do not pay for it. Those
        // to the right of all that these 64 rows see are for the other warpgroups.
        const int position = first_query(tile) + tile.seq.position, last_position = tile.query(p, position, 63);
        const KeyRange any = tile.visible.of_any(position, last_position), all = tile.visible.of_all(position, last_position);
        const bool none = any.empty() | (first_query(tile) >= tile.seq.q_length) | (last_position < tile.seq.position);
        const int first = tile.first, last = none ? first - 1 : (any.end - 1) / C::N;
        const int whole_end = max(all.end, 0) / C::N, whole_first = (all.begin + C::N - 1) / C::N;
        pass(warp_register(tile.last - last));
        queries.wait_full();
        if (!none) {
            int n = last;
            first_keys(tile, n, n >= whole_end || n < whole_first, first);
            --n;
            for (int masked = max(first, whole_end); n >= first; masked = first) {
#pragma unroll 1
                for (; n >= masked; --n) next_keys<true>(tile, n, first);
#pragma unroll 1
                for (; n >= max(first, whole_first); --n) next_keys<false>(tile, n, first);
            }
            last_values();
        } else {
            queries.release(lead);
        }
        queries.skip(C::WARPGROUPS);
        return true;
    }

  private:
    __device__ __forceinline__ void begin_turn() const {
        if (C::TURNS) block_barrier<256>(1 + number);
    }
    __device__ __forceinline__ void end_turn() const {
        if (C::TURNS) block_barrier_arrive<256>(number + 1 == C::WARPGROUPS ? 1 : number + 2);
    }

    // So many tiles of keys that concern other warpgroups.
    __device__ __forceinline__ void pass(int count) {
        auto k = keys;
        auto v = values;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            k.wait_full();
            begin_turn();
            end_turn();
            k.release(lead);
            k.advance();
            v.wait_full();
            v.release(lead);
            v.advance();
        }
        keys.skip(count);
        values.skip(count);
    }

    __device__ __forceinline__ void first_keys(const QueryTile<C>& tile, int n, bool masked, int first) {
        keys.wait_full();
        begin_turn();
        scores();
        end_turn();
        wgmma_wait<0>();
        done_with_keys(n == first);
        logits(tile, n, masked);
        if constexpr (C::VALUES_FIRST) {
            softmax_in_parts<true>();
        } else {
            softmax<true>();
            round();
        }
    }

    // A tile of keys, and the values of the one before. With enough warpgroups, others fill the time until both products are there, and
    // nothing runs during softmax; else the values do.
    template <bool MASKED> __device__ __forceinline__ void next_keys(const QueryTile<C>& tile, int n, int first) {
        if constexpr (C::VALUES_FIRST) {
            values.wait_full();
            keys.wait_full();
            begin_turn();
            wgmma_fence();
            add_values();
            scores();
            end_turn();
            wgmma_wait<0>();
            values.release(lead);
            values.advance();
            done_with_keys(n == first);
            logits(tile, n, MASKED);
            softmax_in_parts<false>();
        } else {
            keys.wait_full();
            begin_turn();
            scores();
            values.wait_full();
            add_values();
            if (C::WARPGROUPS > 2) end_turn();
            wgmma_wait<1>();
            if (C::WARPGROUPS == 2) end_turn();  // two are then half a step apart, and one always has products to run
            done_with_keys(n == first);
            logits(tile, n, MASKED);
            softmax<false>();
            values.release(lead);
            values.advance();
            round();
        }
    }

    __device__ __forceinline__ void last_values() {
        values.wait_full();
        wgmma_fence();
        add_values();
        wgmma_wait<0>();
        values.release(lead);
        values.advance();
    }

    __device__ __forceinline__ void done_with_keys(bool all) {
        keys.release(lead);
        keys.advance();
        if (all) queries.release(lead);
    }

    // S = Q K^T
    __device__ __forceinline__ void scores() {
        using Q = typename C::QTile;
        using K = typename C::KTile;
        constexpr int PER_BLOCK = K::BLOCK / 16;
        const WgmmaMatrix<Q> q(queries.stage_smem());
        const WgmmaMatrix<K> k(keys.stage_smem());
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::DQK / 16; ++i) {
            const int block = i / PER_BLOCK, column = i % PER_BLOCK * 32;
            wgmma_ss(In(), Columns<C::N>(), S_rmem[0], q.at(block * Q::BLOCK_BYTES + column), k.at(block * K::BLOCK_BYTES + column), i != 0);
        }
        wgmma_commit();
    }

    // O += P V
    __device__ __forceinline__ void add_values() {
        using V = typename C::VTile;
        const WgmmaMatrix<V> v(values.stage_smem());
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k) wgmma_rs(In(), Columns<C::DV>(), O_rmem[0], P_rmem[k], v.at(k * 16 * V::ROW_BYTES), true);
        wgmma_commit();
    }

    // Scores -> logits, unless they stay what they are; then -inf where they are invisible.
    __device__ __forceinline__ void logits(const QueryTile<C>& tile, int n, bool masked) {
        apply_score<C::SCORE, Order, In>(S_rmem, ScoreTransform<C::SCORE>(p, tile.batch, tile.head), MatrixTile<0, 1, C::N>(), 0, 0);
        if (masked) {
            const int first = first_query(tile) + tile.seq.position;
            const int position[2] = {tile.query(p, first, own_row()), tile.query(p, first, own_row() + 8)};
            apply_mask<C::MASK, Order>(S_rmem, tile.visible, position, n * C::N + thread_index() % 4 * 2);
        }
    }

    // Scores -> weights. Unless it is the first tile, wait for the values that run meanwhile, and bring O to the references.
    template <bool FIRST> __device__ __forceinline__ void softmax() {
        float factor[2], scale = p.logit_scale;
        const bool raise = FIRST || rises(0);
        if (__builtin_expect(raise, FIRST)) raise_references(0, scale, factor);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = 0.0f;
#pragma unroll
            for (int nt = 0; nt < C::N / 8; ++nt) sum += weigh(nt, r, scale);
            state.sum[r] += sum;
        }
        if constexpr (!FIRST) {
            if (p.batch > 0) {  // as it is; but the compiler, not knowing it, does not wait before the weights are computed
                wgmma_wait<0>();
            } else {
                wgmma_wait<0>();
                O_rmem[0][0][0] = 0.0f;
            }
            if (raise) {
                state.scale_row(O_rmem, 0, factor[0]);
                state.scale_row(O_rmem, 1, factor[1]);
            }
        }
    }

    // The same with no product under way, and weights are rounded as they come. Each part of the scores is looked at before the
    // exponentials of the part before it: these begin early, and the rest is done while they run.
    template <bool FIRST> __device__ __forceinline__ void softmax_in_parts() {
        float scale = p.logit_scale;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const bool raise = FIRST ? part == 0 : rises(part);
            if (part > 0) weights(part - 1, scale);
            if (__builtin_expect(raise, FIRST)) {
                float factor[2];
                raise_references(part, scale, factor);
                if (!FIRST) rescale(part, factor);
            }
        }
        weights(PARTS - 1, scale);
    }

    // Whether a row's reference may have to follow the scores of a part.
    __device__ __forceinline__ bool rises(int part) const {
        return __any_sync(0xffffffffu, (positive_top(part, 0) > limit[0]) | (positive_top(part, 1) > limit[1]));
    }

    // The warp's references up to the scores of the parts from this one on, and what that multiplies earlier weights by.
    __device__ __forceinline__ void raise_references(int part, float& scale, float (&factor)[2]) {
        float top[2] = {-infinity(), -infinity()};
#pragma unroll
        for (int nt = part * PART; nt < C::N / 8; ++nt)
#pragma unroll
            for (int c = 0; c < 4; ++c) top[c / 2] = fmaxf(top[c / 2], S_rmem[0][nt][c]);
        state.share(top);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float raised = fmaxf(state.reference[r], __fmul_rn(top[r], scale));
            factor[r] = exp2_fast(state.reference[r] - raised);
            state.reference[r] = raised;
            state.sum[r] *= factor[r];
        }
        const bool large = state.is_large();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            limit[r] = (state.reference[r] + SLACK) * reciprocal_fast(p.logit_scale);
            if (large | !(limit[r] >= 0.0f)) limit[r] = -1.0f;
        }
        if (large) {  // see SoftmaxState::weigh
#pragma unroll
            for (int nt = part * PART; nt < C::N / 8; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) S_rmem[0][nt][c] = __fmul_rn(S_rmem[0][nt][c], scale);
            scale = 1.0f;
        }
    }

    // Bring O, and the weights of the parts before this one, to new references.
    __device__ __forceinline__ void rescale(int part, const float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state.scale_row(O_rmem, r, factor[r]);
#pragma unroll
            for (int nt = 0; nt < part * PART; ++nt) {
                const float2 w = unpack2<In>(P_rmem[nt / 2][nt % 2 * 2 + r]);
                P_rmem[nt / 2][nt % 2 * 2 + r] = pack2<In>(w.x * factor[r], w.y * factor[r]);
            }
        }
    }

    // Weights of a part, their sums, and operands of the product with values.
    __device__ __forceinline__ void weights(int part, float scale) {
#pragma unroll
        for (int nt = part * PART; nt < part * PART + PART; ++nt)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                state.sum[r] += weigh(nt, r, scale);
                P_rmem[nt / 2][nt % 2 * 2 + r] = pack2<In>(S_rmem[0][nt][2 * r], S_rmem[0][nt][2 * r + 1]);
            }
    }

    // Two scores -> weights, and their sum.
    __device__ __forceinline__ float weigh(int nt, int r, float scale) {
        float &x = S_rmem[0][nt][2 * r], &y = S_rmem[0][nt][2 * r + 1];
        x = exp2_fast(__fmaf_rn(x, scale, -state.reference[r]));
        y = exp2_fast(__fmaf_rn(y, scale, -state.reference[r]));
        return x + y;
    }

    // The lane's largest score of a row in a part, if it is positive: such numbers are in the order of their bits, and integers have a
    // maximum of three in one instruction.
    __device__ __forceinline__ float positive_top(int part, int r) const {
        int top = 0;
#pragma unroll
        for (int nt = part * PART; nt < part * PART + PART; ++nt)
            top = __vimax3_s32(top, __float_as_int(S_rmem[0][nt][2 * r]), __float_as_int(S_rmem[0][nt][2 * r + 1]));
        return __int_as_float(top);
    }

    __device__ __forceinline__ void round() {
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                P_rmem[k][i] = pack2<In>(S_rmem[0][2 * k + i / 2][i % 2 * 2], S_rmem[0][2 * k + i / 2][i % 2 * 2 + 1]);
    }
};
