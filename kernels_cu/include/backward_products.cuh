// Products of a warp of the backward pass whose operands both lie in shared memory.
#include "include/products.cuh"

// D_rmem += A B^T: 16 MT rows of A, 8 NT rows of B, DEPTH columns of both.
template <class T, class A, class B, int DEPTH, int MT, int NT>
__device__ __forceinline__ void multiply_rows(float (&D_rmem)[MT][NT][4], u32 A_frag, u32 B_frag) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
        u32 a[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) ldmatrix_x4(a[mt], A::fragment(A_frag, mt, k));
#pragma unroll
        for (int n = 0; n < NT / 2; ++n) {
            u32 b[4];
            ldmatrix_x4(b, B::fragment(B_frag, n, k));
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                mma_16x8x16<T>(D_rmem[mt][2 * n], a[mt], b[0], b[1]);
                mma_16x8x16<T>(D_rmem[mt][2 * n + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

// Columns of a result, in blocks of 16, of which each of GROUPS warps takes every GROUPS-th.
template <int COLUMNS, int GROUPS_> struct ColumnShare {
    static constexpr int GROUPS = GROUPS_, BLOCKS = COLUMNS / 16, OWN = (BLOCKS + GROUPS - 1) / GROUPS;

    // Whether there is an n-th block for a group.
    static __device__ __forceinline__ bool has(int group, int n) { return BLOCKS % GROUPS == 0 || group + GROUPS * n < BLOCKS; }
};

// Where a lane's first rows of ldmatrix begin, for operands of which a row belongs to one of the products that are added up: of B a group's
// first block, of A (as it were A^T) the columns from 16 * block on.
template <class Tile> __device__ __forceinline__ u32 fragment_b_by_depth(u32 smem, int group, int thread) {
    return Tile::fragment(fragment_a<Tile>(smem, 0, thread), 0, group);
}

template <class Tile> __device__ __forceinline__ u32 fragment_a_by_depth(u32 smem, int block, int thread) {
    return Tile::fragment(fragment_b<Tile>(smem, thread), 0, block);
}

// D_rmem += A B, a group's columns; B has DEPTH rows. BY_DEPTH: so has A, which is transposed on the way.
template <class T, class A, class B, bool BY_DEPTH, class Share, int DEPTH, int MT, int NT>
__device__ __forceinline__ void multiply_columns(float (&D_rmem)[MT][NT][4], u32 A_frag, u32 B_frag, int group) {
    static_assert(NT == 2 * Share::OWN, "");
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
        u32 a[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
            if constexpr (BY_DEPTH) ldmatrix_x4_transposed(a[mt], A::fragment(A_frag, k, mt));
            else ldmatrix_x4(a[mt], A::fragment(A_frag, mt, k));
        }
#pragma unroll
        for (int n = 0; n < Share::OWN; ++n) {
            if (!Share::has(group, n)) continue;
            u32 b[4];
            ldmatrix_x4_transposed(b, B::fragment(B_frag, k, Share::GROUPS * n));
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                mma_16x8x16<T>(D_rmem[mt][2 * n], a[mt], b[0], b[1]);
                mma_16x8x16<T>(D_rmem[mt][2 * n + 1], a[mt], b[2], b[3]);
            }
        }
    }
}
