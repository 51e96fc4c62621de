// Keys and values in pages: where a key lies, and the loader of decode.cu, whose threads find the rows that they copy by themselves.
#include "include/layout.cuh"
#include "include/schedule.cuh"

// The place of a key's page in the table.
__device__ __forceinline__ int page_of(const PrefillParams& p, int key) { return int(u64(u32(key)) * p.page_magic >> p.page_shift); }

// Which page has each of the thread's rows of a tile, looked up long before the tile is loaded: its copies cannot start without.
template <int PASS, int PASSES> struct PageRows {
    i32 entry[PASSES];

    __device__ __forceinline__ void look_up(const PrefillParams& p, i64 batch, int row, int tile_row, int begin, int end) {
        const i32* entries_gmem = p.page_table + batch * p.max_pages;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int key = tile_row + pass * PASS + row;
            entry[pass] = key >= begin && key < end ? entries_gmem[page_of(p, key)] : 0;
        }
    }
};

// LOAD as in TileLoader. BAD: what the numbers of a key become whose page does not exist, as bits of two: NaN for keys, so that the rows
// that see it become NaN, and 0 for values, so that others do not.
template <class Tile, int THREADS, int LOAD, bool GROUPED, u32 BAD>
struct PagedTileLoader : TileLoader<Tile, THREADS, LOAD, GROUPED> {
    using Base = TileLoader<Tile, THREADS, LOAD, GROUPED>;
    using Base::PASS, Base::PASSES;
    using Pages = PageRows<PASS, PASSES>;

    i64 page_stride;
    const PrefillParams& p;
    int batch;

    // `s.batch` leads from page to page.
    __device__ __forceinline__ PagedTileLoader(
        const PrefillParams& p, const void* base, const Strides& s, int batch, int head_kv, int columns
    )
        : Base(base, s, 0, 0, head_kv, columns), page_stride(s.batch), p(p), batch(batch) {}

    __device__ __forceinline__ void look_up(Pages& pages, int thread, int tile_row, int begin, int end) const {
        pages.look_up(p, batch, thread / Tile::CHUNKS, tile_row, begin, end);
    }

    // The tile that was looked up last.
    __device__ __forceinline__ void load(const Pages& pages, int thread, u32 tile_smem, int tile_row, int begin, int end) const {
        const int row = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS;
        const u32 dst = tile_smem + Tile::offset(Base::Order::row(row), chunk);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (Tile::ROWS % PASS != 0 && pass * PASS + row >= Tile::ROWS) break;
            const int key = tile_row + pass * PASS + row;
            const bool here = key >= begin && key < end, good = u32(pages.entry[pass]) < u32(p.pages);
            const u32 to = Base::pass_smem(dst, pass);
            const u16* src = row_gmem(key, good ? pages.entry[pass] : 0);
            if constexpr (LOAD > 2) src += chunk * 8;
            if (BAD != 0 && here && !good) {
#pragma unroll
                for (int block = 0; block < Tile::BLOCKS; ++block)
                    store_smem(to + block * Tile::BLOCK_BYTES, make_uint4(BAD, BAD, BAD, BAD));
            } else {
                Base::template copy_row<false>(to, src, chunk, here && good);
            }
        }
    }

  protected:
    __device__ __forceinline__ const u16* row_gmem(int key, i32 page) const {
        return Base::first_gmem + page * page_stride + (key - page_of(p, key) * p.page_size) * Base::row_stride;
    }
};

struct NoPages {};

// The loader of keys or values, with the same functions where there are no pages.
template <class C, class Tile, u32 BAD, bool PAGED = C::PAGED> struct KvLoader : PagedTileLoader<Tile, C::THREADS, C::LOAD, C::HIDES, BAD> {
    using PagedTileLoader<Tile, C::THREADS, C::LOAD, C::HIDES, BAD>::PagedTileLoader;
};

template <class C, class Tile, u32 BAD> struct KvLoader<C, Tile, BAD, false> : TileLoader<Tile, C::THREADS, C::LOAD, C::HIDES, true> {
    using Base = TileLoader<Tile, C::THREADS, C::LOAD, C::HIDES, true>;
    using Pages = NoPages;

    __device__ __forceinline__ KvLoader(const PrefillParams&, const void* base, const Strides& s, int batch, int head_kv, int columns)
        : Base(base, s, batch, 0, head_kv, columns) {}

    __device__ __forceinline__ void look_up(Pages&, int, int, int, int) const {}

    __device__ __forceinline__ void load(const Pages&, int thread, u32 tile_smem, int tile_row, int begin, int end) const {
        Base::load(thread, tile_smem, tile_row, begin, end);
    }
};
