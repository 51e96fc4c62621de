// The backward pass in float32 and float64 by recomputation, for sm_75 and every later GPU: nothing of size rows x keys is stored, and
// nothing is added by atomics, so that every run gives the same bits; but for the gradient of a bias that several logits share.
//
// Two kernels. The first owns tiles of query rows: it walks over their keys for the rows' statistics (see fp_backward_rows.cuh), leaves
// them in memory, and walks again for dQ = scale dS K. The second owns tiles of keys of one key/value head and walks over the rows of all
// its query heads: dV = P^T dO, dK = scale dS^T Q. With P the weights, dP = dO V^T and dS = P (dP - delta), through the softcap if there is
// one. The second computes its scores as [keys][rows], so that P^T and dS^T are in the registers where the next products want them.
//
// Products, of 2 D operations for each pair of row and key: 3 and 4, and 2 more where the statistics are found anew, 1 if only the
// normalisers are.
//
// What is not finite reaches only those who see it. 0 times it is NaN, and so a block whose sums are not all finite walks once more, with
// the guard that add_simt has: hidden pairs then add nothing.
#include "include/fp_backward_keys_block.cuh"
#include "include/fp_backward_rows_block.cuh"

// The statistics of a block's rows, and dq.
template <class C> __device__ __forceinline__ void backward_fp_rows(const FpBackwardParams& p, unsigned char* shared) {
    using T = typename C::T;
    using Real = typename C::Real;
    const RowsBlock<C> block(p, smem_address(shared));
    if (!block.exists()) return;
    const Pairs<C::MASK, C::SCORE, Real> pairs(p, block.seq, block.work.batch, block.work.head);
    T s[C::MT][C::NT][4], dp[C::MT][C::NT][4];
    block.load_own();

    // What is known of the rows, and a walk over their keys for what is not.
    double known[2 * C::MT] = {};
    const Anew anew = what_anew(block, known);
    RunningRow<Real> running[2 * C::MT];
#pragma unroll
    for (int r = 0; r < 2 * C::MT; ++r) running[r].init();
    walk<C>(
        anew == NOTHING ? 0 : block.count, block.smem, [&](int step, u32 stage) { block.load(step, stage, anew == ALL); },
        [&](int step, u32 stage) {
            const RowsStep<C> at(block, pairs.visible, step);
            if (!at.needed) return;
            raw_scores<C>(s, dp, block.smem, stage, at, anew == ALL);
            exact_score(s, pairs.score, pairs.arrays, at.lane_position(), at.lane_key());
            if (!at.all) apply_mask<C::MASK, KeyOrder<false>>(s, pairs.visible, at.lane_position(), at.lane_key());
#pragma unroll
            for (int r = 0; r < 2 * C::MT; ++r) running[r].add(s, dp, r, pairs.unit, anew == ALL);
        });

    RowNumbers<T> numbers[2 * C::MT];
    const int lane = Lane<C>().lane, lane_row = block.first_row + Lane<C>().row();
    const double unit = p.logit_scale64 * Exact64::LN2, sink = sink_of(p, block.work.head);
#pragma unroll
    for (int r = 0; r < 2 * C::MT; ++r) {
        const int row = lane_row + 8 * r;
        running[r].reduce(pairs.unit);
        numbers[r] = {0, 0, 0};
        if (row >= block.seq.q_length) continue;
        const RowResult end = anew == NOTHING
            ? row_of_forward<T>(block.of_row(p.lse, p.lse_stride, row), known[r], sink, unit, block.dlse(row))
            : finish_row(running[r], anew == ALL, known[r], sink, unit, block.dlse(row));
        numbers[r] = {T(end.base), T(end.inverse), T(end.delta)};
        if (lane % 4 != 0 || block.first_column != 0) continue;
        const i64 place = row_place(p, block.work.batch, block.seq, block.work.head, row);
        static_cast<T*>(p.row_base)[place] = numbers[r].base;
        static_cast<T*>(p.row_inverse)[place] = numbers[r].inverse;
        static_cast<T*>(p.row_delta)[place] = numbers[r].delta;
        if (p.row_sink) static_cast<T*>(p.row_sink)[place] = T(end.sink);
    }

    void* dbias = nullptr;
    if constexpr (bias_bytes(C::SCORE) != 0) {
        using Bias = typename decltype(pairs.arrays)::Bias;
        const int batch = block.work.batch, head = block.work.head;
        if (block.first_column == 0 && p.shared) dbias = row_gmem<double>(p.dbias, p.dbias_stride, batch, 0, head);
        else if (block.first_column == 0) dbias = row_gmem<Bias>(p.dbias, p.dbias_stride, batch, 0, head);
    }
    // The walk for dq, which also leaves the bias's gradient where each of its elements is met: here alone.
    T sums[C::MT][C::QK_COLUMNS / 8][4];
    const int columns = p.head_dim - block.first_column;
#pragma unroll 1
    for (bool guarded = false;; guarded = true) {
#pragma unroll
        for (int i = 0; i < C::MT * C::QK_COLUMNS / 2; ++i) sums[i * 2 / C::QK_COLUMNS][i / 4 % (C::QK_COLUMNS / 8)][i % 4] = 0;
        walk<C>(
            block.count, block.smem, [&](int step, u32 stage) { block.load(step, stage, true); },
            [&](int step, u32 stage) {
                const RowsStep<C> at(block, pairs.visible, step);
                if (!at.needed) return;
                raw_scores<C>(s, dp, block.smem, stage, at, true);
                pairs.of_rows(s, dp, at.lane_position(), at.lane_key(), at.all, numbers, dbias);
                const u32 K_smem = stage + block.first_column * sizeof(T);
                add_product<C, typename C::OfQk::KTile>(sums, dp, K_smem, at.lane, columns, guarded);
            });
        bool strange = false;
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) strange = strange || (lane_row + 8 * r < block.seq.q_length && is_strange(sums, r));
        if (guarded || !__syncthreads_or(strange)) break;
        dbias = nullptr;  // it is there
    }
    T* dq = row_gmem<T>(p.dq, p.dq_stride, block.work.batch, block.seq.q_begin + lane_row, block.work.head) +
        block.first_column * p.dq_stride.column;
    store_sums(
        sums, lane, p.dq_stride.column, columns, p.dq_vector != 0, T(p.factor),
        [&](int r) { return lane_row + 8 * r < block.seq.q_length ? dq + 8 * r * p.dq_stride.row : nullptr; }, [](int) { return false; });
}

