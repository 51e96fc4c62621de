// The two matrix products of attention in float32 or float64 on tensor cores, for one warp and one tile of keys, between shared memory
// and registers.
// C is the configuration of a kernel. All kinds of arithmetic hold 16 x 8 tiles alike (g = lane / 4, t = lane % 4):
//   S_rmem[mt][nt][2 h + c]: row 16 mt + 8 h + g, key 8 nt + 2 t + c
//   O_rmem[mt][ot][2 h + c]: the same rows, column 8 SIZE (ot / SIZE) + 2 SIZE t + SIZE c + ot % SIZE
// with SIZE numbers in 16 bytes: a lane's columns then lie side by side, for loads of V as for stores of out.
#include "include/fp_mma.cuh"
#include "include/fp_tile.cuh"

#if CUFLASH_ARCH >= 800

// Operands of 16 depths from shared memory. In float, the depths of a lane are columns t, t + 4, t + 8 and t + 12, as ldmatrix deals
// numbers of 4 bytes out; in double 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, which two loads of 16 bytes bring.
template <class Tile, class T> struct Operands;

template <class Tile> struct Operands<Tile, float> {
    static __device__ __forceinline__ u32 first_a(u32 smem, int lane) { return smem + Tile::offset(lane % 16, lane / 16); }
    static __device__ __forceinline__ u32 first_b(u32 smem, int lane) { return smem + Tile::offset(lane % 8, lane / 8); }

    static __device__ __forceinline__ void load_a(float (&x)[8], u32 first, int rows, int depth16) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 d[4];
            ldmatrix_x4(d, Tile::at(first, rows, 4 * depth16 + 2 * h));
#pragma unroll
            for (int i = 0; i < 4; ++i) x[4 * h + i] = __uint_as_float(d[i]);
        }
    }

    static __device__ __forceinline__ void load_b(float (&x)[4], u32 first, int rows, int depth16) {
        u32 d[4];
        ldmatrix_x4(d, Tile::at(first, rows, 4 * depth16));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(d[i]);
    }
};

template <class Tile> struct Operands<Tile, double> {
    static __device__ __forceinline__ u32 first_a(u32 smem, int lane) { return smem + Tile::offset(lane / 4, lane % 4); }
    static __device__ __forceinline__ u32 first_b(u32 smem, int lane) { return first_a(smem, lane); }

    static __device__ __forceinline__ void load_a(double (&x)[8], u32 first, int rows, int depth16) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            double y[4];
            load_b(y, first, rows + 8 * row, depth16);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[2 * i + row] = y[i];
        }
    }

    static __device__ __forceinline__ void load_b(double (&x)[4], u32 first, int rows, int depth16) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Chunk<double> c = load_chunk<double>(Tile::at(first, rows, 8 * depth16 + 4 * h));
            x[2 * h] = c.x[0], x[2 * h + 1] = c.x[1];
        }
    }
};

template <class C, class Kind> struct Products {
    using T = typename C::T;

    // S = Q K^T. Q_smem: the warp's first row.
    static __device__ __forceinline__ void scores(T (&S_rmem)[C::MT][C::NT][4], u32 Q_smem, u32 K_smem, int lane) {
        using OfQ = Operands<typename C::QTile, T>;
        using OfK = Operands<typename C::KTile, T>;
        const u32 Q_first = OfQ::first_a(Q_smem, lane), K_first = OfK::first_b(K_smem, lane);
#pragma unroll C::QK_UNROLL
        for (int outer = 0; outer < C::DQK / 32; ++outer)
#pragma unroll
            for (int inner = 0; inner < 2; ++inner) {  // 16 columns of 32: half of the swizzle's period for float
                typename Mma<Kind>::A a[C::MT];
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) {
                    T x[8];
                    OfQ::load_a(x, Q_first, 16 * mt, 2 * outer + inner);
                    Mma<Kind>::prepare_rounded(a[mt], x);
                }
                constexpr int COUNT = C::COUNT < C::NT ? C::COUNT : C::NT;
#pragma unroll
                for (int nt = 0; nt < C::NT; nt += COUNT) {
                    typename Mma<Kind>::B b[COUNT];
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) {
                        T x[4];
                        OfK::load_b(x, K_first, 8 * (nt + i), 2 * outer + inner);
                        Mma<Kind>::prepare_rounded(b[i], x);
                    }
                    Mma<Kind>::multiply(S_rmem, nt, a, b);
                }
            }
    }

    // O += P V. The depths are keys, 16 at a time: keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a lane, as D has them.
    static __device__ __forceinline__ void values(
        T (&O_rmem)[C::MT][C::OT][4], const T (&P_rmem)[C::MT][C::NT][4], u32 V_smem, int lane, int columns
    ) {
        constexpr int SIZE = Chunk<T>::SIZE;
        const int key = 2 * (lane % 4), chunk = lane / 4;
        const u32 V_first[2] = {V_smem + C::VTile::offset(key, chunk), V_smem + C::VTile::offset(key + 1, chunk)};
#pragma unroll
        for (int k = 0; k < C::N / 16; ++k) {
            typename Mma<Kind>::A a[C::MT];
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                T x[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) x[i] = P_rmem[mt][2 * k + i / 4][i % 2 * 2 + i % 4 / 2];
                Mma<Kind>::prepare(a[mt], x);
            }
#pragma unroll
            for (int group = 0; group < C::OT / SIZE; ++group) {  // 8 SIZE columns
                // Besides the work that it saves, the branch bounds how many of the loads that follow are brought forward: registers
                // are scarce.
                if (group > 0 && 8 * SIZE * group >= columns) break;
                Chunk<T> v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = load_chunk<T>(C::VTile::at(V_first[i % 2], 16 * k + i / 2 * 8, 8 * group));
                constexpr int COUNT = C::COUNT < SIZE ? C::COUNT : SIZE;
#pragma unroll
                for (int e = 0; e < SIZE; e += COUNT) {
                    typename Mma<Kind>::B b[COUNT];
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) {
                        const T x[4] = {v[0].x[e + i], v[1].x[e + i], v[2].x[e + i], v[3].x[e + i]};
                        Mma<Kind>::prepare_rounded(b[i], x);
                    }
                    Mma<Kind>::multiply(O_rmem, SIZE * group + e, a, b);
                }
            }
        }
    }
};
#else
template <class C, class Kind> struct Products;
#endif
