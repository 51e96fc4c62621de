// Tiles of 16-bit numbers: how they lie in shared memory, and how they get there from arrays of any strides.
#include "include/params.cuh"
#include "include/ptx.cuh"

// COLUMNS numbers a row, in blocks of 64 (or 32) columns; a block is [ROWS][BLOCK], so its rows have 128 (or 64) bytes. Within a
// row, the 16-byte chunk c lies at place c ^ swizzle(row): the 8 rows of an ldmatrix, like 8 lanes that store one row, then
// touch all 32 banks once. The place must begin at a multiple of 128 bytes.
template <int ROWS_, int COLUMNS, int BLOCK_ = COLUMNS % 64 == 0 ? 64 : 32> struct SmemTile {
    static constexpr int ROWS = ROWS_;
    static constexpr int BLOCK = BLOCK_;
    static constexpr int BLOCKS = COLUMNS / BLOCK;
    static constexpr int CHUNKS = BLOCK / 8;
    static constexpr int ROW_BYTES = 2 * BLOCK;
    static constexpr int BLOCK_BYTES = ROWS * ROW_BYTES;
    static constexpr int BYTES = BLOCKS * BLOCK_BYTES;
    static_assert(COLUMNS % BLOCK == 0 && ROWS % 16 == 0, "tiles are whole fragments");

    // Byte offset of a chunk of the first block.
    static __device__ __forceinline__ u32 offset(int row, int chunk) {
        const int swizzle = BLOCK == 64 ? row & 7 : (row >> 1) & 3;
        return row * ROW_BYTES + ((chunk ^ swizzle) << 4);
    }

    // Address of the 16 x 16 fragment at (16 * row16, 16 * column16), given that of the fragment at (0, 0).
    static __device__ __forceinline__ u32 fragment(u32 first, int row16, int column16) {
        constexpr int PER_BLOCK = BLOCK / 16;
        return (first ^ ((column16 % PER_BLOCK) << 5)) + (column16 / PER_BLOCK) * BLOCK_BYTES + row16 * 16 * ROW_BYTES;
    }
};

// Which key the rows of a tile of keys, and so the columns of scores, stand for. A lane holds columns 8 nt + 2 (l % 4) + c of its rows.
// In order, they are keys of these numbers. GROUPED: within 32 keys the rows of the tile are permuted so that a lane's 8 columns of 4
// neighbouring products are 8 neighbouring keys, which it reads from a bias or mask array at once.
template <bool GROUPED> struct KeyOrder {
    static constexpr int LANE = GROUPED ? 8 : 2;  // keys between lanes

    // Key of the lane's first column of product nt, counted from that of product 0; the second column is the next key.
    static __device__ constexpr int key(int nt) { return GROUPED ? nt / 4 * 32 + nt % 4 * 2 : 8 * nt; }

    static __device__ constexpr int key(int nt, int c) { return key(nt) + c; }

    // The tile's row where a key goes.
    static __device__ __forceinline__ int row(int key) {
        return GROUPED ? (key & ~31) | (key & 6) << 2 | (key >> 2 & 6) | (key & 1) : key;
    }
};

