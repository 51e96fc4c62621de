// Normalised rows to global memory.
#include "include/layout.cuh"

// Accumulators of a block of M rows, already divided by their sums -> out, in the 16-bit type Out, through shared memory, so
// that whole sectors are written. `row_gmem` is out at the block's first row and column 0; rows counts those that exist.
template <class Out, class Tile, int THREADS, int MT, int OT>
__device__ __forceinline__ void store_rows(
    const float (&acc)[MT][OT][4], u32 smem, u16* row_gmem, const Strides& stride, int rows, int columns, bool vector, int warp_row,
    int lane
) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int ot = 0; ot < OT; ++ot)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                constexpr int PER_BLOCK = Tile::CHUNKS;
                const int row = warp_row + 16 * mt + 8 * half + lane / 4;
                const u32 at = smem + ot / PER_BLOCK * Tile::BLOCK_BYTES + Tile::offset(row, ot % PER_BLOCK) + lane % 4 * 4;
                store_smem(at, pack2<Out>(acc[mt][ot][2 * half], acc[mt][ot][2 * half + 1]));
            }
    __syncthreads();
    constexpr int PASS = THREADS / Tile::CHUNKS;
    const int chunk = threadIdx.x % Tile::CHUNKS;
#pragma unroll 1
    for (int row = threadIdx.x / Tile::CHUNKS; row < Tile::ROWS; row += PASS) {
        if (row >= rows) break;
#pragma unroll
        for (int block = 0; block < Tile::BLOCKS; ++block) {
            const int column = block * Tile::BLOCK + chunk * 8;
            if (column >= columns) break;
            const uint4 x = load_smem_16(smem + block * Tile::BLOCK_BYTES + Tile::offset(row, chunk));
            u16* to = row_gmem + row * stride.row + column * stride.column;
            if (vector) {
                *reinterpret_cast<uint4*>(to) = x;
            } else {
                const u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (column + i < columns) to[i * stride.column] = u16(word[i / 2] >> (i % 2 * 16));
            }
        }
    }
}
