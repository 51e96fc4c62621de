// PTX instructions as functions: the mnemonic with _ for each dot, the operands in PTX order, destinations by reference. translate.py
// turns the kernels' asm statements into calls of them.
#pragma once
#include <cmath>

#include "memory.hpp"

namespace ptx {

using namespace emulator;

template <class T, class From> T bits(From from) {
    static_assert(sizeof(T) == sizeof(From), "");
    T to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// ---- 16-bit numbers -----------------------------------------------------------------------------------------------------

struct Half {
    static float from(unsigned short x) {
        const int exponent = x >> 10 & 31, fraction = x & 1023;
        const float size = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? ldexpf(fraction + 1024, exponent - 25) : ldexpf(fraction, -24);
        return x & 0x8000 ? -size : size;
    }

    static unsigned short to(float x) {  // to nearest even
        const unsigned sign = bits<unsigned>(x) >> 16 & 0x8000;
        const float size = fabsf(x);
        if (size != size) return 0x7fff;
        if (size >= 65520.0f) return sign | 0x7c00;
        if (size < 6.103515625e-5f) return sign | unsigned(rintf(size * 16777216.0f));  // a denormal, or the smallest number above
        const unsigned u = bits<unsigned>(size);
        return sign | (((u + 0xfff + (u >> 13 & 1)) >> 13) - (112 << 10));
    }
};

struct Bfloat {
    static float from(unsigned short x) { return bits<float>(unsigned(x) << 16); }

    static unsigned short to(float x) {
        const unsigned u = bits<unsigned>(x);
        return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    }
};

template <class T> float number(unsigned short x) {
    static float* table = nullptr;
    if (!table) {
        table = new float[65536];
        for (int i = 0; i < 65536; ++i) table[i] = T::from(i);
    }
    return table[x];
}

template <class T> unsigned pack(float low, float high) { return T::to(low) | unsigned(T::to(high)) << 16; }

template <class T> unsigned fma2(unsigned a, unsigned b, unsigned c) {
    const auto one = [](unsigned x, unsigned y, unsigned z) { return float(double(T::from(x)) * T::from(y) + T::from(z)); };
    return pack<T>(one(a & 0xffff, b & 0xffff, c & 0xffff), one(a >> 16, b >> 16, c >> 16));
}

inline void cvt_rn_f16x2_f32(unsigned& d, float high, float low) { d = pack<Half>(low, high); }
inline void cvt_rn_bf16x2_f32(unsigned& d, float high, float low) { d = pack<Bfloat>(low, high); }
inline void cvt_rn_f16_f32(unsigned short& d, float a) { d = Half::to(a); }
inline void cvt_f32_f16(float& d, unsigned short a) { d = Half::from(a); }
inline void fma_rn_f16x2(unsigned& d, unsigned a, unsigned b, unsigned c) { d = fma2<Half>(a, b, c); }
inline void fma_rn_bf16x2(unsigned& d, unsigned a, unsigned b, unsigned c) { d = fma2<Bfloat>(a, b, c); }

// ---- registers ----------------------------------------------------------------------------------------------------------

inline unsigned tid_x() { return current; }
inline unsigned ctaid_x() { return block; }
template <class T> void mov_u32(T& d, unsigned a) { d = a; }
inline void mov_b32(unsigned& d, unsigned short low, unsigned short high) { d = low | unsigned(high) << 16; }
inline void mov_b32(unsigned short& low, unsigned short& high, unsigned a) { low = a, high = a >> 16; }

inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? 0.0f : x; }
inline void ex2_approx_ftz_f32(float& d, float a) { d = flushed(exp2f(flushed(a))); }
inline void rcp_approx_ftz_f32(float& d, float a) { d = flushed(1.0f / flushed(a)); }

// ---- memory -------------------------------------------------------------------------------------------------------------

inline void cp_async_cg_shared_global(unsigned to, const void* from, int bytes, int read) { begin_copy(to, from, bytes, read, "cp.async"); }
inline void cp_async_ca_shared_global(unsigned to, const void* from, int bytes, int read) { begin_copy(to, from, bytes, read, "cp.async"); }
inline void cp_async_cg_shared_global_L2_128B(unsigned to, const void* from, int bytes) { begin_copy(to, from, bytes, bytes, "cp.async"); }
inline void cp_async_commit_group() { commit_copies(); }
inline void cp_async_wait_group(int left) { wait_for_copies(left); }

template <class... D> void read_words(const void* from, D&... d) {
    const auto* word = static_cast<const unsigned*>(from);
    ((d = *word++), ...);
}

template <class... S> void write_words(unsigned char* to, S... s) {
    auto* word = reinterpret_cast<unsigned*>(to);
    ((*word++ = s), ...);
}

inline void ld_global_nc_b32(unsigned& x, const void* from) { read_words(read_global(from, 4, "ld.global"), x); }
inline void ld_global_nc_v2_b32(unsigned& x, unsigned& y, const void* from) { read_words(read_global(from, 8, "ld.global"), x, y); }
inline void ld_global_nc_v4_b32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, const void* from) {
    read_words(read_global(from, 16, "ld.global"), x, y, z, w);
}
inline void ld_shared_b32(unsigned& x, unsigned from) { read_words(read_shared(from, 4, "ld.shared"), x); }
inline void ld_shared_v4_b32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned from) {
    read_words(read_shared(from, 16, "ld.shared"), x, y, z, w);
}
inline void st_shared_b32(unsigned to, unsigned x) { write_words(write_shared(to, 4, "st.shared"), x); }
inline void st_shared_v2_b32(unsigned to, unsigned x, unsigned y) { write_words(write_shared(to, 8, "st.shared"), x, y); }
inline void st_shared_v4_b32(unsigned to, unsigned x, unsigned y, unsigned z, unsigned w) {
    write_words(write_shared(to, 16, "st.shared"), x, y, z, w);
}

