// The backward pass in float32 and float64 by recomputation, for sm_75 and every later GPU: nothing of size rows x keys is stored, and
// nothing is added by atomics, so that every run gives the same bits.
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
#include "include/fp_backward_block.cuh"

// Its keys, from tile to tile, of a block of rows.
template <class C> struct RowsBlock {
    using T = typename C::T;
    const FpBackwardParams& p;
    WorkItem work;
    Sequence seq;
    int first_row, first_column;
    KeyRange keys;  // that some row sees
    int first, count;  // tiles
    u32 smem;

    __device__ __forceinline__ RowsBlock(const FpBackwardParams& p, u32 smem)
        : p(p), work(work_item(p, blockIdx.x / C::SLICES)), seq(sequence(p, work.batch)), first_row(work.m_tile * C::M),
          first_column(blockIdx.x % C::SLICES * C::QK_COLUMNS), keys{0, 0}, first(0), count(0), smem(smem) {
        if (!exists()) return;
        const int rows = min(C::M, seq.q_length - first_row), position = first_row + seq.position;
        keys = Visibility<C::MASK>(p, seq).of_any(position, position + rows - 1);
        if (keys.empty()) return;
        first = keys.begin / C::N, count = (keys.end - 1) / C::N - first + 1;
    }

    __device__ __forceinline__ bool exists() const { return first_row < seq.q_length && (first_column == 0 || first_column < p.head_dim); }

    __device__ __forceinline__ void load_own() const {
        const int thread = thread_index();
        typename C::OwnQkLoader(p.q, p.q_stride, work.batch, seq.q_begin, work.head, 0, p.head_dim)
            .load(thread, smem, first_row, 0, seq.q_length);
        typename C::OwnVLoader(p.dout, p.dout_stride, work.batch, seq.q_begin, work.head, 0, p.head_dim_v)
            .load(thread, smem + C::OWN_V_SMEM, first_row, 0, seq.q_length);
    }

    __device__ __forceinline__ void load(int step, u32 stage_smem, bool with_v) const {
        const int thread = thread_index(), key = (first + step) * C::N, head = work.head / p.group;
        const typename C::QkLoader loader(p.k, p.k_stride, work.batch, seq.k_begin, head, 0, p.head_dim);
        loader.load(thread, stage_smem, key, keys.begin, keys.end);
        if (with_v)
            typename C::VLoader(p.v, p.v_stride, work.batch, seq.k_begin, head, 0, p.head_dim_v)
                .load(thread, stage_smem + C::V_SMEM, key, keys.begin, keys.end);
    }

    __device__ __forceinline__ double dlse(int row) const {
        return p.dlse ? *row_gmem<T>(p.dlse, p.dlse_stride, work.batch, seq.q_begin + row, work.head) : T(0);
    }
};

// delta = dO . O of a row, by its four lanes.
template <class T>
__device__ __forceinline__ double delta_of_forward(const FpBackwardParams& p, const WorkItem& work, const Sequence& seq, int row) {
    const T* o = row_gmem<T>(p.out, p.out_stride, work.batch, seq.q_begin + row, work.head);
    const T* g = row_gmem<T>(p.dout, p.dout_stride, work.batch, seq.q_begin + row, work.head);
    double sum = 0.0;
#pragma unroll 1
    for (int column = thread_index() % 4; column < p.head_dim_v; column += 4)
        sum = fma(double(o[column * p.out_stride.column]), double(g[column * p.dout_stride.column]), sum);
    return sum;
}

