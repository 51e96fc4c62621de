// Tiles of keys of backward_fa3.cu, and which queries they meet.
#include "include/async.cuh"
#include "include/backward_rows.cuh"
#include "include/mask.cuh"
#include "include/ring.cuh"

struct BackwardFa3Params {
    BackwardParams backward;
    TensorMap q_map, k_map, v_map, dout_map;  // (column, row, head, batch); packed sequences: one batch
};

// N keys of a key/value head, and the tiles of M queries of each of its query heads of which some see some of them: first..last.
template <class C> struct KeyTile {
    int batch, head, key;  // the first key, within its sequence
    int capacity;          // keys of the sequence that there are in memory, whether or not they count
    Sequence seq;
    Visibility<C::MASK> visible;
    int first, last;
    int whole_first, whole_end;  // of these, the tiles of queries that see all N keys

    // Longest tiles first, of as many heads as fit the L2 cache: a tile of the first keys is met by the most queries.
    __device__ __forceinline__ KeyTile(const BackwardParams& p, u32 number) : visible(p.prefill, KeyRange{0, 0}) {
        const u32 heads = u32(p.prefill.heads_kv), pairs = u32(p.prefill.batch) * heads;
        const u32 section = u32(p.prefill.section), in_section = section * u32(p.n_tiles);
        const u32 begin = number / in_section * section, rest = number % in_section, size = min(section, pairs - begin);
        const u32 pair = begin + rest % size;
        batch = int(pair / heads), head = int(pair % heads), key = int(rest / size) * C::N;
        seq = sequence(p.prefill, batch);
        capacity = p.prefill.k_rows;
        if (p.prefill.cu_seqlens_k)
            capacity = clamp(index_at(p.prefill, p.prefill.cu_seqlens_k, 2, batch + 1), seq.k_begin, p.prefill.k_rows) - seq.k_begin;
        visible = Visibility<C::MASK>(p.prefill, seq);
        const int begin_key = max(key, seq.kv_start), last_key = min(key + C::N, seq.kv_length) - 1;
        const KeyRange any = visible.positions_of_any(begin_key, last_key), all = visible.positions_of_all(key, key + C::N - 1);
        const int begin_row = max(any.begin - seq.position, 0), end_row = min(any.end - seq.position, seq.q_length);
        const bool none = begin_key > last_key || begin_row >= end_row;
        first = uniform(none ? 0 : begin_row / C::M);
        last = uniform(none ? -1 : (end_row - 1) / C::M);
        const bool cut = key < seq.kv_start || key + C::N > seq.kv_length;
        whole_first = uniform(cut ? last + 1 : min(max((max(all.begin - seq.position, 0) + C::M - 1) / C::M, first), last + 1));
        // Rows behind the last one are like others: their weights are 0.
        whole_end = uniform(cut ? 0 : all.end - seq.position >= seq.q_length ? last + 1 : max(all.end - seq.position, 0) / C::M);
    }

    // Keys of the sequence that some row sees: others may hold anything.
    __device__ __forceinline__ KeyRange live_keys() const {
        return visible.of_any(seq.position, seq.position + seq.q_length - 1);
    }

    // Rows of the sequence that see a key at all: dO of others may hold anything.
    __device__ __forceinline__ KeyRange live_rows() const {
        if (seq.kv_start >= seq.kv_length) return {0, 0};
        const KeyRange any = visible.positions_of_any(seq.kv_start, seq.kv_length - 1);
        return {max(any.begin - seq.position, 0), min(any.end - seq.position, seq.q_length)};
    }
};
