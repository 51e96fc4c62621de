// The two matrix products of attention for one warp and one tile of keys, between shared memory and registers. C is the
// configuration of a kernel: its types, tiles and numbers of mma tiles.
#include "include/layout.cuh"
#include "include/mma.cuh"

// Where a lane's rows of ldmatrix begin: A and transposed B take 16 rows x 2 chunks, B 2 chunks of 8 rows, then of the next 8.
template <class Tile> __device__ __forceinline__ u32 fragment_a(u32 smem, int row, int thread) {
    return smem + Tile::offset(row + thread % 16, thread / 16 % 2);
}

template <class Tile> __device__ __forceinline__ u32 fragment_b(u32 smem, int thread) {
    return smem + Tile::offset(thread / 16 % 2 * 8 + thread % 8, thread / 8 % 2);
}

template <int MT, int NT> __device__ __forceinline__ void clear(float (&d)[MT][NT][4]) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int c = 0; c < 4; ++c) d[mt][nt][c] = 0.0f;
}

// S_rmem = Q K^T of a warp: 16 head columns at a time.
template <class C>
__device__ __forceinline__ void multiply_qk(
    float (&S_rmem)[C::MT][C::NT][4], const u32 (&Q_rmem)[C::Q_IN_RMEM ? C::DQK / 16 : 1][C::MT][4], u32 Q_frag, u32 K_frag
) {
    clear(S_rmem);
#pragma unroll
    for (int k = 0; k < C::DQK / 16; ++k) {
        u32 a[C::MT][4];
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt) {
            if constexpr (C::Q_IN_RMEM) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[mt][i] = Q_rmem[k][mt][i];
            } else {
                ldmatrix_x4(a[mt], C::QTile::fragment(Q_frag, mt, k));
            }
        }
#pragma unroll
        for (int n = 0; n < C::NT / 2; ++n) {
            u32 b[4];  // 16 keys x 16 columns
            ldmatrix_x4(b, C::KTile::fragment(K_frag, n, k));
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                mma_16x8x16<typename C::In>(S_rmem[mt][2 * n], a[mt], b[0], b[1]);
                mma_16x8x16<typename C::In>(S_rmem[mt][2 * n + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

// The weights of 16 keys, rounded to 16 bits: D fragments of S, in pairs, are an A fragment of P.
template <class C, class T = typename C::In>
__device__ __forceinline__ void round_weights(u32 (&a)[C::MT][4], const float (&P_rmem)[C::MT][C::NT][4], int k) {
#pragma unroll
    for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = &P_rmem[mt][2 * k + i / 2][i % 2 * 2];
            a[mt][i] = pack2<T>(pair[0], pair[1]);
        }
}

// O_rmem += P V of a warp for 16 keys. Of the value columns, in blocks of 16, each of the GROUPS takes every GROUPS-th.
template <class C>
__device__ __forceinline__ void multiply_pv(float (&O_rmem)[C::MT][C::OT][4], const u32 (&a)[C::MT][4], u32 V_frag, int k) {
#pragma unroll
    for (int n = 0; n < C::OT / 2; ++n) {
        u32 b[4];  // 16 keys x 16 columns, transposed on the way
        ldmatrix_x4_transposed(b, C::VTile::fragment(V_frag, k, C::GROUPS * n));
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt) {
            mma_16x8x16<typename C::In>(O_rmem[mt][2 * n], a[mt], b[0], b[1]);
            mma_16x8x16<typename C::In>(O_rmem[mt][2 * n + 1], a[mt], b[2], b[3]);
        }
    }
}
