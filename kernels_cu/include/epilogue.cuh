// From accumulators to memory.
#include "include/layout.cuh"

// 16 x 8 tiles of a warp, rounded to 16 bits, into a tile of shared memory: pairs of them, STEP chunks from one pair to the next.
// APART: the number of the first chunk shares no bit with the distance of any other from it, so that the places differ by constants.
template <class Out, class Tile, int STEP, bool APART, int MT, int NT>
__device__ __forceinline__ void store_fragments(const float (&acc)[MT][NT][4], u32 smem, int warp_row, int first_chunk, int lane) {
    constexpr int CHUNKS = Tile::CHUNKS;
    const int first_row = warp_row + lane / 4;
    const u32 first = smem + first_chunk / CHUNKS * Tile::BLOCK_BYTES + Tile::offset(first_row, first_chunk % CHUNKS) + lane % 4 * 4;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int distance = nt / 2 * STEP + nt % 2, rows = 16 * mt + 8 * half;  // the swizzle repeats after 8 rows
                const int chunk = first_chunk + distance;
                const u32 at = APART ? (first ^ (distance % CHUNKS << 4)) + distance / CHUNKS * Tile::BLOCK_BYTES
                                     : smem + chunk / CHUNKS * Tile::BLOCK_BYTES + Tile::offset(first_row, chunk % CHUNKS) + lane % 4 * 4;
                store_smem(at + rows * Tile::ROW_BYTES, pack2<Out>(acc[mt][nt][2 * half], acc[mt][nt][2 * half + 1]));
            }
}

// Whether rows from this place on can be written 16 bytes at a time.
__device__ __forceinline__ bool rows_in_sixteens(const u16* row_gmem, const Strides& stride, int columns) {
    return columns % 8 == 0 && stride.column == 1 && ((reinterpret_cast<u64>(row_gmem) | u64(2 * stride.row)) & 15) == 0;
}

// Rows of 16-bit numbers in shared memory, as many as exist -> out: whole sectors. `row_gmem` is out at the first row and column 0. Order:
// where a row lies in the tile.
template <class Tile, int THREADS, class Order = KeyOrder<false>>
__device__ __forceinline__ void store_rows(u32 smem, u16* row_gmem, const Strides& stride, int rows, int columns, bool vector) {
    constexpr int PASS = THREADS / Tile::CHUNKS;
    const int chunk = threadIdx.x % Tile::CHUNKS, first_row = threadIdx.x / Tile::CHUNKS;
    u16* to = row_gmem + first_row * stride.row;
    if (vector) {  // 16 bytes at a time
#pragma unroll 1
        for (int row = first_row; row < min(rows, Tile::ROWS); row += PASS, to += PASS * stride.row)
#pragma unroll
            for (int block = 0; block < Tile::BLOCKS; ++block) {
                const int column = block * Tile::BLOCK + chunk * 8;
                const u32 from = smem + block * Tile::BLOCK_BYTES + Tile::offset(Order::row(row), chunk);
                if (column < columns) *reinterpret_cast<uint4*>(to + column) = load_smem_16(from);
            }
        return;
    }
#pragma unroll 1
    for (int row = first_row; row < min(rows, Tile::ROWS); row += PASS, to += PASS * stride.row)
#pragma unroll 1
        for (int block = 0; block < Tile::BLOCKS; ++block) {
            const int column = block * Tile::BLOCK + chunk * 8;
            const uint4 x = load_smem_16(smem + block * Tile::BLOCK_BYTES + Tile::offset(Order::row(row), chunk));
            const u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (column + i < columns) to[(column + i) * stride.column] = u16(word[i / 2] >> (i % 2 * 16));
        }
}
