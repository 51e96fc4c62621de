// What a warpgroup of prefill_fa3.cu does with its 64 query rows.
//
// Products run on their own while the warps compute: where TURNS, warpgroups start them one after the other, so that one has its softmax
// while the others multiply. The scores of a tile of keys and the values of the one before are started together.
#include "include/fa3_softmax.cuh"
#include "include/fa3_tile.cuh"
#include "include/score.cuh"

// What is the same in all lanes already, in a register that the warp has together: what is computed from it stays in such ones.
__device__ __forceinline__ int warp_register(int x) { return int(__reduce_or_sync(0xffffffffu, u32(x))); }

template <class C> struct Warpgroup : WarpgroupSoftmax<C> {
    using In = typename C::In;
    using Order = KeyOrder<false>;
    using Base = WarpgroupSoftmax<C>;
    using Base::p, Base::state, Base::S_rmem, Base::O_rmem, Base::P_rmem;
    const int number;
    const bool lead;  // the thread speaks for its warp
    Ring<typename C::QStages> queries;
    Ring<typename C::KStages> keys;
    Ring<typename C::VStages> values;

    __device__ __forceinline__ Warpgroup(const PrefillParams& p, int number, u32 smem)
        : Base(p), number(number), lead(thread_index() % 32 == 0), queries{smem + C::Q_SMEM, number}, keys{smem + C::K_SMEM},
          values{smem + C::V_SMEM} {
        if (number == 0) give_turn(0);  // its first one, which no other gives it
    }

    // The first of the thread's two rows, of the 64; the other one is 8 further.
    static __device__ __forceinline__ int own_row() { return thread_index() % 128 / 32 * 16 + thread_index() % 32 / 4; }

    // The query of the first of the warpgroup's rows.
    __device__ __forceinline__ int first_query(const QueryTile<C>& tile) const { return tile.query(p, tile.first_query, 64 * number); }

    // All keys of a tile of queries; whether there was one.
    __device__ __forceinline__ bool attend(const QueryTile<C>& tile) {
        if (tile.batch < 0) return false;
        if (tile.sees_none()) {
            start(tile);
            return true;
        }
        // Tiles of keys that the mask cuts come first and, with a window, last; in a loop of their own the others do not pay for it. Those
        // to the right of all that these 64 rows see are for the other warpgroups. Where they see none at all, they pass all but one, as a
        // branch here would keep the compiler from counting stages once for a whole warp.
        const int position = first_query(tile) + tile.seq.position, last_position = tile.query(p, position, 63);
        const KeyRange any = tile.visible.of_any(position, last_position), all = tile.visible.of_all(position, last_position);
        const bool none = any.empty() | (first_query(tile) >= tile.seq.q_length) | (last_position < tile.seq.position);
        const int first_keys = tile.first_keys, last_keys = none ? first_keys : (any.end - 1) / C::N;
        const int whole_end = max(all.end, 0) / C::N, whole_first = (all.begin + C::N - 1) / C::N;
        pass(warp_register(tile.last_keys - last_keys));
        queries.wait_full();
        int n = last_keys;
        first_step(tile, n, n >= whole_end || n < whole_first, first_keys);
        --n;
        for (int masked = max(first_keys, whole_end); n >= first_keys; masked = first_keys) {
#pragma unroll 1
            for (; n >= masked; --n) next_step<true>(tile, n, first_keys);
#pragma unroll 1
            for (; n >= max(first_keys, whole_first); --n) next_step<false>(tile, n, first_keys);
        }
        last_step();
        queries.skip(C::WARPGROUPS);
        return true;
    }

  private:
    // Who has the turn starts its products. Each warpgroup has a named barrier, 1 + its number, of 256 threads: its own 128, which wait for
    // their turn, and the 128 of the warpgroup before it, which arrive when they give it on and do not wait.
    __device__ __forceinline__ void give_turn(int to) const {
        if (C::TURNS) block_barrier_arrive<256>(1 + to);
    }
    __device__ __forceinline__ void begin_turn() const {
        if (C::TURNS) block_barrier<256>(1 + number);
    }
    __device__ __forceinline__ void end_turn() const { give_turn(number + 1 == C::WARPGROUPS ? 0 : number + 1); }

    // Rows that have seen nothing yet.
    __device__ __forceinline__ void start(const QueryTile<C>& tile) {
        state.init();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = tile.query(p, first_query(tile), own_row() + 8 * r);
            const bool own = u32(query) < u32(tile.seq.q_length);
            this->follows[r] = own ? p.logit_scale : 0.0f;
            state.reference[r] = own ? Fast32::LOWEST : 0.5f * Fast32::LARGE;  // weights are 0
        }
#pragma unroll
        for (int ot = 0; ot < C::DV / 8; ++ot)
#pragma unroll
            for (int c = 0; c < 4; ++c) O_rmem[0][ot][c] = 0.0f;
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
            k.release();
            k.advance();
            v.wait_full();
            v.release();
            v.advance();
        }
        keys.skip(count);
        values.skip(count);
    }

    // The scores of the last tile of keys that the rows see.
    __device__ __forceinline__ void first_step(const QueryTile<C>& tile, int n, bool masked, int first_keys) {
        keys.wait_full();
        begin_turn();
        scores();
        end_turn();
        start(tile);
        wgmma_wait<0>();
        done_with_keys(n == first_keys);
        logits(tile, n, masked);
        Base::template softmax<true>();
        Base::round();
    }

    // The scores of a tile of keys, and the values of the one before; O comes to its references while the scores run. With enough
    // warpgroups, others fill the time until both products are there, and nothing runs during softmax; else the values do.
    template <bool MASKED> __device__ __forceinline__ void next_step(const QueryTile<C>& tile, int n, int first_keys) {
        keys.wait_full();
        begin_turn();
        scores();
        values.wait_full();
        Base::scale_values();
        wgmma_fence();
        add_values();
        if (C::WARPGROUPS > 2) end_turn();
        if constexpr (C::ONE_WAIT) {
            wgmma_wait<0>();
            done_with_values();
        } else {
            wgmma_wait<1>();
            if (C::WARPGROUPS == 2) end_turn();  // two are then half a step apart, and one always has products to run
        }
        done_with_keys(n == first_keys);
        logits(tile, n, MASKED);
        Base::template softmax<false>();
        if constexpr (!C::ONE_WAIT) done_with_values();
        Base::round();
    }

    // The values of the first tile of keys.
    __device__ __forceinline__ void last_step() {
        values.wait_full();
        Base::scale_values();
        wgmma_fence();
        add_values();
        wgmma_wait<0>();
        done_with_values();
    }

    // all: with those of the tile of queries, and so with the queries.
    __device__ __forceinline__ void done_with_keys(bool all) {
        keys.release(lead);
        keys.advance();
        if (all) queries.release(lead);
    }

    __device__ __forceinline__ void done_with_values() {
        values.release(lead);
        values.advance();
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
            wgmma_ss(
                In(), Columns<C::N>(), S_rmem[0], q.at(block * Q::BLOCK_BYTES + column), k.at(block * K::BLOCK_BYTES + column), i != 0);
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
            const int first_position = first_query(tile) + tile.seq.position;
            const int position[2] = {tile.query(p, first_position, own_row()), tile.query(p, first_position, own_row() + 8)};
            apply_mask<C::MASK, Order>(S_rmem, tile.visible, position, n * C::N + thread_index() % 4 * 2);
        }
    }
};
