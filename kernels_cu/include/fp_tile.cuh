// Tiles of float32 or float64 numbers: how they lie in shared memory, and how they get there from arrays of any strides.
#include "include/params.cuh"
#include "include/ptx.cuh"

template <class T> struct alignas(16) Chunk {  // 16 bytes: what one load of shared memory brings to a lane
    static constexpr int SIZE = 16 / sizeof(T);
    T x[SIZE];
};

template <class T> __device__ __forceinline__ Chunk<T> load_chunk(u32 smem);

template <> __device__ __forceinline__ Chunk<float> load_chunk<float>(u32 smem) {
    const uint4 x = load_smem_16(smem);
    return {{__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)}};
}

template <> __device__ __forceinline__ Chunk<double> load_chunk<double>(u32 smem) {
    const uint4 x = load_smem_16(smem);
    return {{__hiloint2double(x.y, x.x), __hiloint2double(x.w, x.z)}};
}

// [ROWS][COLUMNS], rows of whole 128 bytes. Within each 128 bytes of a row, the 16-byte chunk c lies at place c ^ swizzle(row), so
// that the lanes that read at once touch all 32 banks once: 2 chunks of every other of 8 rows in either type, a chunk of 8 rows in
// float (ldmatrix), 4 chunks of 2 rows in double. The tile must begin at a multiple of 128 bytes.
template <class T, int ROWS_, int COLUMNS_> struct NumberTile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
    static constexpr int CHUNKS = COLUMNS / Chunk<T>::SIZE;
    static constexpr int ROW_BYTES = COLUMNS * sizeof(T);
    static constexpr int BYTES = ROWS * ROW_BYTES;
    static_assert(ROW_BYTES % 128 == 0 && ROWS % 8 == 0, "");

    // Byte offset of a chunk.
    static __device__ __forceinline__ u32 offset(int row, int chunk) {
        const int swizzle = sizeof(T) == 4 ? row & 7 : (row & 6) ^ (row & 1) << 2;
        return row * ROW_BYTES + ((chunk ^ swizzle) << 4);
    }

    // Address of the chunk that lies `rows` below (a multiple of 8) and `chunks` to the right of the one at `first`, when that one is
    // among the first chunks of its row and no sum of the two carries beyond the bits of `chunks`.
    static __device__ __forceinline__ u32 at(u32 first, int rows, int chunks) {
        return (first ^ ((chunks & 7) << 4)) + (chunks >> 3) * 128 + rows * ROW_BYTES;
    }
};

// Copies tiles of rows of one (batch, head) into shared memory; what lies outside the array becomes 0.
// WHOLE_CHUNKS: columns are contiguous, addresses and the number of columns are multiples of 16 bytes. Else number by number.
template <class T, class Tile, int THREADS, bool WHOLE_CHUNKS> struct NumberLoader {
    static constexpr int ALL = Tile::ROWS * Tile::CHUNKS, PASSES = (ALL + THREADS - 1) / THREADS;
    static constexpr int UNROLL = WHOLE_CHUNKS && CUFLASH_ARCH >= 800 ? 2 : 1;  // what goes through registers would fill them
    static constexpr int SIZE = Chunk<T>::SIZE;

    const T* first_gmem;  // row 0, column 0
    i64 row_stride, column_stride;
    int columns;

    __device__ __forceinline__ NumberLoader(
        const void* base, const Strides& s, i64 batch, i64 first_row, i64 head, int first_column, int columns
    )
        : first_gmem(static_cast<const T*>(base) + batch * s.batch + first_row * s.row + head * s.head + first_column * s.column),
          row_stride(s.row), column_stride(s.column), columns(columns) {}

    // A chunk of the row that begins at `row_gmem`, if it is there.
    static __device__ __forceinline__ void copy(u32 to, const T* row_gmem, i64 column_stride, int chunk, int columns, bool row_here) {
        const int column = chunk * SIZE;
        if constexpr (WHOLE_CHUNKS) {
            copy_or_zero<16>(to, row_gmem + column, row_here && column < columns);
        } else {
#pragma unroll
            for (int e = 0; e < SIZE; ++e)
                copy_or_zero<sizeof(T)>(to + e * sizeof(T), row_gmem + (column + e) * column_stride, row_here && column + e < columns);
        }
    }

    // Rows tile_row, tile_row + 1, ... of the array; only those in [begin, end) are read.
    __device__ __forceinline__ void load(int thread, u32 tile_smem, int tile_row, int begin, int end) const {
#pragma unroll UNROLL
        for (int pass = 0; pass < PASSES; ++pass) {
            const int i = pass * THREADS + thread;
            if (ALL % THREADS != 0 && i >= ALL) break;
            const int row = i / Tile::CHUNKS, chunk = i % Tile::CHUNKS, r = tile_row + row;
            const bool row_here = r >= begin && r < end;
            copy(tile_smem + Tile::offset(row, chunk), first_gmem + r * row_stride, column_stride, chunk, columns, row_here);
        }
    }

    // Apply `change` to each chunk that this thread copied; its copies must have arrived, no barrier is needed.
    template <class Change> static __device__ __forceinline__ void for_own(int thread, u32 tile_smem, Change change) {
#pragma unroll 2
        for (int pass = 0; pass < PASSES; ++pass) {
            const int i = pass * THREADS + thread;
            if (ALL % THREADS != 0 && i >= ALL) break;
            change(tile_smem + Tile::offset(i / Tile::CHUNKS, i % Tile::CHUNKS));
        }
    }
};