// ---- instructions of a warp ---------------------------------------------------------------------------------------------

// Lane l names row l % 8 of matrix l / 8, and gets columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; transposed: rows of a column.
inline void load_matrices(unsigned& d0, unsigned& d1, unsigned& d2, unsigned& d3, unsigned row, bool transposed) {
    read_shared(row, 16, "ldmatrix");
    threads[current].in[0] = row;
    with_warp(transposed ? "ldmatrix.trans" : "ldmatrix", [transposed](Thread* lanes) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            const Thread* rows = lanes + 8 * matrix;
            for (int i = 0; i < 8; ++i)
                for (int j = 0; j < i; ++j)
                    if (rows[i].in[0] != rows[j].in[0] && rows[i].in[0] / 16 % 8 == rows[j].in[0] / 16 % 8)
                        fail("bank conflict: rows %d and %d of matrix %d of ldmatrix, at %u and %u", i, j, matrix, rows[i].in[0], rows[j].in[0]);
            for (int lane = 0; lane < WARP; ++lane) {
                unsigned short x[2];
                for (int e = 0; e < 2; ++e) {
                    const int a = lane / 4, b = lane % 4 * 2 + e;
                    memcpy(&x[e], smem + rows[transposed ? b : a].in[0] + 2 * (transposed ? a : b), 2);
                }
                lanes[lane].out[matrix] = x[0] | unsigned(x[1]) << 16;
            }
        }
    });
    const unsigned* out = threads[current].out;
    d0 = out[0], d1 = out[1], d2 = out[2], d3 = out[3];
}

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& d0, unsigned& d1, unsigned& d2, unsigned& d3, unsigned row) {
    load_matrices(d0, d1, d2, d3, row, false);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& d0, unsigned& d1, unsigned& d2, unsigned& d3, unsigned row) {
    load_matrices(d0, d1, d2, d3, row, true);
}

// D = A B + C, A 16 x DEPTH in DEPTH / 4 registers, B DEPTH x 8 in DEPTH / 8; sums are exact and rounded once.
template <class T, int DEPTH> void multiply(Thread* lanes) {
    constexpr int A_REGISTERS = DEPTH / 4, B_REGISTERS = DEPTH / 8;
    double A[16][DEPTH], B[DEPTH][8];
    for (int lane = 0; lane < WARP; ++lane) {
        const unsigned* in = lanes[lane].in + 4;
        const int g = lane / 4, t = lane % 4;
        for (int e = 0; e < 2; ++e) {
            for (int i = 0; i < A_REGISTERS; ++i) A[g + i % 2 * 8][2 * t + e + i / 2 * 8] = number<T>(in[i] >> 16 * e);
            for (int i = 0; i < B_REGISTERS; ++i) B[2 * t + e + 8 * i][g] = number<T>(in[A_REGISTERS + i] >> 16 * e);
        }
    }
    for (int row = 0; row < 16; ++row) {
        double sum[8] = {};
        for (int k = 0; k < DEPTH; ++k)
            for (int column = 0; column < 8; ++column) sum[column] += A[row][k] * B[k][column];
        for (int column = 0; column < 8; ++column) {
            Thread& lane = lanes[row % 8 * 4 + column / 2];
            const int i = row / 8 * 2 + column % 2;
            lane.out[i] = bits<unsigned>(float(bits<float>(lane.in[i]) + sum[column]));
        }
    }
}

template <class T, int DEPTH, class... AB>
void mma(const char* name, float& d0, float& d1, float& d2, float& d3, float c0, float c1, float c2, float c3, AB... ab) {
    const unsigned in[] = {bits<unsigned>(c0), bits<unsigned>(c1), bits<unsigned>(c2), bits<unsigned>(c3), ab...};
    memcpy(threads[current].in, in, sizeof in);
    with_warp(name, multiply<T, DEPTH>);
    const unsigned* out = threads[current].out;
    d0 = bits<float>(out[0]), d1 = bits<float>(out[1]), d2 = bits<float>(out[2]), d3 = bits<float>(out[3]);
}

#define MMA_16(NAME, TYPE) \
    inline void NAME(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, \
                     unsigned b1, float c0, float c1, float c2, float c3) { \
        mma<TYPE, 16>(#NAME, d0, d1, d2, d3, c0, c1, c2, c3, a0, a1, a2, a3, b0, b1); \
    }
MMA_16(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, Half)
MMA_16(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, Bfloat)

inline void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(
    float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned b0, float c0, float c1, float c2, float c3) {
    mma<Half, 8>("mma.m16n8k8", d0, d1, d2, d3, c0, c1, c2, c3, a0, a1, b0);
}

}  // namespace ptx
