// Where the rows of sequences lie in arrays that the launches of a backward pass hand to each other: each sequence begins with a tile.
#include "include/backward_params.cuh"
#include "include/schedule.cuh"

// The place of a sequence's first row. Packed sequences of n rows have room for n / tile_rows + 1 tiles, wherever they begin.
__device__ __forceinline__ i64 first_place_of(const BackwardParams& p, int batch, const Sequence& s) {
    const i64 rows = p.tile_rows;
    if (p.prefill.cu_seqlens_q) return (s.q_begin / rows + batch) * rows;
    return batch * ((p.prefill.q_rows + rows - 1) / rows * rows);
}

// The sequence that has a tile of places; with packed sequences it may be the last one before a tile that nobody has.
__device__ __forceinline__ int batch_of_tile(const BackwardParams& p, int tile) {
    if (!p.prefill.cu_seqlens_q) return tile / ((p.prefill.q_rows + p.tile_rows - 1) / p.tile_rows);
    int begin = 0, end = p.prefill.batch;  // it is in [begin, end)
    while (end - begin > 1) {
        const int middle = (begin + end) / 2;
        const int row = clamp(index_at(p.prefill, p.prefill.cu_seqlens_q, 1, middle), 0, p.prefill.q_rows);
        if (row / p.tile_rows + middle <= tile) begin = middle;
        else end = middle;
    }
    return begin;
}
