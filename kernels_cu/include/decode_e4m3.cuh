// Keys and values in e4m3 with a scale for each token and head, under queries of 16 bits. C is the configuration of decode.cu.
//
// They are converted on their way from shared memory to the tensor cores, exactly, to fp16. So all products are in fp16: bfloat16 queries
// are brought into its range first, row by row, by a power of two. Scales of keys go to the scores, scales of values to the weights.
//
// An ldmatrix of 16-bit words brings a lane 4 neighbouring numbers where a product wants 2 and 2 others, so the order within 16 numbers
// changes: of a query's features in shared memory, and of the value columns; see column() in decode_warp.cuh.
#include "include/decode_load.cuh"
#include "include/mma.cuh"
#include "include/products.cuh"

// Two numbers in fp16: bytes 0 and 1, or 2 and 3, of a word.
template <int HALF> __device__ __forceinline__ u32 e4m3_to_fp16(u32 word) {
    u32 x;
#if CUFLASH_ARCH >= 890
    if constexpr (HALF == 0) asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a;}" : "=r"(x) : "r"(word));
    else asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, b;}" : "=r"(x) : "r"(word));
#else
    const u32 bytes = permute_bytes(word, 0, HALF == 0 ? 0x1404 : 0x3424);  // above zeros: byte 4 is one
    const u32 size = bytes >> 1 & 0x3f803f80u;
    const u32 nan = size + 0x00800080u & 0x40004000u;  // of 0x7f alone: then the exponent has ones only
    // The biases of the exponents differ by 8.
    asm("mul.f16x2 %0, %1, %2;" : "=r"(x) : "r"(size | nan | (bytes & 0x80008000u)), "r"(0x5c005c00u));
#endif
    return x;
}

// Number 0 and 2, or 1 and 3, of a word.
__device__ __forceinline__ u32 every_other(u32 word) { return permute_bytes(word, 0, 0x3120); }

// Whether one of 16 numbers is NaN.
template <> __device__ __forceinline__ bool any_not_finite<E4m3>(uint4 x) {
    const u32 words[4] = {x.x, x.y, x.z, x.w};
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;
    return (found & 0x80808080u) != 0;
}

// The queries of a part in shared memory: in fp16, each row divided by a power of two if they are bfloat16, which goes to `factors_smem`;
// and in every 16 features, (0, 1), (4, 5), (8, 9), (12, 13), then the others. For all threads of the block.
template <class C> __device__ __forceinline__ void prepare_queries(u32 Q_smem, u32 factors_smem, int thread) {
    using Tile = typename C::QTile;
    const int group = thread % 16;  // of 16 features
#pragma unroll 1
    for (int row = thread / 16; row < C::M; row += C::THREADS / 16) {
        const u32 at = Q_smem + group / (Tile::CHUNKS / 2) * Tile::BLOCK_BYTES;
        const int chunk = group % (Tile::CHUNKS / 2) * 2;
        const u32 place[2] = {at + Tile::offset(row, chunk), at + Tile::offset(row, chunk + 1)};
        uint4 a = make_uint4(0, 0, 0, 0), b = a;
        const bool here = group < C::DQK / 16;
        if (here) a = load_smem_16(place[0]), b = load_smem_16(place[1]);
        if constexpr (same<typename C::In, Bf16>) {
            u32* const words[8] = {&a.x, &a.y, &a.z, &a.w, &b.x, &b.y, &b.z, &b.w};
            float top = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float2 x = unpack2<Bf16>(*words[i]);
                top = fmaxf(top, fmaxf(fabsf(x.x), fabsf(x.y)));  // passes over NaN
            }
            top = fmaxf(top, shuffle_xor<1>(top)), top = fmaxf(top, shuffle_xor<2>(top));
            top = fmaxf(top, shuffle_xor<4>(top)), top = fmaxf(top, shuffle_xor<8>(top));
            // The row's largest number shall be from 2^14 on and below 2^15. Of tiny numbers, and with an infinity, it need not be.
            const u32 exponent = min(max(__float_as_uint(top) >> 23, 15u), 254u);
            const float inverse = __uint_as_float((268u - exponent) << 23), factor = __uint_as_float((exponent - 14u) << 23);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float2 x = unpack2<Bf16>(*words[i]);
                *words[i] = pack2<Fp16>(x.x * inverse, x.y * inverse);
            }
            if (group == 0) store_smem(factors_smem + 4 * row, __float_as_uint(factor));
        }
        if (here) {
            store_smem(place[0], make_uint4(a.x, a.z, b.x, b.z));
            store_smem(place[1], make_uint4(a.y, a.w, b.y, b.w));
        }
    }
}

