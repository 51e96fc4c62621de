// How a block of decode.cu brings its keys, values and queries into shared memory, stage after stage. C is the configuration of decode.cu.
#include "include/cursor.cuh"
#include "include/decode_pages.cuh"
#include "include/parts.cuh"

// What lies in a stage, or of a part in its first one; all threads agree on it.
struct Piece {
    int batch, head, key, flags;      // key: the tile's first one
    KeyRange range;                   // of the sequence
    int position, mask_key;           // of query 0; of the mask's first column
    int slot, before, units;          // see Cursor
    int queries;                      // where they are in shared memory

    static constexpr int ENDS = 1, WHOLE = 2;  // a part ends with the tile; the part is all there is
    static constexpr int QUIT = 4;             // there is no tile, nor will there be
    static constexpr int TILES_SHIFT = 3;      // the other bits: tiles from this one to the part's end

    __device__ __forceinline__ void store(u32 smem) const {
        store_smem(smem, make_uint4(batch, head, key, flags));
        store_smem(smem + 16, make_uint4(range.begin, range.end, position, mask_key));
        store_smem(smem + 32, make_uint4(slot, before, units, queries));
    }

    static __device__ __forceinline__ Piece load(u32 smem) {
        const uint4 a = load_smem_16(smem), b = load_smem_16(smem + 16), c = load_smem_16(smem + 32);
        return {int(a.x), int(a.y), int(a.z), int(a.w), {int(b.x), int(b.y)}, int(b.z), int(b.w), int(c.x), int(c.y), int(c.z), int(c.w)};
    }
};

// Copies the packed rows of queries.
template <class C> struct QueryLoader : TileLoader<typename C::QTile, C::THREADS, C::LOAD> {
    using Tile = typename C::QTile;
    using Base = TileLoader<Tile, C::THREADS, C::LOAD>;

    __device__ __forceinline__ QueryLoader(const DecodeParams& p, const PackedRows& rows)
        : Base(p.q, p.q_stride, rows.batch, 0, 0, p.head_dim) {}

    __device__ __forceinline__ void load(const DecodeParams& p, const PackedRows& rows, int thread, u32 tile_smem) const {
        const int row = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS;
        const u32 dst = tile_smem + Tile::offset(row, chunk);
#pragma unroll 1
        for (int pass = 0; pass < Base::PASSES; ++pass) {
            const int r = pass * Base::PASS + row;
            if (r >= Tile::ROWS) break;
            const bool here = rows.first + r < p.rows;
            const u16* src = Base::first_gmem;
            if (here) src += rows.query(p, r) * p.q_stride.row + rows.head(p, r) * p.q_stride.head;
            if constexpr (C::LOAD > 2) src += chunk * 8;
            Base::template copy_row<false>(Base::pass_smem(dst, pass), src, chunk, here);
        }
    }
};