// dk and dv of a block's keys.
template <class C> __device__ __forceinline__ void backward_fp_keys(const FpBackwardParams& p, unsigned char* shared) {
    using T = typename C::T;
    const KeysBlock<C> block(p, smem_address(shared));
    if (block.first_key >= key_rows(p, block.work.batch, block.seq)) return;
    const int qk_column = block.slice * C::QK_COLUMNS, v_column = block.slice * C::V_COLUMNS;
    if (qk_column >= p.head_dim && v_column >= p.head_dim_v) return;
    T s[C::MT][C::NT][4], dp[C::MT][C::NT][4];
    T dk_sums[C::MT][C::QK_COLUMNS / 8][4], dv_sums[C::MT][C::V_COLUMNS / 8][4];
    block.load_own();

#pragma unroll 1
    for (bool guarded = false;; guarded = true) {
#pragma unroll
        for (int i = 0; i < C::MT * C::QK_COLUMNS / 2; ++i) dk_sums[i * 2 / C::QK_COLUMNS][i / 4 % (C::QK_COLUMNS / 8)][i % 4] = 0;
#pragma unroll
        for (int i = 0; i < C::MT * C::V_COLUMNS / 2; ++i) dv_sums[i * 2 / C::V_COLUMNS][i / 4 % (C::V_COLUMNS / 8)][i % 4] = 0;
        walk<C>(
            block.tiles * p.group, block.smem, [&](int step, u32 stage) { block.load(step, stage); },
            [&](int step, u32 stage) {
                const Pairs<C::MASK, C::SCORE, typename C::Real> pairs(p, block.seq, block.work.batch, block.head(step));
                const int row = block.row(step), rows = min(C::N, block.seq.q_length - row), position = row + block.seq.position;
                const Lane<C> at;
                const int key = block.first_key + at.warp_row, end_key = key + C::WARP_ROWS;
                const KeyRange seen = pairs.visible.of_any(position, position + rows - 1);
                if (seen.begin >= end_key || key >= seen.end) return;
                raw_scores<C>(s, dp, block.smem, stage, at, true);
                const bool all = rows == C::N && pairs.visible.all(position, position + rows - 1, key, end_key);
                const int pair = at.lane % 4 * 2;
                pairs.of_keys(s, dp, position + pair, key + at.lane / 4, all, [&](int n) { return block.numbers(stage, n + pair); });
                add_product<C, typename C::OfV::KTile>(
                    dv_sums, s, stage + C::V_SMEM + v_column * sizeof(T), at.lane, p.head_dim_v - v_column, guarded);
                add_product<C, typename C::OfQk::KTile>(
                    dk_sums, dp, stage + qk_column * sizeof(T), at.lane, p.head_dim - qk_column, guarded);
            });
        const int lane_key = block.first_key + Lane<C>().row();
        bool strange = false;
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            const int key = lane_key + 8 * r;
            strange = strange || (key >= block.keys.begin && key < block.keys.end && (is_strange(dk_sums, r) || is_strange(dv_sums, r)));
        }
        if (guarded || !__syncthreads_or(strange)) break;
    }
    const int lane = Lane<C>().lane, lane_key = block.first_key + Lane<C>().row();
    const int own_keys = key_rows(p, block.work.batch, block.seq);
    const auto hidden = [&](int r) { return lane_key + 8 * r < block.keys.begin || lane_key + 8 * r >= block.keys.end; };
    const i64 first = block.seq.k_begin + lane_key;
    T* dk = row_gmem<T>(p.dk, p.dk_stride, block.work.batch, first, block.work.head) + qk_column * p.dk_stride.column;
    T* dv = row_gmem<T>(p.dv, p.dv_stride, block.work.batch, first, block.work.head) + v_column * p.dv_stride.column;
    store_sums(
        dk_sums, lane, p.dk_stride.column, p.head_dim - qk_column, p.keys_vector != 0, T(p.factor),
        [&](int r) { return lane_key + 8 * r < own_keys ? dk + 8 * r * p.dk_stride.row : nullptr; }, hidden);
    store_sums(
        dv_sums, lane, p.dv_stride.column, p.head_dim_v - v_column, p.keys_vector != 0, T(1),
        [&](int r) { return lane_key + 8 * r < own_keys ? dv + 8 * r * p.dv_stride.row : nullptr; }, hidden);
}
