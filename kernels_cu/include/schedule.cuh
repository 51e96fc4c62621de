// Which piece of the work a block of the grid does, and where its sequence lies.
#include "include/params.cuh"

__device__ __forceinline__ int clamp(i64 x, i64 low, i64 high) { return int(x < low ? low : x > high ? high : x); }

struct WorkItem {
    int batch, head, m_tile;
};

// Entry i of the index array that has this bit in index_bits.
__device__ __forceinline__ i64 index_at(const PrefillParams& p, const void* array, int bit, int i) {
    return p.index_bits & bit ? i64(static_cast<const i32*>(array)[i]) : static_cast<const i64*>(array)[i];
}

// Where in a flat grid the tiles of a sequence begin: a sequence of n rows has the n / M + 1 places that it needs at most.
__device__ __forceinline__ int first_place(const PrefillParams& p, int batch) {
    return clamp(index_at(p, p.cu_seqlens_q, 1, batch), 0, p.q_rows) / p.tile_rows + batch;
}

// Blocks go section by section (a number of heads, as _section() in cuda.py finds it), within a section from
// the last rows to the first: under a causal mask the longest tiles start first and the short ones fill the gaps.
// FLAT: nobody on the host knows the longest sequence. m_tiles is q_rows / tile_rows + batch, which bounds the tiles of all sequences
// together, and a block finds its sequence by itself.
// heads: those that have tiles.
template <bool FLAT = false> __device__ __forceinline__ WorkItem work_item(const PrefillParams& p, u32 block, u32 heads) {
    const u32 pairs = (FLAT ? 1u : u32(p.batch)) * heads, in_section = u32(p.section) * u32(p.m_tiles);
    const u32 first = block / in_section * u32(p.section), rest = block % in_section;
    const u32 size = min(u32(p.section), pairs - first);
    const u32 pair = first + rest % size;
    WorkItem work{int(pair / heads), int(pair % heads), p.m_tiles - 1 - int(rest / size)};
    if constexpr (FLAT) {
        int end = p.batch;  // the sequence is in [work.batch, end)
        while (end - work.batch > 1) {
            const int middle = (work.batch + end) / 2;
            if (first_place(p, middle) <= work.m_tile) work.batch = middle;
            else end = middle;
        }
        work.m_tile = max(work.m_tile - first_place(p, work.batch), 0);
    }
    return work;
}

template <bool FLAT = false> __device__ __forceinline__ WorkItem work_item(const PrefillParams& p, u32 block) {
    return work_item<FLAT>(p, block, u32(p.heads_q));
}

struct Sequence {
    int q_begin, q_length;  // rows of the query array
    int k_begin;            // row of the key array where key 0 is
    int kv_start, kv_length;
    int position;           // query row r stands at r + position
};

// Lengths on the device cannot be checked beforehand: they are clamped to what the arrays and, packed, the sequence hold.
__device__ __forceinline__ Sequence sequence(const PrefillParams& p, int batch) {
    Sequence s{0, p.q_rows, 0, 0, p.k_rows, 0};
    if (p.cu_seqlens_q) {
        s.q_begin = clamp(index_at(p, p.cu_seqlens_q, 1, batch), 0, p.q_rows);
        s.q_length = clamp(index_at(p, p.cu_seqlens_q, 1, batch + 1), s.q_begin, p.q_rows) - s.q_begin;
    }
    if (p.cu_seqlens_k) {
        s.k_begin = clamp(index_at(p, p.cu_seqlens_k, 2, batch), 0, p.k_rows);
        s.kv_length = clamp(index_at(p, p.cu_seqlens_k, 2, batch + 1), s.k_begin, p.k_rows) - s.k_begin;
    }
    if (p.kv_lengths) s.kv_length = clamp(index_at(p, p.kv_lengths, 4, batch), 0, s.kv_length);
    if (p.kv_start) s.kv_start = clamp(index_at(p, p.kv_start, 8, batch), 0, s.kv_length);
    s.position = p.upper_left ? 0 : s.kv_length - s.q_length;
    return s;
}
