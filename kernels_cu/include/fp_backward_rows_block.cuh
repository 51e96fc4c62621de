// A block of backward_fp.cu that owns rows: its work, what it loads, and how much of the statistics of its rows it must find anew.
#include "include/fp_backward_block.cuh"

// The rows of a block, and the keys that they see, tile by tile.
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
        typename C::QkLoader(p.k, p.k_stride, work.batch, seq.k_begin, head, 0, p.head_dim)
            .load(thread, stage_smem, key, keys.begin, keys.end);
        if (with_v)
            typename C::VLoader(p.v, p.v_stride, work.batch, seq.k_begin, head, 0, p.head_dim_v)
                .load(thread, stage_smem + C::V_SMEM, key, keys.begin, keys.end);
    }

    // A row's number in an array like lse.
    __device__ __forceinline__ T of_row(const void* array, const Strides& s, int row) const {
        return *row_gmem<T>(array, s, work.batch, seq.q_begin + row, work.head);
    }

    __device__ __forceinline__ T dlse(int row) const { return p.dlse ? of_row(p.dlse, p.dlse_stride, row) : T(0); }
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

// What the block must find anew, for all of its rows if for one; `known` gets the rows' deltas.
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
        const T lse = row < block.seq.q_length ? block.of_row(p.lse, p.lse_stride, row) : T(-infinity());
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