// S_rmem = Q K^T of a warp, of prepared queries and keys without their scales.
template <class C> __device__ __forceinline__ void multiply_qk_e4m3(
    float (&S_rmem)[C::MT][C::NT][4], const u32 (&Q_rmem)[C::Q_IN_RMEM ? C::DQK / 16 : 1][C::MT][4], u32 Q_frag, u32 K_frag) {
    clear(S_rmem);
#pragma unroll
    for (int k = 0; k < C::DQK / 16; k += 2) {
        u32 a[2][C::MT][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                if constexpr (C::Q_IN_RMEM) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[half][mt][i] = Q_rmem[k + half][mt][i];
                } else {
                    ldmatrix_x4(a[half][mt], C::QTile::fragment(Q_frag, mt, k + half));
                }
            }
#pragma unroll
        for (int n = 0; n < C::NT / 2; ++n) {
            u32 b[4];  // 16 keys x 32 features: 8 keys x 16 features each
            ldmatrix_x4(b, C::KTile::fragment(K_frag, n, k / 2));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 b0 = e4m3_to_fp16<0>(b[i]), b1 = e4m3_to_fp16<1>(b[i]);
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) mma_16x8x16<Fp16>(S_rmem[mt][2 * n + i / 2], a[i % 2][mt], b0, b1);
            }
        }
    }
}

// O_rmem += P V of a warp for 16 keys, of weights that have the values' scales. Of 16 value columns, those with even numbers and those
// with odd ones are products of their own.
template <class C>
__device__ __forceinline__ void multiply_pv_e4m3(float (&O_rmem)[C::MT][C::OT][4], const u32 (&a)[C::MT][4], u32 V_frag, int k) {
#pragma unroll
    for (int n = 0; n < C::OT / 4; ++n) {
        u32 b[4];  // 16 keys x 32 columns; a lane has 2 keys x 2 columns of each 8 keys x 16 columns
        ldmatrix_x4_transposed(b, C::VTile::fragment(V_frag, k, n));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 low = every_other(b[2 * half]), high = every_other(b[2 * half + 1]);
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                mma_16x8x16<Fp16>(O_rmem[mt][4 * n + 2 * half], a[mt], e4m3_to_fp16<0>(low), e4m3_to_fp16<0>(high));
                mma_16x8x16<Fp16>(O_rmem[mt][4 * n + 2 * half + 1], a[mt], e4m3_to_fp16<1>(low), e4m3_to_fp16<1>(high));
            }
        }
    }
}

// The scales of a warp's values, in a unit that grows with them: so the weights that are multiplied by them stay in fp16's range. The
// accumulators are in the unit as well.
struct ValueUnit {
    static constexpr float LEAST = 1.175494351e-38f;  // 2^-126, the smallest number in full
    float unit;  // a power of two

    __device__ __forceinline__ void init() { unit = LEAST; }

    // A scale is at most 16 units. x: the scales of the lane's keys; they become multiples of the unit.
    template <int MT, int OT, int NT> __device__ __forceinline__ void fit(float (&x)[NT][2], float (&acc)[MT][OT][4]) {
        float top = 0.0f;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) top = fmaxf(top, fmaxf(fabsf(x[nt][0]), fabsf(x[nt][1])));
        if (__any_sync(0xffffffffu, top > 16.0f * unit)) {
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
            const float raised = fmaxf(unit, __uint_as_float(min(__float_as_uint(top), 0x7e800000u) & 0x7f800000u));
            const float factor = unit * inverse_of(raised);
            unit = raised;
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int ot = 0; ot < OT; ++ot)
#pragma unroll
                    for (int c = 0; c < 4; ++c) acc[mt][ot][c] *= factor;
        }
        const float inverse = inverse_of(unit);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) x[nt][0] *= inverse, x[nt][1] *= inverse;
    }

  private:
    static __device__ __forceinline__ float inverse_of(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }
};
