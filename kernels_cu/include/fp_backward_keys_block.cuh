// A block of backward_fp.cu that owns keys: its work and what it loads.
#include "include/fp_backward_block.cuh"

// The keys of a block, and the rows that see them, head by head and tile by tile.
template <class C> struct KeysBlock {
    using T = typename C::T;
    const FpBackwardParams& p;
    WorkItem work;  // head: of keys and values; m_tile: counted from the last tile of keys, so that the first come first
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
