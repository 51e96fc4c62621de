// What a warpgroup of backward_fa3.cu does with its 64 keys: it has dK and dV of them in registers and walks over tiles of queries.
//
// Scores are made transposed, keys by queries, so that weights and their gradients are operands of the products for dV and dK as they are.
// dQ needs the gradients of both warpgroups: they meet in shared memory, and the product comes a tile later, so that neither waits for the
// other. The warpgroups start products in turn, twice a tile, so that one computes while the other multiplies.
#include "include/backward_load.cuh"
#include "include/wgmma.cuh"

template <class C> struct BackwardWarpgroup {
    using In = typename C::In;
    const BackwardParams& p;
    const int number;
    const bool lead;  // the thread speaks for its warp
    const u32 smem;
    float S_rmem[C::M / 8][4], dP_rmem[C::M / 8][4], dQ_rmem[C::DQ_BY_QUERIES ? C::DQ_QUERIES / 8 : 1][4];
    float dK_rmem[C::DQK / 8][4], dV_rmem[C::DV / 8][4];
    u32 P_rmem[C::M / 16][4], dS_rmem[C::M / 16][4];
    int dq_tile;      // of dq_sum, to which the product for the step before belongs; below 0 if there is none
    u32 seen_first;   // how far the thread's first query of tile 0 is behind the first one that sees its first key
    u32 seen[2];      // queries that see each of its keys
    u32 steps;        // that have been done: queries and dO have two stages
    u32 handed;       // gradients of scores that have been added to dQ: they have two stages as well

    __device__ __forceinline__ BackwardWarpgroup(const BackwardParams& p, int number, u32 smem)
        : p(p), number(number), lead(thread_index() % 32 == 0), smem(smem), dq_tile(-1), steps(0), handed(0) {
        if (number == 1) end_turn();
    }

    // Sums for dQ: where scores were, if registers are short.
    __device__ __forceinline__ auto& dq_sums() {
        if constexpr (C::DQ_BY_QUERIES) return dQ_rmem;
        else return S_rmem;
    }

    // Of the eight that multiply.
    static __device__ __forceinline__ int warp() { return thread_index() / 32 - 4; }

    // Its own part of the memory where dQ waits to be added, which is its at the end of a tile of keys, too.
    __device__ __forceinline__ u32 part_smem() const { return smem + C::DQ_SMEM + warp() * C::PART_BYTES; }

    // The first of the thread's two keys, of the block's; the other one is 8 further.
    __device__ __forceinline__ int own_key() const { return number * 64 + thread_index() % 128 / 32 * 16 + thread_index() % 32 / 4; }

    // All tiles of queries. Tiles of keys that have some are counted by `turn`.
    __device__ __forceinline__ void differentiate(const KeyTile<C>& keys, u32 turn) {
        clear(dK_rmem);
        clear(dV_rmem);
        if (keys.last < keys.first) return;
        begin();
        const int key = keys.key + own_key();
        const KeyRange positions = keys.visible.positions_of_any(key, key);
        seen_first = u32(keys.seq.position + thread_index() % 4 * 2) - u32(positions.begin);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool there = key + 8 * r >= keys.seq.kv_start && key + 8 * r < keys.seq.kv_length;
            seen[r] = there ? u32(positions.end) - u32(positions.begin) : 0;
        }
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

    template <int N> static __device__ __forceinline__ void clear(float (&x)[N][4]) {
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) x[i][c] = 0.0f;
    }

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
        weigh<MASKED>(m);
        wgmma_wait<0>();
        differentiate_scores<MASKED>();
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
        if (dq_tile < 0) return;
        if (lead) additions_wait();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < C::DQ_QUERIES / 8; ++j)
            store_smem(part_smem() + j * 512 + thread_index() % 32 * 16, dq_sums()[j]);
        async_proxy_fence();
        __syncwarp();
        if (lead) add_bytes(p.dq_sum + i64(dq_tile) * (C::M * C::DQK) + warp() * (C::PART_BYTES / 4), part_smem(), C::PART_BYTES);
    }

    // Scores -> weights. A lane has two keys, 8 apart, and of every 8 queries 2 (l % 4) and the next one.
    template <bool MASKED> __device__ __forceinline__ void weigh(int m) {
        const u32 lse_smem = smem + C::LSE_SMEM + queries().stage * C::M * 4 + thread_index() % 4 * 8;
        const float scale = p.prefill.logit_scale;
#pragma unroll
        for (int j = 0; j < C::M / 8; ++j) {
            const float2 lse = load_smem_8(lse_smem + 32 * j);
#pragma unroll
            for (int c = 0; c < 4; ++c) S_rmem[j][c] = exp2_fast(fmaf(S_rmem[j][c], scale, c % 2 == 0 ? -lse.x : -lse.y));
        }
        if constexpr (MASKED) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 first = u32(m * C::M) + seen_first - 8 * r;
#pragma unroll
                for (int j = 0; j < C::M / 8; ++j)
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        if (first + 8 * j + c >= seen[r]) S_rmem[j][2 * r + c] = 0.0f;
            }
        }
    }

    // dP -> gradients of scores, and both they and the weights to operands. A weight of 0 has none, whatever dP is.
    template <bool MASKED> __device__ __forceinline__ void differentiate_scores() {
        const u32 delta_smem = smem + C::DELTA_SMEM + douts().stage * C::M * 4 + thread_index() % 4 * 8;
#pragma unroll
        for (int j = 0; j < C::M / 8; ++j) {
            const float2 delta = load_smem_8(delta_smem + 32 * j);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float x = S_rmem[j][c] * (dP_rmem[j][c] - (c % 2 == 0 ? delta.x : delta.y));
                dP_rmem[j][c] = MASKED && S_rmem[j][c] == 0.0f ? 0.0f : x;
            }
        }
#pragma unroll
        for (int k = 0; k < C::M / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                P_rmem[k][i] = pack2<In>(S_rmem[2 * k + i / 2][i % 2 * 2], S_rmem[2 * k + i / 2][i % 2 * 2 + 1]);
                dS_rmem[k][i] = pack2<In>(dP_rmem[2 * k + i / 2][i % 2 * 2], dP_rmem[2 * k + i / 2][i % 2 * 2 + 1]);
            }
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
