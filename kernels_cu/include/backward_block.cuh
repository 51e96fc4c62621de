// A block of backward_fa2.cu: its keys, the queries that may see them, and the way of both into shared memory.
#include "include/backward_rows.cuh"
#include "include/epilogue.cuh"
#include "include/mask.cuh"

// N keys of a key/value head of a sequence, from `key` on.
struct KeyBlock {
    int batch, head, key;

    // Longest first: under a causal mask the first keys are seen by the most queries. In sections as in work_item().
    __device__ __forceinline__ KeyBlock(const BackwardParams& p, u32 block, int n) {
        const u32 heads = u32(p.prefill.heads_kv), pairs = u32(p.prefill.batch) * heads;
        const u32 in_section = u32(p.prefill.section) * u32(p.n_tiles), first = block / in_section * u32(p.prefill.section);
        const u32 rest = block % in_section, size = min(u32(p.prefill.section), pairs - first), pair = first + rest % size;
        batch = int(pair / heads), head = int(pair % heads), key = int(rest / size) * n;
    }
};

// Keys of a sequence that there are in memory, whether or not they count.
__device__ __forceinline__ int key_capacity(const PrefillParams& p, int batch, const Sequence& seq) {
    if (!p.cu_seqlens_k) return p.k_rows;
    return clamp(index_at(p, p.cu_seqlens_k, 2, batch + 1), seq.k_begin, p.k_rows) - seq.k_begin;
}

// Rows of dK or of dV from shared memory, of so many keys from the tile's first one on.
template <class Tile, class C>
__device__ __forceinline__ void store_keys(
    u32 smem, void* base, const Strides& stride, const KeyBlock& tile, const Sequence& seq, int rows, int columns
) {
    u16* to = static_cast<u16*>(base) + tile.batch * stride.batch + i64(seq.k_begin + tile.key) * stride.row + tile.head * stride.head;
    store_rows<Tile, C::THREADS, typename C::Order>(smem, to, stride, rows, columns, rows_in_sixteens(to, stride, columns));
}

// A tile of queries of one of the heads that share the keys.
struct QueryTile {
    int head, tile;
};

