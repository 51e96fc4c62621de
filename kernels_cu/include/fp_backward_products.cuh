// The products of a backward pass whose results stay: sums over all tiles, of which each tile's share is summed by itself first. A sum of
// thousands of terms is off by the square root of their number, a sum of sums by much less.
#include "include/fp_products.cuh"
#include "include/fp_simt.cuh"

// The mark of a pair of row and key that do not see each other, in the place of a weight or of a score's gradient: neither is -0 else.
template <class T> constexpr T HIDDEN = T(-0.0);

__device__ __forceinline__ bool is_hidden(float x) { return __float_as_uint(x) == 0x80000000u; }
__device__ __forceinline__ bool is_hidden(double x) { return __double_as_longlong(x) == -0x7fffffffffffffffLL - 1; }

// What fp_products.cuh asks of a configuration, for scores over COLUMNS columns of one array and of another.
template <class C, int COLUMNS> struct OfColumns {
    using T = typename C::T;
    using Real = typename C::Real;
    static constexpr int MT = C::MT, NT = C::NT, N = C::N, DQK = COLUMNS, OT = COLUMNS / 8;
    static constexpr int QK_UNROLL = 1, SIMT_UNROLL = C::FULL ? 1 : 2, COUNT = 4 / MT;
    using QTile = NumberTile<T, C::M, COLUMNS>;
    using KTile = NumberTile<T, C::N, COLUMNS>;
    using VTile = KTile;
};

// S = A B^T of two arrays of COLUMNS columns in shared memory.
template <class C, int COLUMNS, class Kind> struct Scores {
    using Of = OfColumns<C, COLUMNS>;

    static __device__ __forceinline__ void make(typename C::T (&s)[C::MT][C::NT][4], u32 A_smem, u32 B_smem, int lane) {
        Products<Of, Kind>::scores(s, A_smem, B_smem, lane);
    }
};

#if CUFLASH_ARCH >= 800
// With the operands of one product after the other: two sums and the tile's scores leave no registers for more.
template <class C, int COLUMNS> struct Scores<C, COLUMNS, Dmma> {
    using T = typename C::T;
    using OfA = Operands<typename OfColumns<C, COLUMNS>::QTile, T>;
    using OfB = Operands<typename OfColumns<C, COLUMNS>::KTile, T>;

    static __device__ __forceinline__ void make(T (&s)[C::MT][C::NT][4], u32 A_smem, u32 B_smem, int lane) {
        const u32 A_first = OfA::first_a(A_smem, lane), B_first = OfB::first_b(B_smem, lane);
#pragma unroll 1
        for (int depth16 = 0; depth16 < COLUMNS / 16; ++depth16) {
            T a[C::MT][8];
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) OfA::load_a(a[mt], A_first, 16 * mt, depth16);
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt) {
                T b[4];
                OfB::load_b(b, B_first, 8 * nt, depth16);
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) mma_16x8x16_f64(s[mt][nt], a[mt], b);
            }
        }
    }
};
#endif

