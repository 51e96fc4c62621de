// What a warp of decode.cu does with a tile of keys where it is products that would take the time: on sm_90a, with more than 64 rows.
//
// Four warps with 16 rows each multiply together, see wgmma.cuh; a warpgroup has all keys of a tile. Its products run while it does
// something else: with the scores of a tile are started the values of the one before, and those run while softmax does.
#include "include/decode_finish.cuh"
#include "include/wgmma.cuh"

// Of the block's threads, those who work.
template <class C> struct Working : C {
    static constexpr int THREADS = C::WORKERS;
};

template <class C> struct GroupDecode : WarpDecode<C> {
    using Base = WarpDecode<C>;
    using Base::p, Base::state, Base::Q_rmem, Base::O_rmem, Base::S_rmem;
    u32 P_rmem[C::N / 16][1][4];  // weights of the last tile
    bool large;                   // see SoftmaxState::is_large

    static_assert(C::MT == 1 && C::KEY_WARPS == 1 && C::N == 64 && C::Q_IN_RMEM && !C::CUTS, "");

    __device__ __forceinline__ GroupDecode(const DecodeParams& p) : Base(p) {}

    // Start to bring the queries of a part.
    __device__ __forceinline__ void load_queries(int batch, int head, u32 smem) const {
        const PackedRows rows(p, C::M, batch, head);
        QueryLoader<Working<C>>(p, rows).load(p, rows, thread_index(), smem + C::ALL_Q_SMEM);
        copies_commit();
    }

    // A part begins, whose queries were asked for.
    __device__ __forceinline__ void begin(const Piece& piece, u32 smem) {
        copies_wait<0>();
        C::sync();
        Base::begin(piece, smem);
        large = false;
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

    // The part is over: the lane's share of it to memory, as a partial result.
    __device__ __forceinline__ void store_part(const Piece& piece) {
        const int thread = thread_index(), lane = thread % 32, count = p.rows - PackedRows(p, C::M, piece.batch, piece.head).first;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state.reduce(r);
            const int row = Base::row(thread, r);
            if (row >= count) continue;
            const i64 at = i64(piece.slot) * C::M + row;
            if (lane % 4 == 0) p.part_state[at] = {state.reference[r], state.sum[r]};
            float2* out = reinterpret_cast<float2*>(p.part_out + at * C::DV + lane % 4 * 2);
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot) out[4 * ot] = {O_rmem[0][ot][2 * r], O_rmem[0][ot][2 * r + 1]};
        }
    }

    // The same to shared memory, for both blocks of a pair. The 8 columns of a product lie at (product ^ row % 4): see gather_warps().
    __device__ __forceinline__ void place_part(u32 smem) {
        const int thread = thread_index(), lane = thread % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state.reduce(r);
            const int row = Base::row(thread, r);
            if (lane % 4 == 0)
                store_smem(smem + C::STATE_SMEM + 8 * row, make_uint2(__float_as_uint(state.reference[r]), __float_as_uint(state.sum[r])));
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot)
                store_smem(smem + 4 * (row * C::DV + (ot ^ (row & 3)) * 8 + lane % 4 * 2),
                           make_uint2(__float_as_uint(O_rmem[0][ot][2 * r]), __float_as_uint(O_rmem[0][ot][2 * r + 1])));
        }
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
        state.lane_tops(top, S_rmem);
        if (state.rises(top, p.logit_scale)) {
            state.share(top);
            state.raise(top, p.logit_scale, [&](int r, float f) { factor[r] = f, raised = true; });
            large = state.is_large();
        }
        state.weigh(S_rmem, p.logit_scale, large);
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
        using Tile = typename C::KTile;
        constexpr int PER_BLOCK = Tile::BLOCK / 16;
        const u64 first = wgmma_matrix<Tile>(K_smem);
#pragma unroll
        for (int k = 0; k < C::DQK / 16; ++k) {
            const u64 b = wgmma_move(first, k / PER_BLOCK * Tile::BLOCK_BYTES + k % PER_BLOCK * 32);
            if (k == 0) wgmma_64x64x16<false, false>(typename C::In(), S_rmem[0], Q_rmem[k][0], b);
            else wgmma_64x64x16<false, true>(typename C::In(), S_rmem[0], Q_rmem[k][0], b);
        }
    }

    // O += P V
    __device__ __forceinline__ void values(u32 V_smem) {
        using Tile = typename C::VTile;
        constexpr int COLUMNS = C::DV % 128 == 0 ? 128 : Tile::BLOCK;  // of a product
        const u64 first = wgmma_matrix<Tile>(V_smem);
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k)
#pragma unroll
            for (int column = 0; column < C::DV; column += COLUMNS) {
                const u64 b = wgmma_move(first, column / Tile::BLOCK * Tile::BLOCK_BYTES + k * 16 * Tile::ROW_BYTES);
                float(*d)[4] = O_rmem[0] + column / 8;
                if constexpr (COLUMNS == 128) wgmma_64x128x16(typename C::In(), d, P_rmem[k][0], b);
                else if constexpr (COLUMNS == 64) wgmma_64x64x16<true, true>(typename C::In(), d, P_rmem[k][0], b);
                else wgmma_64x32x16(typename C::In(), d, P_rmem[k][0], b);
            }
    }
};
