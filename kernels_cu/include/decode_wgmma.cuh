// What a warp of decode.cu does with a tile of keys where it is products that would take the time: on sm_90a, with more than 64 rows.
//
// Four warps with 16 rows each multiply together, see wgmma.cuh; a warpgroup has all keys of a tile. Its products run while it does
// something else: with the scores of a tile are started the values of the one before, and those run while softmax does.
#include "include/async.cuh"
#include "include/decode_finish.cuh"
#include "include/wgmma.cuh"

// The same in all lanes, and seen to be so: the compiler makes products wait for each other next to a branch that might part a warpgroup.
__device__ __forceinline__ int uniform(int x) { return int(__shfl_sync(0xffffffffu, u32(x), 0)); }

// Of the block's threads, those who work, and those who load.
template <class C> struct Working : C {
    static constexpr int THREADS = C::WORKERS;
};

template <class C> struct Loading : C {
    static constexpr int THREADS = C::THREADS - C::WORKERS;
    static __device__ __forceinline__ int load_thread() { return thread_index() - C::WORKERS; }
};

template <class C> struct GroupDecode : WarpDecode<C> {
    using Base = WarpDecode<C>;
    using Base::p, Base::state, Base::Q_rmem, Base::O_rmem, Base::S_rmem;
    u32 P_rmem[C::N / 16][1][4];  // weights of the last tile

    static_assert(C::MT == 1 && C::KEY_WARPS == 1 && C::N == 64 && C::Q_IN_RMEM && !C::CUTS, "");

    __device__ __forceinline__ GroupDecode(const DecodeParams& p) : Base(p) {}

    // A part begins. All workers bring its queries.
    __device__ __forceinline__ void begin(const Piece& piece, u32 smem) {
        const PackedRows rows(p, C::M, piece.batch, piece.head);
        QueryLoader<Working<C>>(p, rows).load(p, rows, thread_index(), piece.queries);
        copies_commit();
        copies_wait<0>();
        C::sync();
        Base::begin(piece, smem);
    }

    __device__ __forceinline__ void first_tile(const Piece& piece, u32 stage_smem) {
        begin_scores(stage_smem);
        wgmma_wait<0>();
        softmax(piece);
    }

    // A tile; the values of the one before run while softmax does.
    __device__ __forceinline__ void tile(const Piece& piece, u32 stage_smem, u32 before_smem) {
        begin_scores(stage_smem);
        values(before_smem + C::V_SMEM);
        wgmma_commit();
        wgmma_wait<1>();
        softmax(piece);
    }

    // The part is over: the values of its last tile.
    __device__ __forceinline__ void end(u32 stage_smem) {
        wgmma_fence();
        values(stage_smem + C::V_SMEM);
        wgmma_commit();
        wgmma_wait<0>();
    }

  private:
    __device__ __forceinline__ void begin_scores(u32 stage_smem) {
        wgmma_fence();
        scores(stage_smem);
        wgmma_commit();
    }

    // Scores -> weights, and wait for all products.
    __device__ __forceinline__ void softmax(const Piece& piece) {
        Base::mask(piece);
        float top[2], factor[2];
        bool raised = false;
        state.tops(top, S_rmem);
        state.raise(top, p.logit_scale, [&](int r, float f) { factor[r] = f, raised = true; });
        state.weigh(S_rmem, p.logit_scale);
        settle(S_rmem[0]);
        if (!raised) {  // to wait in either branch keeps the compiler from doing so before the weights are computed
            wgmma_wait<0>();
        } else {
            wgmma_wait<0>();
            state.scale_row(O_rmem, 0, factor[0]);
            state.scale_row(O_rmem, 1, factor[1]);
        }
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k) round_weights<C>(P_rmem[k], S_rmem, k);
    }

    // S = Q K^T
    __device__ __forceinline__ void scores(u32 K_smem) {
        constexpr int PER_BLOCK = C::KTile::BLOCK / 16;
#pragma unroll
        for (int k = 0; k < C::DQK / 16; ++k) {
            const u64 b = wgmma_matrix<typename C::KTile>(K_smem + k / PER_BLOCK * C::KTile::BLOCK_BYTES + k % PER_BLOCK * 32);
            if (k == 0) wgmma_64x64x16<false, false>(typename C::In(), S_rmem[0], Q_rmem[k][0], b);
            else wgmma_64x64x16<false, true>(typename C::In(), S_rmem[0], Q_rmem[k][0], b);
        }
    }

    // O += P V
    __device__ __forceinline__ void values(u32 V_smem) {
        constexpr int COLUMNS = C::DV % 128 == 0 ? 128 : C::VTile::BLOCK;  // of a product
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k)
#pragma unroll
            for (int column = 0; column < C::DV; column += COLUMNS) {
                const u64 b = wgmma_matrix<typename C::VTile>(
                    V_smem + column / C::VTile::BLOCK * C::VTile::BLOCK_BYTES + k * 16 * C::VTile::ROW_BYTES);
                float(*d)[4] = O_rmem[0] + column / 8;
                if constexpr (COLUMNS == 128) wgmma_64x128x16(typename C::In(), d, P_rmem[k][0], b);
                else if constexpr (COLUMNS == 64) wgmma_64x64x16<true, true>(typename C::In(), d, P_rmem[k][0], b);
                else wgmma_64x32x16(typename C::In(), d, P_rmem[k][0], b);
            }
    }
};

