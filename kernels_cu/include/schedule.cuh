// Which piece of the work a block of the grid does, and where its sequence lies.
#include "include/params.cuh"

__device__ __forceinline__ int clamp(i64 x, i64 low, i64 high) { return int(x < low ? low : x > high ? high : x); }

struct WorkItem {
    int batch, head, m_tile;
};

// Blocks go section by section (a number of heads whose keys and values fit the L2 cache together), within a section from
// the last rows to the first: under a causal mask the longest tiles start first and the short ones fill the gaps.
__device__ __forceinline__ WorkItem work_item(const PrefillParams& p, u32 block) {
    const u32 pairs = u32(p.batch) * u32(p.heads_q), in_section = u32(p.section) * u32(p.m_tiles);
    const u32 first = block / in_section * u32(p.section), rest = block % in_section;
    const u32 size = min(u32(p.section), pairs - first);
    const u32 pair = first + rest % size;
    return {int(pair / u32(p.heads_q)), int(pair % u32(p.heads_q)), p.m_tiles - 1 - int(rest / size)};
}

struct Sequence {
    int q_begin, q_length;  // rows of the query array
    int k_begin;            // row of the key array where key 0 is
    int kv_start, kv_length;
    int position;           // query row r stands at r + position
};

// Lengths on the device cannot be checked beforehand: they are clamped to what the arrays hold.
__device__ __forceinline__ Sequence sequence(const PrefillParams& p, int batch) {
    Sequence s{0, p.q_rows, 0, 0, p.k_rows, 0};
    if (p.cu_seqlens_q) {
        s.q_begin = clamp(p.cu_seqlens_q[batch], 0, p.q_rows);
        s.q_length = clamp(p.cu_seqlens_q[batch + 1], s.q_begin, p.q_rows) - s.q_begin;
    }
    if (p.cu_seqlens_k) {
        s.k_begin = clamp(p.cu_seqlens_k[batch], 0, p.k_rows);
        s.kv_length = clamp(p.cu_seqlens_k[batch + 1], s.k_begin, p.k_rows) - s.k_begin;
    }
    if (p.kv_lengths) s.kv_length = clamp(p.kv_lengths[batch], 0, p.k_rows - s.k_begin);
    if (p.kv_start) s.kv_start = clamp(p.kv_start[batch], 0, s.kv_length);
    s.position = p.upper_left ? 0 : s.kv_length - s.q_length;
    return s;
}
