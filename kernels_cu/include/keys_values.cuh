// The way of a block's keys and values into shared memory, tile by tile.
//
// With pages, where the rows of a tile lie is worked out once for all threads, a row or two by each, and kept in shared memory until the
// tile is loaded; what the page table says of them is read a tile earlier still. All that is done among products, which hide it.
#include "include/mask.cuh"
#include "include/paged.cuh"
#include "include/row_loader.cuh"

template <class C, bool PAGED = C::PAGED> struct KeysValues {
    using KLoader = RowLoader<typename C::KTile, C::THREADS, C::LOAD, C::HIDES>;
    using VLoader = RowLoader<typename C::VTile, C::THREADS, C::LOAD, C::HIDES>;
    static constexpr bool BOTH = 2 * C::N > C::THREADS;  // a thread works out where key and value are, and not one of the two
    static constexpr bool ALL = C::THREADS == C::N || C::THREADS == 2 * C::N;  // threads have a row to work out
    // Tiles from the one that is multiplied to the one whose rows are made known: the next, behind Q K^T (measured with 1 stage at D = 64),
    // or the one after it, among the products P V.
    static constexpr int AHEAD = C::STAGES == 1 && C::LOAD == 16 ? 1 : 2;
    static constexpr int SLOT = KLoader::BYTES + VLoader::BYTES, PARKED = 2 * SLOT, BYTES = PARKED + 32;
    static constexpr int FIRST_K = 0, FIRST_V = 8, TABLE = 16, POSITION = 24, CAREFUL = 28;  // places of what is parked
    static_assert(C::N <= C::THREADS, "a thread has one key at most");

    const PrefillParams& p;
    int batch, head;
    i32 entry;  // of the page table, for this thread's key of the tile that is looked up next

    __device__ __forceinline__ KeysValues(const PrefillParams& p, const WorkItem& work, const Sequence&)
        : p(p), batch(work.batch), head(work.head / p.group) {}

    // Look up the first tiles; and park what each tile asks for once: registers are scarce.
    __device__ __forceinline__ void start(u32 thread, u32 smem, int tile, const KeyRange& range, int position, bool careful) {
        if (thread == 0) {
            store_address(parked(smem, FIRST_K), first(p.k, p.k_stride));
            store_address(parked(smem, FIRST_V), first(p.v, p.v_stride));
            store_address(parked(smem, TABLE), reinterpret_cast<u64>(p.page_table + i64(batch) * p.max_pages));
            store_smem(parked(smem, POSITION), make_uint2(position, careful));
        }
        __syncthreads();
        const i32 last = look_up(thread, smem, tile, range);
        entry = look_up(thread, smem, tile - 1, range);
        publish(thread, smem, tile, range, last);
        if (AHEAD == 2) look_ahead(thread, smem, tile - 1, range);
        __syncthreads();
    }

    // Make known where the rows of a tile are, if this is the time for it, and look up the one before.
    template <int AT> __device__ __forceinline__ void look_ahead(u32 thread, u32 smem, int tile, const KeyRange& range) {
        if constexpr (AT == AHEAD) look_ahead(thread, smem, tile - AT, range);
    }

    __device__ __forceinline__ void look_ahead(u32 thread, u32 smem, int tile, const KeyRange& range) {
        publish(thread, smem, tile, range, entry);
        entry = look_up(thread, smem, tile - 1, range);
    }

    __device__ __forceinline__ void load_k(u32 thread, u32 smem, u32 tile_smem, int tile, const KeyRange&) const {
        k_loader().load(thread, tile_smem, k_rows(smem, tile));
    }

    __device__ __forceinline__ void load_v(u32 thread, u32 smem, u32 tile_smem, int tile, const KeyRange&) const {
        v_loader().load(thread, tile_smem, v_rows(smem, tile));
    }

    // Both at once: a value has an address where its key has one.
    __device__ __forceinline__ void load(u32 thread, u32 smem, u32 k_smem, u32 v_smem, int tile, const KeyRange& range) const {
        if constexpr (KLoader::UNROLL > 1 && same<KLoader, VLoader>) {
            const typename KLoader::Rows rows(thread, k_rows(smem, tile));
            if (rows.whole()) {
                k_loader().load_whole(rows, thread, k_smem);
                v_loader().load_whole(typename VLoader::Rows(thread, v_rows(smem, tile)), thread, v_smem);
            } else {
                k_loader().load_any(thread, k_smem, k_rows(smem, tile));
                v_loader().load_any(thread, v_smem, v_rows(smem, tile));
            }
        } else {
            load_k(thread, smem, k_smem, tile, range);
            load_v(thread, smem, v_smem, tile, range);
        }
    }

    __device__ __forceinline__ void prefetch_v(int, int, const KeyRange&) const {}

    // The bits of one number of V; 0 in the padding and in pages that do not exist.
    __device__ __forceinline__ u32 value(int key, int column) const {
        const i32 page = p.page_table[i64(batch) * p.max_pages + page_of(p, key)];
        if (column >= p.head_dim_v || u32(page) >= u32(p.pages)) return 0u;
        const u64 row = row_address(first(p.v, p.v_stride), p.v_stride, key, page);
        return reinterpret_cast<const volatile u16*>(row)[column * p.v_stride.column];
    }

    static __device__ __forceinline__ u32 parked(u32 smem, int place) { return smem + C::ROWS_SMEM + PARKED + place; }

  private:
    __device__ __forceinline__ KLoader k_loader() const { return KLoader(p.k_stride, p.head_dim); }
    __device__ __forceinline__ VLoader v_loader() const { return VLoader(p.v_stride, p.head_dim_v); }

    static __device__ __forceinline__ u32 k_rows(u32 smem, int tile) { return smem + C::ROWS_SMEM + (tile & 1) * SLOT; }
    static __device__ __forceinline__ u32 v_rows(u32 smem, int tile) { return k_rows(smem, tile) + KLoader::BYTES; }

    static __device__ __forceinline__ u32 own_row(u32 thread) { return BOTH || thread < C::N ? thread : thread - C::N; }

    // What the table has for this thread's key of a tile, if the block sees it.
    __device__ __forceinline__ i32 look_up(u32 thread, u32 smem, int tile, const KeyRange& range) const {
        const u32 row = own_row(thread);
        const int key = tile * C::N + row;
        const i32* entries_gmem = reinterpret_cast<const i32*>(load_address(parked(smem, TABLE)));
        return (ALL || row < C::N) && key >= range.begin && key < range.end ? entries_gmem[page_of(p, key)] : -1;
    }

    __device__ __forceinline__ void publish(u32 thread, u32 smem, int tile, const KeyRange& range, i32 entry) const {
        const u32 row = own_row(thread);
        if (!ALL && row >= C::N) return;
        const int key = tile * C::N + row;
        const bool here = key >= range.begin && key < range.end, good = u32(entry) < u32(p.pages);
        const u32 page = good ? entry : 0;  // no branch: among products, work is cheaper
        if (BOTH || thread < C::N) {
            const u64 at = row_address(load_address(parked(smem, FIRST_K)), p.k_stride, key, page);
            store_address(k_rows(smem, tile) + KLoader::place(row), good ? at : here ? KLoader::NANS : KLoader::ZEROS);
        }
        if (BOTH || thread >= C::N) {
            const u64 at = row_address(load_address(parked(smem, FIRST_V)), p.v_stride, key, page);
            store_address(v_rows(smem, tile) + VLoader::place(row), good ? at : VLoader::ZEROS);
        }
    }

    // Of row 0 of page 0.
    __device__ __forceinline__ u64 first(const void* base, const Strides& s) const {
        return reinterpret_cast<u64>(static_cast<const u16*>(base) + head * s.head);
    }

    // s.batch leads from page to page.
    __device__ __forceinline__ u64 row_address(u64 first, const Strides& s, u32 key, u32 page) const {
        const i64 offset = page * s.batch + (key - page_of(p, key) * u32(p.page_size)) * s.row;
        return reinterpret_cast<u64>(reinterpret_cast<const u16*>(first) + offset);
    }

    static __device__ __forceinline__ u64 load_address(u32 smem) { return KLoader::address(load_smem_4(smem), load_smem_4(smem + 4)); }
    static __device__ __forceinline__ void store_address(u32 smem, u64 x) { store_smem(smem, make_uint2(u32(x), u32(x >> 32))); }
};

