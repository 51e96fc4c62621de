// What a warp of decode.cu does with a tile of keys. C is the configuration of decode.cu.
#include "include/decode_e4m3.cuh"
#include "include/decode_fragments.cuh"
#include "include/decode_load.cuh"
#include "include/score.cuh"

// A warp's share of the rows and keys of a block.
template <class C> struct WarpDecode {
    const DecodeParams& p;
    ScoreTransform<C::SCORE> score;
    using Fragment = Fragments<C::TURNED>;
    static constexpr int Q_COLUMNS = C::TURNED ? 32 : 16;  // of a fragment of queries
    typename Fragment::template State<2 * C::MT> state;
    u32 Q_rmem[C::Q_IN_RMEM ? C::DQK / Q_COLUMNS : 1][C::MT][4];
    float O_rmem[C::MT][C::OT][4];
    float S_rmem[C::MT][C::NT][4];
    int query[2 * C::MT];    // of the lane's rows
    float slope[2 * C::MT];  // of their heads
    float factor[2 * C::MT];  // of their queries, see prepare_queries
    ValueUnit unit;          // of the accumulators if C::SCALED

    __device__ __forceinline__ WarpDecode(const DecodeParams& p) : p(p), score(p) {}

    // Of the block's rows, the lane's row r; of a tile's keys, the warp's first one. What follows from the thread's number is worked out
    // anew for every tile: registers are scarce.
    static __device__ __forceinline__ int warp_row(int thread) { return thread / 32 / C::KEY_WARPS * C::WARP_ROWS; }
    static __device__ __forceinline__ int row(int thread, int r) { return warp_row(thread) + Fragment::row(thread % 32, r); }
    static __device__ __forceinline__ int key(int thread) { return thread / 32 % C::KEY_WARPS * C::KEYS; }

    // The value column of number c, 0 or 1, of the lane's rows in product ot, if C::SCALED.
    static __device__ __forceinline__ int column(int lane, int ot, int c) {
        return C::TURNED ? 16 * ot + lane / 4 * 2 + c : ot / 2 * 16 + lane % 4 * 4 + 2 * c + ot % 2;
    }

    // A part begins, whose queries are in shared memory.
    __device__ __forceinline__ void begin(const Piece& piece, u32 smem) {
        const int thread = C::thread();
        if constexpr (C::SCALED) {
            prepare_queries<C>(piece.queries, smem + C::FACTORS_SMEM, thread);
            __syncthreads();
        }
        if constexpr (C::Q_IN_RMEM) {
#pragma unroll
            for (int k = 0; k < C::DQK / Q_COLUMNS; ++k)
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt)
                    ldmatrix_x4(Q_rmem[k][mt], C::QTile::fragment(Q_frag(piece, thread), mt, k * Q_COLUMNS / 16));
        }
        begin_rows(piece, smem);
    }

    // The same apart from the queries.
    __device__ __forceinline__ void begin_rows(const Piece& piece, u32 smem) {
        const int thread = C::thread();
        state.init();
        unit.init();
        clear(O_rmem);
        const PackedRows rows(p, C::M, piece.batch, piece.head);
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            query[r] = 0, slope[r] = 0.0f, factor[r] = 1.0f;
            if constexpr (C::SCALED && same<typename C::In, Bf16>)
                factor[r] = __uint_as_float(load_smem_4(smem + C::FACTORS_SMEM + 4 * row(thread, r)));
            if constexpr (!C::ONE) query[r] = rows.query(p, row(thread, r));
            if constexpr ((C::SCORE & SCORE_ALIBI) != 0)
                if (rows.first + row(thread, r) < p.rows)
                    slope[r] = p.alibi_slopes[i64(piece.batch) * p.heads_q + rows.head(p, row(thread, r))];
        }
    }

    // Scores -> logits, -inf where they are invisible; whether rows may see different ones of the warp's keys.
    __device__ __forceinline__ bool mask(const Piece& piece) {
        const int thread = C::thread(), first_key = piece.key + key(thread), lane_key = first_key + Fragment::first_key(thread % 32);
        int position[2 * C::MT];
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) position[r] = piece.position + query[r];
        apply_score<C::SCORE, typename C::Order>(S_rmem, score, slope, position, lane_key);
        bool cut = false;
        if constexpr (C::ARRAY) {
            cut = first_key + C::KEYS > piece.mask_key && first_key < piece.mask_key + p.mask_columns;
            if (cut) mask_elements(piece, thread, lane_key);
        }
        const Visibility<C::MASK> visible(p, piece.range);
        if (!visible.all(piece.position, piece.position + (C::ONE ? 0 : p.q_rows - 1), first_key, first_key + C::KEYS)) {
            apply_mask<C::MASK, typename C::Order>(S_rmem, visible, position, lane_key);
            cut = true;
        }
        return cut;
    }

    // O += P V
    __device__ __forceinline__ void values(u32 V_smem) {
        const int thread = C::thread();
        if constexpr (C::TURNED) {
            const u32 V_frag = fragment_b<typename C::VTile>(V_smem, thread) + key(thread) * C::VTile::ROW_BYTES;
#pragma unroll
            for (int k = 0; k < C::KEYS / 16; ++k) multiply_vp<C>(O_rmem, S_rmem[0][k], V_frag, k);
        } else {
            const u32 V_frag = fragment_a<typename C::VTile>(V_smem, key(thread), thread);
#pragma unroll
            for (int k = 0; k < C::KEYS / 16; ++k) {
                u32 a[C::MT][4];
                round_weights<C, typename C::Product>(a, S_rmem, k);
                if constexpr (C::SCALED) multiply_pv_e4m3<C>(O_rmem, a, V_frag, k);
                else multiply_pv<C>(O_rmem, a, V_frag, k);
            }
        }
    }

    __device__ __forceinline__ void tile(const Piece& piece, u32 stage_smem) {
        const int thread = C::thread();
        if constexpr (C::TURNED) {
            multiply_kq<C>(S_rmem, Q_rmem, Q_frag(piece, thread), fragment_a<typename C::KTile>(stage_smem, key(thread), thread));
        } else {
            const u32 K_frag = fragment_b<typename C::KTile>(stage_smem, thread) + key(thread) * C::KTile::ROW_BYTES;
            if constexpr (C::SCALED) multiply_qk_e4m3<C>(S_rmem, Q_rmem, Q_frag(piece, thread), K_frag);
            else multiply_qk<C>(S_rmem, Q_rmem, Q_frag(piece, thread), K_frag);
        }
        if constexpr (C::SCALED) scale_scores(stage_smem + C::SCALES_SMEM);
        const bool cut = mask(piece);
        u32 hidden = 0;  // a bit for each of the lane's scores
        if constexpr (C::CUTS) hidden = which_are_hidden();
        float top[2 * C::MT];
        state.tops(top, S_rmem);
        state.update(S_rmem, O_rmem, top, p.logit_scale);
        if constexpr (C::SCALED) scale_weights(stage_smem + C::SCALES_SMEM + 4 * C::N);
        if constexpr (C::CUTS) {
            if (cut && not_finite(stage_smem + C::V_SMEM)) {
                values_one_by_one(stage_smem + C::V_SMEM, hidden);
                return;
            }
        }
        values(stage_smem + C::V_SMEM);
    }

  private:
    // The scales of the lane's keys.
    static __device__ __forceinline__ void load_scales(float (&x)[C::NT][2], u32 scales_smem) {
        const int thread = C::thread();
        const u32 first = scales_smem + 4 * (key(thread) + Fragment::first_key(thread % 32));
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
            for (int c = 0; c < 2; ++c) x[nt][c] = __uint_as_float(load_smem_4(first + 4 * C::Order::key(nt, c)));
    }

    __device__ __forceinline__ void scale_scores(u32 scales_smem) {
        float x[C::NT][2];
        load_scales(x, scales_smem);
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    S_rmem[mt][nt][c] *= x[nt][c % 2];
                    if constexpr (same<typename C::In, Bf16>) S_rmem[mt][nt][c] *= factor[2 * mt + c / 2];
                }
    }

    // A weight of 0 stays 0, whatever the scale of a key that is not seen holds.
    __device__ __forceinline__ void scale_weights(u32 scales_smem) {
        float x[C::NT][2];
        load_scales(x, scales_smem);
        unit.fit(x, O_rmem);
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) S_rmem[mt][nt][c] = S_rmem[mt][nt][c] == 0.0f ? 0.0f : S_rmem[mt][nt][c] * x[nt][c % 2];
    }

    static __device__ __forceinline__ u32 Q_frag(const Piece& piece, int thread) {
        if constexpr (C::TURNED) return fragment_q<typename C::QTile>(piece.queries, thread % 32);
        else return fragment_a<typename C::QTile>(piece.queries, warp_row(thread), thread);
    }

    __device__ __forceinline__ void mask_elements(const Piece& piece, int thread, int lane_key) {
        const PackedRows rows(p, C::M, piece.batch, piece.head);
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            const int own = row(thread, r);
            const int head = rows.first + own < p.rows ? rows.head(p, own) : 0;
            const Matrix<1> matrix(p.mask, p.mask_stride, piece.batch, head, p.matrix_rows, p.mask_columns, false);
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (matrix.element(query[r], lane_key + C::Order::key(nt, c) - piece.mask_key, 1) == 0)
                        S_rmem[r / 2][nt][r % 2 * 2 + c] = -infinity();
        }
    }

    __device__ __forceinline__ u32 which_are_hidden() const {
        static_assert(!C::CUTS || C::MT * C::NT <= 8, "");
        u32 bits = 0;
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) bits |= (S_rmem[mt][nt][c] == -infinity() ? 1u : 0u) << ((mt * C::NT + nt) * 4 + c);
        return bits;
    }

    // Whether a value of the warp's keys is infinite or NaN.
    __device__ __forceinline__ bool not_finite(u32 V_smem) const {
        constexpr int WORDS = C::DV / C::PACK;  // of a row, 16 bits each
        const int thread = C::thread();
        bool found = false;
#pragma unroll 4
        for (int i = thread % 32; i < C::KEYS * WORDS / 8; i += 32) {
            const int column = i % (WORDS / 8) * 8;
            const uint4 x = load_smem_16(
                V_smem + column / C::VTile::BLOCK * C::VTile::BLOCK_BYTES +
                C::VTile::offset(key(thread) + i / (WORDS / 8), column % C::VTile::BLOCK / 8));
            found = found || any_not_finite<typename C::Kv>(x);
        }
        return __any_sync(0xffffffffu, found);
    }

    // O += P V without 0 * v where a row does not see v: that would be NaN if v is infinite or NaN.
    __device__ __forceinline__ void values_one_by_one(u32 V_smem, u32 hidden) {
        const int thread = C::thread(), lane = thread % 32;
#pragma unroll 1
        for (int own = 0; own < C::KEYS; ++own) {
            const int from = Fragment::holder(own, lane), place = Fragment::place(own);  // of the weight: a lane, and which of its scores
            const u32 which = 1u << place;
            const u32 from_hidden = __shfl_sync(0xffffffffu, hidden, from);
            float weight[2 * C::MT];
            bool seen[2 * C::MT];
#pragma unroll
            for (int r = 0; r < 2 * C::MT; ++r) {
                u32 bits = 0;  // of the weight: registers have no index at run time
#pragma unroll
                for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        bits |= which >> (2 * nt + c) & 1 ? __float_as_uint(S_rmem[r / 2][nt][r % 2 * 2 + c]) : 0u;
                weight[r] = __uint_as_float(__shfl_sync(0xffffffffu, bits, from));
                seen[r] = (from_hidden >> ((r / 2 * C::NT + place / 2) * 4 + r % 2 * 2 + place % 2) & 1) == 0;
            }
#pragma unroll
            for (int ot = 0; ot < C::OT; ++ot) {
                const float2 v = two_values(V_smem, key(thread) + own, lane, ot);
#pragma unroll
                for (int r = 0; r < 2 * C::MT; ++r) {
                    add_value(O_rmem[r / 2][ot][r % 2 * 2], weight[r], v.x, seen[r]);
                    add_value(O_rmem[r / 2][ot][r % 2 * 2 + 1], weight[r], v.y, seen[r]);
                }
            }
        }
    }

    // Of a key's values in shared memory, those in the lane's columns of product ot.
    static __device__ __forceinline__ float2 two_values(u32 V_smem, int row, int lane, int ot) {
        using Tile = typename C::VTile;
        if constexpr (!C::SCALED) {
            const u32 row_smem = V_smem + ot / Tile::CHUNKS * Tile::BLOCK_BYTES + Tile::offset(row, ot % Tile::CHUNKS);
            return unpack2<typename C::In>(load_smem_4(row_smem + lane % 4 * 4));
        } else {
            float x[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int at = column(lane, ot, c), chunk = at / 16;
                const u32 row_smem = V_smem + chunk / Tile::CHUNKS * Tile::BLOCK_BYTES + Tile::offset(row, chunk % Tile::CHUNKS);
                x[c] = unpack2<Fp16>(e4m3_to_fp16<0>(load_smem_4(row_smem + at % 16 / 4 * 4) >> at % 4 * 8)).x;
            }
            return {x[0], x[1]};
        }
    }

    static __device__ __forceinline__ void add_value(float& to, float weight, float v, bool seen) {
        if (fabsf(v) < infinity()) to = fmaf(weight, v, to);
        else if (seen) to += v;
    }
};
