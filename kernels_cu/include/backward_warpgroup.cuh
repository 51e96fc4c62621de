// What a warpgroup of backward_fa3.cu does with its 64 keys: it has dK and dV of them in registers and walks over tiles of queries.
//
// Scores are made transposed, keys by queries, so that weights and their gradients are operands of the products for dV and dK as they are.
// dQ needs the gradients of both warpgroups: they meet in shared memory, and the product comes a tile later, so that neither waits for the
// other. The warpgroups start products in turn, twice a tile, so that one computes while the other multiplies.
#include "include/backward_scores.cuh"

template <class C> struct BackwardWarpgroup : BackwardScores<C> {
    using In = typename C::In;
    using Base = BackwardScores<C>;
    using Base::p, Base::number, Base::lead, Base::smem, Base::S_rmem, Base::dP_rmem, Base::P_rmem, Base::dS_rmem;
    float dQ_rmem[C::DQ_BY_QUERIES ? C::DQ_QUERIES / 8 : 1][4];
    float dK_rmem[C::DQK / 8][4], dV_rmem[C::DV / 8][4];
    int dq_tile;      // of dq_sum, to which the product for the step before belongs; below 0 if there is none
    u32 steps;        // that have been done: queries and dO have two stages
    u32 handed;       // gradients of scores that have been added to dQ: they have two stages as well

    __device__ __forceinline__ BackwardWarpgroup(const BackwardParams& p, int number, u32 smem)
        : Base(p, number, smem), dq_tile(-1), steps(0), handed(0) {
        if (number == 1) end_turn();
    }

    // Sums for dQ: where scores were, if registers are short.
    __device__ __forceinline__ auto& dq_sums() {
        if constexpr (C::DQ_BY_QUERIES) return dQ_rmem;
        else return S_rmem;
    }

    // The first key of the warp, of the block's; of what it stores, the first column.
    __device__ __forceinline__ int first_key() const { return number * 64 + thread_index() % 128 / 32 * 16; }
    static __device__ __forceinline__ int first_column() { return 0; }

    // All tiles of queries. Tiles of keys that have some are counted by `turn`.
    __device__ __forceinline__ void differentiate(const KeyTile<C>& keys, u32 turn) {
        Base::clear(dK_rmem);
        Base::clear(dV_rmem);
        if (keys.last < keys.first) return;
        begin();
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
        add_to_dq();
        wgmma_wait<0>();
        stage.release(lead);
        add_up();
        dq_tile = -1;
    }

    // How often the warp has written what is to be added.
    __device__ __forceinline__ u32 times() const { return handed; }

    // Behind the last tile of keys.
    __device__ __forceinline__ void end() {
        if (lead) additions_wait();
        if (number == 0) begin_turn();  // which the other one has ended
    }

    template <class Stages> __device__ __forceinline__ Ring<Stages> at(u32 place, u32 step) const {
        return {smem + place, int(step % 2), step / 2 % 2};
    }
    __device__ __forceinline__ Ring<typename C::QStages> queries() const { return at<typename C::QStages>(C::Q_SMEM, steps); }
    __device__ __forceinline__ Ring<typename C::GStages> douts() const { return at<typename C::GStages>(C::G_SMEM, steps); }
    // Gradients of scores: those of the step before, and those of this one. There are some before the first step.
    __device__ __forceinline__ Ring<typename C::SStages> before() const { return at<typename C::SStages>(C::S_SMEM, handed); }
    __device__ __forceinline__ Ring<typename C::SStages> now() const { return at<typename C::SStages>(C::S_SMEM, handed + 1); }

  private:
    __device__ __forceinline__ void begin_turn() const { block_barrier<256>(1 + number); }
    __device__ __forceinline__ void end_turn() const { block_barrier_arrive<256>(2 - number); }

    // Gradients of 0, which the first product for dQ takes: without it the loop would have another first step.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int k = 0; k < C::M / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) dS_rmem[k][i] = 0;
        write(before());
    }

    template <bool MASKED> __device__ __forceinline__ void step(int m, int tile) {
        using Q = typename C::QTile;
        using G = typename C::GTile;
        queries().wait_full();
        begin_turn();
        multiply<typename C::KTile, Q, C::DQK>(S_rmem, place(C::K_SMEM), queries().stage_smem());
        douts().wait_full();
        multiply<typename C::VTile, G, C::DV>(dP_rmem, place(C::V_SMEM), douts().stage_smem());
        end_turn();
        wgmma_wait<1>();
        Base::template weigh<MASKED>(m * C::M, smem + C::LSE_SMEM + queries().stage * C::M * 4 + thread_index() % 4 * 8);
        wgmma_wait<0>();
        Base::template differentiate_scores<MASKED>(smem + C::DELTA_SMEM + douts().stage * C::M * 4 + thread_index() % 4 * 8);
        write(now());
        begin_turn();
        add_to_dq();
        add<G, C::DV>(dV_rmem, P_rmem, douts().stage_smem());
        add<Q, C::DQK>(dK_rmem, dS_rmem, queries().stage_smem());
        end_turn();
        wgmma_wait<2>();
        add_up();
        wgmma_wait<0>();
        queries().release(lead);
        douts().release(lead);
        dq_tile = tile;
        ++steps;
    }

    // Where the block's shared memory is, worked out anew: descriptors that stay the same would otherwise all be kept in registers.
    __device__ __forceinline__ u32 place(u32 of) const { return smem + of + (steps >> 31); }

    // 64 keys by M queries: the product of rows of both.
    template <class A, class B, int D> __device__ __forceinline__ void multiply(float (&to)[C::M / 8][4], u32 a_smem, u32 b_smem) {
        constexpr int PER_BLOCK = 4;
        const WgmmaMatrix<A> a(a_smem + number * 64 * A::ROW_BYTES);
        const WgmmaMatrix<B> b(b_smem);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            const int block = i / PER_BLOCK, column = i % PER_BLOCK * 32;
            wgmma_ss(In(), Columns<C::M>(), to, a.at(block * A::BLOCK_BYTES + column), b.at(block * B::BLOCK_BYTES + column), i != 0);
        }
        wgmma_commit();
    }

    // 64 keys by D columns: += the thread's numbers of keys by queries times rows of queries.
    template <class B, int D> __device__ __forceinline__ void add(float (&to)[D / 8][4], const u32 (&a)[C::M / 16][4], u32 b_smem) {
        const WgmmaMatrix<B> b(b_smem);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < C::M / 16; ++k) wgmma_rs(In(), Columns<D>(), to, a[k], b.at(k * 16 * B::ROW_BYTES), true);
        wgmma_commit();
    }

    // dQ^T of the tile before: K^T dS^T, this warpgroup's part: 64 columns of all queries or, where there are no more, of half of them.
    __device__ __forceinline__ void add_to_dq() {
        using K = typename C::KTile;
        using S = typename C::STile;
        before().wait_full();
        const WgmmaMatrix<K> k(place(C::K_SMEM) + (C::DQ_BY_QUERIES ? 0 : number * K::BLOCK_BYTES));
        const WgmmaMatrix<S> s(before().stage_smem() + (C::DQ_BY_QUERIES ? number * (C::DQ_QUERIES / S::BLOCK) * S::BLOCK_BYTES : 0));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::N / 16; ++i)
            wgmma_tt(In(), Columns<C::DQ_QUERIES>(), dq_sums(), k.at(i * 16 * K::ROW_BYTES), s.at(i * 16 * S::ROW_BYTES), i != 0);
        wgmma_commit();
    }

    // It is there.
    __device__ __forceinline__ void add_up() {
        before().release(lead);
        ++handed;
        if (!C::IN_ORDER && dq_tile < 0) return;  // in order, it is add_in_order() that knows
        Base::wait_for_part(handed - 1);
#pragma unroll
        for (int j = 0; j < C::DQ_QUERIES / 8; ++j)
            store_smem(Base::part_smem() + j * 512 + thread_index() % 32 * 16, dq_sums()[j]);
        Base::add_part(dq_tile, Base::warp(), handed - 1);
    }

    // Gradients of scores, for both warpgroups.
    __device__ __forceinline__ void write(const Ring<typename C::SStages>& to) {
        using S = typename C::STile;
        to.wait_empty();
        const int lane = thread_index() % 32, row = number * 64 + thread_index() % 128 / 32 * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < C::M / 16; ++k) {
            const int chunk = 2 * k + lane / 16;
            stmatrix_x4(to.stage_smem() + chunk / S::CHUNKS * S::BLOCK_BYTES + S::offset(row, chunk % S::CHUNKS), dS_rmem[k]);
        }
        async_proxy_fence();
        __syncwarp();
        if (lead) mbarrier_arrive(to.full());
    }
};