// The same in one piece.
template <class C> struct KeysValues<C, false> {
    using KLoader = TileLoader<typename C::KTile, C::THREADS, C::LOAD, C::HIDES>;
    using VLoader = TileLoader<typename C::VTile, C::THREADS, C::LOAD, C::HIDES>;
    static constexpr int BYTES = 0;
    KLoader k;
    VLoader v;

    __device__ __forceinline__ KeysValues(const PrefillParams& p, const WorkItem& work, const Sequence& seq)
        : k(p.k, p.k_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim),
          v(p.v, p.v_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim_v) {}

    __device__ __forceinline__ void start(int, u32, int, const KeyRange&, int, bool) const {}
    template <int> __device__ __forceinline__ void look_ahead(int, u32, int, const KeyRange&) const {}

    __device__ __forceinline__ void load_k(int thread, u32, u32 tile_smem, int tile, const KeyRange& range) const {
        k.load(thread, tile_smem, tile * C::N, range.begin, range.end);
    }

    __device__ __forceinline__ void load_v(int thread, u32, u32 tile_smem, int tile, const KeyRange& range) const {
        v.load(thread, tile_smem, tile * C::N, range.begin, range.end);
    }

    __device__ __forceinline__ void prefetch_v(int thread, int tile, const KeyRange& range) const {
        v.prefetch(thread, tile * C::N, range.begin, range.end);
    }

    __device__ __forceinline__ u32 value(int key, int column) const { return v.number(key, column); }
};
