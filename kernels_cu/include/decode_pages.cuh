// How decode.cu copies tiles of keys and values out of pages, 16 bytes at a time. C is the configuration of decode.cu.
//
// Each warp has a share of a tile's rows. One lane looks up one row, whatever the page size, and tells the lanes that copy it where it is.
#include "include/decode_params.cuh"
#include "include/paged.cuh"

// The ROWS rows of a warp in a tile. BAD as in PagedTileLoader.
template <class Tile, int ROWS, u32 BAD> struct SharedTile {
    static constexpr int PASS = 32 / Tile::CHUNKS, PASSES = (ROWS + PASS - 1) / PASS;  // rows that the lanes cover at a time
    static_assert(PASS % 8 == 0 || (PASS == 4 && Tile::BLOCK == 64), "pass_smem() knows how the swizzle changes");

    // The share begins with `row` of the tile. The row of the lane's key lies `offset` times 16 bytes behind the array's beginning, if it
    // is here and its page is good. whole: this is so in all lanes.
    static __device__ __forceinline__ void load(
        const void* base, u32 lane, u32 tile_smem, u32 row, int columns, u32 offset, bool here, bool good, bool whole
    ) {
        const u32 own = lane / Tile::CHUNKS, column = lane % Tile::CHUNKS * 8, dst = tile_smem + Tile::offset(row + own, column / 8);
        const u16* first = static_cast<const u16*>(base) + column;
        if (whole) {
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass)
                copy<true>(pass_smem(dst, pass), first + told(offset, pass, own) * u64(8), own, column, columns, true);
        } else {
            enum { ABSENT, IN_BAD_PAGE, GOOD };
            const u32 kind = good ? GOOD : here ? IN_BAD_PAGE : ABSENT;
#pragma unroll 1
            for (int pass = 0; pass < PASSES; ++pass) {
                const u32 to = pass_smem(dst, pass), its_kind = told(kind, pass, own);
                const u16* src = first + told(offset, pass, own) * u64(8);
                if (BAD != 0 && its_kind == IN_BAD_PAGE && has(own)) {
#pragma unroll
                    for (int block = 0; block < Tile::BLOCKS; ++block)
                        store_smem(to + block * Tile::BLOCK_BYTES, make_uint4(BAD, BAD, BAD, BAD));
                } else {
                    copy<false>(to, src, own, column, columns, its_kind == GOOD);
                }
            }
        }
    }

  private:
    static __device__ __forceinline__ bool has(u32 own) { return ROWS % PASS == 0 || own < ROWS; }

    // What the lane says whose key has the row that this lane copies.
    static __device__ __forceinline__ u32 told(u32 x, int pass, u32 own) { return __shfl_sync(0xffffffffu, x, pass * PASS + own); }

    static __device__ __forceinline__ u32 pass_smem(u32 dst, int pass) {
        return (dst ^ (PASS == 4 ? pass % 2 * 64 : 0)) + pass * PASS * Tile::ROW_BYTES;
    }

    // The lane's chunks of a row, one in each block.
    template <bool WHOLE> static __device__ __forceinline__ void copy(u32 to, const u16* src, u32 own, int column, int columns, bool keep) {
        if (!has(own)) return;
#pragma unroll
        for (int block = 0; block < Tile::BLOCKS; ++block) {
            const u32 dst = to + block * Tile::BLOCK_BYTES;
            if (WHOLE && block + 1 < Tile::BLOCKS) copy_16<true>(dst, src + block * Tile::BLOCK);  // only the last is part padding
            else copy_or_zero<16, true>(dst, src + block * Tile::BLOCK, keep && column + block * Tile::BLOCK < columns);
        }
    }
};

// Nothing, where keys and values are not copied so.
template <class C, bool SHARES = C::SHARES> struct PageShare {};

// The thread's part in it. Offsets have 32 bits: the planner sees to that.
template <class C> struct PageShare<C, true> {
    static constexpr int ROWS = C::N / (C::THREADS / 32);
    using K = SharedTile<typename C::KTile, ROWS, 0x7fff7fffu>;  // NaN in both types
    using V = SharedTile<typename C::VTile, ROWS, 0>;
    static_assert(ROWS <= 32, "a lane has one key");

    const i32* entries_gmem;
    i32 entry;    // of the page table, for the lane's key of the tile that comes next; -1 if that is not read
    u32 in_page;  // the key's place there

    __device__ __forceinline__ void begin(const DecodeParams& p, int batch) { entries_gmem = p.page_table + i64(batch) * p.max_pages; }

    // Of the tile from `key` on, the keys in the range are read.
    __device__ __forceinline__ void look_up(const DecodeParams& p, int key, const KeyRange& range) {
        const int own = key + int(row() + lane()), place = page_of(p, own);
        in_page = own - place * p.page_size;
        entry = here(key, range) ? entries_gmem[place] : -1;
    }

    __device__ __forceinline__ void load(const DecodeParams& p, u32 stage_smem, int key, const KeyRange& range, int head) const {
        const bool good = u32(entry) < u32(p.pages), whole = !__any_sync(0xffffffffu, !good && lane() < ROWS), own = here(key, range);
        const u32 k = good ? offset(p.k_stride, head, 3) : 0, v = good ? offset(p.v_stride, head, 3) : 0;
        K::load(p.k, lane(), stage_smem, row(), p.head_dim / C::PACK, k, own, good, whole);
        V::load(p.v, lane(), stage_smem + C::V_SMEM, row(), p.head_dim_v / C::PACK, v, own, good, whole);
        if constexpr (C::SCALED) {
            if (ROWS == 32 || lane() < ROWS) {
                const u32 to = stage_smem + C::SCALES_SMEM + 4 * (row() + lane());
                load_scale(to, p.k_scale, p.k_scale_stride, head, p.k_factor, good);
                load_scale(to + 4 * C::N, p.v_scale, p.v_scale_stride, head, p.v_factor, good);
            }
        }
    }

  private:
    static __device__ __forceinline__ u32 lane() { return u32(C::load_thread()) % 32; }
    static __device__ __forceinline__ u32 row() { return u32(C::load_thread()) / 32 * ROWS; }  // of the tile, the share's first one

    static __device__ __forceinline__ bool here(int key, const KeyRange& range) {
        const int own = key + int(row() + lane());
        return lane() < ROWS && own >= range.begin && own < range.end;
    }

    // Of the lane's key, in 2^shift elements.
    __device__ __forceinline__ u32 offset(const Strides& s, int head, int shift) const {
        return u32(entry) * u32(s.batch >> shift) + in_page * u32(s.row >> shift) + u32(head) * u32(s.head >> shift);
    }

    __device__ __forceinline__ void load_scale(u32 to, const float* scales, const Strides& s, int head, float factor, bool good) const {
        if (scales) copy_or_zero<4>(to, scales + u64(good ? offset(s, head, 0) : 0), good);
        else store_smem(to, __float_as_uint(factor));
    }
};