// The block's way through its keys, as far as loading is concerned.
template <class C> struct Loader {
    using KLoader = KvLoader<C, typename C::KTile, 0x7fff7fffu>;  // NaN in both types
    using VLoader = KvLoader<C, typename C::VTile, 0>;
    static constexpr bool SAME_ROWS = C::KTile::CHUNKS == C::VTile::CHUNKS;  // a thread copies the same keys' keys and values
    const DecodeParams& p;
    int run, lane, passes;
    int part;     // modulo STAGES
    int head_kv;  // of the next tile
    Cursor<C::MASK, C::N> next;
    typename KLoader::Pages k_pages;  // of the tile that comes next; of values as well if SAME_ROWS
    typename VLoader::Pages v_pages;
    PageRows<C::N, 1> scale_page;     // of the key whose scales the thread copies
    PageShare<C> share;               // instead of all that, if C::SHARES

    __device__ __forceinline__ Loader(const DecodeParams& p)
        : p(p), run(own_run(p)), lane(own_lane(p, run)), passes(p.passes), part(0), next(cursor(p, run)) {
        find_head();
        look_up();
    }

    // The blocks of a run are neighbours, or (PAIRED) those of two runs by turns.
    static __device__ __forceinline__ int own_run(const DecodeParams& p) {
        if constexpr (C::PAIRED) return 2 * quotient(block_index() / 2, p.heads_at_once) + block_index() % 2;
        else return block_index() / u32(p.heads_at_once);
    }

    static __device__ __forceinline__ int own_lane(const DecodeParams& p, int run) {
        return C::PAIRED ? block_index() / 2 - run / 2 * p.heads_at_once : block_index() - run * p.heads_at_once;
    }

    static __device__ __forceinline__ Cursor<C::MASK, C::N> cursor(const DecodeParams& p, int run) {
        if constexpr (C::PAIRED) return {p, p.passes, run};
        else return {p, UnitIndex<C::MASK, C::N>(p), p.passes, run};
    }

    __device__ __forceinline__ bool more() const { return next.more(); }
    __device__ __forceinline__ int key() const { return (next.first + next.tile) * C::N; }
    __device__ __forceinline__ int head() const { return next.pass * p.heads_at_once + lane; }

    __device__ __forceinline__ void look_up() {
        if (C::PAGED && more()) {
            const int thread = C::load_thread();
            const KeyRange range = next.range;
            if constexpr (C::SHARES) {
                share.look_up(p, key(), range);
                return;
            }
            k_loader().look_up(k_pages, thread, key(), range.begin, range.end);
            if constexpr (!SAME_ROWS) v_loader().look_up(v_pages, thread, key(), range.begin, range.end);
            if constexpr (C::SCALED) scale_page.look_up(p, next.batch, thread % C::N, key(), range.begin, range.end);
        }
    }

    // Start to load the next tile; if there is none, an empty group of copies.
    __device__ __forceinline__ void load(u32 smem, int stage) {
        if (more()) load(k_loader(), v_loader(), smem, stage);
        copies_commit();
    }

    // The next tile, with the loaders of its part.
    __device__ __forceinline__ void load(const KLoader& k, const VLoader& v, u32 smem, int stage) {
        const u32 stage_smem = smem + stage * C::STAGE_BYTES;
        const int thread = C::load_thread();
        const KeyRange range = next.range;
        if constexpr (C::SHARES) {
            share.load(p, stage_smem, key(), range, head_kv);
        } else {
            k.load(k_pages, thread, stage_smem, key(), range.begin, range.end);
            if constexpr (SAME_ROWS) v.load(k_pages, thread, stage_smem + C::V_SMEM, key(), range.begin, range.end);
            else v.load(v_pages, thread, stage_smem + C::V_SMEM, key(), range.begin, range.end);
            if constexpr (C::SCALED) load_scales(stage_smem + C::SCALES_SMEM, thread, range);
        }
        if constexpr (!C::WGMMA) {  // else the workers bring them
            if (next.begins()) {
                const PackedRows rows(p, C::M, next.batch, head());
                if (++part == C::STAGES) part = 0;
                QueryLoader<C>(p, rows).load(p, rows, thread, Q_smem(smem));
            }
        }
        if (thread == 0 && (C::WGMMA || next.begins())) {
            const int flags =
                (next.ends() ? Piece::ENDS : 0) | (next.whole() ? Piece::WHOLE : 0) | (next.stop - next.tile) << Piece::TILES_SHIFT;
            const int mask_key = p.mask_tail ? next.kv_length - p.mask_columns : 0;
            const Piece piece{next.batch, head(), key(), flags, range, next.position, mask_key,
                              C::PAIRED ? 0 : next.slot(run, lane), next.before, next.units, int(Q_smem(smem))};
            piece.store(C::piece_smem(smem, C::WGMMA ? stage : part));
        }
        next.advance(passes);
        if (next.begins()) find_head();
        look_up();
    }

    __device__ __forceinline__ KLoader k_loader() const { return KLoader(p, p.k, p.k_stride, next.batch, head_kv, p.head_dim / C::PACK); }
    __device__ __forceinline__ VLoader v_loader() const { return VLoader(p, p.v, p.v_stride, next.batch, head_kv, p.head_dim_v / C::PACK); }

  private:
    // Copies scales of keys, then of values, one a thread at a time.
    __device__ __forceinline__ void load_scales(u32 scales_smem, int thread, const KeyRange& range) const {
        static_assert(C::THREADS % C::N == 0, "a thread copies scales of one key");
        const int row = key() + thread % C::N;
        const bool here = row >= range.begin && row < range.end && (!C::PAGED || u32(scale_page.entry[0]) < u32(p.pages));
        const i64 place = C::PAGED ? scale_page.entry[0] : next.batch;
        const int in_place = C::PAGED ? row - page_of(p, row) * p.page_size : row;
#pragma unroll
        for (int first = 0; first < 2 * C::N; first += C::THREADS) {
            const int item = first + thread;
            if (item >= 2 * C::N) break;
            const bool values = item >= C::N;
            const float* scale = values ? p.v_scale : p.k_scale;
            const Strides& s = values ? p.v_scale_stride : p.k_scale_stride;
            if (scale) copy_or_zero<4>(scales_smem + 4 * item, scale + place * s.batch + in_place * s.row + head_kv * s.head, here);
            else store_smem(scales_smem + 4 * item, __float_as_uint(values ? p.v_factor : p.k_factor));
        }
    }

    __device__ __forceinline__ u32 Q_smem(u32 smem) const { return smem + (C::WGMMA ? C::ALL_Q_SMEM : part * C::STAGE_BYTES + C::Q_SMEM); }
    __device__ __forceinline__ void find_head() {
        head_kv = more() ? int(quotient(head(), p.row_blocks)) : 0;
        if constexpr (C::SHARES)
            if (more()) share.begin(p, next.batch);
    }
};
