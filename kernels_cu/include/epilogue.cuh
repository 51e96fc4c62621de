// From accumulators to memory.
#include "include/layout.cuh"

// 16 x 8 tiles of a warp, rounded to 16 bits, into a tile of shared memory: pairs of them, STEP tiles from one pair to the next.
template <class Out, class Tile, int STEP, int MT, int NT>
__device__ __forceinline__ void store_fragments(const float (&acc)[MT][NT][4], u32 smem, int warp_row, int first_chunk, int lane) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int chunk = first_chunk + nt / 2 * STEP + nt % 2, row = warp_row + 16 * mt + 8 * half + lane / 4;
                const u32 at = smem + chunk / Tile::CHUNKS * Tile::BLOCK_BYTES + Tile::offset(row, chunk % Tile::CHUNKS) + lane % 4 * 4;
                store_smem(at, pack2<Out>(acc[mt][nt][2 * half], acc[mt][nt][2 * half + 1]));
            }
}

// Rows of 16-bit numbers in shared memory, as many as exist -> out: whole sectors. `row_gmem` is out at the first row and column 0.
template <class Tile, int THREADS>
__device__ __forceinline__ void store_rows(u32 smem, u16* row_gmem, const Strides& stride, int rows, int columns, bool vector) {
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