// What the block must find anew; `known` gets the rows' deltas.
template <class C> __device__ __forceinline__ Anew what_anew(const RowsBlock<C>& block, double (&known)[2 * C::MT]) {
    using T = typename C::T;
    const FpBackwardParams& p = block.p;
    if (!p.trusted || i64(block.seq.q_length) * p.group <= FEW_ROWS) return ALL;
    const int lane_row = block.first_row + Lane<C>().row();
    const Visibility<C::MASK> visible(p, block.seq);
    Anew wanted = NOTHING;
#pragma unroll
    for (int r = 0; r < 2 * C::MT; ++r) {
        const int row = lane_row + 8 * r, position = row + block.seq.position;
        const bool here = row < block.seq.q_length;
        const T lse = here ? *row_gmem<T>(p.lse, p.lse_stride, block.work.batch, block.seq.q_begin + row, block.work.head) : T(-infinity());
        const KeyRange seen = visible.of_all(position, position);
        double delta = 0.0;
        if (lse != -infinity()) {
            if (seen.end - seen.begin <= FEW_KEYS) wanted = ALL;
            else delta = delta_of_forward<T>(p, block.work, block.seq, row);
        }
#pragma unroll
        for (int lanes = 1; lanes <= 2; lanes *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, lanes);
        if (!(delta * 0.0 == 0.0)) wanted = ALL;
        if (wanted == NOTHING && lse != -infinity() && !(C::Real::abs(lse) < LARGE_LSE)) wanted = NORMALISER;
        known[r] = delta;
    }
    return __syncthreads_or(wanted == ALL) ? ALL : __syncthreads_or(wanted != NOTHING) ? NORMALISER : NOTHING;
}

// Where a warp of a block of rows stands at a step.
template <class C> struct RowsStep : Lane<C> {
    int position, key;  // of its first row, of the tile's first key
    bool needed, all;   // some of its rows see some of the keys; all see all

    __device__ __forceinline__ RowsStep(const RowsBlock<C>& block, const Visibility<C::MASK>& visible, int step)
        : position(block.first_row + this->warp_row + block.seq.position), key((block.first + step) * C::N) {
        const int last = position + C::WARP_ROWS - 1;
        const KeyRange seen = visible.of_any(position, last);
        needed = seen.begin < key + C::N && key < seen.end;
        all = visible.all(position, last, key, key + C::N);
    }

    __device__ __forceinline__ int lane_position() const { return position + this->lane / 4; }
    __device__ __forceinline__ int lane_key() const { return key + this->lane % 4 * 2; }
};

template <class C> __device__ __forceinline__ void backward_fp_rows(const FpBackwardParams& p, unsigned char* shared) {
    using T = typename C::T;
    using Real = typename C::Real;
    const RowsBlock<C> block(p, smem_address(shared));
    if (!block.exists()) return;
    const Pairs<C::MASK, C::SCORE, Real> pairs(p, block.seq, block.work.batch, block.work.head);
    T s[C::MT][C::NT][4], dp[C::MT][C::NT][4];
    block.load_own();

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
        const double dlse = block.dlse(row);
        const RowResult end = anew == NOTHING
            ? row_of_forward<T>(
                  *row_gmem<T>(p.lse, p.lse_stride, block.work.batch, block.seq.q_begin + row, block.work.head), known[r], sink, unit, dlse)
            : finish_row(running[r], anew == ALL, known[r], sink, unit, dlse);
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
        if (block.first_column == 0) dbias = row_gmem<Bias>(p.dbias, p.dbias_stride, block.work.batch, 0, block.work.head);
    }
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
    }
    T* dq = row_gmem<T>(p.dq, p.dq_stride, block.work.batch, block.seq.q_begin + lane_row, block.work.head) +
        block.first_column * p.dq_stride.column;
    store_sums(
        sums, lane, p.dq_stride.column, columns, p.dq_vector != 0, T(p.factor),
        [&](int r) { return lane_row + 8 * r < block.seq.q_length ? dq + 8 * r * p.dq_stride.row : nullptr; }, [](int) { return false; });
}

