// Keys and values of float32 or float64 where they lie: in one array, or in pages.
#include "include/fp_rows.cuh"
#include "include/paged.cuh"

// The rows of keys or values of one (batch, head).
template <class T, bool PAGED> struct KvRows {
    const T* first_gmem;  // key 0

    __device__ __forceinline__ KvRows(const PrefillParams& p, const void* base, const Strides& s, const WorkItem& work, const Sequence& seq)
        : first_gmem(row_gmem<T>(base, s, work.batch, seq.k_begin, work.head / p.group)) {}

    // Column 0 of a key's row.
    __device__ __forceinline__ const T* at(const PrefillParams&, const Strides& s, int key) const { return first_gmem + key * s.row; }
};

template <class T> struct KvRows<T, true> {
    const T* first_gmem;  // of page 0
    const i32* entries_gmem;

    __device__ __forceinline__ KvRows(const PrefillParams& p, const void* base, const Strides& s, const WorkItem& work, const Sequence&)
        : first_gmem(row_gmem<T>(base, s, 0, 0, work.head / p.group)), entries_gmem(p.page_table + i64(work.batch) * p.max_pages) {}

    __device__ __forceinline__ i32 entry(const PrefillParams& p, int key) const { return entries_gmem[page_of(p, key)]; }

    // `s.batch` leads from page to page.
    __device__ __forceinline__ const T* at(const PrefillParams& p, const Strides& s, int key, i32 entry) const {
        return first_gmem + entry * s.batch + (key - page_of(p, key) * p.page_size) * s.row;
    }

    // Null if the key's page does not exist.
    __device__ __forceinline__ const T* at(const PrefillParams& p, const Strides& s, int key) const {
        const i32 page = entry(p, key);
        return u32(page) < u32(p.pages) ? at(p, s, key, page) : nullptr;
    }
};

// How keys or values get into shared memory. BAD: what the numbers of a key become whose page does not exist, 4 bytes at a time: NaN for
// keys, so that the rows that see it become NaN, and 0 for values, so that others do not.
template <class C, class Tile, u32 BAD, bool PAGED = C::PAGED>
struct FpKvLoader : NumberLoader<typename C::T, Tile, C::THREADS, C::WHOLE_CHUNKS> {
    using Base = NumberLoader<typename C::T, Tile, C::THREADS, C::WHOLE_CHUNKS>;

    __device__ __forceinline__ FpKvLoader(
        const PrefillParams& p, const void* base, const Strides& s, const WorkItem& work, const Sequence& seq, int first_column, int columns
    )
        : Base(base, s, work.batch, seq.k_begin, work.head / p.group, first_column, columns) {}
};

template <class C, class Tile, u32 BAD> struct FpKvLoader<C, Tile, BAD, true> {
    using T = typename C::T;
    using Base = NumberLoader<T, Tile, C::THREADS, C::WHOLE_CHUNKS>;
    static constexpr int TOGETHER = 4;  // entries of the table are looked up together: each is a wait

    const PrefillParams& p;
    const Strides& s;
    KvRows<T, true> rows;
    int columns;

    __device__ __forceinline__ FpKvLoader(
        const PrefillParams& p, const void* base, const Strides& s, const WorkItem& work, const Sequence& seq, int first_column, int columns
    )
        : p(p), s(s), rows(p, base, s, work, seq), columns(columns) {
        rows.first_gmem += first_column * s.column;
    }

    __device__ __forceinline__ void load(int thread, u32 tile_smem, int first_key, int begin, int end) const {
#pragma unroll 1
        for (int first = 0; first < Base::PASSES; first += TOGETHER) {
            i32 entry[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int key = first_key + place(thread, first + i) / Tile::CHUNKS;
                entry[i] = here(thread, first + i) && key >= begin && key < end ? rows.entry(p, key) : -1;
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if (!here(thread, first + i)) break;
                const int row = place(thread, first + i) / Tile::CHUNKS, chunk = place(thread, first + i) % Tile::CHUNKS;
                const int key = first_key + row;
                const bool wanted = key >= begin && key < end, good = u32(entry[i]) < u32(p.pages);
                const u32 to = tile_smem + Tile::offset(row, chunk);
                if (BAD != 0 && wanted && !good) store_smem(to, make_uint4(BAD, BAD, BAD, BAD));
                else Base::copy(to, rows.at(p, s, key, good ? entry[i] : 0), s.column, chunk, columns, wanted && good);
            }
        }
    }

  private:
    // Which chunk of the tile is the thread's in a pass, and whether there is one.
    static __device__ __forceinline__ int place(int thread, int pass) { return pass * C::THREADS + thread; }
    static __device__ __forceinline__ bool here(int thread, int pass) { return place(thread, pass) < Base::ALL; }
};
