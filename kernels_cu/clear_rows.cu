// Packed rows that prefill_fa2 does not write: those behind the last sequence, and those beyond a max_seqlen that is too small. O = 0,
// LSE = -inf. Only the device knows which they are where it alone knows cu_seqlens_q. Launched before the kernel that writes the others.
//
// A thread looks up one row, by a binary search over cu_seqlens_q; the block then clears the rows that its threads found, one after the
// other. Where there is nothing to clear, which is the rule, a block costs log2(batch) loads.
#include "include/schedule.cuh"

constexpr int CLEAR_ROWS = 128;  // of a block, which has as many threads

// Whether a block of prefill_fa2 writes this row. FLAT: see work_item.
template <bool FLAT> __device__ __forceinline__ bool is_written(const PrefillParams& p, int row) {
    int low = -1, high = p.batch + 1;  // the last entry that is not beyond the row
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (index_at(p, p.cu_seqlens_q, 1, middle) <= row) low = middle;
        else high = middle;
    }
    if (low < 0 || low >= p.batch) return false;
    return FLAT || row - index_at(p, p.cu_seqlens_q, 1, low) < i64(p.m_tiles) * p.tile_rows;
}

// T, Lse: numbers as wide as those of out and of the LSE.
template <class T, class Lse, bool FLAT> __device__ __forceinline__ void clear_rows(const PrefillParams& p) {
    const int first = blockIdx.x * CLEAR_ROWS, own = first + threadIdx.x;
    const bool clear = own < p.q_rows && !is_written<FLAT>(p, own);
    if (!__syncthreads_or(clear)) return;
    for (int r = 0; r < CLEAR_ROWS; ++r) {
        if (!__syncthreads_or(clear && threadIdx.x == r)) continue;
        T* out = static_cast<T*>(p.out) + (first + r) * p.out_stride.row;
        for (int i = threadIdx.x; i < p.heads_q * p.head_dim_v; i += CLEAR_ROWS)
            out[i / p.head_dim_v * p.out_stride.head + i % p.head_dim_v * p.out_stride.column] = T(0);
        if (p.lse)
            for (int head = threadIdx.x; head < p.heads_q; head += CLEAR_ROWS)
                reinterpret_cast<Lse*>(p.lse)[head * p.lse_stride.head + (first + r) * p.lse_stride.row] = -infinity();
    }
}
