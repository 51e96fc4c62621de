// What a warpgroup of backward_fa3.cu does where heads are wider than 128. dK and dV of 64 keys then fill the registers of both warpgroups:
// each has half of their columns, and half of the queries of a tile of scores. Weights and gradients of scores of both halves meet in
// shared memory, where all products behind them find them.
#include "include/backward_scores.cuh"

template <class C> struct BackwardWide : BackwardScores<C> {
    using In = typename C::In;
    using Base = BackwardScores<C>;
    using Base::p, Base::number, Base::lead, Base::smem, Base::S_rmem, Base::dP_rmem, Base::P_rmem, Base::dS_rmem;
    static constexpr int COLUMNS = C::DQK / 2;  // of dK and dV, of a warpgroup
    float dQ_rmem[C::M / 8][4], dK_rmem[COLUMNS / 8][4], dV_rmem[COLUMNS / 8][4];
    u32 steps;  // that have been done

    __device__ __forceinline__ BackwardWide(const BackwardParams& p, int number, u32 smem) : Base(p, number, smem), steps(0) {}

    // The first key of the warp, of the block's; of what it stores, the first column.
    static __device__ __forceinline__ int first_key() { return thread_index() % 128 / 32 * 16; }
    __device__ __forceinline__ int first_column() const { return number * COLUMNS; }

    // All tiles of queries. Tiles of keys that have some are counted by `turn`.
    __device__ __forceinline__ void differentiate(const KeyTile<C>& keys, u32 turn) {
        Base::clear(dK_rmem);
        Base::clear(dV_rmem);
        if (keys.last < keys.first) return;
        Base::look(keys, first_key() + thread_index() % 32 / 4);
        const Ring<typename C::KStages> stage{smem + C::K_SMEM, 0, turn % 2};
        stage.wait_full();
        const int first_head = uniform(keys.head * p.prefill.group);
#pragma unroll 1
        for (int head = first_head; head < first_head + p.prefill.group; ++head) {
            const int first_tile = uniform(int((head * p.places + first_place_of(p, keys.batch, keys.seq)) / C::M));
            int m = keys.first;
            for (int cut = keys.whole_first; m <= keys.last; cut = keys.last + 1) {
#pragma unroll 1
                for (; m < cut; ++m) step<true>(m, first_tile + m);
#pragma unroll 1
                for (; m < keys.whole_end; ++m) step<false>(m, first_tile + m);
            }
        }
        stage.release(lead);
    }

    // How often the warp has written what is to be added.
    __device__ __forceinline__ u32 times() const { return 2 * steps; }

    // Behind the last tile of keys.
    __device__ __forceinline__ void end() {
        if (lead) additions_wait();
    }

  private:
    __device__ __forceinline__ Ring<typename C::QStages> queries() const { return {smem + C::Q_SMEM, int(steps % 2), steps / 2 % 2}; }
    __device__ __forceinline__ Ring<typename C::GStages> douts() const { return {smem + C::G_SMEM, 0, steps % 2}; }

    // Where weights of this step are, and its gradients of scores behind them; in turn, so that nobody reads those of two steps ago.
    __device__ __forceinline__ u32 weights_smem() const { return smem + C::S_SMEM + steps % 2 * (2 * C::STile::BYTES); }

    template <bool MASKED> __device__ __forceinline__ void step(int m, int tile) {
        using Q = typename C::QTile;
        using G = typename C::GTile;
        const u32 own = number * C::OWN * 4 + thread_index() % 4 * 8;  // of the numbers of each row
        queries().wait_full();
        multiply<typename C::KTile, Q>(S_rmem, place(C::K_SMEM), queries().stage_smem());
        douts().wait_full();
        multiply<typename C::VTile, G>(dP_rmem, place(C::V_SMEM), douts().stage_smem());
        wgmma_wait<1>();
        Base::template weigh<MASKED>(m * C::M + number * C::OWN, smem + C::LSE_SMEM + queries().stage * C::M * 4 + own);
        wgmma_wait<0>();
        Base::template differentiate_scores<MASKED>(smem + C::DELTA_SMEM + own);
        write(P_rmem, weights_smem());
        write(dS_rmem, weights_smem() + C::STile::BYTES);
        async_proxy_fence();
        block_barrier<256>(1);
        multiply_for_dq(0);
        add<G>(dV_rmem, weights_smem(), douts().stage_smem());
        add<Q>(dK_rmem, weights_smem() + C::STile::BYTES, queries().stage_smem());
        wgmma_wait<2>();
        add_up(tile, 0);
        multiply_for_dq(1);
        wgmma_wait<1>();
        douts().release(lead);
        queries().release(lead);
        wgmma_wait<0>();
        add_up(tile, 1);
        ++steps;
    }

    // See BackwardWarpgroup::place().
    __device__ __forceinline__ u32 place(u32 of) const { return smem + of + (steps >> 31); }

    // 64 keys by this warpgroup's queries: the product of rows of both.
    template <class A, class B> __device__ __forceinline__ void multiply(float (&to)[C::OWN / 8][4], u32 a_smem, u32 b_smem) {
        const WgmmaMatrix<A> a(a_smem);
        const WgmmaMatrix<B> b(b_smem + number * C::OWN * B::ROW_BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::DQK / 16; ++i) {
            const int block = i / 4, column = i % 4 * 32;
            wgmma_ss(In(), Columns<C::OWN>(), to, a.at(block * A::BLOCK_BYTES + column), b.at(block * B::BLOCK_BYTES + column), i != 0);
        }
        wgmma_commit();
    }

    // 64 keys by this warpgroup's columns: += keys by queries, in shared memory, times rows of queries.
    template <class B> __device__ __forceinline__ void add(float (&to)[COLUMNS / 8][4], u32 a_smem, u32 b_smem) {
        const WgmmaMatrix<typename C::STile> a(a_smem);
        const WgmmaMatrix<B> b(b_smem + number * (COLUMNS / 64) * B::BLOCK_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < C::M / 16; ++k) wgmma_st(In(), Columns<COLUMNS>(), to, a.at(k * 32), b.at(k * 16 * B::ROW_BYTES), true);
        wgmma_commit();
    }

    // dQ^T of 64 columns, of which the warpgroup has two times as many: K^T dS^T.
    __device__ __forceinline__ void multiply_for_dq(int half) {
        using K = typename C::KTile;
        using S = typename C::STile;
        const WgmmaMatrix<K> k(place(C::K_SMEM) + (number * 2 + half) * K::BLOCK_BYTES);
        const WgmmaMatrix<S> s(weights_smem() + S::BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::N / 16; ++i)
            wgmma_tt(In(), Columns<C::M>(), dQ_rmem, k.at(i * 16 * K::ROW_BYTES), s.at(i * 16 * S::ROW_BYTES), i != 0);
        wgmma_commit();
    }

    // It is there.
    __device__ __forceinline__ void add_up(int tile, int half) {
        Base::wait_for_part(2 * steps + half);
#pragma unroll
        for (int j = 0; j < C::M / 8; ++j) store_smem(Base::part_smem() + j * 512 + thread_index() % 32 * 16, dQ_rmem[j]);
        Base::add_part(tile, (number * 2 + half) * 4 + Base::warp() % 4, 2 * steps + half);
    }

    // The warpgroup's columns of weights, or of gradients of scores, for both.
    __device__ __forceinline__ void write(const u32 (&x)[C::OWN / 16][4], u32 to_smem) const {
        const int lane = thread_index() % 32;
#pragma unroll
        for (int k = 0; k < C::OWN / 16; ++k)
            stmatrix_x4(to_smem + C::STile::offset(first_key() + lane % 16, number * (C::OWN / 8) + 2 * k + lane / 16), x[k]);
    }
};
