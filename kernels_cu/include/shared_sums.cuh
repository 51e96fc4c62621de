// Sums in memory to which the logits that share an element of a bias add, of the backward passes of all dtypes.
#include "include/ptx.cuh"

// By a warp whose lane l has a number of row l / 4 and column l % 4 of a tile: to what rows, or columns, or both may share.
template <class T> __device__ __forceinline__ void add_shared(double* gmem, T x, bool by_rows, bool by_columns) {
    double sum = double(x);
    if (by_rows)
#pragma unroll
        for (int lanes = 4; lanes <= 16; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (by_columns)
#pragma unroll
        for (int lanes = 1; lanes <= 2; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    const int lane = int(threadIdx.x) % 32;
    if (sum != 0.0 && !(by_rows && lane >= 4) && !(by_columns && lane % 4 != 0)) add_gmem(gmem, sum);
}
