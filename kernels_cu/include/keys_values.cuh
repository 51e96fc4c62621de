// The way of a block's keys and values into shared memory, tile by tile.
//
// With pages, where the keys of a tile lie is worked out once for all threads and kept in shared memory until the tile is loaded: one
// address for each run of keys that surely lie in one page. Each thread has a run; if they are longer than a key, those of a span of many
// tiles are worked out at a time. What the page table says of them is read a tile earlier still. All that is done among products, which
// hide it.
#include "include/mask.cuh"
#include "include/paged.cuh"
#include "include/row_loader.cuh"

// The largest power of two up to x, at least 1.
__device__ constexpr int power_of_two(int x) { return x < 2 ? 1 : 2 * power_of_two(x / 2); }

template <class C, bool PAGED = C::PAGED> struct KeysValues {
    static constexpr int RUN = C::PAGE_ROWS;  // keys of a run
    using KLoader = RowLoader<typename C::KTile, C::THREADS, C::LOAD, C::HIDES, RUN>;
    using VLoader = RowLoader<typename C::VTile, C::THREADS, C::LOAD, C::HIDES, RUN>;
    using KRuns = typename KLoader::Runs;
    using VRuns = typename VLoader::Runs;
    static constexpr int RUNS = C::N / RUN;  // of a tile
    static constexpr bool ALONE = RUN == 1;  // keys are found one by one: then a span is a tile
    static constexpr int SPAN = ALONE ? 1 : power_of_two(C::THREADS / 2 / RUNS), SPAN_RUNS = SPAN * RUNS;
    static constexpr bool BOTH = 2 * SPAN_RUNS > C::THREADS;  // a thread works out where keys and values are, and not one of the two
    static constexpr bool ALL = C::THREADS == SPAN_RUNS || C::THREADS == 2 * SPAN_RUNS;  // threads have a run to work out
    // Addresses are made known among the products P V; with 1 stage behind Q K^T (measured at D = 64 with keys found one by one).
    static constexpr bool MIDDLE = C::STAGES == 1 && C::LOAD == 16;
    // Tiles from the one that is multiplied to the one that is made known. Addresses are read before the barrier behind which the tile is
    // loaded; of keys alone after it, so that addresses of two tiles are all that is kept.
    static constexpr int AHEAD = (MIDDLE ? 1 : 2) + !ALONE;
    static constexpr int SLOTS = 2 * SPAN, SLOT = KLoader::BYTES + VLoader::BYTES;
    static constexpr int ENTRIES = SLOTS * SLOT, PARKED = ENTRIES + (ALONE ? 0 : 4 * C::THREADS), BYTES = PARKED + 32;
    static constexpr int FIRST_K = 0, FIRST_V = 8, TABLE = 16, POSITION = 24, CAREFUL = 28;  // places of what is parked
    static_assert(SPAN_RUNS <= C::THREADS, "a thread has one run at most");

    const PrefillParams& p;
    int batch, head;
    i32 entry;  // of the page table, for this thread's key of the tile that is looked up next; of longer runs, it waits in shared memory

    __device__ __forceinline__ KeysValues(const PrefillParams& p, const WorkItem& work, const Sequence&)
        : p(p), batch(work.batch), head(work.head / p.group) {}

    // Make known the first tiles; and park what is asked for once a tile or more seldom: registers are scarce.
    __device__ __forceinline__ void start(u32 thread, u32 smem, int tile, const KeyRange& range, int position, bool careful) {
        if (thread == 0) {
            store_address(parked(smem, FIRST_K), first(p.k, p.k_stride));
            store_address(parked(smem, FIRST_V), first(p.v, p.v_stride));
            store_address(parked(smem, TABLE), reinterpret_cast<u64>(p.page_table + i64(batch) * p.max_pages));
            store_smem(parked(smem, POSITION), make_uint2(position, careful));
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i <= AHEAD; ++i) {
            if (i > 0 && in_span(tile - i) != SPAN - 1) continue;  // they are known
            look_up(thread, smem, tile - i, range);
            if (i == AHEAD) break;
            if constexpr (!ALONE) copies_wait<0>();
            publish(thread, smem, tile - i, range);
        }
        __syncthreads();
    }

    // Make known where the runs of a span are, if this is the time for it, and look up the one before.
    template <bool IN_MIDDLE> __device__ __forceinline__ void look_ahead(u32 thread, u32 smem, int tile, const KeyRange& range) {
        if constexpr (IN_MIDDLE == MIDDLE) {
            if (in_span(tile - AHEAD) == SPAN - 1) publish(thread, smem, tile - AHEAD, range);
            if (in_span(tile - AHEAD) == 0) look_up(thread, smem, tile - AHEAD - 1, range);
        }
    }

    // Read where the rows of a tile are, before the barrier behind which it is loaded, if it can be read so early.
    __device__ __forceinline__ KRuns read_k(u32 thread, u32 smem, int tile) const {
        return ALONE ? KRuns() : KRuns(thread, k_runs(smem, tile));
    }

    __device__ __forceinline__ VRuns read_v(u32 thread, u32 smem, int tile) const {
        return ALONE ? VRuns() : VRuns(thread, v_runs(smem, tile));
    }

    __device__ __forceinline__ void load_k(KRuns runs, u32 thread, u32 smem, u32 tile_smem, int tile, const KeyRange& range) const {
        if constexpr (ALONE) runs = KRuns(thread, k_runs(smem, tile));
        k_loader().load(runs, thread, tile_smem, k_runs(smem, tile), tile * C::N, range.begin, range.end);
    }

    __device__ __forceinline__ void load_v(VRuns runs, u32 thread, u32 smem, u32 tile_smem, int tile, const KeyRange& range) const {
        if constexpr (ALONE) runs = VRuns(thread, v_runs(smem, tile));
        v_loader().load(runs, thread, tile_smem, v_runs(smem, tile), tile * C::N, range.begin, range.end);
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

    static __device__ __forceinline__ u32 k_runs(u32 smem, int tile) { return smem + C::ROWS_SMEM + (tile & (SLOTS - 1)) * SLOT; }
    static __device__ __forceinline__ u32 v_runs(u32 smem, int tile) { return k_runs(smem, tile) + KLoader::BYTES; }

    static __device__ __forceinline__ u32 entry_smem(u32 smem, u32 thread) { return smem + C::ROWS_SMEM + ENTRIES + 4 * thread; }

    static __device__ __forceinline__ u32 own_run(u32 thread) { return BOTH || thread < SPAN_RUNS ? thread : thread - SPAN_RUNS; }
    static __device__ __forceinline__ int in_span(int tile) { return tile & (SPAN - 1); }  // counted from its first tile

    // Ask the table for this thread's run of the span that a tile belongs to, if the block sees some of it.
    __device__ __forceinline__ void look_up(u32 thread, u32 smem, int tile, const KeyRange& range) {
        if (!ALONE && (tile + 1) * C::N <= range.begin) return;  // no tile is left that would wait for it
        const u32 run = own_run(thread);
        const int key = (tile - in_span(tile)) * C::N + run * RUN;
        const bool here = (ALL || run < SPAN_RUNS) && key + RUN > range.begin && key < range.end;
        const i32* entries_gmem = reinterpret_cast<const i32*>(load_address(parked(smem, TABLE)));
        if constexpr (ALONE) {
            entry = here ? entries_gmem[page_of(p, key)] : -1;
        } else {
            copy_or_zero<4>(entry_smem(smem, thread), entries_gmem + (here ? page_of(p, key) : 0), here);
            copies_commit();
        }
    }

    __device__ __forceinline__ void publish(u32 thread, u32 smem, int tile, const KeyRange& range) const {
        const u32 run = own_run(thread);
        if (!ALL && run >= SPAN_RUNS) return;
        const u32 tiles_on = ALONE ? 0 : run / RUNS, run_in_tile = run - tiles_on * RUNS;
        const int first_tile = tile - in_span(tile), own_tile = first_tile + tiles_on, key = first_tile * C::N + run * RUN;
        const u32 found = ALONE ? u32(entry) : load_smem_4(entry_smem(smem, thread));
        const bool good = found < u32(p.pages), cut = key < range.begin || key + RUN > range.end;
        const u32 page = good ? found : 0;  // no branch: among products, work is cheaper
        const u64 care = !ALONE && cut;
        if (BOTH || thread < SPAN_RUNS) {
            const u64 at = row_address(load_address(parked(smem, FIRST_K)), p.k_stride, key, page);
            const u64 none = ALONE && cut ? KLoader::ZEROS : KLoader::NANS;
            store_address(k_runs(smem, own_tile) + KLoader::place(run_in_tile), good ? at | care : none);
        }
        if (BOTH || thread >= SPAN_RUNS) {
            const u64 at = row_address(load_address(parked(smem, FIRST_V)), p.v_stride, key, page);
            store_address(v_runs(smem, own_tile) + VLoader::place(run_in_tile), good ? at | care : VLoader::ZEROS);
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

struct NoRuns {};

// The same in one piece.
template <class C> struct KeysValues<C, false> {
    using KLoader = TileLoader<typename C::KTile, C::THREADS, C::LOAD, C::HIDES>;
    using VLoader = TileLoader<typename C::VTile, C::THREADS, C::LOAD, C::HIDES>;
    static constexpr int BYTES = 0;
    using KRuns = NoRuns;
    using VRuns = NoRuns;
    KLoader k;
    VLoader v;

    __device__ __forceinline__ KeysValues(const PrefillParams& p, const WorkItem& work, const Sequence& seq)
        : k(p.k, p.k_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim),
          v(p.v, p.v_stride, work.batch, seq.k_begin, work.head / p.group, p.head_dim_v) {}

    __device__ __forceinline__ void start(int, u32, int, const KeyRange&, int, bool) const {}
    template <bool> __device__ __forceinline__ void look_ahead(int, u32, int, const KeyRange&) const {}

    __device__ __forceinline__ NoRuns read_k(int, u32, int) const { return {}; }
    __device__ __forceinline__ NoRuns read_v(int, u32, int) const { return {}; }

    __device__ __forceinline__ void load_k(NoRuns, int thread, u32, u32 tile_smem, int tile, const KeyRange& range) const {
        k.load(thread, tile_smem, tile * C::N, range.begin, range.end);
    }

    __device__ __forceinline__ void load_v(NoRuns, int thread, u32, u32 tile_smem, int tile, const KeyRange& range) const {
        v.load(thread, tile_smem, tile * C::N, range.begin, range.end);
    }

    __device__ __forceinline__ void prefetch_v(int thread, int tile, const KeyRange& range) const {
        v.prefetch(thread, tile * C::N, range.begin, range.end);
    }

    __device__ __forceinline__ u32 value(int key, int column) const { return v.number(key, column); }
};