// sums += P X by multiply-adds. P: [own][other] as scores are, X: rows of others in shared memory. `columns`: that there are.
// GUARDED: hidden pairs add nothing, whatever X holds; else they add 0 times that.
template <class C, class Tile, bool GUARDED, int OT>
__device__ __forceinline__ void add_simt(
    typename C::T (&sums)[C::MT][OT][4], const typename C::T (&P_rmem)[C::MT][C::NT][4], u32 X_smem, int lane, int columns
) {
    using T = typename C::T;
    constexpr int SIZE = Chunk<T>::SIZE, UNROLL = GUARDED || C::FULL ? 1 : 2;
    constexpr int CHUNKS = GUARDED ? 1 : 2;  // at a time: the guard takes registers
#pragma unroll
    for (int chunk = 0; chunk < 2 * OT / SIZE; chunk += CHUNKS) {
        if (chunk > 0 && 8 * SIZE * (chunk / 2) >= columns) break;
        T part[2 * C::MT][CHUNKS][SIZE] = {};
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll UNROLL
                for (int other = 0; other < 4; ++other) {  // the lane of four that holds the weights of this row of X
                    const u32 X_first = X_smem + Tile::offset(2 * other + c, lane % 4 * 2);
                    T w[2 * C::MT];
#pragma unroll
                    for (int r = 0; r < 2 * C::MT; ++r)
                        w[r] = __shfl_sync(0xffffffffu, P_rmem[r / 2][nt][r % 2 * 2 + c], (lane & 28) + other);
#pragma unroll
                    for (int i = 0; i < CHUNKS; ++i) {
                        const Chunk<T> x = load_chunk<T>(Tile::at(X_first, 8 * nt, 8 * (chunk / 2) + chunk % 2 + i));
#pragma unroll
                        for (int e = 0; e < SIZE; ++e)
#pragma unroll
                            for (int r = 0; r < 2 * C::MT; ++r)
                                if (!GUARDED || !is_hidden(w[r])) part[r][i][e] = C::Real::fma(w[r], x.x[e], part[r][i][e]);
                    }
                }
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r)
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
                for (int e = 0; e < SIZE; ++e) sums[r / 2][SIZE * (chunk / 2) + e][r % 2 * 2 + chunk % 2 + i] += part[r][i][e];
    }
}

// The same without a guard, by the instance's kind of arithmetic.
template <class C, class Kind> struct Sums;

template <class C> struct Sums<C, Simt> {
    template <class Tile, int OT>
    static __device__ __forceinline__ void add(
        typename C::T (&sums)[C::MT][OT][4], const typename C::T (&P_rmem)[C::MT][C::NT][4], u32 X_smem, int lane, int columns
    ) {
        add_simt<C, Tile, false>(sums, P_rmem, X_smem, lane, columns);
    }
};

#if CUFLASH_ARCH >= 800
template <class C> struct Sums<C, Dmma> {
    using T = typename C::T;

    // The depths are rows of X, 16 at a time, as in Products::values.
    template <class Tile, int OT>
    static __device__ __forceinline__ void add(
        T (&sums)[C::MT][OT][4], const T (&P_rmem)[C::MT][C::NT][4], u32 X_smem, int lane, int columns
    ) {
        constexpr int SIZE = Chunk<T>::SIZE;
        const int first = 2 * (lane % 4), chunk = lane / 4;
        const u32 X_first[2] = {X_smem + Tile::offset(first, chunk), X_smem + Tile::offset(first + 1, chunk)};
#pragma unroll
        for (int group = 0; group < OT / SIZE; ++group) {
            if (group > 0 && 8 * SIZE * group >= columns) break;
            T part[C::MT][SIZE][4] = {};
#pragma unroll
            for (int k = 0; k < C::N / 16; ++k) {
                typename Mma<Dmma>::A a[C::MT];
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
                    for (int i = 0; i < 8; ++i) a[mt][i] = P_rmem[mt][2 * k + i / 4][i % 2 * 2 + i % 4 / 2];
                Chunk<T> x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = load_chunk<T>(Tile::at(X_first[i % 2], 16 * k + i / 2 * 8, 8 * group));
                typename Mma<Dmma>::B b[SIZE];
#pragma unroll
                for (int e = 0; e < SIZE; ++e)
#pragma unroll
                    for (int i = 0; i < 4; ++i) b[e][i] = x[i].x[e];
                Mma<Dmma>::multiply(part, 0, a, b);
            }
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt)
#pragma unroll
                for (int e = 0; e < SIZE; ++e)
#pragma unroll
                    for (int c = 0; c < 4; ++c) sums[mt][SIZE * group + e][c] += part[mt][e][c];
        }
    }
};
#endif

template <class C, class Tile, int OT>
__device__ __forceinline__ void add_product(
    typename C::T (&sums)[C::MT][OT][4], const typename C::T (&P_rmem)[C::MT][C::NT][4], u32 X_smem, int lane, int columns, bool guarded
) {
    if (columns <= 0) return;  // a slice that has some of the other gradient alone
    if (guarded) add_simt<C, Tile, true>(sums, P_rmem, X_smem, lane, columns);
    else Sums<C, typename C::Kind>::template add<Tile>(sums, P_rmem, X_smem, lane, columns);
}