template <class C> struct BackwardBlock {
    const BackwardParams& p;
    int batch, head, key;  // head: of the keys; key: the first one
    Sequence seq;
    Visibility<C::MASK> visible;
    KeyRange keys, rows;  // keys of the block that some row may see, within the sequence; rows that see any of them
    i64 first_place;
    u32 smem;

    __device__ __forceinline__ BackwardBlock(const BackwardParams& p, const KeyBlock& tile, const Sequence& seq, u32 smem)
        : p(p), batch(tile.batch), head(tile.head), key(tile.key), seq(seq), visible(p.prefill, seq),
          keys(visible.of_any(seq.position, seq.position + seq.q_length - 1)), rows{0, 0}, first_place(first_place_of(p, batch, seq)),
          smem(smem) {
        keys = {max(key, keys.begin), min(key + C::N, keys.end)};
        if (keys.empty()) return;
        const KeyRange any = visible.positions_of_any(keys.begin, keys.end - 1);
        rows = {max(any.begin - seq.position, 0), min(any.end - seq.position, seq.q_length)};
    }

    __device__ __forceinline__ QueryTile first() const { return {0, rows.begin / C::M}; }

    __device__ __forceinline__ QueryTile after(const QueryTile& t) const {
        return (t.tile + 1) * C::M < rows.end ? QueryTile{t.head, t.tile + 1} : QueryTile{t.head + 1, rows.begin / C::M};
    }

    __device__ __forceinline__ bool there(const QueryTile& t) const { return t.head < p.prefill.group; }

    __device__ __forceinline__ int query_head(const QueryTile& t) const { return head * p.prefill.group + t.head; }

    // Of the tile's first row, of all heads.
    __device__ __forceinline__ i64 place(const QueryTile& t) const {
        return query_head(t) * p.places + first_place + t.tile * C::M;
    }

    __device__ __forceinline__ u32 Q_smem(int stage) const { return smem + C::Q_SMEM + stage * C::QTile::BYTES; }
    __device__ __forceinline__ u32 dO_smem(int stage) const { return smem + C::DO_SMEM + stage * C::OTile::BYTES; }
    __device__ __forceinline__ u32 lse_smem(int stage) const { return smem + C::ROWS_SMEM + stage * 8 * C::M; }
    __device__ __forceinline__ u32 delta_smem(int stage) const { return lse_smem(stage) + 4 * C::M; }

    __device__ __forceinline__ void load_keys(int thread) const {
        const PrefillParams& f = p.prefill;
        const TileLoader<typename C::KTile, C::THREADS, C::LOAD, C::HIDES> k(f.k, f.k_stride, batch, seq.k_begin, head, f.head_dim);
        const TileLoader<typename C::VTile, C::THREADS, C::LOAD, C::HIDES> v(f.v, f.v_stride, batch, seq.k_begin, head, f.head_dim_v);
        k.load(thread, smem + C::K_SMEM, key, keys.begin, keys.end);
        v.load(thread, smem + C::V_SMEM, key, keys.begin, keys.end);
    }

    // What this thread has loaded of K, without NaN and infinities: 0 * x is NaN for them, and a mask may hide their keys from all rows.
    // Rows that see such keys are NaN by their log-sum-exp (but for infinities under a softcap, whose logits are finite).
    __device__ __forceinline__ void clear_keys(int thread) const {
        using Loader = TileLoader<typename C::KTile, C::THREADS, C::LOAD, C::HIDES>;
        Loader::template clear_not_finite<typename C::In>(thread, smem + C::K_SMEM);
    }

    // Rows that see none of the keys become 0, whatever they hold.
    __device__ __forceinline__ void load_queries(int thread, const QueryTile& t, int stage) const {
        const PrefillParams& f = p.prefill;
        const int h = query_head(t);
        const TileLoader<typename C::QTile, C::THREADS, C::LOAD> q(f.q, f.q_stride, batch, seq.q_begin, h, f.head_dim);
        const TileLoader<typename C::OTile, C::THREADS, C::LOAD> dout(p.dout, p.dout_stride, batch, seq.q_begin, h, f.head_dim_v);
        q.load(thread, Q_smem(stage), t.tile * C::M, rows.begin, rows.end);
        dout.load(thread, dO_smem(stage), t.tile * C::M, rows.begin, rows.end);
        const i64 from = place(t);
        for (int i = thread; i < C::M; i += C::THREADS) {
            copy_or_zero<4>(lse_smem(stage) + 4 * i, p.row_lse + from + i, true);
            copy_or_zero<4>(delta_smem(stage) + 4 * i, p.row_delta + from + i, true);
        }
        copies_commit();
    }

    // Likewise of rows that see no key at all because a mask, or logits of -inf, hide them all. All threads come here.
    __device__ __forceinline__ void clear_blind_rows(int thread, const QueryTile& t, int stage) const {
        bool blind = false;
#pragma unroll
        for (int row = thread % 32; row < C::M; row += 32) blind = blind || (t.tile * C::M + row < rows.end && is_blind(stage, row));
        if (!__any_sync(0xffffffffu, blind)) return;  // in all warps alike
        clear_blind<typename C::QTile>(thread, Q_smem(stage), stage);
        clear_blind<typename C::OTile>(thread, dO_smem(stage), stage);
        block_barrier<C::THREADS>();
    }

  private:
    __device__ __forceinline__ bool is_blind(int stage, int row) const {
        return __uint_as_float(load_smem_4(lse_smem(stage) + 4 * row)) == infinity();
    }

    template <class Tile> __device__ __forceinline__ void clear_blind(int thread, u32 tile_smem, int stage) const {
#pragma unroll 1
        for (int i = thread; i < Tile::BYTES / 16; i += C::THREADS)
            if (is_blind(stage, i / Tile::CHUNKS % Tile::ROWS)) store_smem(tile_smem + 16 * i, make_uint4(0, 0, 0, 0));
    }
};