// The block's stages, as those who load and those who work hand them to each other.
template <class C> struct Ring {
    u32 smem;
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ u32 stage_smem() const { return smem + stage * C::STAGE_BYTES; }
    __device__ __forceinline__ u32 full() const { return smem + C::BARRIERS_SMEM + 16 * stage; }  // the tile is there
    __device__ __forceinline__ u32 empty() const { return full() + 8; }                           // nobody needs it any more

    __device__ __forceinline__ void advance() {
        if (++stage == C::STAGES) stage = 0, parity ^= 1;
    }

    __device__ __forceinline__ void init() const {
        for (Ring r = *this; r.parity == 0; r.advance()) {
            mbarrier_init(r.full(), C::THREADS - C::WORKERS);
            mbarrier_init(r.empty(), C::WORKERS / 32);
        }
        mbarrier_init_fence();
    }

    // What the thread has copied to the stage is there; on to the next one.
    __device__ __forceinline__ void hand_over() {
        async_proxy_fence();
        mbarrier_arrive(full());
        advance();
    }

    // The tile, when it is there.
    __device__ __forceinline__ Piece wait() const {
        mbarrier_wait(full(), parity);
        return Piece::load(C::piece_smem(smem, stage));
    }

    // The warp is done with the stage.
    __device__ __forceinline__ void release() const {
        __syncwarp();
        if (thread_index() % 32 == 0) mbarrier_arrive(empty());
    }
};

// Tiles are handed over when they are there, while LATE more are under way: it is those who load that wait for the copies, and not the
// workers, whose time is dearer.
template <class C> __device__ __forceinline__ void load_tiles(const DecodeParams& p, Ring<C> ring) {
    constexpr int LATE = 2;
    static_assert(C::STAGES >= LATE + 3, "a tile is handed over before the workers have freed the place of the one that follows LATE after it");
    Loader<Loading<C>> loader(p);
    Ring<C> next = ring;  // to be handed over
    int under_way = 0;
#pragma unroll 1
    while (loader.more()) {
        const auto k = loader.k_loader();
        const auto v = loader.v_loader();
        bool ends;
        do {
            ends = loader.next.ends();
            mbarrier_wait(ring.empty(), ring.parity ^ 1);
            loader.load(k, v, ring.smem, ring.stage);
            copies_commit();
            ring.advance();
            if (under_way < LATE) {
                ++under_way;
            } else {
                copies_wait<LATE>();
                next.hand_over();
            }
        } while (!ends);
    }
    copies_wait<0>();
    for (; under_way > 0; --under_way) next.hand_over();
    mbarrier_wait(ring.empty(), ring.parity ^ 1);
    if (thread_index() == C::WORKERS) store_smem(C::piece_smem(ring.smem, ring.stage) + 12, Piece::QUIT);
    next.hand_over();
}

template <class C> __device__ __forceinline__ void work_on_tiles(const DecodeParams& p, Ring<C> ring) {
    GroupDecode<C> group(p);
    const Deal deal(p, UnitIndex<C::MASK, C::N>(p).total() * p.passes);
#pragma unroll 1
    while (true) {
        Piece piece = ring.wait();
        if (uniform(piece.flags) & Piece::QUIT) return;
        group.begin(piece, ring.smem);
        group.first_tile(piece, ring.stage_smem());
#pragma unroll 1
        while (!(uniform(piece.flags) & Piece::ENDS)) {
            const Ring<C> before = ring;
            ring.advance();
            piece = ring.wait();
            group.tile(piece, ring.stage_smem(), before.stage_smem());
            before.release();
        }
        group.end(ring.stage_smem());
        finish(p, group, piece, deal, ring.smem, ring.stage_smem());
        ring.release();
        ring.advance();
    }
}

// Two warpgroups work, and a third one loads, with fewer registers.
template <class C> __device__ __forceinline__ void decode_in_groups(const DecodeParams& p, u32 smem) {
    static_assert(C::WORKERS == 256 && C::THREADS == 384, "of 504 registers for one thread of each group");
    const Ring<C> ring{smem};
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    if (uniform(thread_index() / 128) == C::WORKERS / 128) {
        registers_lower<88>();
        load_tiles(p, ring);
    } else {
        registers_raise<208>();
        work_on_tiles(p, ring);
    }
}
