// Tiles of rows of a head in shared memory, as the copy engine brings them: in boxes of tensor maps, 64 columns wide.
#include "include/async.cuh"
#include "include/layout.cuh"

// The rows from `row` on into a tile; they complete on the barrier.
template <class Tile>
__device__ __forceinline__ void load_boxes(u32 smem, const TensorMap& map, int row, int head, int batch, u32 barrier_smem) {
#pragma unroll
    for (int block = 0; block < Tile::BLOCKS; ++block)
        copy_box(smem + block * Tile::BLOCK_BYTES, map, barrier_smem, block * Tile::BLOCK, row, head, batch);
}

// By the lanes of a warp: 0 into the rows of a tile outside begin..end - 1, where other things may be: 0 * x is NaN where x is not
// finite.
template <class Tile> __device__ __forceinline__ void clear_outside(int lane, u32 smem, int begin, int end) {
#pragma unroll 1
    for (int i = lane; i < Tile::ROWS * Tile::CHUNKS; i += 32) {
        const int row = i / Tile::CHUNKS;
        if (row >= begin && row < end) continue;
#pragma unroll
        for (int block = 0; block < Tile::BLOCKS; ++block)
            store_smem(smem + block * Tile::BLOCK_BYTES + Tile::offset(row, i % Tile::CHUNKS), make_uint4(0, 0, 0, 0));
    }
    async_proxy_fence();
    __syncwarp();
}
