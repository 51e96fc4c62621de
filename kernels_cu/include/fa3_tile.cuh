// Tiles of query rows of prefill_fa3.cu: which there are, and how one thread tells the others of the next one.
#include "include/fa3_params.cuh"
#include "include/mask.cuh"
#include "include/paged.cuh"
#include "include/ring.cuh"
#include "include/schedule.cuh"

// Rows of a tile are queries; where PACKED, (query, head) of a group of heads that share a key/value head: row i is query i / group, head
// i % group, and group a power of two. Tiles and places are then counted in queries and groups.
template <class C> __device__ __forceinline__ int group_shift(const PrefillParams& p) { return C::PACKED ? 31 - __clz(p.group) : 0; }

// M rows of a head, and the tiles of N keys that some of them see.
template <class C> struct QueryTile {
    int batch, head;  // head, or group of heads
    int first_query;  // within its sequence; below 0 where the tile begins before it, see first_query_of()
    Sequence seq;
    Visibility<C::MASK> visible;
    int first_keys, last_keys;  // numbers of the tiles of keys, which are gone through from the last to the first

    __device__ __forceinline__ QueryTile(const PrefillParams& p, int batch, int head, int first_query, const Sequence& seq)
        : batch(batch), head(head), first_query(first_query), seq(seq), visible(p, seq) {
        const int end = min(first_query + (C::M >> group_shift<C>(p)), seq.q_length);
        visible.narrow(visible.of_any(max(first_query, 0) + seq.position, end - 1 + seq.position));  // those of queries that exist
        const bool none = visible.begin >= visible.end;
        first_keys = none ? 0 : visible.begin / C::N;
        last_keys = none ? -1 : (visible.end - 1) / C::N;
    }

    __device__ __forceinline__ bool sees_none() const { return last_keys < first_keys; }

    // Of row i, counted from the first row of a query: which query, or its position if that is given; and which head.
    __device__ __forceinline__ int query(const PrefillParams& p, int from, int i) const { return from + (i >> group_shift<C>(p)); }
    __device__ __forceinline__ int query_head(const PrefillParams& p, int i) const {
        return C::PACKED ? head * p.group + (i & (p.group - 1)) : head;
    }
    __device__ __forceinline__ int key_head(const PrefillParams& p) const { return C::PACKED ? head : head / p.group; }
};

// The first query of tile m_tile. Under a mask it is the first tile that reaches beyond its sequence, the shortest one, and not the last;
// not so where there are fewer tiles than a sequence needs, whose last rows clear_rows.cu writes.
template <class C> __device__ __forceinline__ int first_query_of(const PrefillParams& p, int m_tile, const Sequence& seq) {
    const int queries = C::M >> group_shift<C>(p);
    const bool whole = C::FLAT || seq.q_length <= i64(p.m_tiles) * queries;
    return m_tile * queries - (C::CUTS && whole ? (queries - seq.q_length % queries) % queries : 0);
}

// The page that a key is in: one that there is, or NO_PAGE. NO_KEYS is outside every array, too, but nothing is amiss.
constexpr int NO_PAGE = -1, NO_KEYS = -2;
__device__ __forceinline__ int page_entry(const PrefillParams& p, int batch, int key) {
    const i32 page = p.page_table[i64(batch) * p.max_pages + page_of(p, key)];
    return u32(page) < u32(p.pages) ? page : NO_PAGE;
}

// Where in the array a key of head 0 is, which is there.
template <class C> __device__ __forceinline__ i64 kv_offset(const PrefillParams& p, const Strides& s, const QueryTile<C>& tile, int key) {
    if constexpr (C::PAGE_ROWS > 0)
        return page_entry(p, tile.batch, key) * s.batch + (key - page_of(p, key) * p.page_size) * s.row;
    else return tile.batch * s.batch + i64(tile.seq.k_begin + key) * s.row;
}

// Places in shared memory where the next tile is written; a negative batch means that there is none.
template <class C> struct TileSlots : Ring<typename C::SlotStages> {
    // By one thread, when the place is empty.
    __device__ __forceinline__ void put(const PrefillParams& p, const WorkItem& work, const Sequence& s) {
        store_smem(this->stage_smem(), make_uint4(work.batch, work.head, first_query_of<C>(p, work.m_tile, s), s.q_begin));
        store_smem(this->stage_smem() + 16, make_uint4(s.q_length, s.k_begin, s.kv_start, s.kv_length));
        mbarrier_arrive(this->full());
        this->advance();
    }

    // The next tile, until the warp says by done() that it is no longer needed.
    __device__ __forceinline__ QueryTile<C> read(const PrefillParams& p) const {
        this->wait_full();
        const uint4 a = load_smem_16(this->stage_smem()), b = load_smem_16(this->stage_smem() + 16);
        Sequence s{uniform(a.w), uniform(b.x), uniform(b.y), uniform(b.z), uniform(b.w), 0};
        s.position = p.upper_left ? 0 : s.kv_length - s.q_length;
        return {p, uniform(a.x), uniform(a.y), uniform(a.z), s};
    }

    __device__ __forceinline__ void done() {
        this->release();
        this->advance();
    }
};

// The tiles of this block, for the thread that hands them out: the one of its own number, then whichever is next.
template <class C> struct TileQueue {
    const Fa3Params& p;
    int tile = -1;

    // The next tile that has rows; whether there was one.
    __device__ __forceinline__ bool next(WorkItem& work, Sequence& seq) {
        while (true) {
            tile = tile < 0 ? block_index() : gridDim.x + count_up(p.counter, p.tiles - 1);
            if (tile >= p.tiles) return false;
            work = work_item<C::FLAT>(p.prefill, tile, C::PACKED ? p.prefill.heads_kv : p.prefill.heads_q);
            seq = sequence(p.prefill, work.batch);
            if (work.m_tile * (C::M >> group_shift<C>(p.prefill)) < seq.q_length) return true;
        }
    }
};
