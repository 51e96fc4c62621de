// The same products by fused multiply-adds of the ordinary pipelines: see fp_products.cuh for who holds what.
#include "include/fp_products.cuh"
#include "include/reals.cuh"

struct Simt {};

template <class Kind> constexpr bool is_simt = false;
template <> constexpr bool is_simt<Simt> = true;

template <class C> struct Products<C, Simt> {
    using T = typename C::T;
    using Real = typename C::Real;
    static constexpr int SIZE = Chunk<T>::SIZE;

    static __device__ __forceinline__ void scores(T (&S_rmem)[C::MT][C::NT][4], u32 Q_smem, u32 K_smem, int lane) {
        const int g = lane / 4, key = 2 * (lane % 4);
        const u32 Q_first = Q_smem + C::QTile::offset(g, 0);
        const u32 K_first[2] = {K_smem + C::KTile::offset(key, 0), K_smem + C::KTile::offset(key + 1, 0)};
#pragma unroll C::SIMT_UNROLL
        for (int chunk = 0; chunk < C::DQK / SIZE; ++chunk) {
            Chunk<T> q[2 * C::MT];
#pragma unroll
            for (int r = 0; r < 2 * C::MT; ++r) q[r] = load_chunk<T>(C::QTile::at(Q_first, 8 * r, chunk));
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const Chunk<T> k = load_chunk<T>(C::KTile::at(K_first[c], 8 * nt, chunk));
#pragma unroll
                    for (int e = 0; e < SIZE; ++e)
#pragma unroll
                        for (int r = 0; r < 2 * C::MT; ++r) {
                            T& s = S_rmem[r / 2][nt][r % 2 * 2 + c];
                            s = Real::fma(q[r].x[e], k.x[e], s);
                        }
                }
        }
    }

    static __device__ __forceinline__ void values(
        T (&O_rmem)[C::MT][C::OT][4], const T (&P_rmem)[C::MT][C::NT][4], u32 V_smem, int lane, int columns
    ) {
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll C::SIMT_UNROLL
                for (int other = 0; other < 4; ++other) {  // the lane of four that holds the weights of this key
                    const int key = 2 * other + c;
                    const u32 V_first = V_smem + C::VTile::offset(key, lane % 4 * 2);
                    T p[2 * C::MT];
#pragma unroll
                    for (int r = 0; r < 2 * C::MT; ++r)
                        p[r] = __shfl_sync(0xffffffffu, P_rmem[r / 2][nt][r % 2 * 2 + c], (lane & 28) + other);
#pragma unroll
                    for (int group = 0; group < C::OT / SIZE; ++group)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const Chunk<T> v = load_chunk<T>(C::VTile::at(V_first, 8 * nt, 8 * group + half));
#pragma unroll
                            for (int e = 0; e < SIZE; ++e)
#pragma unroll
                                for (int r = 0; r < 2 * C::MT; ++r) {
                                    T& o = O_rmem[r / 2][SIZE * group + e][r % 2 * 2 + half];
                                    o = Real::fma(p[r], v.x[e], o);
                                }
                        }
                }
    }
};
