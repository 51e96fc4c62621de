// Which numbers of a warp's products a lane of decode.cu has, and the products of e4m3 where keys and value columns are their rows.
//
// S is [mt][nt][4] and O [mt][ot][4] either way: numbers 2 (r % 2) and 2 (r % 2) + 1 of [r / 2] belong to the lane's row r of queries.
#include "include/decode_e4m3.cuh"
#include "include/softmax_state.cuh"

// Queries are the rows of the products, 16 at a time.
template <bool TURNED> struct Fragments {
    using Order = KeyOrder<false>;
    template <int ROWS> using State = SoftmaxState<ROWS>;  // a row lies in 4 neighbouring lanes
    static constexpr int KEYS = 8, COLUMNS = 8;  // of a product

    static __device__ __forceinline__ int row(int lane, int r) { return 8 * r + lane / 4; }
    static __device__ __forceinline__ int first_key(int lane) { return lane % 4 * 2; }
    static __device__ __forceinline__ bool speaks(int lane) { return lane % 4 == 0; }  // one lane of each row

    // The lane that has key `own` of the same rows; its place there is 2 nt + c.
    static __device__ __forceinline__ int holder(int own, int lane) { return (lane & ~3) | own % 8 / 2; }
    static __device__ __forceinline__ int place(int own) { return own / 8 * 2 + own % 2; }
};

// Up to 8 queries are the columns of the products: S^T = K Q^T and O^T = V^T P^T. With so few that is half of the products; where 16 bits a
// number are read, that takes the time, and nothing is gained.
template <> struct Fragments<true> {
    struct Order {  // key of number c of product nt, counted from the lane's first one
        static __device__ constexpr int key(int nt, int c) { return 16 * nt + 8 * c; }
    };
    template <int ROWS> using State = SoftmaxState<ROWS, Fast32, 4, 16>;
    static constexpr int KEYS = 16, COLUMNS = 16;

    static __device__ __forceinline__ int row(int lane, int r) { return lane % 4 * 2 + r; }
    static __device__ __forceinline__ int first_key(int lane) { return lane / 4; }
    static __device__ __forceinline__ bool speaks(int lane) { return lane < 4; }
    static __device__ __forceinline__ int holder(int own, int lane) { return own % 8 * 4 + lane % 4; }
    static __device__ __forceinline__ int place(int own) { return own / 8; }
};

// D += A B, whose numbers lie in d as Fragments<true> has them: by columns.
__device__ __forceinline__ void mma_turned(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    float x[4] = {d[0], d[2], d[1], d[3]};
    mma_16x8x16<Fp16>(x, a, b0, b1);
    d[0] = x[0], d[1] = x[2], d[2] = x[1], d[3] = x[3];
}

// Where a lane's rows of queries begin, for ldmatrix_x4 of 8 queries x 32 features: two B fragments.
template <class Tile> __device__ __forceinline__ u32 fragment_q(u32 smem, int lane) { return smem + Tile::offset(lane % 8, lane / 8); }

// S^T = K Q^T of a warp, of prepared queries and keys without their scales. K_frag: of fragment_a.
template <class C> __device__ __forceinline__ void multiply_kq(
    float (&S_rmem)[1][C::NT][4], const u32 (&Q_rmem)[C::Q_IN_RMEM ? C::DQK / 32 : 1][1][4], u32 Q_frag, u32 K_frag) {
    clear(S_rmem);
#pragma unroll
    for (int k = 0; k < C::DQK / 32; ++k) {
        u32 q[4];
        if constexpr (C::Q_IN_RMEM) {
#pragma unroll
            for (int i = 0; i < 4; ++i) q[i] = Q_rmem[k][0][i];
        } else {
            ldmatrix_x4(q, C::QTile::fragment(Q_frag, 0, 2 * k));
        }
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt) {
            u32 b[4];  // 8 keys x 16 features each
            ldmatrix_x4(b, C::KTile::fragment(K_frag, nt, k));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 one = b[2 * half], other = b[2 * half + 1];  // the other 8 keys
                const u32 a[4] = {e4m3_to_fp16<0>(one), e4m3_to_fp16<0>(other), e4m3_to_fp16<1>(one), e4m3_to_fp16<1>(other)};
                mma_turned(S_rmem[0][nt], a, q[2 * half], q[2 * half + 1]);
            }
        }
    }
}

// O^T += V^T P^T of a warp for 16 keys, of weights that have the values' scales. V_frag: of fragment_b.
template <class C> __device__ __forceinline__ void multiply_vp(float (&O_rmem)[1][C::OT][4], const float (&P_rmem)[4], u32 V_frag, int k) {
    // By keys, two queries in a register; wanted are two keys of a query.
    const u32 b0 = transpose_8x8(pack2<Fp16>(P_rmem[0], P_rmem[2])), b1 = transpose_8x8(pack2<Fp16>(P_rmem[1], P_rmem[3]));
#pragma unroll
    for (int n = 0; n < C::OT / 2; ++n) {
        u32 a[4];
        ldmatrix_x4_transposed(a, C::VTile::fragment(V_frag, k, n));
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 16 columns, those with even numbers first
            const u32 one = every_other(a[half]), other = every_other(a[2 + half]);  // the other 8 keys
            const u32 v[4] = {e4m3_to_fp16<0>(one), e4m3_to_fp16<1>(one), e4m3_to_fp16<0>(other), e4m3_to_fp16<1>(other)};
            mma_turned(O_rmem[0][2 * n + half], v, b0, b1);
        }
    }
}