// Its rows, from tile to tile and head to head, of a block of keys.
template <class C> struct KeysBlock {
    using T = typename C::T;
    const FpBackwardParams& p;
    WorkItem work;  // head: of keys and values; its last tiles of keys come first
    Sequence seq;
    int first_key, slice;
    KeyRange keys;  // that exist
    int first, tiles;  // of the rows of a head that see some of them
    u32 smem;

    __device__ __forceinline__ KeysBlock(const FpBackwardParams& p, u32 smem)
        : p(p), work(work_item(p, blockIdx.x / C::SLICES, u32(p.heads_kv))), seq(sequence(p, work.batch)),
          first_key((p.m_tiles - 1 - work.m_tile) * C::M), slice(blockIdx.x % C::SLICES), keys{0, 0}, first(0), tiles(0), smem(smem) {
        seq.q_length = min(seq.q_length, p.longest);
        keys = {max(seq.kv_start, first_key), min(seq.kv_length, first_key + C::M)};
        if (keys.empty()) return;
        const KeyRange positions = Visibility<C::MASK>(p, seq).positions_of_any(keys.begin, keys.end - 1);
        const int begin = max(0, positions.begin - seq.position), end = min(seq.q_length, positions.end - seq.position);
        if (begin < end) first = begin / C::N, tiles = (end - 1) / C::N - first + 1;
    }

    __device__ __forceinline__ int head(int step) const { return work.head * p.group + step / tiles; }
    __device__ __forceinline__ int row(int step) const { return (first + step % tiles) * C::N; }

    __device__ __forceinline__ void load_own() const {
        const int thread = thread_index();
        typename C::OwnQkLoader(p.k, p.k_stride, work.batch, seq.k_begin, work.head, 0, p.head_dim)
            .load(thread, smem, first_key, keys.begin, keys.end);
        typename C::OwnVLoader(p.v, p.v_stride, work.batch, seq.k_begin, work.head, 0, p.head_dim_v)
            .load(thread, smem + C::OWN_V_SMEM, first_key, keys.begin, keys.end);
    }

    __device__ __forceinline__ void load(int step, u32 stage_smem) const {
        const int thread = thread_index(), head = this->head(step), row = this->row(step);
        typename C::QkLoader(p.q, p.q_stride, work.batch, seq.q_begin, head, 0, p.head_dim).load(thread, stage_smem, row, 0, seq.q_length);
        typename C::VLoader(p.dout, p.dout_stride, work.batch, seq.q_begin, head, 0, p.head_dim_v)
            .load(thread, stage_smem + C::V_SMEM, row, 0, seq.q_length);
        const i64 place = row_place(p, work.batch, seq, head, row);
        const void* const arrays[3] = {p.row_base, p.row_inverse, p.row_delta};
#pragma unroll
        for (int i = 0; i < 3; ++i)
            for (int n = thread; n < C::N; n += C::THREADS)
                copy_or_zero<sizeof(T)>(
                    stage_smem + C::NUMBERS_SMEM + (4 * n + i) * sizeof(T), static_cast<const T*>(arrays[i]) + place + n,
                    row + n < seq.q_length);
    }

    // Of row n of a step.
    __device__ __forceinline__ RowNumbers<T> numbers(u32 stage_smem, int n) const {
        const u32 at = stage_smem + C::NUMBERS_SMEM + 4 * n * sizeof(T);
        const Chunk<T> first = load_chunk<T>(at);
        if constexpr (sizeof(T) == 4) return {first.x[0], first.x[1], first.x[2]};
        else return {first.x[0], first.x[1], load_chunk<T>(at + 16).x[0]};
    }
};

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
    T* dk = row_gmem<T>(p.dk, p.dk_stride, block.work.batch, block.seq.k_begin + lane_key, block.work.head) +
        qk_column * p.dk_stride.column;
    T* dv = row_gmem<T>(p.dv, p.dv_stride, block.work.batch, block.seq.k_begin + lane_key, block.work.head) + v_column * p.dv_stride.column;
    store_sums(
        dk_sums, lane, p.dk_stride.column, p.head_dim - qk_column, p.keys_vector != 0, T(p.factor),
        [&](int r) { return lane_key + 8 * r < own_keys ? dk + 8 * r * p.dk_stride.row : nullptr; }, hidden);
    store_sums(
        dv_sums, lane, p.dv_stride.column, p.head_dim_v - v_column, p.keys_vector != 0, T(1),
        [&](int r) { return lane_key + 8 * r < own_keys ? dv + 8 * r * p.dv_stride.row : nullptr; }, hidden);
}