// Copies tiles of rows of one (batch, head) into shared memory; what lies outside the array becomes 0.
// LOAD: bytes of one copy. 16, 8, 4: columns are contiguous, addresses and the head size are multiples of it. 2: any strides. ONCE: no
// other block reads them.
template <class Tile, int THREADS, int LOAD, bool GROUPED = false, bool ONCE = false> struct TileLoader {
    using Order = KeyOrder<GROUPED>;
    static constexpr int PASS = THREADS / Tile::CHUNKS;  // rows that the threads cover at a time
    static constexpr int PASSES = (Tile::ROWS + PASS - 1) / PASS;
    static constexpr int UNROLL = LOAD == 16 && CUFLASH_ARCH >= 800 ? PASSES : 1;  // what goes through registers would fill them
    static_assert(PASS % 8 == 0, "the swizzle of a thread's rows must not change, or as pass_smem() knows");

    const u16* first_gmem;  // row 0, column 0
    i64 row_stride, column_stride;
    int columns;

    __device__ __forceinline__ TileLoader(const void* base, const Strides& s, i64 batch, i64 first_row, i64 head, int columns)
        : first_gmem(static_cast<const u16*>(base) + batch * s.batch + first_row * s.row + head * s.head),
          row_stride(s.row), column_stride(s.column), columns(columns) {}

    // Rows tile_row, tile_row + 1, ... of the array; only those in [begin, end) are read.
    __device__ __forceinline__ void load(int thread, u32 tile_smem, int tile_row, int begin, int end) const {
        if (LOAD == 16 && tile_row >= begin && tile_row + Tile::ROWS <= end) copy<true>(thread, tile_smem, tile_row, begin, end);
        else copy<false>(thread, tile_smem, tile_row, begin, end);
    }

    // Bring the rows into the L2 cache.
    __device__ __forceinline__ void prefetch(int thread, int tile_row, int begin, int end) const {
        if constexpr (LOAD > 2) {
#pragma unroll
            for (int first = 0; first < Tile::ROWS * Tile::BLOCKS; first += THREADS) {
                const int row = tile_row + (first + thread) / Tile::BLOCKS, column = (first + thread) % Tile::BLOCKS * Tile::BLOCK;
                if (row >= begin && row < min(end, tile_row + Tile::ROWS) && column < columns)
                    prefetch_l2(first_gmem + row * row_stride + column);
            }
        }
    }

    // Replace those of the numbers that this thread has copied by 0 which are infinite or NaN.
    template <class T> static __device__ __forceinline__ void clear_not_finite(int thread, u32 tile_smem) {
        if (Tile::ROWS % PASS != 0 && thread / Tile::CHUNKS >= Tile::ROWS) return;  // a pass has more rows than the tile
#pragma unroll 1
        for (int i = 0; i < OWN_CHUNKS; ++i) {
            const u32 at = own_chunk(thread, tile_smem, i);
            const uint4 x = load_smem_16(at);
            store_smem(at, make_uint4(only_finite<T>(x.x), only_finite<T>(x.y), only_finite<T>(x.z), only_finite<T>(x.w)));
        }
    }

    // One number of the array; 0 behind the last column.
    __device__ __forceinline__ u32 number(int row, int column) const {
        return column < columns ? u32(first_gmem[row * row_stride + column * column_stride]) : 0u;
    }

  protected:
    static_assert(Tile::ROWS % PASS == 0 || PASS % Tile::ROWS == 0, "");
    static constexpr int OWN_CHUNKS = PASSES * Tile::BLOCKS;

    // The i-th chunk that this thread copied.
    static __device__ __forceinline__ u32 own_chunk(int thread, u32 tile_smem, int i) {
        const int row = thread / Tile::CHUNKS + i / Tile::BLOCKS * PASS;
        return tile_smem + i % Tile::BLOCKS * Tile::BLOCK_BYTES + Tile::offset(Order::row(row), thread % Tile::CHUNKS);
    }

    template <class T> static __device__ __forceinline__ u32 only_finite(u32 x) {
        const float2 f = not_finite2<T>(x);
        return x & ((f.x == 0.0f ? 0xffffu : 0u) | (f.y == 0.0f ? 0xffff0000u : 0u));
    }

    template <bool WHOLE> __device__ __forceinline__ void copy(int thread, u32 tile_smem, int tile_row, int begin, int end) const {
        const int row = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS;  // of the first pass
        const u32 dst = tile_smem + Tile::offset(Order::row(row), chunk);
        const u16* src = first_gmem + (tile_row + row) * row_stride;
        if constexpr (LOAD > 2) src += chunk * 8;
#pragma unroll UNROLL
        for (int pass = 0; pass < PASSES; ++pass, src += PASS * row_stride) {
            if (Tile::ROWS % PASS != 0 && pass * PASS + row >= Tile::ROWS) break;
            const int r = tile_row + pass * PASS + row;
            const bool row_here = WHOLE || (r >= begin && r < end);
            copy_row<WHOLE>(pass_smem(dst, pass), src, chunk, row_here);
        }
    }

    // From the place of a thread's chunk in the first pass to that in another one.
    static __device__ __forceinline__ u32 pass_smem(u32 dst, int pass) {
        if constexpr (!GROUPED || PASS % 32 == 0) return dst + pass * PASS * Tile::ROW_BYTES;
        // 8 keys further is 2 rows further down, 16 are 4, and that changes the swizzle; the first pass has rows with those bits clear.
        constexpr int CYCLE = PASS < 32 ? 32 / PASS : 1;
        const int down = pass % CYCLE * PASS / 4;
        return down * Tile::ROW_BYTES + (dst ^ (Tile::offset(down, 0) & 0x70)) + pass / CYCLE * 32 * Tile::ROW_BYTES;
    }

    // The thread's chunks of a row, one in each block. src: the row's number at column 8 * chunk (LOAD 2: at column 0).
    template <bool WHOLE> __device__ __forceinline__ void copy_row(u32 dst, const u16* src, int chunk, bool row_here) const {
#pragma unroll
        for (int block = 0; block < Tile::BLOCKS; ++block) {
            const int column = block * Tile::BLOCK + chunk * 8;
            const u32 to = dst + block * Tile::BLOCK_BYTES;
            if constexpr (LOAD == 16) {
                // Only the last block can be part padding: the head-size classes of tiles.py see to that.
                if (WHOLE && block + 1 < Tile::BLOCKS) copy_16<ONCE>(to, src + block * Tile::BLOCK);
                else copy_or_zero<16, ONCE>(to, src + block * Tile::BLOCK, row_here && column < columns);
            } else if constexpr (LOAD > 2) {
#pragma unroll
                for (int i = 0; i < 8; i += LOAD / 2)
                    copy_or_zero<LOAD>(to + 2 * i, src + block * Tile::BLOCK + i, row_here && column + i < columns);
            } else {
                store_smem(to, gather(src, column, row_here));
            }
        }
    }

    __device__ __forceinline__ uint4 gather(const u16* src, int column, bool row_here) const {
        u32 x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = row_here && column + i < columns ? u32(src[(column + i) * column_stride]) : 0u;
        return make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
    }
};
